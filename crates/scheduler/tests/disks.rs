//! One disk of the host and groups whose queues are on several cores: simulated, with what the cores go by and what the control plane tells them.

mod sim;

use std::collections::VecDeque;

use ioplane_scheduler::{
    BlockDevice, DiskLane, DiskNumber, DiskShares, FairTurns, GroupId, IN_FLIGHT, LARGEST_SLICE,
    MOST_IN_FLIGHT,
};
use sim::Rng;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
/// Between two looks of the control plane.
const LOOK: u64 = 20 * MS;
/// Of the disk: ns per byte, in 1024ths. 1 GB/s.
const PER_BYTE: u64 = 1024;
const HERE: BlockDevice = BlockDevice(1);

/// What a queue asks for.
#[derive(Clone, Copy)]
enum Asks {
    /// As much as it may have in flight.
    Always,
    /// A request at a time, so long after the one before has ended.
    Seldom(u64),
    /// As much as it may, in every other span of so many ns.
    Pulses(u64),
}

/// One queue on a core of its own.
struct Queue {
    group: GroupId,
    weight: u32,
    piece: u64,
    asks: Asks,
    turns: FairTurns,
    in_flight: u64,
    /// Since when it has had nothing to ask for.
    next: u64,
    served: Vec<u64>,
}

impl Queue {
    fn new(group: u32, weight: u32, piece: u64, asks: Asks) -> Self {
        let mut turns = FairTurns::default();
        turns.attach_on(0, GroupId(group), 1, Some(HERE));
        turns.wake(0);
        Queue { group: GroupId(group), weight, piece, asks, turns, in_flight: 0, next: 0, served: Vec::new() }
    }

    fn wants(&self, now: u64) -> bool {
        match self.asks {
            // No ring is longer.
            Asks::Always => self.in_flight < 256 * self.piece,
            Asks::Seldom(_) => self.in_flight == 0 && now >= self.next,
            Asks::Pulses(span) => self.in_flight < 256 * self.piece && (now / span).is_multiple_of(2),
        }
    }

    /// The pieces that it hands on now.
    fn submit(&mut self, now: u64) -> u64 {
        let mut count = 0;
        while self.wants(now) {
            if self.turns.room(0) < self.piece {
                self.turns.lacked_room(0);
                break;
            }
            self.turns.moved(0, self.piece, 0);
            self.in_flight += self.piece;
            count += 1;
        }
        count
    }

    fn end(&mut self, now: u64) {
        self.turns.moved(0, 0, self.piece);
        self.in_flight -= self.piece;
        if let Asks::Seldom(pause) = self.asks {
            self.next = now + pause;
        }
        let second = (now / SECOND) as usize;
        if self.served.len() <= second {
            self.served.resize(second + 1, 0);
        }
        self.served[second] += self.piece;
    }
}

/// A disk that answers in turn.
struct Host {
    queues: Vec<Queue>,
    shares: DiskShares,
    waiting: VecDeque<usize>,
    /// What each queue may have in flight.
    told: Vec<u64>,
    now: u64,
    /// When the one in front is done.
    busy_until: u64,
    idle_ns: u64,
}

impl Host {
    fn new(queues: Vec<Queue>) -> Self {
        let shares = DiskShares::default();
        let told = vec![u64::MAX; queues.len()];
        Host { queues, shares, waiting: VecDeque::new(), told, now: 0, busy_until: 0, idle_ns: 0 }
    }

    fn submit(&mut self) {
        let now = self.now;
        for (at, queue) in self.queues.iter_mut().enumerate() {
            let count = queue.submit(now);
            if self.waiting.is_empty() && count > 0 {
                self.busy_until = now + queue.piece * PER_BYTE / 1024;
            }
            self.waiting.extend((0..count).map(|_| at));
        }
    }

    fn look(&mut self) {
        let lane = |(core, queue): (usize, &mut Queue)| {
            let used = queue.turns.backing_use(0);
            queue.turns.end_period();
            DiskLane {
                group: queue.group,
                weight: queue.weight,
                core: core as u32,
                device: HERE,
                active: used.peak > 0,
                peak: used.peak,
                lacks: used.lacks,
            }
        };
        let lanes: Vec<DiskLane> = self.queues.iter_mut().enumerate().map(lane).collect();
        let parts = self.shares.look(&lanes, |_| &[DiskNumber(0)], self.now);
        for (queue, part) in self.queues.iter_mut().zip(&parts) {
            queue.turns.bound_on(part.group, part.device, part.in_flight);
        }
        self.told = parts.iter().map(|part| part.in_flight).collect();
    }

