//! Groups that compete for a core and for a disk, simulated: one greedy, seven modest, together twice of what there is.

mod sim;

use std::collections::VecDeque;

use ioplane_scheduler::{
    BlockDevice, FairTurns, GroupId, GroupOnCore, InFlightSettings, LARGEST_SLICE, MOST_IN_FLIGHT, Polled,
    QUANTUM, REQUEST_COST, divide, poll_cost,
};
use sim::{Rng, quantile};

/// Bytes that a core copies per ns.
const CORE_RATE: u64 = 8;
/// What a look at a ring takes, ns.
const LOOK: u64 = 40;
const SECOND: u64 = 1_000_000_000;

/// One queue with its open-loop load.
struct Source {
    group: GroupId,
    /// What each request costs, bytes.
    size: u64,
    /// What it costs beside its size: nothing to a disk.
    overhead: u64,
    /// Whether it is handed on in slices, or all at once (many descriptors).
    sliced: bool,
    /// Mean time between two requests, ns.
    apart: f64,
    rng: Rng,
    next: u64,
    /// When they came, and what is left of them.
    waiting: VecDeque<(u64, u64)>,
    /// By second: cost that came, cost that was served.
    came: Vec<u64>,
    served: Vec<u64>,
    took_ns: Vec<u64>,
}

impl Source {
    /// Demands `rate` bytes per ns, as costs go.
    fn new(group: u32, size: u64, rate: f64) -> Self {
        let mut rng = Rng::new(u64::from(group) * 977 + size);
        let apart = (size + REQUEST_COST) as f64 / rate;
        let next = rng.exponential(apart);
        Source {
            group: GroupId(group),
            size,
            overhead: REQUEST_COST,
            sliced: true,
            apart,
            rng,
            next,
            waiting: VecDeque::new(),
            came: Vec::new(),
            served: Vec::new(),
            took_ns: Vec::new(),
        }
    }

    fn at_once(self) -> Self {
        Source { sliced: false, ..self }
    }

    /// The same demand on a disk.
    fn of_disk(self) -> Self {
        Source {
            overhead: 0,
            apart: self.apart * self.size as f64 / (self.size + REQUEST_COST) as f64,
            ..self
        }
    }

    fn arrive(&mut self, now: u64) {
        while self.next <= now {
            self.waiting.push_back((self.next, self.size));
            add(&mut self.came, self.next, self.size + self.overhead);
            self.next += self.rng.exponential(self.apart).max(1);
        }
    }

    /// What is taken of the first request at once.
    fn piece(&self) -> Option<u64> {
        self.waiting.front().map(|(_, left)| if self.sliced { (*left).min(LARGEST_SLICE) } else { *left })
    }

    /// The first request has moved on by a piece; when it came, if that was the last of it.
    fn take(&mut self, piece: u64) -> Option<u64> {
        let (came, left) = self.waiting.front_mut()?;
        *left -= piece;
        let done = (*left == 0).then_some(*came);
        if done.is_some() {
            self.waiting.pop_front();
        }
        done
    }
}

fn add(seconds: &mut Vec<u64>, at: u64, value: u64) {
    let second = (at / SECOND) as usize;
    seconds.resize(seconds.len().max(second + 1), 0);
    seconds[second] += value;
}

/// One core that copies.
struct CopyingCore {
    turns: FairTurns,
    sources: Vec<Source>,
    now: u64,
}

impl CopyingCore {
    fn new(sources: Vec<Source>, weight: impl Fn(GroupId) -> u32) -> Self {
        let mut turns = FairTurns::default();
        for (slot, source) in sources.iter().enumerate() {
            turns.attach(slot, source.group, 1);
            turns.weigh(source.group, weight(source.group));
            turns.wake(slot);
        }
        CopyingCore { turns, sources, now: 0 }
    }

    fn run(&mut self, until: u64) {
        while self.now < until {
            let mut worked = false;
            self.turns.begin_turn();
            while let Some(grant) = self.turns.next_poll() {
                worked |= self.poll(grant.slot, grant.bytes);
            }
            if !worked {
                let next = self.sources.iter().map(|source| source.next).min().unwrap();
                self.now = self.now.max(next);
            }
        }
    }

