//! Saved devices as bytes, with requests in flight: what is stored today is what is written tomorrow, and is loaded tomorrow.

mod lan;
mod rig;

use std::sync::Arc;

use ioplane_device::{Access, Device, Quiescent, RegisterAddress, Running, SavedState};
use ioplane_network::{Port, PortOptions, PortRx, SwitchSettings};
use ioplane_storage::filter::Stall;
use ioplane_storage::{Backing, MemoryBacking};
use ioplane_testkit::driver::net::PairPlan;
use ioplane_testkit::driver::{DiskOp, Shape};
use ioplane_testkit::golden;
use ioplane_testkit::golden::Golden;
use ioplane_testkit::hand::HandCore;
use ioplane_virtio::blk::Blk;
use ioplane_virtio::blk::spec::VIRTIO_BLK_S_OK;
use ioplane_virtio::net::spec::VIRTIO_NET_OK;
use ioplane_virtio::net::spec::control::*;
use ioplane_virtio::spec::mmio::*;
use ioplane_virtio::{Vdev, VirtioMmio};
use lan::packet::{self, payload, tcp};
use lan::{Lan, Wants, mac};
use rig::{CountedInterrupt, PACKED, Rig, SPLIT, options};

const MIB: u64 = 1 << 20;

/// Brings a device to a quiescent point; what does not end is recorded in flight.
fn stop<D: Device>(running: Running<D>, core: &HandCore) -> Quiescent<D> {
    let quiescing = running.begin_quiesce();
    core.turn();
    let quiescing = match quiescing.finish() {
        Ok(quiescent) => return quiescent,
        Err(missed) => missed.suspend().unwrap(),
    };
    core.turn();
    quiescing.finish().unwrap()
}

/// A disk on a backing that can be stalled.
struct Stalled {
    rig: Rig,
    stall: Arc<Stall>,
}

impl Stalled {
    /// With three requests in flight, of which one has been answered since.
    fn with_requests_in_flight(features: u64) -> (Stalled, SavedState) {
        let stall = Stall::new(MemoryBacking::new(MIB).unwrap());
        let mut rig = Rig::with(options("disk"), stall.clone(), Shape::Direct, features);
        assert_eq!(rig.write(8, &[7; 1024]), VIRTIO_BLK_S_OK);
        assert_eq!(rig.read(8, 512).0, VIRTIO_BLK_S_OK);
        stall.stall();
        let token = rig.disk.next().unwrap();
        rig.disk.write_data(token, &[9; 2048]).unwrap();
        rig.disk.submit(DiskOp::Write, 16, 2048).unwrap();
        rig.disk.submit(DiskOp::Flush, 0, 0).unwrap();
        rig.disk.submit(DiskOp::Read, 8, 1024).unwrap();
        rig.core.turn();
        let quiescent = stop(rig.running.take().unwrap(), &rig.core);
        assert_eq!(quiescent.device().queue(0).unwrap().in_flight.len(), 3);
        let state = quiescent.save().unwrap();
        (Stalled { rig, stall }, state)
    }

    /// A disk like it, with the same guest, goes on from `state`, and answers what was in flight.
    fn goes_on(mut self, state: &SavedState) {
        self.stall.release();
        let rig = &mut self.rig;
        let blk = Blk::new(options("disk"), self.stall.clone());
        let mut fresh = Vdev::new(blk, rig.memory.view().map().clone());
        fresh.queue_mut(0).unwrap().call = Some(rig.interrupt.clone());
        let loaded = Quiescent::new(fresh).load(state).unwrap();
        rig.running = Some(loaded.start(&rig.core).unwrap());
        for _ in 0..3 {
            assert_eq!(rig.finish(), Some(VIRTIO_BLK_S_OK));
        }
        assert_eq!(rig.read(16, 2048), (VIRTIO_BLK_S_OK, vec![9; 2048]));
    }
}

fn disk_in_flight(features: u64, golden: &Golden) {
    let (disk, state) = Stalled::with_requests_in_flight(features);
    golden.check_state(&state);
    disk.goes_on(&golden.state());
}

#[test]
fn a_disk_with_split_rings() {
    disk_in_flight(SPLIT, &golden!("virtio-blk-split.state"));
}

#[test]
fn a_disk_with_packed_rings() {
    disk_in_flight(PACKED, &golden!("virtio-blk-packed.state"));
}

/// Nothing writes version 1 any more: the file stays as it is for as long as it is read.
#[test]
fn a_disk_that_was_saved_in_version_1() {
    let state = golden!("virtio-blk-split-v1.state").state();
    assert_eq!(state.version, 1);
    Stalled::with_requests_in_flight(SPLIT).0.goes_on(&state);
}

/// Receivers on the switch, which take what they are sent.
struct Receivers(Vec<(Port, PortRx)>);

impl Receivers {
    fn new(lan: &Lan, count: u8) -> Self {
        let one = |number: u8| {
            let mac = Some(mac(100 + number));
            let port =
                lan.switch.plug(PortOptions { mac, ..PortOptions::new(&format!("tap{number}")) }).unwrap();
            port.set_up(true);
            let port_rx = port.rx(0);
            (port, port_rx)
        };
        Receivers((0..count).map(one).collect())
    }

