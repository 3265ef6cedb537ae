//! The declaration: which checks there are, which device on which host offers what, and what fails when an invariant is taken out.
//!
//! `tests/conformance.rs` runs [`Entry::checks`] of each entry of [`KITS`], `tests/mutations.rs` takes out each invariant and wants
//! exactly the failures that [`ConformanceCheck::expects`] names, and `docs/guide/conformance.md` is written from here (`document.rs`).

use ioplane_device::mutation::Invariant;

use super::adder::Adding;
use super::blk::Disks;
use super::dma::DmaKit;
use super::mediated::{MediatedNe2000, MediatedRtl8139};
use super::mmio::Mmio;
use super::net::Nics;
use super::nic::{Behind, EmulatedNe2000, EmulatedRtl8139, Ne2000s, Rtl8139s};
use super::proof::Proof;
use super::ring::RingKit;
use super::vhost_user::OverSocket;
use super::virtio::PackedRings;
use super::{FailedCheck, Kit, Plan, TestMachine, checks, invariants, queues};

/// What a device offers on its host. A check that needs an offer is run where it is declared, and nowhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// The guest reaches registers through this host.
    Registers,
    /// Queues with pollers on I/O cores, with kicks and interrupts.
    Rings,
    /// Requests stay in flight for as long as what the device stands on is stalled.
    Flight,
    /// It stores to guest memory.
    Stores,
}

impl Offer {
    pub const ALL: [Offer; 4] = [Offer::Registers, Offer::Rings, Offer::Flight, Offer::Stores];

    pub fn name(self) -> &'static str {
        match self {
            Offer::Registers => "registers",
            Offer::Rings => "rings",
            Offer::Flight => "flight",
            Offer::Stores => "stores",
        }
    }

    pub fn what(self) -> &'static str {
        match self {
            Offer::Registers => "the guest reaches the device's registers through this host",
            Offer::Rings => "queues with pollers on I/O cores, with kicks and interrupts",
            Offer::Flight => "requests stay in flight for as long as what the device stands on is stalled",
            Offer::Stores => "the device stores to guest memory",
        }
    }
}

/// What becomes of a check when an invariant is taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// It fails and blames that invariant.
    Blames,
    /// It fails, for whatever reason it gives.
    Fails,
    /// It may fail, but does not blame another invariant: what it does needs the invariant too.
    MayFail,
    Passes,
}

#[derive(Debug, Clone, Copy)]
pub struct ConformanceCheck {
    /// Its name; `invariant_N_` for one that is about an invariant.
    pub name: &'static str,
    pub asserts: &'static str,
    pub needs: Option<Offer>,
    /// The invariant that it is about: its finding begins with `invariant N:` when that invariant is taken out.
    pub invariant: Option<Invariant>,
    /// Other invariants without which it fails.
    fails: &'static [Invariant],
    /// Other invariants without which it may fail.
    may_fail: &'static [Invariant],
    run: fn(&dyn Kit, &Plan) -> Result<Proof, String>,
}

impl ConformanceCheck {
    /// What becomes of it when `invariant` is taken out.
    pub fn expects(&self, invariant: Invariant) -> Expected {
        if self.invariant == Some(invariant) {
            Expected::Blames
        } else if self.fails.contains(&invariant) {
            Expected::Fails
        } else if self.may_fail.contains(&invariant) {
            Expected::MayFail
        } else {
            Expected::Passes
        }
    }

    /// Runs it, whether the kit offers what it needs or not.
    pub fn run(&self, kit: &dyn Kit, plan: &Plan) -> Result<Proof, FailedCheck> {
        (self.run)(kit, plan).map_err(|what| FailedCheck { check: self.name, what })
    }
}

/// Without these a device that is held and resumes is not what it was before.
const OF_A_PAUSE: &[Invariant] = &[Invariant::KeepsWhatArrives, Invariant::LooksAgain];
/// As [`OF_A_PAUSE`], where a miss is taken back too.
const OF_A_MISS: &[Invariant] = &[Invariant::KeepsWhatArrives, Invariant::LooksAgain, Invariant::GivesBack];

