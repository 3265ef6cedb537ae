//! A function whose driver cooperates goes to another one: a model of that driver, between models of the silicon, which record whoever
//! breaks its rules. Nothing on our side knows what the function is.

mod driver;
#[allow(unused_imports, unused_macros, dead_code)]
#[path = "../exchange/silicon.rs"]
mod silicon;
mod world;

use ioplane_nic::vf82576::spec::*;
use ioplane_passthrough::cooperating::page::{self, PageFlaw, SharedEntry, WRITER};
use ioplane_passthrough::{Carry, CarryError, Cooperating, ExchangeError, Motion, Passthrough};
use ioplane_pci::Function;

use driver::Driver;
use silicon::{Around, vf};
use world::{Plan, Silicon, World};

/// Where the driver has its page.
const PAGE: u64 = 0x4000;

fn run(plan: Plan) -> World {
    let mut driver = Driver::new(World::new(plan));
    driver.work();
    driver.finish()
}

/// Before every access and every tick of a driver that does all that it can do.
fn moved_at_every_point(plan: Plan) {
    let (elsewhere, stands) = (plan.elsewhere, plan.stands);
    let still = run(Plan { posts: plan.posts, ..Plan::default() });
    let (mut moves, mut waited, mut missed, mut state) = (0, 0, 0, 0);
    let mut accesses = 0;
    for at in 1..=still.points {
        let world = run(Plan { at: [at].into(), ..plan.clone() });
        moves += world.moves;
        waited += u64::from(world.waited > 0);
        missed += world.missed.len();
        state = state.max(world.largest_state);
        accesses = accesses.max(world.accesses.get("replay").copied().unwrap_or(0));
    }
    eprintln!(
        "{moves} moves at {} points, {waited} while the driver had the lock; {missed} frames missed; states of {state} bytes, {accesses} \
         register accesses to bring one back",
        still.points
    );
    // All but those before the driver had announced its page.
    assert!(moves > still.points * 3 / 4 && waited > 0, "{moves} {waited}");
    assert!(state <= 64, "{state}");
    // What came a moment before and the driver had not seen is lost where memory was copied while no processor ran, and nowhere else.
    assert!(
        if elsewhere && stands { missed > 0 && missed as u64 <= 4 * moves } else { missed == 0 },
        "{missed}"
    );
}

#[test]
fn a_driver_goes_on_with_another_function_wherever_it_was() {
    moved_at_every_point(Plan::default());
}

#[test]
fn a_driver_goes_on_with_a_function_of_another_host_wherever_it_was() {
    moved_at_every_point(Plan { elsewhere: true, ..Plan::default() });
}

#[test]
fn a_driver_whose_registers_are_mapped_goes_on_with_a_function_of_another_host_wherever_it_was() {
    moved_at_every_point(Plan { elsewhere: true, mapped: true, ..Plan::default() });
}

/// What was posted before the lock was given back arrives when the function is another one.
#[test]
fn what_a_vmm_has_posted_reaches_no_other_function() {
    moved_at_every_point(Plan { posts: true, ..Plan::default() });
    moved_at_every_point(Plan { posts: true, elsewhere: true, ..Plan::default() });
}

/// Whoever keeps the hardware's descriptor keeps the next client out.
#[test]
fn the_first_page_is_trapped_and_nothing_is_kept_of_the_others() {
    let file =
        std::sync::Arc::new(std::os::fd::OwnedFd::from(std::fs::File::open("/dev/zero").expect("a file")));
    for (mapped, pages) in [(true, Some((0x1000, BAR_SIZE - 0x1000))), (false, None)] {
        let hardware = other().mapped_from(file.clone());
        let device = Cooperating::new(hardware, mapped).expect("room for the capability");
        let mut device = Passthrough::new("nic0", device, None).expect("hardware that works");
        let offered = device.bars().bar(0).and_then(|bar| bar.pages().first().map(|p| (p.offset, p.len)));
        assert_eq!(offered, pages);
        device.dismiss();
        assert_eq!(std::sync::Arc::strong_count(&file), 1);
    }
}

#[test]
fn a_function_whose_registers_are_mapped_stays_under_its_vmm() {
    let mut driver = Driver::new(World::new(Plan { mapped: true, ..Plan::default() }));
    let refused = driver.world.device.prepare(other()).map(drop).expect_err("its VMM drives it");
    assert!(matches!(refused, ExchangeError::Unready(CarryError::Mapped)), "{refused}");
    assert_eq!(driver.world.device.motion(), Motion::Runs);
}

#[test]
fn what_its_driver_has_not_seen_is_lost_if_the_guest_stands_still() {
    moved_at_every_point(Plan { elsewhere: true, stands: true, ..Plan::default() });
}

