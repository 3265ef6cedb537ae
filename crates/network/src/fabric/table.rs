//! Which port an address was last seen at: bounded, shared by all cores, without locks.
//!
//! ```text
//!   set = hash(key), 4 entries, one cache line
//!     key    MAC, VLAN                     0: empty
//!     value  check | slot | generation | moves | tick      written after the key
//! ```
//!
//! An entry is two words, so a reader may see one's key with another's value for a moment. The value has eight bits of its
//! key's hash and the generation of its port, so that it is taken for "unknown" then, and the frame is flooded.
//!
//! Nobody is pushed out: where the four entries of a set are in use and fresh, a new address is not learned. With the limit
//! on each port, a guest that sends from random addresses takes no more than its own share.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::Mac;

/// Entries of a set.
const WAYS: usize = 4;
/// Length of a tick.
const TICK: Duration = Duration::from_millis(250);
/// Moves, less one for each tick without, after which an address is held.
const RESTLESS: u64 = 6;

const TICKS: u64 = (1 << 24) - 1;

/// A moment, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tick(u64);

impl Tick {
    pub fn of(since: Duration) -> Self {
        const A_SECOND: u64 = 1000 / TICK.as_millis() as u64;
        let part = u64::from(since.subsec_millis()) / TICK.as_millis() as u64;
        Tick(since.as_secs().wrapping_mul(A_SECOND).wrapping_add(part) & TICKS)
    }

    fn since(self, earlier: u64) -> u64 {
        self.0.wrapping_sub(earlier) & TICKS
    }
}

/// A place to be seen at: a port's slot, and which of the ports that had that slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub slot: u16,
    pub generation: u16,
}

/// What became of an address that was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    /// It is where it was.
    Known,
    /// It is new, or has moved here.
    Learned,
    /// There is no room for it, or its port has its share: frames to it are flooded.
    NoRoom,
    /// It moves too often, and was last somewhere else: its frames are not to be believed for a while.
    Held,
}

#[derive(Debug, Default)]
#[repr(align(16))]
struct Entry {
    key: AtomicU64,
    value: AtomicU64,
}

#[derive(Debug)]
#[repr(align(64))]
struct Set([Entry; WAYS]);

/// The table of a switch.
#[derive(Debug)]
pub(crate) struct Table {
    sets: Box<[Set]>,
    /// Addresses that each slot has.
    owned: Box<[AtomicU32]>,
    seed: u64,
    ageing: u64,
    hold: u64,
}

fn value(check: u64, place: Place, moves: u64, tick: Tick) -> u64 {
    check << 56 | u64::from(place.slot) << 44 | u64::from(place.generation) << 28 | moves << 24 | tick.0
}

fn place_of(value: u64) -> Place {
    Place { slot: (value >> 44) as u16 & 0xfff, generation: (value >> 28) as u16 }
}

fn moves_of(value: u64) -> u64 {
    value >> 24 & 0xf
}

fn tick_of(value: u64) -> u64 {
    value & TICKS
}

fn key_of(mac: Mac, vlan: u16) -> u64 {
    let mac = u64::from_be_bytes([0, 0, mac[0], mac[1], mac[2], mac[3], mac[4], mac[5]]);
    1 << 63 | u64::from(vlan) << 48 | mac
}

impl Table {
    /// Room for about `entries` addresses. `seed` is to be a secret: who knows it can choose addresses that share a set.
    pub fn new(entries: usize, ageing: Duration, hold: Duration, seed: u64) -> Self {
        let sets = (entries / WAYS).clamp(1, 1 << 20).next_power_of_two();
        let ticks = |time: Duration| (time.as_nanos() / TICK.as_nanos()).clamp(1, (TICKS / 2).into()) as u64;
        Table {
            sets: (0..sets).map(|_| Set(Default::default())).collect(),
            owned: (0..crate::MOST_PORTS).map(|_| AtomicU32::new(0)).collect(),
            seed,
            ageing: ticks(ageing),
            hold: ticks(hold),
        }
    }

