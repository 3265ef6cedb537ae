//! A function that takes nothing of what the silicon forbids, from a guest or from us: a head other than zero, a tail other than zero of
//! a queue that was not on yet. What emulates the silicon may allow it, so whoever only tried it there would not find out.
//!
//! A queue that was on and was told to end is another matter: Linux's drivers tell a receive queue to end while their poll may still be posting
//! buffers to it, and the silicon ignores that tail. So it is dropped here.

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::MemoryRegion;
use ioplane_model::DirectModel;
use ioplane_pci::{BarMap, Identity, Irq, Irqs, Wire, WireError};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::error::MovingError;
use crate::plan::MovePlan;

/// Whether a queue was last switched on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Switched {
    /// Not since the last reset.
    Never,
    On,
    /// Off, after it was on.
    Off,
}

/// A ring's registers, and whether it was last switched on.
#[derive(Debug, Clone, Copy)]
struct Rule {
    head: u64,
    tail: u64,
    control: u64,
    enable: u32,
    switched: Switched,
}

/// Hardware with those rules in front of it. It counts accesses to registers as well.
#[derive(Debug)]
pub struct Guarded<H> {
    hardware: H,
    bar: u8,
    reset: (u64, u32),
    rules: Vec<Rule>,
    accesses: u64,
    forbidden: u64,
    /// The guest has registers mapped, and writes past this.
    mapped: bool,
    /// It has had since the last reset: what was last written to a queue is not known.
    unseen: bool,
}

impl<H: Hardware> Guarded<H> {
    /// `hardware` was reset, and nobody has driven it since.
    pub fn new(hardware: H, model: &'static DirectModel) -> Result<Self, MovingError> {
        let plan = MovePlan::new(model)?;
        let rule = |ring: &crate::plan::RingPlan| Rule {
            head: ring.head,
            tail: ring.tail,
            control: ring.control,
            enable: ring.enable,
            switched: Switched::Never,
        };
        let (by, _, value) = model.model.reset.by;
        Ok(Guarded {
            hardware,
            bar: plan.bar,
            reset: (plan.offset(by)?, value),
            rules: plan.rings.iter().map(rule).collect(),
            accesses: 0,
            forbidden: 0,
            mapped: false,
            unseen: false,
        })
    }

    /// Reads and writes of registers so far.
    pub fn accesses(&self) -> u64 {
        self.accesses
    }

    /// Writes that the silicon forbids and that were refused.
    pub fn forbidden(&self) -> u64 {
        self.forbidden
    }

    /// What is behind it.
    pub fn into_hardware(self) -> H {
        self.hardware
    }

    /// The guest writes past this from here on, or no longer. Whether a queue is on is asked of the hardware from then on, until a reset.
    pub fn set_mapped(&mut self, mapped: bool) {
        self.mapped = mapped;
        self.unseen |= mapped;
    }

    /// What was written past this is looked at, before a tail is judged.
    fn look(&mut self, offset: u64) -> Result<(), HardwareError> {
        let Some(at) = self.rules.iter().position(|rule| rule.tail == offset).filter(|_| self.unseen) else {
            return Ok(());
        };
        let Rule { control, enable, .. } = self.rules[at];
        let mut word = [0; 4];
        self.accesses += 1;
        self.hardware.read(self.bar, control, &mut word)?;
        let on = u32::from_le_bytes(word) & enable != 0;
        // It may have been on: its tail is ignored, as the silicon does.
        self.rules[at].switched = if on { Switched::On } else { Switched::Off };
        Ok(())
    }

    fn off(&mut self) {
        self.unseen = self.mapped;
        self.rules.iter_mut().for_each(|rule| rule.switched = Switched::Never);
    }

    /// Whether it goes to the hardware.
    fn rule(&mut self, offset: u64, value: u32) -> Result<bool, &'static str> {
        if offset == self.reset.0 && value & self.reset.1 != 0 {
            self.off();
        }
        for rule in &mut self.rules {
            if offset == rule.head && value != 0 {
                return Err("a head other than zero");
            }
            if offset == rule.tail && value != 0 {
                match rule.switched {
                    Switched::Never => return Err("a tail of a queue that is off"),
                    Switched::On => {}
                    Switched::Off => return Ok(false),
                }
            }
            if offset == rule.control {
                rule.switched = match (value & rule.enable != 0, rule.switched) {
                    (true, _) => Switched::On,
                    (false, Switched::Never) => Switched::Never,
                    (false, Switched::On | Switched::Off) => Switched::Off,
                };
            }
        }
        Ok(true)
    }
}

impl<H: Hardware> Hardware for Guarded<H> {
    fn name(&self) -> &str {
        self.hardware.name()
    }

    fn identity(&self) -> Identity {
        self.hardware.identity()
    }

    fn bars(&self) -> &BarMap {
        self.hardware.bars()
    }

    fn irqs(&self) -> Irqs {
        self.hardware.irqs()
    }

    fn read(&mut self, bar: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        self.accesses += 1;
        self.hardware.read(bar, offset, out)
    }

    fn write(&mut self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        self.accesses += 1;
        if bar == self.bar
            && let Ok(word) = <[u8; 4]>::try_from(bytes)
        {
            self.look(offset)?;
            match self.rule(offset, u32::from_le_bytes(word)) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(what) => {
                    self.forbidden += 1;
                    let function = self.hardware.name().to_owned();
                    return Err(HardwareError::Forbidden { function, offset, what });
                }
            }
        }
        self.hardware.write(bar, offset, bytes)
    }

    fn read_config(&mut self, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        self.hardware.read_config(offset, out)
    }

    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        self.hardware.write_config(offset, bytes)
    }

    fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError> {
        self.hardware.map(iova, region)
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError> {
        self.hardware.unmap(iova, len)
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        self.hardware.wire(irq, vector, wire)
    }

    fn listen(&mut self) -> Result<(), HardwareError> {
        self.hardware.listen()
    }

    fn interrupt(&self) -> Option<&Arc<OwnedFd>> {
        self.hardware.interrupt()
    }

    fn take_interrupt(&mut self) -> bool {
        self.hardware.take_interrupt()
    }

    fn unmask(&mut self) -> Result<(), HardwareError> {
        self.hardware.unmask()
    }

    fn close(&mut self) {
        self.mapped = false;
        self.off();
        self.hardware.close();
    }

    fn reopen(&mut self) -> Result<(), HardwareError> {
        self.hardware.reopen()
    }

    fn reset(&mut self) -> Result<bool, HardwareError> {
        let reset = self.hardware.reset()?;
        if reset {
            self.off();
        }
        Ok(reset)
    }
}
