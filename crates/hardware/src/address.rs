//! Where a PCI function is.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Domain, bus, device, function. Written as `0000:00:05.0`; read also without the domain, as `00:05.0`. Ordered as on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Address {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Text that is no [`Address`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the address of a PCI function: write it as 0000:00:05.0 or 00:05.0 (`ioplane pci list` shows them)"
)]
pub struct NotAnAddress(String);

impl Address {
    /// `None` if the device is above 31 or the function above 7.
    pub fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Self> {
        (device < 32 && function < 8).then_some(Address { domain, bus, device, function })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl FromStr for Address {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| NotAnAddress(text.chars().take(40).collect()))
    }
}

/// Hexadecimal digits only, at most `digits` of them.
fn hex(text: &str, digits: usize) -> Option<u32> {
    let fits = (1..=digits).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    fits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

fn parse(text: &str) -> Option<Address> {
    let (place, function) = text.rsplit_once('.')?;
    let (rest, device) = place.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    // Domains of VMD are above 16 bits.
    let small = |text, digits| u8::try_from(hex(text, digits)?).ok();
    Address::new(hex(domain, 8)?, small(bus, 2)?, small(device, 2)?, small(function, 1)?)
}

impl From<Address> for String {
    fn from(address: Address) -> String {
        address.to_string()
    }
}

impl TryFrom<String> for Address {
    type Error = NotAnAddress;

    fn try_from(text: String) -> Result<Self, NotAnAddress> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_reads_and_writes() {
        for (text, same) in [
            ("0000:00:05.0", "0000:00:05.0"),
            ("00:1f.7", "0000:00:1f.7"),
            ("10000:E1:00.1", "10000:e1:00.1"),
            ("1:2:3.4", "0001:02:03.4"),
        ] {
            assert_eq!(text.parse::<Address>().expect(text).to_string(), same);
        }
        for text in [
            "",
            ".",
            "00:05",
            "00:20.0",
            "00:05.8",
            "0:0:0:0.0",
            "00:-5.0",
            "+0:05.0",
            "x:05.0",
            "00:05.0 ",
            "123456789:00:05.0",
            ":00:05.0",
            "100:05.0",
        ] {
            let error = text.parse::<Address>().expect_err(text);
            assert!(error.to_string().contains("0000:00:05.0"), "{error}");
        }
    }

    #[test]
    fn it_is_saved_as_text() {
        let address: Address = "00:05.1".parse().expect("an address");
        let text = serde_json::to_string(&address).expect("text");
        assert_eq!(text, "\"0000:00:05.1\"");
        assert_eq!(serde_json::from_str::<Address>(&text).expect("an address"), address);
        assert!(serde_json::from_str::<Address>("\"no\"").is_err());
    }
}