#[test]
fn a_driver_is_moved_often() {
    for seed in 0..40 {
        let at = (0..200).map(|turn| seed + turn * (23 + seed)).collect();
        let plan =
            Plan { at, elsewhere: seed % 3 == 0, stands: seed % 2 == 0, mapped: false, posts: seed % 5 == 0 };
        let world = run(plan);
        assert!(world.moves >= 10, "{} moves", world.moves);
    }
}

fn other() -> Silicon {
    Silicon::new([2, 0, 0, 0, 0, 9], 77, BAR_SIZE).1
}

#[test]
fn a_driver_that_announces_nothing_is_not_moved() {
    let mut world = World::new(Plan::default());
    let refused = world.device.prepare(other()).map(drop).expect_err("nobody cooperates");
    assert!(matches!(refused, ExchangeError::Unready(CarryError::NoDriver)), "{refused}");
    assert!(matches!(world.device.begin_log(), Err(CarryError::NoDriver)));
    assert!(matches!(world.device.rest(), Err(CarryError::NoDriver)));
    assert_eq!(world.device.motion(), Motion::Runs);
    // Nothing has happened to it.
    world.write(CTRL, CTRL_RST);
    assert_ne!(world.read(STATUS) & STATUS_LU, 0);
    let mut driver = Driver::new(world);
    assert!(driver.world.device.prepare(other()).is_ok());
    // It withdraws its page, as when the module is unloaded.
    let at = driver.world.device.hardware().cooperation().map(|known| known.entries);
    assert!(at.is_some_and(|entries| entries > 20), "{at:?}");
    withdraw(&mut driver.world);
    assert!(driver.world.device.hardware().cooperation().is_none());
    assert!(matches!(driver.world.device.rest(), Err(CarryError::NoDriver)));
}

#[test]
fn a_reset_withdraws_the_page_and_gives_its_lock_back() {
    let mut driver = Driver::new(World::new(Plan::default()));
    driver.traffic(3);
    let world = &mut driver.world;
    while !world.device.rest().expect("a page") {
        vf(&world.vf).step();
    }
    assert_eq!(u32::from_le_bytes(world.load(PAGE + 8)), WRITER);
    world.reset();
    assert_eq!(u32::from_le_bytes(world.load(PAGE + 8)), 0);
    assert!(world.device.hardware().cooperation().is_none());
    assert_eq!(world.device.motion(), Motion::Runs);
    assert_ne!(world.read(STATUS) & STATUS_LU, 0, "it answers");
    assert!(matches!(world.device.rest(), Err(CarryError::NoDriver)));
}

/// Where the control word of the capability is.
fn control(world: &mut World) -> usize {
    (0x40..0x100)
        .step_by(4)
        .find(|at| world.read_config(at + 4) == page::MAGIC)
        .map(|at| at + 16)
        .expect("the capability")
}

fn withdraw(world: &mut World) {
    let at = control(world);
    world.config(at, &[0; 4]);
    assert_eq!(world.read_config(at), 0);
}

fn announce(world: &mut World, gpa: u64, bytes: &[u8]) -> u32 {
    if gpa < world::MEMORY {
        world.store(gpa, bytes);
    }
    let at = control(world);
    world.config(at - 8, &gpa.to_le_bytes()[..4]);
    world.config(at - 4, &gpa.to_le_bytes()[4..]);
    world.config(at, &1_u32.to_le_bytes());
    world.read_config(at)
}

