//! Stands between an importer and its exporter, and does to connections what a network does.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A query by which an exporter is asked to reserve something.
const QUERY: &[u8] = b"ioplane:reserve=";

/// What becomes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Mode {
    #[default]
    Pass,
    /// Nobody answers it.
    Hold,
    /// It ends when the answer to a query about a reservation comes, and later ones are held.
    LoseGrants,
}

/// See the module. Its threads end with their connections.
pub struct TcpRelay {
    exporter: u16,
    port: u16,
    mode: Arc<Mutex<Mode>>,
    held: Arc<Mutex<Vec<TcpStream>>>,
    lost: Arc<AtomicBool>,
}

impl TcpRelay {
    /// To that port of loopback.
    pub fn to(exporter: u16) -> TcpRelay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let relay =
            TcpRelay { exporter, port, mode: Arc::default(), held: Arc::default(), lost: Arc::default() };
        let (mode, held, lost) = (relay.mode.clone(), relay.held.clone(), relay.lost.clone());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                // Looked at with those that are held, so that none is left when they are let go.
                let mut held = held.lock().unwrap();
                match *mode.lock().unwrap() {
                    Mode::LoseGrants if lost.load(Ordering::Acquire) => held.push(client),
                    Mode::Hold => held.push(client),
                    Mode::Pass => carry(client, exporter, None),
                    Mode::LoseGrants => carry(client, exporter, Some(lost.clone())),
                }
            }
        });
        relay
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    fn set(&self, mode: Mode) -> std::sync::MutexGuard<'_, Vec<TcpStream>> {
        let held = self.held.lock().unwrap();
        *self.mode.lock().unwrap() = mode;
        held
    }

    /// Connections are carried, and those that were held, too.
    pub fn pass(&self) {
        for client in self.set(Mode::Pass).drain(..) {
            carry(client, self.exporter, None);
        }
    }

    /// Nobody answers connections that come from now on.
    pub fn hold(&self) {
        drop(self.set(Mode::Hold));
    }

    /// The next connection by which the exporter is asked to reserve something ends when it has done that, and before it is heard. Those that come
    /// later are held.
    pub fn lose_grants(&self) {
        self.lost.store(false, Ordering::Release);
        drop(self.set(Mode::LoseGrants));
    }

    /// Whether such an answer was lost.
    pub fn has_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Whether somebody waits for an answer.
    pub fn holds(&self) -> bool {
        let waits = |client: &TcpStream| {
            client.set_nonblocking(true).unwrap();
            let seen = client.peek(&mut [0]);
            client.set_nonblocking(false).unwrap();
            matches!(seen, Err(error) if error.kind() == ErrorKind::WouldBlock)
        };
        self.held.lock().unwrap().iter().any(waits)
    }
}

/// Carries a connection in both directions. `lost`: it ends before the answer to a reservation.
fn carry(client: TcpStream, exporter: u16, lost: Option<Arc<AtomicBool>>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", exporter)) else { return };
    let asked = Arc::new(AtomicBool::new(false));
    let (from, to, heard) = (client.try_clone().unwrap(), server.try_clone().unwrap(), asked.clone());
    std::thread::spawn(move || {
        let mut said = Vec::new();
        pump(from, to, |bytes| {
            said.extend_from_slice(&bytes[..bytes.len().min(4096)]);
            if said.windows(QUERY.len()).any(|window| window == QUERY) {
                heard.store(true, Ordering::Release);
            }
            said.drain(..said.len().saturating_sub(4096));
            true
        });
    });
    std::thread::spawn(move || {
        pump(server, client, |_| match &lost {
            Some(lost) if asked.load(Ordering::Acquire) => {
                lost.store(true, Ordering::Release);
                false
            }
            _ => true,
        });
    });
}

/// Until one side ends, or `passes` does not let something through.
fn pump(mut from: TcpStream, mut to: TcpStream, mut passes: impl FnMut(&[u8]) -> bool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count) = from.read(&mut buffer)
        && count > 0
        && passes(&buffer[..count])
        && to.write_all(&buffer[..count]).is_ok()
    {}
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}
