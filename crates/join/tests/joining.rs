//! Hosts that join, renew and fetch over loopback.

mod support;

use std::path::Path;
use std::sync::Arc;

use ioplane_identity::{
    IdentityDirectory, IdentityError, JoinRefusal, NewKey, TlsFault, TokenOrder, Validity, Which,
    pinned_client,
};
use ioplane_join::{JoinError, JoinServer, JoinToken, fetch_revocations, join, renew};
use serde_json::json;
use support::{DAYS, Rig, listener, name, now, place, said};
use time::{Duration, OffsetDateTime};
use tokio::io::AsyncReadExt;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};

fn days_left(directory: &IdentityDirectory) -> i64 {
    (directory.show().unwrap().host.not_after - now() + 3600) / (24 * 3600)
}

fn refusal<T: std::fmt::Debug>(outcome: Result<T, JoinError>) -> JoinRefusal {
    match outcome {
        Err(JoinError::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

/// All that the files of a folder say.
fn texts(folder: &Path) -> String {
    let files = std::fs::read_dir(folder).unwrap();
    files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect()
}

fn text(directory: &IdentityDirectory) -> String {
    std::fs::read_to_string(directory.path().join("host.pem")).unwrap()
}

fn parts(text: &str) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let certificates = CertificateDer::pem_slice_iter(text.as_bytes()).map(Result::unwrap).collect();
    (certificates, PrivateKeyDer::from_pem_slice(text.as_bytes()).unwrap())
}

/// A server that shows all certificates of a text, and wants none.
fn server_of(text: &str) -> Arc<ServerConfig> {
    let (certificates, key) = parts(text);
    let server = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let server = server.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    Arc::new(server.with_single_cert(certificates, key).unwrap())
}

/// A client that shows the first certificate of a text, and trusts the authority in it.
fn client_of(text: &str) -> Arc<ClientConfig> {
    let (certificates, key) = parts(text);
    let mut roots = RootCertStore::empty();
    roots.add(certificates[1].clone()).unwrap();
    let client = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let client = client.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    Arc::new(client.with_client_auth_cert(vec![certificates[0].clone()], key).unwrap())
}

#[tokio::test]
async fn a_host_joins_by_a_token_once() {
    let rig = Rig::new();
    let (token, b) = (rig.token(Some("host-b")), rig.host("host-b"));
    // As it is copied.
    let token: JoinToken = token.text().parse().unwrap();
    let joined = join(&b, &token, None, false).await.unwrap();
    assert_eq!((joined.name, joined.place), (name("host-b"), rig.places().remove(0)));
    let loaded = b.load().unwrap();
    assert_eq!(loaded.authority().fingerprint, rig.authority.authority_facts().unwrap().fingerprint);
    assert_eq!(days_left(&b), 10);
    // The key is nowhere where the authority is.
    let own = text(&b);
    let key = own.split("-----BEGIN PRIVATE KEY-----").nth(1).unwrap().lines().nth(1).unwrap();
    assert!(key.len() > 40 && !texts(rig.authority.path()).contains(key));

    // Replayed: by the same host, by another one, after a restart.
    assert_eq!(refusal(join(&b, &token, None, false).await), JoinRefusal::UsedToken);
    assert_eq!(refusal(join(&rig.host("x"), &token, None, false).await), JoinRefusal::UsedToken);
    let own = IdentityDirectory::new(rig.authority.path());
    let again = JoinServer::start(listener(), own, DAYS).unwrap();
    let moved = JoinToken { places: vec![place(again.address())], ..token };
    assert_eq!(refusal(join(&rig.host("x"), &moved, None, false).await), JoinRefusal::UsedToken);
    assert!(!rig.host("x").path().join("host.pem").exists());
    assert_eq!(b.load().unwrap().host(), loaded.host());
}

/// Of many that come at once with one token, one is let in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_works_once_also_at_the_same_moment() {
    let rig = Rig::new();
    let token = rig.token(None);
    let hosts: Vec<_> = (0..8)
        .map(|number| {
            let (host, token) = (rig.host(&format!("h{number}")), token.clone());
            let wanted = name(&format!("host-{number}"));
            tokio::spawn(async move { join(&host, &token, Some(wanted), false).await })
        })
        .collect();
    let mut joined = 0;
    for host in hosts {
        match host.await.unwrap() {
            Ok(_) => joined += 1,
            refused => assert_eq!(refusal(refused), JoinRefusal::UsedToken),
        }
    }
    assert_eq!(joined, 1);
}

#[tokio::test]
async fn tokens_that_do_not_work_say_why() {
    let rig = Rig::new();
    let x = rig.host("x");
    let unknown = JoinToken { secret: [7; 32], ..rig.token(Some("host-b")) };
    assert_eq!(refusal(join(&x, &unknown, None, false).await), JoinRefusal::UnknownToken);
    let late = TokenOrder { name: Some(name("host-b")), replaces: false, days: 1, until: now() - 1 };
    let late = rig.token_of(&late);
    assert_eq!(refusal(join(&x, &late, None, false).await), JoinRefusal::ExpiredToken);

    // For another name: said before anything is asked for, and by the authority, whatever the token says.
    let token = rig.token(Some("host-b"));
    assert_eq!(refusal(join(&x, &token, Some(name("host-c")), false).await), JoinRefusal::OtherName);
    let changed = JoinToken { name: Some("host-c".to_owned()), ..token.clone() };
    assert_eq!(refusal(join(&x, &changed, None, false).await), JoinRefusal::OtherName);
    join(&x, &token, None, false).await.unwrap();

    let (any, y) = (rig.token(None), rig.host("y"));
    assert_eq!(refusal(join(&y, &any, None, false).await), JoinRefusal::NoName);
    for had in ["host-a", "host-b"] {
        assert_eq!(refusal(join(&y, &any, Some(name(had)), false).await), JoinRefusal::NameIssued);
    }
    join(&y, &any, Some(name("host-y")), false).await.unwrap();

    // This host is another one: said before the token is used.
    let other = rig.token(Some("host-z"));
    let refused = join(&x, &other, None, false).await;
    assert!(matches!(refused, Err(JoinError::Identity(IdentityError::WrongHost { .. }))), "{refused:?}");
    join(&x, &other, None, true).await.unwrap();
    assert_eq!(x.load().unwrap().name(), &name("host-z"));
}

/// Somebody else answers in the authority's place: a host of the authority, or another authority. Neither hears anything.
#[tokio::test]
async fn nobody_answers_in_the_place_of_the_authority() {
    let rig = Rig::new();
    let stranger = rig.host("stranger");
    stranger.create(&name("host-a"), Validity::default()).unwrap();
    let member = rig.member("host-c").await;
    let token = rig.token(Some("host-b"));
    for (who, shows) in [
        ("a host of the authority", member.load().unwrap().server()),
        ("one that shows the authority's certificate, too", server_of(&text(&member))),
        ("another authority", stranger.answering().unwrap()),
    ] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let there = JoinToken { places: vec![place(listener.local_addr().unwrap())], ..token.clone() };
        let man = async {
            let (stream, _) = listener.accept().await.unwrap();
            let mut heard = Vec::new();
            if let Ok(mut stream) = TlsAcceptor::from(shows).accept(stream).await {
                let _ = stream.read_to_end(&mut heard).await;
            }
            heard
        };
        let host = rig.host("host-b");
        let (heard, refused) = tokio::join!(man, join(&host, &there, None, false));
        match refused {
            Err(JoinError::Tls(TlsFault::WrongHost(_))) if who.starts_with("one") => {}
            Err(JoinError::Tls(TlsFault::WrongAuthority)) if !who.starts_with("one") => {}
            other => panic!("{who}: {other:?}"),
        }
        assert!(heard.is_empty(), "{who} has heard something");
    }
    // The token is as good as new.
    join(&rig.host("host-b"), &token, None, false).await.unwrap();
}

