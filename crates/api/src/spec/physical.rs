//! What the administrator of a host sets for a virtual function at its physical function, as `ip link set PF vf N` does.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::MacAddress;
use super::address::{as_text, from_text};

/// VLANs that a virtual function can be put into (IEEE 802.1Q-2018, 9.6: 0 and 4095 are reserved).
const VLANS: std::ops::RangeInclusive<u16> = 1..=4094;
/// The largest priority in a tag.
const QOS: u8 = 7;

words! {
    /// One of the settings of a virtual function at its physical function, as `ip link set PF vf N` calls it.
    SettingWord, Mac,
    /// Its address, fixed.
    Mac "mac",
    /// The VLAN that it is put into, with priority and protocol.
    Vlan "vlan",
    /// Frames with other source addresses are dropped.
    Spoofchk "spoofchk",
    /// It may change its address and receive what is not for it.
    Trust "trust",
    /// `min_tx_rate` and `max_tx_rate`.
    Rate "rate",
    /// Its link.
    State "state",
    /// It may ask for the card's RSS table and key.
    QueryRss "query_rss",
}

impl SettingWord {
    const ALL: [SettingWord; 7] = [
        SettingWord::Mac,
        SettingWord::Vlan,
        SettingWord::Spoofchk,
        SettingWord::Trust,
        SettingWord::Rate,
        SettingWord::State,
        SettingWord::QueryRss,
    ];
}

words! {
    /// Which tag a VLAN has.
    TagWord, Dot1q,
    /// That of customers.
    Dot1q "802.1Q",
    /// That of providers.
    Dot1ad "802.1ad",
}

words! {
    /// What a virtual function is told of its link.
    VfLinkWord, Auto,
    /// That of the physical function.
    Auto "auto",
    /// Up, whatever the cable says.
    Enable "enable",
    /// Down.
    Disable "disable",
}

/// A VLAN that a virtual function is put into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct VfVlan {
    /// Its number.
    pub id: u16,
    /// The priority in the tag.
    #[serde(default)]
    pub qos: u8,
    /// The kind of tag.
    #[serde(default)]
    pub proto: TagWord,
}

/// What the administrator of a host has set for a virtual function at its physical function. From another host it is hostile input:
/// [`VfSettings::flaw`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct VfSettings {
    /// Its address, where that is fixed: a guest that is not trusted cannot change it.
    pub mac: Option<MacAddress>,
    /// The VLAN that it is in; none: its guest chooses.
    pub vlan: Option<VfVlan>,
    /// Whether frames with other source addresses are dropped; none: the card's driver does not say.
    pub spoofchk: Option<bool>,
    /// Whether it may change its address and receive what is not for it; none: the card's driver does not say.
    pub trust: Option<bool>,
    /// Most that it may send, Mbit/s; 0: no limit.
    pub max_tx_rate: u32,
    /// What it can send in any case, Mbit/s; 0: nothing is set aside.
    pub min_tx_rate: u32,
    /// What it is told of its link.
    pub state: VfLinkWord,
    /// Whether it may ask for the card's RSS table and key; none: the card's driver does not say.
    pub query_rss: Option<bool>,
}

/// One setting, with its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VfSetting {
    /// The fixed address; none: its guest chooses.
    Mac(Option<MacAddress>),
    /// The VLAN; none: its guest chooses.
    Vlan(Option<VfVlan>),
    /// Whether source addresses are checked.
    Spoofchk(bool),
    /// Whether it is trusted.
    Trust(bool),
    /// Rates, Mbit/s.
    Rate {
        /// What it can send in any case.
        min: u32,
        /// Most that it may send; 0: no limit.
        max: u32,
    },
    /// Its link.
    State(VfLinkWord),
    /// Whether it may ask for the RSS table and key.
    QueryRss(bool),
}

impl VfSetting {
    /// Which it is.
    pub fn word(self) -> SettingWord {
        match self {
            VfSetting::Mac(_) => SettingWord::Mac,
            VfSetting::Vlan(_) => SettingWord::Vlan,
            VfSetting::Spoofchk(_) => SettingWord::Spoofchk,
            VfSetting::Trust(_) => SettingWord::Trust,
            VfSetting::Rate { .. } => SettingWord::Rate,
            VfSetting::State(_) => SettingWord::State,
            VfSetting::QueryRss(_) => SettingWord::QueryRss,
        }
    }
}

