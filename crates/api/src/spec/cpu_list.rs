//! Lists of processors, as the kernel writes them.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::address::{as_text, from_text};

/// Processors beyond which a list is not believed.
const MOST_CPUS: u32 = 65_536;

/// Processors of a host, as a text: `0-3,8`. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(BTreeSet<u32>);

/// A text that is no such list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a list of processors: write numbers and ranges as in 0-3,8")]
pub struct NotACpuList(String);

impl CpuList {
    /// The processors.
    pub fn cpus(&self) -> &BTreeSet<u32> {
        &self.0
    }
}

impl FromStr for CpuList {
    type Err = NotACpuList;

    fn from_str(text: &str) -> Result<Self, NotACpuList> {
        let wrong = || NotACpuList(text.chars().take(40).collect());
        let number = |part: &str| {
            let digits = part.bytes().all(|b| b.is_ascii_digit());
            part.parse().ok().filter(|cpu: &u32| digits && *cpu < MOST_CPUS)
        };
        let mut cpus = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = number(first).zip(number(last)).ok_or_else(wrong)?;
            if first > last {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        Ok(CpuList(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(first) = left.next() {
            let mut last = first;
            while let Some(next) = left.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

as_text!(CpuList, {
    "type": "string",
    "description": "Processors of the host, as the kernel writes them: 0-3,8.",
    "pattern": "^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$",
});
from_text!(CpuList);
super::values! {
    CpuList: parsed_or_number;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        for (text, same) in
            [("3", "3"), ("0-3,8", "0-3,8"), ("8,0,1-2,1", "0-2,8"), ("5-5", "5"), ("0,2", "0,2")]
        {
            let list: CpuList = text.parse().expect(text);
            assert_eq!(list.to_string(), same);
            let json = serde_json::to_string(&list).unwrap();
            assert_eq!(serde_json::from_str::<CpuList>(&json).unwrap(), list);
        }
        for text in ["", ",", "0,", "3-1", "-1", "1-", "a", "0 ", "+1", "0-65536", "0-4294967296"] {
            let error = text.parse::<CpuList>().expect_err(text);
            assert!(error.to_string().contains("0-3,8"), "{error}");
        }
    }
}
