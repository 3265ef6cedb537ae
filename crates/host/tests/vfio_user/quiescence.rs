//! Memory goes at a quiescent point; nothing is lost while somebody else holds the device; who leaves takes everything along.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use ioplane_device::{Lifecycle, OnMiss, Presence, QuiesceError, Quiescent, Stop};
use ioplane_host::vfio_user::spec::{self, DmaUnmap};
use ioplane_testkit::toy::card::registers::*;
use ioplane_testkit::vfio_user::VfioUserClient;
use rustix::io::Errno;
use vfio_bindings::bindings::vfio;
use zerocopy::IntoBytes;

use super::{CARD_PATIENCE, Served, count, errno, eventfd, eventually, memory, served, served_as};

const MIB: u64 = 1 << 20;
const WIRE: u32 = vfio::VFIO_IRQ_SET_DATA_EVENTFD | vfio::VFIO_IRQ_SET_ACTION_TRIGGER;

fn mapped(client: &mut VfioUserClient) {
    let file = memory(MIB);
    client.map(0, MIB, 0, Some(file.as_fd())).unwrap();
}

/// A command that is sent, and whose reply is read later.
fn begin(client: &mut VfioUserClient, command: u16, body: &[u8]) -> u16 {
    let (id, bytes) = client.frame(command, body);
    client.send(&bytes, &[]).unwrap();
    id
}

/// A card, and a client whose memory it can reach.
fn with_memory() -> (Served, VfioUserClient) {
    let card = served();
    let mut client = card.client();
    mapped(&mut client);
    (card, client)
}

/// The same while the card is at work.
fn busy() -> (Served, VfioUserClient) {
    let (card, mut client) = with_memory();
    client.write64(0, BUSY, 1).unwrap();
    (card, client)
}

/// Takes memory away; [`unmapped`] is its end.
fn begin_unmap(client: &mut VfioUserClient, address: u64) -> u16 {
    let body = DmaUnmap { argsz: 24, flags: 0, address, size: MIB };
    begin(client, spec::DMA_UNMAP, body.as_bytes())
}

#[track_caller]
fn unmapped(client: &VfioUserClient, id: u16) {
    assert_eq!(client.expect(id, spec::DMA_UNMAP).unwrap().errno(), None);
}

/// No reply yet. That it never comes cannot be waited for; what would wrongly send one is done long before.
#[track_caller]
fn silent(client: &VfioUserClient) {
    client.stream().set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let error = client.receive().expect_err("a reply too early");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    client.stream().set_read_timeout(Some(ioplane_testkit::vfio_user::PATIENCE)).unwrap();
}

fn hold(card: &Served) {
    let held = card.holding(Duration::from_secs(5), OnMiss::Undrain).wait().expect("served");
    assert_eq!(held.expect("it is still").stop, Stop::Drained);
}

#[test]
fn unmapping_waits_for_a_device_that_finishes() {
    let (card, mut client) = busy();
    let id = begin_unmap(&mut client, 0);
    eventually("draining", || card.handle.presence() == Presence::Quiescing);
    assert_eq!(card.seen.replaced.load(SeqCst), 0);
    // Its hardware finishes, which the thread that waits has to hear.
    card.ring();
    unmapped(&client, id);
    assert_eq!((card.seen.replaced.load(SeqCst), card.seen.suspends.load(SeqCst)), (1, 0));
    assert_eq!((card.seen.ranges.load(SeqCst), card.handle.status().forced), (0, 0));
    assert_eq!(card.handle.presence(), Presence::Running);
}

#[test]
fn unmapping_forces_a_device_that_does_not_finish() {
    let (card, mut client) = busy();
    let began = Instant::now();
    client.unmap(0, MIB).unwrap();
    assert!(began.elapsed() >= CARD_PATIENCE, "not before its time");
    assert_eq!((card.seen.suspends.load(SeqCst), card.seen.ranges.load(SeqCst)), (1, 0));
    assert_eq!(client.read64(0, BUSY).unwrap(), 1, "it goes on with what it was at");
    assert_eq!(card.handle.status().forced, 1);
}

