//! The model of the silicon behind [`Hardware`], and a host around it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use ioplane_device::Interrupt;
use ioplane_hardware::{Hardware, HardwareError, flow_frame};
use ioplane_memory::{GuestMap, GuestView, MemoryRegion};
use ioplane_moving::{FillFrames, Movable, MovingError, Surroundings};
use ioplane_nic::silicon::{Chip, VirtualFunction, spec};
use ioplane_pci::{BarMap, Identity, Irq, Irqs, Wire, WireError};

use crate::card::Card;

/// Bytes of a guest.
pub const MEMORY: u64 = 1 << 20;

/// The silicon, shared by its owner and the wire.
pub struct Silicon<C: Chip>(Arc<Mutex<VirtualFunction<C>>>, BarMap, Arc<AtomicU64>);

impl<C: Chip> Clone for Silicon<C> {
    fn clone(&self) -> Self {
        Silicon(self.0.clone(), self.1.clone(), self.2.clone())
    }
}

impl<C: Chip> Silicon<C> {
    pub fn new(vf: VirtualFunction<C>) -> Self {
        Silicon(Arc::new(Mutex::new(vf)), BarMap::new(), Arc::default())
    }

    /// Register accesses of whoever owns it, so far.
    pub fn accesses(&self) -> u64 {
        self.2.load(Ordering::Relaxed)
    }

    pub fn vf(&self) -> MutexGuard<'_, VirtualFunction<C>> {
        self.0.lock().expect("no test panics while it holds it")
    }
}

fn broken(doing: &str) -> HardwareError {
    let source = std::io::Error::other("the model says so");
    HardwareError::Os { function: "vf".to_owned(), doing: doing.to_owned(), source }
}

impl<C: Chip> Hardware for Silicon<C> {
    fn name(&self) -> &str {
        "0000:01:10.0"
    }

    fn identity(&self) -> Identity {
        Identity {
            vendor: spec::VENDOR,
            device: C::LAYOUT.device,
            revision: 1,
            class: spec::CLASS,
            subsystem: (0, 0),
        }
    }

    fn bars(&self) -> &BarMap {
        &self.1
    }

    fn irqs(&self) -> Irqs {
        Irqs { msix: spec::VECTORS, ..Irqs::default() }
    }

    fn read(&mut self, _: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        self.2.fetch_add(1, Ordering::Relaxed);
        self.vf().read(offset, out);
        Ok(())
    }

    fn write(&mut self, _: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        self.2.fetch_add(1, Ordering::Relaxed);
        self.vf().write(offset, bytes);
        Ok(())
    }

    fn read_config(&mut self, _: u64, _: &mut [u8]) -> Result<(), HardwareError> {
        Err(broken("reading the configuration space"))
    }

    fn write_config(&mut self, _: u64, _: &[u8]) -> Result<(), HardwareError> {
        Err(broken("writing the configuration space"))
    }

    fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError> {
        self.vf().map(iova, region).map_err(|_| broken("mapping"))
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError> {
        if self.vf().unmap(iova, len) { Ok(()) } else { Err(broken("unmapping")) }
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        self.vf().wire(irq, vector, wire)
    }

    fn listen(&mut self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn interrupt(&self) -> Option<&Arc<OwnedFd>> {
        None
    }

    fn take_interrupt(&mut self) -> bool {
        false
    }

    fn unmask(&mut self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn reset(&mut self) -> Result<bool, HardwareError> {
        self.vf().reset();
        Ok(true)
    }

    fn master(&mut self, yes: bool) -> Result<(), HardwareError> {
        self.vf().set_master(yes);
        Ok(())
    }
}

/// Interrupts of one vector that the guest has not taken.
#[derive(Debug, Default)]
pub struct Vector(AtomicU64);

impl Interrupt for Vector {
    fn signal(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Vector {
    /// Whether it came since it was asked last.
    pub fn take(&self) -> bool {
        self.0.swap(0, Ordering::Relaxed) > 0
    }
}

/// A function on a host, with the guest's memory there.
pub struct Host<C: Card> {
    pub movable: Movable<Silicon<C::Chip>>,
    pub silicon: Silicon<C::Chip>,
    pub view: GuestView,
    pub vectors: [Arc<Vector>; 3],
    /// Frames that the physical function has sent to bring it back.
    pub filled: u64,
}

impl<C: Card> Host<C> {
    pub fn new(vf: VirtualFunction<C::Chip>) -> Self {
        let view = GuestView::new(Arc::new(GuestMap::anonymous(MEMORY).expect("memory")));
        let mut silicon = Silicon::new(vf);
        silicon.map(0, &view.map().regions()[0]).expect("mapped");
        silicon.master(true).expect("a bus master");
        let vectors: [Arc<Vector>; 3] = Default::default();
        for (at, vector) in (0..).zip(&vectors) {
            silicon.wire(Irq::Msix, at, Wire::Call(Some(vector.clone()))).expect("a vector");
        }
        let movable = Movable::new(silicon.clone(), C::DIRECT).expect("a sound table");
        Host { movable, silicon, view, vectors, filled: 0 }
    }

    /// All of the guest's memory.
    pub fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY as usize];
        self.view.read(0, &mut bytes).expect("memory");
        bytes
    }

    /// Calls `stop` until the device is at rest.
    pub fn stop(&mut self, unsent: ioplane_moving::Unsent) -> bool {
        for _ in 0..200 {
            if self.movable.stop(unsent).expect("hardware that works") {
                return true;
            }
            self.silicon.vf().step();
        }
        false
    }

    pub fn go_ahead(&mut self, said: &[u8]) -> Result<u64, MovingError> {
        let mut around =
            Around { silicon: self.silicon.clone(), left: 4000, sends: false, waits: 0, filled: 0 };
        self.movable.go_ahead(said, &mut around)
    }

    pub fn replay(&mut self) -> Result<(), MovingError> {
        let mut around =
            Around { silicon: self.silicon.clone(), left: 4000, sends: true, waits: 0, filled: 0 };
        let replayed = self.movable.replay(&self.view, &mut around);
        self.filled += around.filled;
        replayed
    }
}

/// Time that passes around a device that is brought back: strangers' frames come all the while.
pub struct Around<C: Chip> {
    pub silicon: Silicon<C>,
    pub left: u32,
    /// The physical function's frames come through.
    pub sends: bool,
    pub waits: u32,
    /// Frames that it has sent.
    pub filled: u64,
}

/// What no guest may ever see: it came while no host had the guest.
pub const LOST: u64 = u64::MAX;

impl<C: Chip> Surroundings for Around<C> {
    fn wait(&mut self) -> bool {
        self.waits += 1;
        if self.waits.is_multiple_of(5) {
            self.silicon.vf().receive(&frame([0xff; 6], LOST, 60));
        }
        self.silicon.vf().step();
        self.left = self.left.saturating_sub(1);
        self.left > 0
    }

    fn fill(&mut self, frames: &FillFrames) -> std::io::Result<bool> {
        for _ in 0..frames.count.min(8) {
            if self.sends {
                self.filled += 1;
                self.silicon.vf().receive(&flow_frame(frames.address, [2, 0, 0, 0, 0, 3], frames.flow));
            }
        }
        Ok(true)
    }
}

/// A frame with a number in it: IPv4 of one of several flows, or anything else.
pub fn frame(to: [u8; 6], number: u64, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len.max(60)];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    let at = place(number);
    if at == 14 {
        frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    } else {
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[26..34].copy_from_slice(&[10, 0, 0, number as u8 % 16, 10, 0, 0, 1]);
    }
    frame[at..at + 8].copy_from_slice(&number.to_le_bytes());
    for (at, byte) in frame.iter_mut().enumerate().skip(at + 8) {
        *byte = (number as u8).wrapping_mul(31).wrapping_add(at as u8);
    }
    frame
}

/// Where a number is in its frame.
fn place(number: u64) -> usize {
    if number.is_multiple_of(4) { 14 } else { 34 }
}

/// Its number, if it is whole.
pub fn number(seen: &[u8]) -> Option<u64> {
    let at = if seen.get(12..14)? == [8, 0] { 34 } else { 14 };
    let number = u64::from_le_bytes(seen.get(at..at + 8)?.try_into().ok()?);
    let to = seen[..6].try_into().ok()?;
    (frame(to, number, seen.len())[12..] == seen[12..]).then_some(number)
}