    fn poll(&mut self, slot: usize, bytes: u64) -> bool {
        self.now += LOOK;
        let source = &mut self.sources[slot];
        source.arrive(self.now);
        let (mut requests, mut copied) = (0, 0);
        while poll_cost(requests, copied) < bytes || copied == 0 {
            let Some(piece) = source.piece() else { break };
            copied += piece as u32;
            let done = source.take(piece);
            requests += u32::from(done.is_some());
            self.now += (piece + REQUEST_COST) / CORE_RATE;
            add(&mut source.served, self.now, piece + if done.is_some() { REQUEST_COST } else { 0 });
            if let Some(came) = done {
                source.took_ns.push(self.now - came);
            }
        }
        let worked = copied > 0;
        let polled = Polled {
            bytes: if worked { poll_cost(requests, copied) } else { 0 },
            more: !source.waiting.is_empty(),
        };
        self.turns.polled(slot, polled);
        worked
    }
}

/// What each would get of `capacity`: nobody more than it demands, and what is left by weight.
fn max_min(demands: &[(u64, u32)], capacity: u64) -> Vec<u64> {
    let mut got = vec![0; demands.len()];
    let mut wanting: Vec<usize> = (0..demands.len()).collect();
    let mut left = capacity as f64;
    loop {
        let weights: f64 = wanting.iter().map(|at| f64::from(demands[*at].1)).sum();
        let part = |at: usize| left * f64::from(demands[at].1) / weights;
        let (full, short): (Vec<usize>, Vec<usize>) =
            wanting.iter().partition(|at| demands[**at].0 as f64 <= part(**at));
        if full.is_empty() {
            short.iter().for_each(|at| got[*at] = part(*at) as u64);
            return got;
        }
        full.iter().for_each(|at| got[*at] = demands[*at].0);
        left -= full.iter().map(|at| demands[*at].0 as f64).sum::<f64>();
        if short.is_empty() {
            return got;
        }
        wanting = short;
    }
}

/// Demands of the seven modest groups, in parts of an eighth of what there is.
const MODEST: [f64; 7] = [0.2, 0.4, 0.6, 0.7, 0.8, 1.3, 2.0];

/// The greedy one, group 0, and the modest ones: `rate` bytes per ns is what there is, and twice that the demand.
fn eight(greedy: Source, rate: f64) -> Vec<Source> {
    let modest = |(at, part): (usize, &f64)| Source::new(at as u32 + 1, 4096, part * rate / 8.0);
    std::iter::once(greedy).chain(MODEST.iter().enumerate().map(modest)).collect()
}

fn greedy_rate(rate: f64) -> f64 {
    2.0 * rate - MODEST.iter().sum::<f64>() * rate / 8.0
}

/// Each group has at least 95 % of its part in each second.
fn assert_parts(sources: &[Source], capacity: u64, seconds: usize, weight: impl Fn(GroupId) -> u32) {
    let mut worst = f64::INFINITY;
    for second in 1..seconds {
        // What waits from before is asked for as well.
        let demands: Vec<(u64, u32)> = sources
            .iter()
            .map(|source| {
                let before: u64 = source.came[..second].iter().sum::<u64>();
                let served: u64 = source.served[..second].iter().sum::<u64>();
                (source.came[second] + before.saturating_sub(served), weight(source.group))
            })
            .collect();
        let parts = max_min(&demands, capacity);
        for (source, part) in sources.iter().zip(parts) {
            let ratio = source.served[second] as f64 / part as f64;
            worst = worst.min(ratio);
            assert!(
                ratio >= 0.95,
                "second {second}, group {}: {} of {part}: {ratio:.3}",
                source.group.0,
                source.served[second]
            );
        }
    }
    println!("the worst part in a second: {worst:.3}");
}

/// The p99 of the modest ones that do not ask for more than their part is at most twice what it is alone, and the time of a turn.
fn assert_p99(sources: &mut [Source], alone: impl Fn(usize) -> u64, turn_ns: u64) {
    for (at, part) in MODEST.iter().enumerate().filter(|(_, part)| **part < 0.75) {
        let p99 = quantile(&mut sources[at + 1].took_ns, 0.99);
        let alone = alone(at + 1);
        println!("group {} ({part} of its part): p99 {p99} ns, alone {alone}, a turn {turn_ns}", at + 1);
        assert!(p99 <= 2 * alone + turn_ns, "group {}: {p99} against {alone} alone", at + 1);
    }
}

