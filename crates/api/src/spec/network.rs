//! What switches and NICs are to be.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{
    Flaw, LinkWord, Mac, MemoryWord, QUEUE_SIZE_MAX, ServedSpec, VlanSpec, checked, name_flaw, number, pick,
    socket_flaw,
};

/// Most queue pairs of one NIC.
const PAIRS: u16 = 8;
/// Entries of a ring if nobody says: what QEMU takes without being told.
pub const NIC_QUEUE_SIZE: u16 = 256;
/// Bytes of a frame behind its Ethernet header, if nobody says.
pub const MTU: u16 = 1500;
/// Bytes of a network interface's name (IFNAMSIZ, with its end).
const INTERFACE: usize = 15;

/// What is wrong with the name of an interface, if anything.
pub(super) fn interface_flaw(field: &'static str, name: &str) -> Option<Flaw> {
    let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '%' | ':');
    let good = (1..=INTERFACE).contains(&name.len()) && name.chars().all(plain);
    let remedy = "give the name of a TAP interface, such as tap0: at most 15 characters without '/'";
    (!good).then(|| Flaw::new(field, format!("{name:?} is no name of an interface"), remedy))
}

/// What tells this host from others; empty where nothing does.
pub(super) fn host() -> String {
    std::fs::read_to_string("/etc/machine-id").unwrap_or_default().trim().to_owned()
}

/// A switch, complete and checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchSpec {
    /// Unique among the daemon's switches.
    pub name: String,
    /// The host's TAP interface behind it, if frames are to leave this host or reach it.
    pub uplink: Option<String>,
    /// The core on which the uplink is served, if it is to be that one.
    pub core: Option<u32>,
}

/// A switch as somebody asks for it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the fields are those of SwitchSpec")]
pub struct SwitchForm {
    pub uplink: Option<String>,
    pub core: Option<u32>,
}

impl SwitchForm {
    /// The complete switch.
    pub fn spec(self, name: &str) -> Result<SwitchSpec, Vec<Flaw>> {
        let spec = SwitchSpec { name: name.to_owned(), uplink: self.uplink, core: self.core };
        let flaws = spec.flaws();
        if flaws.is_empty() { Ok(spec) } else { Err(flaws) }
    }
}

impl SwitchSpec {
    /// Everything that is wrong with it in itself. The state file is checked by this too.
    pub fn flaws(&self) -> Vec<Flaw> {
        let mut flaws: Vec<Flaw> = name_flaw(&self.name).into_iter().collect();
        flaws.extend(self.uplink.as_deref().and_then(|uplink| interface_flaw("uplink", uplink)));
        flaws
    }

    /// As [`ServedSpec::three_way`].
    pub fn three_way(base: &Self, configured: &Self, now: &Self) -> Self {
        SwitchSpec {
            name: configured.name.clone(),
            uplink: pick(&base.uplink, &configured.uplink, &now.uplink),
            core: pick(&base.core, &configured.core, &now.core),
        }
    }
}

/// A NIC, complete and checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicSpec {
    /// Unique among everything that the daemon serves.
    pub name: String,
    /// The switch it is plugged into.
    pub switch: String,
    /// Its address; nobody else on the switch may send from it.
    pub mac: Mac,
    /// It reaches uplinks and NICs that are not isolated, and no isolated one.
    pub isolated: bool,
    /// Its VLANs.
    pub vlan: VlanSpec,
    /// Pairs of queues.
    pub pairs: u16,
    /// Largest ring.
    pub queue_size: u16,
    /// Bytes of a frame behind its Ethernet header.
    pub mtu: u16,
    /// Whether its cable is plugged in.
    pub link: LinkWord,
    /// The vhost-user socket, if it is not `RUN_DIR/NAME.sock`.
    pub socket: Option<PathBuf>,
    /// Files that VMMs may share as memory of their guests.
    #[serde(default, skip_serializing_if = "MemoryWord::is_usual")]
    pub guest_memory: MemoryWord,
    /// The core that its queues prefer.
    pub core: Option<u32>,
}

/// A NIC as somebody asks for it. See [`NicForm::spec`] for what is left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the fields are those of NicSpec")]
pub struct NicForm {
    pub switch: Option<String>,
    pub mac: Option<Mac>,
    pub isolated: Option<bool>,
    pub vlan: Option<VlanSpec>,
    pub pairs: Option<u64>,
    pub queue_size: Option<u64>,
    pub mtu: Option<u64>,
    pub link: Option<LinkWord>,
    pub core: Option<u32>,
    pub socket: Option<PathBuf>,
    pub guest_memory: Option<MemoryWord>,
}

