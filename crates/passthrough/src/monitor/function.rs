//! The monitor as a PCI function: what hosts call.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{
    Access, Activation, Change, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet, Quiescence,
    QuiescenceProof, RegisterAddress, SavedState,
};
use ioplane_hardware::Hardware;
use ioplane_memory::GuestMap;
use ioplane_pci::{BarMap, ConfigChange, Function, Irq, Irqs, NotReady, Wire, WireError};

use super::Monitor;
use super::counts::MonitorFault;
use super::guest::IRQS;
use super::page::Page;

impl<H: Hardware> Monitor<H> {
    fn configure(&mut self, offset: u64, bytes: &[u8]) {
        if self.guest.config.write(offset, bytes) != ConfigChange::Command {
            return;
        }
        self.guest.line.disable(self.guest.config.intx_disabled());
        if self.card.parked.is_none() {
            self.lend_bus();
            self.settle_faults();
        }
    }

    /// The hardware may use memory if the guest wants that, and the model says what for: the rings and blocks are ours.
    pub(super) fn lend_bus(&mut self) {
        let uses = !self.guest.rings.is_empty() || !self.guest.blocks.is_empty();
        let yes = uses && self.guest.config.bus_master() && !self.guest.stopped && !self.card.dead();
        let lent = self.card.bus.hardware().master(yes);
        self.card.bus.judge(lent);
    }

    /// Awake before the guest touches it: hosts hold accesses back while it stands still, but a device must not depend on that.
    fn wake(&mut self) {
        if self.card.parked.is_some()
            && self.card.unusable.is_none()
            && let Err(error) = self.go_on()
        {
            self.fault(MonitorFault::hardware("deaf", error.to_string()));
        }
    }
}

impl<H: Hardware> Device for Monitor<H> {
    fn info(&self) -> &DeviceInfo {
        &self.card.info
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        match (at, op) {
            (RegisterAddress::Config(offset), Access::Read(out)) => self.guest.config.read(offset, out),
            (RegisterAddress::Config(offset), Access::Write(bytes)) => self.configure(offset, bytes),
            (RegisterAddress::Bar(bar, offset), Access::Read(out)) => {
                self.wake();
                self.heed_page();
                self.guest_reads(bar, offset, out);
            }
            (RegisterAddress::Bar(bar, offset), Access::Write(bytes)) => {
                self.wake();
                self.heed_page();
                self.guest_writes(bar, offset, bytes);
            }
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        QueueSet::new()
    }

    /// There are no pollers. A device that stood still goes on: rings looked at (invariant 2), the interrupt given again (invariant 3).
    fn activate(&mut self, _seating: &mut Activation<'_>) -> Result<(), DeviceError> {
        if self.card.unusable.is_some() {
            // Its guest goes on, and finds it dead.
            return Ok(());
        }
        if self.card.parked.is_none() {
            self.collect();
            self.level();
            self.settle_faults();
            return Ok(());
        }
        self.go_on().map_err(|error| DeviceError::Below(Box::new(error)))
    }

    fn deactivate(&mut self, parked: Parked) {
        debug_assert!(false, "{parked:?} of a device without pollers");
    }

    fn quiescence(&mut self) -> Quiescence {
        match self.recognise() {
            Ok(()) => Quiescence::Quiescent,
            Err(busy) => Quiescence::Busy(busy),
        }
    }

    fn suspend(&mut self) -> Result<(), DeviceError> {
        self.force();
        Ok(())
    }

    fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        if let Some(why) = &self.card.unusable {
            return Err(DeviceError::Below(why.clone().into()));
        }
        self.save_state()
    }

    fn load(&mut self, _proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        self.load_state(state)?;
        // It is reset before it goes on; if that fails it does not.
        self.card.unusable = None;
        Ok(())
    }

    fn reset(&mut self, _proof: &QuiescenceProof) {
        self.start_over();
    }

    fn apply(&mut self, _queues: &QueueSet, change: &Change) {
        if let Change::Log(log) = change {
            self.guest.dma.view_mut().set_log(log.clone());
        }
    }
}

impl<H: Hardware> Function for Monitor<H> {
    fn bars(&self) -> &BarMap {
        &self.guest.bars
    }

    fn irqs(&self) -> Irqs {
        IRQS
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        if vector >= IRQS.of(irq) {
            return Err(WireError::NoSuchVector { irq, vector });
        }
        match (irq, wire) {
            (Irq::Intx, Wire::Call(call)) => self.guest.line.connect(call),
            (Irq::Intx, Wire::Mask) => self.guest.line.mask(),
            (Irq::Intx, Wire::Unmask) => self.guest.line.unmask(),
            (Irq::Intx, Wire::Trigger) => self.guest.line.trigger(),
            (Irq::Error, Wire::Call(call)) => {
                self.guest.error_call = call;
                // Who comes late has to know too.
                if self.guest.stopped || self.card.dead() {
                    self.guest.cry();
                }
            }
            (Irq::Error, Wire::Trigger) => self.guest.cry(),
            _ => {}
        }
        Ok(())
    }

    fn grow_memory(&mut self, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        let grown = self.guest.dma.grow(self.card.bus.hardware(), map);
        grown.map_err(|error| DeviceError::Below(Box::new(error)))?;
        if self.card.parked.is_none() {
            self.look();
        }
        Ok(())
    }

    fn replace_memory(&mut self, _proof: &QuiescenceProof, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        // The hardware lets go of every buffer first, if it has any.
        if self.guest.lends() {
            self.force();
        }
        let replaced = self.guest.dma.replace(self.card.bus.hardware(), map);
        if replaced.is_err() {
            // Nothing there is ever given to it; and from here on it gives and takes nothing at all.
            self.card.bus.lose("does not let go of its guest's memory".to_owned());
        }
        self.settle_faults();
        replaced.map_err(|error| DeviceError::Below(Box::new(error)))
    }

    fn attention(&self) -> Option<&Arc<OwnedFd>> {
        if self.card.dead() {
            return None;
        }
        self.guest.page.as_ref().and_then(Page::attention).or_else(|| self.card.bus.interrupt())
    }

    fn attend(&mut self) {
        self.hear();
        self.refresh();
        self.settle_faults();
    }

    fn admit(&mut self, _proof: &QuiescenceProof) -> Result<(), NotReady> {
        if self.card.unusable.is_some() && !self.card.bus.gone() {
            self.try_again();
        }
        if let Some(why) = self.unusable() {
            return Err(NotReady::Unusable(why));
        }
        self.renew_page().map_err(|error| NotReady::Unusable(error.to_string()))
    }

    fn dismiss(&mut self) {
        let ran = self.card.parked.is_none();
        self.retire_page();
        // It has been reset. Where that did not come to pass, or somebody used it since, it is now.
        if self.card.unusable.is_some() && !self.card.bus.gone() {
            self.try_again();
        } else if self.card.counts.totals.accesses != self.guest.reset_at {
            self.start_over();
        }
        self.force();
        self.change_guest();
        if ran {
            self.wake();
        }
    }

    fn unusable(&self) -> Option<String> {
        let gone = || {
            self.card.bus.gone().then(|| format!("{} is gone: it no longer answers", self.card.bus.name()))
        };
        self.card.unusable.clone().or_else(gone)
    }

    fn use_shadows(&mut self, yes: bool) {
        self.page_hosted(yes);
    }
}