pub const CHECKS: &[ConformanceCheck] = &[
    ConformanceCheck {
        name: "invariant_1_keeps_what_arrives",
        asserts: "register accesses wait while the device is held, and are answered afterwards",
        needs: Some(Offer::Registers),
        invariant: Some(Invariant::KeepsWhatArrives),
        fails: &[],
        may_fail: &[Invariant::LooksAgain],
        run: invariants::keeps_what_arrives,
    },
    ConformanceCheck {
        name: "invariant_1_latches_kicks",
        asserts: "each kick that comes while the device is held is taken when it resumes",
        needs: Some(Offer::Rings),
        invariant: Some(Invariant::KeepsWhatArrives),
        fails: &[],
        may_fail: &[Invariant::LooksAgain],
        run: queues::latches_kicks,
    },
    ConformanceCheck {
        name: "invariant_2_looks_again",
        asserts: "a request that came without a kick while the device was held is answered",
        needs: Some(Offer::Rings),
        invariant: Some(Invariant::LooksAgain),
        fails: &[],
        may_fail: &[],
        run: queues::looks_again,
    },
    ConformanceCheck {
        name: "invariant_3_signals_once",
        asserts: "resuming interrupts the driver of each queue once, and not twice",
        needs: Some(Offer::Rings),
        invariant: Some(Invariant::SignalsOnce),
        fails: &[],
        may_fail: &[Invariant::LooksAgain],
        run: queues::signals_once,
    },
    ConformanceCheck {
        name: "invariant_4_distrusts_loaded",
        asserts: "no state that the device cannot be in is loaded, and the held device is unharmed",
        needs: None,
        invariant: Some(Invariant::DistrustsLoaded),
        fails: &[],
        may_fail: OF_A_PAUSE,
        run: invariants::distrusts_loaded,
    },
    ConformanceCheck {
        name: "invariant_5_gives_back",
        asserts: "after a missed deadline and an undrain the device resumes with all queues",
        needs: Some(Offer::Flight),
        invariant: Some(Invariant::GivesBack),
        fails: &[],
        may_fail: OF_A_PAUSE,
        run: invariants::gives_back,
    },
    ConformanceCheck {
        name: "invariant_6_marks_stores",
        asserts: "with the log on, every page that the device stores to is marked",
        needs: Some(Offer::Stores),
        invariant: Some(Invariant::MarksStores),
        fails: &[],
        may_fail: OF_A_PAUSE,
        run: invariants::marks_stores,
    },
    ConformanceCheck {
        name: "pause_is_not_seen",
        asserts: "the guest sees the same with pauses as without",
        needs: None,
        invariant: None,
        fails: &[],
        may_fail: OF_A_PAUSE,
        run: checks::pause,
    },
    ConformanceCheck {
        name: "transplant_is_not_seen",
        asserts: "the guest sees the same when a fresh instance with the saved state takes over",
        needs: None,
        invariant: None,
        fails: &[],
        may_fail: OF_A_PAUSE,
        run: checks::transplant,
    },
    ConformanceCheck {
        name: "move_is_not_seen",
        asserts: "the guest sees the same when queues move between a core that polls and one that is notified",
        needs: Some(Offer::Rings),
        invariant: None,
        fails: &[],
        may_fail: OF_A_PAUSE,
        run: checks::moves,
    },
    ConformanceCheck {
        name: "miss_is_not_seen",
        asserts: "the guest sees the same when deadlines are missed and taken back",
        needs: Some(Offer::Flight),
        invariant: None,
        fails: &[],
        may_fail: OF_A_MISS,
        run: checks::miss,
    },
    ConformanceCheck {
        name: "suspension_is_not_seen",
        asserts: "the guest sees the same when requests are fenced off and done again",
        needs: Some(Offer::Flight),
        invariant: None,
        fails: &[],
        may_fail: OF_A_MISS,
        run: checks::suspension,
    },
    ConformanceCheck {
        name: "undrain_is_not_seen",
        asserts: "the guest sees the same when a quiesce is begun and taken back at once",
        needs: None,
        invariant: None,
        fails: &[],
        may_fail: OF_A_MISS,
        run: checks::undrain,
    },
    ConformanceCheck {
        name: "dropped_future_is_not_seen",
        asserts: "the guest sees the same when whoever waits for quiescence gives up",
        needs: Some(Offer::Flight),
        invariant: None,
        fails: &[],
        may_fail: OF_A_MISS,
        run: checks::dropped_future,
    },
];

pub fn check(name: &str) -> Option<&'static ConformanceCheck> {
    CHECKS.iter().find(|check| check.name == name)
}

/// Who drives a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostKind {
    /// vCPU threads of this process.
    InProcess,
    /// A front end on a vhost-user socket.
    VhostUser,
    /// A client on a vfio-user socket.
    VfioUser,
}

impl HostKind {
    /// In a table.
    pub fn name(self) -> &'static str {
        match self {
            HostKind::InProcess => "in process",
            HostKind::VhostUser => "vhost-user",
            HostKind::VfioUser => "vfio-user",
        }
    }
}