impl NicForm {
    /// The complete NIC. Left out: an address made from this host and its name, one pair of queues with 256 entries, an MTU
    /// of 1500, all VLANs, not isolated, the link up, and whatever core has time.
    pub fn spec(self, name: &str) -> Result<NicSpec, Vec<Flaw>> {
        let mut flaws = Vec::new();
        if self.switch.is_none() {
            flaws.push(Flaw::new("switch", "a NIC without a switch", "give switch = \"NAME\""));
        }
        let pairs = number(&mut flaws, "pairs", self.pairs, 1, 1..=PAIRS);
        let queue_size =
            number(&mut flaws, "queue_size", self.queue_size, NIC_QUEUE_SIZE, 64..=QUEUE_SIZE_MAX);
        let mtu = number(&mut flaws, "mtu", self.mtu, MTU, MTU_LEAST..=MTU_MOST);
        let spec = NicSpec {
            name: name.to_owned(),
            switch: self.switch.unwrap_or_else(|| "none".to_owned()),
            mac: self.mac.unwrap_or_else(|| Mac::of(&host(), name)),
            isolated: self.isolated.unwrap_or(false),
            vlan: self.vlan.unwrap_or_default(),
            pairs,
            queue_size,
            mtu,
            link: self.link.unwrap_or_default(),
            socket: self.socket,
            guest_memory: self.guest_memory.unwrap_or_default(),
            core: self.core,
        };
        checked(spec, flaws)
    }
}

/// The smallest MTU of IPv4, and the largest that a frame with a VLAN tag leaves room for in 64 KiB.
const MTU_LEAST: u16 = 68;
const MTU_MOST: u16 = 65517;

impl ServedSpec for NicSpec {
    fn name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    fn core(&self) -> Option<u32> {
        self.core
    }

    fn guest_memory(&self) -> MemoryWord {
        self.guest_memory
    }

    /// A receive and a transmit queue for each pair (virtio 1.3, 5.1.2); the control queue is the VMM's.
    fn queues(&self) -> u16 {
        2 * self.pairs
    }

    fn flaws(&self) -> Vec<Flaw> {
        let mut flaws: Vec<Flaw> = name_flaw(&self.name).into_iter().collect();
        if let Some(flaw) = name_flaw(&self.switch) {
            flaws.push(Flaw { field: "switch", ..flaw });
        }
        let mut flaw = |field, reason: String, remedy: String| flaws.push(Flaw::new(field, reason, remedy));
        if !(1..=PAIRS).contains(&self.pairs) {
            flaw("pairs", format!("pairs = {}", self.pairs), format!("give 1 to {PAIRS}"));
        }
        if !self.queue_size.is_power_of_two() || !(64..=QUEUE_SIZE_MAX).contains(&self.queue_size) {
            let remedy = "give a power of two from 64 to 1024".to_owned();
            flaw("queue_size", format!("queue_size = {}", self.queue_size), remedy);
        }
        if !(MTU_LEAST..=MTU_MOST).contains(&self.mtu) {
            flaw("mtu", format!("mtu = {}", self.mtu), format!("give {MTU_LEAST} to {MTU_MOST}"));
        }
        flaws.extend(self.socket.as_deref().and_then(socket_flaw));
        flaws
    }

    fn three_way(base: &Self, configured: &Self, now: &Self) -> Self {
        NicSpec {
            name: configured.name.clone(),
            switch: pick(&base.switch, &configured.switch, &now.switch),
            mac: pick(&base.mac, &configured.mac, &now.mac),
            isolated: pick(&base.isolated, &configured.isolated, &now.isolated),
            vlan: pick(&base.vlan, &configured.vlan, &now.vlan),
            pairs: pick(&base.pairs, &configured.pairs, &now.pairs),
            queue_size: pick(&base.queue_size, &configured.queue_size, &now.queue_size),
            mtu: pick(&base.mtu, &configured.mtu, &now.mtu),
            link: pick(&base.link, &configured.link, &now.link),
            socket: pick(&base.socket, &configured.socket, &now.socket),
            guest_memory: pick(&base.guest_memory, &configured.guest_memory, &now.guest_memory),
            core: pick(&base.core, &configured.core, &now.core),
        }
    }
}
