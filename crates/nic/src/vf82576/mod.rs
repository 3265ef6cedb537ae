//! A virtual function of Intel's 82576, as the hardware of tests: it enforces the silicon's rules and counts whoever breaks one.
//!
//! | rule | where |
//! |---|---|
//! | a head is written as zero only, and only while its queue is off; a tail only while it is on | `queue` |
//! | a queue that was switched off finishes what it has in hand before its enable bit reads as zero | `queue` |
//! | the head moves when a descriptor is taken; data and the write-back with DD reach memory a step later | `queue` |
//! | counters are read-only, go on through a reset and wrap at 32 bits | here |
//! | mailbox: held, requested, taken, answered, with bits that reading clears | `mailbox` |
//! | causes, masks, auto-mask, auto-clear, vectors with mask and pending bit | `interrupts` |
//!
//! It has no save, no load, and no other way to its inside than a driver's and the PF's: [`Vf82576::pf`] is what the PF knows.
//!
//! Nothing happens by itself: [`Vf82576::step`] is one unit of the device's time.

mod dma;
mod interrupts;
mod mailbox;
mod queue;
pub mod spec;
mod violation;

pub use mailbox::PfState;
pub use violation::SiliconViolation;

use dma::Dma;
use interrupts::Interrupts;
use ioplane_memory::{MapError, MemoryRegion};
use ioplane_pci::{Irq, Wire, WireError};
use mailbox::Mailbox;
use queue::Queue;
use spec::*;

/// Steps that a reset takes.
const RESET_STEPS: u8 = 2;

/// The function.
pub struct Vf82576 {
    link: bool,
    master: bool,
    /// Steps until the reset has ended.
    resetting: u8,
    acl: u32,
    split: u32,
    receive: [Queue; QUEUES],
    transmit: [Queue; QUEUES],
    interrupts: Interrupts,
    mailbox: Mailbox,
    counters: [u32; COUNTERS.len()],
    dma: Dma,
    sent: Vec<Vec<u8>>,
    violations: Vec<SiliconViolation>,
}

impl Vf82576 {
    /// One with a link, whose PF gave it this address. Its counters begin anywhere.
    pub fn new(mac: [u8; 6], counted: u32) -> Vf82576 {
        Vf82576 {
            link: true,
            master: false,
            resetting: 0,
            acl: 0,
            split: 0,
            receive: Default::default(),
            transmit: Default::default(),
            interrupts: Interrupts::new(),
            mailbox: Mailbox::new(mac),
            counters: [counted; COUNTERS.len()],
            dma: Dma::default(),
            sent: Vec::new(),
            violations: Vec::new(),
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

    /// The PF says a word by itself.
    pub fn pf_says(&mut self, word: u32) {
        self.mailbox.say(word);
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

    /// Bus mastering.
    pub fn set_master(&mut self, master: bool) {
        self.master = master;
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

    /// Resets it: what FLR and CTRL.RST do. The counters go on.
    pub fn reset(&mut self) {
        self.receive.iter_mut().chain(&mut self.transmit).for_each(Queue::reset);
        self.interrupts.reset();
        self.mailbox.reset();
        (self.acl, self.split) = (0, 0);
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
        if let Some((queue, register)) = self.queue(offset) {
            return queue.read(register).unwrap_or(0);
        }
        if let Some(at) = COUNTERS.iter().position(|own| *own == offset) {
            return self.counters[at];
        }
        match offset {
            STATUS => u32::from(self.link) * STATUS_LU,
            V2PMAILBOX => self.mailbox.read(offset),
            PBACL => self.acl,
            PSRTYPE => self.split,
            _ if mailbox_memory(offset) => self.mailbox.read(offset),
            _ => self.interrupts.read(offset).unwrap_or(0),
        }
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
        if self.resetting > 0 {
            return Err(SiliconViolation::DuringReset { offset });
        }
        if let Some((queue, register)) = self.queue(offset) {
            return queue.write(offset, register, value);
        }
        match offset {
            CTRL if value & CTRL_RST != 0 => self.reset(),
            CTRL => {}
            PBACL => self.acl = value,
            PSRTYPE => self.split = value,
            V2PMAILBOX => return self.mailbox.write(offset, value),
            _ if mailbox_memory(offset) => return self.mailbox.write(offset, value),
            _ if self.interrupts.write(offset, value) => {}
            _ => return Err(SiliconViolation::ReadOnly { offset }),
        }
        Ok(())
    }

    fn queue(&mut self, offset: u64) -> Option<(&mut Queue, u64)> {
        let transmit = offset >= TX;
        let at = offset.checked_sub(if transmit { TX } else { RX })?;
        let queues = if transmit { &mut self.transmit } else { &mut self.receive };
        let register = at % QUEUE_STRIDE;
        let only = match register {
            SRRCTL | RQDPC => !transmit,
            DCA | TDWBAL | TDWBAH => transmit,
            _ => true,
        };
        let queue = queues.get_mut((at / QUEUE_STRIDE) as usize)?;
        only.then_some((queue, register))
    }

    fn count(&mut self, counter: u64, by: usize) {
        if let Some(at) = COUNTERS.iter().position(|own| *own == counter) {
            self.counters[at] = self.counters[at].wrapping_add(by as u32);
        }
    }

    /// A frame comes from the wire or the PF. Whether it was taken in: it was for this function and there was a buffer.
    pub fn receive(&mut self, frame: &[u8]) -> bool {
        let pf = &self.mailbox.pf;
        let Some(to) = frame.get(..6) else { return false };
        let group = to[0] & 1 == 1;
        let broadcast = to == [0xff; 6];
        let wanted = to == pf.mac || broadcast || group && !pf.multicast.is_empty() || pf.promiscuous != 0;
        if !wanted || frame.len() as u32 + 4 > pf.longest || !self.link || !self.master || self.resetting > 0
        {
            return false;
        }
        // Two queues share by the sender's address, as a hash would.
        let other = usize::from(frame.get(11).is_some_and(|byte| byte & 1 == 1) && self.receive[1].on());
        if !self.receive[other].receive(frame, &self.dma, &mut self.violations) {
            return false;
        }
        self.count(VFGPRC, 1);
        self.count(VFGORC, frame.len() + 4);
        if group && !broadcast {
            self.count(VFMPRC, 1);
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
        if self.mailbox.step() {
            self.interrupts.mailbox();
        }
        for at in 0..QUEUES {
            let received = self.receive[at].flush(&self.dma, &mut self.violations);
            let sent = self.transmit[at].flush(&self.dma, &mut self.violations);
            if received > 0 {
                self.interrupts.queue(at, false);
            }
            if sent > 0 {
                self.interrupts.queue(at, true);
            }
            if !self.master {
                continue;
            }
            if let Some(frame) = self.transmit[at].transmit(self.link, &self.dma, &mut self.violations) {
                self.count(VFGPTC, 1);
                self.count(VFGOTC, frame.len() + 4);
                self.sent.push(frame);
            }
        }
    }
}

fn mailbox_memory(offset: u64) -> bool {
    (VMBMEM..VMBMEM + 4 * MAILBOX_WORDS as u64).contains(&offset)
}