#[test]
fn a_burst_of_unmaps_waits_once() {
    let card = served();
    let mut client = card.client();
    let file = memory(MIB);
    for at in 0..16u64 {
        client.map(at * MIB, MIB, 0, Some(file.as_fd())).unwrap();
    }
    client.write64(0, BUSY, 1).unwrap();
    let began = Instant::now();
    for at in 0..8u64 {
        client.unmap(at * MIB, MIB).unwrap();
    }
    assert!(began.elapsed() < 4 * CARD_PATIENCE, "eight would be {:?}", began.elapsed());
    assert_eq!(card.handle.status().forced, 8);
    // The guest goes on: from then on the device is waited for again.
    client.write64(0, SCRATCH, 0).unwrap();
    let id = begin_unmap(&mut client, 8 * MIB);
    card.ring();
    unmapped(&client, id);
    assert_eq!(card.handle.status().forced, 8);
}

#[test]
fn a_device_that_cannot_be_stopped_keeps_its_memory_and_says_so() {
    let (card, mut client) = busy();
    card.seen.stubborn.store(true, SeqCst);
    assert_eq!(errno(client.unmap(0, MIB)), Errno::BUSY);
    assert_eq!((card.seen.replaced.load(SeqCst), card.handle.status().dma_maps), (0, 1));
    assert_eq!(client.read64(0, BUSY).unwrap(), 1, "it runs");
    assert_eq!(card.handle.status().faults["not_quiescent"], 1);
    client.write64(0, BUSY, 0).unwrap();
    client.unmap(0, MIB).expect("now it can");
    assert_eq!(card.seen.ranges.load(SeqCst), 0);
}

#[test]
fn a_device_that_asks_for_attention_all_the_time_is_still_stopped() {
    let card = served();
    card.seen.tireless.store(true, SeqCst);
    let mut client = card.client();
    mapped(&mut client);
    client.write64(0, BUSY, 1).unwrap();
    let id = begin_unmap(&mut client, 0);
    while card.handle.status().forced == 0 {
        card.ring();
    }
    unmapped(&client, id);
}

#[test]
fn nothing_is_lost_while_somebody_holds_the_device() {
    let card = served();
    let mut client = card.client();
    let call = eventfd();
    client.set_irqs(WIRE, 0, 0..1, &[], &[&call]).unwrap();
    hold(&card);
    // Wires and memory go on; an access waits, and what comes after it.
    let vector = eventfd();
    client.set_irqs(WIRE, 2, 0..1, &[], &[&vector]).unwrap();
    mapped(&mut client);
    let head = spec::RegionAccess { offset: SCRATCH, region: 0, count: 8 };
    let mut body = head.as_bytes().to_vec();
    body.extend(9u64.to_le_bytes());
    let write = begin(&mut client, spec::REGION_WRITE, &body);
    let read = begin(&mut client, spec::REGION_READ, head.as_bytes());
    card.ring();
    silent(&client);
    assert_eq!((card.seen.attended.load(SeqCst), count(&call)), (0, 0), "held is held");
    card.resume();
    client.expect(write, spec::REGION_WRITE).unwrap();
    assert_eq!(client.expect(read, spec::REGION_READ).unwrap().body[16..], 9u64.to_le_bytes());
    eventually("the interrupt", || count(&call) == 1);
    client.write64(0, MSIX, 0).unwrap();
    assert_eq!(count(&vector), 1);
}

#[test]
fn attention_does_not_turn_the_processor_while_the_device_is_held() {
    let card = served_as("held.sock");
    let mut client = card.client();
    hold(&card);
    card.ring();
    // Nanoseconds that the service's thread has run.
    let spent = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let mut ours = tasks.filter(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm == "vfu:held\n")
        });
        let stat = std::fs::read_to_string(ours.next().unwrap().path().join("schedstat")).unwrap();
        stat.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let before = spent();
    std::thread::sleep(Duration::from_millis(300));
    // A thread that spins would have most of it, on a busy machine a good part.
    let ran = spent() - before;
    assert!(ran < 20_000_000, "{ran} ns of 300 ms");
    card.resume();
    eventually("attention", || card.seen.attended.load(SeqCst) == 1);
    client.info().unwrap();
}

#[test]
fn memory_goes_and_resets_happen_under_somebody_elses_hold() {
    let (card, mut client) = with_memory();
    hold(&card);
    client.unmap(0, MIB).unwrap();
    client.must(spec::DEVICE_RESET, &[], &[]).unwrap();
    assert_eq!((card.seen.ranges.load(SeqCst), card.seen.resets.load(SeqCst)), (0, 1));
    assert_eq!(card.handle.presence(), Presence::Held, "as it was");
    card.resume();
    assert_eq!(client.read64(0, SCRATCH).unwrap(), 0);
}

