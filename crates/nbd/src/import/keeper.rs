//! The control half of one connection: makes it, watches over it, makes it again. A task of its own, never on an I/O core.
//!
//! ```text
//!   Connecting -> Connected --lost--> Reconnecting -> Connected ...
//!                                         |    \-- give_up_after: requests fail, attempts go on
//!                                         \-- Stopped: a device failure, until somebody calls retry
//! ```

use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tokio::io::unix::AsyncFd;
use tokio::sync::OwnedMutexGuard;
use tokio::sync::futures::Notified;
use tokio::time::sleep;

use super::Shared;
use super::claim::Unclaimed;
use super::connect::{Reached, differ_in_content, image_of, reach};
use super::failure::Failure;
use super::link::{Delivery, Link};
use super::socket::{Socket, readable};
use super::status::{ConnectionState, Loss};
use super::turnover::{Held, Trouble};
use crate::claim::ClaimReply;
use crate::error::Violation;
use crate::mutation::{Rule, removed};
use crate::records::Heard;

/// So many connections in a row that a server ends by breaking the protocol are a device failure.
const MOST_VIOLATIONS: u32 = 5;
/// Two of them are in a row if there is less time between them.
const IN_A_ROW: Duration = Duration::from_secs(60);
/// Between two looks at a connection without requests, at most.
const LONGEST_TICK: Duration = Duration::from_secs(1);
/// Between two looks at one that the server has ended.
const ENDING_TICK: Duration = Duration::from_millis(10);
/// How often it is asked whether the channel before has gone, where only one may be connected.
const TURN_TICK: Duration = Duration::from_millis(5);

/// See the module.
pub(super) struct Keeper {
    pub link: Arc<Link>,
    pub shared: Arc<Shared>,
    /// What the exporter knows the channel by.
    channel: u32,
    /// It sees to it that there is a claim to write.
    claims: bool,
    report: AsyncFd<Arc<OwnedFd>>,
    generation: u32,
    /// Of the last attempt: each is another one, since the exporter may have heard of one that came to nothing.
    epoch: AtomicU32,
    /// How long to wait before the next attempt.
    delay: Duration,
    violations: u32,
    last_violation: Option<(Instant, Violation)>,
}

/// Why an attempt has come to nothing.
enum Attempt {
    /// Another may do better.
    Failed(Failure),
    /// A person has to decide.
    Stop(String),
    /// The same, and what may be lost is given up with that. Beside it what [`AcceptedDisk::settled`] was.
    Doubt(String, u64),
}

/// A connection, and what keeps others from looking for another instance until it is delivered.
type Fresh = (Reached, OwnedMutexGuard<()>);

impl Keeper {
    /// Must be called in a runtime.
    pub fn new(link: Arc<Link>, shared: Arc<Shared>, channel: u32, claims: bool) -> std::io::Result<Self> {
        let report = readable(link.report.clone())?;
        let (delay, violations, last_violation) = (Duration::ZERO, 0, None);
        let epoch = AtomicU32::new(0);
        Ok(Keeper {
            link,
            shared,
            channel,
            claims,
            report,
            generation: 0,
            epoch,
            delay,
            violations,
            last_violation,
        })
    }

    /// Until the channel is dropped, and its copies are where others find them. `first`: a connection that has been made already.
    pub async fn run(mut self, first: Option<Reached>) {
        self.keep(first).await;
        drop(self.link.take_leave());
        self.link.set_state(ConnectionState::Closed);
        self.link.tidy();
        while let Some(shelf) = &self.shared.shelf
            && !shelf.open().put(&self.link, &self.shared.writes)
        {
            sleep(TURN_TICK).await;
        }
    }

