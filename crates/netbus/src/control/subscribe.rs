//! The side of a session that is told.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::{Pin, pin};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, WriteHalf};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};

use super::SessionTiming;
use super::message::{Answer, Say, VERSION, heard, read_all, receive};
use super::state::{DeviceEvent, DevicePresence, DeviceState};
use crate::error::NetbusError;
use crate::names::{is_name, printable, shown};
use crate::wire::send;

/// So many questions whether the other side is there pass before it is asked again about a device that it has not, or not any more.
const ASK_AGAIN: u32 = 2;

/// What there is to know of a device.
#[derive(Debug, Clone, Copy)]
pub enum DeviceNews<'a> {
    /// How it is, and what has happened since it was known last.
    State(&'a DeviceState, &'a [DeviceEvent]),
    /// Its host tells nothing of it, and why. It is asked again.
    Refused(&'a str),
    /// There is no session: what was known last may be old. It is connected again.
    Unknown(&'a str),
}

/// How the publisher is reached, and who is told what it says.
pub trait PublisherLink: Send + Sync + 'static {
    /// A stream to the publisher.
    type Stream: AsyncRead + AsyncWrite + Send + 'static;

    /// Connects; `device` is one of those that are wanted, another one each time. A text for people if that fails.
    fn connect(&self, device: &str) -> impl Future<Output = Result<Self::Stream, String>> + Send;

    /// Is told news of a device. Must not block.
    fn told(&self, device: &str, news: DeviceNews<'_>);
}

/// A host that publishes devices, as one that uses some of them sees it. It connects while at least one is wanted, and connects again when the session
/// is lost. Dropped, it ends.
#[derive(Debug)]
pub struct Subscriber {
    wanted: watch::Sender<BTreeSet<String>>,
    task: AbortHandle,
}

impl Subscriber {
    /// Nothing is wanted yet. Must be called in a runtime.
    pub fn start(link: impl PublisherLink, timing: SessionTiming) -> Subscriber {
        let (wanted, wants) = watch::channel(BTreeSet::new());
        let task =
            tokio::spawn(Subscribing { link, timing, wants, known: BTreeMap::new() }.run()).abort_handle();
        Subscriber { wanted, task }
    }

    /// The devices that are wanted, in place of those before. What is no name of a device is left out.
    pub fn want(&self, mut devices: BTreeSet<String>) {
        devices.retain(|device| is_name(device));
        self.wanted.send_if_modified(|wanted| {
            let differs = *wanted != devices;
            *wanted = devices;
            differs
        });
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Subscribing<L> {
    link: L,
    timing: SessionTiming,
    wants: watch::Receiver<BTreeSet<String>>,
    /// What each device was like when it was known last, over lost sessions.
    known: BTreeMap<String, DeviceState>,
}

impl<L: PublisherLink> Subscribing<L> {
    async fn run(mut self) {
        let (least, most) = self.timing.retry;
        let (mut delay, mut turn) = (least, 0usize);
        loop {
            let wanted = self.wants.borrow_and_update().clone();
            self.known.retain(|device, _| wanted.contains(device));
            let Some(device) = wanted.iter().cycle().nth(turn % wanted.len().max(1)) else {
                if self.wants.changed().await.is_err() {
                    return;
                }
                continue;
            };
            turn = turn.wrapping_add(1);
            let begun = Instant::now();
            let why = match self.link.connect(device).await {
                Err(why) => why,
                Ok(stream) => match self.attend(stream).await {
                    // Nothing is wanted.
                    Ok(()) => continue,
                    Err(error) => error.to_string(),
                },
            };
            let why = printable(&why);
            // Some may have been added while the session lasted.
            let wanted = self.wants.borrow().clone();
            wanted.iter().for_each(|device| self.link.told(device, DeviceNews::Unknown(&why)));
            // One that has lasted is connected again at once.
            delay = if begun.elapsed() > most { least } else { (delay * 2).clamp(least, most) };
            tokio::select! {
                () = sleep(delay) => {}
                changed = self.wants.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }

    /// One session, until nothing is wanted.
    async fn attend(&mut self, stream: L::Stream) -> Result<(), NetbusError> {
        let timing = self.timing;
        let (mut input, mut output) = tokio::io::split(Box::pin(stream));
        send(&mut output, &Say::Hello { version: VERSION }, timing.patience).await?;
        match receive(&mut input, timing.patience, timing.patience).await? {
            Some(Answer::Welcome { version: 1..=VERSION }) => {}
            Some(Answer::Welcome { version }) => return Err(NetbusError::Version(version)),
            Some(_) => return Err(NetbusError::Malformed("it does not say welcome first".to_owned())),
            None => return Err(NetbusError::Closed),
        }
        let (said, mut hears) = heard();
        let mut read = pin!(read_all(&mut input, &timing, said));
        let mut session = SubscribedSession { output, asked: BTreeSet::new(), absent: BTreeSet::new() };
        let patience = timing.patience;
        let mut ticks = interval_at(Instant::now() + timing.keep_alive, timing.keep_alive);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut number = 0;
        let wanted = self.wants.borrow_and_update().clone();
        session.follow(&wanted, patience).await?;
        loop {
            tokio::select! {
                // What it has said before it went is heard.
                biased;
                answer = hears.recv() => match answer {
                    Some(Answer::Bye) => return Err(NetbusError::Refused("it ends".to_owned())),
                    Some(answer) => self.hear(&mut session, answer)?,
                    None => return Err(NetbusError::Closed),
                },
                ended = &mut read => {
                    ended?;
                    // The receiver is told what is left, and then that nothing more comes.
                    while let Ok(answer) = hears.try_recv() {
                        self.hear(&mut session, answer)?;
                    }
                    return Err(NetbusError::Closed);
                }
                changed = self.wants.changed() => {
                    let wanted = self.wants.borrow_and_update().clone();
                    if changed.is_err() || wanted.is_empty() {
                        return Ok(());
                    }
                    self.known.retain(|device, _| wanted.contains(device));
                    session.follow(&wanted, patience).await?;
                }
                _ = ticks.tick() => {
                    number += 1;
                    send(&mut session.output, &Say::Ping { number }, patience).await?;
                    if number % u64::from(ASK_AGAIN) == 0 {
                        session.ask_again(patience).await?;
                    }
                }
            }
        }
    }

    fn hear<S>(&mut self, session: &mut SubscribedSession<S>, answer: Answer) -> Result<(), NetbusError> {
        match answer {
            // What is not wanted any more may have been on its way.
            Answer::State { device, .. } | Answer::Refused { device, .. }
                if !session.asked.contains(&device) => {}
            Answer::State { device, state } => {
                let bad = |why: String| NetbusError::Malformed(format!("{}: {why}", shown(&device)));
                state.check().map_err(bad)?;
                match state.presence {
                    DevicePresence::Served => session.absent.remove(&device),
                    DevicePresence::Withdrawn | DevicePresence::Stopping => {
                        session.absent.insert(device.clone())
                    }
                };
                let events = state.since(self.known.get(&device));
                self.link.told(&device, DeviceNews::State(&state, &events));
                self.known.insert(device, state);
            }
            Answer::Refused { device, why } => {
                session.absent.insert(device.clone());
                // What it has said of it before says more.
                if self.known.get(&device).is_none_or(|state| state.presence == DevicePresence::Served) {
                    self.link.told(&device, DeviceNews::Refused(&printable(&why)));
                }
            }
            Answer::Pong { .. } | Answer::Bye => {}
            Answer::Welcome { .. } => {
                return Err(NetbusError::Malformed("it says welcome again".to_owned()));
            }
        }
        Ok(())
    }
}

struct SubscribedSession<S> {
    output: WriteHalf<Pin<Box<S>>>,
    /// What was subscribed to.
    asked: BTreeSet<String>,
    /// Of these, what is not there: it may come back.
    absent: BTreeSet<String>,
}

impl<S: AsyncRead + AsyncWrite + Send> SubscribedSession<S> {
    /// Subscribes to what is wanted, and to nothing else.
    async fn follow(&mut self, wanted: &BTreeSet<String>, patience: Duration) -> Result<(), NetbusError> {
        let gone: Vec<String> = self.asked.difference(wanted).cloned().collect();
        for device in gone {
            self.asked.remove(&device);
            self.absent.remove(&device);
            send(&mut self.output, &Say::Unsubscribe { device }, patience).await?;
        }
        let new: Vec<String> = wanted.difference(&self.asked).cloned().collect();
        for device in new {
            self.asked.insert(device.clone());
            send(&mut self.output, &Say::Subscribe { device }, patience).await?;
        }
        Ok(())
    }

    async fn ask_again(&mut self, patience: Duration) -> Result<(), NetbusError> {
        for device in self.absent.clone() {
            send(&mut self.output, &Say::Subscribe { device }, patience).await?;
        }
        Ok(())
    }
}
