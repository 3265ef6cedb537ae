//! What tests of both kinds of directories need.

use std::path::Path;
use std::time::Duration;

use ioplane_identity::{HostName, IdentityDirectory, Validity};
use ioplane_netbus::{DeviceRate, DeviceRecord, DirectorySession, HostPresence, Taken};

/// For what takes milliseconds on a machine that has time.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A byte stream: what the directory has never heard of.
pub fn stream(name: &str) -> DeviceRecord {
    DeviceRecord {
        name: name.to_owned(),
        kind: "byte-stream".to_owned(),
        size: None,
        location: format!("tcp://10.0.0.1:7/{name}"),
        read_only: false,
        users: 2,
        holder: None,
        trouble: None,
        rates: vec![DeviceRate { unit: "packets".to_owned(), capacity: 100, reserved: 40 }],
    }
}

/// Names with their hosts.
pub async fn listed(session: &mut DirectorySession) -> Vec<(String, String)> {
    session.list().await.unwrap().into_iter().map(|entry| (entry.device.name, entry.host)).collect()
}

pub fn pair(name: &str, host: &str) -> (String, String) {
    (name.to_owned(), host.to_owned())
}

/// Two hosts, of which one wants what the other one has.
pub async fn names_are_one_hosts(mut a: DirectorySession, mut b: DirectorySession) {
    assert_eq!(a.report(vec![stream("x"), stream("y")]).await.unwrap(), []);
    let taken = b.report(vec![stream("x"), stream("z")]).await.unwrap();
    assert_eq!(taken, [Taken { name: "x".to_owned(), by: "host-a".to_owned() }]);
    let entries = b.list().await.unwrap();
    assert_eq!(entries[0].device, stream("x"));
    assert!(entries.iter().all(|entry| entry.seen == HostPresence::Now));
    assert_eq!(listed(&mut b).await, [pair("x", "host-a"), pair("y", "host-a"), pair("z", "host-b")]);
    // What is reported no more is free.
    a.report(vec![stream("y")]).await.unwrap();
    assert_eq!(b.report(vec![stream("x")]).await.unwrap(), []);
    assert_eq!(listed(&mut a).await, [pair("x", "host-b"), pair("y", "host-a")]);
}

/// Identities of two hosts of one authority, and of one host of another.
pub fn identities(folder: &Path) -> [IdentityDirectory; 3] {
    let host = |name: &str| IdentityDirectory::new(folder.join(name));
    let name = |text: &str| text.parse::<HostName>().unwrap();
    let (a, b, stranger) = (host("a"), host("b"), host("stranger"));
    a.create(&name("host-a"), Validity::days(1)).unwrap();
    a.issue(&name("host-b"), Validity::days(1), &folder.join("b.pem")).unwrap();
    b.import(&folder.join("b.pem"), false).unwrap();
    stranger.create(&name("host-b"), Validity::days(1)).unwrap();
    [a, b, stranger]
}
