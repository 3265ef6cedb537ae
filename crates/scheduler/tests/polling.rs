//! One queue on one core, simulated: polled, notified and adaptive side by side.
//!
//! The driver has one request under way at a time, or requests come at random times; a request takes the core `SERVICE`. An armed queue costs the
//! driver a kick, the request a wake-up, and the core the system calls of both.

mod sim;

use ioplane_scheduler::{
    CoreObjective, CpuCeiling, IdleChoice, ObjectiveMeter, ObjectiveReport, PollTrials, PollingCosts,
    QueuePolling,
};
use sim::{Rng, quantile};

/// Time of the core per request.
const SERVICE: u64 = 700;
/// Time of the driver between a completion and its next request.
const THINK: u64 = 800;
/// Time of a look that finds a request.
const LOOK: u64 = 60;
/// How often a core that polls in vain looks at the clock.
const CLOCK: u64 = 500;

/// Time that a driver takes to wake.
const END_WAKE: u64 = 16_000;

const SECOND: u64 = 1_000_000_000;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Polled,
    Notified,
    Adaptive(CoreObjective),
}

const ADAPTIVE: Mode = Mode::Adaptive(CoreObjective { p99_ns: None, cpu_permille: None });

/// When requests come.
enum Load {
    /// The driver is at work for half of each period, from its begin on.
    Square { period: u64 },
    /// The driver is at work all the time, but for a silence of random length, `mean` on average, after one in `every` requests on average.
    Holes { every: u64, mean: u64, rng: Rng },
    /// At random times, so far apart on average, whatever becomes of those before.
    Random { mean: u64, rng: Rng },
}

impl Load {
    fn random(mean: u64) -> Self {
        Load::Random { mean, rng: Rng::new(mean) }
    }

    /// When the next request comes, after one that came at `came` and was completed at `done`.
    fn next(&mut self, came: u64, done: u64) -> u64 {
        match self {
            Load::Square { period } => {
                let next = done + THINK;
                if next % *period < *period / 2 { next } else { (next / *period + 1) * *period }
            }
            Load::Holes { every, mean, rng } => {
                let hole = rng.next() % *every == 0;
                done + THINK + if hole { rng.exponential(*mean as f64) } else { 0 }
            }
            Load::Random { mean, rng } => came + rng.exponential(*mean as f64).max(1),
        }
    }
}

#[derive(Debug, Default)]
struct Outcome {
    requests: u64,
    kicks: u64,
    /// Of the core, all together, and of the second that took most.
    cpu_ns: u64,
    worst_second_ns: u64,
    took_ns: Vec<u64>,
    reports: Vec<ObjectiveReport>,
}

impl Outcome {
    fn p99(&mut self) -> u64 {
        quantile(&mut self.took_ns, 0.99)
    }
}

/// The core's time, second by second.
#[derive(Default)]
struct Meter {
    seconds: Vec<u64>,
    all: u64,
}

impl Meter {
    fn total(&self) -> u64 {
        self.all
    }

    fn awake(&mut self, from: u64, until: u64) {
        self.all += until - from.min(until);
        let mut from = from;
        while from < until {
            let second = (from / SECOND) as usize;
            let end = until.min((second as u64 + 1) * SECOND);
            self.seconds.resize(self.seconds.len().max(second + 1), 0);
            self.seconds[second] += end - from;
            from = end;
        }
    }
}