    async fn keep(&mut self, mut first: Option<Reached>) {
        let mut loss = None;
        loop {
            let reached = match first.take() {
                Some(reached) => Some((reached, self.shared.turnover.clone().lock_owned().await)),
                None => self.reconnect(loss).await,
            };
            let Some((reached, turnover)) = reached else { break };
            let replies = self.link.counters.replies.load(Ordering::Relaxed);
            self.generation += 1;
            let socket = reached.socket;
            let (structured, generation) = (reached.structured, self.generation);
            let protection = socket.protection();
            self.link.set_state(ConnectionState::Connected { since: Instant::now(), protection });
            self.link.deliver(Delivery { socket: socket.clone(), structured, generation });
            drop(turnover);
            loss = self.watch(&socket).await;
            self.link.unwatch(&socket);
            let leave = self.link.take_leave();
            let answered = self.link.counters.replies.load(Ordering::Relaxed) != replies;
            match loss {
                None => {
                    tokio::spawn(self.shared.see_out(socket, true, leave));
                    break;
                }
                Some(Loss::Suspended) => {
                    tokio::spawn(self.shared.see_out(socket, false, leave));
                    if !self.used_again().await {
                        break;
                    }
                }
                Some(loss) => {
                    tracing::warn!(address = %self.shared.options.address, %loss, "a connection to an NBD server is lost");
                    if let Loss::Violation(violation) = loss {
                        tell(&socket, violation);
                    }
                    socket.abort();
                    self.link.count_loss(loss);
                    // Before anything is asked by the next connection.
                    if self.shared.instance.load().is_none() {
                        self.shared.count_doubt();
                    }
                    self.delay = if answered { Duration::ZERO } else { self.next_delay() };
                    if let Loss::Violation(violation) = loss {
                        self.count_violation(violation);
                    }
                }
            }
        }
    }

    /// Why the connection is lost; `None` if the channel is gone.
    async fn watch(&mut self, socket: &Arc<Socket>) -> Option<Loss> {
        let dead_after = self.shared.options.dead_after;
        let usual = (dead_after / 4).clamp(Duration::from_millis(5), LONGEST_TICK);
        let ended = match socket.ended() {
            Ok(ended) => ended,
            Err(error) => return Some(Loss::System(error.raw_os_error().unwrap_or(libc::EIO))),
        };
        let (mut progress, mut headway) = (self.link.progress(), Instant::now());
        let mut ending = false;
        loop {
            let tick = if ending { ENDING_TICK.min(usual) } else { usual };
            tokio::select! {
                _ = reported(&self.report) => {}
                _ = ended.readable(), if !ending => ending = true,
                () = sleep(tick) => {}
            }
            self.link.tidy();
            if let Some(loss) = self.link.loss(self.generation) {
                return Some(loss);
            }
            if self.link.closing() {
                return None;
            }
            match self.heard_idle(socket) {
                Heard::Nothing => {}
                Heard::Bytes if !ending => return Some(Loss::Violation(Violation::Unasked)),
                Heard::Bytes | Heard::End => return Some(Loss::Closed),
                Heard::Failed(error) => return Some(error.into()),
            }
            let now = self.link.progress();
            if self.link.in_flight() == 0 || now != progress {
                (progress, headway) = (now, Instant::now());
            } else if headway.elapsed() >= dead_after {
                return Some(Loss::Silent(dead_after));
            }
        }
    }

    /// What the server says although nothing was asked: the channel does not look then, and its core could not sleep.
    fn heard_idle(&self, socket: &Socket) -> Heard {
        let requests = || self.link.counters.requests.load(Ordering::SeqCst);
        // What a request that came and went meanwhile has brought is none of that.
        let before = requests();
        if self.link.in_flight() > 0 {
            return Heard::Nothing;
        }
        let heard = socket.listen();
        if socket.has_records() {
            // What has come for a request that was made meanwhile no socket tells of any more.
            self.link.wake_if_busy();
        }
        if self.link.in_flight() == 0 && requests() == before { heard } else { Heard::Nothing }
    }

    /// Waits until the channel, which has given up all that was in flight, is dropped or used again. Says which.
    async fn used_again(&self) -> bool {
        loop {
            if self.link.closing() {
                return false;
            }
            if self.link.in_flight() > 0 {
                return true;
            }
            tokio::select! {
                () = reported(&self.report) => {}
                () = sleep(ENDING_TICK) => {}
            }
        }
    }

