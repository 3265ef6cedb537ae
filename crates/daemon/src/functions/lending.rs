//! Pages of a function's registers that are lent to a library in its VMM's process, and taken back before anything of a move begins
//! (docs/decisions/0088-lent-pages.md).
//!
//! ```text
//!   library: finds the marker page, connects --> a task of the function: is it the VMM that the function is served to?
//!   the task --Lend, descriptor--> library, once a guest drives the function     --Take--> library --Taken--> the task
//! ```

use std::ffi::OsString;
use std::future::{Future, pending};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ioplane_device::Lifecycle;
use ioplane_host::socket::{self, SocketPath};
use ioplane_host::vfio_user::Handle;
use ioplane_passthrough::Lent;
use ioplane_pci::PageMessage;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};

use super::Card;
use super::body::Body;
use crate::access::SocketAccess;
use crate::refusal::Refusal;

/// Between two looks whether pages may be lent.
const LOOK: Duration = Duration::from_millis(250);
/// How long a library may take to give pages back.
const BACK: Duration = Duration::from_secs(1);
/// The same, with whatever the task and the function's thread do first.
const PATIENCE: Duration = Duration::from_secs(3);
/// What to do where pages do not come back.
const UNPLUG: &str = "its guest goes on. Try again; if that fails, shut the guest down, or unplug the function there and plug it in again";

/// Where a library in the VMM's process connects, of a function that is served at `socket`.
pub(super) fn path_beside(socket: &Path) -> PathBuf {
    let mut path = OsString::from(socket);
    path.push(".pages");
    path.into()
}

/// A VMM: its process, and how many have come with it.
type Client = (u32, u64);

/// The function, as it is seen here.
trait Lends: Send + Sync + 'static {
    /// Who has it.
    fn client(&self) -> Option<Client>;
    /// Pages that may be lent now; they count as lent from here on.
    fn lend(&self) -> impl Future<Output = Option<Lent>> + Send;
    /// Whether more could be.
    fn could_lend_more(&self) -> impl Future<Output = bool> + Send;
    /// Nothing is lent any more.
    fn are_back(&self) -> impl Future<Output = Result<(), String>> + Send;
}

impl Lends for Handle<Body> {
    fn client(&self) -> Option<Client> {
        let status = self.status();
        status.peer.filter(|_| status.connected).map(|pid| (pid, status.connections))
    }

    async fn lend(&self) -> Option<Lent> {
        self.with(|device: &mut Lifecycle<Body>| device.with(Body::lend)).await.ok()?.ok()?
    }

    async fn could_lend_more(&self) -> bool {
        let asked = self.with(|device: &mut Lifecycle<Body>| device.with(|body| body.could_lend_more()));
        matches!(asked.await, Ok(Ok(true)))
    }

    async fn are_back(&self) -> Result<(), String> {
        match self.with(|device: &mut Lifecycle<Body>| device.with(Body::pages_are_back)).await {
            Ok(Err(error)) => Err(error.to_string()),
            // One that is no longer served lends nothing.
            Ok(Ok(())) | Err(_) => Ok(()),
        }
    }
}

enum Ask {
    Back(oneshot::Sender<Result<Trapped, String>>),
    /// One who has asked for that has what it wanted.
    Free,
}

/// All registers of a function are trapped as long as this is there.
pub(super) struct Trapped(mpsc::UnboundedSender<Ask>);

impl Drop for Trapped {
    fn drop(&mut self) {
        // A task that has ended lends nothing.
        let _ = self.0.send(Ask::Free);
    }
}

/// The task that lends a function's pages. It ends with this.
pub(super) struct Lender {
    asks: mpsc::UnboundedSender<Ask>,
    bound: SocketPath,
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.bound.clear();
    }
}

impl Lender {
    /// Begins to listen beside `served`. Inside of a runtime.
    pub(super) fn begin(
        served: &Path,
        access: SocketAccess,
        handle: &Handle<Body>,
    ) -> Result<Lender, Refusal> {
        let path = path_beside(served);
        let listener = socket::bind(&path)
            .and_then(|listener| Ok((UnixListener::from_std(listener)?, SocketPath::of(&path))));
        let (listener, bound) = listener.map_err(|error| {
            Refusal::failed(
                format!("the socket {}, by which pages are lent: {error}", path.display()),
                "is something else there? Remove it, or add the function without --mapped",
            )
        })?;
        access.open(&path)?;
        Ok(Lender::over(listener, bound, handle.clone()))
    }

