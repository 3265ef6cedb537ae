//! What a socket with TLS does when one of its ends is gone, stops, or is reset.

use std::time::Duration;

use ioplane_identity::{IdentityDirectory, Validity};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::Socket;
use super::tests::{come_second, send_what_goes};
use crate::records::StreamError::{self, System};
use crate::records::{Heard, Records};

const LONG: Duration = Duration::from_secs(120);

/// Ours, and the peer as tokio has it.
async fn connected() -> (Socket, TlsStream<TcpStream>) {
    let folder = tempfile::tempdir().unwrap();
    let directory = IdentityDirectory::new(folder.path().join("a"));
    directory.create(&"host-a".parse().unwrap(), Validity::default()).unwrap();
    let identity = directory.load().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (acceptor, connector) = (TlsAcceptor::from(identity.server()), TlsConnector::from(identity.client()));
    let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (theirs, _) = listener.accept().await.unwrap();
    let name = ServerName::try_from("host-a").unwrap();
    let (ours, theirs) = tokio::join!(connector.connect(name, ours), acceptor.accept(theirs));
    let (stream, records) = Records::of(ours.unwrap());
    let socket = Socket::new(stream.into_std().unwrap().into(), Some(records), LONG).unwrap();
    (socket, theirs.unwrap().into())
}

/// What the peer is without TLS: what anybody on the way can send.
fn raw(peer: TlsStream<TcpStream>) -> TcpStream {
    match peer {
        TlsStream::Server(stream) => stream.into_inner().0,
        TlsStream::Client(_) => unreachable!("the peer is the server"),
    }
}

