//! Directories of identities, and what two of them make of each other over TLS.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use ioplane_identity::{HostIdentity, IdentityDirectory, IdentityError, TlsFault, Validity};
use rustls::ClientConfig;
use rustls::pki_types::UnixTime;
use support::{authority, both, folder, issued, name, shake};
use time::OffsetDateTime;

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// The identity of a host whose certificate is valid at another time, as it was then.
fn of_another_time(authority: &IdentityDirectory, folder: &Path, days: i64) -> HostIdentity {
    let middle = OffsetDateTime::now_utc() + time::Duration::days(days);
    let half = time::Duration::hours(1);
    let (file, directory) = (folder.join(format!("{days}.pem")), folder.join(days.to_string()));
    let validity = Validity { from: middle - half, until: middle + half };
    authority.issue(&name("host-b"), validity, &file).unwrap();
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::rename(file, directory.join("host.pem")).unwrap();
    let then = UnixTime::since_unix_epoch(Duration::from_secs(middle.unix_timestamp() as u64));
    IdentityDirectory::new(directory).load_at(then).unwrap()
}

#[test]
fn an_authority_issues_and_both_hosts_trust_each_other() {
    let folder = folder();
    let a = authority(folder.path());
    let b = issued(&a, folder.path(), "host-b");
    for file in ["a", "a/host.pem", "a/authority.pem", "host-b", "host-b/host.pem"] {
        let wanted = if file.ends_with("pem") { 0o600 } else { 0o700 };
        assert_eq!(mode(&folder.path().join(file)), wanted, "{file}");
    }
    let (shown_a, shown_b) = (a.show().unwrap(), b.show().unwrap());
    assert_eq!((shown_a.host.name.as_str(), shown_b.host.name.as_str()), ("host-a", "host-b"));
    assert_eq!(shown_a.authority, shown_b.authority);
    assert!(shown_a.issues && !shown_b.issues && shown_a.problem.is_none());
    let serials = [&shown_a.host.serial, &shown_b.host.serial, &shown_a.authority.serial];
    assert!(serials.iter().all(|serial| serial.len() == 32));
    assert!(serials[0] != serials[1] && serials[1] != serials[2] && serials[0] != serials[2]);
    let (a, b) = (a.load().unwrap(), b.load().unwrap());
    assert_eq!(both(&b, &a, "host-a"), (None, None));
    assert_eq!(both(&a, &b, "host-b"), (None, None));
}

#[test]
fn each_wrong_certificate_has_a_name_on_the_side_that_sees_it() {
    let (folder, other) = (folder(), folder());
    let directory = authority(folder.path());
    let (a, foreign) = (directory.load().unwrap(), authority(other.path()).load().unwrap());
    let old = of_another_time(&directory, folder.path(), -10);
    let young = of_another_time(&directory, folder.path(), 10);
    let old_or_young = TlsFault::Refused("it has expired or is not yet valid");
    let unknown = TlsFault::Refused("it is of another authority than the peer's");
    // At a server: the client hears of it in an alert.
    assert_eq!(both(&old, &a, "host-a"), (Some(old_or_young.clone()), Some(TlsFault::Expired)));
    assert_eq!(both(&young, &a, "host-a"), (Some(old_or_young.clone()), Some(TlsFault::NotYetValid)));
    // Both see another authority; the client does so first.
    assert_eq!(both(&foreign, &a, "host-a"), (Some(TlsFault::WrongAuthority), Some(unknown)));
    // At a client.
    assert_eq!(both(&a, &old, "host-b"), (Some(TlsFault::Expired), Some(old_or_young.clone())));
    assert_eq!(both(&a, &young, "host-b"), (Some(TlsFault::NotYetValid), Some(old_or_young)));
    let (client, server) = both(&a, &a, "host-c");
    let TlsFault::WrongHost(which) = client.unwrap() else { panic!("another host is not told") };
    assert!(which.contains("host-c was asked for") && which.contains("host-a"), "{which}");
    assert_eq!(server, Some(TlsFault::Refused("it is for another host, or malformed")));
}

/// A client that trusts the authority and shows no certificate, or one that trusts anybody and shows a foreign one.
#[test]
fn a_server_wants_a_certificate_of_its_authority() {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;
    let folder = folder();
    let directory = authority(folder.path());
    let text = std::fs::read_to_string(folder.path().join("a/host.pem")).unwrap();
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(text.as_bytes()).map(Result::unwrap).collect();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificates[1].clone()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let client =
        ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]);
    let client = client.unwrap().with_root_certificates(roots).with_no_client_auth();
    let server = directory.load().unwrap().server();
    let (client, server) = shake(std::sync::Arc::new(client), server, "host-a");
    assert_eq!(server, Some(TlsFault::Missing));
    assert_eq!(client, Some(TlsFault::Refused("it has shown none")));
}

