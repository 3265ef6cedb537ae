//! What switches and NICs are to be.

use std::path::PathBuf;

use super::checks::{CountField, checked, interface_flaw, name_flaw, switch_flaw};
use super::{
    Flaw, LimitFields, LimitsSpec, LinkWord, MacAddress, MemoryWord, PortSpec, QUEUE_SIZE_MAX, ServedSpec,
    VlanSpec, form, group_flaw, limit_names, limited, limits_of, named, served_fields, set_limits, spec,
    with_limits,
};

/// Queue pairs of one NIC.
const PAIRS: CountField = CountField { name: "pairs", range: 1..=8, power_of_two: false, usual: 1 };
/// Entries of a ring if nobody says: what QEMU takes without being told.
pub const NIC_QUEUE_SIZE: u16 = 256;
const QUEUE_SIZE: CountField =
    CountField { name: "queue_size", range: 64..=QUEUE_SIZE_MAX, power_of_two: true, usual: NIC_QUEUE_SIZE };
/// Bytes of a frame behind its Ethernet header, if nobody says.
pub const MTU: u16 = 1500;
/// The smallest MTU of IPv4, and the largest that a frame with a VLAN tag leaves room for in 64 KiB.
const MTUS: CountField = CountField { name: "mtu", range: 68..=65517, power_of_two: false, usual: MTU };

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

limited! { spec! spec [tx_limits rx_limits]
    {
        /// A NIC, complete and checked.
        NicSpec
    } {
        /// Unique among everything that the daemon serves.
        name: String,
        /// The switch it is plugged into.
        switch: String,
        /// Its address; nobody else on the switch may send from it.
        mac: MacAddress,
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
        /// Its link.
        link: LinkWord,
        /// The vhost-user socket, if it is not `RUN_DIR/NAME.sock`.
        socket: Option<PathBuf>,
        /// Files that VMMs may share as memory of their guests.
        #[serde(default, skip_serializing_if = "MemoryWord::is_usual")]
        guest_memory: MemoryWord,
        /// The core that its queues prefer.
        core: Option<u32>,
        /// The group it is in, if any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
    }
}

limited! { form! form [tx_limits rx_limits]
    {
        /// A NIC as somebody asks for it. See [`NicForm::spec`] for what is left out.
        NicForm
    } {
        /// The switch to plug it into
        [long, required = true]
        switch: String,
        /// Its address [default: made from this host and the name, always the same]
        [long]
        mac: MacAddress,
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
        /// Link state [default: up]
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
        /// The group it is in: its weight and its limits are the group's [default: none, all devices in none count as one group of weight 1]
        [long, value_name = "NAME"]
        group: String,
    }
}

limited! { form! change [tx_limits rx_limits]
    {
        /// A change of a NIC: its link, its limits, its group. What is left out stays as it is.
        NicChangeForm
    } {
        /// Link state
        [long]
        link: LinkWord,
        /// The group it is to be in; '' for none
        [long, value_name = "NAME"]
        group: String,
    }
}

impl NicChangeForm {
    /// What it changes of the limits of what the guest sends.
    pub fn tx_limits(&self) -> LimitsSpec {
        limits_of!(tx_limits of self)
    }

    /// What it changes of the limits of what the guest receives.
    pub fn rx_limits(&self) -> LimitsSpec {
        limits_of!(rx_limits of self)
    }
}

impl NicSpec {
    /// The fields of the limits of what its guest sends.
    pub const TX_LIMITS: LimitFields = limit_names!(tx_limits);
    /// The fields of the limits of what its guest receives.
    pub const RX_LIMITS: LimitFields = limit_names!(rx_limits);

    /// The limits of what its guest sends.
    pub fn tx_limits(&self) -> LimitsSpec {
        limits_of!(tx_limits of self)
    }

    /// The limits of what its guest receives.
    pub fn rx_limits(&self) -> LimitsSpec {
        limits_of!(rx_limits of self)
    }

    /// What is wrong with limits that somebody asks for, beside what may be stored.
    pub fn limit_flaws(&self) -> Vec<Flaw> {
        [self.tx_limits().lonely(Self::TX_LIMITS), self.rx_limits().lonely(Self::RX_LIMITS)].concat()
    }

    /// Other limits.
    pub fn set_limits(&mut self, tx: LimitsSpec, rx: LimitsSpec) {
        set_limits!(tx_limits of self = tx);
        set_limits!(rx_limits of self = rx);
    }
}

impl NicForm {
    /// The complete NIC. Left out: an address made from this host and its name, one pair of queues with 256 entries, an MTU
    /// of 1500, all VLANs, not isolated, the link up, no limits, in no group, and whatever core has time.
    pub fn spec(self, name: &str) -> Result<NicSpec, Vec<Flaw>> {
        let mut flaws = Vec::new();
        if self.switch.is_none() {
            flaws.push(Flaw::new("switch", "a NIC without a switch", "give switch = \"NAME\""));
        }
        let pairs = PAIRS.read(&mut flaws, self.pairs);
        let queue_size = QUEUE_SIZE.read(&mut flaws, self.queue_size);
        let mtu = MTUS.read(&mut flaws, self.mtu);
        let tx = limits_of!(tx_limits of self).asked();
        let rx = limits_of!(rx_limits of self).asked();
        let spec = with_limits!(
            NicSpec {
                name: name.to_owned(),
                switch: self.switch.unwrap_or_else(|| "none".to_owned()),
                mac: self.mac.unwrap_or_else(|| MacAddress::of(&host(), name)),
                isolated: self.isolated.unwrap_or(false),
                vlan: self.vlan.unwrap_or_default(),
                pairs,
                queue_size,
                mtu,
                link: self.link.unwrap_or_default(),
                socket: self.socket,
                guest_memory: self.guest_memory.unwrap_or_default(),
                core: self.core,
                group: named(self.group),
            },
            tx_limits = tx,
            rx_limits = rx
        );
        flaws.extend(spec.limit_flaws());
        checked(spec, flaws)
    }
}

impl ServedSpec for NicSpec {
    served_fields!();

    fn core(&self) -> Option<u32> {
        self.core
    }

    fn group(&self) -> Option<&str> {
        self.group.as_deref()
    }

    /// A receive and a transmit queue for each pair (virtio 1.3, 5.1.2); the control queue is the VMM's.
    fn queues(&self) -> u16 {
        2 * self.pairs
    }

    fn own_flaws(&self) -> Vec<Flaw> {
        let numbers = [PAIRS.flaw(self.pairs), QUEUE_SIZE.flaw(self.queue_size), MTUS.flaw(self.mtu)];
        let limits = self
            .tx_limits()
            .flaws(Self::TX_LIMITS)
            .into_iter()
            .chain(self.rx_limits().flaws(Self::RX_LIMITS));
        let names = switch_flaw(&self.switch).into_iter().chain(group_flaw(self.group.as_deref()));
        names.chain(numbers.into_iter().flatten()).chain(limits).collect()
    }

    fn port(&self) -> Option<PortSpec> {
        Some(PortSpec { switch: self.switch.clone(), mac: self.mac, shares_mac: true })
    }
}
