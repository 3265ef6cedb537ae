//! `join`: tokens, signing requests and lists that anybody has written; a host that says anything to an authority, and an authority that answers
//! anything to a host.
//!
//! Oracles: no panic on either side; each side ends within its limits; whatever is said, one token brings one certificate, and none comes without; an
//! answer that is not the authority's changes nothing for a host; afterwards the next host is served.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use ioplane_identity::{
    ANSWERING, IdentityDirectory, NewKey, SigningRequest, TokenOrder, Validity, Which, pinned_client,
};
use ioplane_join::{JoinServer, JoinToken, join};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Runtime;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::Signature;

/// Longer than any limit of a connection.
const PATIENCE: Duration = Duration::from_secs(60);

/// One authority for all inputs: what one of them leaves behind the next ones meet.
struct Rig {
    runtime: Runtime,
    server: JoinServer,
    authority: IdentityDirectory,
    host: IdentityDirectory,
    fingerprint: [u8; 32],
    /// Of the only token that is not used up by this target itself.
    secret: String,
    request: String,
    list: String,
    /// Of the list.
    number: u64,
}

/// Certificates that were answered for that token.
static ISSUED: AtomicU32 = AtomicU32::new(0);

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn make() -> anyhow::Result<Rig> {
    let folder = std::env::temp_dir().join(format!("ioplane-fuzz-join-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let authority = IdentityDirectory::new(folder.join("a"));
    authority.create(&"host-a".parse()?, Validity::default())?;
    let member = folder.join("c.pem");
    authority.issue(&"host-c".parse()?, Validity::default(), &member)?;
    let number = authority.revoke(&"host-c".parse()?, &Which::All)?.number;
    let order = TokenOrder { name: None, replaces: false, days: 1, until: i64::MAX };
    let secret = hex(&authority.make_token(&order)?);
    let facts = authority.authority_facts()?;
    let fingerprint = facts.sha256().ok_or_else(|| anyhow::anyhow!("no fingerprint"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let entered = runtime.enter();
    let server = JoinServer::start(std::net::TcpListener::bind("127.0.0.1:0")?, authority.clone(), 1)?;
    drop(entered);
    let list = std::fs::read_to_string(authority.list_file())?;
    let request = NewKey::generate()?.request().to_owned();
    let host = IdentityDirectory::new(folder.join("b"));
    Ok(Rig { runtime, server, authority, host, fingerprint, secret, request, list, number })
}

fn rig() -> &'static Rig {
    static RIG: OnceLock<Rig> = OnceLock::new();
    RIG.get_or_init(|| make().expect("an authority that answers"))
}

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let mut input = Unstructured::new(data);
    let rig = rig();
    let talk = async {
        match input.int_in_range(0..=7).unwrap_or(0) {
            0..=2 => drop(texts(&mut input, rig, &mut signature)),
            3..=5 => {
                let _ = bad_host(&mut input, rig, &mut signature).await;
            }
            _ => {
                let _ = bad_authority(&mut input, rig, &mut signature).await;
            }
        }
    };
    rig.runtime.block_on(async { tokio::time::timeout(PATIENCE, talk).await }).expect("it does not end");
    signature.value()
}

/// A good text with a few mistakes, or any.
fn mistaken(input: &mut Unstructured<'_>, good: &str) -> Result<String> {
    if input.ratio(1, 16)? {
        return input.arbitrary();
    }
    let mut bytes = good.as_bytes().to_vec();
    for _ in 0..input.int_in_range(0..=3)? {
        let at = input.choose_index(bytes.len().max(1))?.min(bytes.len().saturating_sub(1));
        match input.int_in_range(0..=3)? {
            0 => bytes.truncate(at),
            1 if at < bytes.len() => drop(bytes.remove(at)),
            2 => bytes.insert(at, input.arbitrary()?),
            _ if at < bytes.len() => bytes[at] = input.arbitrary()?,
            _ => {}
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn texts(input: &mut Unstructured<'_>, rig: &Rig, signature: &mut Signature) -> Result<()> {
    match input.int_in_range(0..=2)? {
        0 => {
            let good = JoinToken {
                places: (0..input.int_in_range(0..=9)?).map(|_| place()).collect(),
                authority: input.arbitrary()?,
                secret: input.arbitrary()?,
                until: input.arbitrary()?,
                name: input.arbitrary()?,
            };
            if let Ok(token) = mistaken(input, &good.text())?.parse::<JoinToken>() {
                signature.saw("token");
                let again = token.text().parse::<JoinToken>().expect("a token that was read is read again");
                assert_eq!(again, token);
                assert!(!token.places.is_empty());
                assert!(token.name.is_none() || token.host().is_some(), "a token for what is no host");
            }
        }
        1 => {
            if SigningRequest::parse(&mistaken(input, &rig.request)?).is_ok() {
                signature.saw("request");
            }
        }
        _ => {
            let text = mistaken(input, &rig.list)?;
            if let Ok((number, _)) = rig.authority.take_revocations(Path::new("list"), &text) {
                signature.saw("list");
                assert_eq!(number, rig.number, "a list that the authority has not made");
            }
        }
    }
    Ok(())
}

fn place() -> ioplane_join::AuthorityPlace {
    ioplane_join::AuthorityPlace { host: "127.0.0.1".to_owned(), port: 1 }
}

/// A request, nearly right, with a length that is mostly its own.
fn request(input: &mut Unstructured<'_>, rig: &Rig) -> Result<Vec<u8>> {
    let secret = match input.int_in_range(0..=3)? {
        0 => rig.secret.clone(),
        1 => "00".repeat(32),
        _ => mistaken(input, &rig.secret)?,
    };
    let name = match input.int_in_range(0..=5)? {
        0 => "host-b".to_owned(),
        1 => "../../etc/passwd".to_owned(),
        2 => ANSWERING.to_owned(),
        3 => "host-a".to_owned(),
        _ => input.arbitrary()?,
    };
    let text = match input.int_in_range(0..=5)? {
        0..=2 => format!(
            r#"{{"version":{},"ask":"join","secret":{:?},"name":{:?},"request":{:?}}}"#,
            input.int_in_range(0..=8)?.min(1),
            secret,
            name,
            mistaken(input, &rig.request)?
        ),
        3 => format!(r#"{{"version":1,"ask":"renew","request":{:?}}}"#, rig.request),
        4 => r#"{"version":1,"ask":"revocations"}"#.to_owned(),
        _ => input.arbitrary()?,
    };
    let length = if input.ratio(1, 16)? { input.arbitrary()? } else { text.len() as u32 };
    Ok([&length.to_be_bytes()[..], text.as_bytes()].concat())
}

/// From an address that has not asked before: each has a limit.
async fn stream(to: SocketAddr) -> std::io::Result<tokio::net::TcpStream> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed) % 0x00ff_0000;
    let socket = TcpSocket::new_v4()?;
    socket.bind((Ipv4Addr::from_bits(0x7f00_0100 + number), 0).into())?;
    socket.connect(to).await
}

/// What comes back for what is said once TLS has started.
async fn said(rig: &Rig, bytes: &[u8]) -> Vec<u8> {
    let stream = stream(rig.server.address()).await.expect("a connection");
    let name = ServerName::try_from(ANSWERING).expect("a name");
    let started = TlsConnector::from(pinned_client(rig.fingerprint)).connect(name, stream).await;
    let mut stream = started.expect("TLS");
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said).await;
    said
}

async fn bad_host(input: &mut Unstructured<'_>, rig: &Rig, signature: &mut Signature) -> Result<()> {
    if input.ratio(1, 4)? {
        // Without TLS.
        let bytes: Vec<u8> = input.arbitrary()?;
        let mut stream = stream(rig.server.address()).await.expect("a connection");
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
    } else {
        let heard = said(rig, &request(input, rig)?).await;
        let heard = String::from_utf8_lossy(&heard);
        for word in [
            "unknown_token",
            "used_token",
            "bad_name",
            "bad_request",
            "name_issued",
            "no_certificate",
            "not_understood",
        ] {
            if heard.contains(word) {
                signature.saw(word);
            }
        }
        assert!(!heard.contains("unable"), "the authority's files were harmed");
        assert!(!heard.contains(r#""answer":"revocations""#), "a list without a certificate");
        if heard.contains(r#""answer":"issued""#) {
            signature.saw("issued");
            assert_eq!(ISSUED.fetch_add(1, Ordering::Relaxed), 0, "a token that works twice");
        }
    }
    let text = r#"{"version":1,"ask":"revocations"}"#;
    let heard = said(rig, &[&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()).await;
    assert!(String::from_utf8_lossy(&heard).contains("no_certificate"), "the next host is not served");
    Ok(())
}

async fn bad_authority(input: &mut Unstructured<'_>, rig: &Rig, signature: &mut Signature) -> Result<()> {
    let text = match input.int_in_range(0..=3)? {
        0 => format!(
            r#"{{"answer":"issued","certificate":{:?},"authority":{:?},"revocations":{:?}}}"#,
            mistaken(input, &rig.request)?,
            mistaken(input, &rig.request)?,
            mistaken(input, &rig.list)?
        ),
        1 => format!(r#"{{"answer":"refused","reason":{:?}}}"#, mistaken(input, "used_token")?),
        2 => r#"{"answer":"revocations","list":null}"#.to_owned(),
        _ => input.arbitrary()?,
    };
    let length = if input.ratio(1, 16)? { input.arbitrary()? } else { text.len() as u32 };
    let bytes = [&length.to_be_bytes()[..], text.as_bytes()].concat();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port of loopback");
    let at = listener.local_addr().expect("it").to_string().parse().expect("a place");
    let token = JoinToken {
        places: vec![at],
        authority: rig.fingerprint,
        secret: [0; 32],
        until: 0,
        name: Some("host-b".to_owned()),
    };
    let serve = async {
        let (stream, _) = listener.accept().await.expect("a host");
        let tls = rig.authority.answering().expect("an authority");
        let mut stream = TlsAcceptor::from(tls).accept(stream).await.expect("TLS");
        let _ = stream.read(&mut [0; 1]).await;
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
    };
    let (outcome, ()) = tokio::join!(join(&rig.host, &token, None, false), serve);
    let error = outcome.expect_err("what no authority has signed was taken").to_string();
    assert!(!error.chars().any(char::is_control), "what a peer says is shown as it is: {error:?}");
    signature.saw(error.split([':', '(']).next().unwrap_or_default());
    assert!(!rig.host.path().join("host.pem").exists());
    Ok(())
}
