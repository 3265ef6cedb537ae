//! `directory`: a host that says anything to a directory of devices, and a directory that says anything to a host.
//!
//! Oracles: no panic on either side; each side ends or goes on within its limits; afterwards a good host is served as before, its device is its
//! own, and everything that is listed may be shown on a terminal.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use ioplane_netbus::{
    DeviceRate, DeviceRecord, DirectoryAddress, DirectoryServer, DirectorySession, HostPresence, Security,
    ServerSecurity,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::Signature;

/// Longer than any limit of a session.
const PATIENCE: Duration = Duration::from_secs(60);

/// One directory for all inputs: what one of them leaves behind the next ones meet.
struct Rig {
    runtime: Runtime,
    server: DirectoryServer,
}

fn rig() -> &'static Rig {
    static RIG: OnceLock<Rig> = OnceLock::new();
    RIG.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let file = std::env::temp_dir().join(format!("ioplane-fuzz-directory-{}.redb", std::process::id()));
        let _ = std::fs::remove_file(&file);
        let entered = runtime.enter();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port of loopback");
        let server = DirectoryServer::start(listener, &file, ServerSecurity::Plain).expect("a directory");
        // It stays open; nobody else needs its name.
        let _ = std::fs::remove_file(&file);
        drop(entered);
        Rig { runtime, server }
    })
}

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let mut input = Unstructured::new(data);
    let rig = rig();
    let hosts = input.arbitrary().unwrap_or(true);
    let talk = async {
        if hosts {
            let _ = bad_host(&mut input, rig.server.address(), &mut signature).await;
            good_host(rig.server.address()).await;
        } else {
            bad_directory(&mut input, &mut signature).await;
        }
    };
    rig.runtime.block_on(async { tokio::time::timeout(PATIENCE, talk).await }).expect("it does not end");
    signature.value()
}

/// A text as a message may have it, or not.
fn text(input: &mut Unstructured<'_>) -> Result<String> {
    Ok(match input.int_in_range(0..=7)? {
        0 => "good".to_owned(),
        1 => "host-b".to_owned(),
        2 => "../../etc/passwd".to_owned(),
        3 => "\u{1b}[2J\u{7}".to_owned(),
        4 => "x".repeat(input.int_in_range(0..=2000)?),
        _ => input.arbitrary()?,
    })
}

fn device(input: &mut Unstructured<'_>) -> Result<String> {
    let word = |text: String| Ok(format!("{text:?}"));
    Ok(format!(
        r#"{{"name":{},"kind":{},"size":{},"location":{},"read_only":{},"users":{},"holder":{},"trouble":null}}"#,
        word(text(input)?)?,
        word(text(input)?)?,
        input.arbitrary::<u64>()?,
        word(text(input)?)?,
        input.arbitrary::<bool>()?,
        input.arbitrary::<u32>()?,
        word(text(input)?)?,
    ))
}