#[test]
fn a_greedy_group_takes_nothing_from_modest_ones_on_a_full_core() {
    let rate = CORE_RATE as f64;
    let large = || Source::new(0, 1 << 20, greedy_rate(rate));
    let scattered = || Source::new(0, 256 << 10, greedy_rate(rate)).at_once();
    let small = || Source::new(0, 4096, greedy_rate(rate));
    for greedy in [&large as &dyn Fn() -> Source, &scattered, &small] {
        let mut core = CopyingCore::new(eight(greedy(), rate), |_| 1);
        core.run(3 * SECOND);
        // Looks take some of the core: what there is, is what it served.
        let served: u64 = core.sources.iter().map(|source| source.served[1..3].iter().sum::<u64>()).sum();
        assert!(served > 2 * SECOND * CORE_RATE * 9 / 10);
        assert_parts(&core.sources, served / 2, 3, |_| 1);
        let alone = |at: usize| {
            let source = eight(greedy(), rate).into_iter().nth(at).unwrap();
            let mut core = CopyingCore::new(vec![source], |_| 1);
            core.run(2 * SECOND);
            quantile(&mut core.sources[0].took_ns, 0.99)
        };
        assert_p99(&mut core.sources, alone, 8 * QUANTUM / CORE_RATE);
    }
}

#[test]
fn weights_divide_a_full_core() {
    let weight = |group: GroupId| [1, 2, 5, 10][group.0 as usize];
    let sources = (0..4).map(|group| Source::new(group, 16 << 10, CORE_RATE as f64)).collect();
    let mut core = CopyingCore::new(sources, weight);
    // With what each poll costs besides its requests: the small parts are polled for fewer at a time.
    let mut served = |until| {
        core.run(until);
        core.turns.read().map(|tenant| (tenant.group, tenant.served)).collect::<Vec<_>>()
    };
    let (before, after) = (served(2 * SECOND), served(3 * SECOND));
    let parts: Vec<_> = before.iter().zip(after).map(|(one, (group, two))| (group, two - one.1)).collect();
    let all: u64 = parts.iter().map(|(_, part)| part).sum();
    for (group, part) in parts {
        let wanted = all as f64 * f64::from(weight(group)) / 18.0;
        let error = (part as f64 - wanted).abs() / wanted;
        assert!(error < 0.01, "group {}: {error}", group.0);
    }
}

#[test]
fn the_queues_of_a_group_share_its_weight() {
    // A group of seven queues against one of one, and idle queues beside both.
    let rate = CORE_RATE as f64;
    let demand = |at: u32| if at == 7 { 0.7 } else { 0.15 };
    let busy = (0..8).map(|at| Source::new(u32::from(at == 7), 4096 << (at % 3), demand(at) * rate));
    let idle = (0..8).map(|at| Source::new(at % 2, 4096, 1e-9));
    let mut core = CopyingCore::new(busy.chain(idle).collect(), |_| 1);
    core.run(3 * SECOND);
    let served = |group: u32| -> u64 {
        core.sources.iter().filter(|s| s.group.0 == group).map(|s| s.served.get(1).unwrap_or(&0)).sum()
    };
    let ratio = served(0) as f64 / served(1) as f64;
    assert!((0.98..1.02).contains(&ratio), "{ratio}");
    // Within the group each queue gets the same, whatever the size of its requests.
    let (least, most) = (0..7)
        .map(|at| core.sources[at].served[1])
        .fold((u64::MAX, 0), |(least, most), one| (least.min(one), most.max(one)));
    assert!(most * 98 <= least * 100, "{least} to {most}");
}

#[test]
fn a_core_of_which_most_groups_are_idle_gives_all_of_it_to_the_others() {
    let rate = CORE_RATE as f64;
    let idle = (1..50).map(|group| Source::new(group, 4096, 1e-9));
    let mut core =
        CopyingCore::new(std::iter::once(Source::new(0, 65_536, 2.0 * rate)).chain(idle).collect(), |_| 1);
    core.run(2 * SECOND);
    // Each turn looks at 49 rings for each grant; that is what polling them costs, not what their weights are.
    let looks = 49 * LOOK;
    let turn = 65_536 / CORE_RATE;
    assert!(core.sources[0].served[1] > SECOND * CORE_RATE * turn / (turn + looks) * 9 / 10);
}

