//! A virtual function of the model as a PCI function.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ioplane_device::{
    Access, Activation, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet, QuiescenceProof,
    RegisterAddress, SavedState,
};
use ioplane_memory::{GuestMap, MemoryRegion};
use ioplane_nic::silicon::spec::{BAR_SIZE, CLASS, VECTORS, VENDOR};
use ioplane_nic::vf82599::spec::DEVICE;
use ioplane_pci::{
    Bar, BarMap, Capability, ConfigChange, ConfigSpace, Function, Identity, Irq, Irqs, NotReady, Space, Wire,
    WireError,
};

use super::port::{Shared, SiliconPort, Wake};

/// What [`DeviceInfo::kind`] says.
pub const KIND: &str = "vf82599";
const IRQS: Irqs = Irqs { intx: 0, msi: 0, msix: VECTORS, error: 0 };
/// The BAR of the MSI-X table, and where in it the pending bits are.
const TABLE_BAR: u8 = 3;
const PENDING: u32 = 0x2000;
/// Steps in which a reset ends.
const RESET_STEPS: u32 = 16;

/// See the module.
pub struct SiliconFunction {
    info: DeviceInfo,
    shared: Arc<Shared>,
    wake: Wake,
    bars: BarMap,
    config: ConfigSpace,
    mapped: Vec<MemoryRegion>,
}

impl SiliconFunction {
    /// Function `number` of that port.
    pub fn of(port: &SiliconPort, number: usize) -> io::Result<SiliconFunction> {
        let missing = || io::Error::other(format!("the port has no function {number}"));
        let shared = port.function(number).ok_or_else(missing)?;
        let identity = Identity {
            vendor: VENDOR,
            device: DEVICE,
            revision: 1,
            class: CLASS,
            subsystem: (VENDOR, 0x000c),
        };
        let bar = || Bar::new(BAR_SIZE, Space::Memory64);
        let bars = BarMap::new().with(0, bar()).with(TABLE_BAR, bar());
        let mut config = ConfigSpace::new(&identity, &bars, IRQS);
        let vectors =
            Capability::Msix { vectors: VECTORS, table: (TABLE_BAR, 0), pending: (TABLE_BAR, PENDING) };
        for capability in [vectors, Capability::Express] {
            config.add(&capability).ok_or_else(|| io::Error::other("no room for a capability"))?;
        }
        let info = DeviceInfo { name: format!("vf{number}"), kind: KIND, queues: 0 };
        Ok(SiliconFunction { info, shared, wake: port.wake(), bars, config, mapped: Vec::new() })
    }

    /// As PCI resets it (FLR): to its end.
    fn start_over(&mut self) {
        self.config.reset();
        let mut vf = self.shared.vf();
        vf.set_master(false);
        vf.reset();
        (0..RESET_STEPS).for_each(|_| vf.step());
    }

    fn take_in(&mut self, map: &GuestMap) -> Result<(), DeviceError> {
        let mut vf = self.shared.vf();
        for region in map.regions() {
            if !self.mapped.iter().any(|mapped| mapped.is_same(region)) {
                vf.map(region.gpa(), region).map_err(|error| DeviceError::Below(Box::new(error)))?;
                self.mapped.push(region.clone());
            }
        }
        Ok(())
    }

    /// What is not in `map` is out of its reach.
    fn keep_only(&mut self, map: &GuestMap) {
        let mut vf = self.shared.vf();
        self.mapped.retain(|mapped| {
            let stays = map.regions().iter().any(|region| region.is_same(mapped));
            if !stays {
                vf.unmap(mapped.gpa(), mapped.len());
            }
            stays
        });
    }
}

impl Device for SiliconFunction {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        match (at, op) {
            (RegisterAddress::Config(offset), Access::Read(out)) => self.config.read(offset, out),
            (RegisterAddress::Config(offset), Access::Write(bytes)) => match self.config.write(offset, bytes)
            {
                ConfigChange::Reset => self.start_over(),
                ConfigChange::Command => self.shared.vf().set_master(self.config.bus_master()),
                ConfigChange::Other => {}
            },
            (RegisterAddress::Bar(0, offset), op) => {
                self.shared.accesses.fetch_add(1, Ordering::Relaxed);
                let mut vf = self.shared.vf();
                vf.step();
                match op {
                    Access::Read(out) => vf.read(offset, out),
                    Access::Write(bytes) => vf.write(offset, bytes),
                }
                drop(vf);
                self.wake.wake();
            }
            // The table is whoever's drives its vectors by their wires.
            (RegisterAddress::Bar(..), Access::Read(out)) => out.fill(0),
            (RegisterAddress::Bar(..), Access::Write(_)) => {}
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        QueueSet::new()
    }

    fn activate(&mut self, _: &mut Activation<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn deactivate(&mut self, _: Parked) {}

    /// Silicon is never saved.
    fn save(&self, _: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        Err(DeviceError::Below("silicon has no state to save".into()))
    }

    fn load(&mut self, _: &QuiescenceProof, _: &SavedState) -> Result<(), DeviceError> {
        Err(DeviceError::Below("silicon has no state to load".into()))
    }

    fn reset(&mut self, _: &QuiescenceProof) {
        self.start_over();
    }
}

impl Function for SiliconFunction {
    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        IRQS
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        self.shared.vf().wire(irq, vector, wire)
    }

    fn grow_memory(&mut self, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        self.take_in(&map)
    }

    /// As an IOMMU has it: what goes away meanwhile of what it is doing is a fault of DMA.
    fn replace_memory(&mut self, _: &QuiescenceProof, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        self.keep_only(&map);
        self.take_in(&map)
    }

    fn admit(&mut self, _: &QuiescenceProof) -> Result<(), NotReady> {
        self.start_over();
        Ok(())
    }
}
