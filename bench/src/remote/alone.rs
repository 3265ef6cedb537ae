//! An exporter without an importer: a client that is no more than a socket reads from it, one block at a time.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hdrhistogram::Histogram;
use ioplane_figures::machine;
use ioplane_nbd::handshake::client::{ClientHandshake, ClientOptions, ClientStep, ClientTls};
use ioplane_nbd::spec::{NBD_CMD_READ, NBD_REQUEST_MAGIC, NBD_SIMPLE_REPLY_MAGIC};

use super::Bench;
use super::contender::{EXPORT, Exporter, Wire};
use super::ping::{REPLY, REQUEST};
use crate::exitless::load::{BLOCK, Scatter};
use crate::served::Served;

/// One that exports memory over loopback, frozen between measurements.
pub struct Alone {
    served: Served,
    stream: TcpStream,
    blocks: u64,
}

impl Alone {
    /// Starts it, and connects.
    pub fn start(bench: &Bench) -> Result<Self> {
        let name = "exporter_alone";
        let backing = bench.folders.backing(name, false, bench.pace.memory)?;
        let directory = bench.folders.run(name);
        let contender = bench.contender(name, super::Way::Local);
        let (listener, served) =
            contender.start_exporter(Exporter::Ioplane, Wire::Tcp, &backing, &directory, &bench.place)?;
        let address = listener.address().context("an exporter at an address")?;
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let bytes = shake(&mut stream)?;
        served.freeze();
        Ok(Alone { served, stream, blocks: bytes / u64::from(BLOCK) })
    }

    /// Median of reads at random places, us. The client is on processor `cpu`, where the exporter is, and sleeps while it waits; the caller spins
    /// meanwhile, as it does when it is the generator.
    pub fn round_trip(&self, cpu: usize, warm: Duration, time: Duration) -> Result<f64> {
        self.served.thaw();
        let (stream, blocks) = (self.stream.try_clone()?, self.blocks);
        let asking = std::thread::spawn(move || read(cpu, stream, blocks, warm, time));
        while !asking.is_finished() {
            std::hint::spin_loop();
        }
        self.served.freeze();
        let latency = asking.join().map_err(|_| anyhow!("the reading thread panicked"))??;
        Ok(latency.value_at_quantile(0.5) as f64 / 1e3)
    }
}

/// The size of the export, bytes.
fn shake(stream: &mut TcpStream) -> Result<u64> {
    let mut handshake = ClientHandshake::new(ClientOptions {
        export: EXPORT.into(),
        tls: ClientTls::Never,
        structured: false,
        contexts: Vec::new(),
    })?;
    let (mut buffer, mut got, mut output) = ([0; 4096], 0, Vec::new());
    loop {
        let mut input = &buffer[..got];
        let step = handshake.next(&mut input, &mut output)?;
        ensure!(input.is_empty(), "the exporter speaks unasked");
        stream.write_all(&output)?;
        output.clear();
        match step {
            ClientStep::Read => {}
            ClientStep::Transmission(connected) => return Ok(connected.info.bytes),
            ClientStep::StartTls => return Err(anyhow!("plain text was asked for")),
        }
        got = stream.read(&mut buffer)?;
        ensure!(got > 0, "the exporter has closed the connection");
    }
}

fn request(cookie: u64, offset: u64) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    bytes[..4].copy_from_slice(&NBD_REQUEST_MAGIC.to_be_bytes());
    bytes[6..8].copy_from_slice(&NBD_CMD_READ.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&BLOCK.to_be_bytes());
    bytes
}

fn read(
    cpu: usize,
    mut stream: TcpStream,
    blocks: u64,
    warm: Duration,
    time: Duration,
) -> Result<Histogram<u64>> {
    machine::pin(cpu)?;
    let mut latency = Histogram::new_with_bounds(1, 100_000_000_000, 2)?;
    let (mut scatter, mut reply) = (Scatter::new(1), [0; REPLY]);
    let begin = Instant::now();
    let mut cookie = 0u64;
    while begin.elapsed() < warm + time {
        cookie += 1;
        let request = request(cookie, scatter.below(blocks) * u64::from(BLOCK));
        let sent = Instant::now();
        stream.write_all(&request)?;
        stream.read_exact(&mut reply)?;
        let took = sent.elapsed();
        ensure!(
            reply[..4] == NBD_SIMPLE_REPLY_MAGIC.to_be_bytes()
                && reply[4..8] == [0; 4]
                && reply[8..16] == cookie.to_be_bytes(),
            "a read was answered by {:02x?}",
            &reply[..16]
        );
        if sent - begin >= warm {
            latency.saturating_record(took.as_nanos() as u64);
        }
    }
    Ok(latency)
}
