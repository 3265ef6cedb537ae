//! The exporter is another instance: what the one before acknowledged and did not flush is written again, before anything is answered.
//!
//! ```text
//!   hold the copies of all channels (each drops its connection, and sends and answers nothing without them)
//!     -> a later session: older connections are read no more, and what they had begun has ended
//!     -> write all that is retained, in the order in which it was first sent -> flush -> it is durable; copies go back
//! ```
//! If that fails, copies go back as they were, and the next attempt begins anew: to write them twice changes nothing.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::sleep;

use super::Shared;
use super::connect::Reached;
use super::failure::Failure;
use super::link::Link;
use super::retained::{Retained, RetainedWrite};
use super::socket::{Duplex, Socket};
use super::status::Loss;
use crate::error::Violation;
use crate::mutation::{Rule, removed};
use crate::records::StreamError;
use crate::spec::{NBD_CMD_FLUSH, NBD_ESHUTDOWN};
use crate::transmission::{ReplyEvent, ReplyReader, Request};

/// How often it is asked whether a channel has ended its turn.
const TURN: Duration = Duration::from_micros(200);
/// Requests, and bytes, under way at a time.
const MOST_REQUESTS: usize = 64;
const MOST_BYTES: usize = 1 << 20;

/// The copies of all channels, while no channel has them. They go back when this is dropped.
pub(super) struct Held<'a> {
    shared: &'a Shared,
    links: Vec<(Arc<Link>, Box<Retained>)>,
    #[expect(clippy::vec_box, reason = "boxes as channels have them: an I/O core moves a pointer")]
    left: Vec<Box<Retained>>,
}

impl Held<'_> {
    /// Takes them, and the channels' connections with them. The caller has [`Shared::turnover`]. `own`: whose connection is being made.
    pub async fn take<'a>(shared: &'a Shared, own: &Arc<Link>) -> Held<'a> {
        let mut held = Held { shared, links: Vec::new(), left: Vec::new() };
        while held.some_are_missing(own) {
            sleep(TURN).await;
        }
        held
    }

    fn some_are_missing(&mut self, own: &Arc<Link>) -> bool {
        let Some(shelf) = &self.shared.shelf else { return false };
        let mut shelf = shelf.open();
        self.left.append(&mut shelf.take_all());
        let links = self.shared.links.load();
        let mut missing = false;
        for link in links.iter().filter_map(Weak::upgrade) {
            let known = self.links.iter().any(|(known, _)| Arc::ptr_eq(known, &link));
            let of_others = removed(Rule::AllQueues) && !Arc::ptr_eq(&link, own);
            let Some(locker) = link.retained.as_ref().filter(|_| !known && !of_others) else { continue };
            match locker.take() {
                Some(mut retained) => {
                    retained.cut = true;
                    link.take_back();
                    self.links.push((link, retained));
                }
                None => missing |= !link.shelved(),
            }
        }
        missing
    }

    /// What may be lost, in the order in which it is to be written.
    fn writes(&self) -> Vec<(&RetainedWrite, &Retained)> {
        let durable = self.shared.writes.durable();
        let all = self.links.iter().map(|(_, retained)| retained).chain(&self.left);
        let mut writes: Vec<_> =
            all.flat_map(|retained| retained.left(durable).map(move |write| (write, &**retained))).collect();
        if removed(Rule::Retain) {
            writes.clear();
        }
        if removed(Rule::InOrder) {
            writes.reverse();
        } else {
            writes.sort_unstable_by_key(|(write, _)| write.stamp);
        }
        writes
    }

    /// Writes all of it by a connection on which nothing has been asked for, and flushes. Says how many writes those were.
    pub async fn write_again(&self, reached: &Reached) -> Result<u64, Trouble> {
        let writes = self.writes();
        let mut talk = Talk::new(&reached.socket, reached.structured, self.shared.options.dead_after)?;
        let (mut under_way, mut bytes) = (Vec::new(), 0);
        for (write, retained) in &writes {
            let request = write.request;
            let (start, end) = (request.offset, request.offset + u64::from(request.length));
            let overlaps = under_way.iter().any(|(from, to)| *from < end && start < *to);
            if overlaps || talk.asked.len() >= MOST_REQUESTS || bytes >= MOST_BYTES {
                talk.answers().await?;
                under_way.clear();
                bytes = 0;
            }
            under_way.push((start, end));
            bytes += request.payload() as usize;
            let zeros = write.zeros.then(|| vec![0; request.payload() as usize]);
            talk.ask(request, zeros.as_deref().unwrap_or_else(|| retained.data_of(write))).await?;
        }
        talk.answers().await?;
        talk.flush().await?;
        Ok(writes.len() as u64)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for (link, retained) in self.links.drain(..) {
            if let Some(locker) = &link.retained {
                locker.put(retained);
            }
            // It may have looked for them meanwhile.
            link.wake_if_busy();
        }
        if let Some(shelf) = &self.shared.shelf {
            let mut shelf = shelf.open();
            self.left.drain(..).for_each(|retained| shelf.put_back(retained));
        }
    }
}