/// A kit and what it declares.
pub struct Entry {
    /// Of its tests.
    pub name: &'static str,
    /// The device, in words.
    pub device: &'static str,
    pub on: HostKind,
    pub offers: &'static [Offer],
    /// What it does not offer, each with the reason. Together with the offers these are all there are.
    pub lacks: &'static [(Offer, &'static str)],
    pub kit: &'static dyn Kit,
}

impl Entry {
    /// Whether `check` is run on it.
    pub fn takes(&self, check: &ConformanceCheck) -> bool {
        check.needs.is_none_or(|offer| self.offers.contains(&offer))
    }

    /// The checks that are run on it.
    pub fn checks(&self) -> impl Iterator<Item = &'static ConformanceCheck> {
        CHECKS.iter().filter(|check| self.takes(check))
    }

    /// Whether a machine of this kit is as declared; what differs.
    pub fn agrees(&self, machine: &TestMachine) -> Result<(), String> {
        for offer in Offer::ALL {
            let declared = self.offers.contains(&offer);
            let excused = self.lacks.iter().any(|(lacking, _)| *lacking == offer);
            if declared == excused {
                return Err(format!("{} is both offered and lacking, or neither", offer.name()));
            }
            if declared != machine.offers(offer)? {
                let (says, has) = if declared { ("offered", "lacks") } else { ("lacking", "has") };
                return Err(format!("{} is declared as {says}, and the machine {has} it", offer.name()));
            }
        }
        Ok(())
    }
}

impl TestMachine {
    fn offers(&self, offer: Offer) -> Result<bool, String> {
        Ok(match offer {
            Offer::Registers => !self.buses.is_empty(),
            Offer::Rings => {
                if self.probes.is_empty() != self.host.queues().is_empty() {
                    return Err("a device with queues has probes, and one without has none".into());
                }
                !self.probes.is_empty()
            }
            Offer::Flight => self.gate.is_some(),
            Offer::Stores => !self.device_pages.is_empty(),
        })
    }
}

use Offer::{Flight, Registers, Rings, Stores};

const NO_REGISTERS: (Offer, &str) =
    (Registers, "the transport carries rings, the front end has the registers");
const NO_RINGS: (Offer, &str) = (Rings, "the device has registers only");
const NOTHING_PENDING: (Offer, &str) = (
    Flight,
    "between two polls a virtio-net queue has nothing in flight that it does not take back when it parks",
);
const ENDS_AT_ONCE: (Offer, &str) = (Flight, "an emulated NIC has nothing in flight between two accesses");
const ONE_REGISTER: (Offer, &str) = (
    Flight,
    "the bit that transmits is in the register that chooses banks, so a doorbell cannot be held back alone",
);
const NO_DMA: (Offer, &str) = (Stores, "an NE2000 moves data through its data port and does no DMA");

const ALL: &[Offer] = &Offer::ALL;
const OVER_SOCKET: &[Offer] = &[Rings, Flight, Stores];

