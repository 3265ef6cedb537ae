//! Channels between daemons: who is let in, versions, hostile peers.

#[allow(dead_code, reason = "each test file uses its own part")]
mod support;

use std::net::SocketAddr;

use ioplane_identity::IdentityDirectory;
use ioplane_netbus::channel::{ChannelRequest, VERSION, open};
use ioplane_netbus::{DirectoryAddress, NetbusError};
use support::identities;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

async fn listener() -> (TcpListener, DirectoryAddress) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at: SocketAddr = listener.local_addr().unwrap();
    let address = at.to_string().parse::<DirectoryAddress>().unwrap();
    (listener, DirectoryAddress { tls_hostname: Some("host-a".to_owned()), ..address })
}

async fn arrives(
    listener: &TcpListener,
    identity: &IdentityDirectory,
) -> Result<ChannelRequest, NetbusError> {
    ChannelRequest::receive(listener.accept().await.unwrap().0, identity).await
}

#[tokio::test]
async fn who_is_let_in_has_a_stream_of_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, _] = identities(folder.path());
    let (listener, address) = listener().await;
    let here = async {
        let arrival = arrives(&listener, &a).await.unwrap();
        assert_eq!((arrival.host(), arrival.subject(), arrival.part()), ("host-b", "vm \u{1b}1", "api"));
        assert!(!arrival.shown().contains('\u{1b}'), "{}", arrival.shown());
        let mut stream = arrival.admit().await.unwrap();
        let mut said = [0; 5];
        stream.read_exact(&mut said).await.unwrap();
        stream.write_all(&said).await.unwrap();
        stream.flush().await.unwrap();
    };
    let there = async {
        let mut stream = open(&address, &b, "vm \u{1b}1", "api").await.unwrap();
        stream.write_all(b"hello").await.unwrap();
        stream.flush().await.unwrap();
        let mut said = [0; 5];
        stream.read_exact(&mut said).await.unwrap();
        assert_eq!(&said, b"hello");
    };
    tokio::join!(here, there);
}

#[tokio::test]
async fn who_is_not_is_told_why() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, stranger] = identities(folder.path());
    let (listener, address) = listener().await;
    let refuse = async { arrives(&listener, &a).await.unwrap().refuse("no\u{1b}[2J").await };
    let (refused, opened) = tokio::join!(refuse, open(&address, &b, "vm", "api"));
    refused.unwrap();
    assert_eq!(opened.err().unwrap().to_string(), "the other host refuses: no[2J");
    // Of another authority; another host than was asked for.
    let (arrived, opened) = tokio::join!(arrives(&listener, &a), open(&address, &stranger, "vm", "api"));
    assert!(matches!(arrived.err(), Some(NetbusError::Tls(_) | NetbusError::Closed)));
    assert!(matches!(opened.err(), Some(NetbusError::Tls(_))));
    let other = DirectoryAddress { tls_hostname: Some("host-c".to_owned()), ..address.clone() };
    let (arrived, opened) = tokio::join!(arrives(&listener, &a), open(&other, &b, "vm", "api"));
    assert!(arrived.is_err());
    assert!(matches!(opened.err(), Some(NetbusError::Tls(_))));
    // In plain text.
    let plain = async {
        let mut stream = TcpStream::connect((address.host.as_str(), address.port)).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    };
    let (arrived, ()) = tokio::join!(arrives(&listener, &a), plain);
    assert!(arrived.is_err());
}

#[tokio::test]
async fn another_version_is_a_clear_error_on_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, _] = identities(folder.path());
    let (listener, address) = listener().await;
    let newer = async {
        let (mut stream, hello) =
            (raw(&address, &b).await, br#"{"version":7,"subject":"vm","part":"api","more":1}"#);
        stream.write_u32(hello.len() as u32).await.unwrap();
        stream.write_all(hello).await.unwrap();
        stream.flush().await.unwrap();
        let length = stream.read_u32().await.unwrap();
        let mut said = vec![0; length as usize];
        stream.read_exact(&mut said).await.unwrap();
        String::from_utf8(said).unwrap()
    };
    let (arrived, said) = tokio::join!(arrives(&listener, &a), newer);
    assert!(matches!(arrived.err(), Some(NetbusError::OtherVersion { here: VERSION, there: 7 })));
    assert!(said.contains(&format!("\"version\":{VERSION}")), "{said}");
    let newer = async {
        let (stream, _) = listener.accept().await.unwrap();
        let identity = a.load().unwrap();
        let mut stream = TlsAcceptor::from(identity.server()).accept(stream).await.unwrap();
        let welcome = br#"{"version":7}"#;
        stream.write_u32(welcome.len() as u32).await.unwrap();
        stream.write_all(welcome).await.unwrap();
        stream.flush().await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    };
    let (opened, ()) = tokio::join!(open(&address, &b, "vm", "api"), newer);
    let error = opened.err().unwrap();
    assert!(matches!(error, NetbusError::OtherVersion { here: VERSION, there: 7 }), "{error}");
    assert_eq!(
        error.to_string(),
        "the daemon there speaks version 7 of the protocol between hosts, and this one speaks 1"
    );
}

async fn raw(
    address: &DirectoryAddress,
    identity: &IdentityDirectory,
) -> tokio_rustls::client::TlsStream<TcpStream> {
    let stream = TcpStream::connect((address.host.as_str(), address.port)).await.unwrap();
    let identity = identity.load().unwrap();
    let name = "host-a".try_into().unwrap();
    TlsConnector::from(identity.client()).connect(name, stream).await.unwrap()
}

#[tokio::test]
async fn greetings_that_lie_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, _] = identities(folder.path());
    let (listener, address) = listener().await;
    for bytes in [
        &[][..],
        &[0, 0],
        &[0xff; 64],
        b"\0\0\x40\x01{",
        b"\0\0\0\x02{}",
        b"\0\0\0\x02[1",
        b"\0\0\0\x10{\"version\":1,\"s\"",
        b"\0\0\0\x2e{\"version\":-1,\"subject\":\"vm\",\"part\":\"api\"}     ",
    ] {
        let hostile = async {
            let mut stream = raw(&address, &b).await;
            stream.write_all(bytes).await.unwrap();
            stream.shutdown().await.unwrap();
            let _ = stream.read_to_end(&mut Vec::new()).await;
        };
        let arrived = async { arrives(&listener, &a).await.map(drop) };
        let (arrived, ()) = tokio::join!(arrived, hostile);
        assert!(arrived.is_err(), "{bytes:?}");
    }
}
