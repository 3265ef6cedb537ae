//! What the network alone takes: as many bytes as a read of 4 KiB has on the wire, to and fro between two threads that sleep while they wait.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use hdrhistogram::Histogram;
use ioplane_figures::machine;

/// Bytes of an NBD request.
pub const REQUEST: usize = 28;
/// Bytes of a simple reply with a block.
pub const REPLY: usize = 16 + 4096;

/// Median of round trips over TCP on loopback, us. Both threads are on processor `cpu`, where importers and exporters are; the caller spins
/// meanwhile, as it does when it is the generator.
pub fn round_trip(cpu: usize, warm: Duration, time: Duration) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let answering = std::thread::spawn(move || answer(cpu, far));
    let asking = std::thread::spawn(move || ask(cpu, near, warm, time));
    while !asking.is_finished() {
        std::hint::spin_loop();
    }
    let latency = asking.join().map_err(|_| anyhow!("the asking thread panicked"))?;
    answering.join().map_err(|_| anyhow!("the answering thread panicked"))??;
    Ok(latency?.value_at_quantile(0.5) as f64 / 1e3)
}

/// Until the other side has closed.
fn answer(cpu: usize, mut stream: TcpStream) -> Result<()> {
    machine::pin(cpu)?;
    let (mut request, reply) = ([0; REQUEST], [0; REPLY]);
    loop {
        match stream.read_exact(&mut request) {
            Ok(()) => stream.write_all(&reply)?,
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

fn ask(cpu: usize, mut stream: TcpStream, warm: Duration, time: Duration) -> Result<Histogram<u64>> {
    machine::pin(cpu)?;
    let mut latency = Histogram::new_with_bounds(1, 100_000_000_000, 2)?;
    let (request, mut reply) = ([0; REQUEST], [0; REPLY]);
    let begin = Instant::now();
    while begin.elapsed() < warm + time {
        let sent = Instant::now();
        stream.write_all(&request)?;
        stream.read_exact(&mut reply)?;
        if sent - begin >= warm {
            latency.saturating_record(sent.elapsed().as_nanos() as u64);
        }
    }
    Ok(latency)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_takes_time() {
        let cpu = machine::Cpus::choose().unwrap().back;
        let us = round_trip(cpu, Duration::ZERO, Duration::from_millis(5)).unwrap();
        assert!(us > 0.0 && us.is_finite(), "{us}");
    }
}
