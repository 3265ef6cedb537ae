//! Hardware that goes from one client to the next, over real sockets: what the first was given, and what becomes of a reset that fails.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use ioplane_device::Quiescent;
use ioplane_host::vfio_user::spec::{REGION_CAP_SHADOW, RegionInfo};
use ioplane_host::vfio_user::{Handle, Options, serve};
use ioplane_memory::Mapping;
use ioplane_nic::rtl8139::Rtl8139;
use ioplane_passthrough::monitor::{self, Monitor, Policies, Policy};
use ioplane_passthrough::{Passthrough, rtl8139};
use ioplane_pci::Function;
use ioplane_testkit::hand::HandCore;
use ioplane_testkit::nic::{Cp, Cut, Lan, frame};
use ioplane_testkit::simulated::{Bench, Trouble};
use ioplane_testkit::vfio_user::VfioUserClient;

use crate::rig::*;

const BASE: u64 = 0x1_0000;
const TX_RING: u64 = BASE + 0x400;

struct Served<F: Function> {
    handle: Handle<F>,
    bench: Bench<Rtl8139>,
    _folder: tempfile::TempDir,
    _lan: Lan,
}

impl<F: Function> Served<F> {
    fn new(function: F, bench: Bench<Rtl8139>, lan: Lan) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let core = HandCore::default();
        let running = Quiescent::new(function).resume(&core).expect("it starts");
        let options = Options::new(folder.path().join("nic1.sock"));
        let handle = serve(running, Arc::new(core), options).expect("served");
        Served { handle, bench, _folder: folder, _lan: lan }
    }

    fn socket(&self) -> PathBuf {
        self.handle.socket().to_owned()
    }

    /// The client leaves, and nothing is left of it.
    fn leaves(&self, client: VfioUserClient) {
        drop(client);
        let deadline = soon();
        while self.handle.status().connected {
            assert!(Instant::now() < deadline, "its end is not heard");
            std::thread::yield_now();
        }
    }
}

fn watched() -> Served<Monitor<ioplane_testkit::simulated::Simulated<Rtl8139>>> {
    let lan = Lan::new(OWN, OTHER);
    let (hardware, bench) = rtl8139_card(&lan);
    let monitor =
        Monitor::new(hardware, &rtl8139::MODEL, monitor::MonitorOptions::new("nic1")).expect("it works");
    Served::new(monitor, bench, lan)
}

fn direct() -> Served<Passthrough<ioplane_testkit::simulated::Simulated<Rtl8139>>> {
    let lan = Lan::new(OWN, OTHER);
    let (hardware, bench) = rtl8139_card(&lan);
    Served::new(Passthrough::new("nic1", hardware, Some(&rtl8139::MODEL)).expect("it works"), bench, lan)
}

fn a_failed_reset_keeps_clients_out<F: Function>(served: &Served<F>) {
    let mut first = VfioUserClient::greet(&served.socket()).expect("a client");
    first.write(1, 0x37, &[0x0c]).expect("works");
    served.bench.trouble(Trouble::Deaf);
    served.leaves(first);
    // Its rings are still in the card, as far as anybody knows.
    for _ in 0..2 {
        let refused = VfioUserClient::greet(&served.socket()).expect_err("a card in an unknown state");
        assert_eq!(refused.raw_os_error(), Some(libc::EIO), "{refused}");
    }
    let fault = served.handle.status().last_fault.expect("it is said why");
    assert!(fault.contains("reset"), "{fault}");
    served.bench.trouble(Trouble::None);
    let mut next = VfioUserClient::greet(&served.socket()).expect("it is tried again for each");
    assert_eq!(next.read(1, 0x37, 1).expect("works"), [0x01], "as after a reset");
    served.leaves(next);
}

#[test]
fn hole_10_a_card_that_was_not_reset_goes_to_nobody() {
    a_failed_reset_keeps_clients_out(&watched());
    a_failed_reset_keeps_clients_out(&direct());
}

