//! What PCI functions are to be: the host's own, mediated or passed through, and emulated ones.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::address::{as_text, from_text};
use super::checks::{checked, foreign, interface_flaw, switch_flaw};
use super::network::host;
use super::{
    AdoptSpec, Flaw, MacAddress, MemoryWord, PciAddress, PortSpec, ServedSpec, form, served_fields, spec,
};
use crate::size::Size;

words! {
    /// How a function of the host is handed to a guest.
    ModeWord, Virtual,
    /// Mediated: accesses that the model needs are hooked; every DMA address is checked and translated; it can be saved.
    Virtual "virtual",
    /// As it is.
    Passthrough "passthrough",
    /// As it is, but for its registers: what its guest does there is kept, so that another function can take its place.
    Migratable "migratable",
    /// As it is, and its guest's driver cooperates: the driver brings another function to where this one was.
    Cooperating "cooperating",
}

words! {
    /// What is emulated whole.
    ChipWord, Rtl8139, stands,
    /// A bus master with rings: 8139cp drives it.
    Rtl8139 "rtl8139",
    /// A card with memory of its own: ne2k-pci drives it.
    Ne2000 "ne2000",
}

words! {
    /// What becomes of an access that a state model does not allow.
    FaultWord, Stop,
    /// Nothing happens; a read gives zero.
    Ignore "ignore",
    /// Nothing happens, and the device says so as the real one would: by its own error interrupt.
    Error "error",
    /// The VMM is told to stop its guest; every access is denied until the device is reset.
    Stop "stop",
}

/// What becomes of accesses that a state model does not allow, by cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultSpec {
    /// DMA to or from memory that is not the guest's, and invalid descriptors.
    pub dma: FaultWord,
    /// A register access that is invalid in the state that the device is in.
    pub register: FaultWord,
}

impl Default for FaultSpec {
    fn default() -> Self {
        FaultSpec { dma: FaultWord::Stop, register: FaultWord::Ignore }
    }
}

/// A text that says no such thing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` says nothing about faults: write stop, ignore or error, or each by its cause, as in dma=stop,register=ignore"
)]
pub struct NotAFault(String);

impl FromStr for FaultSpec {
    type Err = NotAFault;

    /// One word for all causes, or a word for each; a cause that is left out has its default.
    fn from_str(text: &str) -> Result<Self, NotAFault> {
        let wrong = || NotAFault(text.chars().take(40).collect());
        if let Some(word) = FaultWord::of(text) {
            return Ok(FaultSpec { dma: word, register: word });
        }
        let (mut spec, mut said) = (FaultSpec::default(), BTreeSet::new());
        for part in text.split(',') {
            let (cause, word) = part.split_once('=').ok_or_else(wrong)?;
            let (cause, word) = (cause.trim(), FaultWord::of(word.trim()).ok_or_else(wrong)?);
            match cause {
                "dma" => spec.dma = word,
                "register" => spec.register = word,
                _ => return Err(wrong()),
            }
            if !said.insert(cause) {
                return Err(wrong());
            }
        }
        Ok(spec)
    }
}

impl fmt::Display for FaultSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dma={},register={}", self.dma.word(), self.register.word())
    }
}

as_text!(FaultSpec, {
    "type": "string",
    "description": "`stop`, `ignore` or `error`, or each by its cause, as in `dma=stop,register=ignore`.",
});
from_text!(FaultSpec);
super::values!(FaultSpec: parsed;);

/// Where the frames of an emulated NIC go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CableSpec {
    /// To a switch of the daemon.
    Switch(String),
    /// To a TAP interface of the host, and nowhere else.
    Tap(String),
}

