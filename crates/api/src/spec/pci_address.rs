//! Where a PCI function of the host is: text in JSON, in the configuration and on the command line.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Domain, bus, device, function. Written as `0000:00:05.0`; read also without the domain, as `00:05.0`.
// Ordered as on the bus. `hardware`, which opens functions, takes it from here: there is one parser.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(into = "String", try_from = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

super::values!(PciAddress: parsed | "host" => PciAddress::default(););

/// Text that is no [`PciAddress`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the address of a PCI function: write it as 0000:00:05.0 or 00:05.0 (`ioplane pci list` shows them)"
)]
pub struct NotAPciAddress(String);

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl FromStr for PciAddress {
    type Err = NotAPciAddress;

    fn from_str(text: &str) -> Result<Self, NotAPciAddress> {
        parse(text).ok_or_else(|| NotAPciAddress(text.chars().take(40).collect()))
    }
}

/// Hexadecimal digits only, at most `digits` of them.
fn hex(text: &str, digits: usize) -> Option<u32> {
    let fits = (1..=digits).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    fits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

fn parse(text: &str) -> Option<PciAddress> {
    let (place, function) = text.rsplit_once('.')?;
    let (rest, device) = place.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    let small = |text, digits, last| u8::try_from(hex(text, digits)?).ok().filter(|number| *number <= last);
    Some(PciAddress {
        // Domains of VMD are above 16 bits.
        domain: hex(domain, 8)?,
        bus: small(bus, 2, u8::MAX)?,
        device: small(device, 2, 31)?,
        function: small(function, 1, 7)?,
    })
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

impl TryFrom<String> for PciAddress {
    type Error = NotAPciAddress;

    fn try_from(text: String) -> Result<Self, NotAPciAddress> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, same) in [
            ("0000:00:05.0", "0000:00:05.0"),
            ("00:1f.7", "0000:00:1f.7"),
            ("10000:E1:00.1", "10000:e1:00.1"),
            ("0:ff:1f.7", "0000:ff:1f.7"),
            ("1:2:3.4", "0001:02:03.4"),
        ] {
            let address: PciAddress = text.parse().expect(text);
            assert_eq!(address.to_string(), same);
            let json = serde_json::to_string(&address).unwrap();
            assert_eq!(json, format!("{same:?}"));
            assert_eq!(serde_json::from_str::<PciAddress>(&json).unwrap(), address);
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
            let error = text.parse::<PciAddress>().expect_err(text);
            assert!(error.to_string().contains("0000:00:05.0"), "{error}");
        }
        assert!(serde_json::from_str::<PciAddress>("\"no\"").is_err());
    }
}
