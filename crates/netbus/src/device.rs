//! What a host says of a device that it publishes.

use serde::{Deserialize, Serialize};

use crate::limits::MOST_DEVICES;
use crate::names::{is_host, is_name, shown};

/// Longest text of a device, bytes.
const LONGEST: usize = 640;
/// Most rates of a device.
const MOST_RATES: usize = 4;

/// How much of something per second all users of a device may have together, and how much of that is promised to some of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRate {
    /// What is counted, such as `bytes`. The directory knows no units.
    pub unit: String,
    /// So many of them per second.
    pub capacity: u64,
    /// Of which so many are promised.
    pub reserved: u64,
}

/// A device that a host publishes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRecord {
    /// Its name, of which there is one in a directory.
    pub name: String,
    /// What kind of device it is, such as `disk`. The directory knows no kinds.
    pub kind: String,
    /// Bytes, for those that have a size.
    pub size: Option<u64>,
    /// Where it is used: whatever a program that knows the kind needs to reach it.
    pub location: String,
    /// Nobody can change it.
    pub read_only: bool,
    /// Connections that use it at the moment.
    pub users: u32,
    /// Who holds it, where only one may use it at a time: a text for people.
    pub holder: Option<String>,
    /// What is wrong with it, if anything.
    pub trouble: Option<String>,
    /// What it is declared to be able to do, in each unit in which that is declared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rates: Vec<DeviceRate>,
}

/// What is wrong with what a peer says of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceFlaw {
    /// No name, or none that can be shown, or be part of a path.
    #[error("{0:?} is no name of a device")]
    Name(String),
    /// A text that is too long or has characters that cannot be shown.
    #[error("the {1} of {0} is {2} bytes long, or has characters that cannot be shown")]
    Text(String, &'static str, usize),
    /// More rates than a device may have.
    #[error("{0} has {1} rates; there are at most {MOST_RATES}")]
    ManyRates(String, usize),
    /// A rate whose unit has no name, or none that can be shown.
    #[error("the rates of {0}: {1:?} is no unit")]
    Unit(String, String),
    /// Two rates of one unit.
    #[error("the rates of {0}: {1} is named twice")]
    UnitTwice(String, String),
    /// More devices than a host may have.
    #[error("{0} devices of one host; there are at most {MOST_DEVICES}")]
    Many(usize),
    /// One host, one name, two devices.
    #[error("{0} is named twice")]
    Twice(String),
}

impl DeviceRecord {
    /// What is wrong with it. Peers and files are not trusted: what they say is shown on terminals, and names become parts of paths.
    pub fn check(&self) -> Result<(), DeviceFlaw> {
        if !is_name(&self.name) {
            return Err(DeviceFlaw::Name(shown(&self.name)));
        }
        let trouble = self.trouble.as_deref().unwrap_or_default();
        let holder = self.holder.as_deref().unwrap_or_default();
        let texts = [
            ("kind", self.kind.as_str()),
            ("location", &self.location),
            ("holder", holder),
            ("trouble", trouble),
        ];
        for (what, text) in texts {
            let good = text.len() <= LONGEST && !text.chars().any(char::is_control);
            let prose = matches!(what, "holder" | "trouble");
            let good = good && (prose || text.bytes().all(|byte| byte.is_ascii_graphic()));
            if !good || (what == "kind" && !is_name(text)) {
                return Err(DeviceFlaw::Text(self.name.clone(), what, text.len()));
            }
        }
        self.check_rates()
    }

    fn check_rates(&self) -> Result<(), DeviceFlaw> {
        if self.rates.len() > MOST_RATES {
            return Err(DeviceFlaw::ManyRates(self.name.clone(), self.rates.len()));
        }
        for (at, DeviceRate { unit, .. }) in self.rates.iter().enumerate() {
            if !is_name(unit) {
                return Err(DeviceFlaw::Unit(self.name.clone(), shown(unit)));
            }
            if self.rates.iter().take(at).any(|other| other.unit == *unit) {
                return Err(DeviceFlaw::UnitTwice(self.name.clone(), unit.clone()));
            }
        }
        Ok(())
    }

    /// As far as it is kept: neither who uses it, nor how it is, nor what it can do.
    pub(crate) fn lasting(&self) -> DeviceRecord {
        DeviceRecord { users: 0, holder: None, trouble: None, rates: Vec::new(), ..self.clone() }
    }
}

