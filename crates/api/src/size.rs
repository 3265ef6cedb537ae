//! Sizes as people write them: `64M`, `10G`, or plain bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};

/// A number of bytes. In JSON a number; read from a number or a text such as `"64M"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Size(pub u64);

/// A text that is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a size: write bytes, or a number with K, M, G or T (powers of 1024), as in 64M")]
pub struct NotASize(String);

/// Units, smallest first: each 1024 times the one before.
const UNITS: [&str; 5] = ["", "K", "M", "G", "T"];

impl FromStr for Size {
    type Err = NotASize;

    fn from_str(text: &str) -> Result<Self, NotASize> {
        let wrong = || NotASize(text.chars().take(40).collect());
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let unit = text[digits.len()..].trim().to_ascii_uppercase();
        let unit = unit.strip_suffix("IB").or(unit.strip_suffix('B')).unwrap_or(&unit);
        let power = UNITS.iter().position(|known| *known == unit).ok_or_else(wrong)?;
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        number.checked_mul(1 << (10 * power)).map(Size).ok_or_else(wrong)
    }
}

impl fmt::Display for Size {
    /// The largest unit that needs no fraction, else one decimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let power = (0..UNITS.len()).rev().find(|p| self.0 >= 1 << (10 * p)).unwrap_or(0);
        let unit = 1u64 << (10 * power);
        if self.0.is_multiple_of(unit) {
            write!(f, "{}{}", self.0 / unit, UNITS[power])
        } else {
            write!(f, "{:.1}{}", self.0 as f64 / unit as f64, UNITS[power])
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a number of bytes, or a text such as \"64M\"")]
        enum Either {
            Bytes(u64),
            Text(String),
        }
        match Either::deserialize(deserializer)? {
            Either::Bytes(bytes) => Ok(Size(bytes)),
            Either::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// What is written is a number of bytes; what is read may be a text as well.
#[cfg(feature = "schema")]
impl schemars::JsonSchema for Size {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let number = schemars::json_schema!({ "type": "integer", "minimum": 0 });
        if generator.contract().is_serialize() {
            return number;
        }
        schemars::json_schema!({
            "description": "A number of bytes, or a text with a unit, such as 64M: K, M, G and T are powers of 1024.",
            "anyOf": [number, { "type": "string", "pattern": "^[0-9]+ *([KMGTkmgt]?([Ii]?[Bb])?)$" }],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in
            [("0", 0), ("512", 512), ("64M", 64 << 20), ("1g", 1 << 30), ("2 KiB", 2048), ("3TB", 3 << 40)]
        {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "1X", "99999999999999999999", "18446744073709551615K", "ü"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        assert_eq!(Size(64 << 20).to_string(), "64M");
        assert_eq!(Size(1536).to_string(), "1.5K");
        assert_eq!(Size(0).to_string(), "0");
    }
}
