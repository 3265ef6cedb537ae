//! Peers of an authority, and of a host that joins, that mean harm or are broken.

mod support;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ioplane_identity::{ANSWERING, NewKey, pinned_client};
use ioplane_join::{JoinError, JoinToken, join};
use serde_json::{Value, json};
use support::{Rig, answered, name, place, said};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::TlsAcceptor;

/// Whatever is said, a token is used up by its host only.
#[tokio::test]
async fn what_is_malformed_is_refused_and_uses_nothing_up() {
    let rig = Rig::new();
    let token = rig.token(Some("host-b"));
    let hex: String = token.secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let request = NewKey::generate().unwrap().request().to_owned();
    let client = async || rig.raw(pinned_client(rig.fingerprint())).await.unwrap();
    let ask = |secret: &str, name: &str, request: &str| json!({ "version": 1, "ask": "join", "secret": secret, "name": name, "request": request });
    for (wrong, reason) in [
        (ask(&hex, "../etc/passwd", &request), "bad_name"),
        (ask(&hex, "host-b/x", &request), "bad_name"),
        (ask(&hex, ANSWERING, &request), "bad_name"),
        (ask(&hex, "host-b", "x"), "bad_request"),
        (ask(&hex, "host-b", &request[..request.len() / 2]), "bad_request"),
        (ask(&hex[1..], "host-b", &request), "unknown_token"),
        (ask(&"é".repeat(32), "host-b", &request), "unknown_token"),
        (json!({ "version": 2, "ask": "renew", "request": "" }), "not_understood"),
        (json!({ "version": 1, "ask": "everything" }), "not_understood"),
    ] {
        let answer = said(&mut client().await, wrong.to_string().as_bytes()).await;
        let wanted = (Value::from("refused"), Value::from(reason));
        assert_eq!((answer["answer"].clone(), answer["reason"].clone()), wanted, "{wrong}");
    }
    for text in [&b"{"[..], b"\xff\xff", b"[]", &[b'['; 16_000]] {
        assert_eq!(said(&mut client().await, text).await["reason"], "not_understood");
    }
    // A length beyond the limit is refused by itself.
    let mut long = client().await;
    long.write_all(&((16u32 << 10) + 1).to_be_bytes()).await.unwrap();
    assert_eq!(answered(&mut long).await["reason"], "not_understood");
    // Half of a request, and the end of that direction.
    let mut half = client().await;
    half.write_all(&[0, 0, 1, 0, b'{']).await.unwrap();
    half.shutdown().await.unwrap();
    let mut rest = Vec::new();
    let _ = half.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
    join(&rig.host("host-b"), &token, None, false).await.unwrap();
}

/// From an address of its own.
async fn from(address: &str, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((address.parse::<IpAddr>().unwrap(), 0).into()).unwrap();
    socket.connect(to).await.unwrap()
}

/// Peers that say nothing, or a byte now and then, lose their places; meanwhile, and after, hosts are answered.
#[tokio::test]
async fn slow_and_many_peers_keep_nobody_out() {
    let rig = Rig::new();
    let at = rig.server.address();
    let began = Instant::now();
    // One that passes the handshake, and then takes its time.
    let mut late = rig.raw(pinned_client(rig.fingerprint())).await.unwrap();
    // The length of a request that it will not have said in time.
    late.write_all(&[0, 0, 1]).await.unwrap();
    late.flush().await.unwrap();
    let mut peers = Vec::new();
    for peer in 0..60 {
        let mut stream = from("127.0.0.9", at).await;
        // The beginning of a record, or nothing.
        if peer % 2 == 0 {
            let _ = stream.write_all(&[22, 3, 1, 2, 0, 1]).await;
        }
        peers.push(stream);
    }
    rig.member("host-b").await;
    // Beyond its places an address is closed at once.
    let mut waiting = Vec::new();
    for mut stream in peers {
        let read = tokio::time::timeout(Duration::from_millis(20), stream.read(&mut [0; 64])).await;
        if read.is_err() {
            waiting.push(stream);
        }
    }
    // If that took longer than a handshake may, some have lost theirs.
    let (most, took) = (waiting.len(), began.elapsed());
    assert!(most == 8 || (took > Duration::from_secs(3) && most < 8), "{most} of 60 have a place: {took:?}");
    // A byte a second helps nobody.
    let sends = async {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            if late.write_all(&[0]).await.is_err() || late.flush().await.is_err() {
                return;
            }
        }
    };
    let ends = async {
        for mut stream in waiting {
            let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), async { tokio::join!(sends, ends) }).await.unwrap();
    assert!(began.elapsed() > Duration::from_secs(8), "they had no time: {:?}", began.elapsed());
    rig.member("host-c").await;
}

