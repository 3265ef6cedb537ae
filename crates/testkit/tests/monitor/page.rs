//! Shadow reads (V11): what a guest reads without an exit is never older than the interrupt that it has heard.

use std::sync::Arc;

use ioplane_device::{Access, Interrupt, RegisterAddress};
use ioplane_memory::{Mapping, Window};
use ioplane_passthrough::monitor::Policies;
use ioplane_pci::register_file::{BYTES, CONTROL_AT, GRANTED, REGISTERS_AT, WANTED};
use ioplane_pci::{Function, Irq, Touch, Wire};
use ioplane_testkit::nic::{Cp, Cut, Reach, frame};
use ioplane_testkit::simulated::Trouble;

use crate::rig::*;

const BASE: u64 = 0x1_0000;

/// The guest's mapping of the page.
fn page<F: Function>(watched: &mut Watched<F>) -> Window {
    watched.with(|monitor| {
        let bar = monitor.bars().bar(1).expect("memory registers").clone();
        assert_eq!((bar.size, bar.pages().len()), (8192, 2), "two whole pages");
        let (pages, marker) = (&bar.pages()[0], &bar.pages()[1]);
        assert_eq!((pages.touch, pages.offset, pages.len), (Touch::Shadow, 0, 4096));
        assert_eq!((marker.touch, marker.offset, marker.len), (Touch::Mapped, 4096, 4096));
        let file = pages.file.try_clone().expect("a descriptor");
        monitor.use_shadows(true);
        let mapping = Mapping::of_file_read_only(file, 0, 4096).expect("maps");
        Window::of_mapping(&Arc::new(mapping), 0, 4096).expect("whole")
    })
}

/// Reads from the page, writes by exits.
struct Mapped<R> {
    reach: R,
    page: Window,
    exits: u64,
}

impl<R: Reach> Reach for Mapped<R> {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        match (at, op) {
            (RegisterAddress::Bar(1, offset), Access::Read(out)) => {
                for (n, byte) in out.iter_mut().enumerate() {
                    *byte = self.page.load_u8(offset as usize + n);
                }
                Ok(())
            }
            (at, op) => {
                self.exits += 1;
                self.reach.access(at, op)
            }
        }
    }
}

