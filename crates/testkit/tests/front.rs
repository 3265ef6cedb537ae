//! What a guest's register writes ask of the in-process host: queues stopped and started, resets, an end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Notify, Pool};
use ioplane_device::{Access, OnMiss, Presence, QuiesceError, QuiescePolicy, RegisterAddress, Stop};
use ioplane_embed::{SharedDevice, SharedDeviceError};
use ioplane_memory::GuestMap;
use ioplane_testkit::toy::dma::registers as dma;
use ioplane_testkit::toy::ring::{Wires, registers as ring};
use ioplane_testkit::toy::{Gate, RingDriver, ToyDma, ToyRing, mix};

const RINGS_AT: u64 = 0x4000;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn write<D: ioplane_device::Device>(front: &SharedDevice<D>, offset: u64, value: u64) {
    front.access(RegisterAddress::Bar(0, offset), Access::Write(&value.to_le_bytes())).unwrap();
}

fn read<D: ioplane_device::Device>(front: &SharedDevice<D>, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    front.access(RegisterAddress::Bar(0, offset), Access::Read(&mut bytes)).unwrap();
    u64::from_le_bytes(bytes)
}

fn ask(ring: &mut RingDriver, request: u64) {
    if ring.publish(request) {
        ring.kick();
    }
}

fn answer(ring: &mut RingDriver) -> u64 {
    let deadline = soon();
    loop {
        if let Some(answer) = ring.answer() {
            return answer;
        }
        assert!(Instant::now() < deadline, "no answer");
        std::thread::yield_now();
    }
}

fn rings() -> (SharedDevice<ToyRing>, Arc<GuestMap>, Arc<Wires>) {
    let memory = Arc::new(GuestMap::anonymous(0x20000).unwrap());
    let wires = Wires::new();
    let pool =
        Arc::new(Pool::with([CoreSettings { notify: Notify::Polled, ..CoreSettings::default() }]).unwrap());
    let front = SharedDevice::new(ToyRing::new(memory.clone(), wires.clone()), pool).unwrap();
    write(&front, ring::RINGS, RINGS_AT);
    (front.with_patience(Duration::from_millis(20)), memory, wires)
}

#[test]
fn a_queue_is_stopped_and_goes_on_where_it_was() {
    let (front, memory, wires) = rings();
    let mut driver = RingDriver::new(&memory, &wires, RINGS_AT, 1);
    write(&front, ring::ENABLE, 0b10);
    ask(&mut driver, 7);
    assert_eq!(answer(&mut driver), mix(0, 7));
    write(&front, ring::ENABLE, 0);
    assert!(front.queues().unwrap().is_empty(), "the write has returned, so the queue has stopped");
    ask(&mut driver, 8);
    write(&front, ring::ENABLE, 0b10);
    assert_eq!(answer(&mut driver), mix(mix(0, 7), 8));
}

#[test]
fn a_reset_of_a_stalled_device_suspends_it() {
    let (front, memory, wires) = rings();
    let mut driver = RingDriver::new(&memory, &wires, RINGS_AT, 0);
    write(&front, ring::ENABLE, 0b11);
    wires.gate.shut();
    ask(&mut driver, 1);
    write(&front, ring::ADDER[0], 5);
    write(&front, ring::RESET, 1);
    assert!(front.queues().unwrap().is_empty());
    assert_eq!((read(&front, ring::ENABLE), read(&front, ring::ADDER[0])), (0, 0));
}

#[test]
fn a_reset_cancels_a_copy() {
    let memory = Arc::new(GuestMap::anonymous(0x20000).unwrap());
    let gate = Gate::new(0);
    let front = SharedDevice::new(ToyDma::new(memory, gate.clone()), Arc::new(Pool::new())).unwrap();
    gate.shut();
    for (register, value) in
        [(dma::SOURCE, 0), (dma::TARGET, 0x10000), (dma::LENGTH, 4096), (dma::COMMAND, 1)]
    {
        write(&front, register, value);
    }
    assert_eq!(read(&front, dma::STATUS), dma::STATUS_BUSY);
    let late = front.quiesce(Instant::now()).unwrap().unwrap_err();
    assert_eq!(late.reason, "a copy is under way");
    // The guest resets while the device is on its way: owed, and carried out when that is taken back.
    write(&front, dma::COMMAND, 2);
    late.undrain().unwrap();
    assert_eq!(read(&front, dma::STATUS), dma::STATUS_IDLE);
}

#[test]
fn the_hardware_itself_makes_a_device_still() {
    let memory = Arc::new(GuestMap::anonymous(0x20000).unwrap());
    let front = SharedDevice::new(ToyDma::new(memory, Gate::new(0)), Arc::new(Pool::new())).unwrap();
    for (register, value) in
        [(dma::SOURCE, 0), (dma::TARGET, 0x10000), (dma::LENGTH, 4096), (dma::COMMAND, 1)]
    {
        write(&front, register, value);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| while front.event(ToyDma::tick) {});
        front.quiesce(soon()).unwrap().unwrap();
    });
    assert!(!front.event(ToyDma::tick), "held");
    front.resume().unwrap();
    assert_eq!(read(&front, dma::STATUS), dma::STATUS_DONE);
}

#[test]
fn work_is_done_at_a_quiescent_point_or_not_at_all() {
    let (front, memory, wires) = rings();
    let mut driver = RingDriver::new(&memory, &wires, RINGS_AT, 0);
    write(&front, ring::ENABLE, 0b11);
    wires.gate.shut();
    ask(&mut driver, 7);
    let policy = |on_miss| QuiescePolicy { deadline: Instant::now() + Duration::from_millis(20), on_miss };
    let mut worked = false;
    // The core may not have taken the request yet: then there is nothing to wait for.
    let missed = loop {
        match front.at_quiescence(policy(OnMiss::Undrain), |_| worked = true).unwrap() {
            Ok(()) => worked = false,
            Err(error) => break error,
        }
    };
    assert!(matches!(missed, QuiesceError::Missed { .. }) && !worked, "{missed}");
    assert_eq!(front.presence(), Presence::Running);
    let forced = OnMiss::Suspend { timeout: Duration::from_secs(20) };
    let stop = front.at_quiescence(policy(forced), |quiescent| quiescent.stop()).unwrap().unwrap();
    assert_eq!((stop, front.presence()), (Stop::Suspended, Presence::Running));
    wires.gate.open();
    assert_eq!(answer(&mut driver), mix(0, 7));
    front.quiesce_by(policy(OnMiss::Undrain)).unwrap().unwrap();
    assert!(
        matches!(front.at_quiescence(policy(forced), |_| ()), Err(SharedDeviceError::Not { .. })),
        "held"
    );
    front.resume().unwrap();
}

#[test]
fn closing_lets_go_of_whoever_waits() {
    let (front, ..) = rings();
    front.quiesce(soon()).unwrap().unwrap();
    std::thread::scope(|scope| {
        let vcpu =
            scope.spawn(|| front.access(RegisterAddress::Bar(0, ring::ALIVE), Access::Read(&mut [0; 8])));
        assert!(front.close().is_some());
        assert!(matches!(vcpu.join().unwrap(), Err(SharedDeviceError::Closed)));
    });
}
