//! The policy of a pool, on traces: steady, adversarial, and what users ask for. A pool that does as it is told stands between.

mod rules;
mod sim;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use ioplane_scheduler::{
    CoreLoad, CoreUse, CpuTopology, Decision, GroupId, GrowReason, MoveReason, PoolPlanner, PoolReadings,
    PoolSettings, QueueKey, QueueLoad, ShrinkReason, StuckReason,
};
use rules::Rules;
use sim::Rng;

const PERIOD: u64 = 20_000_000;
const SECOND: u64 = 1_000_000_000;

/// A queue of a simulated pool.
#[derive(Clone)]
struct Queue {
    core: u32,
    group: GroupId,
    pinned: Option<u32>,
    node: Option<u32>,
    /// Does not become quiet: each move fails.
    silent: bool,
    /// What it would take of a core of its own, thousandths.
    wants: u32,
}

/// Cores that divide their time among their queues, and carry decisions out between two readings.
struct Simulation {
    planner: PoolPlanner,
    settings: PoolSettings,
    rules: Rules,
    topology: CpuTopology,
    cores: BTreeMap<u32, (Option<u32>, CoreUse)>,
    kept: BTreeSet<u32>,
    next_core: u32,
    queues: BTreeMap<QueueKey, Queue>,
    not_quiet: Vec<QueueKey>,
    now: u64,
    decisions: Vec<(u64, Decision)>,
}

fn key(device: u32) -> QueueKey {
    QueueKey { device, queue: 0 }
}

impl Simulation {
    fn new(cores: u32, settings: PoolSettings) -> Self {
        Simulation {
            planner: PoolPlanner::new(settings.clone()),
            settings,
            rules: Rules::default(),
            topology: CpuTopology::default(),
            cores: (0..cores).map(|core| (core, (None, CoreUse::Open))).collect(),
            kept: BTreeSet::new(),
            next_core: cores,
            queues: BTreeMap::new(),
            not_quiet: Vec::new(),
            now: 0,
            decisions: Vec::new(),
        }
    }

    fn set(&mut self, settings: PoolSettings) {
        self.planner.set(settings.clone());
        self.settings = settings;
    }

    fn add(&mut self, device: u32, core: u32, wants: u32) -> &mut Queue {
        let queue = Queue { core, group: GroupId(device), pinned: None, node: None, silent: false, wants };
        self.queues.entry(key(device)).or_insert(queue)
    }

    /// What a core's queues get of it: all that they want, or the same part of it.
    fn loads(&self) -> BTreeMap<QueueKey, u32> {
        let wanted =
            |core: u32| self.queues.values().filter(|q| q.core == core).map(|q| q.wants).sum::<u32>();
        let load = |queue: &Queue| {
            let all = wanted(queue.core).max(1000);
            (u64::from(queue.wants) * 1000 / u64::from(all)) as u32
        };
        self.queues.iter().map(|(key, queue)| (*key, load(queue))).collect()
    }

    fn readings(&mut self) -> PoolReadings {
        let loads = self.loads();
        let busy = |core: &u32| {
            self.queues
                .iter()
                .filter(|(_, queue)| queue.core == *core)
                .map(|(key, _)| loads[key])
                .sum::<u32>()
        };
        PoolReadings {
            now_ns: self.now,
            cores: self
                .cores
                .iter()
                .map(|(core, (cpu, used_for))| CoreLoad {
                    core: *core,
                    cpu: *cpu,
                    used_for: *used_for,
                    kept: self.kept.contains(core),
                    // Some of the time goes into the looks.
                    busy_permille: (busy(core) + 2).min(1000),
                })
                .collect(),
            queues: self
                .queues
                .iter()
                .map(|(key, queue)| QueueLoad {
                    queue: *key,
                    group: queue.group,
                    core: queue.core,
                    load_permille: loads[key],
                    pinned: queue.pinned,
                    node: queue.node,
                    moving: false,
                })
                .collect(),
            not_quiet: std::mem::take(&mut self.not_quiet),
        }
    }

