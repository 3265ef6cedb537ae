//! Mediated cards: a [`Monitor`] between the guest and simulated hardware, which an emulated card is.
//!
//! ```text
//!   guest --> Monitor --Hardware--> Simulated --> emulated card --port--> switch
//!                                       ^
//!                                     Stall: a card that is slow to start transmitting
//! ```
//!
//! What the suite asks of a device means here:
//!
//! - *Quiesce* is recognised, not commanded: the guest drives the card on until the monitor sees a reusable state. The suite lets a
//!   guest go on until then anyway.
//! - *A miss* is a transmission that the card does not begin. It can be staged on the RTL8139, whose doorbell is a register for that
//!   alone; on the NE2000 the bit that transmits is in the register that chooses banks, so that checks that want a stall do not apply.
//! - *The wire waits while the card is halted*, as behind a switch with flow control (802.3, annex 31B). A real wire does not: what
//!   comes meanwhile is lost and sent again by whoever wants to be heard, which these guests, deterministic as they are, cannot.
//! - Invariants 2, 3 and 5 are kept by the monitor itself, not by pollers: their mutations, which are there, do not show here.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_device::SavedState;
use ioplane_memory::GuestMap;
use ioplane_model::StateModel;
use ioplane_network::Port;
use ioplane_nic::ne2000::Ne2000;
use ioplane_nic::rtl8139::Rtl8139;
use ioplane_passthrough::monitor::{Monitor, MonitorOptions, MonitorStateV1, TransferV1};
use ioplane_passthrough::{ne2000, rtl8139};
use ioplane_pci::Function;

use super::Valve;
use super::nic::{CardUnderTest, EmulatedNe2000, EmulatedRtl8139, spoilt};
use crate::simulated::{Bench, Simulated};

/// An RTL8139C+ of the host, mediated.
#[derive(Debug, Clone, Copy)]
pub struct MediatedRtl8139;

/// An NE2000 of the host, mediated.
#[derive(Debug, Clone, Copy)]
pub struct MediatedNe2000;

/// The RTL8139's doorbell of the rings of C+ mode (TPPoll), which does nothing else.
const DOORBELL: u64 = 0xd9;

/// Stalls transmission on all cards of a machine: the one that runs, and those that take over from it.
pub struct StalledCards<F: Function> {
    shut: AtomicBool,
    benches: Mutex<Vec<Bench<F>>>,
}

impl<F: Function> Default for StalledCards<F> {
    fn default() -> Self {
        StalledCards { shut: AtomicBool::new(false), benches: Mutex::new(Vec::new()) }
    }
}

impl<F: Function> StalledCards<F> {
    fn benches(&self) -> MutexGuard<'_, Vec<Bench<F>>> {
        self.benches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, bench: Bench<F>) {
        let mut benches = self.benches();
        if self.shut.load(Ordering::SeqCst) {
            bench.hold(DOORBELL);
        }
        benches.push(bench);
    }
}

impl<F: Function> Valve for StalledCards<F> {
    fn shut(&self) {
        let benches = self.benches();
        if !self.shut.swap(true, Ordering::SeqCst) {
            benches.iter().for_each(|bench| bench.hold(DOORBELL));
        }
    }

    fn open(&self) {
        let benches = self.benches();
        self.shut.store(false, Ordering::SeqCst);
        for bench in benches.iter() {
            bench.release();
        }
    }
}

/// Puts an emulated card under a monitor, as hardware that moves frames by itself.
fn watch<F: Function>(
    card: F,
    model: &'static StateModel,
    memory: &Arc<GuestMap>,
) -> (Monitor<Simulated<F>>, Bench<F>) {
    let (hardware, bench) = Simulated::new("0000:00:05.0", card).expect("an eventfd");
    let hardware = hardware.by_itself().expect("an epoll instance");
    let mut monitor = Monitor::new(hardware, model, MonitorOptions::new("nic")).expect("hardware that works");
    monitor.grow_memory(memory.clone()).expect("an IOMMU with room");
    (monitor, bench)
}

