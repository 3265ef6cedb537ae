//! The two loads of the paper and one below saturation, with all guests and the machine they talk to driven by one thread.
//!
//! ```text
//!   guest 1 >--- 64-byte writes ---\                        stream: a window of frames each, acknowledged a batch at a time
//!   guest 2 >----------------------->  switch  >---> remote
//!   guest n >----------------------/      ^------------'    request-response: one frame each to and fro
//!                                                           paced: the same, at [`PACE`] of each guest, all asleep in between
//! ```

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use hdrhistogram::Histogram;

use crate::network::backend::mac;
use crate::network::frame::Stamp;
use crate::network::load::wait;
use crate::network::nic::Nic;
use ioplane_figures::machine::{Account, Books, processor_interrupts};

/// Frames a guest may have under way: less than a ring, as TCP's window allows for small writes.
const WINDOW: u64 = 128;
/// Most frames taken or sent at a NIC before the next one's turn.
const BATCH: u32 = 64;
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest sleep.
const SLEEP: Duration = Duration::from_millis(10);
/// How long a guest waits for an answer before it asks again: what TCP or the application would do after a loss.
const AGAIN: Duration = Duration::from_millis(50);

/// What the guests do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// TCP stream of 64-byte writes.
    Stream,
    /// UDP request-response.
    Requests,
    /// The same, at times of its own: the same work for every core, which none is saturated by.
    Paced,
}

impl Work {
    /// All of them.
    pub const ALL: [Work; 3] = [Work::Stream, Work::Requests, Work::Paced];

    /// As figures have it.
    pub fn word(self) -> &'static str {
        match self {
            Work::Stream => "stream",
            Work::Requests => "requests",
            Work::Paced => "paced",
        }
    }

    /// What is good, and the more the better: frames, or a short time for each request. Paced requests are as many whoever answers
    /// them, unless somebody does not keep up.
    pub fn goodness(self) -> fn(&Outcome) -> f64 {
        match self {
            Work::Stream | Work::Paced => |outcome| outcome.frames as f64 / outcome.account.seconds,
            Work::Requests => |outcome| 1.0 / outcome.latency.mean(),
        }
    }
}

/// From one request of a guest to its next where they are paced: 2,000 per second.
const PACE: Duration = Duration::from_micros(500);

/// How long.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// Not counted, first.
    pub warm: Duration,
    /// Counted.
    pub time: Duration,
}

/// Of how many frames of a stream one has its latency taken: a guest sends no more of them at once, so the clock is looked at once per batch.
pub const SAMPLED: u64 = BATCH as u64;

/// When frames of a stream that are to be timed were shown to the core. No more than these are under way.
#[derive(Debug, Clone, Copy, Default)]
struct Samples([Option<(u64, Instant)>; (WINDOW / SAMPLED + 2) as usize]);

impl Samples {
    fn is_one(number: u64) -> bool {
        number.is_multiple_of(SAMPLED)
    }

    fn place(&mut self, number: u64) -> &mut Option<(u64, Instant)> {
        let count = self.0.len() as u64;
        &mut self.0[(number / SAMPLED % count) as usize]
    }

    fn shown(&mut self, number: u64, at: Instant) {
        *self.place(number) = Some((number, at));
    }

    /// How long frame `number` was under way, if it was timed; it is `now`.
    fn taken(&mut self, number: u64, now: Instant) -> Option<Duration> {
        let (_, at) = self.place(number).take_if(|(shown, _)| *shown == number)?;
        Some(now.saturating_duration_since(at))
    }
}

/// What one round measured.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Frames that reached the remote machine.
    pub frames: u64,
    /// Kicks of all guests and the remote machine.
    pub kicks: u64,
    /// Interrupts likewise.
    pub interrupts: u64,
    /// Interrupts by which the processors of this machine woke or called each other, where the kernel counts them.
    pub between: Option<u64>,
    /// From a request to its response, ns. Of a stream, of one frame in [`SAMPLED`]: from when its guest shows it to the core until the remote
    /// machine takes it.
    pub latency: Histogram<u64>,
    /// Time and processor time.
    pub account: Account,
}

/// Counts so far, as an [`Outcome`] has them.
#[derive(Debug, Clone, Copy)]
struct Notifications {
    kicks: u64,
    interrupts: u64,
    between: Option<u64>,
}

impl Notifications {
    fn since(self, before: Self) -> Self {
        Notifications {
            kicks: self.kicks - before.kicks,
            interrupts: self.interrupts - before.interrupts,
            between: self.between.zip(before.between).map(|(now, then)| now.saturating_sub(then)),
        }
    }
}

/// A guest, as far as the loads go.
struct Guest {
    nic: Nic,
    /// Last number sent, and last acknowledged.
    sent: u64,
    done: u64,
    since: Instant,
    /// When it may send, where requests are paced.
    due: Instant,
    /// Of a stream.
    samples: Samples,
}