#[test]
fn a_device_that_is_away_comes_back_to_all_that_waits() {
    let (card, mut client) = with_memory();
    hold(&card);
    let device = card.handle.with(Lifecycle::take).wait().unwrap().unwrap();
    let id = begin_unmap(&mut client, 0);
    silent(&client);
    card.handle.with(|lifecycle| *lifecycle = device.into()).wait().unwrap();
    unmapped(&client, id);
    assert_eq!(card.seen.ranges.load(SeqCst), 0);
    card.resume();
}

#[test]
fn who_leaves_takes_everything_along() {
    let card = served();
    for round in 1..=20u64 {
        let mut client = card.client();
        mapped(&mut client);
        let (call, vector) = (eventfd(), eventfd());
        client.set_irqs(WIRE, 0, 0..1, &[], &[&call]).unwrap();
        client.set_irqs(WIRE, 2, 0..1, &[], &[&vector]).unwrap();
        // The hardware has raised the line in the last round, when there was nobody: that comes now.
        assert_eq!(count(&call), u64::from(round > 1));
        assert_eq!(client.read64(0, SCRATCH).unwrap(), 0, "as at power-on");
        client.write64(0, SCRATCH, round).unwrap();
        client.write64(0, BUSY, round % 2).unwrap();
        drop(client);
        eventually("the end", || !card.handle.status().connected);
        assert_eq!((card.seen.ranges.load(SeqCst), card.seen.resets.load(SeqCst)), (0, round));
        card.ring();
        eventually("attention", || card.seen.attended.load(SeqCst) == round);
        assert_eq!((count(&call), count(&vector)), (0, 0), "its wires are gone");
        assert_eq!(card.handle.status().connections, round);
    }
    assert!(card.handle.status().faults.is_empty());
}

#[test]
fn who_leaves_while_its_access_waits_is_noticed() {
    let (card, mut client) = with_memory();
    hold(&card);
    let head = spec::RegionAccess { offset: SCRATCH, region: 0, count: 8 };
    begin(&mut client, spec::REGION_READ, head.as_bytes());
    silent(&client);
    drop(client);
    eventually("the end", || !card.handle.status().connected);
    assert_eq!((card.seen.ranges.load(SeqCst), card.handle.presence()), (0, Presence::Held));
    card.resume();
    assert_eq!(card.client().info().unwrap().num_regions, 9);
}

#[test]
fn a_device_that_is_stuck_gets_no_new_client_before_it_is_rid_of_the_old() {
    let (card, client) = busy();
    card.seen.stubborn.store(true, SeqCst);
    drop(client);
    eventually("the fault", || card.handle.status().faults.contains_key("not_quiescent"));
    assert_eq!(card.seen.ranges.load(SeqCst), 1, "it may still use that memory");
    let mut next = VfioUserClient::connect(&card.socket()).unwrap();
    let version = spec::Version { major: 0, minor: 0 };
    let id = begin(&mut next, spec::VERSION, version.as_bytes());
    silent(&next);
    card.seen.stubborn.store(false, SeqCst);
    assert_eq!(next.expect(id, spec::VERSION).unwrap().errno(), None);
    assert_eq!(card.seen.ranges.load(SeqCst), 0);
    assert_eq!(next.read64(0, BUSY).unwrap(), 0);
}

#[test]
fn a_stop_ends_an_access_that_waits() {
    let (card, mut client) = with_memory();
    hold(&card);
    let head = spec::RegionAccess { offset: SCRATCH, region: 0, count: 8 };
    begin(&mut client, spec::REGION_READ, head.as_bytes());
    silent(&client);
    let began = Instant::now();
    card.handle.stop(true).unwrap();
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!((card.seen.ranges.load(SeqCst), card.handle.presence()), (0, Presence::Closed));
    assert!(client.receive().is_err());
}

#[test]
fn a_handle_that_is_dropped_ends_the_service() {
    let card = served();
    let (mut client, socket) = (card.client(), card.socket());
    let asked = card.handle.with(|_| ());
    asked.wait().unwrap();
    drop(card.handle);
    eventually("the end", || !socket.exists());
    assert!(client.info().is_err());
    assert_eq!(card.folder.path().read_dir().unwrap().count(), 0);
}

