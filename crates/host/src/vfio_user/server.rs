//! One thread for each device: accepts its client, obeys it, and attends to the device between two messages.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ioplane_embed::{Front, Presence};
use ioplane_memory::Limits;
use ioplane_pci::Function;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::connection::Connection;
use super::fault::ClientFault;
use super::session::Session;
use super::status::{Board, Status};
use crate::socket::{self, Place};

/// Where and how a device is served.
#[derive(Debug, Clone)]
pub struct Options {
    /// Path of the socket. Made with mode 0600; what was there before is replaced if nobody listens.
    pub socket: PathBuf,
    /// How long the device may take to become quiescent by itself when memory goes away; then it is suspended. QEMU waits 5 s for a
    /// reply (`x-msg-timeout`).
    pub patience: Duration,
    /// What clients may take of memory.
    pub limits: Limits,
}

impl Options {
    /// Long enough for requests of a device of ours, short enough for QEMU's several unmaps in a row.
    pub const PATIENCE: Duration = Duration::from_millis(500);

    /// The usual ones.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Options { socket: socket.into(), patience: Self::PATIENCE, limits: Limits::default() }
    }
}

/// Why the service did not stop; it goes on.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A client is connected.
    #[error("a VMM is connected: shut the VM down or unplug the device first, or use --force")]
    Connected,
}

#[derive(Debug)]
struct Hold {
    socket: PathBuf,
    board: Arc<Board>,
    stop: Arc<OwnedFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Hold {
    fn ask_to_stop(&self) {
        // A full counter is readable too.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.ask_to_stop();
    }
}

/// The daemon's hold on one device that is being served. When the last copy is dropped the service ends, by force if need be.
#[derive(Debug, Clone)]
pub struct Handle(Arc<Hold>);

impl Handle {
    /// Path of its socket.
    pub fn socket(&self) -> &Path {
        &self.0.socket
    }

    /// How it is. Never waits for the service.
    pub fn status(&self) -> Status {
        self.0.board.read()
    }

    /// Ends the service: refuses while a client is connected, unless forced. When it returns, the client's memory is gone from the
    /// device, the socket is gone, and the front is the caller's alone. Waits for the device to stop: at most a few times the
    /// patience of its options.
    pub fn stop(&self, force: bool) -> Result<(), Refusal> {
        if self.0.board.connected.load(Relaxed) && !force {
            return Err(Refusal::Connected);
        }
        self.0.ask_to_stop();
        // Whoever comes second waits for the first.
        let mut thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take()
            && thread.join().is_err()
        {
            tracing::error!(socket = %self.0.socket.display(), "the service's thread had panicked");
        }
        Ok(())
    }
}

/// Serves the function behind `front` on a socket until stopped, on a thread of its own.
pub fn serve<F: Function>(front: Arc<Front<F>>, options: Options) -> std::io::Result<Handle> {
    let listener = socket::bind(&options.socket)?;
    let board = Arc::new(Board::default());
    let stop = crate::eventfd::fresh()?;
    let session = Session::told(front, &options, board.clone(), stop.clone())?;
    let mut service = Service { session, listener, connection: None, burdened: false };
    let place = Place::of(&options.socket);
    // The system keeps fifteen bytes of it: enough to tell the threads of one daemon apart.
    let name = format!("vfu:{}", options.socket.file_stem().unwrap_or_default().to_string_lossy());
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        service.run();
        place.clear();
    })?;
    let thread = Mutex::new(Some(thread));
    Ok(Handle(Arc::new(Hold { socket: options.socket, board, stop, thread })))
}

/// How long to wait before what failed for want of something is tried again.
const PAUSE: Duration = Duration::from_millis(100);

struct Service<F: Function> {
    session: Session<F>,
    listener: UnixListener,
    connection: Option<Connection>,
    /// A client has left, and the device is not rid of its memory yet: nobody else is let in.
    burdened: bool,
}

/// What is ready.
#[derive(Debug, Default)]
struct Ready {
    stop: bool,
    moved: bool,
    message: bool,
    attention: bool,
    resume: bool,
    listener: bool,
}

