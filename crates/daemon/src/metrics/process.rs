//! The process itself, by the names that all Prometheus client libraries use for it.

use std::sync::LazyLock;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::families::{Families, Family, Labels};

/// What the kernel says of this process. What it does not say is left out.
pub fn write(families: &mut Families<'_, '_>) -> std::fmt::Result {
    fn one<T>(value: Option<T>) -> impl Iterator<Item = (Labels, T)> {
        value.into_iter().map(|value| (Labels::new(), value))
    }
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    let spent = spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9;
    families.counted_seconds(
        Family::seconds("process_cpu", "Processor time of the daemon, all threads"),
        one(Some(spent)),
    )?;
    let [whole, resident] = memory().map_or([None; 2], |pages| pages.map(Some));
    families.gauges(Family::bytes("process_virtual_memory", "Address space of the daemon"), one(whole))?;
    families.gauges(
        Family::bytes(
            "process_resident_memory",
            "Resident memory of the daemon, shared guest memory included",
        ),
        one(resident),
    )?;
    let open = std::fs::read_dir("/proc/self/fd").ok().map(|all| all.count() as i64);
    families.gauges(Family::new("process_open_fds", "Open file descriptors"), one(open))?;
    let most = getrlimit(Resource::Nofile).current.map(|most| most as i64);
    families.gauges(Family::new("process_max_fds", "Most open file descriptors"), one(most))?;
    families.fractions(
        Family::seconds(
            "process_start_time",
            "When the process began, since 1970; an upgrade begins another",
        ),
        one(*BEGAN),
    )
}

/// Address space and resident memory, bytes (proc(5), statm).
fn memory() -> Option<[i64; 2]> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = text.split_whitespace().map(|word| word.parse::<i64>().ok());
    let page = rustix::param::page_size() as i64;
    Some([pages.next()?? * page, pages.next()?? * page])
}

/// Read once: reckoned anew for each scrape it would waver, and look like a restart.
static BEGAN: LazyLock<Option<f64>> = LazyLock::new(|| {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // proc(5): field 22, in clock ticks since the host booted; the name, field 2, may have spaces in it.
    let ticks: f64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let host = std::fs::read_to_string("/proc/stat").ok()?;
    let booted: f64 = host.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(booted + ticks / rustix::param::clock_ticks_per_second() as f64)
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_began_before_now_and_has_memory() {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let began = BEGAN.unwrap();
        assert!(began <= now + 1.0 && now - began < 3600.0, "{began} {now}");
        let [whole, resident] = memory().unwrap();
        assert!(resident > 1 << 20 && whole >= resident, "{whole} {resident}");
    }
}