    /// What each has received since.
    fn came(&mut self) -> Vec<usize> {
        let each = |(_, port_rx): &mut (Port, PortRx)| {
            std::iter::from_fn(|| port_rx.front().is_some().then(|| port_rx.pop())).count()
        };
        self.0.iter_mut().map(each).collect()
    }
}

/// In the middle of sending to many, with everything set that a driver can set.
fn nic_in_flight(packed: bool, golden: &Golden) {
    let flood = SwitchSettings { flood_burst: 1 << 30, flood_rate: 1 << 34, ..SwitchSettings::default() };
    let lan = Lan::with(flood);
    let wants = Wants::new(1);
    let plan = PairPlan { slots: 8, ..wants.plan };
    let mut nic = lan.plug_with(Wants { packed, pairs: 2, plan, ..wants });
    let mut receivers = Receivers::new(&lan, 100);
    let table = [&1u32.to_le_bytes()[..], &mac(33), &1u32.to_le_bytes(), &[0x33, 0x33, 0, 0, 0, 9]].concat();
    for (class, command, data) in [
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_ALLMULTI, &[1][..]),
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_NOUNI, &[0]),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, &table),
        (VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_ADD, &9u16.to_le_bytes()),
        (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, &2u16.to_le_bytes()),
        (VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET, &2u64.to_le_bytes()),
    ] {
        assert_eq!(nic.command(class, command, data), VIRTIO_NET_OK, "class {class}, command {command}");
    }
    nic.send(packet::large_header(1448), &tcp(mac(100), mac(1), (1, 2), &payload(3000)));
    receivers.came();
    let frame = tcp([0xff; 6], mac(1), (1, 2), &payload(60_000));
    assert!(nic.pairs[0].send(packet::large_header(1448), &frame).unwrap());
    lan.core.turn();
    let quiescent = stop(nic.running.take().unwrap(), &lan.core);
    assert_eq!(quiescent.device().queue(1).unwrap().in_flight.len(), 1);
    golden.check_state(&quiescent.save().unwrap());
    // The old one leaves the switch, the new one takes its place.
    drop(quiescent);
    receivers.came();
    let stored = golden.state();
    let loaded = Quiescent::new(lan.fresh(&nic, 2)).load(&stored).unwrap().into_quiescent();
    assert_eq!(loaded.save().unwrap(), stored);
    nic.resume(loaded);
    lan.settle();
    assert_eq!(nic.pairs[0].reap().unwrap(), 1);
    assert_eq!(receivers.came(), [42; 100], "what was in flight is sent whole");
}

#[test]
fn a_nic_with_split_rings() {
    nic_in_flight(false, &golden!("virtio-net-split.state"));
}

#[test]
fn a_nic_with_packed_rings() {
    nic_in_flight(true, &golden!("virtio-net-packed.state"));
}

fn registers(rig: &Rig, backing: &Arc<dyn Backing>) -> VirtioMmio<Blk> {
    let vdev = Vdev::new(Blk::new(options("disk"), backing.clone()), rig.memory.view().map().clone());
    VirtioMmio::new(vdev, Arc::new(CountedInterrupt::default()))
}

#[test]
fn a_disk_behind_registers() {
    let backing: Arc<dyn Backing> = MemoryBacking::new(MIB).unwrap();
    let mut rig = Rig::new(backing.clone());
    let features = rig.running().device().features();
    rig.quiesce();
    rig.running = None;
    let mut mmio = registers(&rig, &backing);
    let place = rig.disk.place();
    let word = |number: u64, half: u32| (number >> (32 * half)) as u32;
    let acknowledged = ACKNOWLEDGE | DRIVER | FEATURES_OK;
    for (register, value) in [
        (STATUS, ACKNOWLEDGE | DRIVER),
        (DRIVER_FEATURES_SEL, 0),
        (DRIVER_FEATURES, word(features, 0)),
        (DRIVER_FEATURES_SEL, 1),
        (DRIVER_FEATURES, word(features, 1)),
        (DEVICE_FEATURES_SEL, 1),
        (STATUS, acknowledged),
        (QUEUE_NUM, place.size.into()),
        (QUEUE_DESC_LOW, word(place.desc, 0)),
        (QUEUE_DESC_HIGH, word(place.desc, 1)),
        (QUEUE_DRIVER_LOW, word(place.avail, 0)),
        (QUEUE_DRIVER_HIGH, word(place.avail, 1)),
        (QUEUE_DEVICE_LOW, word(place.used, 0)),
        (QUEUE_DEVICE_HIGH, word(place.used, 1)),
        (QUEUE_READY, 1),
        (STATUS, acknowledged | DRIVER_OK),
        (QUEUE_SEL, 5),
    ] {
        // Nothing runs yet: there is nothing to carry out.
        let _ = mmio.access(RegisterAddress::Bar(0, register), Access::Write(&value.to_le_bytes()));
    }
    mmio.config_changed();
    let golden = golden!("virtio-mmio.state");
    golden.check_state(&Quiescent::new(mmio).save().unwrap());
    let stored = golden.state();
    let loaded = Quiescent::new(registers(&rig, &backing)).load(&stored).unwrap().into_quiescent();
    assert_eq!(loaded.save().unwrap(), stored);
    let running = loaded.resume(&rig.core).unwrap();
    assert_eq!(rig.write(8, &[7; 512]), VIRTIO_BLK_S_OK);
    drop(running);
}
