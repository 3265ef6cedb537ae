//! What an exporter writes down of a claim.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::{LONGEST_NAME, is_holder, readable};

/// Longest record that is read.
const LONGEST: usize = 2048;
const FIRST: &str = "ioplane-claim 1";

/// The claim that was granted last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRecord {
    /// Its number: each claim has a greater one than the one before. 0, and not held: none yet.
    pub generation: u64,
    /// Whose it is.
    pub holder: String,
    /// Who that is, for people.
    pub name: String,
    /// When it was granted, or released, in seconds since 1970.
    pub since: u64,
    /// It has not been released.
    pub held: bool,
}

fn sum(text: &str) -> String {
    Sha256::digest(text).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

impl ClaimRecord {
    /// As it is written down.
    pub fn encode(&self) -> String {
        let state = if self.held { "held" } else { "released" };
        let ClaimRecord { generation, holder, name, since, .. } = self;
        let mut text = format!(
            "{FIRST}\ngeneration {generation}\nstate {state}\nsince {since}\nholder {holder}\nname {}\n",
            readable(name)
        );
        let sum = sum(&text);
        let _ = writeln!(text, "sum {sum}");
        text
    }

    /// What was written down, if it is all there and as it was written; otherwise what is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<ClaimRecord, String> {
        if bytes.len() > LONGEST {
            return Err(format!("it has {} bytes, more than any record", bytes.len()));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| "it is no text".to_owned())?;
        let (body, last) = text
            .strip_suffix('\n')
            .and_then(|whole| whole.rfind('\n').map(|at| whole.split_at(at + 1)))
            .ok_or("it is cut off")?;
        if last.strip_prefix("sum ") != Some(&sum(body)) {
            return Err("it is cut off or was changed: its sum is wrong".to_owned());
        }
        let mut lines = body.lines();
        match lines.next() {
            Some(FIRST) => {}
            other => {
                return Err(format!("it begins with {:.40?}: another version?", other.unwrap_or_default()));
            }
        }
        let mut field = |name: &str| {
            let value = lines.next().and_then(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.ok_or_else(|| format!("its {name} is missing"))
        };
        let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{text:.40?} is no number"));
        let generation = number(field("generation")?)?;
        let held = match field("state")? {
            "held" => true,
            "released" => false,
            other => return Err(format!("{other:.40?} is no state")),
        };
        let (since, holder, name) = (number(field("since")?)?, field("holder")?, field("name")?);
        if (generation == 0 && held)
            || !is_holder(holder)
            || name.len() > LONGEST_NAME
            || lines.next().is_some()
        {
            return Err("it says what cannot be".to_owned());
        }
        Ok(ClaimRecord { generation, holder: holder.to_owned(), name: name.to_owned(), since, held })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> ClaimRecord {
        ClaimRecord {
            generation: 7,
            holder: "host-b/3f".into(),
            name: "data of host-b".into(),
            since: 9,
            held: true,
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        for record in [record(), ClaimRecord { held: false, generation: u64::MAX, ..record() }] {
            assert_eq!(ClaimRecord::decode(record.encode().as_bytes()), Ok(record));
        }
    }

    #[test]
    fn a_record_that_is_cut_off_or_changed_is_refused_whole() {
        let whole = record().encode();
        for cut in 0..whole.len() {
            assert!(ClaimRecord::decode(&whole.as_bytes()[..cut]).is_err(), "{cut} bytes");
        }
        for at in 0..whole.len() {
            let mut other = whole.clone().into_bytes();
            other[at] ^= 1;
            assert!(ClaimRecord::decode(&other).is_err(), "byte {at}");
        }
        for lie in [
            ClaimRecord { generation: 0, ..record() },
            ClaimRecord { holder: "a b".into(), ..record() },
            ClaimRecord { holder: "a\nstate released".into(), ..record() },
        ] {
            assert!(ClaimRecord::decode(lie.encode().as_bytes()).is_err(), "{lie:?}");
        }
        assert!(ClaimRecord::decode(&[b'x'; LONGEST + 1]).unwrap_err().contains("bytes"));
        let long = ClaimRecord { name: "x\n".repeat(LONGEST_NAME), ..record() };
        assert_eq!(ClaimRecord::decode(long.encode().as_bytes()).unwrap().name.len(), LONGEST_NAME);
    }
}