    /// Another connection, `None` if the channel is gone before there is one.
    async fn reconnect(&mut self, loss: Option<Loss>) -> Option<Fresh> {
        let since = Instant::now();
        let (mut attempts, mut failure) = (0, String::new());
        let mut stop = self.too_many_violations().map(|why| (why, None));
        loop {
            if let Some((why, doubt)) = stop.take() {
                tracing::error!(address = %self.shared.options.address, why, "an NBD export is out of use");
                // Whoever sees the state may decide at once.
                let shared = self.shared.clone();
                let decision = shared.retry.notified();
                self.link.set_state(ConnectionState::Stopped { since, why });
                self.link.set_refuse(true);
                if !self.decided(decision).await {
                    return None;
                }
                if let Some(settled) = doubt {
                    self.shared.accept(settled).await;
                }
                self.violations = 0;
            }
            let mut gave_up = self.gives_up(since);
            self.link.set_refuse(gave_up);
            if let Some(loss) = loss.or((attempts > 0).then_some(Loss::Unreached)) {
                let failure = failure.clone();
                self.link.set_state(ConnectionState::Reconnecting {
                    since,
                    loss,
                    attempts,
                    failure,
                    gave_up,
                });
            }
            if !self.pause(self.delay).await {
                return None;
            }
            let result = {
                let attempt = self.attempt();
                tokio::pin!(attempt);
                loop {
                    let changed = self.shared.give_up_changed.notified();
                    let left = self.shared.give_up_after().map(|after| after.saturating_sub(since.elapsed()));
                    tokio::select! {
                        result = &mut attempt => break result,
                        () = sleep(left.unwrap_or(Duration::MAX)), if left.is_some() && !gave_up => {
                            gave_up = true;
                            self.link.set_refuse(true);
                        }
                        () = changed => {
                            gave_up = self.gives_up(since);
                            self.link.set_refuse(gave_up);
                        }
                        () = self.heard() => if self.link.closing() {
                            return None;
                        }
                    }
                }
            };
            attempts += 1;
            match result {
                Ok(reached) => return Some(reached),
                Err(Attempt::Failed(Failure { why, violation })) => {
                    failure = why;
                    if let Some(violation) = violation {
                        self.link.count_loss(Loss::Violation(violation));
                        self.count_violation(violation);
                        stop = self.too_many_violations().map(|why| (why, None));
                    }
                }
                Err(Attempt::Stop(why)) => stop = Some((why, None)),
                Err(Attempt::Doubt(why, settled)) => stop = Some((why, Some(settled))),
            }
            self.delay = self.next_delay();
        }
    }

    /// Whether requests fail that wait since then.
    fn gives_up(&self, since: Instant) -> bool {
        self.shared.give_up_after().is_some_and(|after| since.elapsed() >= after)
    }

    async fn attempt(&self) -> Result<Fresh, Attempt> {
        self.turn().await;
        let shared = &self.shared;
        if self.claims {
            shared.claim_to_write().await.map_err(|unclaimed| match unclaimed {
                Unclaimed::Failed(failure) => Attempt::Failed(failure),
                Unclaimed::Refused(why) => Attempt::Stop(why),
            })?;
        }
        let mut reached = self.reach().await?;
        let turnover = shared.turnover.clone().lock_owned().await;
        if shared.accepted.is_as_it_is() {
            // The flush that has failed since may have made it another instance.
            drop(reached);
            reached = self.reach().await?;
        }
        let known = shared.instance.load_full();
        let other = match (known.as_deref(), &reached.instance) {
            (Some(_), None) => {
                return Err(Attempt::Failed("the server does not say which instance it is".into()));
            }
            (Some(known), Some(now)) if image_of(known) != image_of(now) => {
                return Err(another_disk(known, now));
            }
            (Some(known), Some(now))
                if known != now
                    || (shared.shelf.is_some()
                        && shared.writes.flush_failed()
                        && !removed(Rule::FailedFlush)) =>
            {
                Some((known, now.clone()))
            }
            _ => None,
        };
        let reached = match other {
            None => {
                self.confirm(&reached).await?;
                reached
            }
            // As it is: a disk whose flushes go on failing could never be accepted otherwise.
            Some((_, now)) if shared.accepted.is_as_it_is() && !shared.writes.dirty() => {
                self.confirm(&reached).await?;
                shared.set_instance(&now);
                reached
            }
            Some((known, now)) => self.turn_over(reached, known, &now).await?,
        };
        shared.accepted.settle();
        Ok((reached, turnover))
    }

