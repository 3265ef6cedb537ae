//! Lists of hosts.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::address::{as_text, from_text};

/// Most hosts of one list.
const MOST: usize = 1024;

/// Hosts, by the names in their certificates: `host-b,host-c`. In lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostList(BTreeSet<String>);

/// A text that is no such list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a list of host names: write them as in host-b,host-c")]
pub struct NotAHostList(String);

impl HostList {
    /// Whether a host is in it.
    pub fn has(&self, host: &str) -> bool {
        self.0.contains(host)
    }
}

/// Of the names that certificates have (RFC 1035, section 2.3.1).
fn is_name(text: &str) -> bool {
    let label = |label: &str| {
        let plain = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        (1..=63).contains(&label.len()) && plain && !label.starts_with('-') && !label.ends_with('-')
    };
    text.len() <= 253 && text.split('.').all(label)
}

impl FromStr for HostList {
    type Err = NotAHostList;

    fn from_str(text: &str) -> Result<Self, NotAHostList> {
        let wrong = || NotAHostList(text.chars().take(60).collect());
        let hosts: BTreeSet<String> = text.split(',').map(|host| host.trim().to_ascii_lowercase()).collect();
        let good = hosts.len() <= MOST && hosts.iter().all(|host| is_name(host));
        if good { Ok(HostList(hosts)) } else { Err(wrong()) }
    }
}

impl fmt::Display for HostList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        for host in &self.0 {
            write!(f, "{comma}{host}")?;
            comma = ",";
        }
        Ok(())
    }
}

as_text!(HostList, {
    "type": "string",
    "description": "Hosts, by the names in their certificates: host-b,host-c.",
    "pattern": "^[0-9A-Za-z.-]+(,[0-9A-Za-z.-]+)*$",
});
from_text!(HostList);
super::values! {
    HostList: parsed;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        for (text, same) in
            [("host-b", "host-b"), ("c,Host-B, a.example", "a.example,c,host-b"), ("b,b", "b")]
        {
            let list: HostList = text.parse().expect(text);
            assert_eq!(list.to_string(), same);
            let json = serde_json::to_string(&list).unwrap();
            assert_eq!(serde_json::from_str::<HostList>(&json).unwrap(), list);
        }
        assert!("host-b".parse::<HostList>().unwrap().has("host-b"));
        for text in ["", ",", "a,", "../b", "a b", "*", "-a", "a_b", "a..b"] {
            assert!(text.parse::<HostList>().is_err(), "{text:?}");
        }
    }
}
