//! Names of hosts.

use std::fmt;
use std::str::FromStr;

use crate::error::IdentityError;

/// A host's name as its certificate has it: DNS's letters, in lower case. It is never a path, an address or empty.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(String);

/// Longest name, and longest part between dots (RFC 1035, section 2.3.4).
const LONGEST: usize = 253;
const LONGEST_LABEL: usize = 63;

/// The name under which a process with the authority's key answers hosts that join. No host gets a certificate for it, so no host can answer in its place.
pub const ANSWERING: &str = "authority.ioplane.invalid";

impl HostName {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HostName {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<HostName, IdentityError> {
        let label = |label: &str| {
            (1..=LONGEST_LABEL).contains(&label.len())
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        // A last label of digits makes an IPv4 address of it.
        let number =
            text.rsplit('.').next().is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()));
        if text.len() > LONGEST || number || !text.split('.').all(label) {
            return Err(IdentityError::Name(text.chars().take(64).collect()));
        }
        let name = text.to_ascii_lowercase();
        if name == ANSWERING {
            return Err(IdentityError::Reserved(name));
        }
        Ok(HostName(name))
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_of_hosts() {
        for good in ["a", "host-a", "HOST-A", "a.example.org", "10a", "10.0.0.x1"] {
            assert_eq!(good.parse::<HostName>().unwrap().as_str(), good.to_lowercase());
        }
        let long = ["x".repeat(64), vec!["x".repeat(60); 5].join(".")];
        let bad = [
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "../a",
            "a/b",
            "a b",
            "a\0",
            "-a",
            "a-",
            "10.0.0.1",
            "7",
            "::1",
            "hé",
            "*",
            ANSWERING,
            "AUTHORITY.ioplane.invalid",
        ];
        for bad in bad.into_iter().chain(long.iter().map(String::as_str)) {
            assert!(bad.parse::<HostName>().is_err(), "{bad:?}");
        }
    }

    proptest! {
        /// Whatever is accepted can stand in a file name, and is read back as itself.
        #[test]
        fn what_is_accepted_is_harmless(text in any::<String>()) {
            if let Ok(name) = text.parse::<HostName>() {
                prop_assert!(!name.as_str().is_empty() && name.as_str().len() <= LONGEST);
                prop_assert!(!name.as_str().contains(['/', '\0', '*', '\\']) && !name.as_str().starts_with('.'));
                prop_assert_eq!(name.as_str().parse::<HostName>().unwrap(), name);
            }
        }
    }
}