    /// Makes a connection, of which the exporter has confirmed that nothing older is under way, to an export as it was.
    async fn reach(&self) -> Result<Reached, Attempt> {
        let shared = &self.shared;
        let attempt = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        let epoch = shared.epoch(self.channel, attempt);
        let epoch = epoch.ok_or_else(|| Attempt::Failed("the claim has been given back".into()))?;
        let reached = reach(&shared.options, epoch).await;
        let reached = reached.map_err(|error| Attempt::Failed(error.into()))?;
        if let Some(ClaimReply::Refused(refusal)) = &reached.claim {
            let known = shared.instance.load_full();
            return Err(match (known.as_deref(), &reached.instance) {
                (Some(known), Some(now)) if image_of(known) != image_of(now) => another_disk(known, now),
                _ => Attempt::Stop(shared.lose_claim(refusal)),
            });
        }
        if shared.fenced && !reached.fenced && !removed(Rule::Fence) {
            let why = "the exporter has not confirmed that older requests of this connection are done with";
            return Err(Attempt::Failed(why.into()));
        }
        shared.fits(&reached).map_err(|misfit| Attempt::Failed(misfit.into()))?;
        Ok(reached)
    }

    async fn confirm(&self, reached: &Reached) -> Result<(), Attempt> {
        let shared = &self.shared;
        let (Some(fence), Some(instance)) = (&shared.options.fence, &reached.instance) else { return Ok(()) };
        if removed(Rule::Fence) {
            return Ok(());
        }
        let limit = shared.options.dead_after.max(shared.options.connect_timeout);
        match tokio::time::timeout(limit, fence.confirm(instance, self.generation + 1)).await {
            Ok(confirmed) => confirmed.map_err(|why| Attempt::Failed(why.into())),
            Err(_) => Err(Attempt::Failed("the exporter has not confirmed the epoch in time".into())),
        }
    }

    /// The exporter is another instance of the same disk, or a flush has failed there. Goes on when all that may be lost is there again.
    async fn turn_over(&self, reached: Reached, known: &str, now: &str) -> Result<Reached, Attempt> {
        let shared = &self.shared;
        let accepted = shared.accepted.is_accepted();
        let doubt = |why| Attempt::Doubt(why, shared.accepted.settled());
        if shared.writes.incomplete() && !accepted && !removed(Rule::Complete) {
            return Err(doubt(format!(
                "the exporter is another instance ({now}, was {known}), and writes that it acknowledged were not flushed, of which there are \
                 no copies: they may be lost. Check the disk, then accept it as it is"
            )));
        }
        if shared.shelf.is_none() {
            self.confirm(&reached).await?;
            if accepted {
                shared.writes.settle();
            }
            shared.set_instance(now);
            return Ok(reached);
        }
        drop(reached);
        let held = Held::take(shared, &self.link).await;
        shared.begin_session();
        let reached = self.reach().await?;
        if reached.instance.as_deref() != Some(now) {
            return Err(Attempt::Failed("the exporter has become another instance once more".into()));
        }
        self.confirm(&reached).await?;
        match held.write_again(&reached).await {
            Ok(writes) => {
                tracing::warn!(address = %shared.options.address, now, known, writes, "an NBD export is another instance: retained writes were written again");
                shared.count_rewritten(writes);
                shared.writes.settle();
                shared.set_instance(now);
                Ok(reached)
            }
            Err(Trouble::Network(failure)) => {
                failure.violation.into_iter().for_each(|violation| tell(&reached.socket, violation));
                Err(Attempt::Failed(failure))
            }
            Err(Trouble::Device(error)) if accepted => {
                tracing::error!(address = %shared.options.address, now, known, error, "a disk was accepted, and its writes could not be made durable: it is taken as it is");
                // The flush that has failed ends this connection where the exporter counts it, and the next one is to another instance.
                shared.writes.settle();
                shared.accepted.take_as_it_is();
                let why = format!("its disk fails still (NBD error {error}): it is taken as it is");
                Err(Attempt::Failed(why.into()))
            }
            Err(Trouble::Device(error)) => Err(doubt(format!(
                "the exporter is another instance ({now}, was {known}), and its disk failed (NBD error {error}) when writes that were \
                 acknowledged and not flushed were written again: they may be lost. Check the disk, then accept it as it is"
            ))),
        }
    }

