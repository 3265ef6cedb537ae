//! Hosts and a directory over TCP: names, leases, restarts, wrong and hostile peers.

mod support;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use ioplane_netbus::{
    DirectoryAddress, DirectoryServer, DirectorySession, Forgotten, HostPresence, NetbusError, Security,
    ServerSecurity,
};
use support::{LIMIT, identities, listed, names_are_one_hosts, pair, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

fn at(address: SocketAddr) -> DirectoryAddress {
    address.to_string().parse().unwrap()
}

fn plain(folder: &Path) -> DirectoryServer {
    DirectoryServer::start(listener(), &folder.join("d.redb"), ServerSecurity::Plain).unwrap()
}

async fn join(server: &DirectoryServer, host: &str) -> Result<DirectorySession, NetbusError> {
    let security = Security::Plain { host: host.to_owned() };
    DirectorySession::connect(&at(server.address()), &security, "daemon").await
}

#[tokio::test]
async fn what_one_host_publishes_another_finds_and_cannot_publish() {
    let folder = tempfile::tempdir().unwrap();
    let server = plain(folder.path());
    let (a, b) = (join(&server, "host-a").await.unwrap(), join(&server, "host-b").await.unwrap());
    assert_eq!((a.host(), a.local()), ("host-a", server.address().ip()));
    names_are_one_hosts(a, b).await;
}

#[tokio::test]
async fn names_outlive_hosts_and_directories() {
    let folder = tempfile::tempdir().unwrap();
    {
        let server = plain(folder.path());
        let mut a = join(&server, "host-a").await.unwrap();
        a.report(vec![stream("x")]).await.unwrap();
        let mut b = join(&server, "host-b").await.unwrap();
        assert_eq!(b.forget("x").await.unwrap(), Forgotten::Present("host-a".to_owned()));
        a.leave().await.unwrap();
        assert!(matches!(b.list().await.unwrap()[0].seen, HostPresence::Lost(_)));
        assert_eq!(
            b.report(vec![stream("x")]).await.unwrap().len(),
            1,
            "a host that is away keeps its names"
        );
    }
    // The file is free once the last session has noticed.
    let server = tokio::time::timeout(LIMIT, async {
        loop {
            let path = folder.path().join("d.redb");
            match DirectoryServer::start(listener(), &path, ServerSecurity::Plain) {
                Ok(server) => return server,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    });
    let server = server.await.unwrap();
    let mut b = join(&server, "host-b").await.unwrap();
    let entries = b.list().await.unwrap();
    assert_eq!(
        (entries.len(), entries[0].host.as_str(), entries[0].seen),
        (1, "host-a", HostPresence::Never)
    );
    assert_eq!(b.forget("x").await.unwrap(), Forgotten::Done);
    assert_eq!(b.forget("x").await.unwrap(), Forgotten::Unknown);
    assert_eq!(b.report(vec![stream("x")]).await.unwrap(), []);
}

#[tokio::test]
async fn a_restarted_daemon_replaces_its_session_and_another_daemon_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let server = plain(folder.path());
    let mut old = join(&server, "host-a").await.unwrap();
    let other = Security::Plain { host: "host-a".to_owned() };
    let refused = DirectorySession::connect(&at(server.address()), &other, "second").await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("another daemon of host-a"), "{refused}");
    let mut new = join(&server, "host-a").await.unwrap();
    new.report(vec![stream("x")]).await.unwrap();
    old.report(Vec::new()).await.unwrap_err();
    assert_eq!(listed(&mut new).await, [pair("x", "host-a")]);
}

#[tokio::test]
async fn many_devices_come_in_parts() {
    let folder = tempfile::tempdir().unwrap();
    let server = plain(folder.path());
    for host in ["host-a", "host-b"] {
        let mut session = join(&server, host).await.unwrap();
        let devices = (0..1000).map(|n| stream(&format!("{host}-{n:04}"))).collect();
        assert_eq!(session.report(devices).await.unwrap(), []);
    }
    let mut session = join(&server, "host-c").await.unwrap();
    let names = listed(&mut session).await;
    assert_eq!(names.len(), 2000);
    assert!(names.is_sorted());
}

#[tokio::test]
async fn hostile_hosts_are_refused_and_others_are_served_on() {
    let folder = tempfile::tempdir().unwrap();
    let server = plain(folder.path());
    let mut good = join(&server, "host-a").await.unwrap();
    good.report(vec![stream("x")]).await.unwrap();
    for host in ["", "../x", "a b", "h\u{1b}[2J"] {
        assert!(matches!(join(&server, host).await, Err(NetbusError::Refused(_))), "{host:?}");
    }
    let hello = br#"{"say":"hello","version":0,"host":"host-b","daemon":"d"}"#;
    let mut longest = (hello.len() as u32).to_be_bytes().to_vec();
    longest.extend(hello);
    let messages: [&[u8]; 5] =
        [&[0xff; 64], b"\0\0\0\x02{}", b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\x0e{\"say\":\"list\"}", &longest];
    for bytes in messages {
        let mut peer = TcpStream::connect(server.address()).await.unwrap();
        peer.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        let read = tokio::time::timeout(LIMIT, peer.read_to_end(&mut answer)).await.unwrap();
        // A reset is an end, too.
        assert!(read.is_err() || answer.is_empty() || String::from_utf8_lossy(&answer).contains("refused"));
    }
    let mut bad = join(&server, "host-b").await.unwrap();
    let refused = bad.report(vec![stream("a/b")]).await.unwrap_err().to_string();
    assert!(refused.contains("no name of a device"), "{refused}");
    // The session goes on: one bad device is no reason to lose all.
    assert_eq!(bad.report(vec![stream("fine")]).await.unwrap(), []);
    assert_eq!(listed(&mut good).await, [pair("fine", "host-b"), pair("x", "host-a")]);
}

#[tokio::test]
async fn a_directory_that_lies_is_named() {
    let lies = [
        r#"{"say":"welcome","version":1,"host":"../../etc"}"#,
        r#"{"say":"welcome","version":9,"host":"host-a"}"#,
        r#"{"say":"left"}"#,
        "no JSON",
    ];
    for lie in lies {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = at(listener.local_addr().unwrap());
        let security = Security::Plain { host: "host-a".to_owned() };
        let serve = async {
            let (mut peer, _) = listener.accept().await.unwrap();
            peer.write_all(&(lie.len() as u32).to_be_bytes()).await.unwrap();
            peer.write_all(lie.as_bytes()).await.unwrap();
            peer
        };
        let (_peer, session) = tokio::join!(serve, DirectorySession::connect(&address, &security, "d"));
        session.expect_err(lie);
    }
    // Names that nobody may have, and a list without an end.
    let entry = r#"{"host":"host-a","seen":"now","device":{"name":"../x","kind":"disk","size":null,"location":"l","read_only":false,"users":0,"holder":null,"trouble":null}}"#;
    let good = entry.replace("../x", "x");
    for list in [
        format!(r#"{{"say":"listed","entries":[{entry}],"more":false}}"#),
        format!(r#"{{"say":"listed","entries":[{}],"more":false}}"#, good.replace("host-a", "a\\u001b")),
        r#"{"say":"listed","entries":[],"more":true}"#.to_owned(),
    ] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = at(listener.local_addr().unwrap());
        let security = Security::Plain { host: "host-a".to_owned() };
        let serve = async {
            let (mut peer, _) = listener.accept().await.unwrap();
            let welcome = r#"{"say":"welcome","version":1,"host":"host-a"}"#;
            for text in [welcome, &list] {
                peer.write_all(&(text.len() as u32).to_be_bytes()).await.unwrap();
                peer.write_all(text.as_bytes()).await.unwrap();
            }
            peer
        };
        let ask = async {
            let mut session = DirectorySession::connect(&address, &security, "d").await.unwrap();
            session.list().await
        };
        let (_peer, found) = tokio::join!(serve, ask);
        assert!(found.is_err(), "{list}");
    }
}

async fn say(peer: &mut TcpStream, text: &str) {
    peer.write_all(&(text.len() as u32).to_be_bytes()).await.unwrap();
    peer.write_all(text.as_bytes()).await.unwrap();
}

async fn hear(peer: &mut TcpStream) -> String {
    let heard = async {
        let mut text = vec![0; peer.read_u32().await.unwrap() as usize];
        peer.read_exact(&mut text).await.unwrap();
        String::from_utf8(text).unwrap()
    };
    tokio::time::timeout(LIMIT, heard).await.unwrap()
}

/// A program of version 1 refuses what it does not know.
#[tokio::test]
async fn a_host_that_is_older_than_rates_gets_a_list_without_them() {
    let folder = tempfile::tempdir().unwrap();
    let server = plain(folder.path());
    let mut a = join(&server, "host-a").await.unwrap();
    a.report(vec![stream("x")]).await.unwrap();
    assert_eq!(a.list().await.unwrap()[0].device, stream("x"));
    let mut old = TcpStream::connect(server.address()).await.unwrap();
    say(&mut old, r#"{"say":"hello","version":1,"host":"host-b","daemon":"d"}"#).await;
    assert_eq!(hear(&mut old).await, r#"{"say":"welcome","version":1,"host":"host-b"}"#);
    say(&mut old, r#"{"say":"list"}"#).await;
    let list = hear(&mut old).await;
    assert!(list.contains("\"name\":\"x\"") && !list.contains("rates"), "{list}");
    // One that is newer is answered with what both speak, and may say more.
    let mut newer = TcpStream::connect(server.address()).await.unwrap();
    say(&mut newer, r#"{"say":"hello","version":7,"host":"host-c","daemon":"d","more":[1]}"#).await;
    assert_eq!(hear(&mut newer).await, r#"{"say":"welcome","version":2,"host":"host-c"}"#);
    let device = r#"{"name":"z","kind":"k","size":null,"location":"l","read_only":true,"users":0,"holder":null,"trouble":null,"rates":[{"unit":"u","capacity":2,"reserved":1,"burst":3}],"colour":"red"}"#;
    say(&mut newer, &format!(r#"{{"say":"report","devices":[{device}],"more":{{}}}}"#)).await;
    assert_eq!(hear(&mut newer).await, r#"{"say":"reported","taken":[]}"#);
    assert_eq!(a.list().await.unwrap()[1].device.rates[0].capacity, 2);
}

/// A directory that refuses any version but 1 and any rate.
#[tokio::test]
async fn a_directory_that_is_older_than_rates_is_told_of_none() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = at(listener.local_addr().unwrap());
    let directory = tokio::spawn(async move {
        let (mut peer, _) = listener.accept().await.unwrap();
        assert!(hear(&mut peer).await.contains("\"version\":2"));
        say(&mut peer, r#"{"say":"refused","why":"the peer speaks version 2"}"#).await;
        let (mut peer, _) = listener.accept().await.unwrap();
        assert!(hear(&mut peer).await.contains("\"version\":1"));
        say(&mut peer, r#"{"say":"welcome","version":1,"host":"host-a"}"#).await;
        let report = hear(&mut peer).await;
        say(&mut peer, r#"{"say":"reported","taken":[]}"#).await;
        report
    });
    let security = Security::Plain { host: "host-a".to_owned() };
    let mut session = DirectorySession::connect(&address, &security, "d").await.unwrap();
    session.report(vec![stream("x")]).await.unwrap();
    let report = directory.await.unwrap();
    assert!(report.contains("\"name\":\"x\"") && !report.contains("rates"), "{report}");
}

/// Later programs may say more.
#[tokio::test]
async fn what_a_newer_directory_says_besides_is_passed_over() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = at(listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut peer, _) = listener.accept().await.unwrap();
        hear(&mut peer).await;
        say(&mut peer, r#"{"say":"welcome","version":2,"host":"host-a","since":5}"#).await;
        hear(&mut peer).await;
        let device = r#"{"name":"x","kind":"k","size":null,"location":"l","read_only":true,"users":0,"holder":null,"trouble":null,"rates":[{"unit":"u","capacity":2,"reserved":1,"burst":3}],"colour":"red"}"#;
        let entry = format!(r#"{{"host":"host-b","seen":"now","device":{device},"rack":7}}"#);
        say(&mut peer, &format!(r#"{{"say":"listed","entries":[{entry}],"more":false,"total":1}}"#)).await;
    });
    let security = Security::Plain { host: "host-a".to_owned() };
    let mut session = DirectorySession::connect(&address, &security, "d").await.unwrap();
    let found = session.list().await.unwrap();
    assert_eq!((found[0].device.name.as_str(), found[0].device.rates[0].reserved), ("x", 1));
}

#[tokio::test]
async fn with_tls_a_host_is_who_its_certificate_says() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, stranger] = identities(folder.path());
    let security = ServerSecurity::Tls(a);
    let server = DirectoryServer::start(listener(), &folder.path().join("d.redb"), security).unwrap();
    let address = DirectoryAddress { tls_hostname: Some("host-a".to_owned()), ..at(server.address()) };
    let mut session = DirectorySession::connect(&address, &Security::Tls(b.clone()), "d").await.unwrap();
    assert_eq!(session.host(), "host-b");
    session.report(vec![stream("x")]).await.unwrap();
    assert_eq!(listed(&mut session).await, [pair("x", "host-b")]);
    // Another authority, another host, plain text, plain text expected.
    let strange = DirectorySession::connect(&address, &Security::Tls(stranger), "d").await;
    assert!(matches!(strange, Err(NetbusError::Tls(_))), "{strange:?}");
    let wrong = DirectoryAddress { tls_hostname: Some("host-c".to_owned()), ..address.clone() };
    let wrong = DirectorySession::connect(&wrong, &Security::Tls(b.clone()), "d").await;
    assert!(matches!(wrong, Err(NetbusError::Tls(_))), "{wrong:?}");
    let plain_text = Security::Plain { host: "host-b".to_owned() };
    DirectorySession::connect(&address, &plain_text, "d").await.unwrap_err();
    assert_eq!(listed(&mut session).await, [pair("x", "host-b")]);
}
