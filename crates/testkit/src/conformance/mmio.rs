//! The kit of virtio devices whose registers are in process.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{Access, RegisterAddress, SavedState};
use ioplane_virtio::spec::mmio::*;
use ioplane_virtio::{Vdev, VirtioMmio};

use super::in_process::InProcess;
use super::virtio::{
    Asker, ConfigTouch, DeviceUnderTest, Fixture, Layout, QUEUES, Reach, RequestProbe, features, ring,
};
use super::{Bus, Dice, Kit, Plan, Probe, TestMachine, Vcpu};
use crate::driver::RingPlace;
use crate::toy::ring::Counted;

/// The kit of a subject whose registers are in process.
pub struct Mmio<S>(pub S);

impl<S: DeviceUnderTest> Kit for Mmio<S> {
    fn boot(&self, plan: &Plan) -> TestMachine {
        let fixture = self.0.fixture();
        let Layout { memory, drivers, kicks, device_pages } = Layout::of(&self.0, &fixture);
        let Fixture { model, valve, .. } = fixture;
        let map = memory.view().map().clone();
        let line = Arc::new(Counted::default());
        let (wires, to, here) = (kicks.clone(), line.clone(), map.clone());
        let host = InProcess::start(plan, move || {
            let mut vdev = Vdev::new(model(), here.clone());
            for (queue, kick) in (0..).zip(&wires) {
                vdev.queue_mut(queue).expect("a queue for each vCPU").kick = Some(kick.clone());
            }
            VirtioMmio::new(vdev, to.clone())
        });
        let buses: Vec<_> = (0..QUEUES).map(|_| Bus::new(host.clone())).collect();
        let places: Vec<_> = drivers.iter().map(|[driver, _]| driver.ring.place()).collect();
        set_up(&buses[0], features(&self.0), &places).expect("a device that runs");
        let mut vcpus: Vec<Box<dyn Vcpu>> = Vec::new();
        let mut probes: Vec<Box<dyn Probe>> = Vec::new();
        for (vcpu, [driver, probe]) in drivers.into_iter().enumerate() {
            let (bus, kick) = (buses[vcpu].clone(), kicks[vcpu].clone());
            let reach = Wired { bus, kick: kick.clone(), touch: self.0.touch(), vcpu, kicks: 0 };
            let dice = Dice::new(plan.seed << 8 | vcpu as u64);
            let left = self.0.bursts(plan);
            vcpus.push(Box::new(Asker { driver, reach, dice, left, seen: Vec::new() }));
            let (line, front) = (line.clone(), host.clone());
            probes.push(Box::new(RequestProbe {
                driver: probe,
                dice: Dice::new(plan.seed),
                kick,
                interrupts: Box::new(move || line.count()),
                kicks: Box::new(move || front.front().look(|mmio| mmio.vdev().meters()[vcpu].read().kicks)),
                // Registers in process have one line for all queues.
                signals: u64::from(QUEUES),
            }));
        }
        TestMachine { host, vcpus, buses, probes, gate: valve, memory: map, device_pages }
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        super::spoilt::of_mmio(good, self.0.packed())
    }
}

fn put(bus: &Bus, register: u64, value: u32) -> Result<(), String> {
    bus.access(RegisterAddress::Bar(0, register), Access::Write(&value.to_le_bytes()))
}

fn take(bus: &Bus, register: u64) -> Result<u32, String> {
    let mut bytes = [0; 4];
    bus.access(RegisterAddress::Bar(0, register), Access::Read(&mut bytes))?;
    Ok(u32::from_le_bytes(bytes))
}

/// What a driver does first (4.2.3.1, 3.1.1).
fn set_up(bus: &Bus, features: u64, places: &[RingPlace]) -> Result<(), String> {
    put(bus, STATUS, ACKNOWLEDGE | DRIVER)?;
    for half in [0, 1] {
        put(bus, DEVICE_FEATURES_SEL, half)?;
        let offered = take(bus, DEVICE_FEATURES)?;
        put(bus, DRIVER_FEATURES_SEL, half)?;
        put(bus, DRIVER_FEATURES, (features >> (32 * half)) as u32 & offered)?;
    }
    put(bus, STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK)?;
    if take(bus, STATUS)? & FEATURES_OK == 0 {
        return Err("the device does not accept what it offered".into());
    }
    for (queue, place) in (0..).zip(places) {
        put(bus, QUEUE_SEL, queue)?;
        put(bus, QUEUE_NUM, place.size.into())?;
        for (register, gpa) in
            [(QUEUE_DESC_LOW, place.desc), (QUEUE_DRIVER_LOW, place.avail), (QUEUE_DEVICE_LOW, place.used)]
        {
            put(bus, register, gpa as u32)?;
            put(bus, register + 4, (gpa >> 32) as u32)?;
        }
        put(bus, QUEUE_READY, 1)?;
    }
    put(bus, STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK)
}

/// A vCPU's registers. Every other kick is one of KVM's ioeventfds, the rest are register writes.
struct Wired {
    bus: Arc<Bus>,
    kick: Arc<OwnedFd>,
    touch: ConfigTouch,
    vcpu: usize,
    kicks: u32,
}

impl Reach for Wired {
    fn kick(&mut self) -> Result<(), String> {
        self.kicks += 1;
        if self.kicks.is_multiple_of(2) {
            ring(&self.kick);
            return Ok(());
        }
        put(&self.bus, QUEUE_NOTIFY, self.vcpu as u32)
    }

    fn linger(&mut self) -> Result<(), String> {
        match take(&self.bus, MAGIC_VALUE)? {
            MAGIC => Ok(()),
            other => Err(format!("transcript: a magic value of {other:#x}")),
        }
    }

    fn touch(&mut self, dice: &mut Dice) -> Result<u64, String> {
        (self.touch)(&self.bus, self.vcpu, dice)
    }
}
