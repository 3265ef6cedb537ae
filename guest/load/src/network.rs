//! TCP between guests, every byte checked: one end sends a pattern and its digest, the other receives and reckons it again.
//!
//! Addresses need no set-up: an interface that is brought up has a link-local address made from its Ethernet address
//! (RFC 4862, 5.3; RFC 4291, appendix A), so a guest knows its peer's by that.

use crate::protocol::{Interface, Requests, Transfer};
use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv6Addr, SocketAddrV6, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long an interface, an address or a peer may take to be there.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a transfer may stand still.
const SILENCE: Duration = Duration::from_secs(60);
/// Bytes of one write or read.
const CHUNK: usize = 256 << 10;
/// `IFF_UP`.
const UP: u32 = 1;

/// Brings up the interface with the address `mac` and waits for its own address to be usable.
pub fn up(mac: &str) -> Result<Interface> {
    let folder = wait("an interface of this address", || find(mac))?;
    let read = |name: &str| -> Result<String> {
        let path = folder.join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(text.trim().to_owned())
    };
    let flags = u32::from_str_radix(read("flags")?.trim_start_matches("0x"), 16)?;
    fs::write(folder.join("flags"), format!("{:#x}", flags | UP)).context("bring the interface up")?;
    let (index, mtu) = (read("ifindex")?.parse()?, read("mtu")?.parse()?);
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let address = link_local(mac)?;
    // Not before it is known that nobody else has it (duplicate address detection): flag 0x40 is "tentative".
    let shown: String = address.octets().iter().map(|byte| format!("{byte:02x}")).collect();
    wait("the interface's address", || {
        let all =
            fs::read_to_string("/proc/net/if_inet6").context("read /proc/net/if_inet6; is IPv6 there?")?;
        let line = all.lines().find(|line| line.starts_with(&shown));
        let flags = line.and_then(|line| u32::from_str_radix(line.split_whitespace().nth(4)?, 16).ok());
        Ok(flags.filter(|flags| flags & 0x40 == 0))
    })?;
    Ok(Interface { name, index, mac: mac.to_owned(), mtu, address: address.to_string() })
}

/// Looks until there is something, for a minute.
pub fn wait<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() >= end {
            bail!("{what} is not there after {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn find(mac: &str) -> Result<Option<PathBuf>> {
    for entry in fs::read_dir("/sys/class/net").context("list /sys/class/net")? {
        let folder = entry?.path();
        if fs::read_to_string(folder.join("address")).is_ok_and(|address| address.trim() == mac) {
            return Ok(Some(folder));
        }
    }
    Ok(None)
}

/// The link-local address of the station `mac`.
pub fn link_local(mac: &str) -> Result<Ipv6Addr> {
    let bytes: Option<Vec<u8>> = mac.split(':').map(|part| u8::from_str_radix(part, 16).ok()).collect();
    let Some([a, b, c, d, e, f]) = bytes.as_deref() else { bail!("{mac:?} is no Ethernet address") };
    let word = |high: u8, low: u8| u16::from_be_bytes([high, low]);
    Ok(Ipv6Addr::new(0xfe80, 0, 0, 0, word(a ^ 2, *b), word(*c, 0xff), word(0xfe, *d), word(*e, *f)))
}

/// Takes one connection on the interface `index` and receives until the other end has sent all.
pub fn receive(index: u32, port: u16) -> Result<Transfer> {
    receive_enough(index, port, &AtomicBool::new(false))
}

/// The same, and says to the other end when it is `enough`: see [`send_enough`].
pub fn receive_enough(index: u32, port: u16, enough: &AtomicBool) -> Result<Transfer> {
    let listener = TcpListener::bind(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, index))?;
    listener.set_nonblocking(true)?;
    let mut stream = wait("a connection", || match listener.accept() {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error.into()),
    })?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(SILENCE))?;
    let (begun, mut digest, mut bytes) = (Instant::now(), Sha256::new(), 0u64);
    let (mut buffer, mut said) = (vec![0; CHUNK], false);
    loop {
        if !said && enough.load(Ordering::Acquire) {
            stream.write_all(b"!").context("say that it is enough")?;
            said = true;
        }
        match stream.read(&mut buffer).context("receive")? {
            0 => break,
            length => {
                digest.update(&buffer[..length]);
                bytes += length as u64;
            }
        }
    }
    Ok(transfer(bytes, digest, begun))
}

/// Sends a pattern to the station `to` for `seconds`, in writes of `write` bytes that do not wait for each other; 0: large ones.
pub fn send(index: u32, to: &str, port: u16, seconds: f64, seed: u64, write: usize) -> Result<Transfer> {
    let limit = Duration::try_from_secs_f64(seconds).context("a time to send for")?;
    let mut begun = None;
    send_while(index, to, port, (seed, write), |_| {
        Ok(begun.get_or_insert_with(Instant::now).elapsed() < limit)
    })
}

/// The same, until the other end says that it is enough.
pub fn send_enough(index: u32, to: &str, port: u16, seed: u64) -> Result<Transfer> {
    send_while(index, to, port, (seed, 0), |stream| {
        stream.set_nonblocking(true)?;
        let said = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        match said {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(true),
            said => Ok(said.context("listen to the other end")? == 0),
        }
    })
}

