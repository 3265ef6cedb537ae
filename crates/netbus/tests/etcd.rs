//! Hosts and a directory in etcd: real members on loopback, which are killed, stand still, and hold what others wrote.

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ioplane_netbus::{
    DeviceRecord, DirectorySession, EtcdEndpoint, Forgotten, HostPresence, NetbusError, Security, Taken,
};
use ioplane_testkit::etcd::EtcdCluster;
use support::{LIMIT, identities, listed, names_are_one_hosts, pair, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;

/// For a call that is not to go on for ever: all members are tried, each for 3 s, or one has 8 s to answer.
const BOUND: Duration = Duration::from_secs(60);

fn members(etcd: &EtcdCluster) -> Vec<EtcdEndpoint> {
    etcd.urls().iter().map(|url| url.parse().unwrap()).collect()
}

async fn try_join(etcd: &EtcdCluster, host: &str, daemon: &str) -> Result<DirectorySession, NetbusError> {
    let security = Security::Plain { host: host.to_owned() };
    DirectorySession::connect_etcd(&members(etcd), &security, daemon).await
}

/// Tries again what others on this machine may make too slow, and what members do not do while they elect a leader.
async fn until<T>(mut tried: impl AsyncFnMut() -> Option<T>) -> T {
    let all = async {
        loop {
            match tried().await {
                Some(done) => return done,
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    tokio::time::timeout(LIMIT, all).await.expect("it does not come to that")
}

async fn join(etcd: &EtcdCluster, host: &str) -> DirectorySession {
    until(async || try_join(etcd, host, "daemon").await.ok()).await
}

/// A session of a host that has reported, and which names are others'.
async fn reported(
    etcd: &EtcdCluster,
    host: &str,
    devices: &[DeviceRecord],
) -> (DirectorySession, Vec<Taken>) {
    let report = async || {
        let mut session = try_join(etcd, host, "daemon").await.ok()?;
        let taken = session.report(devices.to_vec()).await.ok()?;
        Some((session, taken))
    };
    until(report).await
}

/// Names with their hosts, as a host sees them that publishes nothing.
async fn seen(etcd: &EtcdCluster) -> Vec<(String, String)> {
    let list = async || {
        let entries = try_join(etcd, "host-s", "daemon").await.ok()?.list().await.ok()?;
        Some(entries.into_iter().map(|entry| (entry.device.name, entry.host)).collect())
    };
    until(list).await
}

/// A session with the first member, if that answers.
async fn first_of(etcd: &EtcdCluster, host: &str) -> Option<DirectorySession> {
    let security = Security::Plain { host: host.to_owned() };
    DirectorySession::connect_etcd(&members(etcd)[..1], &security, "daemon").await.ok()
}

fn start(folder: &Path, members: usize) -> Option<EtcdCluster> {
    EtcdCluster::start(folder, members)
}

#[tokio::test]
async fn what_one_host_publishes_another_finds_and_cannot_publish() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = start(folder.path(), 1) else { return };
    let (a, b) = (join(&etcd, "host-a").await, join(&etcd, "host-b").await);
    assert_eq!((a.host(), a.local().to_string().as_str()), ("host-a", "127.0.0.1"));
    names_are_one_hosts(a, b).await;
}

#[tokio::test]
async fn a_name_that_hosts_race_for_is_exactly_ones() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = start(folder.path(), 1) else { return };
    let names: Vec<String> = (0..150).map(|n| format!("d{n:03}")).collect();
    let race = async |host: &'static str| {
        let mut session = join(&etcd, host).await;
        let mut got = Vec::new();
        // One more each time, so that both are at it for a while.
        for count in 1..=names.len() {
            let devices = names[..count].iter().map(|name| stream(name)).collect();
            let taken = session.report(devices).await.unwrap();
            let is_taken = |name: &String| taken.iter().any(|one| one.name == *name);
            got = names[..count].iter().filter(|name| !is_taken(name)).map(|name| pair(name, host)).collect();
        }
        got
    };
    let (a, b) = tokio::join!(race("host-a"), race("host-b"));
    assert_eq!(a.len() + b.len(), names.len(), "{} and {}", a.len(), b.len());
    let mut all = [a, b].concat();
    all.sort();
    assert_eq!(listed(&mut join(&etcd, "host-c").await).await, all);
}

#[tokio::test]
async fn a_lease_that_ends_gives_a_name_to_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = start(folder.path(), 1) else { return };
    let mut b = join(&etcd, "host-b").await;
    {
        let mut a = join(&etcd, "host-a").await;
        a.report(vec![stream("x"), stream("y")]).await.unwrap();
        assert_eq!(b.list().await.unwrap()[0].device.users, 2);
        assert_eq!(b.forget("x").await.unwrap(), Forgotten::Present("host-a".to_owned()));
    }
    let gone = until(async || {
        b.report(vec![]).await.unwrap();
        let entry = b.list().await.unwrap().into_iter().next().unwrap();
        (entry.seen == HostPresence::Gone).then_some(entry)
    });
    let gone = gone.await;
    assert_eq!((gone.host.as_str(), gone.device.users, gone.device.rates.len()), ("host-a", 0, 0));
    let taken = b.report(vec![stream("x")]).await.unwrap();
    assert_eq!(taken, [Taken { name: "x".to_owned(), by: "host-a".to_owned() }]);
    // Back, as whoever it was.
    let mut a = join(&etcd, "host-a").await;
    a.report(vec![stream("x"), stream("y")]).await.unwrap();
    assert_eq!(b.list().await.unwrap()[0].seen, HostPresence::Now);
    // Away for good, and said so.
    a.leave().await.unwrap();
    assert_eq!(b.list().await.unwrap()[1].seen, HostPresence::Gone);
    assert_eq!(b.forget("x").await.unwrap(), Forgotten::Done);
    assert_eq!(b.forget("x").await.unwrap(), Forgotten::Unknown);
    assert_eq!(b.forget("../x").await.unwrap(), Forgotten::Unknown);
    assert_eq!(b.report(vec![stream("x")]).await.unwrap(), []);
    // The host that comes back is told whose its name is now, and has what nobody took.
    let mut a = join(&etcd, "host-a").await;
    let taken = a.report(vec![stream("x"), stream("y")]).await.unwrap();
    assert_eq!(taken, [Taken { name: "x".to_owned(), by: "host-b".to_owned() }]);
    assert_eq!(listed(&mut a).await, [pair("x", "host-b"), pair("y", "host-a")]);
}