    fn run(&mut self, until: u64) {
        let mut next_look = (self.now / LOOK + 1) * LOOK;
        while self.now < until {
            self.submit();
            let event = if self.waiting.is_empty() { self.now + MS / 10 } else { self.busy_until };
            let then = event.min(next_look);
            if self.waiting.is_empty() {
                self.idle_ns += then - self.now;
            }
            self.now = then;
            if self.now == next_look {
                next_look += LOOK;
                self.look();
            }
            if self.now == self.busy_until
                && let Some(at) = self.waiting.pop_front()
            {
                self.queues[at].end(self.now);
                if let Some(next) = self.waiting.front() {
                    self.busy_until = self.now + self.queues[*next].piece * PER_BYTE / 1024;
                }
            }
        }
    }

    /// What the group got of all that was served in that second.
    fn part(&self, group: u32, second: usize) -> f64 {
        let of = |queue: &Queue| queue.served.get(second).copied().unwrap_or(0);
        let all: u64 = self.queues.iter().map(of).sum();
        let own: u64 = self.queues.iter().filter(|queue| queue.group.0 == group).map(of).sum();
        own as f64 / all.max(1) as f64
    }

    fn near(&self, group: u32, seconds: std::ops::Range<usize>, wanted: f64) {
        for second in seconds {
            let part = self.part(group, second);
            assert!(
                (part - wanted).abs() <= 0.03,
                "group {group} in second {second}: {part:.3}, not {wanted:.3}"
            );
        }
    }
}

#[test]
fn groups_on_different_cores_share_a_disk_by_weight_whatever_they_ask_for() {
    // Small requests on a deep queue against large ones, either way.
    for (one, three) in [(4096, LARGEST_SLICE), (LARGEST_SLICE, 4096), (LARGEST_SLICE, LARGEST_SLICE)] {
        let of = |piece| if piece == 4096 { 16 << 10 } else { piece };
        let mut host = Host::new(vec![
            Queue::new(1, 1, of(one), Asks::Always),
            Queue::new(2, 3, of(three), Asks::Always),
        ]);
        host.run(4 * SECOND);
        host.near(2, 1..4, 0.75);
        let bounds: u64 = host.queues.iter().map(|queue| queue.in_flight).sum();
        assert!(bounds <= IN_FLIGHT, "{bounds} in flight");
        assert!(host.idle_ns < SECOND / 100, "the disk idles for {} ns", host.idle_ns);
    }
}

#[test]
fn a_group_on_many_cores_has_no_more_than_one_on_a_single_core() {
    let mut queues: Vec<Queue> = (0..4).map(|_| Queue::new(1, 1, LARGEST_SLICE, Asks::Always)).collect();
    queues.push(Queue::new(2, 1, LARGEST_SLICE, Asks::Always));
    // A queue of it that hardly does anything takes nothing from its others.
    queues.push(Queue::new(2, 1, 4096, Asks::Seldom(10 * MS)));
    let mut host = Host::new(queues);
    host.run(4 * SECOND);
    host.near(1, 1..4, 0.5);
}

#[test]
fn the_part_of_a_group_that_is_idle_goes_to_the_others_and_comes_back() {
    let mut host = Host::new(vec![
        Queue::new(1, 1, LARGEST_SLICE, Asks::Always),
        Queue::new(2, 3, LARGEST_SLICE, Asks::Pulses(2 * SECOND)),
        Queue::new(3, 4, LARGEST_SLICE, Asks::Seldom(u64::MAX / 2)),
    ]);
    host.run(8 * SECOND);
    for (seconds, wanted) in [(1..2, 0.75), (3..4, 0.0), (5..6, 0.75), (7..8, 0.0)] {
        host.near(2, seconds, wanted);
    }
    assert!(host.idle_ns < SECOND / 100, "the disk idles for {} ns", host.idle_ns);
}

#[test]
fn a_group_that_comes_and_goes_at_the_worst_moments_takes_nothing_from_a_steady_one() {
    for span in [LOOK, 5 * LOOK, 6 * LOOK, 11 * LOOK, 51 * LOOK] {
        let mut host = Host::new(vec![
            Queue::new(1, 1, LARGEST_SLICE, Asks::Always),
            Queue::new(2, 1, LARGEST_SLICE, Asks::Pulses(span)),
        ]);
        host.run(9 * SECOND);
        let part: f64 = (1..9).map(|second| host.part(1, second)).sum::<f64>() / 8.0;
        assert!(part >= 0.48, "pulses of {} ms: the steady one has {part:.3}", span / MS);
        assert!(host.idle_ns < SECOND / 20, "pulses of {} ms: idle for {} ns", span / MS, host.idle_ns);
    }
}