    /// Where only one connection may be there, waits until that of an earlier channel has gone.
    async fn turn(&self) {
        while !self.shared.facts.can_multi_conn() && !self.shared.quiet.now() {
            sleep(TURN_TICK).await;
        }
    }

    /// False if the channel goes meanwhile.
    async fn pause(&self, time: Duration) -> bool {
        let until = tokio::time::Instant::now() + time;
        loop {
            if self.link.closing() {
                return false;
            }
            tokio::select! {
                () = tokio::time::sleep_until(until) => return true,
                () = self.heard() => {}
            }
        }
    }

    /// Waits for a person's decision. False if the channel goes meanwhile.
    async fn decided(&self, decision: Notified<'_>) -> bool {
        tokio::pin!(decision);
        loop {
            if self.link.closing() {
                return false;
            }
            tokio::select! {
                () = &mut decision => return true,
                () = self.heard() => {}
            }
        }
    }

    /// Until the channel has reported something. There is no connection that it could have left.
    async fn heard(&self) {
        reported(&self.report).await;
        drop(self.link.take_leave());
    }

    fn next_delay(&self) -> Duration {
        let (least, most) = self.shared.options.retry;
        jittered((self.delay * 2).clamp(least, most.max(least)))
    }

    fn count_violation(&mut self, violation: Violation) {
        let in_a_row = self.last_violation.is_some_and(|(last, _)| last.elapsed() < IN_A_ROW);
        self.violations = if in_a_row { self.violations + 1 } else { 1 };
        self.last_violation = Some((Instant::now(), violation));
        self.delay = self.delay.max(self.shared.options.retry.0);
    }

    fn too_many_violations(&self) -> Option<String> {
        let (_, last) = self.last_violation.filter(|_| self.violations >= MOST_VIOLATIONS)?;
        let what =
            if last.is_of_sums() { "data were changed on the way" } else { "the server broke the protocol" };
        Some(format!("{what} on {MOST_VIOLATIONS} connections in a row"))
    }
}

/// Tells the exporter that what it has sent was changed on the way, as far as the network takes it now; it has told that itself of what was sent to it.
fn tell(socket: &Socket, violation: Violation) {
    if violation.is_of_sums() && violation != Violation::ChangedThere {
        socket.finish();
    }
}

fn another_disk(known: &str, now: &str) -> Attempt {
    if differ_in_content(known, now) {
        return Attempt::Stop(format!(
            "the image was written to while it was not published ({now}, was {known}), and what the guest has read of it may be old: shut the \
             guest down and add the disk again"
        ));
    }
    Attempt::Stop(format!(
        "the exporter has another disk under this name ({now}, was {known}): put the old one back, or shut the guest down and add the \
         disk again"
    ))
}

/// Until the channel has reported something.
async fn reported(report: &AsyncFd<Arc<OwnedFd>>) {
    if let Ok(mut ready) = report.readable().await {
        let _ = rustix::io::read(report.get_ref(), &mut [0; 8]);
        ready.clear_ready();
    }
}

/// A quarter more or less, so that the importers of a server that is back do not all come at once.
fn jittered(time: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) % 1000;
    time.mul_f64(0.75 + random as f64 / 2000.0)
}
