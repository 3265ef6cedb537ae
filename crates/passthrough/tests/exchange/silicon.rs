//! A model of a virtual function as [`Hardware`], with a configuration space as a function has it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_device::Interrupt;
use ioplane_hardware::{Hardware, HardwareError, flow_frame};
use ioplane_memory::MemoryRegion;
use ioplane_model::DirectModel;
use ioplane_moving::{FillFrames, Surroundings};
use ioplane_nic::silicon::{Chip, VirtualFunction, spec};
use ioplane_nic::vf82576::Chip82576;
use ioplane_nic::vf82599::Chip82599;
use ioplane_pci::{Bar, BarMap, ConfigSpace, Identity, Irq, Irqs, Pages, Space, Touch, Wire, WireError};

/// A chip that is moved.
pub trait Moved: Chip {
    const DIRECT: &'static DirectModel;
}

impl Moved for Chip82576 {
    const DIRECT: &'static DirectModel = &ioplane_moving::vf82576::DIRECT;
}

impl Moved for Chip82599 {
    const DIRECT: &'static DirectModel = &ioplane_moving::vf82599::DIRECT;
}

/// Tests of the module that calls it, for each chip.
macro_rules! for_each_chip {
    ($($test:ident),* $(,)?) => {
        mod of_an_82576 {
            $(#[test]
            fn $test() {
                super::$test::<ioplane_nic::vf82576::Chip82576>();
            })*
        }

        mod of_an_82599 {
            $(#[test]
            fn $test() {
                super::$test::<ioplane_nic::vf82599::Chip82599>();
            })*
        }
    };
}

pub(crate) use for_each_chip;

pub type Shared<C> = Arc<Mutex<VirtualFunction<C>>>;

pub struct Silicon<C: Chip> {
    vf: Shared<C>,
    bars: BarMap,
    config: ConfigSpace,
}

pub fn vf<C: Chip>(of: &Shared<C>) -> MutexGuard<'_, VirtualFunction<C>> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C: Chip> Silicon<C> {
    /// The function, and what its owner is given.
    pub fn new(mac: [u8; 6], counted: u32, bar_size: u64) -> (Shared<C>, Self) {
        let mut function = VirtualFunction::new(mac, counted);
        function.set_jumbo(false);
        let shared = Arc::new(Mutex::new(function));
        let bars = BarMap::new().with(0, Bar::new(bar_size, Space::Memory32));
        let config = ConfigSpace::new(&identity::<C>(), &bars, irqs());
        (shared.clone(), Silicon { vf: shared, bars, config })
    }
}

impl<C: Chip> Silicon<C> {
    /// The same, whose registers may be mapped from this file until it is closed.
    pub fn mapped_from(mut self, file: Arc<OwnedFd>) -> Self {
        let size = self.bars.bar(0).map_or(0, |bar| bar.size);
        let pages = Pages { offset: 0, len: size, touch: Touch::Mapped, file, at: 0 };
        let bar = Bar::new(size, Space::Memory32).with_pages(pages).expect("whole pages");
        self.bars = BarMap::new().with(0, bar);
        self
    }
}

fn identity<C: Chip>() -> Identity {
    Identity {
        vendor: spec::VENDOR,
        device: C::LAYOUT.device,
        revision: 1,
        class: spec::CLASS,
        subsystem: (0, 0),
    }
}

fn irqs() -> Irqs {
    Irqs { msix: spec::VECTORS, ..Irqs::default() }
}

impl<C: Chip> Hardware for Silicon<C> {
    fn name(&self) -> &str {
        "0000:01:10.0"
    }

    fn identity(&self) -> Identity {
        identity::<C>()
    }

    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        irqs()
    }

    fn read(&mut self, _: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        vf(&self.vf).read(offset, out);
        Ok(())
    }

    fn write(&mut self, _: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        vf(&self.vf).write(offset, bytes);
        Ok(())
    }

    fn read_config(&mut self, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        self.config.read(offset, out);
        Ok(())
    }

    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        self.config.write(offset, bytes);
        vf(&self.vf).set_master(self.config.bus_master());
        Ok(())
    }

    fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError> {
        vf(&self.vf).map(iova, region).expect("memory can be mapped");
        Ok(())
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError> {
        assert!(vf(&self.vf).unmap(iova, len), "what is unmapped was mapped so");
        Ok(())
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        vf(&self.vf).wire(irq, vector, wire)
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

    fn close(&mut self) {
        self.bars = self.bars.trapped();
    }

    /// As VFIO does, it waits for the end.
    fn reset(&mut self) -> Result<bool, HardwareError> {
        let mut vf = vf(&self.vf);
        vf.reset();
        (0..4).for_each(|_| vf.step());
        Ok(true)
    }
}

#[derive(Debug, Default)]
pub struct Vector(AtomicU64);

impl Interrupt for Vector {
    fn signal(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Vector {
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A host around a function, whose physical function's frames come through, or do not.
pub struct Around<C: Chip> {
    pub vf: Shared<C>,
    /// The one that is left meanwhile.
    pub left_one: Option<Shared<C>>,
    pub sends: bool,
    pub left: u32,
}

impl<C: Chip> Surroundings for Around<C> {
    fn wait(&mut self) -> bool {
        vf(&self.vf).step();
        self.left_one.iter().for_each(|left| vf(left).step());
        self.left = self.left.saturating_sub(1);
        self.left > 0
    }

    fn fill(&mut self, frames: &FillFrames) -> std::io::Result<bool> {
        if !self.sends {
            return Err(std::io::Error::other("the interface is down"));
        }
        for _ in 0..frames.count.min(8) {
            vf(&self.vf).receive(&flow_frame(frames.address, [2, 0, 0, 0, 0, 3], frames.flow));
        }
        Ok(true)
    }
}

pub fn frame(to: [u8; 6], number: u8) -> Vec<u8> {
    let mut frame = vec![number; 60];
    frame[..6].copy_from_slice(&to);
    frame[6..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    frame
}