#[test]
fn many_modest_groups_are_served_at_once_beside_a_greedy_one() {
    let mut queues = vec![Queue::new(0, 1, LARGEST_SLICE, Asks::Always)];
    queues.extend((1..8).map(|group| Queue::new(group, 1, 4096, Asks::Seldom(MS))));
    let mut host = Host::new(queues);
    host.run(3 * SECOND);
    // What waits in front of a request is what the greedy one has in flight.
    assert!(host.queues[0].in_flight <= 1 << 20, "{} in flight", host.queues[0].in_flight);
    for queue in &host.queues[1..] {
        let requests = queue.served[1..3].iter().sum::<u64>() / queue.piece / 2;
        // 1 ms of the disk's queue, 1 ms until the next.
        assert!(requests >= 450, "{requests} requests per second");
    }
    assert!(host.idle_ns < SECOND / 100);
}

#[test]
fn random_loads_never_have_more_in_flight_than_may_be_and_leave_no_disk_idle() {
    let mut rng = Rng::new(7);
    for _ in 0..20 {
        let mut pick = |most: u64| rng.next() % most;
        let mut queues = vec![Queue::new(0, 1 + pick(100) as u32, LARGEST_SLICE, Asks::Always)];
        for _ in 0..2 + pick(6) {
            let asks = match pick(3) {
                0 => Asks::Always,
                1 => Asks::Seldom(pick(200 * MS)),
                _ => Asks::Pulses(1 + pick(SECOND)),
            };
            let group = pick(4) as u32;
            // All queues of a group bring the same weight.
            let weight = queues.iter().find(|queue| queue.group.0 == group).map(|queue| queue.weight);
            queues.push(Queue::new(group, weight.unwrap_or(1 + pick(100) as u32), 4096 << pick(6), asks));
        }
        let mut host = Host::new(queues);
        host.run(SECOND);
        let least = LARGEST_SLICE * host.queues.len() as u64;
        for _ in 0..50 {
            let before: Vec<u64> = host.queues.iter().map(|queue| queue.in_flight).collect();
            let told = host.told.clone();
            host.run(host.now + LOOK);
            let bounded = host.told.iter().filter(|bound| **bound != u64::MAX);
            let together: u64 = bounded.clone().sum();
            assert!(together <= IN_FLIGHT + least, "{:?}", host.told);
            assert!(
                bounded.count() == host.queues.len() || host.told.iter().all(|bound| *bound == u64::MAX),
                "some share the disk and some do not: {:?}",
                host.told
            );
            for (at, queue) in host.queues.iter().enumerate() {
                let most = told[at].max(host.told[at]).max(before[at]);
                assert!(queue.in_flight <= most, "{} in flight, of {most}", queue.in_flight);
            }
        }
        assert!(host.idle_ns < SECOND / 20, "the disk idles for {} ns", host.idle_ns);
    }
}

#[test]
fn a_newcomer_waits_for_no_more_than_what_a_group_alone_may_have_in_flight() {
    // As much as deep rings of several queues hold: 256 MiB, which this disk needs a quarter of a second for.
    let mut queues = vec![Queue::new(1, 1, 1 << 20, Asks::Always), Queue::new(2, 1, 4096, Asks::Seldom(MS))];
    queues[1].next = SECOND;
    let mut host = Host::new(queues);
    host.run(SECOND);
    let alone = host.queues[0].in_flight;
    assert!(alone <= MOST_IN_FLIGHT && alone > MOST_IN_FLIGHT / 2, "{alone} in flight");
    assert_eq!(host.told[0], u64::MAX);
    assert!(host.idle_ns < SECOND / 100, "the disk idles for {} ns", host.idle_ns);
    // 64 MiB take 67 ms.
    host.run(SECOND + 70 * MS);
    assert!(host.queues[1].served.iter().sum::<u64>() > 0, "the newcomer still waits");
    host.run(2 * SECOND);
    assert!(host.queues[0].in_flight <= IN_FLIGHT, "{} in flight", host.queues[0].in_flight);
}