/// Every device on every host that can serve it.
pub static KITS: &[Entry] = &[
    Entry {
        name: "toy_dma",
        device: "toy DMA engine",
        on: HostKind::InProcess,
        offers: &[Registers, Flight, Stores],
        lacks: &[NO_RINGS],
        kit: &DmaKit,
    },
    Entry {
        name: "toy_ring",
        device: "toy ring",
        on: HostKind::InProcess,
        offers: ALL,
        lacks: &[],
        kit: &RingKit,
    },
    virtio("toy_virtio_in_process", "toy virtio device", &Mmio(Adding)),
    served("toy_virtio_over_vhost_user", "toy virtio device", &OverSocket(Adding)),
    virtio("toy_virtio_packed_in_process", "toy virtio device, packed rings", &Mmio(PackedRings(Adding))),
    served(
        "toy_virtio_packed_over_vhost_user",
        "toy virtio device, packed rings",
        &OverSocket(PackedRings(Adding)),
    ),
    virtio("virtio_blk_in_process", "virtio-blk on memory", &Mmio(Disks::Memory)),
    served("virtio_blk_over_vhost_user", "virtio-blk on memory", &OverSocket(Disks::Memory)),
    virtio(
        "virtio_blk_packed_in_process",
        "virtio-blk on memory, packed rings",
        &Mmio(PackedRings(Disks::Memory)),
    ),
    served(
        "virtio_blk_packed_over_vhost_user",
        "virtio-blk on memory, packed rings",
        &OverSocket(PackedRings(Disks::Memory)),
    ),
    virtio("virtio_blk_io_uring_in_process", "virtio-blk on a file, io_uring", &Mmio(Disks::IoUring)),
    served(
        "virtio_blk_io_uring_over_vhost_user",
        "virtio-blk on a file, io_uring",
        &OverSocket(Disks::IoUring),
    ),
    virtio("virtio_blk_threads_in_process", "virtio-blk on a file, threads", &Mmio(Disks::Threads)),
    served(
        "virtio_blk_threads_over_vhost_user",
        "virtio-blk on a file, threads",
        &OverSocket(Disks::Threads),
    ),
    Entry {
        offers: NET,
        lacks: &[NOTHING_PENDING],
        ..virtio("virtio_net_in_process", "virtio-net", &Mmio(Nics))
    },
    Entry {
        offers: &[Rings, Stores],
        lacks: &[NO_REGISTERS, NOTHING_PENDING],
        ..served("virtio_net_over_vhost_user", "virtio-net", &OverSocket(Nics))
    },
    Entry {
        offers: NET,
        lacks: &[NOTHING_PENDING],
        ..virtio("virtio_net_packed_in_process", "virtio-net, packed rings", &Mmio(PackedRings(Nics)))
    },
    Entry {
        offers: &[Rings, Stores],
        lacks: &[NO_REGISTERS, NOTHING_PENDING],
        ..served(
            "virtio_net_packed_over_vhost_user",
            "virtio-net, packed rings",
            &OverSocket(PackedRings(Nics)),
        )
    },
    rtl8139("rtl8139_in_process", HostKind::InProcess, &Rtl8139s(EmulatedRtl8139, Behind::Process)),
    rtl8139("rtl8139_over_vfio_user", HostKind::VfioUser, &Rtl8139s(EmulatedRtl8139, Behind::VfioUser)),
    ne2000("ne2000_in_process", HostKind::InProcess, &Ne2000s(EmulatedNe2000, Behind::Process)),
    ne2000("ne2000_over_vfio_user", HostKind::VfioUser, &Ne2000s(EmulatedNe2000, Behind::VfioUser)),
    mediated_rtl8139("rtl8139_mediated", HostKind::InProcess, &Rtl8139s(MediatedRtl8139, Behind::Process)),
    mediated_rtl8139(
        "rtl8139_mediated_over_vfio_user",
        HostKind::VfioUser,
        &Rtl8139s(MediatedRtl8139, Behind::VfioUser),
    ),
    mediated_ne2000("ne2000_mediated", HostKind::InProcess, &Ne2000s(MediatedNe2000, Behind::Process)),
    mediated_ne2000(
        "ne2000_mediated_over_vfio_user",
        HostKind::VfioUser,
        &Ne2000s(MediatedNe2000, Behind::VfioUser),
    ),
];

const NET: &[Offer] = &[Registers, Rings, Stores];

const fn virtio(name: &'static str, device: &'static str, kit: &'static dyn Kit) -> Entry {
    Entry { name, device, on: HostKind::InProcess, offers: ALL, lacks: &[], kit }
}

const fn served(name: &'static str, device: &'static str, kit: &'static dyn Kit) -> Entry {
    Entry { name, device, on: HostKind::VhostUser, offers: OVER_SOCKET, lacks: &[NO_REGISTERS], kit }
}

const fn rtl8139(name: &'static str, on: HostKind, kit: &'static dyn Kit) -> Entry {
    let device = "RTL8139C+, emulated";
    Entry { name, device, on, offers: &[Registers, Stores], lacks: &[NO_RINGS, ENDS_AT_ONCE], kit }
}

const fn ne2000(name: &'static str, on: HostKind, kit: &'static dyn Kit) -> Entry {
    let device = "NE2000, emulated";
    Entry { name, device, on, offers: &[Registers], lacks: &[NO_RINGS, ENDS_AT_ONCE, NO_DMA], kit }
}

const fn mediated_rtl8139(name: &'static str, on: HostKind, kit: &'static dyn Kit) -> Entry {
    let device = "RTL8139C+, mediated";
    Entry { name, device, on, offers: &[Registers, Flight, Stores], lacks: &[NO_RINGS], kit }
}

const fn mediated_ne2000(name: &'static str, on: HostKind, kit: &'static dyn Kit) -> Entry {
    let device = "NE2000, mediated";
    Entry { name, device, on, offers: &[Registers], lacks: &[NO_RINGS, ONE_REGISTER, NO_DMA], kit }
}
