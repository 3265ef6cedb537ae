//! Choices: enumerations whose variants are words in the configuration, the API and on the command line.

/// An enumeration of words. `stands` behind the default: it stands for one that is there and cannot be read.
macro_rules! words {
    (@stand_in) => { None };
    (@stand_in $stands:ident) => { Some(Self::default()) };
    ($(#[$doc:meta])* $name:ident, $default:ident, $($stands:ident,)? $($(#[$vdoc:meta])+ $variant:ident $word:literal,)*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub enum $name {
            $($(#[$vdoc])+ #[serde(rename = $word)] #[cfg_attr(feature = "clap", value(name = $word))] $variant,)*
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

        impl $crate::spec::FieldValue for $name {
            fn read(source: &mut impl $crate::spec::FieldSource, field: &'static str) -> Option<Self> {
                source.word(field, Self::of, Self::WORDS)
            }

            fn stand_in(_field: &'static str) -> Option<Self> {
                words!(@stand_in $($stands)?)
            }
        }
    };
}