    fn over(listener: UnixListener, bound: SocketPath, function: impl Lends) -> Lender {
        let (asks, asked) = mpsc::unbounded_channel();
        let own = asks.downgrade();
        let lending = Lending { function, line: None, loan: None, held: 0, number: 0, own };
        tokio::spawn(lending.run(listener, asked));
        Lender { asks, bound }
    }

    /// Takes back what is lent. Nothing is lent as long as the result is there.
    ///
    /// # Errors
    ///
    /// The guest may go on using pages past us.
    pub(super) async fn take_back(&self) -> Result<Trapped, String> {
        let (reply, answer) = oneshot::channel();
        let late = || "its registers were not given back in time".to_owned();
        self.asks.send(Ask::Back(reply)).map_err(|_| late())?;
        timeout(PATIENCE, answer).await.ok().and_then(Result::ok).unwrap_or_else(|| Err(late()))
    }
}

impl Card {
    /// Has all of its registers trapped as long as the result is there.
    pub(super) async fn trapped(&self) -> Result<Option<Trapped>, Refusal> {
        let Some(lender) = &self.served.lender else { return Ok(None) };
        let back = lender.take_back().await;
        back.map(Some).map_err(|why| Refusal::conflict(format!("{}: {why}", self.name()), UNPLUG))
    }
}

/// A library that has connected.
struct Line {
    stream: UnixStream,
    client: Client,
    /// What has come of a message.
    got: Vec<u8>,
}