#[tokio::test]
async fn a_certificate_is_renewed_while_it_is_valid() {
    let rig = Rig::new();
    let b = rig.member("host-b").await;
    let (old, old_text) = (b.load().unwrap(), text(&b));
    renew(&b, &rig.places()).await.unwrap();
    let new = b.load().unwrap();
    assert_eq!(new.name(), old.name());
    assert!(new.host().fingerprint != old.host().fingerprint);
    assert_eq!(days_left(&b), i64::from(DAYS));
    // The old one is valid until its end: it can still be used, here to renew once more.
    std::fs::write(b.path().join("host.pem"), &old_text).unwrap();
    renew(&b, &rig.places()).await.unwrap();

    // Without a certificate, nothing.
    let mut raw = rig.raw(pinned_client(rig.fingerprint())).await.unwrap();
    let request = NewKey::generate().unwrap().request().to_owned();
    let ask = json!({ "version": 1, "ask": "renew", "request": request });
    assert_eq!(said(&mut raw, ask.to_string().as_bytes()).await["reason"], "no_certificate");
    // A revoked one neither.
    let serial = b.load().unwrap().host().serial.clone();
    rig.authority.revoke(&name("host-b"), &Which::Serial(serial)).unwrap();
    let refused = renew(&b, &rig.places()).await;
    let told = TlsFault::Refused("its authority has revoked it");
    assert!(matches!(&refused, Err(JoinError::Tls(fault)) if *fault == told), "{refused:?}");
    // Nor one of another authority.
    let stranger = rig.host("stranger");
    stranger.create(&name("host-b"), Validity::default()).unwrap();
    let refused = renew(&stranger, &rig.places()).await;
    assert!(matches!(refused, Err(JoinError::Tls(TlsFault::WrongAuthority))), "{refused:?}");
}