#[test]
fn slots_come_rest_and_go_while_others_are_polled() {
    // Whatever is attached, woken, put to rest and taken away in between: each awake queue is polled, and no other.
    let mut rng = Rng::new(7);
    let mut turns = FairTurns::default();
    let mut state: Vec<Option<bool>> = vec![None; 24];
    for _ in 0..20_000 {
        let slot = (rng.next() % 24) as usize;
        match (state[slot], rng.next() % 3) {
            (None, _) => {
                turns.attach(slot, GroupId((rng.next() % 5) as u32), 1 + (rng.next() % 4) as u32);
                state[slot] = Some(false);
            }
            (Some(_), 0) => {
                turns.detach(slot);
                state[slot] = None;
            }
            (Some(false), _) => {
                turns.wake(slot);
                state[slot] = Some(true);
            }
            (Some(true), _) => {
                turns.rest(slot);
                state[slot] = Some(false);
            }
        }
        let mut seen = [0; 24];
        for _ in 0..4 {
            turns.begin_turn();
            let mut polls = 0;
            while let Some(grant) = turns.next_poll() {
                assert_eq!(state[grant.slot], Some(true));
                seen[grant.slot] += 1;
                polls += 1;
                assert!(polls < 10_000, "a turn without end");
                let bytes = rng.next() % 40_000;
                turns.polled(grant.slot, Polled { bytes, more: rng.next().is_multiple_of(4) });
                if rng.next().is_multiple_of(50) {
                    turns.rest(grant.slot);
                    state[grant.slot] = Some(false);
                }
            }
        }
        let awake = state.iter().filter(|state| **state == Some(true)).count();
        let polled = (0..24).filter(|slot| seen[*slot] > 0).count();
        assert!(awake == 0 || polled > 0, "nobody of {awake} was polled");
    }
}

#[test]
fn a_group_that_owes_waits_for_those_with_work_and_for_nobody_else() {
    let mut turns = FairTurns::default();
    for slot in 0..3 {
        turns.attach(slot, GroupId(slot as u32), 1);
        turns.wake(slot);
    }
    let mut turn = |polled: [Polled; 3]| {
        let mut granted = [0; 3];
        turns.begin_turn();
        while let Some(grant) = turns.next_poll() {
            granted[grant.slot] += 1;
            turns.polled(grant.slot, polled[grant.slot]);
        }
        granted
    };
    let greedy = Polled { bytes: 16 * QUANTUM, more: true };
    let modest = Polled { bytes: 1000, ..Polled::default() };
    let idle = Polled::default();
    assert_eq!(turn([greedy, modest, idle]), [1; 3]);
    for _ in 0..15 {
        assert_eq!(turn([greedy, modest, idle]), [0, 1, 1], "it owes, and another has work");
    }
    assert_eq!(turn([greedy, modest, idle]), [1; 3], "it has waited for long enough");
    for _ in 0..4 {
        assert_eq!(turn([greedy, idle, idle]), [1; 3], "nobody else has work");
    }
}

#[test]
fn what_a_group_cost_while_it_was_alone_is_not_held_against_it() {
    let mut turns = FairTurns::default();
    for slot in 0..2 {
        turns.attach(slot, GroupId(slot as u32), 1);
    }
    turns.wake(0);
    assert!(!turns.competes());
    turns.begin_turn();
    let grant = turns.next_poll().unwrap();
    turns.polled(grant.slot, Polled { bytes: 16 * QUANTUM, more: true });
    assert_eq!(turns.next_poll(), None);
    turns.wake(1);
    assert!(turns.competes());
    turns.begin_turn();
    let first = turns.next_poll().unwrap();
    assert_eq!((first.slot, first.bytes), (0, QUANTUM));
}

/// A core that only hands on, and the disk that it hands to.
struct DiskCore {
    turns: FairTurns,
    sources: Vec<Source>,
    now: u64,
    /// What the disk has of each source: when it will be done, its bytes, and when its request came if it is the last piece.
    disk: Vec<Vec<(u64, u64, Option<u64>)>>,
    free_at: Vec<u64>,
    latency: u64,
    /// ns per byte of one channel, in 1024ths.
    per_byte: u64,
}

impl DiskCore {
    /// A disk of `rate` MB/s with so many channels, which answers after `latency` ns more.
    fn new(
        sources: Vec<Source>,
        rate: u64,
        channels: usize,
        latency: u64,
        bounds: &[(GroupId, u64)],
    ) -> Self {
        let mut turns = FairTurns::default();
        for (slot, source) in sources.iter().enumerate() {
            turns.attach(slot, source.group, 1);
            turns.wake(slot);
        }
        bounds.iter().for_each(|(group, bound)| turns.bound(*group, *bound));
        let per_byte = 1024 * 1000 * channels as u64 / rate;
        let disk = vec![Vec::new(); sources.len()];
        DiskCore { turns, sources, now: 0, disk, free_at: vec![0; channels], latency, per_byte }
    }

