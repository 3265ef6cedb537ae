//! Addresses of NICs and their VLANs: text in JSON, in the configuration and on the command line.

use std::fmt;
use std::str::FromStr;

/// Numbers of VLANs (IEEE 802.1Q: 0 and 4095 are reserved).
const VLANS: std::ops::RangeInclusive<u16> = 1..=4094;

macro_rules! as_text {
    ($name:ident, $form:tt) => {
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!($form)
            }
        }
    };
}

/// The same of what is read from text only.
macro_rules! from_text {
    ($name:ident) => {
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str> as serde::Deserialize>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

/// A unicast MAC address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MacAddress(pub [u8; 6]);

/// A text that is no such address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a unicast MAC address: write six bytes as in 52:54:00:12:34:56, the first of them even"
)]
pub struct NotAMac(String);

impl MacAddress {
    /// The address of a NIC for which nobody says one: the same for this name on this host at any time, and unlikely on any
    /// other host. Locally administered (IEEE 802, the bit 0x02).
    pub fn of(host: &str, name: &str) -> MacAddress {
        // FNV-1a: it must be the same in every version of this program.
        let hash =
            host.bytes().chain([0]).chain(name.bytes()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
        let [a, b, c, d, e, ..] = (hash ^ (hash >> 40)).to_le_bytes();
        MacAddress([0x02, a, b, c, d, e])
    }
}

impl FromStr for MacAddress {
    type Err = NotAMac;

    fn from_str(text: &str) -> Result<Self, NotAMac> {
        let wrong = || NotAMac(text.chars().take(40).collect());
        let mut bytes = [0; 6];
        let hex = |part: &&str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
        let mut parts = text.split([':', '-']);
        for byte in &mut bytes {
            let part = parts.next().filter(|part| hex(part)).ok_or_else(wrong)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
        }
        let unicast = bytes[0] & 1 == 0 && bytes != [0; 6];
        if parts.next().is_some() || !unicast { Err(wrong()) } else { Ok(MacAddress(bytes)) }
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

as_text!(MacAddress, {
    "type": "string",
    "description": "A unicast MAC address, as 52:54:00:12:34:56.",
    "pattern": "^[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}$",
});
from_text!(MacAddress);
super::values! {
    MacAddress: parsed;
    VlanSpec: parsed_or_number;
}
pub(super) use {as_text, from_text};

/// Which VLANs a NIC is in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum VlanSpec {
    /// All, tags and all: as if there were none.
    #[default]
    All,
    /// One; the guest knows nothing of it.
    Access(u16),
    /// These, and the guest sees the tags.
    Trunk(Vec<u16>),
}

/// A text that says no VLANs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` says no VLANs: write all, or a number from 1 to 4094, or trunk:10,20")]
pub struct NotAVlan(String);

impl FromStr for VlanSpec {
    type Err = NotAVlan;

    fn from_str(text: &str) -> Result<Self, NotAVlan> {
        let wrong = || NotAVlan(text.chars().take(40).collect());
        let number = |text: &str| text.trim().parse().ok().filter(|n| VLANS.contains(n)).ok_or_else(wrong);
        match text.split_once(':') {
            _ if text == "all" => Ok(VlanSpec::All),
            None => Ok(VlanSpec::Access(number(text)?)),
            Some(("access", one)) => Ok(VlanSpec::Access(number(one)?)),
            Some(("trunk", list)) => {
                let mut numbers = list.split(',').map(number).collect::<Result<Vec<u16>, _>>()?;
                numbers.sort_unstable();
                numbers.dedup();
                Ok(VlanSpec::Trunk(numbers))
            }
            Some(_) => Err(wrong()),
        }
    }
}

impl fmt::Display for VlanSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VlanSpec::All => write!(f, "all"),
            VlanSpec::Access(one) => write!(f, "{one}"),
            VlanSpec::Trunk(list) => {
                let list: Vec<String> = list.iter().map(u16::to_string).collect();
                write!(f, "trunk:{}", list.join(","))
            }
        }
    }
}

as_text!(VlanSpec, {
    "description": "The VLANs of a NIC: `all`, a number from 1 to 4094, or `trunk:10,20`.",
    "anyOf": [
        { "type": "string", "pattern": "^(all|(access:)?[0-9]+|trunk:[0-9, ]+)$" },
        { "type": "integer", "minimum": 1, "maximum": 4094 },
    ],
});

impl<'de> serde::Deserialize<'de> for VlanSpec {
    /// Of a text, or, where people write it, of the number of an access port without quotes.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrNumber;

        impl serde::de::Visitor<'_> for TextOrNumber {
            type Value = VlanSpec;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "all, or a number from 1 to 4094, or trunk:10,20")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<VlanSpec, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<VlanSpec, E> {
                self.visit_str(&number.to_string())
            }
        }

        if deserializer.is_human_readable() {
            deserializer.deserialize_any(TextOrNumber)
        } else {
            deserializer.deserialize_str(TextOrNumber)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for text in ["52:54:00:12:34:56", "02:00:00:00:00:01"] {
            assert_eq!(text.parse::<MacAddress>().unwrap().to_string(), text);
        }
        assert_eq!("52-54-00-AB-CD-EF".parse(), Ok(MacAddress([0x52, 0x54, 0, 0xab, 0xcd, 0xef])));
        let multicast = "01:00:5e:00:00:01";
        for text in
            ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "5:54:00:12:34:56", "+2:54:00:12:34:56", multicast]
        {
            assert!(text.parse::<MacAddress>().is_err(), "{text}");
        }
        assert!("00:00:00:00:00:00".parse::<MacAddress>().is_err());
    }

    #[test]
    fn a_nic_without_an_address_always_gets_the_same() {
        let mac = MacAddress::of("3e0f", "web");
        assert_eq!((mac, mac.0[0]), (MacAddress::of("3e0f", "web"), 2));
        assert_ne!(mac, MacAddress::of("3e0f", "web2"));
        assert_ne!(mac, MacAddress::of("3e1f", "web"));
        assert_eq!(mac.to_string(), "02:a0:01:45:94:60", "an update of ioplane must not change it");
    }

    #[test]
    fn vlans_are_read_and_written() {
        for (text, vlan) in [
            ("all", VlanSpec::All),
            ("10", VlanSpec::Access(10)),
            ("trunk:10,20", VlanSpec::Trunk(vec![10, 20])),
            ("trunk:7", VlanSpec::Trunk(vec![7])),
        ] {
            assert_eq!(text.parse(), Ok(vlan.clone()));
            assert_eq!(vlan.to_string(), text);
        }
        assert_eq!("trunk:20, 10,20".parse(), Ok(VlanSpec::Trunk(vec![10, 20])));
        for text in ["", "0", "4095", "10,20", "trunk:", "trunk:0", "lan:3", "trunk"] {
            assert!(text.parse::<VlanSpec>().is_err(), "{text}");
        }
        for json in ["10", "\"10\""] {
            assert_eq!(serde_json::from_str::<VlanSpec>(json).unwrap(), VlanSpec::Access(10));
        }
        for json in ["0", "4095", "-1", "1.5", "null", "[10]"] {
            assert!(serde_json::from_str::<VlanSpec>(json).is_err(), "{json}");
        }
    }
}