#[tokio::test]
async fn an_expired_certificate_is_not_renewed_and_joins_again() {
    let rig = Rig::new();
    let now = OffsetDateTime::now_utc();
    let validity = Validity { from: now - Duration::days(2), until: now - Duration::days(1) };
    let (b, file) = (rig.host("host-b"), rig.folder.path().join("b.pem"));
    rig.authority.issue(&name("host-b"), validity, &file).unwrap();
    std::fs::create_dir(b.path()).unwrap();
    std::fs::set_permissions(b.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::rename(file, b.path().join("host.pem")).unwrap();
    let refused = renew(&b, &rig.places()).await;
    assert!(matches!(refused, Err(JoinError::Identity(IdentityError::Expired { .. }))), "{refused:?}");
    // Also if the host does not look: the authority does, when the host's part of the handshake has ended.
    let error = match rig.raw(client_of(&text(&b))).await {
        Err(error) => error,
        Ok(mut stream) => stream.read(&mut [0; 1]).await.unwrap_err(),
    };
    assert_eq!(TlsFault::of(&error), Some(TlsFault::Refused("it has expired or is not yet valid")));
    // The name is free: nothing that is valid has it.
    join(&b, &rig.token(Some("host-b")), None, false).await.unwrap();
    b.load().unwrap();
}

#[tokio::test]
async fn lists_come_along_and_are_fetched() {
    let rig = Rig::new();
    let (b, c) = (rig.member("host-b").await, rig.member("host-c").await);
    assert_eq!(fetch_revocations(&c, &rig.places()).await.unwrap(), None);
    let first = rig.authority.revoke(&name("host-b"), &Which::All).unwrap().number;
    assert_eq!(fetch_revocations(&c, &rig.places()).await.unwrap(), Some((first, true)));
    assert_eq!(fetch_revocations(&c, &rig.places()).await.unwrap(), Some((first, false)));
    assert!(c.revocations().unwrap().unwrap().revokes(&b.show().unwrap().host.serial));
    // Whoever joins or renews has it from the beginning.
    let d = rig.member("host-d").await;
    assert_eq!(d.revocations().unwrap().unwrap().number(), first);
    let second = rig.authority.revoke(&name("host-c"), &Which::All).unwrap().number;
    renew(&d, &rig.places()).await.unwrap();
    assert_eq!(d.revocations().unwrap().unwrap().number(), second);
    // Also where the present one is damaged, and nothing else can be done with the identity.
    std::fs::write(d.list_file(), "x").unwrap();
    // A process that has not seen a good one.
    let d = IdentityDirectory::new(d.path());
    assert!(matches!(d.load(), Err(IdentityError::RevocationList { .. })));
    assert_eq!(fetch_revocations(&d, &rig.places()).await.unwrap(), Some((second, true)));
    d.load().unwrap();
    // And where the authority has lost its own.
    std::fs::remove_file(rig.authority.list_file()).unwrap();
    let refused = renew(&b, &rig.places()).await;
    let told = TlsFault::Refused("its authority has revoked it");
    assert!(matches!(&refused, Err(JoinError::Tls(fault)) if *fault == told), "{refused:?}");
    assert!(rig.authority.revocations().unwrap().unwrap().number() > second);
    // Nobody else gets it.
    let mut raw = rig.raw(pinned_client(rig.fingerprint())).await.unwrap();
    let ask = json!({ "version": 1, "ask": "revocations" });
    assert_eq!(said(&mut raw, ask.to_string().as_bytes()).await["reason"], "no_certificate");
}
