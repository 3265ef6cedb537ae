//! Virtio over MMIO (virtio 1.3, section 4.2): the register transport, for hosts in process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ioplane_device::{
    Access, Activation, AfterStop, Change, Device, DeviceError, DeviceInfo, Effect, Interrupt, Parked,
    QueueSet, QuiescenceProof, RegisterAddress, SavedState, StateError,
};
use serde::{Deserialize, Serialize};

use crate::device::VirtioDevice;
use crate::spec::mmio::*;
use crate::vdev::{QueueSetup, Vdev};

/// The interrupt line of the device with its status register; pollers raise it, the driver acknowledges it.
#[derive(Debug)]
pub struct MmioInterrupt {
    status: AtomicU32,
    line: Arc<dyn Interrupt>,
}

impl MmioInterrupt {
    fn raise(&self, cause: u32) {
        self.status.fetch_or(cause, Ordering::AcqRel);
        self.line.signal();
    }
}

impl Interrupt for MmioInterrupt {
    fn signal(&self) {
        self.raise(INTERRUPT_USED);
    }
}

/// Registers of the transport itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct RegistersV1 {
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    status: u32,
    config_generation: u32,
    interrupt_status: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct MmioV1 {
    registers: RegistersV1,
    vdev: SavedState,
}

const VERSION: u32 = 1;

/// A virtio device behind MMIO registers (`RegisterAddress::Bar(0, offset)`), version 2 of the transport. `QueueNotify` raises the
/// queue's kick.
pub struct VirtioMmio<V: VirtioDevice> {
    vdev: Vdev<V>,
    registers: RegistersV1,
    line: Arc<MmioInterrupt>,
}

impl<V: VirtioDevice> VirtioMmio<V> {
    /// Puts registers before `vdev`. Kicks of each queue are set up by the caller in the vdev; `line` is the interrupt.
    pub fn new(mut vdev: Vdev<V>, line: Arc<dyn Interrupt>) -> Self {
        let line = Arc::new(MmioInterrupt { status: AtomicU32::new(0), line });
        for index in 0..vdev.info().queues {
            if let Some(setup) = vdev.queue_mut(index) {
                setup.call = Some(line.clone());
            }
        }
        VirtioMmio { vdev, registers: RegistersV1::default(), line }
    }

    /// The device behind the registers.
    pub fn vdev(&self) -> &Vdev<V> {
        &self.vdev
    }

    /// The device behind the registers.
    pub fn vdev_mut(&mut self) -> &mut Vdev<V> {
        &mut self.vdev
    }

    fn selected(&mut self) -> Option<&mut QueueSetup> {
        let index = u16::try_from(self.registers.queue_sel).ok()?;
        // A queue that runs keeps its addresses: rings are not moved while in use.
        self.vdev.queue_mut(index)
    }

    fn read(&mut self, at: u64) -> u32 {
        match at {
            MAGIC_VALUE => MAGIC,
            super::spec::mmio::VERSION => 2,
            DEVICE_ID => self.vdev.model().info().device_id,
            VENDOR_ID => 0x4e4c_5049,
            DEVICE_FEATURES => match self.registers.device_features_sel {
                0 => self.vdev.offers() as u32,
                1 => (self.vdev.offers() >> 32) as u32,
                _ => 0,
            },
            QUEUE_NUM_MAX => {
                let max = u32::from(self.vdev.model().info().queue_size);
                if self.selected().is_some() { max } else { 0 }
            }
            QUEUE_READY => self.selected().map_or(0, |setup| u32::from(setup.enabled)),
            INTERRUPT_STATUS => self.line.status.load(Ordering::Acquire),
            STATUS => self.registers.status,
            CONFIG_GENERATION => self.registers.config_generation,
            _ => 0,
        }
    }

