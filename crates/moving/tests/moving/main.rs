//! A virtual function moves to another one while a driver works: before each of its accesses, in whatever it does.

mod ahead;
mod card;
mod driver;
mod hardware;
mod hostile;
mod once;
mod own;
mod rules;
mod table;
mod world;

use card::{Card, Ixgbevf, for_each_card};
use driver::Driver;
use ioplane_moving::Unsent;
use ioplane_nic::vf82599::spec::API_1_5;
use world::{Plan, World};

/// One run of all that the driver does.
pub fn run<C: Card>(plan: Plan) -> World<C> {
    let mut driver = Driver::new(World::new(plan));
    driver.work();
    driver.finish()
}

/// How many points a run has to which nothing happens.
pub fn points<C: Card>() -> u64 {
    let world = run::<C>(Plan::at([]));
    assert!(world.points > 500 && world.accepted.len() > 30 && world.sent.len() > 30, "it does something");
    world.points
}

for_each_card!(
    moved_before_each_step_of_its_work_nothing_is_lost_and_no_rule_is_broken,
    moved_again_and_again_nothing_is_lost,
    frames_that_were_not_sent_are_sent_by_the_other_function,
    without_marking_pages_are_missed,
    the_copy_may_be_long_or_none,
);

fn moved_before_each_step_of_its_work_nothing_is_lost_and_no_rule_is_broken<C: Card>() {
    let (mut moves, mut largest, mut accesses) = (0, 0, (0, 0));
    for point in 1..=points::<C>() {
        let world = run::<C>(Plan::at([point]));
        assert_eq!(world.missed, 0, "pages that were missed, moved before point {point}");
        assert_eq!(world.moves, 1, "moved before point {point}");
        moves += world.moves;
        largest = largest.max(world.largest_state);
        accesses = (accesses.0.max(world.accesses.0), accesses.1.max(world.accesses.1));
    }
    let (stop, replay) = accesses;
    let name = C::DIRECT.model.name;
    println!(
        "{name}: {moves} moves, the largest state {largest} bytes, at most {stop} accesses to stop and {replay} to replay"
    );
}

fn moved_again_and_again_nothing_is_lost<C: Card>() {
    let last = points::<C>();
    for every in [1, 2, 3, 7, 31] {
        let world = run::<C>(Plan::at((1..last).filter(|point| point.is_multiple_of(every))));
        assert_eq!(world.missed, 0, "moved before every {every}th point");
        // A run with moves has fewer points: what waits for the device is done while it comes to rest.
        assert!(world.moves >= world.points.min(last) / every - 1, "{} moves", world.moves);
    }
}

fn frames_that_were_not_sent_are_sent_by_the_other_function<C: Card>() {
    for point in (1..=points::<C>()).step_by(3) {
        let world = run::<C>(Plan { unsent: Unsent::Leave, ..Plan::at([point]) });
        assert_eq!((world.missed, world.moves), (0, 1), "moved before point {point}");
    }
}

/// The comparison of memories can fail.
fn without_marking_pages_are_missed<C: Card>() {
    let mut missed = 0;
    for point in (1..=points::<C>()).step_by(5) {
        missed += run::<C>(Plan { marking: false, ..Plan::at([point]) }).missed;
    }
    assert!(missed > 100, "{missed} pages");
}

fn the_copy_may_be_long_or_none<C: Card>() {
    let last = points::<C>();
    for copied_before in [0, 1, 5, 400] {
        for point in (1..=last).step_by(17) {
            let world = run::<C>(Plan { copied_before, ..Plan::at([point]) });
            assert_eq!(
                (world.missed, world.moves),
                (0, 1),
                "{copied_before} points of copying before {point}"
            );
        }
    }
}

/// In version 1.5 ixgbevf holds its mailbox until the message was taken.
#[test]
fn a_driver_that_holds_its_mailbox_while_it_asks_is_moved_as_well() {
    let newest = |at: Vec<u64>| Plan { newest_api: Some(API_1_5), ..Plan::at(at) };
    let last = run::<Ixgbevf>(newest(Vec::new())).points;
    for point in (1..=last).step_by(2) {
        let world = run::<Ixgbevf>(newest(vec![point]));
        assert_eq!((world.missed, world.moves), (0, 1), "moved before point {point}");
    }
    let world = run::<Ixgbevf>(newest((1..last).collect()));
    assert_eq!(world.missed, 0);
}
