//! I/O cores.

use ioplane_api::report::{CoreReport, GroupReport, GroupUseReport, ObjectiveWord, StatusReport};

use super::families::{Families, Family, Labels};

fn labels(core: &CoreReport) -> Labels {
    vec![("core", core.id.to_string())]
}

/// Everything about them.
pub fn write(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let cores = || status.cores.iter();
    let infos = cores().map(|core| {
        let mut labels = labels(core);
        labels.push(("cpu", core.cpu.map_or("none".to_owned(), |cpu| cpu.to_string())));
        labels.push(("notify", core.notify.clone()));
        labels
    });
    families.infos(
        Family::new("ioplane_core", "Processor that an I/O core is pinned to, and how it learns of requests"),
        infos,
    )?;
    let busy = cores().map(|core| (labels(core), core.busy_percent / 100.0));
    families.fractions(Family::new("ioplane_core_busy_ratio", "Share of time spent on work"), busy)?;
    let mut gauge = |family, of: fn(&CoreReport) -> i64| {
        families.gauges(family, cores().map(|core| (labels(core), of(core))))
    };
    gauge(Family::new("ioplane_core_queues", "Queues on the core"), |core| core.queues.into())?;
    gauge(Family::new("ioplane_core_polled", "1 while polled, 0 while adaptive or notified"), |core| {
        (core.notify == "polled").into()
    })?;
    let asked = || cores().filter(|core| core.p99_us.is_some() || core.cpu_percent.is_some());
    let kept = asked().map(|core| (labels(core), (core.objective == ObjectiveWord::Kept).into()));
    families.gauges(
        Family::new(
            "ioplane_core_objective_kept",
            "1 if what is asked of the core was kept in the last second",
        ),
        kept,
    )?;
    let late = asked().map(|core| {
        let late = matches!(core.objective, ObjectiveWord::LateByCeiling | ObjectiveWord::LateByLoad);
        (labels(core), if late { core.missed_percent / 100.0 } else { 0.0 })
    });
    families.fractions(
        Family::new("ioplane_core_late_ratio", "Requests of the last second that were taken up late"),
        late,
    )?;
    let mut counter = |family, of: fn(&CoreReport) -> u64| {
        families.counters(family, cores().map(|core| (labels(core), of(core))))
    };
    counter(Family::new("ioplane_core_sleeps", "Times the core went to sleep"), |core| core.sleeps)?;
    counter(Family::new("ioplane_core_wakes", "Times the core was woken"), |core| core.wakes)?;
    let mut time = |name, help, of: fn(&CoreReport) -> u64| {
        let spent = cores().map(|core| (labels(core), of(core) as f64 / 1e6));
        families.counted_seconds(Family::seconds(name, help), spent)
    };
    time("ioplane_core_busy", "Time in which the core polled and found work", |core| core.busy_us)?;
    time("ioplane_core_empty_polling", "Time in which the core polled and found nothing", |core| {
        core.empty_us
    })?;
    time("ioplane_core_slept", "Time in which the core slept", |core| core.slept_us)?;
    time("ioplane_core_cpu", "Processor time of the core", |core| core.cpu_us)?;
    let no_processor = "Time in which the core could have run and had no processor";
    time("ioplane_core_run_delay", no_processor, |core| core.run_delay_us)?;
    groups(status, families)?;
    pool(status, families)
}

/// What groups have used of each core.
fn groups(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let used = || {
        let of_group = |group: &GroupReport| {
            let labels = |core: u32| vec![("group", group.name.clone()), ("core", core.to_string())];
            group.used_per_core.iter().map(|one| (labels(one.core), one.used)).collect::<Vec<_>>()
        };
        status.groups.iter().flat_map(of_group)
    };
    let mut time = |name, help, of: fn(&GroupUseReport) -> u64| {
        let spent = used().map(|(labels, used)| (labels, of(&used) as f64 / 1e6));
        families.counted_seconds(Family::seconds(name, help), spent)
    };
    let busy = "Time of the core in which it polled queues of the group and found work";
    time("ioplane_group_busy", busy, |used| used.busy_us)?;
    let empty =
        "Part of the group, by its polls that found nothing, in the core's polling that found nothing";
    time("ioplane_group_empty_polling", empty, |used| used.empty_us)?;
    let polls = used().map(|(labels, used)| (labels, used.empty_polls));
    families.counters(
        Family::new("ioplane_group_empty_polls", "Polls of the group's queues that found nothing"),
        polls,
    )
}

/// The pool.
fn pool(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let pool = &status.pool;
    let mut gauge = |name, help, count: u32| {
        families.gauges(Family::new(name, help), std::iter::once((vec![], count.into())))
    };
    gauge("ioplane_pool_cores", "I/O cores that take queues", pool.open)?;
    gauge("ioplane_pool_cores_draining", "I/O cores whose queues are moved away", pool.draining)?;
    let mut counter =
        |name, help, count: u64| families.counters(Family::new(name, help), std::iter::once((vec![], count)));
    counter("ioplane_pool_cores_started", "Cores that the pool has started", pool.grown)?;
    counter("ioplane_pool_cores_ended", "Cores that the pool has ended", pool.shrunk)?;
    counter("ioplane_pool_queues_moved", "Queues that were moved other than by core move", pool.moved)?;
    counter("ioplane_pool_moves_failed", "Moves that failed: the queue stayed where it was", pool.failed)
}