#[tokio::test]
async fn a_restarted_daemon_replaces_its_session_and_another_daemon_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = start(folder.path(), 1) else { return };
    let mut old = join(&etcd, "host-a").await;
    old.report(vec![stream("x"), stream("y")]).await.unwrap();
    let refused = try_join(&etcd, "host-a", "second").await.unwrap_err();
    assert!(matches!(refused, NetbusError::Busy(_)), "{refused}");
    let mut new = join(&etcd, "host-a").await;
    // What it published before and leaves out now is free, although this session never said it.
    new.report(vec![stream("x")]).await.unwrap();
    let lost = old.report(vec![stream("z")]).await.unwrap_err();
    assert!(matches!(lost, NetbusError::Lost), "{lost}");
    assert_eq!(listed(&mut new).await, [pair("x", "host-a")]);
    assert_eq!(new.list().await.unwrap()[0].device, stream("x"));
    for host in ["", "../x", "a b"] {
        assert!(matches!(try_join(&etcd, host, "daemon").await, Err(NetbusError::Host(_))), "{host:?}");
    }
    let bad = new.report(vec![stream("a/b")]).await.unwrap_err();
    assert!(matches!(bad, NetbusError::Device(_)), "{bad}");
}

/// Between a host and a member: holds the transaction that is so many `ahead`, says so, and lets it go on when it is told.
#[derive(Default)]
struct Stall {
    ahead: AtomicUsize,
    held: Notify,
    go_on: Notify,
}

/// Where `member` is reached by way of a stall.
async fn stalled(member: &str, stall: Arc<Stall>) -> EtcdEndpoint {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let member = member.strip_prefix("http://").unwrap().to_owned();
    tokio::spawn(async move {
        let (host, _) = listener.accept().await.unwrap();
        let (mut from, mut back) = host.into_split();
        let (mut answers, mut to) = tokio::net::TcpStream::connect(member).await.unwrap().into_split();
        tokio::spawn(async move { tokio::io::copy(&mut answers, &mut back).await });
        let mut part = vec![0; 1 << 20];
        while let Ok(read @ 1..) = from.read(&mut part).await {
            let transaction = part[..read].starts_with(b"POST /v3/kv/txn ");
            if transaction && stall.ahead.load(Relaxed) > 0 && stall.ahead.fetch_sub(1, Relaxed) == 1 {
                stall.held.notify_one();
                stall.go_on.notified().await;
            }
            to.write_all(&part[..read]).await.unwrap();
        }
    });
    endpoint
}