    fn write(&mut self, at: u64, value: u32) -> Effect {
        let low = |old: u64| (old & !0xffff_ffff) | u64::from(value);
        let high = |old: u64| (old & 0xffff_ffff) | (u64::from(value) << 32);
        match at {
            DEVICE_FEATURES_SEL => self.registers.device_features_sel = value,
            DRIVER_FEATURES_SEL => self.registers.driver_features_sel = value,
            DRIVER_FEATURES => {
                let features = self.registers.driver_features;
                match self.registers.driver_features_sel {
                    0 => self.registers.driver_features = low(features),
                    1 => self.registers.driver_features = high(features),
                    _ => {}
                }
            }
            QUEUE_SEL => self.registers.queue_sel = value,
            QUEUE_NOTIFY => {
                // The kick is an eventfd, as it would be with KVM: it latches, whoever is asleep or away (invariant 1).
                let queue = u16::try_from(value).ok().and_then(|index| self.vdev.queue(index));
                if let Some(kick) = queue.and_then(|queue| queue.kick.as_ref()) {
                    let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
                }
            }
            INTERRUPT_ACK => {
                self.line.status.fetch_and(!value, Ordering::AcqRel);
            }
            STATUS => return self.write_status(value),
            QUEUE_READY => return self.write_ready(value),
            QUEUE_NUM | QUEUE_DESC_LOW..=QUEUE_DEVICE_HIGH => {
                if let Some(setup) = self.selected().filter(|setup| !setup.enabled) {
                    let layout = &mut setup.layout;
                    match at {
                        QUEUE_NUM => layout.size = u16::try_from(value).unwrap_or(0),
                        QUEUE_DESC_LOW => layout.desc = low(layout.desc),
                        QUEUE_DESC_HIGH => layout.desc = high(layout.desc),
                        QUEUE_DRIVER_LOW => layout.avail = low(layout.avail),
                        QUEUE_DRIVER_HIGH => layout.avail = high(layout.avail),
                        QUEUE_DEVICE_LOW => layout.used = low(layout.used),
                        QUEUE_DEVICE_HIGH => layout.used = high(layout.used),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
        Effect::None
    }

    fn write_status(&mut self, value: u32) -> Effect {
        let before = self.registers.status;
        if value == 0 {
            return Effect::Deactivate((0..self.vdev.info().queues).collect(), AfterStop::Reset);
        }
        self.registers.status = value;
        if value & FEATURES_OK != 0
            && before & FEATURES_OK == 0
            && !self.vdev.accept(self.registers.driver_features, 0)
        {
            self.registers.status &= !FEATURES_OK;
        }
        if value & DRIVER_OK != 0 && before & DRIVER_OK == 0 {
            return Effect::Activate(self.vdev.active());
        }
        Effect::None
    }

    fn write_ready(&mut self, value: u32) -> Effect {
        let index = self.registers.queue_sel;
        let running = self.registers.status & DRIVER_OK != 0;
        let Some(setup) = self.selected() else { return Effect::None };
        setup.enabled = value & 1 != 0;
        let queues = QueueSet::from([index as u16]);
        match (setup.enabled, running) {
            (true, true) => Effect::Activate(queues),
            (false, true) => Effect::Deactivate(queues, AfterStop::Nothing),
            _ => Effect::None,
        }
    }
}

impl<V: VirtioDevice> Device for VirtioMmio<V> {
    fn info(&self) -> &DeviceInfo {
        self.vdev.info()
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        let RegisterAddress::Bar(0, offset) = at else { return Effect::None };
        if offset >= CONFIG {
            return self.vdev.access(RegisterAddress::Config(offset - CONFIG), op);
        }
        // 4.2.2.2: registers are 32 bits wide and accessed so; anything else is ignored, and reads zeros.
        match op {
            Access::Read(out) => {
                let value = if offset % 4 == 0 && out.len() == 4 { self.read(offset) } else { 0 };
                let bytes = value.to_le_bytes();
                out.iter_mut()
                    .zip(bytes.iter().chain(std::iter::repeat(&0)))
                    .for_each(|(out, byte)| *out = *byte);
                Effect::None
            }
            Access::Write(bytes) => match bytes.try_into() {
                Ok(word) if offset % 4 == 0 => self.write(offset, u32::from_le_bytes(word)),
                _ => Effect::None,
            },
        }
    }

    fn active(&self) -> QueueSet {
        if self.registers.status & DRIVER_OK != 0 { self.vdev.active() } else { QueueSet::new() }
    }

    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
        self.vdev.activate(activation).inspect_err(|_| {
            // 2.1: the device tells the driver that only a reset helps.
            self.registers.status |= DEVICE_NEEDS_RESET;
            self.line.raise(INTERRUPT_CONFIG);
        })
    }

    fn deactivate(&mut self, parked: Parked) {
        self.vdev.deactivate(parked);
    }

    fn apply(&mut self, queues: &QueueSet, change: &Change) {
        self.vdev.apply(queues, change);
    }

    fn save(&self, proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        let registers = RegistersV1 {
            interrupt_status: self.line.status.load(Ordering::Acquire),
            ..self.registers.clone()
        };
        let saved = MmioV1 { registers, vdev: self.vdev.save(proof)? };
        let body = postcard::to_stdvec(&saved).map_err(|error| DeviceError::Below(Box::new(error)))?;
        Ok(SavedState { kind: self.info().kind.to_owned(), version: VERSION, body })
    }

    fn load(&mut self, proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        let body = state.expect(self.info().kind, VERSION)?;
        let (saved, rest): (MmioV1, _) =
            postcard::take_from_bytes(body).map_err(|error| StateError::Damaged(error.to_string()))?;
        if !rest.is_empty() {
            return Err(StateError::Damaged(format!("{} bytes too many", rest.len())).into());
        }
        self.vdev.load(proof, &saved.vdev)?;
        self.line.status.store(saved.registers.interrupt_status & 3, Ordering::Release);
        self.registers = saved.registers;
        Ok(())
    }

    fn reset(&mut self, proof: &QuiescenceProof) {
        self.vdev.reset(proof);
        self.registers = RegistersV1::default();
        self.line.status.store(0, Ordering::Release);
    }

    fn config_changed(&mut self) {
        self.registers.config_generation = self.registers.config_generation.wrapping_add(1);
        self.line.raise(INTERRUPT_CONFIG);
    }
}