fn run(mode: Mode, mut load: Load, until: u64) -> Outcome {
    let costs = PollingCosts::default();
    let objective = if let Mode::Adaptive(objective) = mode { objective } else { CoreObjective::default() };
    let (mut queue, mut trials) = (QueuePolling::new(&costs, &objective), PollTrials::default());
    let mut ceiling = objective.cpu_permille.map(|permille| CpuCeiling::new(permille, 0));
    let mut judge = ObjectiveMeter::default();
    let (mut outcome, mut meter) = (Outcome::default(), Meter::default());
    // Since when the core has had nothing to do, and what the ceiling has been told.
    let (mut free, mut told, mut judged) = (0, 0, 0);
    let mut came = load.next(0, 0);
    while came < until {
        // Looks in vain, until the request comes or the queue is armed.
        let (mut now, mut armed) = (free, false);
        loop {
            let may_poll = ceiling.as_ref().is_none_or(CpuCeiling::may_poll);
            if came <= now {
                break;
            }
            armed = match mode {
                Mode::Polled => false,
                Mode::Notified => true,
                Mode::Adaptive(_) => matches!(queue.idle(now, may_poll, &trials), IdleChoice::Arm(_)),
            };
            if armed {
                break;
            }
            let next = if mode == Mode::Polled { came } else { (now + CLOCK).min(came) };
            if let Some(ceiling) = &mut ceiling {
                ceiling.spent(next, next - told);
                told = next;
            }
            now = next;
        }
        let awake_since = if armed {
            // Arming takes its time; a request that comes meanwhile is found by the look after it.
            let asleep = now + costs.arm_ns / 2;
            meter.awake(free, asleep);
            if came > asleep {
                outcome.kicks += 1;
                queue.armed();
                let woken = came + costs.wake_ns;
                if let Some(ceiling) = &mut ceiling {
                    ceiling.spent(woken, asleep - told);
                    told = woken;
                }
                woken
            } else {
                asleep
            }
        } else {
            free
        };
        let begun = came.max(free).max(awake_since);
        let after_kick = if armed { costs.arm_ns / 2 } else { LOOK };
        let done = begun + after_kick + SERVICE;
        meter.awake(awake_since, done);
        if trials.wants_sample(begun) {
            trials.sample(begun, meter.total());
        }
        queue.worked(begun, 1, &costs, &objective, &mut trials);
        let may_poll = ceiling.as_ref().is_none_or(CpuCeiling::may_poll);
        judge.took(&objective, 1, begun - came, may_poll);
        if let Some(ceiling) = &mut ceiling {
            ceiling.spent(done, done - told);
            told = done;
        }
        if done / SECOND > judged {
            judged = done / SECOND;
            outcome.reports.push(judge.period(&objective, ceiling.as_ref()));
        }
        outcome.requests += 1;
        outcome.took_ns.push(done - came);
        free = done;
        // A driver that kicks does nothing else meanwhile.
        came = load.next(came, done);
    }
    outcome.cpu_ns = meter.seconds.iter().sum();
    // The first second and the last are parts of one, or have the start in them.
    outcome.worst_second_ns = meter
        .seconds
        .iter()
        .skip(1)
        .take(((until / SECOND) as usize).saturating_sub(2))
        .copied()
        .max()
        .unwrap_or(0);
    outcome
}

#[test]
fn square_waves_are_served_as_the_better_mode_serves_them() {
    let mut worst = f64::INFINITY;
    for period_us in
        [10, 20, 50, 70, 100, 150, 200, 300, 500, 700, 1_000, 2_000, 5_000, 10_000, 100_000, 1_000_000]
    {
        let period = period_us * 1000;
        let until = (period * 20).clamp(200_000_000, 4 * SECOND);
        let wave = |mode| run(mode, Load::Square { period }, until);
        let (polled, notified, adaptive) = (wave(Mode::Polled), wave(Mode::Notified), wave(ADAPTIVE));
        let better = polled.requests.max(notified.requests);
        let part = adaptive.requests as f64 / better as f64;
        println!(
            "{period_us} us: {part:.3} of the requests of the better mode; CPU per request: {} polled, {} notified, {} adaptive",
            polled.cpu_ns / polled.requests,
            notified.cpu_ns / notified.requests,
            adaptive.cpu_ns / adaptive.requests
        );
        worst = worst.min(part);
        // Nobody polls through the long halves.
        if period_us >= 5_000 {
            assert!(adaptive.cpu_ns < until * 6 / 10, "{period_us} us: {} of {until}", adaptive.cpu_ns);
        }
    }
    assert!(worst >= 0.9, "{worst}");
}