    fn step(&mut self) {
        self.now += PERIOD;
        let readings = self.readings();
        let plan = self.planner.plan(&readings, &self.topology);
        self.rules.check(&self.settings, &readings, &plan);
        for decision in plan {
            self.decisions.push((self.now, decision));
            match decision {
                Decision::Grow { cpu, .. } => {
                    self.cores.insert(self.next_core, (cpu, CoreUse::Open));
                    self.next_core += 1;
                }
                Decision::Shrink { core, .. } => self.cores.get_mut(&core).unwrap().1 = CoreUse::Ending,
                Decision::Move { queue, from, to, .. } => {
                    let it = self.queues.get_mut(&queue).unwrap();
                    assert_eq!(it.core, from, "moved from where it is not");
                    assert_ne!(from, to);
                    let open = matches!(self.cores[&to].1, CoreUse::Open | CoreUse::Reserved(_));
                    assert!(open || it.pinned == Some(to), "moved to a core that takes none");
                    if it.silent {
                        self.not_quiet.push(queue);
                    } else {
                        it.core = to;
                    }
                }
                Decision::Stuck { .. } => {}
                other => panic!("not a decision about a pool: {other}"),
            }
        }
        // A core that is to end does so when its last queue has left.
        let used: BTreeSet<u32> = self.queues.values().map(|queue| queue.core).collect();
        self.cores.retain(|core, (_, used_for)| *used_for != CoreUse::Ending || used.contains(core));
    }

    fn run(&mut self, ns: u64) {
        for _ in 0..ns / PERIOD {
            self.step();
        }
    }

    fn moves(&self) -> usize {
        self.decisions.iter().filter(|(_, decision)| matches!(decision, Decision::Move { .. })).count()
    }

    fn counts(&self) -> usize {
        let counts = |d: &&(u64, Decision)| matches!(d.1, Decision::Grow { .. } | Decision::Shrink { .. });
        self.decisions.iter().filter(counts).count()
    }

    /// What all queues get, in thousandths of what they want.
    fn served_permille(&self) -> u32 {
        let got: u32 = self.loads().values().sum();
        let wanted: u32 = self.queues.values().map(|queue| queue.wants).sum();
        got * 1000 / wanted.max(1)
    }

    fn core_of(&self, device: u32) -> u32 {
        self.queues[&key(device)].core
    }
}

fn up_to(max_cores: u32) -> PoolSettings {
    PoolSettings { max_cores, ..PoolSettings::default() }
}

#[test]
fn cores_come_with_the_load_and_go_with_it() {
    let mut pool = Simulation::new(1, up_to(4));
    (0..12).for_each(|device| {
        pool.add(device, 0, 250);
    });
    pool.run(SECOND);
    assert_eq!((pool.cores.len(), pool.served_permille()), (4, 1000));
    pool.queues.values_mut().for_each(|queue| queue.wants = 10);
    pool.run(60 * SECOND);
    assert_eq!((pool.cores.len(), pool.served_permille()), (1, 1000));
    let reasons: Vec<String> = pool.decisions.iter().map(|(_, decision)| decision.to_string()).collect();
    assert!(reasons[0].starts_with("one core more: 1 core carries"), "{reasons:?}");
    let moves = pool.moves();
    pool.run(60 * SECOND);
    assert_eq!((pool.cores.len(), pool.moves()), (1, moves), "a quiet pool is left alone");
}

#[test]
fn a_core_that_a_user_has_asked_for_is_not_ended() {
    let mut pool = Simulation::new(3, up_to(3));
    pool.kept.extend([0, 2]);
    pool.add(0, 0, 10);
    pool.run(60 * SECOND);
    assert_eq!(pool.cores.keys().copied().collect::<Vec<_>>(), [0, 2]);
    pool.set(up_to(1));
    pool.run(60 * SECOND);
    assert_eq!(pool.cores.len(), 2, "neither idle nor above the maximum");
}