fn write(state: &mut MonitorStateV1, name: &str, change: impl Fn(u32) -> u32) {
    let register = state.registers.iter_mut().find(|(register, _)| register == name);
    let (_, value) = register.expect("a register that is saved");
    *value = change(*value);
}

impl CardUnderTest for MediatedRtl8139 {
    type F = Monitor<Simulated<Rtl8139>>;
    type Stall = StalledCards<Rtl8139>;

    fn make(&self, memory: &Arc<GuestMap>, port: &Arc<Port>, stall: &Arc<Self::Stall>) -> Self::F {
        // The hardware reaches what the IOMMU lets it reach, and nothing else.
        let card = EmulatedRtl8139.make(&Arc::default(), port, &Arc::default());
        let (monitor, bench) = watch(card, &rtl8139::MODEL, memory);
        stall.add(bench);
        monitor
    }

    fn valve(stall: Arc<Self::Stall>) -> Option<Arc<dyn Valve>> {
        Some(stall)
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        spoilt::<MonitorStateV1>(
            good,
            &[
                ("interrupts that the chip does not have", |state| state.status |= 1 << 16),
                ("a mask wider than the register", |state| state.mask |= 1 << 16),
                ("a register too few", |state| drop(state.registers.pop())),
                ("a value wider than its register", |state| write(state, "CPCR", |value| value | 1 << 16)),
                ("a reset among the registers", |state| write(state, "CR9346", |_| 0x40)),
                ("a receiver without descriptors", |state| write(state, "CPCR", |_| 0)),
                ("rings that are enabled and do not run", |state| write(state, "CR", |value| value ^ 0x0c)),
                ("another model", |state| state.machine.model = "ne2000".into()),
                ("a region too few", |state| drop(state.machine.states.pop())),
                ("a state that no region has", |state| state.machine.states[0].1 = "Flying".into()),
                ("a register that nobody knows", |state| state.machine.values.push(("WARP".into(), 9))),
                ("a block that the model does not have", |state| state.blocks.push((0, 0, true))),
                ("memory that the card does not have", |state| state.card.bytes = Some(vec![0; 0x4000])),
                ("a transfer without a data port", |state| {
                    state.card.transfer = Some(TransferV1 { read: true, address: 0x4000, left: 4 });
                }),
                ("half a configuration space", |state| state.config.truncate(128)),
            ],
        )
    }
}

impl CardUnderTest for MediatedNe2000 {
    type F = Monitor<Simulated<Ne2000>>;
    type Stall = ();

    fn make(&self, memory: &Arc<GuestMap>, port: &Arc<Port>, stall: &Arc<()>) -> Self::F {
        watch(EmulatedNe2000.make(memory, port, stall), &ne2000::MODEL, memory).0
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        fn transfer(state: &mut MonitorStateV1, read: bool, address: u16, left: u16) {
            state.card.transfer = Some(TransferV1 { read, address, left });
        }
        spoilt::<MonitorStateV1>(
            good,
            &[
                ("interrupts that the chip does not have", |state| state.status |= 1 << 8),
                ("a mask wider than the register", |state| state.mask |= 1 << 8),
                ("a register too few", |state| drop(state.registers.pop())),
                ("a value wider than its register", |state| write(state, "PSTOP", |value| value | 1 << 8)),
                ("a receive ring that ends before it begins", |state| write(state, "PSTOP", |_| 0x42)),
                ("a receive ring beyond the memory", |state| write(state, "PSTOP", |_| 0xff)),
                ("a region too few", |state| drop(state.machine.states.pop())),
                ("a state that no region has", |state| state.machine.states[0].1 = "Flying".into()),
                ("less memory than the card has", |state| state.card.bytes = Some(vec![0; 0x3ffe])),
                ("more memory than the card has", |state| state.card.bytes = Some(vec![0; 0x4002])),
                ("a transfer from where nothing is", |state| transfer(state, true, 0x2000, 4)),
                ("a transfer into the PROM", |state| transfer(state, false, 0x0000, 4)),
                ("a transfer into the memory from before it", |state| transfer(state, false, 0x3ff0, 0x20)),
                ("a block that the model does not have", |state| state.blocks.push((0, 0, false))),
                ("no configuration space", |state| state.config.clear()),
            ],
        )
    }
}