/// Does something until the socket is not the reason why it does not.
async fn tried<E: Into<StreamError>>(
    mut call: impl FnMut() -> Result<usize, E>,
) -> Result<usize, StreamError> {
    let end = tokio::time::Instant::now() + LONG;
    loop {
        match call().map_err(Into::into) {
            Err(System(libc::EAGAIN)) => assert!(tokio::time::Instant::now() < end, "nothing comes or goes"),
            done => return done,
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Receives to the end: the bytes, or the error that it ends with.
async fn received(socket: &Socket) -> Result<Vec<u8>, StreamError> {
    let (mut came, mut buffer) = (Vec::new(), vec![0; 5000]);
    loop {
        match tried(|| socket.receive_own(&mut buffer)).await? {
            0 => return Ok(came),
            bytes => came.extend_from_slice(&buffer[..bytes]),
        }
    }
}

/// Sends until nothing is taken for a while; says how much was.
async fn fill(socket: &Socket) -> usize {
    let (bytes, mut sent, mut idle) = (vec![7; 64 << 10], 0, 0);
    while idle < 50 {
        match socket.send_own(&bytes) {
            Ok(more) => (sent, idle) = (sent + more, 0),
            Err(errno) => {
                assert_eq!(errno, libc::EAGAIN);
                idle += 1;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    }
    sent
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_direction_ends_by_itself() {
    let (socket, mut peer) = connected().await;
    assert_eq!(socket.listen(), Heard::Nothing);
    assert_eq!(tried(|| socket.send_own(b"request")).await, Ok(7));
    socket.finish();
    let mut came = Vec::new();
    // An orderly end, which nobody on the way can make.
    peer.read_to_end(&mut came).await.unwrap();
    assert_eq!(came, b"request");
    let reply: Vec<u8> = (0..1_000_000_u32).map(|at| (at / 7) as u8).collect();
    let sending = async {
        peer.write_all(&reply).await.unwrap();
        peer.shutdown().await.unwrap();
    };
    let ((), came) = tokio::join!(sending, received(&socket));
    assert!(came.unwrap() == reply);
    assert_eq!(socket.listen(), Heard::End);
}

/// Much more than any buffer holds, in calls of all sizes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_taken_arrives_in_order() {
    let (socket, mut peer) = connected().await;
    let bytes: Vec<u8> = (0..8_000_000_u32).map(|at| (at / 11) as u8).collect();
    let sending = async {
        let mut rest = &bytes[..];
        for size in [1, 40, 4096, 16 << 10, (16 << 10) + 1, 300_000].into_iter().cycle() {
            let part = &rest[..rest.len().min(size)];
            let sent = tried(|| socket.send_own(part)).await.unwrap();
            rest = &rest[sent..];
            if rest.is_empty() {
                break;
            }
        }
        tried(|| socket.flush().and_then(|all| if all { Ok(0) } else { Err(libc::EAGAIN) })).await.unwrap();
        assert!(!socket.has_unsent());
        socket.finish();
    };
    let mut came = Vec::new();
    let ((), read) = tokio::join!(sending, peer.read_to_end(&mut came));
    read.unwrap();
    assert!(came == bytes);
}

/// The connection is reset: what TLS holds, and what is in the socket's buffer, never reaches the peer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_when_the_connection_is_reset_is_never_sent() {
    let (socket, mut peer) = connected().await;
    let sent = fill(&socket).await;
    assert!(socket.has_unsent());
    socket.abort();
    let (mut came, mut buffer) = (0, vec![0; 64 << 10]);
    let error = loop {
        match peer.read(&mut buffer).await {
            Ok(0) => panic!("an orderly end after {came} of {sent} bytes"),
            Ok(more) => came += more,
            Err(error) => break error,
        }
    };
    assert!(came < sent, "all of {sent} bytes were sent in spite of it, then {error}");
    assert!(socket.flush().is_err() && received(&socket).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_cut_off_is_no_orderly_end() {
    let (socket, mut peer) = connected().await;
    peer.write_all(b"half").await.unwrap();
    peer.flush().await.unwrap();
    // The socket's end, without TLS's.
    raw(peer).shutdown().await.unwrap();
    let mut bytes = [0; 10];
    assert_eq!(tried(|| socket.receive_own(&mut bytes)).await, Ok(4));
    assert_eq!(received(&socket).await, Err(System(libc::ECONNRESET)));
    assert_eq!(socket.listen(), Heard::End);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_were_put_in_on_the_way_are_never_received() {
    let (socket, peer) = connected().await;
    // A record of application data that nobody has sealed.
    raw(peer).write_all(&[&[23, 3, 3, 0, 64][..], &[9; 64]].concat()).await.unwrap();
    assert_eq!(received(&socket).await, Err(System(libc::EBADMSG)));
    // Again and again, also to whoever did not see the first time.
    assert_eq!(socket.listen(), Heard::Failed(System(libc::EBADMSG)));
    assert_eq!(received(&socket).await, Err(System(libc::EBADMSG)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_is_received() {
    let (socket, peer) = connected().await;
    let raw = raw(peer);
    rustix::net::sockopt::set_socket_linger(&raw, Some(Duration::ZERO)).unwrap();
    drop(raw);
    assert_eq!(received(&socket).await, Err(System(libc::ECONNRESET)));
}

/// A record that has come in part is nothing yet, and what the two sessions say to each other is no reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_plain_bytes_are_something_to_receive() {
    let (socket, mut peer) = connected().await;
    if let TlsStream::Server(stream) = &mut peer {
        stream.get_mut().1.refresh_traffic_keys().unwrap();
    }
    peer.flush().await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(socket.listen(), Heard::Nothing);
    peer.write_all(b"reply").await.unwrap();
    peer.flush().await.unwrap();
    let end = tokio::time::Instant::now() + LONG;
    while socket.listen() == Heard::Nothing {
        assert!(tokio::time::Instant::now() < end, "a reply with other keys does not come");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut bytes = [0; 3];
    assert_eq!(socket.receive_own(&mut bytes), Ok(3));
    assert_eq!(socket.listen(), Heard::Bytes);
    assert_eq!(socket.receive_own(&mut bytes), Ok(2));
    assert_eq!(socket.listen(), Heard::Nothing);
}

/// New keys cost a peer little and us much. Honest ones come once in many bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_has_us_work_in_vain_is_left() {
    let (socket, mut peer) = connected().await;
    let sending = async {
        for _ in 0..10_000 {
            for _ in 0..16 {
                let TlsStream::Server(stream) = &mut peer else { unreachable!("the peer is the server") };
                stream.get_mut().1.refresh_traffic_keys().unwrap();
            }
            if peer.write_all(b"x").await.is_err() || peer.flush().await.is_err() {
                return;
            }
        }
        panic!("it is read for ever");
    };
    let receiving = async {
        let error = received(&socket).await;
        socket.abort();
        error
    };
    let ((), error) = tokio::join!(sending, receiving);
    assert_eq!(error, Err(System(libc::EBADMSG)));
}

/// What could not be copied is not sealed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_has_gone_is_not_sent_as_zeros() {
    let (socket, mut peer) = connected().await;
    send_what_goes(&socket);
    socket.finish();
    let mut came = Vec::new();
    peer.read_to_end(&mut came).await.unwrap();
    assert_eq!(came, vec![1; 16 << 10]);
}

/// Each half asks without waiting for the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_comes_second_comes_again() {
    let (socket, _peer) = connected().await;
    come_second(&socket);
}
