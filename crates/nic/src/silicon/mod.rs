//! Virtual functions of Intel's NICs, as the hardware of tests: they enforce the silicon's rules and record whoever breaks one.
//!
//! | rule | where |
//! |---|---|
//! | a head is written as zero only, and only while its queue is off; a tail only while it is on | `queue` |
//! | a queue that was switched off finishes what it has in hand before its enable bit reads as zero | `queue` |
//! | the head moves when a descriptor is taken; data and the write-back with DD reach memory a step later | `queue` |
//! | counters are read-only, go on through a reset and wrap | here |
//! | mailbox: held, requested, taken, answered, with bits that reading clears | `mailbox` |
//! | frames are shared out to queues by a hash with the PF's key, as many as PSRTYPE says | `rss` |
//! | VLAN tags, checksums and segments by context descriptors | `offload` |
//! | causes, masks, auto-mask, auto-clear, vectors with mask and pending bit | `interrupts` |
//!
//! What differs from chip to chip is a [`Chip`]. A function has no save, no load, and no other way to its inside than a driver's and
//! the PF's: [`VirtualFunction::pf`] is what the PF knows.
//!
//! Nothing happens by itself: [`VirtualFunction::step`] is one unit of the device's time.

mod chip;
mod dma;
mod interrupts;
mod mailbox;
mod offload;
mod pf;
mod queue;
mod rss;
pub mod spec;
mod violation;

pub use chip::{Chip, CounterPlace, InterruptLayout, QueueLayout, QueueRegister, RegisterLayout, Statistic};
pub use pf::PfState;
pub(crate) use pf::{STANDARD, address, info, words};
pub use violation::SiliconViolation;

use std::collections::BTreeSet;
use std::marker::PhantomData;

use dma::Dma;
use interrupts::Interrupts;
use ioplane_memory::{MapError, MemoryRegion};
use ioplane_pci::{Irq, Wire, WireError};
use mailbox::Mailbox;
use queue::Queue;
use spec::*;

/// Steps that a reset takes.
const RESET_STEPS: u8 = 2;

/// A virtual function of this chip.
pub struct VirtualFunction<C: Chip> {
    link: bool,
    master: bool,
    /// Steps until the reset has ended.
    resetting: u8,
    split: u32,
    plain: Vec<u32>,
    receive: Vec<Queue>,
    transmit: Vec<Queue>,
    interrupts: Interrupts,
    mailbox: Mailbox,
    counters: Vec<u64>,
    dma: Dma,
    sent: Vec<Vec<u8>>,
    violations: Vec<SiliconViolation>,
    chip: PhantomData<C>,
}

impl<C: Chip> VirtualFunction<C> {
    /// One with a link, whose PF gave it this address and all queues that the chip has. Its counters begin anywhere.
    pub fn new(mac: [u8; 6], counted: u32) -> Self {
        Self::with_queues(mac, counted, C::LAYOUT.receive.count as u8)
    }

    /// The same with so many queues. Registers of the others read as zero and take nothing.
    pub fn with_queues(mac: [u8; 6], counted: u32, queues: u8) -> Self {
        let layout = &C::LAYOUT;
        let all = |most: usize| (0..most.min(queues.into())).map(|_| Queue::default()).collect();
        // A wide one begins at the same place below its end.
        let sign = if counted >> 31 == 1 { !0 << 32 } else { 0 };
        let begin = |place: &CounterPlace| (sign | u64::from(counted)) & place.mask();
        VirtualFunction {
            link: true,
            master: false,
            resetting: 0,
            split: 0,
            plain: vec![0; layout.plain.len()],
            receive: all(layout.receive.count),
            transmit: all(layout.transmit.count),
            interrupts: Interrupts::new(layout),
            mailbox: Mailbox::new(PfState::new(mac, queues)),
            counters: layout.counters.iter().map(begin).collect(),
            dma: Dma::default(),
            sent: Vec::new(),
            violations: Vec::new(),
            chip: PhantomData,
        }
    }

    /// Rules that were broken, first to last.
    pub fn violations(&self) -> &[SiliconViolation] {
        &self.violations
    }

    /// What the PF keeps of it.
    pub fn pf(&self) -> &PfState {
        &self.mailbox.pf
    }