/// What is wrong with all that one host publishes.
pub(crate) fn check_all(devices: &[DeviceRecord]) -> Result<(), DeviceFlaw> {
    if devices.len() > MOST_DEVICES {
        return Err(DeviceFlaw::Many(devices.len()));
    }
    let mut names = std::collections::BTreeSet::new();
    for device in devices {
        device.check()?;
        if !names.insert(&device.name) {
            return Err(DeviceFlaw::Twice(device.name.clone()));
        }
    }
    Ok(())
}

/// What is wrong with a record that was kept under `name`: that it is `host`'s `device`.
pub(crate) fn check_kept(name: &str, host: &str, device: &DeviceRecord) -> Result<(), String> {
    device.check().map_err(|flaw| flaw.to_string())?;
    if device.name != name {
        return Err(format!("it is the device {}", device.name));
    }
    if !is_host(host) {
        return Err(format!("{:?} is no name of a host", shown(host)));
    }
    Ok(())
}

/// Whether a host is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostPresence {
    /// It renews its lease.
    Now,
    /// Not for so many milliseconds.
    Lost(u64),
    /// Not since the directory was started.
    Never,
    /// It does not renew its lease, and since when is not known.
    Gone,
}

/// A device as the directory lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedDevice {
    /// The host that publishes it.
    pub host: String,
    /// Whether that host is there.
    pub seen: HostPresence,
    /// What that host last said of it.
    pub device: DeviceRecord,
}

#[cfg(test)]
impl DeviceRecord {
    /// One of this name, for tests.
    pub(crate) fn sample(name: &str) -> DeviceRecord {
        DeviceRecord {
            name: name.to_owned(),
            kind: "byte-stream".to_owned(),
            size: Some(4096),
            location: format!("tcp://10.0.0.1:7/{name}"),
            read_only: false,
            users: 0,
            holder: None,
            trouble: None,
            rates: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_or_a_path_would_suffer_from_is_refused() {
        let holder = Some("disk web of host-b".to_owned());
        DeviceRecord { holder, ..DeviceRecord::sample("data-1.img") }.check().unwrap();
        for name in ["", "../etc", "a/b", "-x", ".", "a\u{1b}[2J", &"x".repeat(41)] {
            assert!(matches!(DeviceRecord::sample(name).check(), Err(DeviceFlaw::Name(_))), "{name:?}");
        }
        let long = "x".repeat(LONGEST + 1);
        for bad in [
            DeviceRecord { kind: "a b".to_owned(), ..DeviceRecord::sample("d") },
            DeviceRecord { kind: String::new(), ..DeviceRecord::sample("d") },
            DeviceRecord { location: "nbd://h/\n".to_owned(), ..DeviceRecord::sample("d") },
            DeviceRecord { location: long.clone(), ..DeviceRecord::sample("d") },
            DeviceRecord { trouble: Some("\u{7}".to_owned()), ..DeviceRecord::sample("d") },
            DeviceRecord { holder: Some("a\nb".to_owned()), ..DeviceRecord::sample("d") },
            DeviceRecord { trouble: Some(long), ..DeviceRecord::sample("d") },
        ] {
            assert!(matches!(bad.check(), Err(DeviceFlaw::Text(..))), "{bad:?}");
        }
        let rate = |unit: &str| DeviceRate { unit: unit.to_owned(), capacity: 5, reserved: 3 };
        let with = |rates| DeviceRecord { rates, ..DeviceRecord::sample("d") };
        with(["a", "b", "c", "d"].map(rate).to_vec()).check().unwrap();
        for (bad, why) in [
            (&["a", "b", "c", "d", "e"][..], "d has 5 rates; there are at most 4"),
            (&["b", "a", "a"], "the rates of d: a is named twice"),
            (&[""], "the rates of d: \"\" is no unit"),
            (&["a\u{1b}[2J"], "is no unit"),
        ] {
            let flaw = with(bad.iter().copied().map(rate).collect()).check().unwrap_err().to_string();
            assert!(flaw.contains(why) && !flaw.contains('\u{1b}'), "{flaw}");
        }
        let two = [DeviceRecord::sample("d"), DeviceRecord::sample("d")];
        assert_eq!(check_all(&two), Err(DeviceFlaw::Twice("d".to_owned())));
        let many: Vec<DeviceRecord> =
            (0..=MOST_DEVICES).map(|n| DeviceRecord::sample(&format!("d{n}"))).collect();
        assert_eq!(check_all(&many), Err(DeviceFlaw::Many(MOST_DEVICES + 1)));
        check_all(&many[1..]).unwrap();
    }
}
