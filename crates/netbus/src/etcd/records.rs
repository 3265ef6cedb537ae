//! The keys of a directory in etcd, and what stands under them. Whoever may write to etcd may have written it: everything is checked as it is read.
//!
//! | key | value | lease |
//! |---|---|---|
//! | `ioplane/v1/names/NAME` | [`Entry`]: whose the name is, and of the device what lasts | none |
//! | `ioplane/v1/states/HOST/NAME` | [`Entry`]: the device as its host last said it | of the host's session |
//! | `ioplane/v1/hosts/HOST` | [`Present`]: which daemon of the host has a session | of that session |

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::device::{DeviceRecord, check_kept};
use crate::error::NetbusError;
use crate::names::{is_host, is_name, printable, shown};

/// All names.
pub(super) const NAMES: &str = "ioplane/v1/names/";
/// What changes all the time.
pub(super) const STATES: &str = "ioplane/v1/states/";
/// Which hosts are there.
pub(super) const HOSTS: &str = "ioplane/v1/hosts/";

/// The version of the values.
const VERSION: u32 = 1;
/// Longest value, bytes: one device with its texts.
const LONGEST_VALUE: usize = 8 << 10;

pub(super) fn name_key(name: &str) -> String {
    format!("{NAMES}{name}")
}

pub(super) fn state_key(host: &str, name: &str) -> String {
    format!("{STATES}{host}/{name}")
}

pub(super) fn host_key(host: &str) -> String {
    format!("{HOSTS}{host}")
}

/// A device of a host. Fields that are not known are passed over, so that later programs can say more without another version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    version: u32,
    pub(super) host: String,
    pub(super) device: DeviceRecord,
}

/// The session of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Present {
    version: u32,
    pub(super) daemon: String,
}

impl Entry {
    pub(super) fn new(host: &str, device: DeviceRecord) -> Entry {
        Entry { version: VERSION, host: host.to_owned(), device }
    }

    /// Reads what stands under the key of a name.
    pub(super) fn of_name(key: &[u8], value: &[u8]) -> Result<Entry, NetbusError> {
        let name = after(NAMES, key)?;
        let entry: Entry = read(key, value)?;
        check_kept(name, &entry.host, &entry.device).map_err(|why| unreadable(key, &why))?;
        Ok(entry)
    }

    /// Reads what stands under the key of a state.
    pub(super) fn of_state(key: &[u8], value: &[u8]) -> Result<Entry, NetbusError> {
        let (host, name) =
            after(STATES, key)?.split_once('/').ok_or_else(|| unreadable(key, "it names no device"))?;
        let entry: Entry = read(key, value)?;
        check_kept(name, &entry.host, &entry.device).map_err(|why| unreadable(key, &why))?;
        if entry.host != host {
            return Err(unreadable(key, &format!("it is of {}", entry.host)));
        }
        Ok(entry)
    }

    pub(super) fn text(&self) -> Result<Vec<u8>, NetbusError> {
        written(self)
    }
}

impl Present {
    pub(super) fn new(daemon: &str) -> Present {
        Present { version: VERSION, daemon: daemon.to_owned() }
    }

    /// Reads what stands under the key of a host, and the host.
    pub(super) fn of_host(key: &[u8], value: &[u8]) -> Result<(String, Present), NetbusError> {
        let host = after(HOSTS, key)?;
        if !is_host(host) {
            return Err(unreadable(key, "that is no name of a host"));
        }
        let present: Present = read(key, value)?;
        if !is_name(&present.daemon) {
            return Err(unreadable(key, "that is no name of a daemon"));
        }
        Ok((host.to_owned(), present))
    }

    pub(super) fn text(&self) -> Result<Vec<u8>, NetbusError> {
        written(self)
    }
}

/// Of a value only its version, which says whether the rest can be understood.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

fn read<T: DeserializeOwned>(key: &[u8], value: &[u8]) -> Result<T, NetbusError> {
    if value.len() > LONGEST_VALUE {
        return Err(unreadable(key, &format!("{} bytes; there are at most {LONGEST_VALUE}", value.len())));
    }
    let failed = |error: serde_json::Error| unreadable(key, &error.to_string());
    let Versioned { version } = serde_json::from_slice(value).map_err(failed)?;
    if version != VERSION {
        return Err(unreadable(key, &format!("it has version {version}, and this host knows {VERSION}")));
    }
    serde_json::from_slice(value).map_err(failed)
}

fn written(value: &impl Serialize) -> Result<Vec<u8>, NetbusError> {
    let text = serde_json::to_vec(value).map_err(|error| NetbusError::Malformed(error.to_string()))?;
    if text.len() > LONGEST_VALUE { Err(NetbusError::Long(text.len())) } else { Ok(text) }
}