/// What is behind a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum SourceSpec {
    /// A function of this host.
    Host {
        /// Which.
        address: PciAddress,
        /// How it is handed on.
        mode: ModeWord,
        /// What becomes of what the guest may not do.
        on_fault: FaultSpec,
        /// It is taken although the host uses it.
        forced: bool,
        /// It is taken although the host does not remap interrupts.
        #[serde(default)]
        unsafe_interrupts: bool,
        /// What a VM that moves here brings along although the physical function of this host allows less.
        #[serde(default, skip_serializing_if = "AdoptSpec::is_empty")]
        adopt: AdoptSpec,
        /// Registers that need not be trapped may be mapped into the guest, of a function that moves: by the library in QEMU, or by the VMM itself
        /// where the guest's driver cooperates.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        mapped: bool,
        /// The interface of this host that stands in for that of its physical function, where this host has none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        uplink: Option<String>,
    },
    /// A NIC in software.
    Emulated {
        /// Which.
        chip: ChipWord,
        /// Its other end.
        cable: CableSpec,
        /// Its address.
        mac: MacAddress,
    },
}

impl SourceSpec {
    /// What it says, by the fields of the form. The first one tells which kind it is.
    fn fields(&self) -> Vec<(&'static str, String)> {
        let said = |value: &dyn fmt::Debug| format!("{value:?}");
        match self {
            SourceSpec::Host {
                address,
                mode,
                on_fault,
                forced,
                unsafe_interrupts,
                adopt,
                mapped,
                uplink,
            } => vec![
                ("host", said(address)),
                ("mode", said(mode)),
                ("on_fault", said(on_fault)),
                ("force", said(forced)),
                ("unsafe_interrupts", said(unsafe_interrupts)),
                ("adopt", said(adopt)),
                ("mapped", said(mapped)),
                ("uplink", said(uplink)),
            ],
            SourceSpec::Emulated { chip, cable, mac } => {
                let to = if let CableSpec::Switch(_) = cable { "switch" } else { "tap" };
                vec![("emulate", said(chip)), (to, said(cable)), ("mac", said(mac))]
            }
        }
    }

    /// Fields of the form in which this one differs from `other`.
    pub fn differing(&self, other: &Self) -> Vec<&'static str> {
        let (own, others) = (self.fields(), other.fields());
        // Of another kind altogether.
        let compared = if own[0].0 == others[0].0 { own.len() } else { 1 };
        let differ = own.into_iter().zip(others).take(compared).filter(|(own, other)| own != other);
        differ.map(|(own, _)| own.0).collect()
    }
}

spec! {
    /// A PCI function, complete and checked.
    FunctionSpec {
        /// Unique among everything that the daemon serves.
        name: String,
        /// What is behind it.
        source: SourceSpec => SourceSpec::differing,
        /// The vfio-user socket, if it is not `RUN_DIR/NAME.sock`.
        socket: Option<PathBuf>,
        /// Files that VMMs may share as memory of their guests.
        #[serde(default, skip_serializing_if = "MemoryWord::is_usual")]
        guest_memory: MemoryWord,
        /// Most memory of a guest that is pinned for a function of the host, if it is not three quarters of the host's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pinned_memory: Option<Size>,
    }
}