/// A message, nearly right, with a length that is mostly its own.
fn message(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut devices = Vec::new();
    for _ in 0..input.int_in_range(0..=3)? {
        devices.push(device(input)?);
    }
    let devices = devices.join(",");
    let said = match input.int_in_range(0..=11)? {
        0 | 1 => format!(
            r#"{{"say":"hello","version":{},"host":{:?},"daemon":{:?}}}"#,
            input.int_in_range(0..=3)?,
            text(input)?,
            text(input)?
        ),
        2 | 3 => format!(r#"{{"say":"report","devices":[{devices}]}}"#),
        4 => r#"{"say":"list"}"#.to_owned(),
        5 => format!(r#"{{"say":"forget","name":{:?}}}"#, text(input)?),
        6 => r#"{"say":"leave"}"#.to_owned(),
        7 => format!(r#"{{"say":"welcome","version":1,"host":{:?}}}"#, text(input)?),
        8 => {
            let entry =
                |device: &str, host: &str| format!(r#"{{"host":{host:?},"seen":"now","device":{device}}}"#);
            let entry = entry(&device(input)?, &text(input)?);
            format!(r#"{{"say":"listed","entries":[{entry}],"more":{}}}"#, input.arbitrary::<bool>()?)
        }
        9 => {
            format!(r#"{{"say":"reported","taken":[{{"name":{:?},"by":{:?}}}]}}"#, text(input)?, text(input)?)
        }
        10 => format!(r#"{{"say":"refused","why":{:?}}}"#, text(input)?),
        _ => text(input)?,
    };
    framed(input, &said)
}

/// A message as it goes over the wire, whose length is sometimes another, and sometimes a byte.
pub(crate) fn framed(input: &mut Unstructured<'_>, said: &str) -> Result<Vec<u8>> {
    let mut length = said.len() as u32;
    if input.ratio(1, 16)? {
        length = input.arbitrary()?;
    }
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend(said.as_bytes());
    if input.ratio(1, 8)? {
        let at = input.choose_index(bytes.len())?;
        bytes[at] = input.arbitrary()?;
    }
    Ok(bytes)
}

/// Says a few things and hangs up.
async fn bad_host(input: &mut Unstructured<'_>, at: SocketAddr, signature: &mut Signature) -> Result<()> {
    let Ok(mut peer) = TcpStream::connect(at).await else { return Ok(()) };
    if input.ratio(3, 4)? {
        let hello = r#"{"say":"hello","version":1,"host":"host-b","daemon":"bad"}"#;
        let _ = peer.write_all(&(hello.len() as u32).to_be_bytes()).await;
        let _ = peer.write_all(hello.as_bytes()).await;
    }
    for _ in 0..input.int_in_range(0..=6)? {
        if peer.write_all(&message(input)?).await.is_err() {
            break;
        }
    }
    let _ = peer.shutdown().await;
    let mut said = Vec::new();
    let _ = peer.read_to_end(&mut said).await;
    let said = String::from_utf8_lossy(&said);
    for word in
        ["welcome", "reported", "taken\":[{", "listed", "forgotten", "done", "present", "left", "refused"]
    {
        if said.contains(word) {
            signature.saw(word);
        }
    }
    Ok(())
}

async fn good_host(at: SocketAddr) {
    let address: DirectoryAddress = at.to_string().parse().expect("an address");
    let security = Security::Plain { host: "host-a".to_owned() };
    let mut session = DirectorySession::connect(&address, &security, "good").await.expect("a session");
    let own = DeviceRecord {
        name: "mine".to_owned(),
        kind: "disk".to_owned(),
        size: Some(512),
        location: "nbd://127.0.0.1/mine".to_owned(),
        read_only: false,
        users: 0,
        holder: None,
        trouble: None,
        rates: vec![DeviceRate { unit: "requests".to_owned(), capacity: 1000, reserved: 1 }],
    };
    assert!(session.report(vec![own.clone()]).await.expect("a report").is_empty(), "its name was taken");
    let entries = session.list().await.expect("a list that can be shown");
    let mine = entries.iter().find(|entry| entry.device == own).expect("what was reported");
    assert_eq!((mine.host.as_str(), mine.seen), ("host-a", HostPresence::Now));
}

/// A directory that answers a few things.
async fn bad_directory(input: &mut Unstructured<'_>, signature: &mut Signature) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port of loopback");
    let address: DirectoryAddress =
        listener.local_addr().expect("it").to_string().parse().expect("an address");
    let mut bytes = Vec::new();
    if input.ratio(7, 8).unwrap_or(true) {
        let welcome = r#"{"say":"welcome","version":1,"host":"host-a"}"#;
        bytes.extend((welcome.len() as u32).to_be_bytes());
        bytes.extend(welcome.as_bytes());
    }
    for _ in 0..4 {
        bytes.extend(message(input).unwrap_or_default());
    }
    // Whoever is refused comes again with an older version.
    let serve = async {
        while let Ok((mut peer, _)) = listener.accept().await {
            let _ = peer.write_all(&bytes).await;
            let _ = peer.shutdown().await;
            let _ = tokio::io::copy(&mut peer, &mut tokio::io::sink()).await;
        }
    };
    let security = Security::Plain { host: "host-a".to_owned() };
    let ask = async {
        let Ok(mut session) = DirectorySession::connect(&address, &security, "d").await else { return };
        signature.saw("connected");
        if let Ok(entries) = session.list().await {
            signature.saw("listed");
            for entry in entries {
                assert!(!format!("{}{}", entry.host, entry.device.location).chars().any(char::is_control));
                entry.device.check().expect("what is listed was checked");
            }
        }
        if session.report(Vec::new()).await.is_ok() {
            signature.saw("reported");
        }
        drop(session);
    };
    tokio::select! {
        () = serve => {}
        () = ask => {}
    }
}
