//! Choices: enumerations whose variants are words in the configuration, the API and on the command line.

/// An enumeration of words, perhaps with what the crate below calls each.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident, $default:ident, $($(#[$vdoc:meta])* $variant:ident $word:literal => $value:expr,)*; $target:ty) => {
        words! { $(#[$doc])* $name, $default, $($(#[$vdoc])* $variant $word,)* }

        impl $name {
            /// As the crate below calls it.
            pub fn below(self) -> $target {
                match self { $($name::$variant => $value,)* }
            }
        }
    };
    ($(#[$doc:meta])* $name:ident, $default:ident, $($(#[$vdoc:meta])* $variant:ident $word:literal,)*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $word)] #[value(name = $word)] $variant,)* }

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
