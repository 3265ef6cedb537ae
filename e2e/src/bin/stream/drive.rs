//! The other end.

use crate::{SIZE, number, receive, send};
use anyhow::{Context, Result, bail};
use ioplane_e2e::process::uptime;
use ioplane_e2e::streams::{Answered, Driven, Gap, Numbers, Series, refused};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Gaps that are told.
const GAPS: usize = 16;
/// At the end, when nothing has come for so long nothing is on its way any more.
const REST: Duration = Duration::from_secs(10);
/// Datagrams that may be without an echo. More would overrun a stage that is slower than the wanted rate, and what is lost is to be the move's.
const WINDOW: u64 = 8;
/// After so long without any echo one more is sent.
const ALONE: Duration = Duration::from_millis(100);
/// A connection that stands still for longer is broken. L1's clock may run two or three times as fast as time passes, and what was lost is sent again after longer and longer pauses.
const STANDS: Duration = Duration::from_secs(600);

#[derive(Default)]
struct Came {
    numbers: Numbers,
    gaps: Vec<Gap>,
    over_time: Series,
}

fn connect(to: SocketAddr, first: u64) -> Result<TcpStream> {
    let mut connection = TcpStream::connect_timeout(&to, STANDS)?;
    connection.set_read_timeout(Some(STANDS))?;
    connection.set_write_timeout(Some(STANDS))?;
    connection.write_all(&first.to_be_bytes())?;
    Ok(connection)
}

pub fn drive(to: SocketAddr, rate: u64, bytes: u64, until: &Path) -> Result<()> {
    let mut first = connect(to, 0);
    // Whoever answers may not have begun.
    for _ in 0..100 {
        if first.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
        first = connect(to, 0);
    }
    first?.read_exact(&mut [0])?;
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    let stream = connect(to, bytes.max(2))?;
    let begun_s = uptime()?;
    let before = kernel_refused();
    let (begun, ended, over) = (Instant::now(), AtomicBool::new(false), AtomicBool::new(false));
    let (sent, answered) = (AtomicU64::new(0), AtomicU64::new(0));
    let (mut tcp_gap, mut tcp_bytes) = (Gap::default(), Series::default());
    let (came, bytes_back) = std::thread::scope(|scope| -> Result<_> {
        let coming = scope.spawn(|| come(&socket, begun, &over, &answered));
        scope.spawn(|| datagrams(&socket, rate, &sent, &answered, &ended));
        scope.spawn(|| send(&stream, bytes, || ended.load(Ordering::Relaxed)));
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(250));
                println!("answered {}", answered.load(Ordering::Relaxed));
                ended.store(until.exists(), Ordering::Relaxed);
            }
        });
        let (mut last, mut before) = (Instant::now(), 0);
        let received = receive(&stream, |bytes| {
            tcp_bytes.add(begun.elapsed(), bytes - before);
            before = bytes;
            let gap = Gap { at_ms: ms(begun.elapsed()), ms: ms(last.elapsed()) };
            last = Instant::now();
            if gap.ms > tcp_gap.ms {
                tcp_gap = gap;
            }
        });
        let early = !ended.swap(true, Ordering::Relaxed);
        let (mut came, mut since) = (answered.load(Ordering::Relaxed), Instant::now());
        while since.elapsed() < REST {
            std::thread::sleep(Duration::from_millis(100));
            let now = answered.load(Ordering::Relaxed);
            if now != came {
                (came, since) = (now, Instant::now());
            }
        }
        over.store(true, Ordering::Relaxed);
        let came = coming.join().map_err(|_| anyhow::anyhow!("receiving panicked"))?;
        let received = received?;
        if early {
            bail!("the guest has ended the stream after {received} bytes");
        }
        Ok((came, received))
    })?;
    let sent = sent.into_inner();
    let mut asked = connect(to, 1)?;
    asked.write_all(&sent.to_be_bytes())?;
    let mut said = Vec::new();
    asked.read_to_end(&mut said)?;
    let Answered { datagrams: there, echoed, bytes: bytes_there, fault } =
        serde_json::from_slice(&said).context("the guest's report")?;
    if let Some(fault) = fault {
        bail!("in the guest: {fault}");
    }
    let Came { numbers, gaps, over_time: datagrams } = came;
    let back = numbers.counted(echoed);
    let mut refused = kernel_refused();
    for (name, value) in &mut refused {
        *value = value.saturating_sub(before.get(name).copied().unwrap_or(0));
    }
    refused.retain(|_, value| *value > 0);
    let driven = Driven {
        begun_s,
        sent,
        there,
        back,
        gaps,
        bytes_there,
        bytes_back,
        tcp_gap,
        datagrams,
        tcp_bytes,
        refused,
    };
    println!("{}", serde_json::to_string(&driven)?);
    Ok(())
}

/// What the kernel here has handed to nobody.
fn kernel_refused() -> BTreeMap<String, u64> {
    refused(&std::fs::read_to_string("/proc/net/snmp").unwrap_or_default())
}

/// Seconds since this machine has booted.
fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

fn come(socket: &UdpSocket, begun: Instant, over: &AtomicBool, answered: &AtomicU64) -> Came {
    let mut came = Came::default();
    let (mut datagram, mut last) = ([0; SIZE], None::<Instant>);
    while !over.load(Ordering::Relaxed) {
        // Time passes without any, and a refusal is one more that did not come.
        let Ok(count) = socket.recv(&mut datagram) else { continue };
        let Some(is) = number(&datagram[..count], 1) else { continue };
        came.numbers.came(is);
        came.over_time.add(begun.elapsed(), 1);
        answered.fetch_add(1, Ordering::Relaxed);
        if let Some(last) = last {
            came.gaps.push(Gap { at_ms: ms(begun.elapsed()), ms: ms(last.elapsed()) });
        }
        last = Some(Instant::now());
        if came.gaps.len() > 1000 {
            longest(&mut came.gaps);
        }
    }
    longest(&mut came.gaps);
    came
}

fn longest(gaps: &mut Vec<Gap>) {
    gaps.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    gaps.truncate(GAPS);
}

fn datagrams(socket: &UdpSocket, rate: u64, sent: &AtomicU64, answered: &AtomicU64, ended: &AtomicBool) {
    let mut datagram = [0x5a; SIZE];
    let every = Duration::from_secs(1) / rate.max(1) as u32;
    // Those that are given up: without an echo.
    let (mut lost, mut last) = (0, (0, Instant::now()));
    while !ended.load(Ordering::Relaxed) {
        let (number, echoes) = (sent.load(Ordering::Relaxed), answered.load(Ordering::Relaxed));
        if echoes != last.0 {
            last = (echoes, Instant::now());
        }
        // Those that came late after all are no room for more.
        lost = lost.min(number.saturating_sub(echoes));
        let waiting = number.saturating_sub(echoes + lost);
        if waiting >= WINDOW {
            if last.1.elapsed() >= ALONE {
                lost += waiting - WINDOW + 1;
                last.1 = Instant::now();
            }
            std::thread::sleep(every.min(ALONE));
            continue;
        }
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        // One that the kernel does not take is none.
        if socket.send(&datagram).is_ok() {
            sent.store(number + 1, Ordering::Relaxed);
        }
        std::thread::sleep(every);
    }
}