#[test]
fn a_rare_hole_in_a_load_arms_nobody() {
    for (every, mean) in [(2_000, 20_000), (2_000, 100_000), (20_000, 300_000), (200_000, 1_000_000)] {
        let load = || Load::Holes { every, mean, rng: Rng::new(every + mean) };
        let (polled, adaptive) = (run(Mode::Polled, load(), 4 * SECOND), run(ADAPTIVE, load(), 4 * SECOND));
        let holes = adaptive.requests / every;
        println!("one of {mean} ns in {every}: {} kicks in some {holes} holes", adaptive.kicks);
        assert!(adaptive.kicks * 4 <= holes, "one of {mean} ns in {every}: {} of {holes}", adaptive.kicks);
        assert!(adaptive.requests * 100 >= polled.requests * 98);
    }
}

#[test]
fn a_load_that_stops_is_polled_after_for_a_twenty_fourth_of_its_time() {
    for period_ms in [1, 5, 20, 40, 100, 1_000] {
        let period = period_ms * 1_000_000;
        let until = period * 20;
        let adaptive = run(ADAPTIVE, Load::Square { period }, until);
        // Half of the time is the load's. What its queue is polled for before it is armed anyway comes in addition.
        let spare = (period / 2 / 24).min(2_000_000) * until / period;
        let spins = 100_000 * until / period;
        println!("{period_ms} ms: {} permille", adaptive.cpu_ns * 1000 / until);
        assert!(adaptive.cpu_ns <= until / 2 + spare + spins, "{period_ms} ms: {}", adaptive.cpu_ns);
    }
}

/// A request goes to one queue of the core and its answer to another; whoever made it makes the next one then, `think` later. Each end sleeps until its
/// interrupt, and is up again after `END_WAKE`. Requests so far, kicks so far, and time that the core was awake, from `begin` to `end` with the queues as they are.
fn closed_loop(
    queues: &mut [QueuePolling; 2],
    trials: &mut PollTrials,
    (begin, end): (u64, u64),
    think: u64,
) -> [u64; 3] {
    let costs = PollingCosts { wake_ns: 25_000, ..PollingCosts::default() };
    let none = CoreObjective::default();
    let (mut now, mut idle) = (begin, [begin; 2]);
    let [mut requests, mut kicks, mut awake] = [0; 3];
    while now < end {
        for at in 0..2 {
            let queue = &mut queues[at];
            let came = now + END_WAKE + if at == 0 { think } else { 0 };
            let mut look = idle[at];
            let armed = loop {
                if look >= came {
                    break false;
                }
                if matches!(queue.idle(look, true, trials), IdleChoice::Arm(_)) {
                    break true;
                }
                look += CLOCK;
            };
            awake += look.min(came) - idle[at];
            let begun = if armed { came + costs.wake_ns } else { came + LOOK };
            if armed {
                queue.armed();
                kicks += 1;
                awake += costs.arm_ns;
            }
            if trials.wants_sample(begun) {
                trials.sample(begun, awake);
            }
            queue.worked(begun, 1, &costs, &none, trials);
            now = begun + SERVICE;
            awake += SERVICE;
            idle[at] = now;
        }
        requests += 1;
    }
    [requests, kicks, awake]
}