/// As `ip link set PF vf N` has it.
impl fmt::Display for VfSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = |yes: &bool| if *yes { "on" } else { "off" };
        match self {
            VfSetting::Mac(Some(mac)) => write!(f, "mac {mac}"),
            VfSetting::Mac(None) => write!(f, "mac 00:00:00:00:00:00"),
            VfSetting::Vlan(None) => write!(f, "vlan 0"),
            VfSetting::Vlan(Some(VfVlan { id, qos, proto })) => {
                write!(f, "vlan {id}")?;
                if *qos != 0 {
                    write!(f, " qos {qos}")?;
                }
                if *proto == TagWord::Dot1q { Ok(()) } else { write!(f, " proto {}", proto.word()) }
            }
            VfSetting::Spoofchk(yes) => write!(f, "spoofchk {}", on(yes)),
            VfSetting::Trust(yes) => write!(f, "trust {}", on(yes)),
            VfSetting::Rate { min: 0, max } => write!(f, "max_tx_rate {max}"),
            VfSetting::Rate { min, max } => write!(f, "min_tx_rate {min} max_tx_rate {max}"),
            VfSetting::State(word) => write!(f, "state {}", word.word()),
            VfSetting::QueryRss(yes) => write!(f, "query_rss {}", on(yes)),
        }
    }
}

impl VfSettings {
    /// One of them; none where the card's driver does not say.
    pub fn get(&self, word: SettingWord) -> Option<VfSetting> {
        Some(match word {
            SettingWord::Mac => VfSetting::Mac(self.mac),
            SettingWord::Vlan => VfSetting::Vlan(self.vlan),
            SettingWord::Spoofchk => VfSetting::Spoofchk(self.spoofchk?),
            SettingWord::Trust => VfSetting::Trust(self.trust?),
            SettingWord::Rate => VfSetting::Rate { min: self.min_tx_rate, max: self.max_tx_rate },
            SettingWord::State => VfSetting::State(self.state),
            SettingWord::QueryRss => VfSetting::QueryRss(self.query_rss?),
        })
    }

    /// Those in which `wanted` differs, with the values of `wanted`, in the order in which they are set. What `wanted` does not say is none of
    /// them.
    pub fn differing(&self, wanted: &VfSettings) -> Vec<VfSetting> {
        let each = SettingWord::ALL.into_iter().filter_map(|word| {
            let wanted = wanted.get(word)?;
            (self.get(word) != Some(wanted)).then_some(wanted)
        });
        each.collect()
    }

    /// All that is said, as `ip link` calls it.
    pub fn words(&self) -> Vec<String> {
        let usual = VfSettings { spoofchk: self.spoofchk, trust: self.trust, ..VfSettings::default() };
        let said = |word: &SettingWord| {
            let now = self.get(*word)?;
            let always = matches!(now, VfSetting::Spoofchk(_) | VfSetting::Trust(_));
            (always || usual.get(*word).unwrap_or(VfSetting::QueryRss(false)) != now).then(|| now.to_string())
        };
        SettingWord::ALL.iter().filter_map(said).collect()
    }

    /// What no administrator can have set.
    pub fn flaw(&self) -> Option<String> {
        if let Some(VfVlan { id, qos, .. }) = self.vlan
            && (!VLANS.contains(&id) || qos > QOS)
        {
            return Some(format!("VLAN {id} with priority {qos}"));
        }
        let (min, max) = (self.min_tx_rate, self.max_tx_rate);
        (max != 0 && min > max).then(|| format!("at least {min} and at most {max} Mbit/s"))
    }
}

/// What a VM that moves here brings along where that allows its guest more than the administrator of this host does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdoptSpec(Vec<SettingWord>);

/// A text that says no such thing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is none of these: write mac, vlan, spoofchk, trust, rate, state, query_rss, several as in mac,trust, or all"
)]
pub struct NotASetting(String);

impl AdoptSpec {
    /// Whether it is among them.
    pub fn has(&self, word: SettingWord) -> bool {
        self.0.contains(&word)
    }

    /// None of them.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for AdoptSpec {
    type Err = NotASetting;

