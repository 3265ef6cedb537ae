//! `ioplane-stream`: traffic between a guest and the other end of its cable, whose loss is seen by its numbers.
//!
//! ```text
//!   answer PORT                        in the guest: echoes datagrams, sends and checks TCP
//!   drive IP:PORT RATE BYTES FILE      at the other end: so many datagrams and bytes of TCP each way a second until FILE is there,
//!                                      "answered N" each second, then a report as JSON
//!   ask SOCKET LINE                    a line for the shell at a guest's serial port; what it prints
//! ```

mod answer;
mod ask;
mod drive;

use anyhow::{Context, Result, bail, ensure};
use ioplane_e2e::streams::byte;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Of a datagram: the number of the sender, in an echo also that of the echo.
const SIZE: usize = 400;
/// A read or write of TCP.
const PIECE: u64 = 8192;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["answer", port] => answer::answer(port.parse()?),
        ["drive", to, rate, bytes, file] => {
            drive::drive(to.parse()?, rate.parse()?, bytes.parse()?, file.as_ref())
        }
        ["ask", socket, line] => ask::ask(socket.as_ref(), line),
        _ => bail!("ioplane-stream answer PORT | drive IP:PORT RATE BYTES FILE | ask SOCKET LINE"),
    }
}

fn number(datagram: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(datagram.get(8 * at..8 * at + 8)?.try_into().ok()?))
}

/// Sends the stream at `rate` bytes a second until `ended`, then says so to the other end. What the cable did not take for a while is not
/// made up for.
fn send(mut to: &TcpStream, rate: u64, ended: impl Fn() -> bool) -> Result<u64> {
    let mut sent = 0;
    while !ended() {
        let bytes: Vec<u8> = (sent..sent + PIECE).map(byte).collect();
        to.write_all(&bytes).context("send by TCP")?;
        sent += PIECE;
        std::thread::sleep(Duration::from_secs_f64(PIECE as f64 / rate as f64));
    }
    to.shutdown(std::net::Shutdown::Write)?;
    Ok(sent)
}

/// Checks the stream until the other end has ended it. `seen` is told how many bytes have come.
fn receive(mut from: &TcpStream, mut seen: impl FnMut(u64)) -> Result<u64> {
    let (mut bytes, mut at) = (vec![0; PIECE as usize], 0);
    loop {
        let count = from.read(&mut bytes).context("receive by TCP")?;
        if count == 0 {
            return Ok(at);
        }
        let wrong = bytes[..count].iter().zip(at..).find(|(is, at)| **is != byte(*at));
        ensure!(wrong.is_none(), "TCP: another byte at {wrong:?}");
        at += count as u64;
        seen(at);
    }
}
