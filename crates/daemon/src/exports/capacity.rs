//! What all clients of an export may do together, and what of that is kept for some of them
//! (docs/decisions/0063-capacity-and-reservations.md).
//!
//! The buckets are those of the limits of disks. One pair is the whole export's; a client that has reserved has one of its own besides.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ioplane_api::report::ReservationReport;
use ioplane_api::size::Size;
use ioplane_api::spec::LimitsSpec;
use ioplane_device::clock::since_epoch;
use ioplane_nbd::reserve::{ReserveQuery, ReserveReply};
use ioplane_scheduler::{Capacity, LimitSet, LimitUnit, ReservedRates, Shortage};
use ioplane_virtio::DeviceLimits;
use serde::{Deserialize, Serialize};

use crate::lower::limit;
use crate::small_file;

/// Clients that may have reserved something at a time.
const MOST: usize = 256;
/// Of those, how many are named in a refusal.
const NAMED: usize = 3;
/// Clients whose last question is remembered; beyond that, the oldest is forgotten.
const MOST_ORDERS: usize = 4 * MOST;
/// For how long: a question that comes late is of a handshake that began before, and has ended within 10 s of that.
const ORDER_HOLDS: Duration = Duration::from_secs(60);
/// More than the file of so many has.
const LONGEST_FILE: usize = 1 << 20;

/// What one client has reserved, as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    holder: String,
    name: String,
    requests: u64,
    bytes: u64,
    /// When it was granted, in seconds since 1970.
    since: u64,
}

impl Record {
    fn rates(&self) -> ReservedRates {
        ReservedRates { requests: self.requests, bytes: self.bytes }
    }
}

/// What is in the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "version")]
enum Kept {
    #[serde(rename = "1")]
    V1 { reservations: Vec<Record> },
}

/// Where reservations outlive this process and the host's run.
#[derive(Debug, Clone)]
pub struct ReservationFile {
    folder: PathBuf,
    file: PathBuf,
}

impl ReservationFile {
    /// Of the export of that name at that socket, by which two daemons with one state directory are told apart.
    pub fn new(state_dir: &Path, socket: &Path, export: &str) -> ReservationFile {
        let folder = state_dir.join("reservations");
        let name = small_file::hash(&[socket.as_os_str().as_encoded_bytes(), export.as_bytes()], 16);
        ReservationFile { file: folder.join(name), folder }
    }

    /// What was written down. Blocks.
    fn read(&self) -> Vec<Record> {
        let bytes = small_file::read_up_to(&self.file, LONGEST_FILE).map_err(|error| error.to_string());
        let kept = bytes.and_then(|bytes| {
            let kept = bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose();
            kept.map_err(|error| error.to_string())
        });
        match kept {
            Ok(None) => Vec::new(),
            Ok(Some(Kept::V1 { reservations })) => reservations,
            Err(error) => {
                // A disk that cannot be used would be worse than one whose rate is not kept for it.
                tracing::warn!(file = %self.file.display(), error, "reservations cannot be read, and are forgotten");
                Vec::new()
            }
        }
    }

    fn write(&self, reservations: Vec<Record>) -> Result<(), String> {
        let os = |error: std::io::Error| format!("{}: {error}", self.file.display());
        if reservations.is_empty() {
            return match std::fs::remove_file(&self.file) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(os(error)),
                _ => Ok(()),
            };
        }
        let text = serde_json::to_vec(&Kept::V1 { reservations }).map_err(|error| error.to_string())?;
        small_file::replace(&self.folder, &self.file, &text).map_err(os)
    }

    /// The export is gone, and with it what was reserved of it.
    pub fn remove(&self) {
        if let Err(error) = self.write(Vec::new()) {
            tracing::warn!(error, "reservations of an export that is gone are still noted");
        }
    }
}

/// One reservation.
#[derive(Debug)]
struct Reserved {
    record: Record,
    limits: DeviceLimits,
}