/// What follows `prefix` in a key.
fn after<'k>(prefix: &str, key: &'k [u8]) -> Result<&'k str, NetbusError> {
    let rest = std::str::from_utf8(key).ok().and_then(|key| key.strip_prefix(prefix));
    rest.ok_or_else(|| unreadable(key, &format!("it is none of {prefix}")))
}

fn unreadable(key: &[u8], why: &str) -> NetbusError {
    let key = String::from_utf8_lossy(key);
    NetbusError::EtcdValue { key: shown(&key), why: printable(why) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(entry: Result<Entry, NetbusError>, why: &str) {
        let error = entry.unwrap_err().to_string();
        assert!(error.contains(why) && !error.chars().any(char::is_control), "{error}");
    }

    #[test]
    fn what_is_written_is_read() {
        let entry = Entry::new("host-a", DeviceRecord::sample("x"));
        let text = entry.text().unwrap();
        assert_eq!(Entry::of_name(name_key("x").as_bytes(), &text).unwrap(), entry);
        assert_eq!(Entry::of_state(state_key("host-a", "x").as_bytes(), &text).unwrap(), entry);
        let present = Present::new("d1");
        let read = Present::of_host(host_key("host-a").as_bytes(), &present.text().unwrap()).unwrap();
        assert_eq!(read, ("host-a".to_owned(), present));
        // A later program may say more.
        let more = String::from_utf8(text).unwrap().replacen('{', r#"{"rack":7,"#, 1);
        assert_eq!(Entry::of_name(name_key("x").as_bytes(), more.as_bytes()).unwrap(), entry);
    }

    #[test]
    fn what_somebody_else_wrote_is_named() {
        let text = Entry::new("host-a", DeviceRecord::sample("x")).text().unwrap();
        let say = |from: &str, to: &str| String::from_utf8(text.clone()).unwrap().replace(from, to);
        let named = |key: &str, value: &str| Entry::of_name(key.as_bytes(), value.as_bytes());
        let good = say("", "");
        refused(named("other/x", &good), "none of ioplane/v1/names/");
        refused(Entry::of_name(b"ioplane/v1/names/\xff", good.as_bytes()), "none of");
        refused(named(&name_key("y"), &good), "it is the device x");
        refused(named(&name_key("x"), "{"), "EOF");
        refused(named(&name_key("x"), "[]"), "invalid");
        refused(named(&name_key("x"), "{}"), "version");
        refused(named(&name_key("x"), &say("\"version\":1", "\"version\":2")), "version 2");
        refused(named(&name_key("x"), &say("host-a", "../host")), "no name of a host");
        refused(named(&name_key("x"), &say("byte-stream", "a\\u001b[2J")), "the kind of x");
        refused(named(&name_key("../x"), &say("\"x\"", "\"../x\"")), "no name of a device");
        refused(named(&name_key("x"), &say("7/x", &"x".repeat(9000))), "there are at most 8192");
        let state = |key: &str| Entry::of_state(key.as_bytes(), good.as_bytes());
        refused(state(&state_key("host-b", "x")), "it is of host-a");
        refused(state("ioplane/v1/states/x"), "names no device");
        for (key, value) in [
            ("ioplane/v1/hosts/", r#"{"version":1,"daemon":"d"}"#),
            ("ioplane/v1/hosts/a b", r#"{"version":1,"daemon":"d"}"#),
            ("ioplane/v1/hosts/a", r#"{"version":1,"daemon":"../d"}"#),
            ("ioplane/v1/hosts/a", r#"{"version":1}"#),
        ] {
            let read = Present::of_host(key.as_bytes(), value.as_bytes());
            assert!(matches!(read, Err(NetbusError::EtcdValue { .. })), "{key} {value}");
        }
    }

    proptest! {
        #[test]
        fn no_value_is_too_hostile(key in prop::collection::vec(any::<u8>(), 0..60), value in prop::collection::vec(any::<u8>(), 0..200)) {
            for prefix in [NAMES, STATES, HOSTS, ""] {
                let key = [prefix.as_bytes(), &key].concat();
                prop_assert!(Entry::of_name(&key, &value).is_err());
                prop_assert!(Entry::of_state(&key, &value).is_err());
                prop_assert!(Present::of_host(&key, &value).is_err());
            }
        }

        #[test]
        fn a_value_that_was_damaged_is_read_as_something_good_or_refused(at in 0usize..400, with in any::<u8>()) {
            let mut text = Entry::new("host-a", DeviceRecord::sample("x")).text().unwrap();
            let at = at % text.len();
            text[at] = with;
            if let Ok(entry) = Entry::of_name(name_key("x").as_bytes(), &text) {
                entry.device.check().unwrap();
                prop_assert!(is_host(&entry.host) && entry.device.name == "x");
            }
        }
    }
}
