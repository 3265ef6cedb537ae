//! One thread for each device, which owns it: accepts its client, obeys it, and obeys the daemon and attends to the device between two
//! messages.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ioplane_device::{Lifecycle, Placement};
use ioplane_pci::Function;
use rustix::event::PollFlags;

use super::connection::Connection;
use super::fault::ClientFault;
use super::handle::{Handle, Mailbox};
use super::options::Options;
use super::owner::Turn;
use super::session::Session;
use crate::socket::{self, SocketPath};

/// Serves a function, which runs or is held, on a socket until stopped, on a thread of its own. Its queues go where `placement` says.
pub fn serve<F: Function>(
    device: impl Into<Lifecycle<F>>,
    placement: Arc<dyn Placement>,
    options: Options,
) -> std::io::Result<Handle<F>> {
    let listener = socket::bind(&options.socket)?;
    let (mailbox, handle) = Mailbox::new(options.socket.clone())?;
    let session = Session::told(device.into(), placement, &options, mailbox)?;
    let mut service = Service { session, listener, connection: None, burdened: false };
    let place = SocketPath::of(&options.socket);
    // The system keeps fifteen bytes of it: enough to tell the threads of one daemon apart.
    let name = format!("vfu:{}", options.name);
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        service.run();
        place.clear();
    })?;
    Ok(handle(thread))
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

impl<F: Function> Service<F> {
    fn run(&mut self) {
        let mut pause = false;
        loop {
            let turn = self.wait(pause || self.burdened);
            pause = false;
            if turn.stop {
                break;
            }
            if self.burdened {
                self.clean_up();
            }
            if turn.client
                && let Err(fault) = self.message()
            {
                self.disconnect(&fault);
            }
            self.write();
            // Last: a client that has left is heard before the one that comes after it.
            if turn.listener {
                pause = self.accept().is_err();
            }
        }
        self.session.give_up_requests();
        if self.connection.is_some() || self.burdened {
            self.disconnect(&ClientFault::Gone);
        }
        self.session.close();
    }

    /// Waits for something to do; with `pause` not for a client, and not for ever.
    fn wait(&mut self, pause: bool) -> Turn {
        let received = self.connection.as_ref().is_some_and(Connection::has_message);
        let timeout = if received { Some(Duration::ZERO) } else { pause.then_some(PAUSE) };
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let client = self.connection.as_ref().map(|connection| (connection.socket(), PollFlags::IN));
        let listener = (!pause).then(|| self.listener.as_fd());
        let mut turn = self.session.turn(client, listener, until);
        turn.client |= received;
        turn
    }

    fn message(&mut self) -> Result<(), ClientFault> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        match connection.receive()? {
            Some(message) => self.session.handle(message, connection),
            None => Ok(()),
        }
    }

    /// Has the client write to its memory what the daemon has asked for.
    fn write(&mut self) {
        while let Some(writes) = self.session.writes.pop_front() {
            if let Err(fault) = self.session.write(writes, self.connection.as_mut()) {
                self.disconnect(&fault);
            }
        }
    }

    /// Takes a client in, or turns it away. An error says that there is no use in trying at once again.
    fn accept(&mut self) -> std::io::Result<()> {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => {
                tracing::warn!(function = self.session.name, %error, "accepting a client");
                return Err(error);
            }
        };
        let board = &self.session.board;
        if self.connection.is_some() {
            // Closed before it has a version: QEMU says so and ends.
            board.fault(&ClientFault::SecondClient);
            tracing::warn!(function = self.session.name, "a second client was turned away");
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
            ClientFault::Closed | ClientFault::Gone => {
                tracing::info!(function = self.session.name, "the client has left")
            }
            fault => {
                tracing::warn!(function = self.session.name, %fault, "the client was disconnected");
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
                    tracing::error!(function = self.session.name, %fault, "the device did not stop cleanly");
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
