//! Choices: enumerations whose variants are words in the configuration, the API and on the command line.

/// An enumeration of words.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident, $default:ident, $($(#[$vdoc:meta])* $variant:ident $word:literal,)*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $word)] #[cfg_attr(feature = "clap", value(name = $word))] $variant,)*
        }

        impl $name {
            /// Every word.
            pub const WORDS: &[&str] = &[$($word,)*];

            /// The one with this name.
            pub fn of(word: &str) -> Option<Self> {
                match word { $($word => Some($name::$variant),)* _ => None }
            }

            /// Its name.
            pub fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)* }
            }
        }

        impl Default for $name {
            fn default() -> Self { $name::$default }
        }
    };
}
