//! The end in the guest.

use crate::{SIZE, number, receive, send};
use anyhow::Result;
use ioplane_e2e::streams::{Answered, Numbers};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What it has seen, of the other end's present run.
#[derive(Default)]
struct Seen {
    numbers: Numbers,
    answered: Answered,
}

pub fn answer(port: u16) -> Result<()> {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let datagrams = UdpSocket::bind(("0.0.0.0", port))?;
    let echoed = Arc::clone(&seen);
    std::thread::spawn(move || echo(&datagrams, &echoed));
    for connection in TcpListener::bind(("0.0.0.0", port))?.incoming() {
        let (connection, seen) = (connection?, Arc::clone(&seen));
        std::thread::spawn(move || serve(connection, &seen));
    }
    Ok(())
}

fn locked(seen: &Mutex<Seen>) -> std::sync::MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn echo(socket: &UdpSocket, seen: &Mutex<Seen>) {
    let mut datagram = [0; SIZE];
    loop {
        // A socket fails where an interface is down; the next one may come.
        let Ok((count, from)) = socket.recv_from(&mut datagram) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let Some(is) = number(&datagram[..count], 0) else { continue };
        let mut seen = locked(seen);
        seen.numbers.came(is);
        datagram[8..16].copy_from_slice(&seen.answered.echoed.to_be_bytes());
        // One that the kernel does not take is none.
        if socket.send_to(&datagram[..count], from).is_ok() {
            seen.answered.echoed += 1;
        }
    }
}

/// The first eight bytes: `0` begins anew, `1` and what follows is for the report, others are the rate of a stream.
fn serve(mut connection: TcpStream, seen: &Arc<Mutex<Seen>>) {
    let mut first = [0; 8];
    if connection.read_exact(&mut first).is_err() {
        return;
    }
    match u64::from_be_bytes(first) {
        0 => {
            *locked(seen) = Seen::default();
            let _ = connection.write_all(&[1]);
        }
        1 => {
            let mut sent = [0; 8];
            if connection.read_exact(&mut sent).is_err() {
                return;
            }
            let mut seen = locked(seen);
            seen.answered.datagrams = seen.numbers.counted(u64::from_be_bytes(sent));
            let said = serde_json::to_vec(&seen.answered).unwrap_or_default();
            drop(seen);
            let _ = connection.write_all(&said);
        }
        rate => {
            let ended = AtomicBool::new(false);
            let done = std::thread::scope(|scope| {
                let sending = scope.spawn(|| send(&connection, rate, || ended.load(Ordering::Relaxed)));
                let received = receive(&connection, |bytes| locked(seen).answered.bytes = bytes);
                ended.store(true, Ordering::Relaxed);
                let sent = sending.join().unwrap_or_else(|_| Err(anyhow::anyhow!("sending panicked")));
                received.and(sent)
            });
            if let Err(error) = done {
                locked(seen).answered.fault = Some(format!("{error:#}"));
            }
        }
    }
}
