//! The network's part of a half: the guests send to each other by TCP, both ways at once, and each end reckons the SHA-256 of
//! its bytes.

use crate::outcome::Traffic;
use crate::show::Show;
use crate::stage::{NAMES, NICS, Stage};
use crate::tally::{Tally, rounded};
use anyhow::{Result, anyhow, ensure};
use ioplane_e2e::exchange::{End, both_ways};
use std::time::{Duration, Instant};

/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// Measures an exchange of `seconds` on `port` and the one after it. Counts of frames, kicks and interrupts are the
/// daemon's, bytes the guests'.
pub fn measure(
    stage: &Stage,
    ends: &[End<'_>; 2],
    mode: &str,
    port: u16,
    seconds: u64,
    show: &Show,
) -> Result<Traffic> {
    stage.expect(mode)?;
    let look = || Tally::of_nics(&stage.daemon.status()?, &NICS);
    let (begun, before) = (Instant::now(), look()?);
    let passages = std::thread::scope(|scope| {
        let [a, b] = ends;
        let under_way = scope.spawn(|| both_ways(a, b, port, seconds as f64));
        let mut last = before;
        while !under_way.is_finished() {
            std::thread::sleep(LOOK);
            let now = look()?;
            let news = now.since(&last);
            show.progress(
                begun.elapsed().as_secs_f64() / seconds as f64,
                &format!("{mode}, TCP: {:.0} frames/s, {:.3} kicks each", news.rate(), news.kicks_each()),
            );
            last = now;
        }
        under_way.join().map_err(|_| anyhow!("the exchange panicked"))?.map_err(|error| stage.explain(error))
    })?;
    let came = look()?.since(&before);
    ensure!(came.units > 0, "no frame in {seconds} s; the switch stands still");
    let mut traffic = Traffic {
        frames: came.units,
        kicks_per_frame: came.kicks_each(),
        interrupts_per_frame: came.interrupts_each(),
        ..Traffic::default()
    };
    let mut ways = Vec::new();
    for (passage, way) in passages.iter().zip([[0, 1], [1, 0]]) {
        let [from, to] = way.map(|end| NAMES[end]);
        let wrong = passage.fault().map(|fault| format!("{mode}, {from} to {to}: {fault}"));
        let (sent, verdict) = (&passage.sent, if wrong.is_some() { "WRONG" } else { "as sent" });
        traffic.mb_per_s += sent.bytes as f64 / 1e6 / sent.seconds;
        traffic.wrong.extend(wrong);
        ways.push(format!("{:.0} MB from {from} arrived {verdict}", sent.bytes as f64 / 1e6));
    }
    traffic.mb_per_s = rounded(traffic.mb_per_s, 2);
    show.line(&format!(
        "{mode}, TCP: {} frames, {:.3} kicks and {:.3} interrupts each, {:.1} MB/s; {}",
        traffic.frames,
        traffic.kicks_per_frame,
        traffic.interrupts_per_frame,
        traffic.mb_per_s,
        ways.join(", ")
    ));
    Ok(traffic)
}
