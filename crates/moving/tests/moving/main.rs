//! A virtual function of an 82576 moves to another one while a driver works: before each of its accesses, in whatever it does.

mod driver;
mod hardware;
mod hostile;
mod once;
mod table;
mod world;

use driver::Driver;
use ioplane_moving::Unsent;
use world::{Plan, World};

/// One run of all that the driver does.
fn run(plan: Plan) -> World {
    let mut driver = Driver::new(World::new(plan));
    driver.work();
    driver.finish()
}

/// How many points a run has to which nothing happens.
fn points() -> u64 {
    let world = run(Plan::at([]));
    assert!(world.points > 500 && world.accepted.len() > 30 && world.sent.len() > 30, "it does something");
    world.points
}

#[test]
fn moved_before_each_step_of_its_work_nothing_is_lost_and_no_rule_is_broken() {
    let (mut moves, mut largest, mut accesses) = (0, 0, (0, 0));
    for point in 1..=points() {
        let world = run(Plan::at([point]));
        assert_eq!(world.missed, 0, "pages that were missed, moved before point {point}");
        assert_eq!(world.moves, 1, "moved before point {point}");
        moves += world.moves;
        largest = largest.max(world.largest_state);
        accesses = (accesses.0.max(world.accesses.0), accesses.1.max(world.accesses.1));
    }
    let (stop, replay) = accesses;
    println!(
        "{moves} moves, the largest state {largest} bytes, at most {stop} accesses to stop and {replay} to replay"
    );
}

#[test]
fn moved_again_and_again_nothing_is_lost() {
    let last = points();
    for every in [1, 2, 3, 7, 31] {
        let world = run(Plan::at((1..last).filter(|point| point.is_multiple_of(every))));
        assert_eq!(world.missed, 0, "moved before every {every}th point");
        // A run with moves has fewer points: what waits for the device is done while it comes to rest.
        assert!(world.moves >= world.points.min(last) / every - 1, "{} moves", world.moves);
    }
}

#[test]
fn frames_that_were_not_sent_are_sent_by_the_other_function() {
    for point in (1..=points()).step_by(3) {
        let world = run(Plan { unsent: Unsent::Leave, ..Plan::at([point]) });
        assert_eq!((world.missed, world.moves), (0, 1), "moved before point {point}");
    }
}

/// The comparison of memories can fail.
#[test]
fn without_marking_pages_are_missed() {
    let mut missed = 0;
    for point in (1..=points()).step_by(5) {
        missed += run(Plan { marking: false, ..Plan::at([point]) }).missed;
    }
    assert!(missed > 100, "{missed} pages");
}

#[test]
fn the_copy_may_be_long_or_none() {
    let last = points();
    for copied_before in [0, 1, 5, 400] {
        for point in (1..=last).step_by(17) {
            let world = run(Plan { copied_before, ..Plan::at([point]) });
            assert_eq!(
                (world.missed, world.moves),
                (0, 1),
                "{copied_before} points of copying before {point}"
            );
        }
    }
}