form! {
    /// A PCI function as somebody asks for it. See [`FunctionForm::spec`] for what is left out.
    FunctionForm {
        /// A function of this host, by its address, as `ioplane pci list` has it
        [long, value_name = "ADDRESS"]
        host: PciAddress,
        /// virtual: mediated by a state model; passthrough: as it is; migratable: as it is, and another function can take its place; cooperating:
        /// the same by a driver in the guest that cooperates
        /// [default: virtual]
        [long, value_name = "HOW", conflicts_with = "emulate"]
        mode: ModeWord,
        /// What becomes of accesses that the state model does not allow: stop, ignore or error; or each by its cause, as in
        /// dma=stop,register=ignore [default: dma=stop,register=ignore]
        [long, value_name = "WHAT", conflicts_with = "emulate"]
        on_fault: FaultSpec,
        /// Take it although the host uses it: its interface or disk is gone from the host then
        [long, num_args = 0, default_missing_value = "true", conflicts_with = "emulate"]
        force: bool,
        /// Take it although this host does not remap interrupts: whoever has it can raise any interrupt of this host
        [long, num_args = 0, default_missing_value = "true", conflicts_with = "emulate"]
        unsafe_interrupts: bool,
        /// What a VM that moves here brings along of the settings that its host had for it at the physical function (`ip link set PF vf N`), although
        /// they allow more than the settings here: some of mac, vlan, spoofchk, trust, rate, state, query_rss, or all [default: none]
        [long, value_name = "SETTINGS", conflicts_with = "emulate"]
        adopt: AdoptSpec,
        /// Let registers of a migratable or cooperating function be mapped, so that its guest's accesses do not exit. migratable: by the library in
        /// QEMU (`ioplane run`), until the function is moved. cooperating: by the VMM, all but the first page; it moves to another host with its VM,
        /// and not to another function of this one
        [long, num_args = 0, default_missing_value = "true", conflicts_with = "emulate"]
        mapped: bool,
        /// An interface of this host on the network of a migratable function whose physical function is not this host's, as in a VM that has virtual
        /// functions: it sends the frames that bring a receive ring to its place [default: the physical function's]
        [long, value_name = "INTERFACE", conflicts_with = "emulate"]
        uplink: String,
        /// A NIC in software, for stock drivers
        [long, value_name = "CHIP", requires = "cable"]
        emulate: ChipWord,
        /// The switch to plug an emulated NIC into
        [long, conflicts_with = "host"]
        switch: String,
        /// The host's TAP interface to plug an emulated NIC into, made if it is not there
        [long, value_name = "INTERFACE", conflicts_with = "host"]
        tap: String,
        /// Address of an emulated NIC [default: made from this host and the name, always the same]
        [long, conflicts_with = "host"]
        mac: MacAddress,
        /// Its vfio-user socket [default: NAME.sock in the run directory]
        [id = "vfio_socket", long = "vfio-socket", value_name = "PATH"]
        socket: PathBuf,
        /// Files that a VMM may share as its guest's memory: ram (memfd, tmpfs, hugetlbfs), or any, where page faults may wait
        /// for a disk or a network [default: ram]
        [long, value_name = "FILES"]
        guest_memory: MemoryWord,
        /// Most memory of a guest that is pinned for a function of the host [default: three quarters of the host's]
        [long, value_name = "SIZE", conflicts_with = "emulate"]
        pinned_memory: Size,
    }
}

impl FunctionForm {
    /// The complete function. Left out: mediated, with DMA that is not allowed stopping the function and register accesses that
    /// make no sense being ignored; an emulated NIC's address made from this host and its name.
    pub fn spec(self, name: &str) -> Result<FunctionSpec, Vec<Flaw>> {
        let mut flaws = Vec::new();
        let source = match (self.host, self.emulate) {
            (Some(_), Some(_)) => {
                flaws.push(Flaw::new("emulate", "both host and emulate", "give one of them"));
                None
            }
            (None, None) => {
                let remedy = "give host = \"0000:00:05.0\" (see `ioplane pci list`) or emulate = \"rtl8139\"";
                flaws.push(Flaw::new("host", "neither host nor emulate", remedy));
                None
            }
            (Some(address), None) => self.of_host(address, &mut flaws),
            (None, Some(chip)) => self.emulated(chip, name, &mut flaws),
        };
        // Stands in for one that has been complained of.
        let nothing = || SourceSpec::Emulated {
            chip: ChipWord::default(),
            cable: CableSpec::Switch("none".to_owned()),
            mac: MacAddress([2, 0, 0, 0, 0, 1]),
        };
        let source = source.unwrap_or_else(nothing);
        let spec = FunctionSpec {
            name: name.to_owned(),
            source,
            socket: self.socket,
            guest_memory: self.guest_memory.unwrap_or_default(),
            pinned_memory: self.pinned_memory,
        };
        checked(spec, flaws)
    }

