//! Whether the server of a disk is there, as far as can be told from here.
//!
//! QEMU stops the rings of a VM that it pauses, so that a disk has no connection by which this could be seen: then the server is asked by one that ends with that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_nbd::import::{ClaimStanding, ConnectionState, Import};
use tokio::sync::oneshot::{self, error::TryRecvError};

use super::plan::LinkSeen;

/// From one answer to the next question.
const AGAIN: Duration = Duration::from_secs(1);

/// What is known of one disk from one look to the next.
#[derive(Default)]
pub struct Link {
    /// Since when its first connection is being made.
    connecting: Option<Instant>,
    asking: Option<oneshot::Receiver<Result<(), String>>>,
    answer: Option<(Instant, Result<(), String>)>,
    /// How many of its queues had started when it was looked at last.
    starts: u64,
    /// Some have since.
    started: bool,
}

impl Link {
    /// How it stands. `asks`: its server may be asked if there is no connection.
    pub fn look(&mut self, import: &Arc<Import>, asks: bool) -> LinkSeen {
        let status = import.status();
        self.started |= status.starts != self.starts;
        self.starts = status.starts;
        let mut open =
            status.connections.iter().filter(|one| one.state != ConnectionState::Closed).peekable();
        if open.peek().is_none() {
            self.connecting = None;
            if asks {
                return self.ask(import);
            }
            self.forget();
            return LinkSeen::Back { idle: true };
        }
        self.forget();
        let waits = matches!(
            status.claim,
            ClaimStanding::Waiting { .. } | ClaimStanding::Releasing { .. } | ClaimStanding::Refused { .. }
        );
        let mut seen = LinkSeen::Back { idle: true };
        let mut connecting = false;
        for one in open {
            seen = worse(
                seen,
                match &one.state {
                    ConnectionState::Connected { .. } => LinkSeen::Back { idle: one.in_flight == 0 },
                    // It waits for another guest, or somebody has to decide.
                    ConnectionState::Reconnecting { .. } | ConnectionState::Connecting if waits => {
                        LinkSeen::Unknown
                    }
                    ConnectionState::Reconnecting { since, .. } => LinkSeen::Lost(since.elapsed()),
                    ConnectionState::Connecting => {
                        connecting = true;
                        LinkSeen::Lost(self.connecting.get_or_insert_with(Instant::now).elapsed())
                    }
                    ConnectionState::Stopped { .. } | ConnectionState::Closed => LinkSeen::Unknown,
                },
            );
        }
        if !connecting {
            self.connecting = None;
        }
        seen
    }

    /// Whether queues have started since this was asked last: a VM that was paused may run.
    pub fn take_started(&mut self) -> bool {
        std::mem::take(&mut self.started)
    }

    /// Why its server is not there, by its last answer.
    pub fn why(&self) -> Option<&str> {
        self.answer.as_ref().and_then(|(_, answer)| answer.as_ref().err()).map(String::as_str)
    }

    /// What was asked is of no interest.
    fn forget(&mut self) {
        (self.asking, self.answer) = (None, None);
    }

    fn ask(&mut self, import: &Arc<Import>) -> LinkSeen {
        let answer = self.asking.as_mut().map(oneshot::Receiver::try_recv);
        match answer {
            None | Some(Err(TryRecvError::Empty)) => {}
            Some(Err(TryRecvError::Closed)) => self.asking = None,
            Some(Ok(answer)) => (self.asking, self.answer) = (None, Some((Instant::now(), answer))),
        }
        let fresh = self.answer.as_ref().is_some_and(|(at, _)| at.elapsed() < AGAIN);
        if self.asking.is_none() && !fresh {
            let (import, (sender, receiver)) = (import.clone(), oneshot::channel());
            self.asking = Some(receiver);
            tokio::spawn(async move {
                let answer = import.probe().await.map_err(|error| error.to_string());
                // Nobody wants to know if there is a connection meanwhile.
                let _ = sender.send(answer);
            });
        }
        match &self.answer {
            Some((_, Ok(()))) => LinkSeen::Back { idle: true },
            _ => LinkSeen::Unknown,
        }
    }
}

/// The worse of two connections: the one that nobody can say anything about, or the one that is lost for longer.
fn worse(one: LinkSeen, other: LinkSeen) -> LinkSeen {
    match (one, other) {
        (LinkSeen::Unknown, _) | (_, LinkSeen::Unknown) => LinkSeen::Unknown,
        (LinkSeen::Lost(one), LinkSeen::Lost(other)) => LinkSeen::Lost(one.max(other)),
        (LinkSeen::Lost(time), _) | (_, LinkSeen::Lost(time)) => LinkSeen::Lost(time),
        (LinkSeen::Back { idle: one }, LinkSeen::Back { idle: other }) => {
            LinkSeen::Back { idle: one && other }
        }
    }
}