impl Reserved {
    /// Empty: who gave its part back and asks for it again has no burst twice.
    fn new(record: Record) -> Reserved {
        let (mut limits, spec) = (DeviceLimits::default(), spec_of(record.rates()));
        limit(&mut limits, &spec);
        let now = since_epoch(Instant::now());
        for (unit, bucket) in limits.own() {
            let limit = if unit == LimitUnit::Requests { spec.rate() } else { spec.bandwidth() };
            bucket.reserve(now, limit.map_or(0, |(_, burst)| burst));
        }
        Reserved { record, limits }
    }
}

/// A reserved rate has the burst that a limit has of which nothing is said.
fn spec_of(rates: ReservedRates) -> LimitsSpec {
    let some = |rate: u64| (rate > 0).then_some(rate);
    LimitsSpec { rate: some(rates.requests), bandwidth: some(rates.bytes).map(Size), ..LimitsSpec::default() }
}

/// So much of a unit, for people.
fn words(unit: LimitUnit, amount: u64) -> String {
    match unit {
        LimitUnit::Requests => amount.to_string(),
        LimitUnit::Bytes => Size(amount).to_string(),
    }
}

/// So much of a unit per second, for people.
fn rate_words(unit: LimitUnit, amount: u64) -> String {
    match unit {
        LimitUnit::Requests => format!("{amount} requests per second"),
        LimitUnit::Bytes => format!("{} per second", Size(amount)),
    }
}

fn of(unit: LimitUnit, rates: ReservedRates) -> u64 {
    match unit {
        LimitUnit::Requests => rates.requests,
        LimitUnit::Bytes => rates.bytes,
    }
}

/// The capacity of one export.
#[derive(Debug)]
pub struct ExportCapacity {
    declared: LimitsSpec,
    /// Of all clients together.
    whole: DeviceLimits,
    /// By holder.
    reserved: BTreeMap<String, Reserved>,
    /// The number of the last question of each holder, and when it came. An exporter that starts again has no connection that could bring an older one.
    orders: BTreeMap<String, (u64, Instant)>,
    /// One client at a time uses the export, so that each may reserve all of it.
    exclusive: bool,
    file: ReservationFile,
}

impl ExportCapacity {
    /// As it was declared, with the reservations that were written down. Those that do not fit any more are dropped. Blocks.
    pub fn open(declared: &LimitsSpec, exclusive: bool, file: ReservationFile) -> Self {
        let mut whole = DeviceLimits::default();
        limit(&mut whole, declared);
        let (reserved, orders) = Default::default();
        let mut capacity = ExportCapacity { declared: *declared, whole, reserved, orders, exclusive, file };
        let mut records = capacity.file.read();
        let noted = records.len();
        records.sort_by_key(|record| record.since);
        for record in records.into_iter().take(MOST) {
            match capacity.admit(&record.holder, record.rates()) {
                Ok(()) => {
                    capacity.reserved.insert(record.holder.clone(), Reserved::new(record));
                }
                Err(shortage) => {
                    let (holder, why) =
                        (&record.name, capacity.refusal(&record.holder, &record.name, shortage));
                    tracing::warn!(holder, why, "a reservation does not fit any more, and is dropped");
                }
            }
        }
        let kept: Vec<Record> = capacity.reserved.values().map(|reserved| reserved.record.clone()).collect();
        // Or they would be back after the next start.
        if kept.len() < noted
            && let Err(error) = capacity.file.write(kept)
        {
            tracing::warn!(error, "reservations that were dropped are still noted");
        }
        capacity
    }

    fn capacity(declared: &LimitsSpec) -> Capacity {
        let (requests, bytes) = (declared.rate, declared.bandwidth.map(|size| size.0));
        Capacity { requests, bytes }
    }

    /// What is reserved at a time by others than `holder`.
    fn others(&self, holder: &str) -> ReservedRates {
        let others = self.reserved.iter().filter(|(other, _)| !self.exclusive && *other != holder);
        others.map(|(_, reserved)| reserved.record.rates()).sum()
    }

    fn admit(&self, holder: &str, asked: ReservedRates) -> Result<(), Shortage> {
        Self::capacity(&self.declared).admit(self.others(holder), asked)
    }