/// The same, as long as `more` says so, which is asked before each write.
pub fn send_while(
    index: u32,
    to: &str,
    port: u16,
    (seed, write): (u64, usize),
    mut more: impl FnMut(&TcpStream) -> Result<bool>,
) -> Result<Transfer> {
    let address = SocketAddrV6::new(link_local(to)?, port, 0, index);
    // The other end may not listen yet.
    let mut stream = wait("the other end", || Ok(TcpStream::connect(address).ok()))?;
    stream.set_write_timeout(Some(SILENCE))?;
    let (begun, mut digest, mut bytes) = (Instant::now(), Sha256::new(), 0u64);
    stream.set_nodelay(write > 0)?;
    let size = if write > 0 { write.next_multiple_of(8).min(CHUNK) } else { CHUNK };
    let mut buffer = vec![0; size];
    let mut state = seed | 1;
    for word in buffer.as_chunks_mut::<8>().0 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *word = state.to_le_bytes();
    }
    while more(&stream)? {
        // Each chunk is another one: none can stand in for one that was lost.
        buffer[..8].copy_from_slice(&bytes.to_le_bytes());
        stream.write_all(&buffer).context("send")?;
        digest.update(&buffer);
        bytes += size as u64;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    // Until the other end has everything and closes: then the time is that of the whole way.
    let _ = std::io::copy(&mut stream, &mut std::io::sink());
    Ok(transfer(bytes, digest, begun))
}

/// Answers UDP requests at `port` of the interface with what they say, until `over`.
pub fn echo(index: u32, port: u16, over: &AtomicBool) -> Result<()> {
    let socket = UdpSocket::bind(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, index))?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let mut buffer = [0; 2048];
    while !over.load(Ordering::Acquire) {
        match socket.recv_from(&mut buffer) {
            // Who asks may be gone by now.
            Ok((length, who)) => drop(socket.send_to(&buffer[..length], who)),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error).context("echo"),
        }
    }
    Ok(())
}

/// Asks the echo at the station `to`, one request of `bytes` at a time, for `seconds`.
pub fn requests(index: u32, to: &str, port: u16, seconds: f64, bytes: usize) -> Result<Requests> {
    let address = SocketAddrV6::new(link_local(to)?, port, 0, index);
    let socket = UdpSocket::bind(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, index))?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let limit = Duration::try_from_secs_f64(seconds).context("a time to ask for")?;
    let (mut request, mut answer) = (vec![0; bytes.clamp(8, 2048)], [0; 2048]);
    let mut times = Histogram::<u64>::new(3)?;
    let (begun, mut lost) = (Instant::now(), 0);
    for number in 0u64.. {
        let asked = Instant::now();
        if asked - begun >= limit {
            break;
        }
        request[..8].copy_from_slice(&number.to_le_bytes());
        socket.send_to(&request, address).context("ask")?;
        // What answers another request came too late for it.
        let answered = loop {
            match socket.recv(&mut answer) {
                Ok(length) if answer[..length] == request[..] => break true,
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    break false;
                }
                Err(error) => return Err(error).context("hear the answer"),
            }
        };
        match answered {
            true => times.saturating_record(asked.elapsed().as_micros() as u64),
            false => lost += 1,
        }
    }
    let at = |quantile| times.value_at_quantile(quantile);
    Ok(Requests { answered: times.len(), lost, p50_us: at(0.5), p99_us: at(0.99) })
}

/// What is wrong with a transfer, in words: the other end must have what was sent, and something must have been sent.
pub fn fault(sent: &Transfer, received: &Transfer) -> Option<String> {
    if sent.bytes == 0 {
        return Some("nothing was sent".into());
    }
    let right = (sent.bytes, &sent.sha256) == (received.bytes, &received.sha256);
    (!right).then(|| format!("what was sent, {sent:?}, is not what was received, {received:?}"))
}

fn transfer(bytes: u64, digest: Sha256, begun: Instant) -> Transfer {
    let sha256 = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Transfer { bytes, sha256, seconds: begun.elapsed().as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_the_rfc() {
        assert_eq!(link_local("52:54:00:12:34:56").unwrap().to_string(), "fe80::5054:ff:fe12:3456");
        assert_eq!(link_local("02:00:00:00:00:0a").unwrap().to_string(), "fe80::ff:fe00:a");
        assert!(link_local("02:00").is_err());
    }

    #[test]
    fn what_is_sent_is_received() {
        // The loopback interface has index 1 and the address ::1; a scope is only needed by link-local ones.
        let receiver = std::thread::spawn(|| receive(0, 47_011));
        let address = SocketAddrV6::new(Ipv6Addr::LOCALHOST, 47_011, 0, 0);
        let mut stream = wait("the other end", || Ok(TcpStream::connect(address).ok())).unwrap();
        stream.write_all(&[7; 1000]).unwrap();
        drop(stream);
        let transfer = receiver.join().unwrap().unwrap();
        let wanted: String = Sha256::digest([7; 1000]).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!((transfer.bytes, transfer.sha256), (1000, wanted));
    }

    #[test]
    fn one_wrong_byte_is_a_fault() {
        let of = |bytes: &[u8]| transfer(bytes.len() as u64, Sha256::new_with_prefix(bytes), Instant::now());
        let (sent, mut other) = (of(&[7; 1000]), [7; 1000]);
        assert_eq!(fault(&sent, &of(&[7; 1000])), None);
        other[500] ^= 1;
        for wrong in [of(&other), of(&[7; 999]), of(&[])] {
            assert!(fault(&sent, &wrong).is_some(), "{wrong:?}");
        }
        assert!(fault(&of(&[]), &of(&[])).is_some());
    }
}