    /// What an administrator does at the PF: the address is set, and the VF may not change it.
    pub fn set_mac(&mut self, mac: [u8; 6]) {
        (self.mailbox.pf.own_mac, self.mailbox.pf.mac, self.mailbox.pf.mac_is_set) = (mac, mac, true);
    }

    /// The newest version of messages that the PF's driver knows.
    pub fn set_newest_api(&mut self, newest: u32) {
        self.mailbox.pf.newest_api = newest;
    }

    /// Whether the PF's interface is set up for long frames.
    pub fn set_jumbo(&mut self, jumbo: bool) {
        self.mailbox.pf.jumbo = jumbo;
    }

    /// The PF says a word by itself.
    pub fn pf_says(&mut self, word: u32) {
        self.mailbox.say(word);
    }

    /// The PF's driver begins anew and says nothing: it knows nothing of the VF, and refuses what it says before RESET.
    pub fn pf_forgets(&mut self) {
        self.mailbox.pf.reset();
    }

    /// Plugs or pulls the cable.
    pub fn set_link(&mut self, link: bool) {
        self.link = link;
    }

    /// Frames that left, since it was asked last.
    pub fn take_sent(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.sent)
    }

    /// Lets it reach memory at bus addresses.
    pub fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), MapError> {
        self.dma.map(iova, region)
    }

    /// Takes that back. `false`: it was not mapped so.
    pub fn unmap(&mut self, iova: u64, len: u64) -> bool {
        self.dma.unmap(iova, len)
    }

    /// Pages of guest memory (address / 4096) that it wrote by DMA, since it was asked last: what no hardware says.
    pub fn take_written(&mut self) -> BTreeSet<u64> {
        self.dma.take_written()
    }

    /// Bus mastering.
    pub fn set_master(&mut self, master: bool) {
        self.master = master;
    }

    /// Whether it is a bus master.
    pub fn is_master(&self) -> bool {
        self.master
    }

    /// A vector's wire, mask and pending bit.
    pub fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        let vectors = &mut self.interrupts.vectors;
        let found = irq == Irq::Msix
            && match wire {
                Wire::Call(call) => vectors.connect(vector, call),
                Wire::Mask => vectors.mask(vector, true),
                Wire::Unmask => vectors.mask(vector, false),
                Wire::Trigger => vectors.signal(vector),
            };
        if found { Ok(()) } else { Err(WireError::NoSuchVector { irq, vector }) }
    }

    /// Resets it: what FLR and the control register's bit do. The counters go on.
    pub fn reset(&mut self) {
        let keeps = C::LAYOUT.reset_keeps;
        self.receive.iter_mut().chain(&mut self.transmit).for_each(|queue| queue.reset(keeps));
        self.interrupts.reset(&C::LAYOUT);
        self.mailbox.reset();
        self.plain.fill(0);
        if !keeps {
            self.split = 0;
        }
        self.resetting = RESET_STEPS;
    }

    /// Reads BAR 0.
    pub fn read(&mut self, offset: u64, out: &mut [u8]) {
        out.fill(0);
        if out.len() != 4 || !offset.is_multiple_of(4) || offset >= BAR_SIZE {
            self.violations.push(SiliconViolation::Access { offset, bytes: out.len() });
            return;
        }
        out.copy_from_slice(&self.register(offset).to_le_bytes());
    }

    fn register(&mut self, offset: u64) -> u32 {
        let layout = &C::LAYOUT;
        if let Some((queues, at, register)) = self.queues(offset) {
            return queues.get(at).map_or(0, |queue| queue.read(register));
        }
        for (place, value) in layout.counters.iter().zip(&self.counters) {
            match place.high {
                _ if place.low == offset => return *value as u32,
                Some((high, _)) if high == offset => return (value >> 32) as u32,
                _ => {}
            }
        }
        if offset == layout.link.0 {
            return if self.link { layout.link.1 } else { 0 };
        }
        if offset == layout.split {
            return self.split;
        }
        if let Some(at) = layout.plain.iter().position(|own| *own == offset) {
            return self.plain[at];
        }
        if let Some(value) = self.mailbox.read(layout, offset) {
            return value;
        }
        self.interrupts.read(offset).unwrap_or(0)
    }

    /// Writes BAR 0.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let Some(value) = bytes.try_into().ok().filter(|_| offset.is_multiple_of(4) && offset < BAR_SIZE)
        else {
            self.violations.push(SiliconViolation::Access { offset, bytes: bytes.len() });
            return;
        };
        if let Err(violation) = self.set(offset, u32::from_le_bytes(value)) {
            self.violations.push(violation);
        }
    }

    fn set(&mut self, offset: u64, value: u32) -> Result<(), SiliconViolation> {
        let layout = &C::LAYOUT;
        if self.resetting > 0 {
            return Err(SiliconViolation::DuringReset { offset });
        }
        if let Some((queues, at, register)) = self.queues(offset) {
            return queues.get_mut(at).map_or(Ok(()), |queue| queue.write(offset, register, value));
        }
        if offset == layout.control {
            if value & CTRL_RST != 0 {
                self.reset();
            }
            return Ok(());
        }
        if offset == layout.split {
            self.split = value;
            return Ok(());
        }
        if let Some(at) = layout.plain.iter().position(|own| *own == offset) {
            self.plain[at] = value;
            return Ok(());
        }
        if self.mailbox.write(layout, offset, value)? || self.interrupts.write(offset, value) {
            return Ok(());
        }
        Err(SiliconViolation::ReadOnly { offset })
    }

    /// The queues that a register is of, which of them, and which register.
    fn queues(&mut self, offset: u64) -> Option<(&mut Vec<Queue>, usize, QueueRegister)> {
        let layout = &C::LAYOUT;
        if let Some((at, register)) = layout.receive.find(offset) {
            return Some((&mut self.receive, at, register));
        }
        let (at, register) = layout.transmit.find(offset)?;
        Some((&mut self.transmit, at, register))
    }

    fn count(&mut self, counted: Statistic, by: usize) {
        for (place, value) in C::LAYOUT.counters.iter().zip(&mut self.counters) {
            if place.counts == counted {
                *value = value.wrapping_add(by as u64) & place.mask();
            }
        }
    }

    /// A frame comes from the wire or the PF. Whether it was taken in: it was for this function and there was a buffer.
    pub fn receive(&mut self, frame: &[u8]) -> bool {
        let pf = &self.mailbox.pf;
        let Some(to) = frame.get(..6) else { return false };
        let group = to[0] & 1 == 1;
        let broadcast = to == [0xff; 6];
        let wanted = (pf.wants(to) || C::promiscuous(pf, group)) && pf.is_member(queue::vlan(frame));
        let takes = self.link && self.master && self.resetting == 0 && (!C::LAYOUT.gated || pf.delivers);
        if !wanted || !takes || frame.len() as u32 + 4 > pf.longest {
            return false;
        }
        let at = rss::queue(&pf.key, self.split, frame);
        let Some(queue) = self.receive.get_mut(at) else { return false };
        if !queue.receive(frame, &self.dma, &mut self.violations) {
            return false;
        }
        self.count(Statistic::Received, 1);
        self.count(Statistic::ReceivedBytes, frame.len() + 4);
        if group && !broadcast {
            self.count(Statistic::Multicast, 1);
        }
        true
    }

    /// One unit of time: write-backs that are due, then at most one descriptor of each transmit queue; the PF does one thing.
    pub fn step(&mut self) {
        if self.resetting > 0 {
            self.resetting -= 1;
            if self.resetting == 0 {
                self.mailbox.ready();
            }
            return;
        }
        let began = self.mailbox.pf.clear_to_send;
        if self.mailbox.step::<C>() {
            self.interrupts.mailbox();
        }
        if C::LAYOUT.reset_keeps && !began && self.mailbox.pf.clear_to_send {
            self.transmit.iter_mut().for_each(Queue::switch_off);
        }
        for at in 0..self.receive.len() {
            if self.receive[at].flush(&self.dma, &mut self.violations) > 0 {
                self.interrupts.queue(at, false);
            }
        }
        let sends = self.master && (!C::LAYOUT.gated || self.mailbox.pf.clear_to_send);
        for at in 0..self.transmit.len() {
            if self.transmit[at].flush(&self.dma, &mut self.violations) > 0 {
                self.interrupts.queue(at, true);
            }
            if !sends {
                continue;
            }
            for frame in self.transmit[at].transmit(self.link, &self.dma, &mut self.violations) {
                self.count(Statistic::Sent, 1);
                self.count(Statistic::SentBytes, frame.len() + 4);
                self.sent.push(frame);
            }
        }
    }
}
