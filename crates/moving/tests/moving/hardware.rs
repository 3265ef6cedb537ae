//! The model of the silicon behind [`Hardware`], and a host around it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use ioplane_device::Interrupt;
use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::{GuestMap, GuestView, MemoryRegion};
use ioplane_moving::vf82576::DIRECT;
use ioplane_moving::{Movable, MovingError, Surroundings};
use ioplane_nic::vf82576::{Vf82576, spec};
use ioplane_pci::{BarMap, Identity, Irq, Irqs, Wire, WireError};

/// Bytes of a guest.
pub const MEMORY: u64 = 1 << 20;

/// The silicon, shared by its owner and the wire.
#[derive(Clone)]
pub struct Silicon(Arc<Mutex<Vf82576>>, BarMap, Arc<AtomicU64>);

impl Silicon {
    pub fn new(vf: Vf82576) -> Silicon {
        Silicon(Arc::new(Mutex::new(vf)), BarMap::new(), Arc::default())
    }

    /// Register accesses of whoever owns it, so far.
    pub fn accesses(&self) -> u64 {
        self.2.load(Ordering::Relaxed)
    }

    pub fn vf(&self) -> MutexGuard<'_, Vf82576> {
        self.0.lock().expect("no test panics while it holds it")
    }
}

fn broken(doing: &str) -> HardwareError {
    let source = std::io::Error::other("the model says so");
    HardwareError::Os { function: "vf".to_owned(), doing: doing.to_owned(), source }
}

impl Hardware for Silicon {
    fn name(&self) -> &str {
        "0000:01:10.0"
    }

    fn identity(&self) -> Identity {
        Identity {
            vendor: spec::VENDOR,
            device: spec::DEVICE,
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
pub struct Host {
    pub movable: Movable<Silicon>,
    pub silicon: Silicon,
    pub view: GuestView,
    pub vectors: [Arc<Vector>; 3],
}

impl Host {
    pub fn new(vf: Vf82576) -> Host {
        let view = GuestView::new(Arc::new(GuestMap::anonymous(MEMORY).expect("memory")));
        let mut silicon = Silicon::new(vf);
        silicon.map(0, &view.map().regions()[0]).expect("mapped");
        silicon.master(true).expect("a bus master");
        let vectors: [Arc<Vector>; 3] = Default::default();
        for (at, vector) in (0..).zip(&vectors) {
            silicon.wire(Irq::Msix, at, Wire::Call(Some(vector.clone()))).expect("a vector");
        }
        let movable = Movable::new(silicon.clone(), &DIRECT).expect("a sound table");
        Host { movable, silicon, view, vectors }
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

    pub fn replay(&mut self) -> Result<(), MovingError> {
        let mut around = Around { silicon: self.silicon.clone(), left: 4000, sends: true, waits: 0 };
        self.movable.replay(&self.view, &mut around)
    }
}

/// Time that passes around a device that is brought back: strangers' frames come all the while.
pub struct Around {
    pub silicon: Silicon,
    pub left: u32,
    /// The physical function's frames come through.
    pub sends: bool,
    pub waits: u32,
}

/// What no guest may ever see: it came while no host had the guest.
pub const LOST: u64 = u64::MAX;

impl Surroundings for Around {
    fn wait(&mut self) -> bool {
        self.waits += 1;
        if self.waits.is_multiple_of(5) {
            self.silicon.vf().receive(&frame([0xff; 6], LOST, 60));
        }
        self.silicon.vf().step();
        self.left = self.left.saturating_sub(1);
        self.left > 0
    }

    fn fill(&mut self, address: [u8; 6], count: u32) -> std::io::Result<()> {
        for _ in 0..count.min(8) {
            if self.sends {
                self.silicon.vf().receive(&frame(address, LOST, 60));
            }
        }
        Ok(())
    }
}

/// A frame with a number in it.
pub fn frame(to: [u8; 6], number: u64, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len.max(60)];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame[14..22].copy_from_slice(&number.to_le_bytes());
    for (at, byte) in frame.iter_mut().enumerate().skip(22) {
        *byte = (number as u8).wrapping_mul(31).wrapping_add(at as u8);
    }
    frame
}

/// Its number, if it is whole.
pub fn number(seen: &[u8]) -> Option<u64> {
    let number = u64::from_le_bytes(seen.get(14..22)?.try_into().ok()?);
    let to = seen[..6].try_into().ok()?;
    (frame(to, number, seen.len())[12..] == seen[12..]).then_some(number)
}
