//! Reserved parts of a limit, on a made-up clock: whoever has one gets it while others flood, nobody gets more than there is, and what is not used is not
//! lost.

mod sim;

use std::num::NonZeroU64;
use std::sync::Arc;

use ioplane_scheduler::{LimitSet, LimitUnit, RateBucket, RateLimit};
use sim::Rng;

const SECOND: u64 = 1_000_000_000;

fn bucket(per_second: u64, burst: u64) -> Arc<RateBucket> {
    Arc::new(RateBucket::new(RateLimit { per_second: NonZeroU64::new(per_second).unwrap(), burst }))
}

/// One queue: its limits, and how it asks.
struct Client {
    limits: LimitSet,
    bytes: u64,
    /// Time between two requests that it has; 0 for a flood.
    every: u64,
    /// When its next request comes.
    next: u64,
    /// When it looks at its limits again.
    looks: u64,
    passed: u64,
}

impl Client {
    fn new(limits: LimitSet, bytes: u64, per_second: u64) -> Client {
        let every = SECOND.checked_div(per_second).unwrap_or(0);
        Client { limits, bytes, every, next: 0, looks: 0, passed: 0 }
    }
}

/// Lets all clients ask until `until`, each some 10 us late, as cores are.
fn run(clients: &mut [Client], from: u64, until: u64, rng: &mut Rng) {
    clients.iter_mut().for_each(|client| {
        client.passed = 0;
        client.next = client.next.max(from);
        client.looks = client.looks.max(from);
    });
    loop {
        let due = |client: &Client| client.next.max(client.looks);
        let Some(client) = clients.iter_mut().min_by_key(|client| due(client)) else { return };
        let now = due(client);
        if now >= until {
            return;
        }
        match client.limits.admit(now, client.bytes) {
            Ok(()) => {
                client.passed += 1;
                client.next = if client.every == 0 { now } else { client.next + client.every };
                client.looks = now;
            }
            Err(at) => {
                assert!(at > now, "told to try again at once");
                client.looks = at + rng.next() % 10_000;
            }
        }
    }
}

fn set(whole: &[(LimitUnit, &Arc<RateBucket>)], reserved: &[(LimitUnit, &Arc<RateBucket>)]) -> LimitSet {
    let mut set = LimitSet::default();
    for (unit, bucket) in whole {
        let added = match reserved.iter().find(|(of, _)| of == unit) {
            Some((_, reserved)) => set.add_reserved(*unit, (*bucket).clone(), (*reserved).clone()),
            None => set.add(*unit, (*bucket).clone()),
        };
        assert!(added);
    }
    set
}

/// Whether `got` is `wanted` with 5 % less at most, and as many more.
fn about(got: u64, wanted: u64) -> bool {
    got * 100 >= wanted * 95 && got * 100 <= wanted * 105
}

#[test]
fn a_reserved_rate_holds_under_flood_and_the_capacity_is_kept() {
    let whole = bucket(10_000, 1000);
    let [six, one] = [bucket(6000, 600), bucket(1000, 100)];
    let requests =
        |reserved: &[(LimitUnit, &Arc<RateBucket>)]| set(&[(LimitUnit::Requests, &whole)], reserved);
    let mut clients = vec![
        Client::new(requests(&[(LimitUnit::Requests, &six)]), 4096, 6000),
        Client::new(requests(&[(LimitUnit::Requests, &one)]), 4096, 1000),
    ];
    // Thirty that have reserved nothing and always ask.
    clients.extend((0..30).map(|_| Client::new(requests(&[]), 4096, 0)));
    let mut rng = Rng::new(7);
    // Bursts are gone after this.
    run(&mut clients, 0, SECOND, &mut rng);
    for second in 1..20 {
        run(&mut clients, second * SECOND, (second + 1) * SECOND, &mut rng);
        let [first, second] = [clients[0].passed, clients[1].passed];
        let others: u64 = clients[2..].iter().map(|client| client.passed).sum();
        assert!(about(first, 6000) && about(second, 1000), "{first}, {second}, others {others}");
        assert!(about(first + second + others, 10_000), "{first}, {second}, others {others}");
    }
}