    fn from_str(text: &str) -> Result<Self, NotASetting> {
        if text == "all" {
            return Ok(AdoptSpec(SettingWord::ALL.to_vec()));
        }
        let wrong = || NotASetting(text.chars().take(40).collect());
        let said = text.split(',').map(|word| SettingWord::of(word.trim()).ok_or_else(wrong));
        let said = said.collect::<Result<Vec<_>, _>>()?;
        Ok(AdoptSpec(SettingWord::ALL.into_iter().filter(|word| said.contains(word)).collect()))
    }
}

impl fmt::Display for AdoptSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.len() == SettingWord::ALL.len() {
            return f.write_str("all");
        }
        f.write_str(&self.0.iter().map(|word| word.word()).collect::<Vec<_>>().join(","))
    }
}

as_text!(AdoptSpec, {
    "type": "string",
    "description": "Some of `mac`, `vlan`, `spoofchk`, `trust`, `rate`, `state`, `query_rss`, as in `mac,trust`, or `all`.",
});
from_text!(AdoptSpec);
super::values!(AdoptSpec: parsed;);

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(last: u8) -> MacAddress {
        MacAddress([2, 0, 0, 0, 0, last])
    }

    #[test]
    fn settings_say_in_what_they_differ() {
        let own = VfSettings { trust: Some(false), spoofchk: Some(true), ..VfSettings::default() };
        let wanted =
            VfSettings { mac: Some(mac(1)), trust: Some(true), max_tx_rate: 7, ..VfSettings::default() };
        let said: Vec<String> = own.differing(&wanted).iter().map(ToString::to_string).collect();
        assert_eq!(said, ["mac 02:00:00:00:00:01", "trust on", "max_tx_rate 7"]);
        assert_eq!(own.differing(&own), []);
        let vlan = Some(VfVlan { id: 5, qos: 2, proto: TagWord::Dot1ad });
        let all =
            VfSettings { vlan, state: VfLinkWord::Enable, query_rss: Some(true), min_tx_rate: 3, ..wanted };
        let words = "mac 02:00:00:00:00:01, vlan 5 qos 2 proto 802.1ad, trust on, min_tx_rate 3 max_tx_rate 7, state enable, query_rss on";
        assert_eq!(all.words().join(", "), words);
        assert_eq!(own.words(), ["spoofchk on", "trust off"]);
    }

    #[test]
    fn what_nobody_can_have_set_is_said() {
        let with = |json: &str| serde_json::from_str::<VfSettings>(json).unwrap().flaw();
        assert_eq!(with("{}"), None);
        assert_eq!(with(r#"{"vlan": {"id": 4094, "qos": 7}}"#), None);
        assert_eq!(with(r#"{"vlan": {"id": 4095}}"#).unwrap(), "VLAN 4095 with priority 0");
        assert_eq!(with(r#"{"vlan": {"id": 0}}"#).unwrap(), "VLAN 0 with priority 0");
        assert_eq!(with(r#"{"vlan": {"id": 1, "qos": 8}}"#).unwrap(), "VLAN 1 with priority 8");
        let said = with(r#"{"min_tx_rate": 2, "max_tx_rate": 1}"#).unwrap();
        assert_eq!(said, "at least 2 and at most 1 Mbit/s");
        for json in [r#"{"mac": "01:00:00:00:00:00"}"#, r#"{"state": "up"}"#, r#"{"more": 1}"#] {
            serde_json::from_str::<VfSettings>(json).unwrap_err();
        }
    }

    #[test]
    fn what_is_adopted_is_read_and_written() {
        let read = |text: &str| text.parse::<AdoptSpec>().map(|read| read.to_string());
        assert_eq!(read("trust, mac,trust").unwrap(), "mac,trust");
        assert_eq!(read("all").unwrap(), "all");
        assert_eq!(read("mac,vlan,spoofchk,trust,rate,state,query_rss").unwrap(), "all");
        assert!(read("mac,qos").unwrap_err().to_string().starts_with("`mac,qos` is none of these"));
        let adopt: AdoptSpec = "trust".parse().unwrap();
        assert!(adopt.has(SettingWord::Trust) && !adopt.has(SettingWord::Mac));
        assert!(AdoptSpec::default().is_empty());
    }
}