#[test]
fn queues_whose_gaps_are_long_only_because_they_are_armed_are_polled() {
    let costs = PollingCosts { wake_ns: 25_000, ..PollingCosts::default() };
    let fresh = || QueuePolling::new(&costs, &CoreObjective::default());
    let (mut queues, mut trials) = ([fresh(), fresh()], PollTrials::default());
    // 2,000 requests per second: armed, and the trials cost next to nothing.
    closed_loop(&mut queues, &mut trials, (0, SECOND), 450_000);
    let [requests, kicks, awake] = closed_loop(&mut queues, &mut trials, (SECOND, 3 * SECOND), 450_000);
    assert!(kicks > requests * 19 / 10, "{kicks} kicks for {requests} requests");
    let work = requests * 2 * (SERVICE + costs.arm_ns);
    assert!(awake < work * 11 / 10, "awake for {awake} ns, of which {work} for requests");
    // As fast as answers come: polled within 50 ms.
    closed_loop(&mut queues, &mut trials, (3 * SECOND, 3 * SECOND + 50_000_000), 0);
    let begin = 3 * SECOND + 50_000_000;
    let [requests, kicks, _] = closed_loop(&mut queues, &mut trials, (begin, begin + SECOND), 0);
    assert!(kicks < requests / 50, "{kicks} kicks for {requests} requests");
}

#[test]
fn a_slow_load_that_begins_takes_little_more_than_what_notified_takes() {
    let costs = PollingCosts { wake_ns: 25_000, ..PollingCosts::default() };
    let fresh = || QueuePolling::new(&costs, &CoreObjective::default());
    for think in [100_000, 200_000, 450_000] {
        let (mut queues, mut trials) = ([fresh(), fresh()], PollTrials::default());
        // After a busy load, some thousand requests per second for 200 ms: trials come most often then.
        closed_loop(&mut queues, &mut trials, (0, SECOND), 0);
        let span = (SECOND, SECOND + SECOND / 5);
        let [requests, _, awake] = closed_loop(&mut queues, &mut trials, span, think);
        let work = requests * 2 * (SERVICE + costs.arm_ns);
        println!("{think}: awake for {awake} ns, of which {work} for {requests} requests");
        assert!(
            awake < work + 7_000_000,
            "{think}: awake for {awake} ns, of which {work} for {requests} requests"
        );
    }
}

#[test]
fn a_thousand_requests_a_second_take_no_more_than_twice_what_notified_takes() {
    for mean_us in [1_000, 2_000, 10_000] {
        let load = || Load::random(mean_us * 1000);
        let notified = run(Mode::Notified, load(), 5 * SECOND);
        let adaptive = run(ADAPTIVE, load(), 5 * SECOND);
        let ratio = adaptive.cpu_ns as f64 / notified.cpu_ns as f64;
        println!("{mean_us} us apart: {ratio:.2} of notified's CPU");
        assert!(ratio <= 2.0, "{mean_us} us apart: {ratio}");
    }
}

#[test]
fn the_first_request_after_idleness_is_as_fast_as_notified() {
    // 100 ms of work, then a second of silence, and so on.
    let adaptive = |mode| run(mode, Load::Square { period: SECOND / 5 }, 4 * SECOND);
    let slowest = |mut outcome: Outcome| {
        outcome.took_ns.sort_unstable();
        outcome.took_ns[outcome.took_ns.len() - 10]
    };
    let (first, notified) = (slowest(adaptive(ADAPTIVE)), slowest(adaptive(Mode::Notified)));
    assert!(first * 10 <= notified * 11, "{first} against {notified}");
}

#[test]
fn a_steady_load_is_polled_when_it_is_dense_and_notified_when_it_is_sparse() {
    for mean in [1_500, 3_000, 300_000, 3_000_000] {
        let until = (mean * 20_000).min(10 * SECOND);
        let mut polled = run(Mode::Polled, Load::random(mean), until);
        let notified = run(Mode::Notified, Load::random(mean), until);
        let mut adaptive = run(ADAPTIVE, Load::random(mean), until);
        println!("{}", beside(mean, &polled, &notified, &adaptive));
        if mean <= 3_000 {
            assert!(adaptive.p99() <= polled.p99() * 11 / 10);
        } else {
            assert!(adaptive.cpu_ns <= notified.cpu_ns * 11 / 10);
        }
    }
}