    /// Why `holder`, called `name`, does not get it.
    fn refusal(&self, holder: &str, name: &str, shortage: Shortage) -> String {
        let Shortage { unit, asked, free, capacity } = shortage;
        let asks = format!("{name} asks for {}", rate_words(unit, asked));
        let Some(capacity) = capacity else {
            let which = if unit == LimitUnit::Requests { "requests" } else { "bytes" };
            return format!(
                "{asks}, and the export declares no capacity in {which} per second: nothing can be reserved"
            );
        };
        let mut others: Vec<(u64, &str)> = self
            .reserved
            .iter()
            .filter(|(other, _)| !self.exclusive && *other != holder)
            .map(|(_, other)| (of(unit, other.record.rates()), other.record.name.as_str()))
            .filter(|(amount, _)| *amount > 0)
            .collect();
        others.sort_by_key(|(amount, _)| std::cmp::Reverse(*amount));
        let (free, capacity) = (words(unit, free), words(unit, capacity));
        if others.is_empty() {
            return format!("{asks}, and the capacity is {capacity}");
        }
        let named: Vec<String> = others
            .iter()
            .take(NAMED)
            .map(|(amount, name)| format!("{name} {}", words(unit, *amount)))
            .collect();
        let more = match others.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("{asks}, {free} of {capacity} are free: reserved by {}{more}", named.join(", "))
    }

    /// Another capacity from now on, if all that is reserved fits into it; otherwise why not.
    pub fn change(&mut self, declared: &LimitsSpec) -> Result<(), String> {
        if let Err(Shortage { unit, asked, capacity, .. }) =
            Self::capacity(declared).admit(ReservedRates::default(), self.taken())
        {
            let new = capacity.map_or("no limit".to_owned(), |capacity| rate_words(unit, capacity));
            let taken = words(unit, asked);
            return Err(format!("{new}, of which {taken} are reserved: see `ioplane publish show`"));
        }
        self.declared = *declared;
        limit(&mut self.whole, declared);
        Ok(())
    }

    /// How much of it is reserved. Where one client at a time uses the export that is the largest reservation.
    pub fn taken(&self) -> ReservedRates {
        let all = self.reserved.values().map(|reserved| reserved.record.rates());
        match self.exclusive {
            false => all.sum(),
            true => all.fold(ReservedRates::default(), |most, one| ReservedRates {
                requests: most.requests.max(one.requests),
                bytes: most.bytes.max(one.bytes),
            }),
        }
    }

    /// What is reserved for `holder`.
    pub fn reserved_for(&self, holder: &str) -> ReservedRates {
        self.reserved.get(holder).map_or_else(ReservedRates::default, |reserved| reserved.record.rates())
    }

    /// Whether this is no older than the last question of the holder: an older one was given up, and may come late. 0: a client that numbers none. After a while
    /// any number will do: the clock of its host may have been set back.
    fn is_in_order(&mut self, holder: &str, order: u64, now: Instant) -> bool {
        if order == 0 {
            return true;
        }
        let last = self.orders.get(holder).copied();
        if last.is_some_and(|(last, came)| order < last && now.saturating_duration_since(came) < ORDER_HOLDS)
        {
            return false;
        }
        if last.is_none()
            && self.orders.len() >= MOST_ORDERS
            && let Some(oldest) =
                self.orders.iter().min_by_key(|(_, (_, came))| *came).map(|(holder, _)| holder.clone())
        {
            self.orders.remove(&oldest);
        }
        self.orders.insert(holder.to_owned(), (order, now));
        true
    }

