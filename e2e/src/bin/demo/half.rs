//! One half of the demo: a warm-up, then a stretch in which daemon and guests count.

use crate::outcome::Half;
use crate::show::Show;
use crate::stage::Stage;
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
    disks: &[&str],
    show: &Show,
) -> Result<Half> {
    let status = stage.daemon.status()?;
    ensure!(
        status.cores.iter().all(|core| core.notify == mode),
        "the cores are not {mode}: {:?}",
        status.cores
    );
    watch(stage, loads, WARM_UP, &format!("{mode}, warming up"), disks, show)?;
    for load in loads {
        load.mark()?;
    }
    let before = stage.daemon.status()?.sum(disks)?;
    watch(stage, loads, Duration::from_secs(seconds), mode, disks, show)?;
    let after = stage.daemon.status()?.sum(disks)?;
    let mut half = Half { requests: after.requests - before.requests, ..Half::default() };
    ensure!(half.requests > 0, "no request in {seconds} s; the guests stand still");
    half.kicks_per_request = rounded((after.kicks - before.kicks) as f64 / half.requests as f64, 5);
    half.interrupts_per_request =
        rounded((after.interrupts - before.interrupts) as f64 / half.requests as f64, 5);
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

/// Shows the loads run for a while.
fn watch(
    stage: &Stage,
    loads: &[RunningLoad<'_>],
    time: Duration,
    what: &str,
    disks: &[&str],
    show: &Show,
) -> Result<()> {
    let begun = Instant::now();
    let mut last = stage.daemon.status()?.sum(disks)?;
    let mut since = Instant::now();
    // What the guests said before.
    for load in loads {
        while load.progress(Duration::ZERO).is_ok() {}
    }
    while begun.elapsed() < time {
        let heard: Vec<Progress> = loads
            .iter()
            .map(|load| load.progress(SILENCE).context("a guest's load"))
            .collect::<Result<_>>()?;
        let now = stage.daemon.status()?.sum(disks)?;
        let (requests, kicks) = (now.requests - last.requests, now.kicks - last.kicks);
        let rate = requests as f64 / since.elapsed().as_secs_f64();
        let each = kicks as f64 / requests.max(1) as f64;
        let wrong: u64 = heard.iter().map(|progress| progress.errors + progress.mismatches).sum();
        show.progress(
            begun.elapsed().as_secs_f64() / time.as_secs_f64(),
            &format!("{what}: {rate:.0} requests/s, {each:.3} kicks each, {wrong} wrong"),
        );
        (last, since) = (now, Instant::now());
    }
    Ok(())
}

fn rounded(value: f64, digits: i32) -> f64 {
    let unit = 10f64.powi(digits);
    (value * unit).round() / unit
}