#[test]
fn renewing_makes_another_certificate_of_the_same_host() {
    let folder = folder();
    let a = authority(folder.path());
    let b = issued(&a, folder.path(), "host-b");
    let before = a.show().unwrap();
    assert_eq!(a.renew(Validity::days(30)).unwrap(), name("host-a"));
    let after = a.show().unwrap();
    assert_eq!((&before.host.name, &before.authority), (&after.host.name, &after.authority));
    assert!(before.host.serial != after.host.serial && before.host.fingerprint != after.host.fingerprint);
    assert_eq!(both(&b.load().unwrap(), &a.load().unwrap(), "host-a"), (None, None));
    // Where the authority is not, it is issued again.
    assert!(matches!(b.renew(Validity::default()), Err(IdentityError::Missing { what: "authority", .. })));
    let again = folder.path().join("again.pem");
    a.issue(&name("host-b"), Validity::default(), &again).unwrap();
    b.import(&again, false).unwrap();
    assert_eq!(both(&a.load().unwrap(), &b.load().unwrap(), "host-b"), (None, None));
}

#[test]
fn what_is_wrong_with_files_is_named() {
    let (folder, other) = (folder(), folder());
    let a = authority(folder.path());
    let host = folder.path().join("a/host.pem");
    let good = std::fs::read_to_string(&host).unwrap();
    let write = |text: &str| std::fs::write(&host, text).unwrap();
    let permit = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();

    let again = a.create(&name("host-a"), Validity::default());
    assert!(matches!(again, Err(IdentityError::Exists { .. })), "{again:?}");
    let nowhere = IdentityDirectory::new(folder.path().join("nowhere"));
    assert!(matches!(nowhere.load(), Err(IdentityError::Missing { what: "identity", .. })));
    for open in [0o640, 0o604] {
        permit(&host, open);
        assert!(matches!(a.load(), Err(IdentityError::Permissions { .. })), "{open:o}");
    }
    permit(&host, 0o600);
    permit(a.path(), 0o755);
    assert!(matches!(a.load(), Err(IdentityError::Permissions { .. })));
    permit(a.path(), 0o700);

    let certificate = good.split_inclusive("-----END CERTIFICATE-----\n").next().unwrap();
    let foreign = authority(other.path());
    let foreign_text = std::fs::read_to_string(other.path().join("a/host.pem")).unwrap();
    let parts = |text: &str| -> Vec<String> {
        text.split_inclusive("-----END CERTIFICATE-----\n").map(str::to_owned).collect()
    };
    let (ours, theirs) = (parts(&good), parts(&foreign_text));
    for text in
        ["", "x", certificate, &good.replace("PRIVATE", "PUBLIC"), &good.repeat(2), &"x".repeat(100_000)]
    {
        write(text);
        assert!(matches!(a.load(), Err(IdentityError::Malformed { .. })), "{text:.80}");
    }
    write(&(ours[0].clone() + &ours[1] + &theirs[2]));
    assert!(matches!(a.load(), Err(IdentityError::Malformed { .. })), "the key is another one's");
    write(&(ours[0].clone() + &theirs[1] + &ours[2]));
    assert!(matches!(a.load(), Err(IdentityError::WrongAuthority { .. })));
    std::fs::remove_file(&host).unwrap();
    std::fs::create_dir(&host).unwrap();
    permit(&host, 0o700);
    assert!(matches!(a.load(), Err(IdentityError::Unreadable { .. })));
    std::fs::remove_dir(&host).unwrap();
    write(&good);
    permit(&host, 0o600);
    a.load().unwrap();

    // An identity of somebody else does not take the place of this one by mistake.
    let (file, strange) = (folder.path().join("b.pem"), other.path().join("a.pem"));
    a.issue(&name("host-b"), Validity::default(), &file).unwrap();
    foreign.issue(&name("host-a"), Validity::default(), &strange).unwrap();
    assert!(matches!(a.import(&file, false), Err(IdentityError::WrongHost { .. })));
    assert!(matches!(a.import(&strange, false), Err(IdentityError::WrongAuthority { .. })));
    assert_eq!(a.show().unwrap().host.name, "host-a");
    assert!(matches!(
        a.issue(&name("host-b"), Validity::default(), &file),
        Err(IdentityError::Exists { .. })
    ));
    a.import(&strange, true).unwrap();
    // The authority that is here is not that of the identity any more.
    assert!(matches!(a.renew(Validity::default()), Err(IdentityError::WrongAuthority { .. })));
}