#[test]
fn hostile_pages_harm_nobody_else() {
    let mut world = World::new(Plan::default());
    let good =
        page::written(&[SharedEntry::Keep { offset: RX + BAL }, SharedEntry::Counter { offset: VFGPRC }]);
    for gpa in [0x4008, world::MEMORY, u64::MAX - 4095] {
        assert_eq!(announce(&mut world, gpa, &good), 2, "{gpa:#x}");
        assert!(matches!(world.device.hardware().flaw(), Some(PageFlaw::Memory(_))));
        assert!(matches!(world.device.rest(), Err(CarryError::Page(PageFlaw::Memory(_)))));
    }
    let mut other_format = good.clone();
    other_format[4] = 9;
    assert_eq!(announce(&mut world, PAGE, &other_format), 2);
    assert_eq!(announce(&mut world, PAGE, &good), 1);
    // A lock that is never released: it is asked for, and given up.
    for readers in [1, WRITER - 1, u32::MAX] {
        world.store(PAGE + 8, &readers.to_le_bytes());
        for _ in 0..5 {
            assert!(!world.device.rest().expect("a page"), "{readers:#x}");
        }
        assert_eq!(world.device.motion(), Motion::Runs);
        world.device.give_up();
        let lock = u32::from_le_bytes(world.load(PAGE + 8));
        assert_eq!(lock, readers & !WRITER, "only the writer's bit is taken back");
        assert_ne!(world.read(STATUS) & STATUS_LU, 0, "its function goes on");
    }
    world.store(PAGE + 8, &[0; 4]);
    // The list is not what it was when it was announced: what was read then counts.
    world.store(PAGE + 0x18, &u32::MAX.to_le_bytes());
    world.store(PAGE + 0x44, &u32::MAX.to_le_bytes());
    while !world.device.rest().expect("a page") {
        vf(&world.vf).step();
    }
    // At rest a guest that does not wait is denied, and cannot give its function memory back. What it writes may have been posted before.
    assert_eq!(world.read(STATUS), !0);
    world.write(TX + TAIL, 3);
    assert_eq!(world.device.faults().accesses, 1);
    assert_eq!(vf(&world.vf).violations(), []);
    world.config(ioplane_pci::spec::COMMAND, &6_u16.to_le_bytes());
    // The page is taken away: the guest has no function to go on with, until it resets it.
    world.store(PAGE, &[0; 4]);
    assert!(matches!(world.device.carried(), Err(CarryError::Page(PageFlaw::NotAPage))));
    let prepared = world.device.prepare(other()).map(drop);
    assert!(matches!(prepared, Err(ExchangeError::Unready(CarryError::Still))));
}

#[test]
fn a_state_is_a_strangers() {
    let mut driver = Driver::new(World::new(Plan::default()));
    driver.traffic(3);
    let world = &mut driver.world;
    while !world.device.rest().expect("a page") {
        vf(&world.vf).step();
    }
    let carried = world.device.carried().expect("it stands still");
    let take = |lock: u32, change: &dyn Fn(&mut Vec<u8>)| {
        let mut there = World::new(Plan::default());
        let mut memory = world.bytes(0, world::MEMORY as usize);
        memory[PAGE as usize + 8..PAGE as usize + 12].copy_from_slice(&lock.to_le_bytes());
        there.store(0, &memory);
        let mut carried = carried.clone();
        change(&mut carried.state);
        there.device.load_carried(&carried)
    };
    take(WRITER, &|_| {}).expect("as it was");
    assert!(matches!(take(0, &|_| {}), Err(CarryError::Page(PageFlaw::Unlocked))));
    assert!(matches!(take(WRITER + 1, &|_| {}), Err(CarryError::Page(PageFlaw::Unlocked))));
    for at in 0..carried.state.len() {
        let other = take(WRITER, &|state| state[at] ^= 0x40);
        assert!(matches!(other, Err(CarryError::Failed(_))), "{at}");
        assert!(take(WRITER, &|state| state.truncate(at)).is_err(), "{at}");
    }
    let elsewhere = ioplane_moving::seal(&[b"\x0bcooperating", &[0xff_u8, 0x7f][..]].concat());
    assert!(matches!(take(WRITER, &|state| *state = elsewhere.clone()), Err(CarryError::Page(_))));
    let model = ioplane_moving::seal(b"\x0aintel82576\x00");
    assert!(matches!(take(WRITER, &|state| *state = model.clone()), Err(CarryError::Failed(_))));
    // Called off: the driver goes on with the function that it has.
    let mut around = Around { vf: driver.world.vf.clone(), left_one: None, sends: false, left: 100 };
    driver.world.device.replay(&mut around).expect("it goes on");
    driver.world.moves += 1;
    driver.work();
    driver.finish();
}

#[test]
fn a_function_that_does_not_take_its_place_leaves_the_guest_the_first() {
    let mut driver = Driver::new(World::new(Plan::default()));
    driver.traffic(3);
    let (_, wrong) = Silicon::new([2, 0, 0, 0, 0, 9], 77, 2 * BAR_SIZE);
    let refused = driver.world.device.prepare(wrong).map(drop).expect_err("another BAR");
    assert!(matches!(refused, ExchangeError::OtherKind { why: "its BARs", .. }), "{refused}");
    let prepared = driver.world.device.prepare(other()).expect("the same kind");
    let refused = driver.world.device.exchange_at_rest(prepared).map(drop).expect_err("it runs");
    assert!(matches!(refused, ExchangeError::Unready(CarryError::Runs)), "{refused}");
    driver.work();
    driver.finish();
}

#[test]
fn a_driver_on_a_function_without_the_capability_works_as_the_original() {
    // The same driver, which finds nothing to announce.
    let mut world = World::new(Plan::default());
    let at = control(&mut world);
    assert!(at >= 0x50);
    let mut driver = Driver::without(world);
    driver.work();
    driver.finish();
}
