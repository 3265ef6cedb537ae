//! The side of a session that tells.

use std::collections::BTreeMap;
use std::pin::pin;

use tokio::io::{AsyncRead, AsyncWrite, WriteHalf};
use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinSet};

use super::message::{Answer, Say, VERSION, heard, read_all, receive};
use super::state::DeviceState;
use super::{MOST_SUBSCRIPTIONS, SessionTiming};
use crate::error::NetbusError;
use crate::names::{is_name, printable, shown};
use crate::wire::send;

/// What may be told to whoever has a session.
pub trait Publications: Sync {
    /// The state of the device of that name, now and as it changes; or why this subscriber is not told.
    ///
    /// # Errors
    /// There is none, or it is not for this subscriber: a text that it is told.
    fn subscribe(&self, device: &str) -> Result<watch::Receiver<DeviceState>, String>;
}

/// Tells what a subscriber asks for, until it closes the connection, is silent or breaks the protocol, or `end` comes: then it is told what has
/// changed last.
///
/// # Errors
/// The peer is gone, or says what nobody may say here.
pub async fn serve<S: AsyncRead + AsyncWrite + Send>(
    stream: S,
    publications: &impl Publications,
    timing: SessionTiming,
    end: impl Future<Output = ()> + Send,
) -> Result<(), NetbusError> {
    let (mut input, mut output) = tokio::io::split(Box::pin(stream));
    match receive(&mut input, timing.patience, timing.patience).await? {
        None => return Ok(()),
        Some(Say::Hello { version }) if version > 0 => {
            let welcome = Answer::Welcome { version: version.min(VERSION) };
            send(&mut output, &welcome, timing.patience).await?;
        }
        Some(Say::Hello { version }) => return Err(NetbusError::Version(version)),
        Some(_) => return Err(NetbusError::Malformed("it does not say hello first".to_owned())),
    }
    let (said, mut hears) = heard();
    let read = pin!(read_all(&mut input, &timing, said));
    let mut session = PublishedSession {
        output,
        timing,
        publications,
        subscribed: BTreeMap::new(),
        waiting: JoinSet::new(),
    };
    let answer = async {
        let mut end = pin!(end);
        loop {
            tokio::select! {
                say = hears.recv() => match say {
                    Some(say) => session.answer(say).await?,
                    None => return Ok(()),
                },
                Some(changed) = session.waiting.join_next_with_id() => {
                    // One that is not waited for any more has been aborted.
                    if let Ok((id, seen)) = changed {
                        session.changed(id, seen).await?;
                    }
                }
                () = &mut end => return session.end().await,
            }
        }
    };
    tokio::select! {
        ended = read => ended,
        ended = answer => ended,
    }
}

/// A device that the subscriber is told of.
struct Subscription {
    /// Whoever waits for its next change.
    waiter: AbortHandle,
    state: watch::Receiver<DeviceState>,
    /// What was sent last.
    sent: Option<DeviceState>,
}

/// What has become of a device that was waited for.
struct Seen {
    device: String,
    /// It will not change any more: whoever changed it is gone.
    last: bool,
}

struct PublishedSession<'a, S, P> {
    output: WriteHalf<std::pin::Pin<Box<S>>>,
    timing: SessionTiming,
    publications: &'a P,
    subscribed: BTreeMap<String, Subscription>,
    /// One for each that is subscribed: a change is waited for once, and sent as it is when its turn comes.
    waiting: JoinSet<Seen>,
}

impl<S: AsyncRead + AsyncWrite + Send, P: Publications> PublishedSession<'_, S, P> {
    async fn say(&mut self, answer: &Answer) -> Result<(), NetbusError> {
        send(&mut self.output, answer, self.timing.patience).await
    }

    async fn answer(&mut self, say: Say) -> Result<(), NetbusError> {
        match say {
            Say::Hello { .. } => Err(NetbusError::Malformed("it says hello again".to_owned())),
            Say::Ping { number } => self.say(&Answer::Pong { number }).await,
            Say::Unsubscribe { device } => {
                self.forget(&device);
                Ok(())
            }
            Say::Subscribe { device } if !is_name(&device) => {
                Err(NetbusError::Malformed(format!("{:?} is no name of a device", shown(&device))))
            }
            Say::Subscribe { device } => {
                self.forget(&device);
                let found = match self.subscribed.len() < MOST_SUBSCRIPTIONS {
                    true => self.publications.subscribe(&device),
                    false => Err(format!("this session is about {MOST_SUBSCRIPTIONS} devices already")),
                };
                match found {
                    Ok(mut state) => {
                        state.mark_changed();
                        self.wait(device, state, None);
                        Ok(())
                    }
                    Err(why) => self.say(&Answer::Refused { device, why: printable(&why) }).await,
                }
            }
        }
    }

    fn forget(&mut self, device: &str) {
        if let Some(Subscription { waiter, .. }) = self.subscribed.remove(device) {
            waiter.abort();
        }
    }

    fn wait(&mut self, device: String, state: watch::Receiver<DeviceState>, sent: Option<DeviceState>) {
        let (name, mut waits) = (device.clone(), state.clone());
        let waiter = self.waiting.spawn(async move {
            let last = waits.changed().await.is_err();
            Seen { device: name, last }
        });
        self.subscribed.insert(device, Subscription { waiter, state, sent });
    }

    async fn changed(&mut self, id: Id, Seen { device, last }: Seen) -> Result<(), NetbusError> {
        // It may have been subscribed to anew meanwhile.
        let current = self.subscribed.get(&device).is_some_and(|one| one.waiter.id() == id);
        let Some(Subscription { mut state, sent, .. }) =
            current.then(|| self.subscribed.remove(&device)).flatten()
        else {
            return Ok(());
        };
        let now = state.borrow_and_update().clone().sendable();
        if sent.as_ref() != Some(&now) {
            self.say(&Answer::State { device: device.clone(), state: now.clone() }).await?;
        }
        if last {
            let why = "it is not served any more".to_owned();
            return self.say(&Answer::Refused { device, why }).await;
        }
        self.wait(device, state, Some(now));
        Ok(())
    }

    /// What has changed and was not sent yet goes out first.
    async fn end(&mut self) -> Result<(), NetbusError> {
        for (device, Subscription { state, sent, .. }) in std::mem::take(&mut self.subscribed) {
            let now = state.borrow().clone().sendable();
            if sent.as_ref() != Some(&now) {
                self.say(&Answer::State { device, state: now }).await?;
            }
        }
        self.say(&Answer::Bye).await
    }
}