    fn of_host(&self, address: PciAddress, flaws: &mut Vec<Flaw>) -> Option<SourceSpec> {
        let mode = self.mode.unwrap_or_default();
        let of_a_nic =
            [("switch", self.switch.is_some()), ("tap", self.tap.is_some()), ("mac", self.mac.is_some())];
        let remedy = "leave it out, or give emulate in place of host";
        foreign(flaws, "a function of the host", remedy, &of_a_nic);
        use ModeWord::{Cooperating, Migratable, Virtual};
        let mut only = |field, given, whose, modes: &[ModeWord]| {
            let words: Vec<String> = modes.iter().map(|mode| format!("{:?}", mode.word())).collect();
            let remedy = format!("leave it out, or give mode = {}", words.join(" or "));
            foreign(flaws, whose, &remedy, &[(field, given && !modes.contains(&mode))]);
        };
        let moved = [Migratable, Cooperating];
        only("on_fault", self.on_fault.is_some(), "a function that is passed through as it is", &[Virtual]);
        only("adopt", self.adopt.is_some(), "a function that does not move with its settings", &moved);
        only("mapped", self.mapped.is_some(), "a function that does not move", &moved);
        only(
            "uplink",
            self.uplink.is_some(),
            "a function whose rings ioplane does not bring back",
            &moved[..1],
        );
        let (adopt, uplink) = (self.adopt.clone().unwrap_or_default(), self.uplink.clone());
        let (on_fault, mapped) = (self.on_fault.unwrap_or_default(), self.mapped.unwrap_or(false));
        let (forced, unsafe_interrupts) = (self.force == Some(true), self.unsafe_interrupts == Some(true));
        Some(SourceSpec::Host { address, mode, on_fault, forced, unsafe_interrupts, adopt, mapped, uplink })
    }

    fn emulated(&self, chip: ChipWord, name: &str, flaws: &mut Vec<Flaw>) -> Option<SourceSpec> {
        let of_the_host = [
            ("mode", self.mode.is_some()),
            ("on_fault", self.on_fault.is_some()),
            ("force", self.force.is_some()),
            ("pinned_memory", self.pinned_memory.is_some()),
            ("unsafe_interrupts", self.unsafe_interrupts.is_some()),
            ("adopt", self.adopt.is_some()),
            ("mapped", self.mapped.is_some()),
            ("uplink", self.uplink.is_some()),
        ];
        let remedy = "leave it out, or give host in place of emulate";
        foreign(flaws, "an emulated NIC", remedy, &of_the_host);
        let cable = match (&self.switch, &self.tap) {
            (Some(switch), None) => CableSpec::Switch(switch.clone()),
            (None, Some(tap)) => CableSpec::Tap(tap.clone()),
            (Some(_), Some(_)) => {
                flaws.push(Flaw::new("tap", "both switch and tap", "give one of them"));
                return None;
            }
            (None, None) => {
                let remedy = "give switch = \"NAME\" or tap = \"tap0\"";
                flaws.push(Flaw::new("switch", "an emulated NIC with neither switch nor tap", remedy));
                return None;
            }
        };
        let mac = self.mac.unwrap_or_else(|| MacAddress::of(&host(), name));
        Some(SourceSpec::Emulated { chip, cable, mac })
    }
}

impl FunctionSpec {
    /// The switch that it is plugged into.
    pub fn switch(&self) -> Option<&str> {
        let SourceSpec::Emulated { cable: CableSpec::Switch(switch), .. } = &self.source else { return None };
        Some(switch)
    }

    /// The TAP interface that it has for itself.
    pub fn tap(&self) -> Option<&str> {
        let SourceSpec::Emulated { cable: CableSpec::Tap(tap), .. } = &self.source else { return None };
        Some(tap)
    }

    /// The function of the host that it takes.
    pub fn address(&self) -> Option<PciAddress> {
        let SourceSpec::Host { address, .. } = &self.source else { return None };
        Some(*address)
    }

    /// The address of an emulated NIC.
    pub fn mac(&self) -> Option<MacAddress> {
        let SourceSpec::Emulated { mac, .. } = &self.source else { return None };
        Some(*mac)
    }

    /// `virtual`, `passthrough`, `migratable`, `cooperating` or `emulated`.
    pub fn mode(&self) -> &'static str {
        let SourceSpec::Host { mode, .. } = &self.source else { return "emulated" };
        mode.word()
    }
}

impl ServedSpec for FunctionSpec {
    served_fields!();

    /// A thread of its own serves it.
    fn core(&self) -> Option<u32> {
        None
    }