/// When a guest may send that was to send at `due` and has at `now`. What could not be sent in time is not made up for, and it keeps its place among the
/// others: guests that were late together would otherwise send together from then on, and a core that is woken for each of them would be woken once for all.
fn due_after(due: Instant, now: Instant) -> Instant {
    let late = now.saturating_duration_since(due).as_nanos() / PACE.as_nanos();
    due + PACE * (u32::try_from(late).unwrap_or(u32::MAX - 1) + 1)
}

/// Everybody who takes part.
pub struct Party {
    guests: Vec<Guest>,
    remote: Nic,
    /// The last number that came from each guest, and the last that was answered.
    came: Vec<u64>,
    answered: Vec<u64>,
    /// They sleep for interrupts when there is nothing to do; else they look all the time.
    sleeps: bool,
}

impl Party {
    /// `remote` has the address after the guests'.
    pub fn new(guests: Vec<Nic>, remote: Nic, sleeps: bool) -> Self {
        let count = guests.len();
        let since = Instant::now();
        let guest = |nic| Guest { nic, sent: 0, done: 0, since, due: since, samples: Samples::default() };
        let guests = guests.into_iter().map(guest).collect();
        Party { guests, remote, came: vec![0; count], answered: vec![0; count], sleeps }
    }

    /// One round of `work`; `pids` are the backend's.
    pub fn run(&mut self, work: Work, span: Span, pids: &[u32]) -> Result<Outcome> {
        let mut latency = Histogram::<u64>::new_with_bounds(1, 100_000_000_000, 2)?;
        self.quiet();
        let begin = Instant::now();
        let count = self.guests.len() as u32;
        for (index, guest) in self.guests.iter_mut().enumerate() {
            (guest.done, guest.since) = (guest.sent, begin);
            guest.samples = Samples::default();
            // One after the other.
            guest.due = begin + PACE * index as u32 / count;
        }
        let (mut frames, mut until, mut progress) = (0u64, begin + span.warm, begin);
        let mut before: Option<(Books, Notifications)> = None;
        let (account, noted) = loop {
            let now = Instant::now();
            let mut moved = self.guests_turn(work, now, &mut latency)?;
            let came = self.remote_turn(Some(&mut latency))?;
            frames += u64::from(came);
            moved += came;
            if moved > 0 {
                progress = now;
            } else if self.sleeps {
                self.sleep(work)?;
            } else {
                std::hint::spin_loop();
            }
            if now >= until {
                match before.take() {
                    None => {
                        latency.reset();
                        frames = 0;
                        let noted = self.notifications();
                        let books = Books::open(pids);
                        progress = books.opened();
                        until = progress + span.time;
                        before = Some((books, noted));
                    }
                    Some((books, noted)) => {
                        let account = books.close(pids);
                        break (account, self.notifications().since(noted));
                    }
                }
            }
            ensure!(now.saturating_duration_since(progress) < PATIENCE, "nothing came for {PATIENCE:?}");
        };
        self.drain()?;
        let Notifications { kicks, interrupts, between } = noted;
        Ok(Outcome { frames, kicks, interrupts, between, latency, account })
    }

    /// Guests take acknowledgements and responses, and send what they may.
    fn guests_turn(&mut self, work: Work, now: Instant, latency: &mut Histogram<u64>) -> Result<u32> {
        let to = mac(self.guests.len());
        let window = if work == Work::Stream { WINDOW } else { 1 };
        let mut moved = 0;
        for (index, guest) in self.guests.iter_mut().enumerate() {
            let (sent, done) = (guest.sent, &mut guest.done);
            let took = guest.nic.receive(0, BATCH, |stamp| {
                if stamp.number > sent {
                    bail!("guest {index} was answered {stamp:?} and has sent {sent}");
                }
                *done = stamp.number.max(*done);
                Ok(())
            })?;
            if took > 0 && work != Work::Stream {
                latency.saturating_record((now - guest.since).as_nanos() as u64);
            }
            if took == 0 && guest.sent > guest.done && now.saturating_duration_since(guest.since) > AGAIN {
                // Lost on the way: what is not answered by now never will be.
                guest.done = guest.sent;
            }
            let mut sent = 0;
            while guest.sent - guest.done < window && sent < BATCH {
                if work == Work::Paced && now < guest.due {
                    break;
                }
                let stamp = Stamp { flow: index as u16, number: guest.sent + 1 };
                if !guest.nic.send_to(to, stamp)? {
                    break;
                }
                guest.sent += 1;
                sent += 1;
                if work == Work::Paced {
                    guest.due = due_after(guest.due, now);
                }
            }
            if sent > 0 {
                let newest = guest.sent - guest.sent % SAMPLED;
                if work == Work::Stream && newest + u64::from(sent) > guest.sent {
                    guest.samples.shown(newest, Instant::now());
                }
                guest.nic.show();
            }
            if took > 0 || sent > 0 {
                guest.since = now;
            }
            moved += took + sent;
        }
        Ok(moved)
    }

