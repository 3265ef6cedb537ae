//! The relay between hosts in namespaces of their own: what is sent comes out late, not at all, or as it was, and no connection hears of a cut.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use ioplane_testkit::relay::{BOTH, Conditions, DelayLine, Relay, RelayCounts, RelayDirection};
use ioplane_testkit::space::{NetworkSpace, or_skip};

const ONE: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
/// For what takes a second on a machine that has time.
const LIMIT: Duration = Duration::from_secs(60);

/// Two hosts and what is between them; the relay goes first.
struct Hosts {
    relay: Relay,
    spaces: [NetworkSpace; 2],
}

impl Hosts {
    fn new(seed: u64) -> Option<Hosts> {
        let make = || -> std::io::Result<Hosts> {
            let spaces = [NetworkSpace::new()?, NetworkSpace::new()?];
            let relay = Relay::join([(&spaces[0], ONE), (&spaces[1], OTHER)], seed)?;
            Ok(Hosts { relay, spaces })
        };
        or_skip(make())
    }

    /// A socket on each, which know each other, and have found each other out.
    fn sockets(&self) -> [UdpSocket; 2] {
        let bind = |at: usize, address: Ipv4Addr| {
            self.spaces[at].inside(|| UdpSocket::bind((address, 5000)).unwrap()).unwrap()
        };
        let sockets = [bind(0, ONE), bind(1, OTHER)];
        sockets[0].connect((OTHER, 5000)).unwrap();
        sockets[1].connect((ONE, 5000)).unwrap();
        for at in 0..2 {
            sockets[at].set_read_timeout(Some(LIMIT)).unwrap();
            sockets[at].send(b"hello").unwrap();
            assert_eq!(sockets[1 - at].recv(&mut [0; 16]).unwrap(), 5);
        }
        sockets
    }
}

/// Frames that have gone in.
fn offered(counts: RelayCounts) -> u64 {
    counts.carried + counts.refused + counts.lost + counts.overflowed + counts.cut
}

#[test]
fn frames_are_as_late_as_was_asked_for_each_way() {
    let Some(hosts) = Hosts::new(1) else { return };
    let sockets = hosts.sockets();
    let delays = [Duration::from_millis(20), Duration::from_millis(35)];
    for way in BOTH {
        hosts.relay.set(way, |conditions| conditions.delay = delays[way as usize]);
        let (from, to) = (&sockets[way as usize], &sockets[1 - way as usize]);
        let mut late: Vec<Duration> = (0..50)
            .map(|_| {
                let sent = Instant::now();
                from.send(b"?").unwrap();
                to.recv(&mut [0; 16]).unwrap();
                sent.elapsed()
            })
            .collect();
        late.sort();
        let least = late[0];
        // The quickest had a processor nearly when it needed one.
        let delay = delays[way as usize];
        assert!((delay..delay + Duration::from_millis(10)).contains(&least), "{way:?}: {late:?}");
    }
}