/// A client whose own reset fails is told, and has a card that does nothing: its guest finds all ones.
#[test]
fn hole_10_a_card_in_use_that_does_not_reset_is_dead_until_it_does() {
    let check = |client: &mut VfioUserClient, bench: &Bench<Rtl8139>| {
        use ioplane_host::vfio_user::spec::DEVICE_RESET;
        client.must(DEVICE_RESET, &[], &[]).expect("works");
        client.write(vfio_bindings::bindings::vfio::VFIO_PCI_CONFIG_REGION_INDEX, 4, &[7, 0]).expect("works");
        bench.trouble(Trouble::Deaf);
        let failed = client.must(DEVICE_RESET, &[], &[]).expect_err("it does not end");
        assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{failed}");
        assert_eq!(client.read(1, 0, 4).expect("answered"), [0xff; 4]);
        let before = bench.touches().writes;
        client.write(1, 0x37, &[0x0c]).expect("answered");
        assert_eq!(bench.touches().writes, before, "the card does not hear of it");
        bench.trouble(Trouble::None);
        client.must(DEVICE_RESET, &[], &[]).expect("works");
        assert_eq!(client.read(1, 0, 4).expect("answered"), OWN[..4]);
    };
    let (watched, direct) = (watched(), direct());
    check(&mut VfioUserClient::greet(&watched.socket()).expect("a client"), &watched.bench);
    check(&mut VfioUserClient::greet(&direct.socket()).expect("a client"), &direct.bench);
}

/// The page that a client reads, as a descriptor.
fn page(client: &mut VfioUserClient) -> OwnedFd {
    let mut answer = client.region(1, 4096).expect("a region");
    let (info, _) = answer.prefix::<RegionInfo>().expect("a region");
    // Behind the capability of the page that is mapped for writing.
    let next = info.cap_offset as usize + 4;
    let at = u32::from_le_bytes(answer.body[next..next + 4].try_into().expect("four bytes")) as usize;
    assert_eq!(answer.body[at..at + 2], REGION_CAP_SHADOW.to_le_bytes());
    answer.files.pop().expect("a descriptor")
}

fn with_shadows<F: Function>(served: &Served<F>) -> VfioUserClient {
    let mut client = VfioUserClient::connect(&served.socket()).expect("connects");
    client
        .version(Some(r#"{"capabilities":{"max_msg_fds":2,"ioplane_shadow_pages":true}}"#))
        .expect("agreed");
    client
}

#[test]
fn hole_13_each_client_has_a_page_of_its_own_that_it_cannot_write() {
    let served = watched();
    let mut first = with_shadows(&served);
    let kept = page(&mut first);
    // Its mode lets its owner open it anew.
    let path = format!("/proc/self/fd/{}", kept.as_raw_fd());
    match std::fs::OpenOptions::new().read(true).write(true).open(path) {
        Err(error) => assert_eq!(error.kind(), ErrorKind::PermissionDenied),
        Ok(file) => {
            let written = rustix::io::pwrite(&file, b"x", 0x3e);
            assert_eq!(written, Err(rustix::io::Errno::PERM), "a guest's status is not another's to write");
            assert!(Mapping::of_file(file.into(), 0, 4096).is_err(), "nor to map");
        }
    }
    served.leaves(first);
    let mut second = with_shadows(&served);
    let fresh = page(&mut second);
    let of = |file: &OwnedFd| rustix::fs::fstat(file).map(|stat| stat.st_ino).expect("fstat");
    assert_ne!(of(&kept), of(&fresh));
    let read = |file: &OwnedFd| {
        let mut bytes = [0; 4];
        rustix::io::pread(file, &mut bytes, 0x08).expect("reads");
        bytes
    };
    let before = read(&kept);
    second.write(1, 0x08, &[0xa5; 4]).expect("works");
    assert_eq!(read(&fresh), [0xa5; 4], "a multicast filter");
    assert_eq!(read(&kept), before, "which is nobody else's to see");
}

/// No descriptor of the hardware itself goes to a client of a watched card: who wants to drive it past the monitor cannot. What goes is
/// memory of ours, for the registers' place and what they say ([`ioplane_pci::register_file`]).
#[test]
fn hole_09_a_watched_card_hands_out_nothing_of_its_own() {
    let served = watched();
    let mut client = VfioUserClient::greet(&served.socket()).expect("a client");
    for index in 0..9 {
        let files = client.region(index, 4096).expect("a region").files;
        assert_eq!(files.len(), usize::from(index == 1), "region {index}");
        for file in files {
            let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("a link");
            assert_eq!(path.to_str(), Some("/memfd:ioplane-registers (deleted)"));
        }
    }
    let maps = served.handle.with(|device| {
        let mapped = |pages: &&ioplane_pci::Pages| pages.touch == ioplane_pci::Touch::Mapped;
        let of = |bar: &ioplane_pci::Bar| {
            bar.pages().iter().filter(mapped).map(|pages| pages.offset).collect::<Vec<_>>()
        };
        device.look().map(|monitor| monitor.bars().iter().flat_map(|(_, bar)| of(bar)).collect::<Vec<_>>())
    });
    assert_eq!(maps.wait().expect("served"), Some(vec![4096]), "no page with registers");
}

/// What a guest has granted, and who was to be told of its interrupts, goes with it: also where nobody takes it back piece by piece.
#[test]
fn the_half_of_a_guest_goes_with_it() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    for guest in 0..3u8 {
        driver.open(OWN).expect("opens");
        driver.reach.interrupts();
        let sent = frame(OTHER, OWN, &[guest; 100]);
        driver.xmit(&sent, Cut::default()).expect("room");
        assert_eq!(lan.neighbour.take(), Some(sent));
        assert!(driver.reach.interrupts() > 0, "guest {guest}");
        assert!(driver.reach.bench.mapped().iter().any(|(at, _)| *at >= monitor::WINDOW));
        let before = driver.reach.reading().totals;
        // Hosts reset it first; where that failed it is not handed on as it is either.
        if guest != 1 {
            driver.reach.reset();
        }
        driver.reach.with(Function::dismiss);
        assert!(driver.reach.bench.mapped().iter().all(|(at, _)| *at < monitor::WINDOW), "guest {guest}");
        let after = driver.reach.reading().totals;
        assert!(after.given >= before.given && after.updates >= before.updates, "counts only rise");
        let told = driver.reach.line.count();
        driver.reach.with(|monitor| {
            let call = ioplane_pci::Wire::Trigger;
            monitor.wire(ioplane_pci::Irq::Intx, 0, call).expect("a NIC has INTA#");
        });
        assert_eq!(driver.reach.line.count(), told, "nobody is told on behalf of who has left");
        let line = driver.reach.line.clone();
        driver.reach.with(|monitor| {
            monitor.grow_memory(map.clone()).expect("an IOMMU with room");
            wire(monitor, ioplane_pci::Irq::Intx, &line);
        });
    }
}

/// A card that does not end its reset while it is kept from descriptors that it was given.
#[test]
fn hole_14_a_reset_that_hangs_on_owned_descriptors_is_tried_again() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    driver.reach.bench.clings(1 << 31);
    driver.reach.reset();
    assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
    driver.reach.bench.clings(0);
    assert_eq!(driver.get(0x37, 1), Ok(0x01), "as after a reset");
    driver.open(OWN).expect("opens");
    let sent = frame(OTHER, OWN, &[1; 100]);
    driver.xmit(&sent, Cut::default()).expect("room");
    assert_eq!(lan.neighbour.take(), Some(sent));
}

