//! What is entered of queues that go over between armed and polled, looked at once a second.

use ioplane_scheduler::{
    ArmReason, ChoiceMeter, ChoiceWatch, CoreLook, Decision, LimitUnit, ObjectiveReport, QueueKey, QueueLook,
    QueueMode,
};

const SECOND: u64 = 1_000_000_000;
const GAPS: QueueMode = QueueMode::Armed(ArmReason::LongGaps);
const SPUN: QueueMode = QueueMode::Armed(ArmReason::SpunInVain);
const CEILING: QueueMode = QueueMode::Armed(ArmReason::Ceiling);
const HELD: QueueMode = QueueMode::Held(LimitUnit::Bytes);

/// One queue, a core, and whoever watches them.
#[derive(Default)]
struct Scene {
    meter: ChoiceMeter,
    watch: ChoiceWatch,
    now_ns: u64,
    poller: u64,
    objective: ObjectiveReport,
}

impl Scene {
    fn look(&mut self) -> Vec<Decision> {
        let queue = QueueKey { device: 0, queue: 0 };
        let (choices, now_ns) = (self.meter.read().unwrap(), self.now_ns);
        let look = QueueLook { queue, poller: self.poller, core: 2, now_ns, choices };
        self.watch.look(&[look], &[CoreLook { core: 2, objective: self.objective }])
    }

    /// So many seconds, in each of which it is `part` percent of each ms in `mode` and in `other` for the rest; what is entered.
    fn seconds(&mut self, seconds: u64, part: u64, mode: QueueMode, other: QueueMode) -> Vec<Decision> {
        let mut said = Vec::new();
        for _ in 0..seconds {
            for ms in 0..1000 {
                let at = self.now_ns + ms * 1_000_000;
                self.meter.enter(mode, at);
                self.meter.enter(other, at + part * 10_000);
            }
            self.now_ns += SECOND;
            said.extend(self.look());
        }
        said
    }
}

fn modes(said: &[Decision]) -> Vec<(QueueMode, u32)> {
    let of = |one: &Decision| match *one {
        Decision::Mode { mode, permille, .. } => Some((mode, permille)),
        _ => None,
    };
    said.iter().filter_map(of).collect()
}

#[test]
fn a_thousand_changes_a_second_are_one_entry() {
    let mut scene = Scene::default();
    assert_eq!(modes(&scene.seconds(2, 90, GAPS, QueueMode::Polled)), [], "it has not lasted");
    assert_eq!(modes(&scene.seconds(60, 90, GAPS, QueueMode::Polled)), [(GAPS, 900)]);
    assert_eq!(modes(&scene.seconds(60, 10, GAPS, QueueMode::Polled)), [(QueueMode::Polled, 900)]);
    // Half and half is neither.
    assert_eq!(modes(&scene.seconds(60, 50, GAPS, QueueMode::Polled)), []);
    let text = Scene::default().seconds(3, 90, GAPS, QueueMode::Polled)[0].to_string();
    let said = "queue 0 of device 0: armed 90 % of the time, since its requests come further apart than polling on is worth";
    assert_eq!(text, said);
}

#[test]
fn the_reason_is_that_of_most_of_the_time() {
    let mut scene = Scene::default();
    assert_eq!(modes(&scene.seconds(5, 20, GAPS, SPUN)), [(SPUN, 1000)]);
    // What stays as it is has no changes to be seen by.
    scene.now_ns += 100 * SECOND;
    assert_eq!(scene.look(), []);
}

#[test]
fn what_never_settles_is_entered_ever_more_rarely() {
    let mut scene = Scene::default();
    let mut said = Vec::new();
    for _ in 0..200 {
        said.extend(scene.seconds(4, 90, GAPS, QueueMode::Polled));
        said.extend(scene.seconds(4, 10, GAPS, QueueMode::Polled));
    }
    assert!(modes(&said).len() <= 2, "{} entries in 1,600 s", said.len());
    // It settles, and its next change is entered as soon as the first.
    scene.seconds(200, 90, GAPS, QueueMode::Polled);
    assert_eq!(modes(&scene.seconds(3, 10, GAPS, QueueMode::Polled)), [(QueueMode::Polled, 900)]);
}

#[test]
fn a_limit_begins_to_bite_and_ends() {
    let mut scene = Scene::default();
    scene.seconds(10, 10, GAPS, QueueMode::Polled);
    let throttled = |said: Vec<Decision>| {
        let of = |one| match one {
            Decision::Throttled { unit, permille, .. } => Some((unit, permille)),
            _ => None,
        };
        said.into_iter().filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!(throttled(scene.seconds(10, 2, HELD, QueueMode::Polled)), [], "hardly ever");
    assert_eq!(throttled(scene.seconds(10, 30, HELD, QueueMode::Polled)), [(Some(LimitUnit::Bytes), 300)]);
    assert_eq!(throttled(scene.seconds(10, 10, GAPS, QueueMode::Polled)), [(None, 0)]);
}

#[test]
fn a_ceiling_and_an_objective_are_the_cores() {
    let mut scene = Scene::default();
    let said = scene.seconds(5, 60, CEILING, QueueMode::Polled);
    assert!(said.contains(&Decision::Ceiling { core: 2, may_poll: false }), "{said:?}");
    let said = scene.seconds(10, 10, SPUN, QueueMode::Polled);
    assert!(said.contains(&Decision::Ceiling { core: 2, may_poll: true }), "{said:?}");
    let mut outcomes = Vec::new();
    for permille in 20..40 {
        scene.objective = ObjectiveReport::LateByCeiling(permille);
        outcomes.extend(scene.seconds(1, 10, SPUN, QueueMode::Polled));
    }
    let late = ObjectiveReport::LateByCeiling(22);
    assert_eq!(outcomes, [Decision::Objective { core: 2, outcome: late }], "said once, whatever the numbers");
    // A core with too few requests to say has not got better.
    scene.objective = ObjectiveReport::Unknown;
    assert_eq!(scene.seconds(10, 10, SPUN, QueueMode::Polled), []);
    scene.objective = ObjectiveReport::Kept;
    let kept = Decision::Objective { core: 2, outcome: ObjectiveReport::Kept };
    assert_eq!(scene.seconds(10, 10, SPUN, QueueMode::Polled), [kept]);
}

#[test]
fn a_queue_that_moves_is_not_entered_again() {
    let mut scene = Scene::default();
    assert_eq!(modes(&scene.seconds(5, 90, GAPS, QueueMode::Polled)).len(), 1);
    (scene.poller, scene.meter, scene.now_ns) = (1, ChoiceMeter::default(), 0);
    assert_eq!(scene.seconds(30, 90, GAPS, QueueMode::Polled), []);
}

#[test]
fn a_core_that_is_not_adaptive_decides_nothing() {
    let mut scene = Scene::default();
    scene.now_ns += 10 * SECOND;
    assert_eq!((0..10).flat_map(|_| scene.look()).collect::<Vec<_>>(), []);
}
