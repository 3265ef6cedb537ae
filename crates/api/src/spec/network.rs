//! What switches and NICs are to be.

use std::path::{Path, PathBuf};

use super::{
    Flaw, LinkWord, Mac, MemoryWord, QUEUE_SIZE_MAX, ServedSpec, VlanSpec, checked, form, name_flaw, number,
    socket_flaw, spec,
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

spec! {
    /// A switch, complete and checked.
    SwitchSpec {
        /// Unique among the daemon's switches.
        name: String,
        /// The host's TAP interface behind it, if frames are to leave this host or reach it.
        uplink: Option<String>,
        /// The core on which the uplink is served, if it is to be that one.
        core: Option<u32>,
    }
}

form! {
    /// A switch as somebody asks for it.
    SwitchForm {
        /// The host's TAP interface behind it, made if it is not there [default: none, guests talk to each other only]
        [long, value_name = "INTERFACE"]
        uplink: String,
        /// The I/O core that serves the uplink [default: whichever has time]
        [long, value_name = "ID", requires = "uplink"]
        core: u32,
    }
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
}

spec! {
    /// A NIC, complete and checked.
    NicSpec {
        /// Unique among everything that the daemon serves.
        name: String,
        /// The switch it is plugged into.
        switch: String,
        /// Its address; nobody else on the switch may send from it.
        mac: Mac,
        /// It reaches uplinks and NICs that are not isolated, and no isolated one.
        isolated: bool,
        /// Its VLANs.
        vlan: VlanSpec,
        /// Pairs of queues.
        pairs: u16,
        /// Largest ring.
        queue_size: u16,
        /// Bytes of a frame behind its Ethernet header.
        mtu: u16,
        /// Whether its cable is plugged in.
        link: LinkWord,
        /// The vhost-user socket, if it is not `RUN_DIR/NAME.sock`.
        socket: Option<PathBuf>,
        /// Files that VMMs may share as memory of their guests.
        #[serde(default, skip_serializing_if = "MemoryWord::is_usual")]
        guest_memory: MemoryWord,
        /// The core that its queues prefer.
        core: Option<u32>,
    }
}

form! {
    /// A NIC as somebody asks for it. See [`NicForm::spec`] for what is left out.
    NicForm {
        /// The switch to plug it into
        [long, required = true]
        switch: String,
        /// Its address [default: made from this host and the name, always the same]
        [long]
        mac: Mac,
        /// Exchange nothing with other isolated NICs
        [long, num_args = 0, default_missing_value = "true"]
        isolated: bool,
        /// Its VLANs: all, a number, or trunk:10,20 [default: all]
        [long]
        vlan: VlanSpec,
        /// Pairs of queues [default: 1]
        [long, value_name = "N"]
        pairs: u64,
        /// Entries of a queue [default: 256]
        [long, value_name = "N"]
        queue_size: u64,
        /// Bytes of a frame behind its Ethernet header [default: 1500]
        [long, value_name = "N"]
        mtu: u64,
        /// Whether its cable is plugged in [default: up]
        [long]
        link: LinkWord,
        /// The I/O core that its queues prefer [default: whichever has time]
        [long, value_name = "ID"]
        core: u32,
        /// Its vhost-user socket [default: NAME.sock in the run directory]
        [id = "vhost_socket", long = "vhost-socket", value_name = "PATH"]
        socket: PathBuf,
        /// Files that a VMM may share as its guest's memory: ram (memfd, tmpfs, hugetlbfs), or any, where page faults may wait
        /// for a disk or a network [default: ram]
        [long, value_name = "FILES"]
        guest_memory: MemoryWord,
    }
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
        NicSpec::three_way(base, configured, now)
    }

    fn differing(&self, other: &Self) -> Vec<&'static str> {
        NicSpec::differing(self, other)
    }

    fn port(&self) -> Option<(&str, Mac)> {
        Some((&self.switch, self.mac))
    }
}