/// A few addresses that take all they get leave places for others.
#[tokio::test]
async fn a_few_addresses_keep_nobody_out() {
    let rig = Rig::new();
    let mut there = Vec::new();
    for address in ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"] {
        for _ in 0..20 {
            there.push(from(address, rig.server.address()).await);
        }
    }
    // While they are there: they say nothing.
    rig.member("host-b").await;
    // A handshake has less time than a connection: whoever says nothing is gone soon, and its places are free.
    let began = Instant::now();
    for mut stream in there {
        let ends = async { tokio::io::copy(&mut stream, &mut tokio::io::sink()).await };
        let _ = tokio::time::timeout(Duration::from_secs(8), ends).await.expect("it has a place still");
    }
    assert!(began.elapsed() < Duration::from_secs(8));
    rig.member("host-c").await;
}

/// What is said in plain text is no handshake.
#[tokio::test]
async fn plain_text_is_not_answered() {
    let rig = Rig::new();
    for text in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &[255; 4096]] {
        let mut stream = TcpStream::connect(rig.server.address()).await.unwrap();
        let _ = stream.write_all(text).await;
        let _ = stream.shutdown().await;
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said).await;
        // An alert at most.
        assert!(said.len() < 16, "{said:?}");
    }
    rig.member("host-b").await;
}

/// One connection is served by `answer`, which is all that comes after the handshake.
async fn answer_once(rig: &Rig, listener: &TcpListener, answer: &[u8]) {
    let (stream, _) = listener.accept().await.unwrap();
    let mut stream = TlsAcceptor::from(rig.authority.answering().unwrap()).accept(stream).await.unwrap();
    let _ = stream.read(&mut [0; 1]).await;
    let _ = stream.write_all(answer).await;
    let _ = stream.shutdown().await;
    let _ = stream.read_to_end(&mut Vec::new()).await;
}

/// An answer that does not come: the host says what that means, and nothing of it is left.
#[tokio::test]
async fn a_lost_answer_is_told_as_such() {
    let rig = Rig::new();
    let token = rig.token(Some("host-b"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let there = JoinToken { places: vec![place(listener.local_addr().unwrap())], ..token.clone() };
    let host = rig.host("host-b");
    for answer in [&b""[..], &[0, 0], &[0, 0, 0, 9, b'{'], &[255; 4], b"\0\0\0\x02{}"] {
        let serve = answer_once(&rig, &listener, answer);
        let ((), lost) = tokio::join!(serve, join(&host, &there, None, false));
        let Err(lost @ JoinError::AnswerLost(_)) = lost else { panic!("{lost:?}") };
        assert!(lost.to_string().contains("make another one"), "{lost}");
        assert!(!host.path().join("host.pem").exists());
    }
    // Nobody is there at all: nothing was sent.
    drop(listener);
    let refused = join(&host, &there, None, false).await;
    assert!(matches!(&refused, Err(JoinError::Unreachable(why)) if why.contains("refused")), "{refused:?}");
    // The second place answers.
    let both = JoinToken { places: [there.places, token.places.clone()].concat(), ..token };
    join(&host, &both, None, false).await.unwrap();
}

/// An authority that answers, but not what was asked for.
#[tokio::test]
async fn an_answer_that_does_not_fit_is_not_taken() {
    let rig = Rig::new();
    let token = rig.token(Some("host-b"));
    let of_c = std::fs::read_to_string(rig.member("host-c").await.path().join("host.pem")).unwrap();
    let parts: Vec<_> = of_c.split_inclusive("-----END CERTIFICATE-----\n").collect();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let there = JoinToken { places: vec![place(listener.local_addr().unwrap())], ..token.clone() };
    let issued = |certificate: &str, authority: &str| json!({ "answer": "issued", "certificate": certificate, "authority": authority, "revocations": null });
    for answer in [
        issued(parts[0], parts[1]),
        issued("", ""),
        // With a key that is not this host's.
        issued(&format!("{}{}", parts[0], parts[2]), parts[1]),
        json!({ "answer": "revocations", "list": null }),
        json!({ "answer": "refused", "reason": "name_issued" }),
        json!({ "answer": "refused", "reason": "\u{1b}[2J" }),
    ] {
        let text = answer.to_string();
        let message = [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat();
        let host = rig.host("host-b");
        let serve = answer_once(&rig, &listener, &message);
        let ((), taken) = tokio::join!(serve, join(&host, &there, None, false));
        let error = taken.unwrap_err().to_string();
        assert!(!error.contains('\u{1b}'), "{error:?}");
        assert!(!host.path().join("host.pem").exists(), "{text:.200}");
    }
    let own = name("host-b");
    assert_eq!(join(&rig.host("host-b"), &token, None, false).await.unwrap().name, own);
}