#[test]
fn hole_14_one_bad_descriptor_does_not_keep_the_good_ones() {
    for policy in [Policy::Ignore, Policy::Error] {
        let (watched, map, mut lan) = rtl8139(Policies::all(policy));
        let view = view(&map);
        let mut driver = Cp::new(watched, view.clone(), BASE);
        driver.open(OWN).expect("opens");
        driver.reach.interrupts();
        let frames: Vec<_> = (0..5u8).map(|n| frame(OTHER, OWN, &[n; 100])).collect();
        frames.iter().for_each(|frame| driver.queue(frame, Cut::default()).expect("room"));
        for bad in [1, 3] {
            view.write(TX_RING + 16 * bad + 8, &(64u64 << 30).to_le_bytes()).expect("memory");
        }
        driver.kick().expect("works");
        for good in [0, 2, 4] {
            assert_eq!(lan.neighbour.take().as_ref(), Some(&frames[good]), "frame {good}, {policy:?}");
        }
        assert_eq!(lan.neighbour.take(), None, "the bad ones were not sent");
        driver.reach.turn();
        assert_eq!(driver.reclaim().expect("works").len(), 5, "in their turn");
        assert_eq!(driver.reach.faults("buffer-outside"), 2);
        let sent = frame(OTHER, OWN, &[9; 100]);
        driver.xmit(&sent, Cut::default()).expect("room");
        assert_eq!(lan.neighbour.take(), Some(sent), "and it goes on");
        // Alone it comes back too.
        driver.reach.turn();
        driver.reclaim().expect("works");
        driver.queue(&frames[0], Cut::default()).expect("room");
        view.write(TX_RING + 16 * 6 + 8, &MEMORY.to_le_bytes()).expect("memory");
        driver.kick().expect("works");
        assert_eq!((driver.reclaim().expect("works").len(), lan.neighbour.take()), (1, None));
        driver.reach.hold().expect("nothing is in flight");
        driver.reach.resume();
    }
}