#[test]
fn requests_that_come_by_a_clock_take_little_more_than_what_notified_takes() {
    for mean in [10_000, 20_000, 30_000, 50_000, 100_000] {
        let polled = run(Mode::Polled, Load::random(mean), 20 * SECOND);
        let notified = run(Mode::Notified, Load::random(mean), 20 * SECOND);
        let adaptive = run(ADAPTIVE, Load::random(mean), 20 * SECOND);
        println!("{}", beside(mean, &polled, &notified, &adaptive));
        // It has to find out first, and to ask again, with one of two windows polled.
        let asking = polled.cpu_ns / 20;
        assert!(adaptive.cpu_ns <= notified.cpu_ns * 11 / 10 + asking, "{mean}");
    }
}

#[test]
fn a_loop_that_waits_for_its_answers_has_the_requests_of_a_polled_one() {
    let costs = PollingCosts { wake_ns: 25_000, ..PollingCosts::default() };
    for think in [0, 5_000, 10_000] {
        let fresh = || QueuePolling::new(&costs, &CoreObjective::default());
        let (mut queues, mut trials) = ([fresh(), fresh()], PollTrials::default());
        let [requests, ..] = closed_loop(&mut queues, &mut trials, (0, 5 * SECOND), think);
        let polled = 5 * SECOND / (2 * (END_WAKE + LOOK + SERVICE) + think);
        println!("{think}: {requests} of {polled}");
        assert!(requests * 100 >= polled * 97, "{think}: {requests} of {polled}");
    }
}

/// What became of requests so far apart on average in each mode.
fn beside(mean: u64, polled: &Outcome, notified: &Outcome, adaptive: &Outcome) -> String {
    let permille = |outcome: &Outcome| outcome.cpu_ns * 1000 / (mean * outcome.requests);
    format!(
        "{mean} ns apart: CPU {} polled, {} notified, {} adaptive, thousandths",
        permille(polled),
        permille(notified),
        permille(adaptive)
    )
}

#[test]
fn objectives_are_kept_wherever_a_fixed_mode_keeps_them_or_reported() {
    let until = 5 * SECOND;
    for mean in [2_000, 20_000, 200_000, 2_000_000] {
        for p99_ns in [None, Some(5_000), Some(40_000)] {
            for cpu_permille in [None, Some(50), Some(300), Some(700)] {
                let objective = CoreObjective { p99_ns, cpu_permille };
                let load = || Load::random(mean);
                let ceiling = cpu_permille.map_or(u64::MAX, |permille| u64::from(permille) * SECOND / 1000);
                let slack = ceiling / 50;
                let keeps = |outcome: &mut Outcome| {
                    let cpu = outcome.worst_second_ns <= ceiling.saturating_add(slack);
                    // A request waits as long as it takes, but for its service.
                    let late = |p99: u64| outcome.p99() <= p99 + SERVICE + LOOK;
                    (cpu, p99_ns.is_none_or(late))
                };
                let polled = keeps(&mut run(Mode::Polled, load(), until));
                let notified = keeps(&mut run(Mode::Notified, load(), until));
                let mut outcome = run(Mode::Adaptive(objective), load(), until);
                let adaptive = keeps(&mut outcome);
                let told = outcome
                    .reports
                    .iter()
                    .skip(1)
                    .any(|report| !matches!(report, ObjectiveReport::Kept | ObjectiveReport::Unknown));
                let what = format!(
                    "{mean} ns apart, {objective:?}: {polled:?} {notified:?} {adaptive:?}, {:?}",
                    outcome.reports
                );
                if polled == (true, true) || notified == (true, true) {
                    assert_eq!(adaptive, (true, true), "{what}");
                    assert!(!told, "{what}");
                } else {
                    // The ceiling wins.
                    assert_eq!(adaptive.0, polled.0 || notified.0, "{what}");
                    assert!(told || adaptive == (true, true), "{what}");
                }
            }
        }
    }
}