#[test]
fn without_balance_only_what_users_have_asked_for_is_done() {
    let settings = PoolSettings { min_cores: 0, max_cores: 0, balance: false, ..PoolSettings::default() };
    let mut pool = Simulation::new(2, settings);
    pool.kept.extend([0, 1]);
    (0..4).for_each(|device| {
        pool.add(device, 0, 600);
    });
    pool.queues.get_mut(&key(3)).unwrap().pinned = Some(1);
    pool.run(30 * SECOND);
    assert_eq!((pool.cores.len(), pool.moves(), pool.core_of(3)), (2, 1, 1));
    pool.cores.get_mut(&1).unwrap().1 = CoreUse::Draining;
    pool.queues.get_mut(&key(3)).unwrap().pinned = None;
    pool.run(SECOND);
    assert_eq!((pool.cores.len(), pool.moves(), pool.core_of(3)), (2, 2, 0), "it is emptied, and stays");
}

#[test]
fn the_minimum_and_the_maximum_hold() {
    let mut pool = Simulation::new(1, PoolSettings { min_cores: 3, max_cores: 5, ..PoolSettings::default() });
    pool.step();
    assert_eq!(pool.cores.len(), 3);
    assert!(matches!(pool.decisions[0].1, Decision::Grow { reason: GrowReason::BelowMinimum, .. }));
    (0..40).for_each(|device| {
        pool.add(device, 0, 900);
    });
    pool.run(10 * SECOND);
    assert_eq!(pool.cores.len(), 5);
    pool.set(up_to(2));
    pool.run(10 * SECOND);
    assert_eq!(pool.cores.len(), 2);
    let above =
        |d: &(u64, Decision)| matches!(d.1, Decision::Shrink { reason: ShrinkReason::AboveMaximum, .. });
    assert_eq!(pool.decisions.iter().filter(|d| above(d)).count(), 3);
}

#[test]
fn a_thundering_herd_is_spread_within_a_second() {
    let mut pool = Simulation::new(1, up_to(8));
    (0..200).for_each(|device| {
        pool.add(device, 0, 1);
    });
    pool.run(SECOND);
    assert_eq!(pool.counts(), 0, "all idle but for a bit: {:?}", pool.decisions.first());
    pool.queues.values_mut().for_each(|queue| queue.wants = 25);
    let before = pool.now;
    while pool.served_permille() < 990 {
        pool.step();
        assert!(pool.now < before + SECOND, "{} permille after a second", pool.served_permille());
    }
    pool.run(10 * SECOND);
    let moves = pool.moves();
    pool.run(10 * SECOND);
    assert_eq!(pool.moves(), moves, "a steady load is left alone");
}

#[test]
fn a_load_that_comes_and_goes_does_not_move_queues_for_ever() {
    // The queues of the first core and those of the second are at work in turn, more than either can carry, at periods from that of the planner to half a minute.
    for half in [1, 2, 5, 10, 50, 200, 750] {
        let mut pool = Simulation::new(2, up_to(3));
        (0..8).for_each(|device| {
            pool.add(device, device / 4, 0);
        });
        for tick in 0..6000 {
            for (key, queue) in &mut pool.queues {
                queue.wants = if tick / half % 2 == u64::from(key.device / 4) { 300 } else { 5 };
            }
            pool.step();
        }
        let (moves, counts) = (pool.moves(), pool.counts());
        println!(
            "halves of {} ms: {moves} moves and {counts} changes of the number of cores in 2 minutes",
            half * 20
        );
        assert!(moves <= 40, "halves of {half}: {moves} moves");
        assert!(counts <= 8, "halves of {half}: {counts} changes of the number of cores");
    }
}

#[test]
fn noise_moves_nothing() {
    let mut pool = Simulation::new(3, PoolSettings { min_cores: 3, ..up_to(3) });
    (0..12).for_each(|device| {
        pool.add(device, device % 3, 0);
    });
    let mut rng = Rng::new(5);
    for _ in 0..3000 {
        pool.queues.values_mut().for_each(|queue| queue.wants = 100 + (rng.next() % 60) as u32);
        pool.step();
    }
    assert!(pool.moves() <= 4, "{}", pool.moves());
}