    /// The set of a key, and its eight bits.
    #[inline]
    fn set(&self, key: u64) -> (&[Entry; WAYS], u64) {
        let mut hash = (key ^ self.seed).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash = (hash ^ hash >> 32 ^ self.seed.rotate_left(17)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        let at = (hash >> 32) as usize & (self.sets.len() - 1);
        (&self.sets[at].0, hash >> 24 & 0xff)
    }

    /// Where `mac` of VLAN `vlan` was last seen, if that is not too long ago.
    #[inline]
    pub fn find(&self, mac: Mac, vlan: u16, now: Tick) -> Option<Place> {
        let key = key_of(mac, vlan);
        let (set, check) = self.set(key);
        let entry = set.iter().find(|entry| entry.key.load(Ordering::Acquire) == key)?;
        let value = entry.value.load(Ordering::Acquire);
        (value >> 56 == check && now.since(tick_of(value)) <= self.ageing).then(|| place_of(value))
    }

    /// `mac` of VLAN `vlan` was seen at `here`, which is to have `share` addresses at most.
    #[inline]
    pub fn saw(&self, mac: Mac, vlan: u16, here: Place, share: u32, now: Tick) -> Seen {
        let key = key_of(mac, vlan);
        let (set, check) = self.set(key);
        match set.iter().find(|entry| entry.key.load(Ordering::Acquire) == key) {
            Some(entry) => self.saw_again(entry, check, here, now),
            None => self.learn(set, key, check, here, share, now),
        }
    }

    #[inline]
    fn saw_again(&self, entry: &Entry, check: u64, here: Place, now: Tick) -> Seen {
        let old = entry.value.load(Ordering::Acquire);
        let age = now.since(tick_of(old));
        let valid = old >> 56 == check && age <= self.ageing;
        if valid && place_of(old) == here {
            if age > 0 {
                // A held address stays held for as long as was said, however lively it is.
                let moves = moves_of(old);
                let held = moves >= RESTLESS && age <= self.hold;
                if !held {
                    let moves = if moves >= RESTLESS { 0 } else { moves.saturating_sub(age) };
                    self.exchange(entry, old, value(check, here, moves, now));
                }
            }
            return Seen::Known;
        }
        let mut moves = 0;
        if valid {
            if moves_of(old) >= RESTLESS && age <= self.hold {
                return Seen::Held;
            }
            moves = if moves_of(old) >= RESTLESS { 1 } else { moves_of(old).saturating_sub(age) + 1 };
        }
        self.exchange(entry, old, value(check, here, moves, now));
        Seen::Learned
    }

    /// Replaces a value, unless somebody else just has: then theirs is as good.
    fn exchange(&self, entry: &Entry, old: u64, new: u64) {
        if entry.value.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.owns(place_of(old).slot, old != 0, place_of(new).slot);
        }
    }