#[test]
fn an_identity_of_another_time_is_not_used() {
    let folder = folder();
    let a = authority(folder.path());
    for (days, expired) in [(-10, true), (10, false)] {
        of_another_time(&a, folder.path(), days);
        let directory = IdentityDirectory::new(folder.path().join(days.to_string()));
        match directory.load() {
            Err(IdentityError::Expired { .. }) if expired => {}
            Err(IdentityError::NotYetValid { .. }) if !expired => {}
            other => panic!("{days}: {other:?}"),
        }
        assert!(directory.show().unwrap().problem.is_some());
        let file = folder.path().join(days.to_string()).join("host.pem");
        assert!(IdentityDirectory::new(folder.path().join("new")).import(&file, false).is_err());
        assert!(!folder.path().join("new/host.pem").exists());
    }
}

#[test]
fn a_crash_between_authority_and_host_is_gone_on_with() {
    let folder = folder();
    let a = authority(folder.path());
    let before = a.show().unwrap();
    std::fs::remove_file(folder.path().join("a/host.pem")).unwrap();
    a.create(&name("host-a"), Validity::default()).unwrap();
    assert_eq!(a.show().unwrap().authority, before.authority);
    // What a process has left that was killed while it wrote is in nobody's way.
    let left = format!("a/host.pem.{}.new", std::process::id());
    std::fs::write(folder.path().join(left), "half").unwrap();
    a.renew(Validity::default()).unwrap();
    let there: Vec<_> =
        std::fs::read_dir(folder.path().join("a")).unwrap().map(|one| one.unwrap().file_name()).collect();
    assert!(there.iter().all(|name| !name.to_string_lossy().ends_with(".new")), "{there:?}");
}

#[test]
fn copies_for_gnutls_are_those_of_the_identity() {
    let folder = folder();
    let a = authority(folder.path());
    let to = folder.path().join("pki");
    a.export(&to).unwrap();
    let read = |file: &str| std::fs::read_to_string(to.join(file)).unwrap();
    let whole = read("server-cert.pem") + &read("ca-cert.pem") + &read("server-key.pem");
    assert_eq!(whole, std::fs::read_to_string(folder.path().join("a/host.pem")).unwrap());
    assert_eq!(
        (read("client-cert.pem"), read("client-key.pem")),
        (read("server-cert.pem"), read("server-key.pem"))
    );
    assert_eq!(mode(&to.join("client-key.pem")), 0o600);
}

/// Whatever becomes of a file: an error, or the identity that it was. Nothing panics.
#[test]
fn damaged_files_are_refused() {
    use proptest::prelude::*;
    let folder = folder();
    let a = authority(folder.path());
    let path = folder.path().join("a/host.pem");
    let good = std::fs::read(&path).unwrap();
    let change = (0..good.len(), any::<u8>(), 0..4u8);
    proptest!(ProptestConfig::with_cases(300), |(changes in prop::collection::vec(change, 1..4))| {
        let mut bytes = good.clone();
        for (at, value, how) in changes {
            let at = at.min(bytes.len().saturating_sub(1));
            match how {
                0 => bytes.truncate(at + 1),
                1 => drop(bytes.remove(at)),
                2 => bytes.insert(at, value),
                _ => bytes[at] = value,
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(identity) = a.load() {
            prop_assert_eq!(identity.name().as_str(), "host-a");
        }
        let _ = (a.show(), a.export(&folder.path().join("out")));
    });
}

/// The same of a certificate alone, as a peer may show one.
#[test]
fn damaged_certificates_are_refused() {
    use proptest::prelude::*;
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;
    let folder = folder();
    authority(folder.path());
    let good = CertificateDer::from_pem_file(folder.path().join("a/host.pem")).unwrap();
    proptest!(|(at in 0..good.len(), value in any::<u8>(), cut in any::<bool>())| {
        let mut bytes = good.to_vec();
        bytes[at] = value;
        if cut {
            bytes.truncate(at);
        }
        if let Ok(facts) = ioplane_identity::CertificateFacts::of(&CertificateDer::from(bytes)) {
            prop_assert_eq!(facts.fingerprint.len(), 64);
            let _ = facts.host();
        }
    });
}