#[test]
fn a_queue_hotter_than_a_core_gets_one_and_the_others_leave() {
    let mut pool = Simulation::new(1, up_to(4));
    pool.add(0, 0, 5000);
    (1..5).for_each(|device| {
        pool.add(device, 0, 60);
    });
    pool.run(3 * SECOND);
    let hot = pool.core_of(0);
    assert!((1..5).all(|device| pool.core_of(device) != hot), "{:?}", pool.decisions);
    assert_eq!(pool.cores.len(), 2, "one core more, and not all there may be");
    let stuck = Decision::Stuck { queue: key(0), reason: StuckReason::HotterThanACore };
    assert!(pool.decisions.iter().any(|(_, decision)| *decision == stuck));
    // Alone, it does not wander.
    let moves = pool.moves();
    pool.run(20 * SECOND);
    assert_eq!(pool.moves(), moves);
    assert!(
        pool.decisions.iter().filter(|(_, decision)| *decision == stuck).count() <= 4,
        "said again and again"
    );
}

#[test]
fn a_hot_queue_at_the_maximum_keeps_its_neighbours_and_says_so() {
    let mut pool = Simulation::new(1, up_to(1));
    pool.add(0, 0, 20_000);
    (1..4).for_each(|device| {
        pool.add(device, 0, 500);
    });
    pool.run(2 * SECOND);
    assert_eq!((pool.moves(), pool.cores.len()), (0, 1));
    assert!(pool.decisions.iter().any(|(_, decision)| matches!(decision, Decision::Stuck { .. })));
}

#[test]
fn a_silent_disk_is_tried_less_and_less_and_disturbs_nobody() {
    let mut pool = Simulation::new(2, up_to(2));
    pool.add(0, 1, 0).silent = true;
    (1..6).for_each(|device| {
        pool.add(device, 1, 50);
    });
    pool.cores.get_mut(&1).unwrap().1 = CoreUse::Draining;
    pool.run(120 * SECOND);
    assert_eq!(pool.core_of(0), 1);
    assert!((1..6).all(|device| pool.core_of(device) == 0));
    let tried = pool
        .decisions
        .iter()
        .filter(|(_, d)| matches!(d, Decision::Move { queue, .. } if queue.device == 0))
        .count();
    assert!((5..=9).contains(&tried), "tried {tried} times in two minutes");
    let told =
        |d: &(u64, Decision)| matches!(d.1, Decision::Stuck { reason: StuckReason::NotQuiet { .. }, .. });
    assert_eq!(pool.decisions.iter().filter(|d| told(d)).count(), tried);
    // The disk answers again.
    pool.queues.get_mut(&key(0)).unwrap().silent = false;
    pool.run(61 * SECOND);
    assert_eq!(pool.core_of(0), 0);
}

#[test]
fn a_load_that_follows_the_queues_that_are_moved_moves_them_less_and_less() {
    // Whatever is done is wrong a moment later: the core that gets a queue gets all of the load with it.
    let mut pool = Simulation::new(2, PoolSettings { min_cores: 2, ..up_to(2) });
    (0..8).for_each(|device| {
        pool.add(device, device % 2, 50);
    });
    let mut seen = 0;
    for _ in 0..6000 {
        let last = pool.decisions[seen..].iter().rev().find_map(|(_, decision)| match decision {
            Decision::Move { to, .. } => Some(*to),
            _ => None,
        });
        seen = pool.decisions.len();
        let busy = last.or((pool.now == 0).then_some(0));
        if let Some(busy) = busy {
            pool.queues
                .values_mut()
                .for_each(|queue| queue.wants = if queue.core == busy { 300 } else { 20 });
        }
        pool.step();
    }
    // Each of the eight may be moved at 0, 0.25, 0.75, 1.75, 3.75 ... 63.75 s, and then every minute.
    println!("{} moves in two minutes", pool.moves());
    assert!((1..=8 * 10).contains(&pool.moves()), "{}", pool.moves());
    let half =
        pool.decisions.iter().filter(|(at, d)| *at > 60 * SECOND && matches!(d, Decision::Move { .. }));
    assert!(half.count() <= 8 * 2, "they do not come to rest");
}