    /// Reserves what a client asks for, in place of what it had. `order`: the number of the question. `now`: seconds since 1970. Blocks.
    pub fn reserve(&mut self, query: &ReserveQuery, order: u64, now: u64) -> ReserveReply {
        let ReserveQuery { holder, rates, name } = query;
        if !self.is_in_order(holder, order, Instant::now()) {
            return ReserveReply::Refused(format!(
                "{name} has asked again since; if its host's clock was set back: try again in a minute"
            ));
        }
        if let Err(shortage) = self.admit(holder, *rates) {
            return ReserveReply::Refused(self.refusal(holder, name, shortage));
        }
        let before = self.reserved.get(holder);
        if !rates.is_none() && before.is_none() && self.reserved.len() >= MOST {
            return ReserveReply::Refused(format!(
                "{MOST} clients have reserved already, no more are admitted"
            ));
        }
        // Asked for anew after each start of the client.
        if self.reserved_for(holder) == *rates {
            return ReserveReply::Granted(*rates);
        }
        let (requests, bytes) = (rates.requests, rates.bytes);
        let record = Record { holder: holder.clone(), name: name.clone(), requests, bytes, since: now };
        let record = (!rates.is_none()).then_some(record);
        let others =
            self.reserved.values().map(|other| &other.record).filter(|other| other.holder != *holder);
        let kept = others.cloned().chain(record.clone()).collect();
        if let Err(why) = self.file.write(kept) {
            return ReserveReply::Refused(format!("the reservation cannot be written down: {why}"));
        }
        match record {
            Some(record) => match self.reserved.get_mut(holder) {
                // What it has drawn stays drawn.
                Some(reserved) => {
                    limit(&mut reserved.limits, &spec_of(*rates));
                    reserved.record = record;
                }
                None => {
                    self.reserved.insert(holder.clone(), Reserved::new(record));
                }
            },
            None => {
                self.reserved.remove(holder);
            }
        }
        ReserveReply::Granted(*rates)
    }

    /// Gives back what was reserved by those of whom `gone` says so; how many they were. Blocks.
    pub fn release(&mut self, gone: impl Fn(&str) -> bool) -> Result<usize, String> {
        let stays =
            self.reserved.values().map(|reserved| &reserved.record).filter(|record| !gone(&record.holder));
        let stays: Vec<Record> = stays.cloned().collect();
        let released = self.reserved.len() - stays.len();
        self.orders.retain(|holder, _| !gone(holder));
        if released > 0 {
            self.file.write(stays)?;
            self.reserved.retain(|holder, _| !gone(holder));
        }
        Ok(released)
    }

    /// The limits of a connection of `holder`, or of somebody whom nobody knows.
    pub fn limits(&self, holder: Option<&str>) -> LimitSet {
        let reserved = holder.and_then(|holder| self.reserved.get(holder));
        let reserved = reserved.map(|reserved| reserved.limits.own()).unwrap_or_default();
        let mut set = LimitSet::default();
        for (unit, bucket) in self.whole.own() {
            let added = match reserved.iter().find(|(of, _)| *of == unit) {
                Some((_, reserved)) => set.add_reserved(unit, bucket, reserved.clone()),
                None => set.add(unit, bucket),
            };
            debug_assert!(added, "an export has two limits");
        }
        set
    }