#[test]
fn more_than_is_reserved_comes_from_what_is_left() {
    let whole = bucket(10_000, 1000);
    let reserved = bucket(6000, 600);
    let requests =
        |reserved: &[(LimitUnit, &Arc<RateBucket>)]| set(&[(LimitUnit::Requests, &whole)], reserved);
    let mut rng = Rng::new(9);
    // All that there is while nobody else asks, although a part of it is reserved for another.
    let mut alone = vec![Client::new(requests(&[]), 4096, 0)];
    run(&mut alone, 0, SECOND, &mut rng);
    run(&mut alone, SECOND, 5 * SECOND, &mut rng);
    assert!(about(alone[0].passed, 40_000), "{}", alone[0].passed);
    // Both ask for all: the one that has reserved gets that, and a part of the rest.
    let mut both = vec![
        Client::new(requests(&[(LimitUnit::Requests, &reserved)]), 4096, 0),
        Client::new(requests(&[]), 4096, 0),
    ];
    run(&mut both, 5 * SECOND, 6 * SECOND, &mut rng);
    run(&mut both, 6 * SECOND, 16 * SECOND, &mut rng);
    let [holder, other] = [both[0].passed, both[1].passed];
    assert!(holder * 100 >= 60_000 * 95 && about(holder + other, 100_000), "{holder}, {other}");
    // A flooder of whom nothing is left starves nobody: what is not reserved is for all.
    assert!(other > 1000, "{holder}, {other}");
}

#[test]
fn bytes_are_reserved_apart_from_requests() {
    let (requests, bytes) = (bucket(100_000, 1000), bucket(100 << 20, 10 << 20));
    let reserved = bucket(60 << 20, 6 << 20);
    let whole = [(LimitUnit::Requests, &requests), (LimitUnit::Bytes, &bytes)];
    // 60 MiB a second in requests of 4 KiB, against others with requests of 256 KiB.
    let mut clients =
        vec![Client::new(set(&whole, &[(LimitUnit::Bytes, &reserved)]), 4096, (60 << 20) / 4096)];
    clients.extend((0..8).map(|_| Client::new(set(&whole, &[]), 256 << 10, 0)));
    let mut rng = Rng::new(11);
    run(&mut clients, 0, SECOND, &mut rng);
    run(&mut clients, SECOND, 11 * SECOND, &mut rng);
    let holder = clients[0].passed * 4096;
    let others: u64 = clients[1..].iter().map(|client| client.passed * client.bytes).sum();
    assert!(about(holder, 600 << 20), "{} MiB, others {} MiB", holder >> 20, others >> 20);
    assert!(about(holder + others, 1000 << 20), "{} MiB, others {} MiB", holder >> 20, others >> 20);
}

#[test]
fn a_place_that_is_given_back_leaves_both_buckets_as_they_were() {
    let (whole, reserved) = (bucket(100, 10), bucket(50, 5));
    let set = set(&[(LimitUnit::Requests, &whole)], &[(LimitUnit::Requests, &reserved)]);
    // Both have something: the reserved one is drawn from. Then neither has: whichever has something first.
    for taken in [0, 200, 400] {
        for _ in 0..taken {
            let _ = set.admit(SECOND, 512);
        }
        let before = (whole.ready_at(), reserved.ready_at());
        let place = set.reserve(SECOND, 0);
        assert!(place.at <= before.0.max(before.1).max(SECOND) + SECOND, "{place:?}");
        assert_ne!((whole.ready_at(), reserved.ready_at()), before);
        set.cancel(place, 0);
        // A bucket that was full counts from now on, to a tick.
        let near = |now: u64, before: u64| now.abs_diff(before) <= 1 || before < SECOND && now <= SECOND;
        assert!(near(whole.ready_at(), before.0) && near(reserved.ready_at(), before.1), "{before:?}");
    }
}

#[test]
fn a_flush_of_a_holder_waits_for_its_own_rate_and_not_for_the_flood() {
    let (whole, reserved) = (bucket(100, 1), bucket(50, 1));
    let holder = set(&[(LimitUnit::Requests, &whole)], &[(LimitUnit::Requests, &reserved)]);
    let other = set(&[(LimitUnit::Requests, &whole)], &[]);
    // Others have taken places for the next ten seconds.
    (0..1000).for_each(|_| {
        other.reserve(0, 0);
    });
    for number in 0..20u64 {
        let at = holder.reserve(0, 0).at;
        assert!(at <= (number + 1) * SECOND / 50, "flush {number} waits until {at}");
    }
}