/// Why writing again came to nothing.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The connection is lost.
    Network(Failure),
    /// The server refuses, by NBD's error value.
    Device(u32),
}

/// A connection by which the control half asks.
pub(super) struct Talk {
    socket: Arc<Socket>,
    ready: Duplex,
    reader: ReplyReader,
    input: Vec<u8>,
    asked: Vec<Request>,
    cookie: u64,
    error: Option<u32>,
    limit: Duration,
}

impl Talk {
    /// Nothing has been asked for on it. Without headway for `limit` it counts as lost.
    pub fn new(socket: &Arc<Socket>, structured: bool, limit: Duration) -> Result<Talk, Trouble> {
        Ok(Talk {
            ready: socket.duplex().map_err(lost)?,
            socket: socket.clone(),
            reader: ReplyReader::new(structured),
            input: Vec::new(),
            asked: Vec::new(),
            cookie: 0,
            error: None,
            limit,
        })
    }

    /// Everything that has been answered on any connection is durable.
    pub async fn flush(&mut self) -> Result<(), Trouble> {
        let request = Request { flags: 0, command: NBD_CMD_FLUSH, cookie: 0, offset: 0, length: 0 };
        self.ask(request, &[]).await?;
        self.answers().await
    }

    async fn ask(&mut self, request: Request, data: &[u8]) -> Result<(), Trouble> {
        self.cookie += 1;
        let request = Request { cookie: self.cookie, ..request };
        self.asked.push(request);
        self.send(&request.encode()).await?;
        self.send(data).await
    }

    async fn send(&mut self, mut bytes: &[u8]) -> Result<(), Trouble> {
        loop {
            let ready = tokio::time::timeout(self.limit, self.ready.writable()).await;
            let mut ready = ready.map_err(|_| silent())?.map_err(lost)?;
            let sent = match bytes {
                // What was taken may not have gone out.
                [] => match self.socket.flush() {
                    Ok(true) => return Ok(()),
                    Ok(false) => Err(libc::EAGAIN),
                    Err(errno) => Err(errno),
                },
                bytes => self.socket.send_own(bytes),
            };
            match sent {
                Ok(sent) => bytes = &bytes[sent..],
                Err(libc::EAGAIN) => ready.clear_ready(),
                Err(libc::EINTR) => {}
                Err(errno) => return Err(lost(std::io::Error::from_raw_os_error(errno))),
            }
        }
    }

    /// Waits until all is answered. The first error, if one is.
    async fn answers(&mut self) -> Result<(), Trouble> {
        let mut buffer = vec![0; 16 << 10];
        loop {
            self.read()?;
            if self.asked.is_empty() {
                return self.error.map_or(Ok(()), |error| Err(Trouble::Device(error)));
            }
            match self.socket.receive_own(&mut buffer) {
                Ok(0) => return Err(Loss::Closed.into()),
                Ok(got) => self.input.extend_from_slice(&buffer[..got]),
                Err(StreamError::System(libc::EAGAIN)) => {
                    let ready = tokio::time::timeout(self.limit, self.ready.readable()).await;
                    // Before the next attempt, which is made until nothing comes.
                    ready.map_err(|_| silent())?.map_err(lost)?.clear_ready();
                }
                Err(StreamError::System(libc::EINTR)) => {}
                Err(error) => return Err(Loss::from(error).into()),
            }
        }
    }

    /// Reads what has come.
    fn read(&mut self) -> Result<(), Trouble> {
        loop {
            let mut input = &self.input[..];
            let asked = &self.asked;
            let find = |cookie| asked.iter().find(|request| request.cookie == cookie).copied();
            let event = self.reader.next(&mut input, find);
            let used = self.input.len() - input.len();
            self.input.drain(..used);
            match event.map_err(Loss::Violation)? {
                None => return Ok(()),
                Some(ReplyEvent::Error { error: NBD_ESHUTDOWN, .. }) => {
                    return Err(Loss::ShuttingDown.into());
                }
                Some(ReplyEvent::Error { error, .. }) => self.error = self.error.or(Some(error)),
                Some(ReplyEvent::Done { cookie }) => self.asked.retain(|request| request.cookie != cookie),
                // None of these answers a write or a flush, and the reader refuses them.
                Some(
                    ReplyEvent::Payload { .. } | ReplyEvent::Hole { .. } | ReplyEvent::BlockStatus { .. },
                ) => return Err(Loss::Violation(Violation::Unasked).into()),
            }
        }
    }
}

impl From<Loss> for Trouble {
    fn from(loss: Loss) -> Trouble {
        Trouble::Network(loss.into())
    }
}

fn lost(error: std::io::Error) -> Trouble {
    Trouble::Network(error.to_string().into())
}

fn silent() -> Trouble {
    Trouble::Network("the server does not answer".into())
}

impl Shared {
    /// What has been written again, in all.
    pub fn count_rewritten(&self, writes: u64) {
        self.rewritten.fetch_add(writes, Ordering::Relaxed);
    }
}