    fn queues(&self) -> u16 {
        0
    }

    fn own_flaws(&self) -> Vec<Flaw> {
        let uplink =
            if let SourceSpec::Host { uplink, .. } = &self.source { uplink.as_deref() } else { None };
        let names = [("tap", self.tap()), ("uplink", uplink)];
        let flaws = names.into_iter().filter_map(|(field, name)| interface_flaw(field, name?));
        self.switch().and_then(switch_flaw).into_iter().chain(flaws).collect()
    }

    fn same_content(one: &Self, other: &Self) -> bool {
        one.source == other.source
    }

    /// A function cannot migrate.
    fn port(&self) -> Option<PortSpec> {
        let (switch, mac) = self.switch().zip(self.mac())?;
        Some(PortSpec { switch: switch.to_owned(), mac, shares_mac: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_and_written() {
        use FaultWord::{Error, Ignore, Stop};
        for (text, dma, register) in [
            ("stop", Stop, Stop),
            ("ignore", Ignore, Ignore),
            ("dma=error", Error, Ignore),
            ("register=stop", Stop, Stop),
            ("register=error, dma=ignore", Ignore, Error),
        ] {
            let spec: FaultSpec = text.parse().unwrap();
            assert_eq!(spec, FaultSpec { dma, register }, "{text}");
            assert_eq!(spec.to_string().parse(), Ok(spec));
        }
        for text in [
            "",
            "halt",
            "dma",
            "dma=",
            "dma=stop,dma=stop",
            "irq=stop",
            "dma=stop,",
            "dma=stop;register=stop",
        ] {
            assert!(text.parse::<FaultSpec>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_differs_is_named_as_in_the_form() {
        use crate::spec::SpecFields;
        let spec = |json: &str| form(json).unwrap();
        let emulated = spec(r#"{"emulate": "rtl8139", "switch": "lan", "mac": "02:00:00:00:00:01"}"#);
        for (json, names) in [
            (r#"{"emulate": "rtl8139", "switch": "lan", "mac": "02:00:00:00:00:01"}"#, &[][..]),
            (r#"{"emulate": "rtl8139", "switch": "lan", "mac": "02:00:00:00:00:02"}"#, &["mac"]),
            (r#"{"emulate": "ne2000", "switch": "wan", "mac": "02:00:00:00:00:01"}"#, &["emulate", "switch"]),
            (r#"{"emulate": "rtl8139", "tap": "tap0", "mac": "02:00:00:00:00:01"}"#, &["tap"]),
            (r#"{"host": "0000:00:05.0"}"#, &["host"]),
        ] {
            assert_eq!(spec(json).differing(&emulated), names, "{json}");
        }
        let host = spec(r#"{"host": "0000:00:05.0"}"#);
        assert_eq!(emulated.differing(&host), ["emulate"]);
        for (json, names) in [
            (r#"{"host": "0000:00:06.0"}"#, &["host"][..]),
            (r#"{"host": "0000:00:05.0", "mode": "passthrough"}"#, &["mode"]),
            (
                r#"{"host": "0000:00:05.0", "on_fault": "ignore", "force": true, "unsafe_interrupts": true}"#,
                &["on_fault", "force", "unsafe_interrupts"],
            ),
            (r#"{"host": "0000:00:05.0", "mode": "migratable", "adopt": "mac,trust"}"#, &["mode", "adopt"]),
            (r#"{"host": "0000:00:05.0", "mode": "cooperating", "mapped": true}"#, &["mode", "mapped"]),
            (r#"{"host": "0000:00:05.0", "mode": "migratable", "uplink": "up0"}"#, &["mode", "uplink"]),
        ] {
            assert_eq!(spec(json).differing(&host), names, "{json}");
        }
    }

    fn form(json: &str) -> Result<FunctionSpec, String> {
        let form: FunctionForm = serde_json::from_str(json).map_err(|error| error.to_string())?;
        form.spec("f")
            .map_err(|flaws| flaws.into_iter().map(|flaw| flaw.reason).collect::<Vec<_>>().join("; "))
    }

    #[test]
    fn what_is_left_out_is_filled_in() {
        let host = form(r#"{"host": "00:05.0"}"#).unwrap();
        assert_eq!(
            host.source,
            SourceSpec::Host {
                address: "0000:00:05.0".parse().unwrap(),
                mode: ModeWord::Virtual,
                on_fault: FaultSpec::default(),
                forced: false,
                unsafe_interrupts: false,
                adopt: AdoptSpec::default(),
                mapped: false,
                uplink: None,
            }
        );
        assert_eq!((host.mode(), host.switch(), host.mac()), ("virtual", None, None));
        let nic = form(r#"{"emulate": "ne2000", "switch": "lan"}"#).unwrap();
        assert_eq!(
            (nic.mode(), nic.switch(), nic.mac()),
            ("emulated", Some("lan"), Some(MacAddress::of(&super::host(), "f")))
        );
        let tap = form(r#"{"emulate": "rtl8139", "tap": "tap0", "mac": "02:00:00:00:00:07"}"#).unwrap();
        assert_eq!((tap.tap(), tap.mac()), (Some("tap0"), Some(MacAddress([2, 0, 0, 0, 0, 7]))));
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        for (json, reason) in [
            ("{}", "neither host nor emulate"),
            (r#"{"host": "00:05.0", "emulate": "ne2000"}"#, "both host and emulate"),
            (r#"{"host": "00:05.0", "switch": "lan"}"#, "switch says nothing about a function of the host"),
            (
                r#"{"host": "00:05.0", "mac": "02:00:00:00:00:01"}"#,
                "mac says nothing about a function of the host",
            ),
            (
                r#"{"host": "00:05.0", "mode": "passthrough", "on_fault": "stop"}"#,
                "on_fault says nothing about a function that is passed through as it is",
            ),
            (
                r#"{"host": "00:05.0", "adopt": "trust"}"#,
                "adopt says nothing about a function that does not move with its settings",
            ),
            (
                r#"{"host": "00:05.0", "mode": "passthrough", "mapped": true}"#,
                "mapped says nothing about a function that does not move",
            ),
            (
                r#"{"host": "00:05.0", "mode": "migratable", "uplink": "../up0"}"#,
                "\"../up0\" is no name of an interface",
            ),
            (
                r#"{"emulate": "ne2000", "switch": "lan", "mode": "virtual"}"#,
                "mode says nothing about an emulated NIC",
            ),
            (r#"{"emulate": "ne2000"}"#, "an emulated NIC with neither switch nor tap"),
            (r#"{"emulate": "ne2000", "switch": "a", "tap": "b"}"#, "both switch and tap"),
            (r#"{"emulate": "ne2000", "tap": "a/b"}"#, "\"a/b\" is no name of an interface"),
            (r#"{"emulate": "ne2000", "switch": "../x"}"#, "'/' in the name \"../x\""),
        ] {
            assert_eq!(form(json).unwrap_err(), reason, "{json}");
        }
        assert!(form(r#"{"host": "x"}"#).unwrap_err().contains("not the address of a PCI function"));
        assert!(form(r#"{"emulate": "e1000", "switch": "lan"}"#).is_err());
    }

    #[test]
    fn what_is_written_down_is_read() {
        for json in [
            r#"{"host": "00:05.0", "on_fault": "dma=error"}"#,
            r#"{"host": "00:05.0", "mode": "cooperating", "adopt": "all"}"#,
            r#"{"host": "00:05.0", "mode": "cooperating", "mapped": true}"#,
            r#"{"host": "00:05.0", "mode": "migratable", "mapped": true}"#,
            r#"{"host": "00:05.0", "mode": "migratable", "uplink": "up0"}"#,
            r#"{"emulate": "ne2000", "switch": "lan"}"#,
            r#"{"emulate": "rtl8139", "tap": "tap0", "socket": "/run/x.sock"}"#,
        ] {
            let spec = form(json).unwrap();
            let text = serde_json::to_string(&spec).unwrap();
            assert_eq!(serde_json::from_str::<FunctionSpec>(&text).unwrap(), spec, "{text}");
        }
    }
}