#[test]
fn a_herd_that_comes_again_and_again_finds_the_cores_that_it_needs() {
    let mut pool = Simulation::new(1, up_to(8));
    (0..200).for_each(|device| {
        pool.add(device, 0, 0);
    });
    // Cores go in half a minute of silence, and are there within a second each time.
    for time in 0..2 {
        pool.queues.values_mut().for_each(|queue| queue.wants = 25);
        pool.run(SECOND);
        assert!(
            pool.served_permille() >= 990,
            "time {time}: {} permille after a second",
            pool.served_permille()
        );
        pool.run(4 * SECOND);
        pool.queues.values_mut().for_each(|queue| queue.wants = 0);
        pool.run(30 * SECOND);
        assert!(pool.cores.len() <= 2, "time {time}: {} cores for nothing", pool.cores.len());
    }
}

#[test]
fn the_hottest_queue_changes_and_none_is_starved_for_long() {
    let mut pool = Simulation::new(1, up_to(3));
    (0..6).for_each(|device| {
        pool.add(device, 0, 0);
    });
    let mut rng = Rng::new(11);
    for time in 0..20 {
        let hot = (rng.next() % 6) as u32;
        for (key, queue) in &mut pool.queues {
            queue.wants = if key.device == hot { 5000 } else { 80 };
        }
        pool.run(SECOND);
        // Whoever is moved rests, but not beside one that takes the whole core for longer than the others can bear.
        let got = pool.loads();
        let starved = got.iter().filter(|(key, load)| key.device != hot && **load < 70).count();
        pool.run(4 * SECOND);
        let got = pool.loads();
        let later = got.iter().filter(|(key, load)| key.device != hot && **load < 70).count();
        println!("time {time}: queue {hot} is hot; starved after a second {starved}, after five {later}");
        assert!(later <= 1, "time {time}: {later} starved beside queue {hot}: {got:?}");
    }
    assert!(pool.moves() <= 20 * 6, "{}", pool.moves());
}

#[test]
fn disks_that_all_go_silent_at_once_are_tried_rarely_and_come_back() {
    let mut pool = Simulation::new(4, up_to(4));
    (0..40).for_each(|device| {
        pool.add(device, device % 4, 60);
    });
    pool.run(SECOND);
    // Silent, they use nothing, so that cores are to end, and no queue leaves one.
    for queue in pool.queues.values_mut() {
        (queue.silent, queue.wants) = (true, 0);
    }
    let before = pool.moves();
    pool.run(120 * SECOND);
    let tried = pool.moves() - before;
    assert!((1..=40 * 8).contains(&tried), "{tried} tries");
    assert!(!pool.cores.is_empty());
    let used: BTreeSet<u32> = pool.queues.values().map(|queue| queue.core).collect();
    assert!(used.iter().all(|core| pool.cores.contains_key(core)), "a core ended under its queues");
    for queue in pool.queues.values_mut() {
        (queue.silent, queue.wants) = (false, 60);
    }
    pool.run(61 * SECOND);
    assert!(pool.served_permille() >= 990, "{} permille", pool.served_permille());
}