#[test]
fn the_client_is_served_while_the_daemon_waits_and_misses() {
    let (card, mut client) = busy();
    let holding = card.holding(CARD_PATIENCE, OnMiss::Undrain);
    eventually("draining", || card.handle.presence() == Presence::Quiescing);
    client.write64(0, SCRATCH, 7).unwrap();
    assert_eq!(client.read64(0, SCRATCH).unwrap(), 7, "its guest is what makes it still");
    let missed = holding.wait().unwrap().expect_err("it is busy");
    assert!(
        matches!(&missed, QuiesceError::Missed { reason } if reason == "it was told to be busy"),
        "{missed}"
    );
    assert_eq!((card.handle.presence(), card.handle.held()), (Presence::Running, None));
    assert_eq!(client.read64(0, BUSY).unwrap(), 1);
    // By force, and by a guest that finishes.
    let forced = card.holding(Duration::ZERO, OnMiss::Suspend { timeout: CARD_PATIENCE }).wait().unwrap();
    let forced = forced.expect("it is forced");
    assert_eq!((forced.stop, forced.missed.as_deref()), (Stop::Suspended, Some("it was told to be busy")));
    assert!(card.handle.held().is_some());
    card.resume();
    assert_eq!(card.handle.resume().wait().unwrap().ok(), Some(false), "nobody holds it");
    let holding = card.holding(Duration::from_secs(20), OnMiss::Undrain);
    client.write64(0, BUSY, 0).unwrap();
    assert_eq!(holding.wait().unwrap().expect("it is still").stop, Stop::Drained);
    let again = card.holding(Duration::ZERO, OnMiss::Undrain).wait().unwrap();
    assert!(matches!(again, Err(QuiesceError::NotHere("held"))), "{again:?}");
    card.resume();
}

#[test]
fn a_daemon_that_stops_waiting_gets_nothing_held() {
    let card = served();
    let mut client = card.client();
    client.write64(0, BUSY, 1).unwrap();
    let holding = card.holding(Duration::from_secs(600), OnMiss::Undrain);
    eventually("draining", || card.handle.presence() == Presence::Quiescing);
    drop(holding);
    eventually("the device", || card.handle.presence() == Presence::Running);
    client.write64(0, BUSY, 0).unwrap();
    assert_eq!(client.read64(0, BUSY).unwrap(), 0, "nothing waits");
    assert_eq!(card.seen.suspends.load(SeqCst), 0);
}

#[test]
fn a_lease_ends_by_itself() {
    let card = served();
    let mut client = card.client();
    let held = card.handle.hold(super::policy(Duration::ZERO, OnMiss::Undrain), Duration::from_millis(50));
    held.wait().unwrap().expect("it is still");
    assert_eq!(client.read64(0, SCRATCH).unwrap(), 0, "after the lease");
    assert_eq!((card.handle.presence(), card.handle.held()), (Presence::Running, None));
}

#[test]
fn the_daemon_waits_for_the_clients_quiescent_point_and_does_its_own_work() {
    let (card, mut client) = busy();
    let id = begin_unmap(&mut client, 0);
    eventually("draining", || card.handle.presence() == Presence::Quiescing);
    let policy = super::policy(Duration::from_secs(20), OnMiss::Suspend { timeout: CARD_PATIENCE });
    let saving = card.handle.at_quiescence(policy, |quiescent| quiescent.save());
    unmapped(&client, id);
    client.write64(0, BUSY, 0).unwrap();
    let state = saving.wait().unwrap().expect("it is still").expect("it is saved");
    assert_eq!(card.handle.presence(), Presence::Running);
    client.write64(0, SCRATCH, 3).unwrap();
    card.handle.load(policy, state.clone()).wait().unwrap().expect("it is still").expect("it is loaded");
    assert_eq!((client.read64(0, SCRATCH).unwrap(), card.handle.presence()), (0, Presence::Running));
    // Refused, it is as it was.
    let damaged = ioplane_device::SavedState { body: vec![0; 3], ..state.clone() };
    let refused = card.handle.load(policy, damaged).wait().unwrap().expect("it is still");
    assert!(matches!(refused, Err(ioplane_device::LoadError::Refused(_))), "{refused:?}");
    assert_eq!(card.handle.presence(), Presence::Running);
    // Held, it stays held; what is loaded there goes on.
    hold(&card);
    card.handle.at_quiescence(policy, Quiescent::reset).wait().unwrap().expect("done where it is");
    assert_eq!(card.handle.presence(), Presence::Held);
    card.handle.load(policy, state).wait().unwrap().expect("held").expect("it is loaded");
    assert_eq!((card.handle.presence(), card.handle.held()), (Presence::Running, None));
}