#[test]
fn a_stock_driver_works_on_the_page() {
    let (mut watched, map, mut lan) = rtl8139(Policies::default());
    let page = page(&mut watched);
    let mut driver = Cp::new(Mapped { reach: watched, page, exits: 0 }, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.reach.interrupts();
    assert_eq!(driver.eeprom(7, 6).expect("works"), u16::from_le_bytes([OWN[0], OWN[1]]));
    driver.reach.exits = 0;
    for n in 0..100u8 {
        let (sent, came) = (frame(OTHER, OWN, &[n; 986]), frame(OWN, OTHER, &[n; 986]));
        driver.xmit(&sent, Cut::default()).expect("room");
        assert_eq!(lan.neighbour.take(), Some(sent));
        assert!(driver.reach.reach.interrupts() > 0);
        assert_eq!(driver.interrupt(), Ok(Some(4)));
        driver.reclaim().expect("works");
        lan.neighbour.send(&came);
        assert!(driver.reach.reach.interrupts() > 0);
        assert_eq!(driver.interrupt(), Ok(Some(1)));
        assert_eq!(driver.poll().expect("works")[0].bytes, came);
        driver.reach.reach.interrupts();
    }
    // One doorbell, two acknowledgements, the mask off and on, and the acknowledgement of the poll.
    assert!(driver.reach.exits <= 6 * 100, "{} exits for 100 frames each way", driver.reach.exits);
}

/// What a guest's handler reads first, on the thread that interrupts it.
#[derive(Debug)]
struct Handler {
    page: Window,
    stale: std::sync::atomic::AtomicU64,
    calls: std::sync::atomic::AtomicU64,
}

impl Interrupt for Handler {
    fn signal(&self) {
        use std::sync::atomic::Ordering;
        self.calls.fetch_add(1, Ordering::Relaxed);
        if self.page.load_u16(0x3e) & self.page.load_u16(0x3c) == 0 {
            self.stale.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn no_stale_status_can_be_read_after_an_interrupt() {
    use std::sync::atomic::Ordering;
    let (mut watched, map, mut lan) = rtl8139(Policies::default());
    let page = page(&mut watched);
    let handler = Arc::new(Handler { page: page.clone(), stale: 0.into(), calls: 0.into() });
    let call: Arc<dyn Interrupt> = handler.clone();
    watched.with(|monitor| monitor.wire(Irq::Intx, 0, Wire::Call(Some(call)))).expect("a NIC has INTA#");
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    for n in 0..100u8 {
        driver.xmit(&frame(OTHER, OWN, &[n; 100]), Cut::default()).expect("room");
        driver.reach.interrupts();
        assert_eq!(u32::from(page.load_u16(0x3e)), driver.interrupt().expect("works").expect("ours"));
        assert_eq!(page.load_u16(0x3e), 0, "acknowledged, in the page too");
        lan.neighbour.send(&frame(OWN, OTHER, &[n; 100]));
        driver.reach.interrupts();
        driver.interrupt().expect("works");
        driver.poll().expect("works");
        driver.reclaim().expect("works");
        // Every register that can be read without an effect reads the same both ways.
        for offset in (0..0x100).step_by(4).filter(|offset| !(0x48..0x4c).contains(offset)) {
            let trapped = driver.get(offset, 4).expect("answers");
            assert_eq!(page.load_u32(offset as usize), trapped, "register {offset:#x} after {n} frames");
        }
    }
    assert!(handler.calls.load(Ordering::Relaxed) >= 200);
    assert_eq!(handler.stale.load(Ordering::Relaxed), 0, "the page said so before the interrupt did");
}

/// The end of a reset, the timer, a status that the guest has masked: whoever reads nothing but the page sees them too.
#[test]
fn hole_13_what_changes_without_an_interrupt_changes_in_the_page() {
    let (mut watched, map, mut lan) = rtl8139(Policies::default());
    let page = page(&mut watched);
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.interrupts();
    driver.put(0x3c, 2, 0).expect("works");
    driver.reach.turn();
    let before = driver.reach.line.count();
    // From here on the guest does nothing, and nothing interrupts.
    let seen = |what: &str, driver: &mut Cp<Watched<_>>, is: &dyn Fn(&Window) -> bool| {
        let deadline = soon();
        while !is(&page) {
            assert!(std::time::Instant::now() < deadline, "{what}");
            driver.reach.turn();
        }
    };
    let frame = frame(OWN, OTHER, &[1; 100]);
    assert_eq!(page.load_u16(0x3e), 0);
    lan.neighbour.send(&frame);
    seen("a status that is masked", &mut driver, &|page| page.load_u16(0x3e) & 1 != 0);
    let timer = page.load_u32(0x48);
    seen("the timer", &mut driver, &|page| page.load_u32(0x48) != timer);
    driver.reach.bench.trouble(Trouble::Deaf);
    driver.put(0x37, 1, 0x10).expect("works");
    assert_eq!(page.load_u8(0x37) & 0x10, 0x10, "it resets itself");
    driver.reach.bench.trouble(Trouble::None);
    seen("the end of a reset", &mut driver, &|page| page.load_u8(0x37) & 0x10 == 0);
    assert_eq!(driver.reach.line.count(), before, "nobody was interrupted");
}

/// The register file as a library in the VMM's process has it, which found it by the page that the VMM maps.
fn register_file<F: Function>(watched: &mut Watched<F>) -> (Window, Window) {
    let file = watched.with(|monitor| {
        let bar = monitor.bars().bar(1).expect("memory registers").clone();
        let marker = bar.pages().iter().find(|pages| pages.touch == Touch::Mapped).expect("a marker").clone();
        marker.file.try_clone().expect("a descriptor")
    });
    let mapping = Arc::new(Mapping::of_file(file, 0, BYTES).expect("maps"));
    let window = |at: u64| Window::of_mapping(&mapping, at as usize, 4096).expect("a page");
    (window(REGISTERS_AT), window(CONTROL_AT))
}

#[test]
fn a_register_file_shows_what_reads_would_while_it_is_wanted() {
    use std::sync::atomic::Ordering;
    let (mut watched, map, mut lan) = rtl8139(Policies::default());
    let (page, control) = register_file(&mut watched);
    let handler = Arc::new(Handler { page: page.clone(), stale: 0.into(), calls: 0.into() });
    let call: Arc<dyn Interrupt> = handler.clone();
    watched.with(|monitor| monitor.wire(Irq::Intx, 0, Wire::Call(Some(call)))).expect("a NIC has INTA#");
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    assert_eq!(page.load_u32(0), 0, "nobody has asked");
    control.put_u64(WANTED, 5);
    driver.reach.interrupts();
    assert_eq!(control.load_u64(GRANTED), 0, "the guest has not come");
    driver.get(0x3e, 2).expect("answers");
    assert_eq!(control.load_u64(GRANTED), 5);
    let shows = |driver: &mut Cp<Watched<_>>, what: &str| {
        for offset in (0..0x100).step_by(4).filter(|offset| !(0x48..0x4c).contains(offset)) {
            let trapped = driver.get(offset, 4).expect("answers");
            assert_eq!(page.load_u32(offset as usize), trapped, "register {offset:#x} {what}");
        }
    };
    shows(&mut driver, "when it was granted");
    // What came before was not shown to anybody.
    handler.stale.store(0, Ordering::Relaxed);
    for n in 0..50u8 {
        driver.xmit(&frame(OTHER, OWN, &[n; 100]), Cut::default()).expect("room");
        driver.reach.interrupts();
        assert_eq!(u32::from(page.load_u16(0x3e)), driver.interrupt().expect("works").expect("ours"));
        assert_eq!(page.load_u16(0x3e), 0, "acknowledged");
        lan.neighbour.send(&frame(OWN, OTHER, &[n; 100]));
        driver.reach.interrupts();
        driver.interrupt().expect("works");
        driver.poll().expect("works");
        driver.reclaim().expect("works");
    }
    shows(&mut driver, "under traffic");
    assert!(handler.calls.load(Ordering::Relaxed) >= 100);
    assert_eq!(handler.stale.load(Ordering::Relaxed), 0, "the page said so before the interrupt did");
    // Taken away: it is not looked after any more, until it is wanted again.
    control.put_u64(WANTED, 0);
    driver.get(0x3e, 2).expect("answers");
    assert_eq!(control.load_u64(GRANTED), 0);
    let before = page.load_u32(8);
    driver.put(8, 4, !before).expect("works");
    assert_eq!(page.load_u32(8), before);
    control.put_u64(WANTED, 6);
    driver.get(0x3e, 2).expect("answers");
    assert_eq!((control.load_u64(GRANTED), page.load_u32(8)), (6, !before));
    // Taken away from a guest that makes no access: the clock notices.
    control.put_u64(WANTED, 0);
    let deadline = soon();
    while control.load_u64(GRANTED) != 0 {
        assert!(std::time::Instant::now() < deadline, "nobody has noticed");
        driver.reach.turn();
    }
    // Only an access shows that the VMM sends reads here.
    control.put_u64(WANTED, 7);
    driver.reach.interrupts();
    assert_eq!(control.load_u64(GRANTED), 0);
    driver.get(0x3e, 2).expect("answers");
    assert_eq!(control.load_u64(GRANTED), 7);
    // The client leaves. If it still runs, its device is gone.
    driver.reach.with(Function::dismiss);
    assert_eq!((page.load_u32(0x3c), page.load_u32(0x80)), (u32::MAX, u32::MAX));
}

#[test]
fn cards_whose_reads_have_effects_offer_no_page() {
    let (mut watched, _lan) = ne2000(Policies::default());
    watched.with(|monitor| assert!(monitor.bars().iter().all(|(_, bar)| bar.pages().is_empty())));
}