#[tokio::test]
async fn a_session_that_stood_still_writes_nothing_more() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = start(folder.path(), 1) else { return };
    // The transactions of a report: read this host's names, change them, say how the devices are.
    for ahead in 1..=3 {
        let stall = Arc::new(Stall::default());
        let security = Security::Plain { host: "host-a".to_owned() };
        let by_way = async || {
            let member = [stalled(&etcd.urls()[0], stall.clone()).await];
            DirectorySession::connect_etcd(&member, &security, "daemon").await.ok()
        };
        let mut old = until(by_way).await;
        stall.ahead.store(ahead, Relaxed);
        let name = format!("old-{ahead}");
        let late = old.report(vec![stream("x"), stream(&name)]);
        let replace = async {
            stall.held.notified().await;
            let (new, taken) = reported(&etcd, "host-a", &[stream("x")]).await;
            assert_eq!(taken, []);
            stall.go_on.notify_one();
            new
        };
        let (late, _new) = tokio::join!(late, replace);
        let late = late.unwrap_err();
        assert!(matches!(late, NetbusError::Lost | NetbusError::Etcd { .. }), "{ahead}: {late}");
        // What it had written before it stood still the new session has found, and withdrawn.
        assert_eq!(seen(&etcd).await, [pair("x", "host-a")], "{ahead}");
    }
}

#[tokio::test]
async fn many_devices_come_in_parts() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = start(folder.path(), 1) else { return };
    let devices = |host: &str| (0..1000).map(|n| stream(&format!("{host}-{n:04}"))).collect::<Vec<_>>();
    for host in ["host-a", "host-b"] {
        let mut session = join(&etcd, host).await;
        assert_eq!(session.report(devices(host)).await.unwrap(), []);
        assert_eq!(session.report(devices(host)).await.unwrap(), [], "nothing new is to be written");
    }
    let mut session = join(&etcd, "host-c").await;
    let entries = session.list().await.unwrap();
    let found: Vec<_> = entries.into_iter().map(|entry| entry.device).collect();
    assert_eq!(found, [devices("host-a"), devices("host-b")].concat());
    // A name that somebody has removed by hand is its host's again with the next report.
    etcd.delete("ioplane/v1/names/host-a-0500");
    let mut a = join(&etcd, "host-a").await;
    a.report(devices("host-a")).await.unwrap();
    etcd.delete("ioplane/v1/names/host-a-0501");
    a.report(devices("host-a")).await.unwrap();
    assert_eq!(session.list().await.unwrap().len(), 2000);
}

#[tokio::test]
async fn one_member_of_three_is_missed_by_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut etcd) = start(folder.path(), 3) else { return };
    let mut a = until(async || first_of(&etcd, "host-a").await).await;
    // The one that it speaks with.
    etcd.kill(0);
    let lost = a.report(vec![stream("x")]).await.unwrap_err();
    assert!(matches!(lost, NetbusError::Closed | NetbusError::Os { .. }), "{lost}");
    let (_a, taken) = reported(&etcd, "host-a", &[stream("x"), stream("y")]).await;
    assert_eq!(taken, []);
    let (_b, taken) = reported(&etcd, "host-b", &[stream("x")]).await;
    assert_eq!(taken.len(), 1);
    let all = [pair("x", "host-a"), pair("y", "host-a")];
    assert_eq!(seen(&etcd).await, all);
    etcd.start_again(0);
    // With another one away the one that has come back is needed.
    drop(until(async || first_of(&etcd, "host-c").await).await);
    etcd.kill(1);
    assert_eq!(seen(&etcd).await, all);
}

#[tokio::test]
async fn a_minority_grants_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = start(folder.path(), 3) else { return };
    let (mut a, _) = reported(&etcd, "host-a", &[stream("x")]).await;
    let mut b = join(&etcd, "host-b").await;
    etcd.stop(1);
    etcd.stop(2);
    // The member that is there has lost the others: it reads and writes nothing.
    let begun = Instant::now();
    let none = [
        a.report(vec![stream("x"), stream("y")]).await.unwrap_err(),
        b.list().await.unwrap_err(),
        try_join(&etcd, "host-c", "daemon").await.unwrap_err(),
    ];
    assert!(begun.elapsed() < BOUND, "{:?}", begun.elapsed());
    assert!(matches!(none[2], NetbusError::NoMember(_)), "{:?}", none[2]);
    for error in none {
        let named =
            matches!(error, NetbusError::Slow(_) | NetbusError::Etcd { .. } | NetbusError::NoMember(_));
        assert!(named, "{error:?}");
    }
    etcd.go_on(1);
    etcd.go_on(2);
    // What came of the report that failed is either: its host says it again.
    assert!(seen(&etcd).await.iter().all(|(_, host)| host == "host-a"));
    let (_a, taken) = reported(&etcd, "host-a", &[stream("x"), stream("y")]).await;
    assert_eq!(taken, []);
    let (_b, taken) = reported(&etcd, "host-b", &[stream("y")]).await;
    assert_eq!(taken, [Taken { name: "y".to_owned(), by: "host-a".to_owned() }]);
    assert_eq!(seen(&etcd).await, [pair("x", "host-a"), pair("y", "host-a")]);
}

