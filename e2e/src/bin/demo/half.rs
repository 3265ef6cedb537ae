//! The disks' part of a half: a warm-up, then a stretch in which daemon and guests count.

use crate::outcome::Half;
use crate::show::Show;
use crate::stage::{DATA, Stage};
use crate::tally::{Tally, rounded};
use anyhow::{Context, Result, ensure};
use ioplane_e2e::RunningLoad;
use ioplane_e2e::protocol::{Progress, Times};
use std::time::{Duration, Instant};

/// Left out of the count before each half, so that neither filling the disks nor the switch is in one.
const WARM_UP: Duration = Duration::from_secs(3);
/// How long a guest may be silent; it reports each second.
const SILENCE: Duration = Duration::from_secs(30);

/// Measures `seconds` of the loads that run. Counts of requests, kicks and interrupts are the daemon's, times and
/// bytes the guests'.
pub fn measure(
    stage: &Stage,
    loads: &[RunningLoad<'_>],
    mode: &str,
    seconds: u64,
    show: &Show,
) -> Result<Half> {
    stage.expect(mode)?;
    watch(stage, loads, WARM_UP, &format!("{mode}, warming up"), show)?;
    for load in loads {
        load.mark()?;
    }
    let before = look(stage)?;
    watch(stage, loads, Duration::from_secs(seconds), mode, show)?;
    let came = look(stage)?.since(&before);
    ensure!(came.units > 0, "no request in {seconds} s; the guests stand still");
    let mut half = Half {
        requests: came.units,
        kicks_per_request: came.kicks_each(),
        interrupts_per_request: came.interrupts_each(),
        ..Half::default()
    };
    let mut times = Times::default();
    for load in loads {
        let report = load.mark()?;
        half.mb_per_s += report.mb_per_s;
        times.add(&report.times);
    }
    half.mb_per_s = rounded(half.mb_per_s, 2);
    (half.p50_us, half.p99_us) = (times.quantile(0.5), times.quantile(0.99));
    show.line(&format!(
        "{mode}: {} requests, {:.3} kicks and {:.3} interrupts each, {:.1} MB/s",
        half.requests, half.kicks_per_request, half.interrupts_per_request, half.mb_per_s
    ));
    Ok(half)
}

fn look(stage: &Stage) -> Result<Tally> {
    Tally::of_disks(&stage.daemon.status()?, &DATA)
}

/// Shows the loads run for a while.
fn watch(stage: &Stage, loads: &[RunningLoad<'_>], time: Duration, what: &str, show: &Show) -> Result<()> {
    let begun = Instant::now();
    let mut last = look(stage)?;
    // What the guests said before.
    for load in loads {
        while load.progress(Duration::ZERO).is_ok() {}
    }
    while begun.elapsed() < time {
        let heard: Vec<Progress> = loads
            .iter()
            .map(|load| load.progress(SILENCE).context("a guest's load"))
            .collect::<Result<_>>()?;
        let now = look(stage)?;
        let news = now.since(&last);
        let wrong: u64 = heard.iter().map(|progress| progress.errors + progress.mismatches).sum();
        show.progress(
            begun.elapsed().as_secs_f64() / time.as_secs_f64(),
            &format!(
                "{what}: {:.0} requests/s, {:.3} kicks each, {wrong} wrong",
                news.rate(),
                news.kicks_each()
            ),
        );
        last = now;
    }
    Ok(())
}