    /// The remote machine takes what came and answers each guest it heard from, once: with the last number it has. `latency` is told of frames that are timed.
    fn remote_turn(&mut self, mut latency: Option<&mut Histogram<u64>>) -> Result<u32> {
        let (came, guests) = (&mut self.came, &mut self.guests);
        let frames = self.remote.receive(0, BATCH, |stamp| {
            match came.get_mut(usize::from(stamp.flow)) {
                Some(last) if *last < stamp.number => *last = stamp.number,
                _ => bail!("{stamp:?} came twice, late, or from nobody"),
            }
            if Samples::is_one(stamp.number)
                && let Some(latency) = &mut latency
                && let Some(guest) = guests.get_mut(usize::from(stamp.flow))
                && let Some(time) = guest.samples.taken(stamp.number, Instant::now())
            {
                latency.saturating_record(time.as_nanos() as u64);
            }
            Ok(())
        })?;
        if frames > 0 {
            for (index, (came, answered)) in self.came.iter().zip(&mut self.answered).enumerate() {
                let stamp = Stamp { flow: index as u16, number: *came };
                if *came != *answered && self.remote.send_to(mac(index), stamp)? {
                    *answered = *came;
                }
            }
            self.remote.show();
        }
        Ok(frames)
    }

    fn quiet(&mut self) {
        self.guests.iter_mut().for_each(|guest| guest.nic.quiet());
        self.remote.quiet();
    }

    /// As Linux: an interrupt at the next frame that comes, none for what was sent.
    fn sleep(&mut self, work: Work) -> Result<()> {
        let mut idle = self.remote.wake();
        for guest in &mut self.guests {
            idle &= guest.nic.wake();
        }
        if idle {
            let mut all: Vec<_> = self.guests.iter().map(|guest| &guest.nic).collect();
            all.push(&self.remote);
            let waits = self.guests.iter().filter(|guest| work == Work::Paced && guest.sent == guest.done);
            let due = waits.map(|guest| guest.due).min();
            let time = due.map(|due| due.saturating_duration_since(Instant::now()));
            wait(&all, time.unwrap_or(SLEEP).min(SLEEP))?;
            self.taken();
        }
        self.quiet();
        Ok(())
    }

    fn notifications(&mut self) -> Notifications {
        let (kicks, interrupts) = self.taken();
        Notifications { kicks, interrupts, between: processor_interrupts() }
    }

    /// Kicks and interrupts so far. Lowers the interrupts.
    fn taken(&mut self) -> (u64, u64) {
        let (mut kicks, mut calls) = self.remote.notifications();
        for guest in &mut self.guests {
            let (k, c) = guest.nic.notifications();
            kicks += k;
            calls += c;
        }
        (kicks, calls)
    }

    /// Until everybody's frames are used and nothing comes any more.
    pub fn drain(&mut self) -> Result<()> {
        self.quiet();
        let begin = Instant::now();
        let mut last = begin;
        while last.elapsed() < Duration::from_millis(20) {
            let mut moved = self.remote_turn(None)? + self.remote.reap()?;
            for guest in &mut self.guests {
                moved += guest.nic.receive(0, BATCH, |_| Ok(()))? + guest.nic.reap()?;
            }
            if moved > 0 {
                last = Instant::now();
            }
            ensure!(begin.elapsed() < PATIENCE, "frames were never used");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_of_a_stream_is_timed_once_and_one_that_was_lost_does_not_stand_for_another() {
        let (begin, step) = (Instant::now(), Duration::from_micros(5));
        let mut samples = Samples::default();
        for number in 1..=3 {
            samples.shown(number * SAMPLED, begin + step * number as u32);
        }
        assert_eq!(samples.taken(SAMPLED, begin + step * 4), Some(step * 3));
        assert_eq!(samples.taken(SAMPLED, begin + step * 4), None, "once");
        assert_eq!(samples.taken(3 * SAMPLED, begin + step * 4), Some(step));
        // The second was lost; a later one takes its place.
        let later = 2 + samples.0.len() as u64;
        samples.shown(later * SAMPLED, begin + step * 8);
        assert_eq!(samples.taken(2 * SAMPLED, begin + step * 9), None);
        assert_eq!(samples.taken(later * SAMPLED, begin + step * 9), Some(step));
        assert!(Samples::is_one(SAMPLED) && !Samples::is_one(SAMPLED + 1));
    }

    #[test]
    fn guests_that_were_late_together_do_not_send_together_from_then_on() {
        let begin = Instant::now();
        let third = PACE / 3;
        let now = begin + PACE * 4 + third + third / 2;
        let next = [begin, begin + third, begin + third * 2].map(|due| due_after(due, now));
        assert_eq!(next, [begin + PACE * 5, begin + PACE * 5 + third, begin + PACE * 4 + third * 2]);
        // In time: after one period.
        assert_eq!(due_after(begin, begin), begin + PACE);
        assert_eq!(due_after(begin, begin + PACE - Duration::from_nanos(1)), begin + PACE);
    }
}