#[tokio::test]
async fn what_others_wrote_into_etcd_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = start(folder.path(), 1) else { return };
    let mut a = join(&etcd, "host-a").await;
    a.report(vec![stream("x")]).await.unwrap();
    let huge = vec![b'x'; 1 << 20];
    for (key, value) in [
        ("ioplane/v1/names/y", &b"no JSON"[..]),
        ("ioplane/v1/names/../y", b"{}"),
        ("ioplane/v1/names/", b"{\"version\":1}"),
        ("ioplane/v1/names/y\u{1b}[2J", b"\xff\xfe"),
        ("ioplane/v1/names/y", &huge),
        ("ioplane/v1/states/host-a/x", b"[]"),
        ("ioplane/v1/states/x", b"7"),
        ("ioplane/v1/hosts/host-b", b"\0"),
    ] {
        etcd.put(key, value);
        let error = a.list().await.unwrap_err();
        let shown = error.to_string();
        assert!(matches!(error, NetbusError::EtcdValue { .. }), "{key}: {shown}");
        assert!(shown.contains("ioplane/v1/") && !shown.chars().any(char::is_control), "{shown}");
        let joined = try_join(&etcd, "host-b", "daemon").await;
        assert_eq!(joined.is_ok(), key.contains("states"), "{key}: {joined:?}");
        etcd.delete(key);
    }
    // More than an answer may be long.
    for at in 0..3 {
        etcd.put(&format!("ioplane/v1/names/z{at}"), &huge);
    }
    let long = a.list().await.unwrap_err();
    assert!(
        matches!(long, NetbusError::Etcd { .. }) && long.to_string().contains("an answer of more"),
        "{long}"
    );
    (0..3).for_each(|at| etcd.delete(&format!("ioplane/v1/names/z{at}")));
    // A host whose place was taken away by hand comes back.
    let mut a = join(&etcd, "host-a").await;
    etcd.delete("ioplane/v1/hosts/host-a");
    let lost = a.report(vec![stream("x")]).await.unwrap_err();
    assert!(matches!(lost, NetbusError::Lost), "{lost}");
    let mut a = join(&etcd, "host-a").await;
    a.report(vec![stream("x")]).await.unwrap();
    assert_eq!(listed(&mut a).await, [pair("x", "host-a")]);
}

#[tokio::test]
async fn with_tls_both_sides_show_certificates_of_one_authority() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, stranger] = identities(folder.path());
    let files = folder.path().join("files");
    a.export(&files).unwrap();
    let more = [format!("--tls={}", files.display())];
    let Some(etcd) = EtcdCluster::start_with(folder.path(), 1, &more) else { return };
    let endpoint = |query: &str| [format!("{}{query}", etcd.tls_url(0)).parse().unwrap()];
    let named = endpoint("?tls-hostname=host-a");
    let connect = async |members: &[EtcdEndpoint], identity| {
        DirectorySession::connect_etcd(members, &Security::Tls(identity), "d").await
    };
    let mut session = connect(&named, b.clone()).await.unwrap();
    assert_eq!(session.host(), "host-b");
    session.report(vec![stream("x")]).await.unwrap();
    assert_eq!(listed(&mut session).await, [pair("x", "host-b")]);
    // Another name, another authority, plain text where there is TLS, and the other way round.
    let wrong = connect(&endpoint("?tls-hostname=host-c"), b.clone()).await.unwrap_err();
    assert!(matches!(wrong, NetbusError::NoMember(_)), "{wrong}");
    let strange = connect(&named, stranger).await.unwrap_err();
    assert!(matches!(strange, NetbusError::NoMember(_)), "{strange}");
    let plain = Security::Plain { host: "host-b".to_owned() };
    let plain = DirectorySession::connect_etcd(&named, &plain, "d").await.unwrap_err();
    assert!(matches!(plain, NetbusError::Scheme(_)), "{plain}");
    let http = connect(&members(&etcd), b).await.unwrap_err();
    assert!(matches!(http, NetbusError::Scheme(_)), "{http}");
}

#[tokio::test]
async fn something_else_than_etcd_is_named() {
    for answer in [
        "",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        "220 smtp\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<p/>\n",
    ] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let members = [format!("http://{}", listener.local_addr().unwrap()).parse().unwrap()];
        let serve = tokio::spawn(async move {
            loop {
                let (mut peer, _) = listener.accept().await.unwrap();
                let mut request = [0; 4096];
                while peer.read(&mut request).await.is_ok_and(|read| read > 0) {
                    peer.write_all(answer.as_bytes()).await.unwrap();
                    if !answer.starts_with("HTTP") {
                        break;
                    }
                }
            }
        });
        let security = Security::Plain { host: "host-a".to_owned() };
        let error = tokio::time::timeout(BOUND, DirectorySession::connect_etcd(&members, &security, "d"));
        let error = error.await.unwrap().unwrap_err();
        assert!(matches!(error, NetbusError::NoMember(_) | NetbusError::Etcd { .. }), "{answer:?}: {error}");
        serve.abort();
    }
}
