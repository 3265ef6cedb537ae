//! What a relay does when one of its ends is gone, stops, or is reset.

use std::io::Read;
use std::os::unix::net::UnixStream as Plain;
use std::time::Duration;

use ioplane_identity::{IdentityDirectory, Validity};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::{RelayEnd, Relayed, relay};

const LONG: Duration = Duration::from_secs(120);

/// Both ends of a connection on which TLS has started.
async fn connected() -> (TlsStream<TcpStream>, TlsStream<TcpStream>) {
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
    (ours.unwrap().into(), theirs.unwrap().into())
}

/// A relay at one end, with its plain end as a stream; the peer.
async fn relayed(limit: Duration) -> (Relayed, Plain, TlsStream<TcpStream>) {
    let (ours, peer) = connected().await;
    let relayed = relay(ours, limit).unwrap();
    let plain = Plain::from(relayed.plain.try_clone().unwrap());
    plain.set_nonblocking(true).unwrap();
    (relayed, plain, peer)
}

/// Waits for the plain end to have ended, and throws away what comes before.
async fn ended(plain: &mut Plain) {
    let end = tokio::time::Instant::now() + LONG;
    loop {
        match plain.read(&mut [0; 4096]) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // Closed with something unread.
            Err(_) => return,
        }
        assert!(tokio::time::Instant::now() < end, "the plain end does not end");
    }
}

/// Why the connection was lost, once that is known.
async fn failure(end: &RelayEnd) -> i32 {
    let until = tokio::time::Instant::now() + LONG;
    loop {
        if let Some(errno) = end.failure() {
            return errno;
        }
        assert!(tokio::time::Instant::now() < until, "the connection is not lost");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Writes until nothing is taken for a while; says how much was.
async fn fill(plain: &Plain) -> usize {
    let (bytes, mut sent, mut idle) = (vec![7; 64 << 10], 0, 0);
    while idle < 50 {
        match std::io::Write::write(&mut &*plain, &bytes) {
            Ok(more) => (sent, idle) = (sent + more, 0),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                idle += 1;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    }
    sent
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_direction_ends_by_itself() {
    let (relayed, mut plain, mut peer) = relayed(LONG).await;
    std::io::Write::write_all(&mut plain, b"request").unwrap();
    plain.shutdown(std::net::Shutdown::Write).unwrap();
    let mut came = Vec::new();
    // An orderly end, which nobody on the way can make.
    peer.read_to_end(&mut came).await.unwrap();
    assert_eq!(came, b"request");
    let reply = vec![5; 1 << 20];
    let sending = async {
        peer.write_all(&reply).await.unwrap();
        peer.shutdown().await.unwrap();
    };
    let receiving = tokio::task::spawn_blocking(move || {
        plain.set_nonblocking(false).unwrap();
        let mut came = Vec::new();
        plain.read_to_end(&mut came).unwrap();
        came
    });
    let ((), came) = tokio::join!(sending, receiving);
    assert!(came.unwrap() == reply);
    assert_eq!(relayed.end.failure(), None);
}

/// The connection is reset: what is in the plain socket, in the relay and in the socket's buffer never reaches the peer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_relay_still_holds_when_its_connection_is_reset_is_never_sent() {
    let (relayed, mut plain, mut peer) = relayed(LONG).await;
    let sent = fill(&plain).await;
    let end = relayed.end.clone();
    crate::import::abort_relayed(relayed);
    let (mut came, mut buffer) = (0, vec![0; 64 << 10]);
    let error = loop {
        match peer.read(&mut buffer).await {
            Ok(0) => panic!("an orderly end after {came} of {sent} bytes"),
            Ok(more) => came += more,
            Err(error) => break error,
        }
    };
    assert!(came < sent, "all of {sent} bytes were sent in spite of it, then {error}");
    ended(&mut plain).await;
    failure(&end).await;
}

/// The plain end has gone: what comes for it is not kept for anybody, and the peer may end in peace, or is left after a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_whose_poller_has_gone_is_told_and_left() {
    let (relayed, plain, mut peer) = relayed(Duration::from_millis(200)).await;
    let end = relayed.end.clone();
    drop((relayed, plain));
    // More than all buffers on the way hold is read over.
    let bytes = vec![1; 1 << 20];
    let mut sent = 0;
    while peer.write_all(&bytes).await.is_ok() && peer.flush().await.is_ok() {
        sent += 1;
        assert!(sent < 100_000, "it is read for ever");
    }
    assert_eq!(failure(&end).await, libc::ETIMEDOUT);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_cut_off_is_no_orderly_end() {
    let (relayed, mut plain, peer) = relayed(LONG).await;
    // The socket's end, which anybody on the way can make, without TLS's.
    let (mut raw, _) = match peer {
        TlsStream::Server(stream) => stream.into_inner(),
        TlsStream::Client(_) => unreachable!("the peer is the server"),
    };
    raw.shutdown().await.unwrap();
    ended(&mut plain).await;
    assert_eq!(failure(&relayed.end).await, libc::ECONNRESET);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_were_put_in_on_the_way_are_never_passed_on() {
    let (relayed, mut plain, peer) = relayed(LONG).await;
    let (mut raw, _) = match peer {
        TlsStream::Server(stream) => stream.into_inner(),
        TlsStream::Client(_) => unreachable!("the peer is the server"),
    };
    // A record of application data that nobody has sealed.
    raw.write_all(&[&[23, 3, 3, 0, 64][..], &[9; 64]].concat()).await.unwrap();
    ended(&mut plain).await;
    assert_eq!(failure(&relayed.end).await, libc::EBADMSG);
}

/// A reset is seen with nothing under way: nobody waits for a peer that is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_ends_the_plain_end() {
    let (relayed, mut plain, peer) = relayed(LONG).await;
    let (raw, _) = match peer {
        TlsStream::Server(stream) => stream.into_inner(),
        TlsStream::Client(_) => unreachable!("the peer is the server"),
    };
    rustix::net::sockopt::set_socket_linger(&raw, Some(Duration::ZERO)).unwrap();
    drop(raw);
    ended(&mut plain).await;
    assert_eq!(failure(&relayed.end).await, libc::ECONNRESET);
}