impl<F: Function> Service<F> {
    fn run(&mut self) {
        let mut pause = false;
        loop {
            let ready = self.wait(pause || self.burdened);
            pause = false;
            if ready.stop || self.session.front.presence() == Presence::Closed {
                break;
            }
            if ready.moved {
                self.session.hear_move();
            }
            if self.burdened {
                self.clean_up();
            }
            if ready.attention {
                self.session.attend();
            }
            if ready.resume {
                self.session.resume_line();
            }
            if ready.message
                && let Err(fault) = self.message()
            {
                self.disconnect(&fault);
            }
            // Last: a client that has left is heard before the one that comes after it.
            if ready.listener {
                pause = self.accept().is_err();
            }
        }
        if self.connection.is_some() || self.burdened {
            self.disconnect(&ClientFault::Gone);
        }
    }

    /// Waits for something to do; with `pause` not for a client, and not for ever.
    fn wait(&mut self, pause: bool) -> Ready {
        let attention = self.session.attention();
        let resume = self.session.wires.resume.clone();
        let wanted: [(usize, Option<BorrowedFd<'_>>); 6] = [
            (0, Some(self.session.stopping())),
            (1, Some(self.session.moved())),
            (2, self.connection.as_ref().map(Connection::socket)),
            (3, attention.as_ref().map(|file| file.as_fd())),
            (4, resume.as_ref().map(|file| file.as_fd())),
            (5, (!pause).then_some(self.listener.as_fd())),
        ];
        let mut files = Vec::with_capacity(wanted.len());
        let mut what = [false; 6];
        let mut names = Vec::with_capacity(wanted.len());
        for (name, file) in wanted {
            if let Some(file) = file {
                files.push(PollFd::from_borrowed_fd(file, PollFlags::IN));
                names.push(name);
            }
        }
        let received = self.connection.as_ref().is_some_and(Connection::has_message);
        let timeout = if received { Some(Duration::ZERO) } else { pause.then_some(PAUSE) };
        let timeout = timeout.map(|time| Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() });
        if rustix::event::poll(&mut files, timeout.as_ref()).is_ok() {
            for (name, file) in names.into_iter().zip(&files) {
                what[name] = !file.revents().is_empty();
            }
        }
        let [stop, moved, message, attention, resume, listener] = what;
        Ready { stop, moved, message: message || received, attention, resume, listener }
    }

    fn message(&mut self) -> Result<(), ClientFault> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        match connection.receive()? {
            Some(message) => self.session.handle(message, connection),
            None => Ok(()),
        }
    }

    /// Takes a client in, or turns it away. An error says that there is no use in trying at once again.
    fn accept(&mut self) -> std::io::Result<()> {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => {
                tracing::warn!(%error, "accepting a client");
                return Err(error);
            }
        };
        let board = &self.session.board;
        if self.connection.is_some() {
            // Closed before it has a version: QEMU says so and ends.
            board.fault(&ClientFault::SecondClient);
            tracing::warn!("a second client was turned away");
            return Ok(());
        }
        let peer = peer(&stream);
        self.connection = Some(Connection::new(stream)?);
        board.connections.fetch_add(1, Relaxed);
        board.peer.store(peer.unwrap_or(0), Relaxed);
        board.connected.store(true, Relaxed);
        Ok(())
    }

    fn disconnect(&mut self, fault: &ClientFault) {
        match fault {
            ClientFault::Closed => tracing::info!("the client has left"),
            ClientFault::Gone => tracing::info!("the client is left"),
            fault => {
                tracing::warn!(%fault, "the client was disconnected");
                self.session.board.fault(fault);
            }
        }
        self.clean_up();
        // It sees the end when nothing of it is left here.
        self.connection = None;
        self.session.board.connected.store(false, Relaxed);
    }

    fn clean_up(&mut self) {
        match self.session.forget_client() {
            Ok(()) => self.burdened = false,
            Err(fault) => {
                if !self.burdened {
                    tracing::error!(%fault, "the device did not stop cleanly");
                    self.session.board.fault(&fault);
                }
                self.burdened = true;
            }
        }
    }
}

fn peer(stream: &UnixStream) -> Option<u32> {
    let peer = rustix::net::sockopt::socket_peercred(stream).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}
