//! A queue that moves to another core while it is busy: for how long nothing completes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use ioplane_figures::machine;
use ioplane_figures::report::median;

use super::Bench;
use super::drive::{Completion, Flow, drive};
use super::offered::Offered;
use super::stage::{FORM, Stage};
use crate::daemon::Configuration;
use crate::exitless::load::BLOCK;
use crate::measured::Figure;

/// Requests in flight.
const DEPTH: u16 = 32;
/// Of quiet before a move, and how long after it a pause still counts as its own.
const QUIET: Duration = Duration::from_millis(10);
const AFTER: Duration = Duration::from_millis(2);

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let moves = bench.pace.moves as usize;
    eprintln!("{moves} moves");
    let configuration = Configuration::new(bench.mode).cores(2);
    let mut stage =
        Stage::configured(bench, "moving", configuration, &[("disk", "memory = \"64M\"\ncore = 0")])?;
    stage.connect("disk", FORM)?;
    // Even windows are quiet, a move begins and ends in each odd one.
    let (window, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let mut gaps = Gaps::new(2 * moves + 1);
    let answers = stage.turn(|stage| {
        let control = stage.control();
        let back = bench.place.cpus.back;
        std::thread::scope(|scope| -> Result<Vec<f64>> {
            let mover = scope.spawn(|| {
                // It waits for most of the time; the generator never does.
                let moved = machine::pin(back).and_then(|()| move_often(&control, moves, &window));
                over.store(true, Ordering::Release);
                moved
            });
            // In slices, to see that the mover is done; a slice begins without a gap.
            let mut driven = Ok(());
            while driven.is_ok() && !over.load(Ordering::Acquire) {
                let flow = Flow::new(&mut stage.guests[0], 0, Offered::Backlog(DEPTH), BLOCK, 1);
                gaps.last = None;
                driven = drive(&mut [flow], Duration::from_secs(1), |completion| {
                    gaps.see(completion, window.load(Ordering::Relaxed));
                });
            }
            let moved = mover.join().map_err(|_| anyhow!("the thread that moves panicked"))?;
            driven.and(moved)
        })
    })?;
    let us = |first: usize| -> Vec<f64> {
        gaps.longest.iter().skip(first).step_by(2).take(moves).map(|ns| *ns as f64 / 1e3).collect()
    };
    let figure = Figure::median(&us(1))
        .beside("longest_gap_without_a_move_us", median(us(0)))
        .beside("longest_pause_us", us(1).into_iter().fold(0.0, f64::max))
        .beside("answer_ms", median(answers))
        .beside("depth", DEPTH);
    Ok(vec![("move_pause_us", figure)])
}

/// The longest time without a completion in each window, ns.
struct Gaps {
    longest: Vec<u64>,
    /// When the last completion was, and in which window.
    last: Option<(u64, usize)>,
}

impl Gaps {
    fn new(windows: usize) -> Self {
        Gaps { longest: vec![0; windows], last: None }
    }

    /// A gap belongs to the window that has all of it, otherwise to each window with a move that has a part of it.
    fn see(&mut self, completion: Completion, window: usize) {
        if let Some((last, first)) = self.last {
            let gap = completion.at - last;
            for (number, longest) in self.longest.iter_mut().enumerate().take(window + 1).skip(first) {
                if first == window || number % 2 == 1 {
                    *longest = (*longest).max(gap);
                }
            }
        }
        self.last = Some((completion.at, window));
    }
}

/// Moves queue 0 there and back. Returns for how long each call took, ms.
fn move_often(control: &Path, moves: usize, window: &AtomicUsize) -> Result<Vec<f64>> {
    let mut took = Vec::with_capacity(moves);
    for number in 0..moves {
        std::thread::sleep(QUIET);
        window.store(2 * number + 1, Ordering::Relaxed);
        let begin = Instant::now();
        let body = format!("{{\"disk\":\"disk\",\"queue\":0,\"core\":{}}}", (number + 1) % 2);
        post(control, "/v1/queues/move", &body)?;
        took.push(begin.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(AFTER);
        window.store(2 * number + 2, Ordering::Relaxed);
    }
    Ok(took)
}

/// One request on a connection of its own; fails unless it is answered by 200.
fn post(control: &Path, path: &str, body: &str) -> Result<()> {
    let mut stream = UnixStream::connect(control).with_context(|| control.display().to_string())?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let length = body.len();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: ioplane\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer.split(' ').nth(1) != Some("200") {
        bail!("POST {path} {body}: {answer}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_over_several_windows_belongs_to_the_moves_in_it() {
        let mut gaps = Gaps::new(4);
        // The pause of the move in window 1 ends in window 2; all of window 3 is within a pause.
        for (at, window) in [(100, 0), (110, 0), (140, 1), (145, 1), (175, 2), (180, 2), (900, 4)] {
            gaps.see(Completion { flow: 0, due: 0, not_before: 0, at }, window);
        }
        assert_eq!(gaps.longest, [10, 30, 5, 720], "and what lies in no window is left out");
    }

    #[test]
    fn an_answer_other_than_200_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let answering = std::thread::spawn(move || {
            for answer in ["HTTP/1.1 200 OK\r\n\r\n{}", "HTTP/1.1 409 Conflict\r\n\r\n{}"] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n{}") {
                    let mut piece = [0; 512];
                    let count = stream.read(&mut piece).unwrap();
                    assert_ne!(count, 0, "the request has no end");
                    request.extend_from_slice(&piece[..count]);
                }
                assert!(request.starts_with(b"POST /v1/queues/move HTTP/1.1\r\n"));
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        post(&path, "/v1/queues/move", "{}").unwrap();
        assert!(post(&path, "/v1/queues/move", "{}").unwrap_err().to_string().contains("409"));
        answering.join().unwrap();
    }
}