    /// One address goes from one slot (if it was there) to another.
    fn owns(&self, from: u16, was: bool, to: u16) {
        if was {
            // Never below zero, though an entry may be counted a moment late.
            let less = |count: u32| Some(count.saturating_sub(1));
            let _ = self.owned[usize::from(from)].fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        self.owned[usize::from(to)].fetch_add(1, Ordering::Relaxed);
    }

    #[cold]
    fn learn(&self, set: &[Entry; WAYS], key: u64, check: u64, here: Place, share: u32, now: Tick) -> Seen {
        if self.owned[usize::from(here.slot)].load(Ordering::Relaxed) >= share {
            return Seen::NoRoom;
        }
        for entry in set {
            let (old_key, old) = (entry.key.load(Ordering::Acquire), entry.value.load(Ordering::Acquire));
            if old_key != 0 && now.since(tick_of(old)) <= self.ageing {
                continue;
            }
            if entry.key.compare_exchange(old_key, key, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                entry.value.store(value(check, here, 0, now), Ordering::Release);
                self.owns(place_of(old).slot, old_key != 0, here.slot);
                return Seen::Learned;
            }
        }
        Seen::NoRoom
    }

    /// Forgets everything that was seen at `place`. Control side; what is learned meanwhile has a generation that is gone.
    pub fn forget(&self, place: Place) {
        for entry in self.sets.iter().flat_map(|set| &set.0) {
            let (key, value) = (entry.key.load(Ordering::Acquire), entry.value.load(Ordering::Acquire));
            if key != 0
                && place_of(value) == place
                && entry.key.compare_exchange(key, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                entry.value.store(0, Ordering::Release);
            }
        }
        self.owned[usize::from(place.slot)].store(0, Ordering::Relaxed);
    }

    /// Everything that is known and fresh: address, VLAN, place, ticks since it was seen, whether it is held.
    pub fn each(&self, now: Tick) -> impl Iterator<Item = (Mac, u16, Place, Duration, bool)> + '_ {
        self.sets.iter().flat_map(|set| &set.0).filter_map(move |entry| {
            let (key, value) = (entry.key.load(Ordering::Acquire), entry.value.load(Ordering::Acquire));
            let age = now.since(tick_of(value));
            if key == 0 || value >> 56 != self.set(key).1 || age > self.ageing {
                return None;
            }
            let bytes = key.to_be_bytes();
            let mac = [bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]];
            let held = moves_of(value) >= RESTLESS && age <= self.hold;
            Some((mac, (key >> 48) as u16 & 0xfff, place_of(value), TICK * age as u32, held))
        })
    }

    /// Addresses that a slot has.
    pub fn owned(&self, slot: u16) -> u32 {
        self.owned[usize::from(slot)].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Place = Place { slot: 1, generation: 7 };
    const B: Place = Place { slot: 2, generation: 9 };
    const MAC: Mac = [2, 0, 0, 0, 0, 1];

    fn table(entries: usize) -> Table {
        Table::new(entries, Duration::from_secs(300), Duration::from_secs(10), 0x1234_5678_9abc_def0)
    }

    fn at(seconds: u64) -> Tick {
        Tick::of(Duration::from_secs(seconds))
    }

    #[test]
    fn learned_by_vlan_moved_and_aged() {
        let table = table(64);
        assert_eq!(table.find(MAC, 0, at(0)), None);
        assert_eq!(table.saw(MAC, 0, A, 10, at(0)), Seen::Learned);
        assert_eq!(table.saw(MAC, 0, A, 10, at(1)), Seen::Known);
        assert_eq!(table.saw(MAC, 5, B, 10, at(1)), Seen::Learned);
        assert_eq!((table.find(MAC, 0, at(1)), table.find(MAC, 5, at(1))), (Some(A), Some(B)));
        assert_eq!(table.saw(MAC, 0, B, 10, at(2)), Seen::Learned);
        assert_eq!(table.find(MAC, 0, at(2)), Some(B));
        assert_eq!(table.find(MAC, 0, at(302)), Some(B));
        assert_eq!(table.find(MAC, 0, at(303)), None);
        assert_eq!((table.owned(1), table.owned(2)), (0, 2));
        assert_eq!(table.each(at(2)).count(), 2);
    }

    #[test]
    fn an_address_that_flaps_is_held_and_let_go() {
        let table = table(64);
        let mut seen = Vec::new();
        for turn in 0..20 {
            seen.push(table.saw(MAC, 0, if turn % 2 == 0 { A } else { B }, 10, at(1)));
        }
        assert!(seen[..7].iter().all(|seen| *seen == Seen::Learned), "{seen:?}");
        let here = table.find(MAC, 0, at(1)).unwrap();
        let there = if here == A { B } else { A };
        // However lively it is where it stays, it is held for 10 s from then on.
        for second in 2..=11 {
            assert_eq!(table.saw(MAC, 0, here, 10, at(second)), Seen::Known);
            assert_eq!(table.saw(MAC, 0, there, 10, at(second)), Seen::Held);
        }
        assert_eq!(table.saw(MAC, 0, there, 10, at(12)), Seen::Learned);
        assert_eq!(table.find(MAC, 0, at(12)), Some(there));
    }

    #[test]
    fn moves_now_and_then_are_no_loop() {
        let table = table(64);
        for turn in 0..100 {
            let seen = table.saw(MAC, 0, if turn % 2 == 0 { A } else { B }, 10, at(turn));
            assert_eq!(seen, Seen::Learned, "move {turn}");
        }
    }

    #[test]
    fn a_port_has_its_share_and_nobody_is_pushed_out() {
        let table = table(64);
        assert_eq!(table.saw(MAC, 0, B, 10, at(0)), Seen::Learned);
        let mac = |n: u16| [6, 0, 0, 0, (n >> 8) as u8, n as u8];
        let learned = (0..1000).filter(|n| table.saw(mac(*n), 0, A, 20, at(0)) == Seen::Learned).count();
        assert_eq!((learned, table.owned(1)), (20, 20));
        let crowd = (0..1000).filter(|n| table.saw(mac(*n), 1, A, 10_000, at(0)) == Seen::Learned).count();
        assert!(crowd <= 64 - 21, "{crowd} of 64 entries");
        assert_eq!(table.find(MAC, 0, at(0)), Some(B));
        // Those that have aged make room.
        assert_eq!(table.saw(mac(5000), 0, B, 10, at(400)), Seen::Learned);
    }

    #[test]
    fn what_has_gone_is_forgotten() {
        let table = table(64);
        table.saw(MAC, 0, A, 10, at(0));
        table.saw(MAC, 1, B, 10, at(0));
        table.forget(A);
        assert_eq!((table.find(MAC, 0, at(0)), table.find(MAC, 1, at(0))), (None, Some(B)));
        assert_eq!(table.owned(1), 0);
    }

    #[test]
    fn ticks_wrap() {
        let table = table(64);
        let (late, wrapped) = (Tick(TICKS - 1), Tick(3));
        table.saw(MAC, 0, A, 10, late);
        assert_eq!(table.find(MAC, 0, wrapped), Some(A));
    }

    #[test]
    fn many_threads_find_only_places_that_were_said() {
        let table = table(16);
        std::thread::scope(|scope| {
            for slot in 1..4u16 {
                let table = &table;
                scope.spawn(move || {
                    for turn in 0..40_000u32 {
                        // Everyone's addresses fall out of the table and come back all the time.
                        let mac = [2, 0, 0, 0, slot as u8, (turn % 32) as u8];
                        let now = Tick::of(Duration::from_secs(u64::from(turn) * 400));
                        table.saw(mac, 0, Place { slot, generation: slot }, 1000, now);
                        if let Some(place) = table.find(mac, 0, now) {
                            assert_eq!((place.slot, place.generation), (slot, slot));
                        }
                    }
                });
            }
        });
    }
}