impl Line {
    /// The next message; `None` if the library is gone, or says what is none. May be broken off.
    async fn next(line: &mut Option<Line>) -> Option<PageMessage> {
        let Some(Line { stream, got, .. }) = line else { return pending().await };
        while got.len() < PageMessage::BYTES {
            stream.readable().await.ok()?;
            let mut rest = [0; PageMessage::BYTES];
            match stream.try_read(&mut rest[got.len()..]) {
                Ok(0) => return None,
                Ok(more) => got.extend_from_slice(&rest[got.len()..][..more]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
        let bytes: [u8; PageMessage::BYTES] = std::mem::take(got).try_into().ok()?;
        PageMessage::read(&bytes)
    }

    /// Sends a message, with what is to be mapped. Says how many bytes have gone.
    async fn send(&self, message: PageMessage, lent: Option<&Lent>) -> io::Result<usize> {
        let bytes = message.bytes();
        let files: Vec<_> = lent.map(|lent| lent.file.as_fd()).into_iter().collect();
        self.stream
            .async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                if !files.is_empty() {
                    ancillary.push(SendAncillaryMessage::ScmRights(&files));
                }
                let sent = rustix::net::sendmsg(
                    &self.stream,
                    &[IoSlice::new(&bytes)],
                    &mut ancillary,
                    SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
                );
                Ok(sent?)
            })
            .await
    }
}

/// Pages that are lent.
struct Loan {
    number: u64,
    client: Client,
    /// No more will be lent.
    all: bool,
}

struct Lending<F> {
    function: F,
    line: Option<Line>,
    loan: Option<Loan>,
    /// So many want all pages trapped.
    held: usize,
    /// Of the last loan.
    number: u64,
    own: mpsc::WeakUnboundedSender<Ask>,
}

impl<F: Lends> Lending<F> {
    async fn run(mut self, listener: UnixListener, mut asks: mpsc::UnboundedReceiver<Ask>) {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                ask = asks.recv() => match ask {
                    None => return,
                    Some(Ask::Back(reply)) => {
                        let back = self.take_back().await;
                        let Some(own) = self.own.upgrade() else { return };
                        let back = back.map(|()| {
                            self.held += 1;
                            Trapped(own)
                        });
                        // If nobody waits any more, what is dropped says so.
                        let _ = reply.send(back);
                    }
                    Some(Ask::Free) => self.held = self.held.saturating_sub(1),
                },
                accepted = listener.accept(), if self.line.is_none() => match accepted {
                    Ok((stream, _)) => self.greet(stream),
                    // No descriptors: the next look may find one.
                    Err(_) => tokio::time::sleep(LOOK).await,
                },
                message = Line::next(&mut self.line), if self.line.is_some() => self.said(message).await,
                _ = looks.tick(), if self.line.is_some() || self.loan.is_some() => self.look().await,
            }
        }
    }

    /// Somebody has connected: heard if it is in the process of the VMM.
    fn greet(&mut self, stream: UnixStream) {
        let pid = rustix::net::sockopt::socket_peercred(&stream).ok();
        let pid = pid.and_then(|peer| u32::try_from(peer.pid.as_raw_nonzero().get()).ok());
        match self.function.client() {
            Some(client) if Some(client.0) == pid => {
                self.line = Some(Line { stream, client, got: Vec::new() });
            }
            client => tracing::warn!(?pid, ?client, "pages are lent to the VMM's own process alone"),
        }
    }

    async fn said(&mut self, message: Option<PageMessage>) {
        match message {
            Some(PageMessage::Taken { number }) => {
                if self.loan.as_ref().is_some_and(|loan| loan.number == number) {
                    self.loan = None;
                    self.settle().await;
                }
            }
            Some(PageMessage::Lent { .. }) => {}
            // What it has not given back it may have mapped.
            None | Some(PageMessage::Lend { .. } | PageMessage::Take { .. }) => self.line = None,
        }
    }

    /// The function is told that nothing is lent. One that has no time now is told when somebody wants it trapped.
    async fn settle(&self) {
        if let Err(error) = self.function.are_back().await {
            tracing::debug!(error, "pages are back, and the function has no time");
        }
    }

    /// Who has come with another VMM, or was one's that has left, is nobody any more. Lends what may be lent.
    async fn look(&mut self) {
        let now = self.function.client();
        self.line.take_if(|line| Some(line.client) != now);
        self.loan.take_if(|loan| Some(loan.client) != now);
        if self.held > 0 || self.line.is_none() {
            return;
        }
        match &self.loan {
            None => {
                if let Some(lent) = self.function.lend().await {
                    self.hand(lent).await;
                }
            }
            Some(loan) if !loan.all => {
                if self.function.could_lend_more().await
                    && let Err(error) = self.take_back().await
                {
                    tracing::debug!(error, "more pages could be lent");
                }
            }
            Some(_) => {}
        }
    }

    async fn hand(&mut self, lent: Lent) {
        // The function's thread took its time: it may be another VMM's by now.
        let now = self.function.client();
        let Some(line) = self.line.as_ref().filter(|line| Some(line.client) == now) else {
            return self.settle().await;
        };
        self.number += 1;
        let number = self.number;
        let message = PageMessage::Lend { number, pages: lent.pages, at: lent.at };
        let sent = timeout(BACK, line.send(message, Some(&lent))).await;
        match sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(sent) => {
                self.loan = Some(Loan { number, client: line.client, all: lent.all });
                if sent < PageMessage::BYTES {
                    self.line = None;
                }
            }
            Err(_) => {
                // Nothing has gone.
                self.line = None;
                self.settle().await;
            }
        }
    }

    async fn take_back(&mut self) -> Result<(), String> {
        self.loan.take_if(|loan| Some(loan.client) != self.function.client());
        if let Some(Loan { number, .. }) = self.loan {
            let gone = || {
                "the library in its VMM's process has some of its registers mapped, and is gone".to_owned()
            };
            let line = self.line.as_ref().ok_or_else(gone)?;
            let end = Instant::now() + BACK;
            let sent = timeout_at(end, line.send(PageMessage::Take { number }, None)).await;
            sent.map_err(|_| gone())?.map_err(|_| gone())?;
            while self.loan.is_some() {
                let Ok(message) = timeout_at(end, Line::next(&mut self.line)).await else {
                    return Err(format!(
                        "the library in its VMM's process has not given its registers back in {} ms",
                        BACK.as_millis()
                    ));
                };
                self.said(message).await;
                if self.line.is_none() && self.loan.is_some() {
                    return Err(gone());
                }
            }
        }
        self.function.are_back().await
    }
}

#[cfg(test)]
#[path = "lending_tests.rs"]
mod tests;