    fn run(&mut self, until: u64) {
        while self.now < until {
            let before = self.now;
            let mut worked = false;
            self.turns.begin_turn();
            while let Some(grant) = self.turns.next_poll() {
                worked |= self.poll(grant.slot, grant.bytes, grant.room);
            }
            if !worked {
                let came = self.sources.iter().map(|source| source.next).min().unwrap();
                let done = self.disk.iter().flatten().map(|piece| piece.0).min().unwrap_or(u64::MAX);
                self.now = came.min(done).max(before + LOOK);
            }
        }
    }

    fn poll(&mut self, slot: usize, bytes: u64, room: u64) -> bool {
        self.now += LOOK;
        let (now, mut completed, mut submitted, mut requests) = (self.now, 0, 0, 0);
        let source = &mut self.sources[slot];
        source.arrive(now);
        self.disk[slot].retain(|(done, bytes, came)| {
            let ended = *done <= now;
            if ended {
                completed += bytes;
                requests += 1;
                add(&mut source.served, *done, *bytes);
                if let Some(came) = came {
                    source.took_ns.push(done - came);
                }
            }
            !ended
        });
        while submitted < bytes {
            let Some(piece) = source.piece().filter(|piece| submitted + piece <= room) else { break };
            let last = source.take(piece);
            let channel = self.free_at.iter_mut().min().unwrap();
            *channel = (*channel).max(now) + piece * self.per_byte / 1024;
            self.disk[slot].push((*channel + self.latency, piece, last));
            submitted += piece;
            requests += 1;
        }
        // What is handed on is charged as if it was copied, and the core takes far less for it.
        self.now += u64::from(requests) * 100;
        let worked = requests > 0;
        let more = source.piece().is_some_and(|piece| piece <= room.saturating_sub(submitted));
        let bytes = if worked { poll_cost(requests, submitted as u32) } else { 0 };
        self.turns.moved(slot, submitted, completed);
        self.turns.polled(slot, Polled { bytes, more });
        worked
    }
}

#[test]
fn a_greedy_group_takes_nothing_from_modest_ones_on_a_full_disk() {
    // MB/s.
    let rate = 1000;
    let groups: Vec<GroupOnCore> = (0..8)
        .map(|group| GroupOnCore { group: GroupId(group), core: 0, used_permille: 1, wants_more: false })
        .collect();
    let shares = divide(&groups, |_| 1, &InFlightSettings::default());
    let bounds: Vec<(GroupId, u64)> = shares.iter().map(|share| (share.group, share.in_flight)).collect();
    let quanta: u64 = bounds.iter().map(|(_, bound)| bound).sum();
    assert_eq!(quanta, 4 << 20);
    for (channels, latency) in [(1, 0), (1, 80_000), (4, 50_000)] {
        let greedy = || Source::new(0, 1 << 20, greedy_rate(1.0));
        let mut disk = DiskCore::new(
            eight(greedy(), 1.0).into_iter().map(Source::of_disk).collect(),
            rate,
            channels,
            latency,
            &bounds,
        );
        disk.run(4 * SECOND);
        for tenant in disk.turns.read() {
            assert!(tenant.in_flight <= (512 << 10), "{tenant:?}");
        }
        let served: u64 = disk.sources.iter().map(|source| source.served[1..3].iter().sum::<u64>()).sum();
        println!("{channels} channels: {} MB/s of {rate}", served / 2_000_000);
        assert!(served / 2 >= SECOND * 95 / 100, "{channels} channels: {served}");
        assert_parts(&disk.sources, served / 2, 3, |_| 1);
        let alone = |at: usize| {
            let source = eight(greedy(), 1.0).into_iter().nth(at).unwrap();
            let mut disk = DiskCore::new(vec![source.of_disk()], rate, channels, latency, &bounds);
            disk.run(2 * SECOND);
            quantile(&mut disk.sources[0].took_ns, 0.99)
        };
        // 4 MiB at 1 byte per ns.
        assert_p99(&mut disk.sources, alone, quanta);
    }
}