/// What is lost on a real wire is what the line says beforehand.
#[test]
fn the_seed_decides_which_packets_are_lost() {
    // As many as the buffer of a socket has room for.
    const COUNT: u32 = 200;
    let Some(hosts) = Hosts::new(7) else { return };
    let sockets = hosts.sockets();
    let lossy = Conditions { loss_percent: 10.0, ..Conditions::default() };
    // Who asks for addresses once more sends frames of its own in between: then another time.
    for _ in 0..10 {
        hosts.relay.set_both(|conditions| *conditions = lossy);
        let before = offered(hosts.relay.counts(RelayDirection::There));
        let mut arrived = Vec::new();
        for number in 0..COUNT {
            sockets[0].send(&number.to_le_bytes()).unwrap();
            // The device takes it up and gives it on before the next: none is dropped for want of room.
            let end = Instant::now() + LIMIT;
            while offered(hosts.relay.counts(RelayDirection::There)) <= before + u64::from(number) {
                assert!(Instant::now() < end, "packet {number} has not gone in");
                std::thread::yield_now();
            }
        }
        let counts = hosts.relay.counts(RelayDirection::There);
        hosts.relay.set_both(|conditions| *conditions = Conditions::default());
        sockets[1].set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut bytes = [0; 16];
        while let Ok(4) = sockets[1].recv(&mut bytes) {
            arrived.push(u32::from_le_bytes(bytes[..4].try_into().unwrap()));
        }
        if offered(counts) != before + u64::from(COUNT) {
            continue;
        }
        let now = Instant::now();
        let mut line = DelayLine::new(7, lossy);
        for number in 0..before as u32 + COUNT {
            line.offer(now, &number.to_le_bytes());
        }
        let expected: Vec<u32> = std::iter::from_fn(|| line.take(now))
            .filter_map(|frame| u32::from_le_bytes(frame.try_into().unwrap()).checked_sub(before as u32))
            .collect();
        assert_eq!(arrived, expected);
        assert!(expected.len() < COUNT as usize);
        return;
    }
    panic!("the hosts never stop asking for each other's addresses");
}

/// A connection goes on after a cut of either direction, in frames as a wire carries them, and every byte arrives.
#[test]
fn a_cut_closes_nothing() {
    let Some(hosts) = Hosts::new(3) else { return };
    let listener = hosts.spaces[1].inside(|| TcpListener::bind((OTHER, 5001)).unwrap()).unwrap();
    let at: SocketAddr = (OTHER, 5001).into();
    let mut client = hosts.spaces[0].inside(|| TcpStream::connect(at).unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    for end in [&client, &server] {
        end.set_read_timeout(Some(LIMIT)).unwrap();
        end.set_write_timeout(Some(LIMIT)).unwrap();
    }
    for ways in [&BOTH[..], &[RelayDirection::There], &[RelayDirection::Back]] {
        hosts.relay.cut(ways);
        let frames = offered(hosts.relay.counts(RelayDirection::There));
        let bytes: Vec<u8> = (0..64 << 10).map(|at| (at % 251) as u8).collect();
        // A server's socket takes up less before its first byte is acknowledged.
        let answer = &bytes[..8 << 10];
        client.write_all(&bytes).unwrap();
        server.write_all(answer).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        for (way, end) in BOTH.into_iter().zip([&mut server, &mut client]) {
            if ways.contains(&way) {
                end.set_nonblocking(true).unwrap();
                let heard = end.read(&mut [0; 16]).unwrap_err();
                assert_eq!(heard.kind(), ErrorKind::WouldBlock, "{ways:?}, {way:?}: {heard}");
                end.set_nonblocking(false).unwrap();
            }
        }
        hosts.relay.heal();
        for (end, sent) in [(&mut server, &bytes[..]), (&mut client, answer)] {
            let mut heard = vec![0; sent.len()];
            end.read_exact(&mut heard).unwrap();
            assert!(heard == sent);
        }
        let frames = offered(hosts.relay.counts(RelayDirection::There)) - frames;
        assert!(frames >= (64 << 10) / 1460, "{frames} frames: larger ones than a wire carries");
    }
    assert!(client.take_error().unwrap().is_none() && server.take_error().unwrap().is_none());
}

/// A device that is taken away ends the relay, and nobody takes that for a cut.
#[test]
fn a_relay_that_has_ended_says_so() {
    let Some(Hosts { relay, spaces }) = Hosts::new(4) else { return };
    spaces[0].ip(&format!("link delete {}", relay.device(RelayDirection::There))).unwrap();
    let told = || catch_unwind(AssertUnwindSafe(|| relay.counts(RelayDirection::There))).is_err();
    let end = Instant::now() + LIMIT;
    while !told() {
        assert!(Instant::now() < end, "it goes on without its device");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(catch_unwind(AssertUnwindSafe(|| relay.cut(&BOTH))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| drop(relay))).is_err());
}
