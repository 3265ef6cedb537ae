//! A place in the guest's kernel, as its symbols call it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A function of the guest's kernel, and how far into it. Serialized as it is shown: `acpi_pm_read+0x12`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct GuestFunction {
    /// The function; one of a module has that behind its name: `e1000_clean [e1000]`.
    pub name: String,
    /// Bytes from where it begins.
    pub offset: u64,
}

impl fmt::Display for GuestFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.offset {
            0 => f.write_str(&self.name),
            offset => write!(f, "{}+{offset:#x}", self.name),
        }
    }
}

impl From<GuestFunction> for String {
    fn from(function: GuestFunction) -> String {
        function.to_string()
    }
}

impl From<String> for GuestFunction {
    fn from(text: String) -> GuestFunction {
        let parts = text.rsplit_once("+0x").and_then(|(name, offset)| {
            Some(GuestFunction { name: name.to_owned(), offset: u64::from_str_radix(offset, 16).ok()? })
        });
        parts.unwrap_or(GuestFunction { name: text, offset: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_read_back() {
        for (name, offset, shown) in [
            ("acpi_pm_read", 0x12, "acpi_pm_read+0x12"),
            ("probe [planted]", 0, "probe [planted]"),
            ("a+b", 1, "a+b+0x1"),
        ] {
            let function = GuestFunction { name: name.into(), offset };
            assert_eq!(serde_json::to_string(&function).unwrap(), format!("{shown:?}"));
            assert_eq!(GuestFunction::from(shown.to_owned()), function);
        }
        assert_eq!(GuestFunction::from("odd+0xyz".to_owned()).offset, 0);
    }
}