#[test]
fn a_group_on_two_cores_gets_what_its_weight_is_worth_in_all() {
    let rate = CORE_RATE as f64;
    let busy = |group, size| Source::new(group, size, 1.1 * rate);
    let quiet = |group| Source::new(group, 4096, 0.1 * rate);
    // Who is on the first core and who on the second, and what each gets of both.
    type Case<'a> = (&'a dyn Fn() -> [Vec<Source>; 2], &'a [(u32, f64)]);
    let cases: [Case<'_>; 3] = [
        (
            &|| [vec![busy(0, 16_384), busy(1, 65_536)], vec![busy(0, 16_384), busy(2, 1 << 20)]],
            &[(0, 2.0 / 3.0), (1, 2.0 / 3.0), (2, 2.0 / 3.0)],
        ),
        (
            &|| {
                [
                    vec![busy(0, 16_384), busy(1, 16_384), busy(2, 65_536)],
                    vec![busy(0, 65_536), busy(3, 16_384)],
                ]
            },
            &[(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.5)],
        ),
        (
            &|| [vec![quiet(0), busy(1, 16_384)], vec![busy(0, 65_536), busy(2, 16_384)]],
            &[(0, 0.55), (1, 0.9), (2, 0.55)],
        ),
    ];
    for (sources, wanted) in cases {
        let mut cores = sources().map(|sources| CopyingCore::new(sources, |_| 4096));
        let mut before = [(); 2].map(|()| std::collections::BTreeMap::<GroupId, u64>::new());
        let period = 20_000_000;
        for tick in 1..=(4 * SECOND / period) {
            let mut readings = Vec::new();
            for (at, core) in cores.iter_mut().enumerate() {
                core.run(tick * period);
                for tenant in core.turns.read() {
                    let used = tenant.served - before[at].insert(tenant.group, tenant.served).unwrap_or(0);
                    readings.push(GroupOnCore {
                        group: tenant.group,
                        core: at as u32,
                        used_permille: (used * 1000 / (period * CORE_RATE)) as u32,
                        wants_more: tenant.wants_more,
                    });
                }
            }
            for share in divide(&readings, |_| 1, &InFlightSettings::default()) {
                cores[share.core as usize].turns.part(share.group, share.part);
            }
        }
        for (group, part) in wanted {
            for second in 1..4 {
                let served: u64 = cores
                    .iter()
                    .flat_map(|core| &core.sources)
                    .filter(|source| source.group.0 == *group)
                    .map(|source| source.served[second])
                    .sum();
                let got = served as f64 / (SECOND * CORE_RATE) as f64;
                assert!(
                    got >= part * 0.95,
                    "group {group} in second {second}: {got:.3} cores, not {part:.3}"
                );
            }
        }
    }
}

#[test]
fn a_group_that_is_alone_is_told_its_room_when_it_comes_near_the_most_there_is() {
    const MIB: u64 = 1 << 20;
    let mut turns = FairTurns::default();
    // Two queues of a group on one device, one of it on another, and one whose backing's place is not known.
    for (slot, device) in [Some(1), Some(1), Some(2), None].into_iter().enumerate() {
        turns.attach_on(slot, GroupId(1), 1, device.map(BlockDevice));
        turns.wake(slot);
    }
    // More than a poll takes is as good as no bound.
    const FREE: u64 = u32::MAX as u64;
    let room = |turns: &FairTurns, slot| turns.room(slot).min(FREE);
    let rooms = |turns: &FairTurns| [0, 1, 2, 3].map(|slot| room(turns, slot));
    turns.moved(0, MOST_IN_FLIGHT / 2, 0);
    turns.moved(3, 4 * MOST_IN_FLIGHT, 0);
    assert_eq!((rooms(&turns), turns.bounds_lanes()), ([FREE; 4], false));
    turns.moved(1, MOST_IN_FLIGHT / 4, 0);
    assert_eq!(rooms(&turns), [MOST_IN_FLIGHT / 4, MOST_IN_FLIGHT / 4, FREE, FREE]);
    assert!(turns.bounds_lanes());
    // Whatever else it is told: the least holds.
    turns.bound_on(GroupId(1), BlockDevice(1), u64::MAX);
    assert_eq!(rooms(&turns)[..2], [MOST_IN_FLIGHT / 4; 2]);
    turns.bound_on(GroupId(1), BlockDevice(1), 4 * MIB);
    assert_eq!(rooms(&turns)[..2], [0; 2]);
    turns.bound_on(GroupId(1), BlockDevice(1), u64::MAX);
    turns.moved(0, 0, MOST_IN_FLIGHT / 2);
    assert_eq!((rooms(&turns), turns.bounds_lanes()), ([FREE; 4], false));
    // What a queue had in flight goes with it.
    turns.moved(0, MOST_IN_FLIGHT, 0);
    assert_eq!((room(&turns, 1), turns.bounds_lanes()), (0, true));
    turns.detach(0);
    assert_eq!((room(&turns, 1), turns.bounds_lanes()), (FREE, false));
}