    /// What is reserved, for people.
    pub fn report(&self) -> Vec<ReservationReport> {
        let report = |Record { name, requests, bytes, since, .. }: &Record| ReservationReport {
            by: name.clone(),
            iops: *requests,
            bandwidth: Size(*bytes),
            since_s: *since,
        };
        self.reserved.values().map(|reserved| report(&reserved.record)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(requests: u64) -> LimitsSpec {
        LimitsSpec { rate: Some(requests), ..LimitsSpec::default() }
    }

    fn query(holder: &str, requests: u64) -> ReserveQuery {
        let rates = ReservedRates { requests, bytes: 0 };
        ReserveQuery { holder: holder.into(), rates, name: format!("disk data of {holder}") }
    }

    fn granted(requests: u64) -> ReserveReply {
        ReserveReply::Granted(ReservedRates { requests, bytes: 0 })
    }

    fn refused(reply: ReserveReply) -> String {
        match reply {
            ReserveReply::Refused(why) => why,
            granted => panic!("{granted}"),
        }
    }

    fn file(folder: &Path) -> ReservationFile {
        ReservationFile::new(folder, Path::new("/run/data.sock"), "data")
    }

    #[test]
    fn a_refusal_names_figures_and_those_who_have_reserved() {
        let folder = tempfile::tempdir().unwrap();
        let mut capacity = ExportCapacity::open(&declared(10_000), false, file(folder.path()));
        assert_eq!(capacity.reserve(&query("host-c", 6000), 0, 1), granted(6000));
        assert_eq!(
            refused(capacity.reserve(&query("host-b", 6000), 0, 2)),
            "disk data of host-b asks for 6000 requests per second, 4000 of 10000 are free: reserved by disk data of host-c 6000"
        );
        assert_eq!(capacity.reserve(&query("host-b", 4000), 0, 2), granted(4000));
        // What one has itself stands in nobody's way.
        assert_eq!(capacity.reserve(&query("host-c", 5000), 0, 3), granted(5000));
        assert_eq!(capacity.reserve(&query("host-c", 6000), 0, 3), granted(6000));
        let bytes =
            ReserveQuery { rates: ReservedRates { requests: 0, bytes: 1 << 20 }, ..query("host-d", 0) };
        assert_eq!(
            refused(capacity.reserve(&bytes, 0, 4)),
            "disk data of host-d asks for 1M per second, and the export declares no capacity in bytes per second: nothing can be reserved"
        );
        let all = refused(capacity.reserve(&query("host-b", 10_001), 0, 4));
        assert!(all.contains("4000 of 10000 are free"), "{all}");
        // Nothing of it can be taken away from below.
        let lower = capacity.change(&declared(9_999)).unwrap_err();
        assert!(lower.contains("9999") && lower.contains("10000 are reserved"), "{lower}");
        assert!(capacity.change(&LimitsSpec::default()).is_err());
        assert_eq!(capacity.reserve(&query("host-c", 0), 0, 5), granted(0));
        assert_eq!(capacity.change(&declared(4000)), Ok(()));
    }

    /// The exporter reads a question whose asker has given up and asked another one, on another connection.
    #[test]
    fn an_older_question_that_comes_late_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut capacity = ExportCapacity::open(&declared(10_000), false, file(folder.path()));
        assert_eq!(capacity.reserve(&query("host-b", 6000), 20, 1), granted(6000));
        for late in [query("host-b", 5000), query("host-b", 0)] {
            let why = refused(capacity.reserve(&late, 19, 2));
            assert!(why.starts_with("disk data of host-b has asked again since"), "{why}");
        }
        assert_eq!(capacity.reserved_for("host-b").requests, 6000);
        // Of another one, and of a client that numbers nothing.
        assert_eq!(capacity.reserve(&query("host-c", 1000), 3, 2), granted(1000));
        assert_eq!(capacity.reserve(&query("host-b", 5000), 0, 2), granted(5000));
        // What has been given back stays so.
        assert_eq!(capacity.reserve(&query("host-b", 0), 21, 3), granted(0));
        refused(capacity.reserve(&query("host-b", 6000), 20, 4));
        assert_eq!(capacity.reserved_for("host-b").requests, 0);
        // A person has taken back all that it had, and so what it has asked.
        assert_eq!(capacity.release(|_| true), Ok(1));
        assert_eq!(capacity.reserve(&query("host-b", 6000), 5, 5), granted(6000));
    }

    /// No question is on its way for longer than that, and its number means nothing any more.
    #[test]
    fn a_host_whose_clock_was_set_back_is_heard_after_a_minute() {
        let folder = tempfile::tempdir().unwrap();
        let mut capacity = ExportCapacity::open(&declared(10_000), false, file(folder.path()));
        let begun = Instant::now();
        let mut asks = |order, after| capacity.is_in_order("host-b", order, begun + after);
        assert!(asks(100, Duration::ZERO));
        // What was refused does not make it longer.
        assert!(!asks(7, Duration::from_secs(30)) && !asks(7, ORDER_HOLDS - Duration::from_millis(1)));
        assert!(asks(7, ORDER_HOLDS));
        assert!(!asks(6, ORDER_HOLDS + Duration::from_secs(11)) && asks(8, ORDER_HOLDS));
    }

    #[test]
    fn numbers_of_strangers_take_a_bounded_place() {
        let folder = tempfile::tempdir().unwrap();
        let mut capacity = ExportCapacity::open(&declared(10_000), false, file(folder.path()));
        let begun = Instant::now();
        for number in 0..2 * MOST_ORDERS as u64 {
            // The later they ask the lower it is.
            let (order, now) = (1_000_000 - number, begun + Duration::from_millis(number));
            assert!(capacity.is_in_order(&format!("h{number}"), order, now));
        }
        assert_eq!(capacity.orders.len(), MOST_ORDERS);
        let last = format!("h{}", 2 * MOST_ORDERS - 1);
        assert!(
            capacity.orders.contains_key(&last) && !capacity.orders.contains_key("h0"),
            "the oldest goes"
        );
    }

    #[test]
    fn reservations_outlive_the_exporter_as_far_as_they_fit() {
        let folder = tempfile::tempdir().unwrap();
        let open = |requests| ExportCapacity::open(&declared(requests), false, file(folder.path()));
        let mut capacity = open(10_000);
        assert_eq!(capacity.reserve(&query("first", 3000), 0, 1), granted(3000));
        assert_eq!(capacity.reserve(&query("second", 5000), 0, 2), granted(5000));
        let by = |capacity: &ExportCapacity| -> Vec<u64> {
            capacity.report().iter().map(|one| one.iops).collect()
        };
        assert_eq!(by(&open(10_000)), [3000, 5000]);
        assert_eq!(by(&open(6000)), [3000], "the one that came later");
        assert_eq!(capacity.release(|holder| holder == "first"), Ok(1));
        assert_eq!(by(&open(10_000)), [5000]);
        assert_eq!(capacity.release(|_| true), Ok(1));
        assert_eq!(by(&open(10_000)), [0u64; 0]);
        assert_eq!(std::fs::read_dir(folder.path().join("reservations")).unwrap().count(), 0);
        // What cannot be read keeps nobody from the disk.
        assert_eq!(capacity.reserve(&query("first", 3000), 0, 1), granted(3000));
        let found = std::fs::read_dir(folder.path().join("reservations")).unwrap().next().unwrap().unwrap();
        std::fs::write(found.path(), b"{\"version\":\"1\",\"reservations\":[{\"hol").unwrap();
        assert_eq!(by(&open(10_000)), [0u64; 0]);
    }

    #[test]
    fn where_one_uses_the_disk_at_a_time_each_may_reserve_all_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut capacity = ExportCapacity::open(&declared(10_000), true, file(folder.path()));
        assert_eq!(capacity.reserve(&query("source", 6000), 0, 1), granted(6000));
        assert_eq!(capacity.reserve(&query("destination", 10_000), 0, 1), granted(10_000));
        let more = refused(capacity.reserve(&query("other", 10_001), 0, 1));
        assert!(more.ends_with("asks for 10001 requests per second, and the capacity is 10000"), "{more}");
        assert!(capacity.change(&declared(9_999)).is_err());
        assert_eq!(capacity.change(&declared(10_000)), Ok(()));
    }

