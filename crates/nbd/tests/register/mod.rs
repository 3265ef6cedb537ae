//! What histories of an import are checked by, and what servers of theirs decide by.
#![allow(dead_code, reason = "each test uses a part")]

use std::collections::HashSet;

/// One operation on one block, as its client saw it.
#[derive(Debug, Clone, Copy)]
pub struct Event {
    pub begun: u64,
    pub ended: u64,
    /// Written, or read.
    pub value: u64,
    pub write: bool,
}

/// Whether some order of `events` explains every read. At the start the block is 0.
pub fn linearizable(mut events: Vec<Event>) -> bool {
    events.sort_by_key(|event| event.begun);
    // States that were tried: which are done, as a set, and the value then.
    let mut seen = HashSet::new();
    let mut stack = vec![(vec![false; events.len()], 0u64)];
    while let Some((done, value)) = stack.pop() {
        let Some(first) = done.iter().position(|done| !done) else { return true };
        // What began after some operation had ended that is not done cannot be next.
        let limit = events.iter().zip(&done).filter(|(_, done)| !**done).map(|(event, _)| event.ended).min();
        for at in first..events.len() {
            let event = events[at];
            if event.begun > limit.unwrap_or(u64::MAX) {
                break;
            }
            if done[at] || (!event.write && event.value != value) {
                continue;
            }
            let mut next = done.clone();
            next[at] = true;
            let value = if event.write { event.value } else { value };
            if seen.insert((next.clone(), value)) {
                stack.push((next, value));
            }
            if !event.write {
                // A read that fits now may as well be done now.
                break;
            }
        }
    }
    false
}

pub fn dice(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

pub fn one_in(n: u64, seed: &mut u64) -> bool {
    dice(seed).is_multiple_of(n)
}

pub fn readable(stream: &std::os::unix::net::UnixStream, block: bool) -> bool {
    readable_within(stream, if block { 5 } else { 0 })
}

/// Whether something can be received, or can within so many ms.
pub fn readable_within(stream: &std::os::unix::net::UnixStream, ms: i64) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let time = Timespec { tv_sec: 0, tv_nsec: ms * 1_000_000 };
    rustix::event::poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&time)).unwrap() > 0
}

const WITHOUT: &str = "IOPLANE_WITHOUT_RULE";

/// The rule that this process is to take out, if it was started by [`each_is_noticed`].
pub fn taken_out() -> Option<String> {
    std::env::var(WITHOUT).ok()
}

/// Runs `test` of this program once for each rule, in a process that is to take it out, and to say `without RULE` with what was noticed.
pub fn each_is_noticed(rules: &[&str], test: &str) {
    for rule in rules {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(WITHOUT, rule)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success(), "{rule}: {said}{}", String::from_utf8_lossy(&child.stderr));
        assert!(said.contains(&format!("without {rule}")), "{said}");
        print!("{}", said.lines().filter(|line| line.starts_with("without")).collect::<String>() + "\n");
    }
}