#[test]
fn pins_reservations_and_drains_are_obeyed_and_kept() {
    let mut pool = Simulation::new(4, PoolSettings { min_cores: 3, ..up_to(4) });
    (0..8).for_each(|device| {
        pool.add(device, 0, 100);
    });
    pool.queues.get_mut(&key(7)).unwrap().pinned = Some(3);
    pool.queues.get_mut(&key(6)).unwrap().pinned = Some(2);
    pool.cores.get_mut(&1).unwrap().1 = CoreUse::Reserved(GroupId(5));
    pool.cores.get_mut(&3).unwrap().1 = CoreUse::Draining;
    pool.run(SECOND);
    assert_eq!((pool.core_of(7), pool.core_of(6), pool.core_of(5)), (3, 2, 1));
    assert!((0..5).all(|device| [0, 2].contains(&pool.core_of(device))));
    let reason = |device: u32| {
        pool.decisions.iter().find_map(|(_, d)| match d {
            Decision::Move { queue, reason, .. } if queue.device == device => Some(*reason),
            _ => None,
        })
    };
    assert_eq!((reason(7), reason(5)), (Some(MoveReason::Pinned), Some(MoveReason::Reserved)));
    let readings = pool.readings();
    let place = |group| pool.planner.place(&readings, &pool.topology, GroupId(group), None);
    assert_eq!(place(5), Some(1));
    assert!([Some(0), Some(2)].contains(&place(99)));
}

/// Eight processors, two to a physical core, on two nodes: 0, 1, 4, 5 and 2, 3, 6, 7.
fn two_nodes() -> CpuTopology {
    let root = tempfile::tempdir().unwrap();
    let system = root.path().join("devices/system");
    let write = |path: &str, text: &str| {
        let path = system.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("cpu/online", "0-7");
    (0..8).for_each(|cpu| {
        write(&format!("cpu/cpu{cpu}/topology/thread_siblings_list"), &format!("{},{}", cpu % 4, cpu % 4 + 4))
    });
    write("node/node0/cpulist", "0-1,4-5");
    write("node/node1/cpulist", "2-3,6-7");
    CpuTopology::read(root.path()).unwrap()
}

#[test]
fn a_queue_that_a_full_core_sends_away_is_not_fetched_again() {
    // More than a calm core has, and less than a full one.
    for permille in [700, 720, 750, 780, 800] {
        let mut pool = Simulation::new(2, PoolSettings { min_cores: 2, ..up_to(2) });
        pool.topology = two_nodes();
        pool.cores.insert(0, (Some(0), CoreUse::Open));
        pool.cores.insert(1, (Some(2), CoreUse::Open));
        (0..10).for_each(|device| pool.add(device, 0, permille / 10).node = Some(0));
        pool.run(300 * SECOND);
        let moves = pool.decisions.iter().filter(|(_, d)| matches!(d, Decision::Move { .. })).count();
        assert!(moves <= 10, "{permille}: {moves} moves of 10 queues in 5 minutes");
    }
}

#[test]
fn cores_and_queues_stay_on_the_node_of_the_memory() {
    let topology = two_nodes();
    let settings = PoolSettings { cpus: (0..8).collect(), ..up_to(4) };
    let mut pool = Simulation::new(1, settings);
    pool.topology = topology;
    pool.cores.insert(0, (Some(0), CoreUse::Open));
    (0..6).for_each(|device| pool.add(device, 0, 200).node = Some(1));
    pool.run(5 * SECOND);
    // Both physical cores of node 1 before anything else.
    let cpus: BTreeSet<u32> = pool.cores.values().filter_map(|(cpu, _)| *cpu).collect();
    assert!(cpus.contains(&2), "{cpus:?}");
    assert!(!cpus.iter().any(|cpu| *cpu >= 4), "a sibling of a core in use: {cpus:?}");
    let home = pool
        .queues
        .values()
        .filter(|queue| pool.cores[&queue.core].0.is_some_and(|cpu| cpu == 2 || cpu == 3))
        .count();
    assert!(home >= 4, "{home} of 6 at home");
}

#[test]
fn the_same_readings_give_the_same_decisions() {
    let trace = || {
        let mut pool = Simulation::new(2, up_to(6));
        let mut rng = Rng::new(9);
        (0..30).for_each(|device| {
            pool.add(device, device % 2, 0);
        });
        for tick in 0..1500 {
            if tick % 40 == 0 {
                pool.queues.values_mut().for_each(|queue| queue.wants = (rng.next() % 400) as u32);
            }
            pool.step();
        }
        pool.decisions
    };
    assert_eq!(trace(), trace());
}