    #[test]
    fn what_is_kept_for_clients_has_a_bound() {
        let folder = tempfile::tempdir().unwrap();
        let mut capacity = ExportCapacity::open(&declared(10_000), false, file(folder.path()));
        for number in 0..MOST {
            assert_eq!(capacity.reserve(&query(&format!("h{number}"), 1), 0, 1), granted(1));
        }
        let more = refused(capacity.reserve(&query("one-more", 1), 0, 1));
        assert!(more.contains("256 clients"), "{more}");
        assert_eq!(capacity.reserve(&query("h3", 2), 0, 1), granted(2));
        let why = refused(capacity.reserve(&query("h4", 20_000), 0, 1));
        assert!(why.ends_with(" and 252 more"), "{why}");
    }

    #[test]
    fn who_has_reserved_draws_from_that_first_and_others_from_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        let mut capacity = ExportCapacity::open(&declared(10_000), false, file(folder.path()));
        assert_eq!(capacity.reserve(&query("holder", 6000), 0, 1), granted(6000));
        let (holder, other) = (capacity.limits(Some("holder")), capacity.limits(None));
        // What was reserved begins empty, and is full by then.
        let now = since_epoch(Instant::now()) + 1_000_000_000;
        let all = |set: &LimitSet| (0..100_000).take_while(|_| set.admit(now, 512).is_ok()).count();
        // Bursts of a tenth of a second, and one request beyond each.
        assert!((1000..=1001).contains(&all(&other)));
        assert!((600..=601).contains(&all(&holder)), "what is reserved is still there");
        assert_eq!(all(&capacity.limits(Some("somebody"))), 0);
        assert!(
            ExportCapacity::open(&LimitsSpec::default(), false, file(folder.path())).limits(None).is_empty()
        );
    }
}
