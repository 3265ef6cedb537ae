//! One list of fields for each kind of thing. A form is written once, by [`form!`]: its JSON, its JSON schema, its options on the
//! command line, and how the configuration reads it come from that list. A specification is written once, by [`spec!`]: what is
//! stored, and what a reload or a second PUT compares, come from that one.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use crate::size::Size;

/// A body of a request, whose fields are known by name.
pub trait Form {
    /// Names of the fields as JSON has them, other names that are accepted included.
    const FIELDS: &'static [&'static str];
    /// Names that fields had before, each with the one of today. They are read too; the configuration's reader warns of them.
    const OLD_FIELDS: &'static [(&'static str, &'static str)] = &[];
}

/// Where a form's fields are read from: a table of the configuration. A field that is there and cannot be read is noted by the
/// source, with its place; reading goes on.
pub trait FieldSource {
    /// Whether the field is there, readable or not.
    fn has(&self, field: &str) -> bool;
    /// A text.
    fn text(&mut self, field: &'static str) -> Option<String>;
    /// A path, absolute.
    fn path(&mut self, field: &'static str) -> Option<PathBuf>;
    /// A number, not negative.
    fn number(&mut self, field: &'static str) -> Option<u64>;
    /// A number that fits 32 bits.
    fn small(&mut self, field: &'static str) -> Option<u32>;
    /// Yes or no.
    fn switch(&mut self, field: &'static str) -> Option<bool>;
    /// A size: a number of bytes, or a text.
    fn size(&mut self, field: &'static str) -> Option<Size>;
    /// A text that a type reads. Its error says `REASON: write REMEDY`.
    fn parsed<T: FromStr<Err: Display>>(&mut self, field: &'static str) -> Option<T>;
    /// The same where a number is a text without its quotes.
    fn parsed_or_number<T: FromStr<Err: Display>>(&mut self, field: &'static str) -> Option<T>;
    /// One of some words.
    fn word<T>(&mut self, field: &'static str, of: impl Fn(&str) -> Option<T>, words: &[&str]) -> Option<T>;
}

/// What a field of a form can hold.
pub trait FieldValue: Sized {
    /// Reads the field, if it is there.
    fn read(source: &mut impl FieldSource, field: &'static str) -> Option<Self>;

    /// Stands for a value that is there and could not be read, where leaving it out would be a flaw of its own: that it is there is
    /// enough to look at the other fields.
    fn stand_in(_field: &'static str) -> Option<Self> {
        None
    }

    /// The value, or what stands for one that cannot be read.
    fn read_or_stand_in(source: &mut impl FieldSource, field: &'static str) -> Option<Self> {
        Self::read(source, field).or_else(|| source.has(field).then(|| Self::stand_in(field)).flatten())
    }
}

/// Values that a method of [`FieldSource`] reads; behind the bar, for which field what stands in.
macro_rules! values {
    ($($kind:ty: $method:ident $(| $($field:literal),+ => $value:expr)?;)*) => {$(
        impl $crate::spec::FieldValue for $kind {
            fn read(source: &mut impl $crate::spec::FieldSource, field: &'static str) -> Option<Self> {
                source.$method(field)
            }

            $(fn stand_in(field: &'static str) -> Option<Self> {
                [$($field),+].contains(&field).then(|| $value)
            })?
        }
    )*};
}

values! {
    PathBuf: path | "path" => "/".into();
    String: text | "switch", "tap" => "none".to_owned();
    Size: size | "memory" => Size(1 << 20);
    u64: number;
    u32: small;
    bool: switch;
}

/// A form: each field may be left out. In brackets is how clap has it; the comment is its help; behind `was` is the name that it had before.
macro_rules! form {
    (
        $(#[doc = $about:literal])*
        $name:ident {
            $($(#[doc = $($doc:tt)+])+ $([$($cli:tt)*])? $field:ident $(was $old:literal)?: $kind:ty,)*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "clap", derive(clap::Args))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $(
                $(#[doc = $($doc)+])+
                $(#[cfg_attr(feature = "clap", arg($($cli)*))])?
                $(#[serde(alias = $old)])?
                // A daemon from before a word has changed knows what is left out.
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $field: Option<$kind>,
            )*
        }

        impl $crate::spec::Form for $name {
            const FIELDS: &'static [&'static str] = &[$(stringify!($field)),*];
            const OLD_FIELDS: &'static [(&'static str, &'static str)] = &[$($(($old, stringify!($field)),)?)*];
        }

        impl $name {
            /// Reads every field that `source` has.
            pub fn read(source: &mut impl $crate::spec::FieldSource) -> Self {
                $name { $($field: $crate::spec::FieldValue::read_or_stand_in(source, stringify!($field)),)* }
            }
        }
    };
}

/// What is made of the list of a specification's fields.
pub trait SpecFields: Sized {
    /// The fields of `configured` where they differ from `base`, what the configuration was; the fields of `now` elsewhere.
    fn three_way(base: &Self, configured: &Self, now: &Self) -> Self;

    /// Fields of the form in which this one, as somebody asks for it, differs from `other`.
    fn differing(&self, other: &Self) -> Vec<&'static str>;
}

/// A specification: complete, stored, and compared field by field. Behind the arrow of a field that stands for several of the form:
/// what says in which of those two values differ.
macro_rules! spec {
    (@form $spec:ident, $other:ident, $field:ident) => { [stringify!($field)] };
    (@form $spec:ident, $other:ident, $field:ident, $of:path) => { $of(&$spec.$field, &$other.$field) };
    (
        $(#[doc = $about:literal])*
        $name:ident {
            $($(#[$meta:meta])+ $field:ident: $kind:ty $(=> $of:path)?,)*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$meta])+ pub $field: $kind,)*
        }

        impl $crate::spec::SpecFields for $name {
            fn three_way(base: &Self, configured: &Self, now: &Self) -> Self {
                $name { $($field: $crate::spec::pick(&base.$field, &configured.$field, &now.$field),)* }
            }

            fn differing(&self, other: &Self) -> Vec<&'static str> {
                let mut names = Vec::new();
                $(if self.$field != other.$field {
                    names.extend($crate::spec::spec!(@form self, other, $field $(, $of)?));
                })*
                names
            }
        }
    };
}

/// Methods of [`ServedSpec`](crate::spec::ServedSpec) that every kind answers by a field of the same name.
macro_rules! served_fields {
    () => {
        fn name(&self) -> &str {
            &self.name
        }

        fn socket(&self) -> Option<&std::path::Path> {
            self.socket.as_deref()
        }

        fn guest_memory(&self) -> $crate::spec::MemoryWord {
            self.guest_memory
        }
    };
}

/// The names of those fields in which two values differ: `differing!(field: one, other; ...)`. Fields of the same name as in the
/// form need no name.
macro_rules! differing {
    ($($name:ident: $one:expr, $other:expr;)*) => {{
        let mut names: Vec<&'static str> = Vec::new();
        $(if $one != $other {
            names.push(stringify!($name));
        })*
        names
    }};
}

pub(super) use {differing, form, served_fields, spec, values};

#[cfg(test)]
mod tests {
    use super::Form;
    use crate::request::QuiesceForm;
    use crate::spec::{CoreForm, DiskForm};

    fn check<F: Form + serde::de::DeserializeOwned>(values: &[&str]) {
        let changelog = include_str!("../../../../CHANGELOG.md");
        assert_eq!(F::OLD_FIELDS.len(), values.len());
        for ((old, new), value) in F::OLD_FIELDS.iter().zip(values) {
            assert!(F::FIELDS.contains(new) && !F::FIELDS.contains(old), "{old}, {new}");
            let read = |key: &str| serde_json::from_str::<F>(&format!("{{\"{key}\": {value}}}"));
            assert!(read(new).is_ok() && read(old).is_ok(), "{old} is not read as {new} is");
            let row = |line: &&str| line.contains(&format!("`{old}`")) && line.contains(&format!("`{new}`"));
            assert!(changelog.lines().any(|line| row(&line)), "no row of CHANGELOG.md has {old} and {new}");
        }
    }

    #[test]
    fn old_fields_are_read_and_stand_in_the_changelog() {
        check::<DiskForm>(&["\"/run/a.sock\""]);
        check::<CoreForm>(&["\"nice\""]);
        check::<QuiesceForm>(&["true"]);
    }
}
