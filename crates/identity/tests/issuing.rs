//! An authority's ledger: tokens that work once, certificates for keys of others, and lists of what is revoked.

mod support;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;

use ioplane_identity::{
    HostName, IdentityDirectory, IdentityError, JoinRefusal, NewKey, RevocationList, SignedAnswer,
    SigningRequest, TlsFault, TokenOrder, Validity, Which,
};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PublicKeyData,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use support::{authority, both, folder, issued, name};
use time::OffsetDateTime;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

fn now() -> i64 {
    OffsetDateTime::now_utc().unix_timestamp()
}

fn order(host: Option<&str>) -> TokenOrder {
    TokenOrder { name: host.map(name), replaces: false, days: 10, until: now() + 60 }
}

/// Why a token does not work.
fn refused<T: std::fmt::Debug>(outcome: Result<T, IdentityError>) -> JoinRefusal {
    match outcome {
        Err(IdentityError::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

fn revoked(authority: &IdentityDirectory, host: &str) -> u64 {
    authority.revoke(&name(host), &Which::All).unwrap().number
}

fn permit(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}

fn list(authority: &IdentityDirectory) -> String {
    std::fs::read_to_string(authority.list_file()).unwrap()
}

/// Brings the list of one directory to another.
fn bring(from: &IdentityDirectory, to: &IdentityDirectory) -> Result<(u64, bool), IdentityError> {
    to.take_revocations(Path::new("list"), &list(from))
}

#[test]
fn a_token_works_once_also_after_a_restart() {
    let folder = folder();
    let a = authority(folder.path());
    let secret = a.make_token(&order(Some("host-b"))).unwrap();
    let ledger = std::fs::read_to_string(folder.path().join("a/ledger.json")).unwrap();
    let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(ledger.contains("hash") && !ledger.contains(&hex), "the secret is kept");
    // Refused, and not used up.
    assert_eq!(refused(a.use_token(&secret, Some(&name("host-c")))), JoinRefusal::OtherName);
    assert_eq!(refused(a.use_token(&[0; 32], Some(&name("host-b")))), JoinRefusal::UnknownToken);
    let admission = a.use_token(&secret, Some(&name("host-b"))).unwrap();
    assert_eq!((admission.name.as_str(), admission.days), ("host-b", 10));
    // Another process.
    let again = IdentityDirectory::new(folder.path().join("a"));
    assert_eq!(refused(again.use_token(&secret, Some(&name("host-b")))), JoinRefusal::UsedToken);
    assert_eq!(refused(again.use_token(&secret, Some(&name("host-c")))), JoinRefusal::UsedToken);
}

#[test]
fn tokens_end_and_a_name_is_issued_once() {
    let folder = folder();
    let a = authority(folder.path());
    let late = a.make_token(&TokenOrder { until: now() - 1, ..order(Some("host-b")) }).unwrap();
    assert_eq!(refused(a.use_token(&late, None)), JoinRefusal::ExpiredToken);
    let any = a.make_token(&order(None)).unwrap();
    assert_eq!(refused(a.use_token(&any, None)), JoinRefusal::NoName);
    // This host's own name, also where the ledger does not know it.
    std::fs::remove_file(folder.path().join("a/ledger.json")).unwrap();
    let any = a.make_token(&order(None)).unwrap();
    assert_eq!(refused(a.use_token(&any, Some(&name("host-a")))), JoinRefusal::NameIssued);
    assert_eq!(refused(a.make_token(&order(Some("host-a")))), JoinRefusal::NameIssued);

    let early = a.make_token(&order(Some("host-b"))).unwrap();
    issued(&a, folder.path(), "host-b");
    assert_eq!(refused(a.use_token(&early, None)), JoinRefusal::NameIssued);
    assert_eq!(refused(a.use_token(&any, Some(&name("host-b")))), JoinRefusal::NameIssued);
    assert_eq!(refused(a.make_token(&order(Some("host-b")))), JoinRefusal::NameIssued);
    let replacing = TokenOrder { replaces: true, ..order(Some("host-b")) };
    let replacing = a.make_token(&replacing).unwrap();
    assert!(a.use_token(&replacing, None).unwrap().replaces);
    // What is revoked is free again.
    revoked(&a, "host-b");
    a.use_token(&early, None).unwrap();
    // Without an authority there are no tokens.
    let b = issued(&a, folder.path(), "host-c");
    assert!(matches!(b.make_token(&order(None)), Err(IdentityError::Missing { what: "authority", .. })));
}

#[test]
fn a_ledger_that_is_damaged_signs_nothing() {
    let folder = folder();
    let a = authority(folder.path());
    let secret = a.make_token(&order(Some("host-b"))).unwrap();
    let file = folder.path().join("a/ledger.json");
    let good = std::fs::read_to_string(&file).unwrap();
    for text in ["", "{}", &good[..good.len() - 1], &good.replace("\"version\":1", "\"version\":2")] {
        std::fs::write(&file, text).unwrap();
        assert!(matches!(a.use_token(&secret, None), Err(IdentityError::Malformed { .. })), "{text}");
        assert!(matches!(a.renew(Validity::default()), Err(IdentityError::Malformed { .. })), "{text}");
        assert!(matches!(a.revoke(&name("host-a"), &Which::All), Err(IdentityError::Malformed { .. })));
    }
    std::fs::write(&file, good).unwrap();
    a.use_token(&secret, None).unwrap();
}

/// Signs for the key, by a token, and makes it the identity of a directory.
fn join(a: &IdentityDirectory, folder: &Path, host: &str) -> IdentityDirectory {
    let secret = a.make_token(&order(Some(host))).unwrap();
    let key = NewKey::generate().unwrap();
    let admission = a.use_token(&secret, None).unwrap();
    let signed = a.sign_admitted(&SigningRequest::parse(key.request()).unwrap(), &admission).unwrap();
    let (fingerprint, wanted) = (a.authority_facts().unwrap().fingerprint, name(host));
    let received = SignedAnswer {
        certificate: &signed.certificate,
        authority: &signed.authority,
        list: None,
        fingerprint: &fingerprint,
        name: Some(&wanted),
    };
    let directory = IdentityDirectory::new(folder.join(host));
    assert_eq!(directory.install(&received, key.key(), false).unwrap().name, wanted);
    // Another key, name or authority is not taken, and what is there stays.
    let (other, c) = (NewKey::generate().unwrap(), name("host-c"));
    assert!(matches!(directory.install(&received, other.key(), false), Err(IdentityError::Malformed { .. })));
    let wrong = SignedAnswer { name: Some(&c), ..received };
    assert!(matches!(directory.install(&wrong, key.key(), true), Err(IdentityError::WrongHost { .. })));
    let wrong = SignedAnswer { fingerprint: "00", ..received };
    assert!(matches!(directory.install(&wrong, key.key(), true), Err(IdentityError::WrongAuthority { .. })));
    assert_eq!(directory.load().unwrap().host().fingerprint, signed.facts.fingerprint);
    directory
}

#[test]
fn a_certificate_for_a_key_of_another_host_is_as_good() {
    let folder = folder();
    let a = authority(folder.path());
    let b = join(&a, folder.path(), "host-b");
    let (a, b) = (a.load().unwrap(), b.load().unwrap());
    assert_eq!(both(&b, &a, "host-a"), (None, None));
    assert_eq!(both(&a, &b, "host-b"), (None, None));
}

#[test]
fn requests_that_cannot_be_used_are_refused() {
    let good = NewKey::generate().unwrap().request().to_owned();
    assert!(SigningRequest::parse(&good).is_ok());
    let other = NewKey::generate().unwrap().request().to_owned();
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let mut mixed = lines(&good);
    // The end of a request is its signature.
    let last = mixed.len() - 2;
    mixed[last] = lines(&other)[last].clone();
    let of = |kind| {
        let key = KeyPair::generate_for(kind).unwrap();
        CertificateParams::new(Vec::new()).unwrap().serialize_request(&key).unwrap().pem().unwrap()
    };
    // Of keys of other kinds.
    let (longer, other) = (of(&PKCS_ECDSA_P384_SHA384), of(&PKCS_ED25519));
    assert!(SigningRequest::parse(&of(&PKCS_ECDSA_P256_SHA256)).is_ok());
    for bad in ["", "x", &mixed.join("\n"), &"x".repeat(1 << 20), &longer, &other] {
        assert_eq!(SigningRequest::parse(bad).unwrap_err(), JoinRefusal::BadRequest, "{bad:.60}");
    }
}

/// What a request asks for does not count, but for its key.
#[test]
fn a_certificate_has_nothing_of_the_request_but_the_key() {
    let folder = folder();
    let a = authority(folder.path());
    let key = KeyPair::generate().unwrap();
    let mut asked = CertificateParams::new(vec!["host-a".to_owned(), "10.0.0.1".to_owned()]).unwrap();
    asked.distinguished_name.push(DnType::CommonName, "host-a");
    asked.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    asked.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    asked.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning];
    let request = asked.serialize_request(&key).unwrap().pem().unwrap();
    let request = SigningRequest::parse(&request).unwrap();
    let secret = a.make_token(&order(Some("host-b"))).unwrap();
    let signed = a.sign_admitted(&request, &a.use_token(&secret, None).unwrap()).unwrap();
    let der = CertificateDer::from_pem_slice(signed.certificate.as_bytes()).unwrap();
    let (_, certificate) = X509Certificate::from_der(&der).unwrap();
    assert!(!certificate.is_ca());
    let names = certificate.subject_alternative_name().unwrap().unwrap();
    assert_eq!(names.value.general_names, [GeneralName::DNSName("host-b")]);
    assert_eq!(certificate.subject().to_string(), "CN=host-b");
    let usage = certificate.key_usage().unwrap().unwrap().value;
    assert!(usage.digital_signature() && !usage.key_cert_sign() && !usage.crl_sign());
    assert!(!certificate.extended_key_usage().unwrap().unwrap().value.code_signing);
    assert_eq!(certificate.public_key().raw, key.subject_public_key_info());
}

#[test]
fn a_revoked_peer_is_refused_by_servers_and_clients_once_they_have_the_list() {
    let folder = folder();
    let a = authority(folder.path());
    let (b, c) = (issued(&a, folder.path(), "host-b"), issued(&a, folder.path(), "host-c"));
    let renewed = issued(&a, &folder.path().join("again"), "host-b");
    let old = b.show().unwrap().host;
    let done = a.revoke(&name("host-b"), &Which::Fingerprint(old.fingerprint.clone())).unwrap();
    assert_eq!(done.serials, std::slice::from_ref(&old.serial));
    let told = TlsFault::Refused("its authority has revoked it");
    let (at_a, at_b) = (a.load().unwrap(), b.load().unwrap());
    assert_eq!(both(&at_b, &at_a, "host-a"), (Some(told.clone()), Some(TlsFault::Revoked)));
    assert_eq!(both(&at_a, &at_b, "host-b"), (Some(TlsFault::Revoked), Some(told.clone())));
    // Who has not heard of it takes it, and then does not.
    assert_eq!(both(&at_b, &c.load().unwrap(), "host-c"), (None, None));
    assert_eq!(bring(&a, &c).unwrap(), (done.number, true));
    assert_eq!(bring(&a, &c).unwrap(), (done.number, false));
    assert_eq!(both(&at_b, &c.load().unwrap(), "host-c"), (Some(told), Some(TlsFault::Revoked)));
    // Another certificate of that name is as good as before, until all are revoked.
    assert_eq!(both(&renewed.load().unwrap(), &at_a, "host-a"), (None, None));
    let all = a.revoke(&name("host-b"), &Which::All).unwrap();
    assert!(all.number > done.number);
    assert_eq!(all.serials, [renewed.show().unwrap().host.serial]);
    let refused = both(&renewed.load().unwrap(), &a.load().unwrap(), "host-a");
    assert_eq!(refused.1, Some(TlsFault::Revoked));
    // It knows by itself, once it has the list.
    bring(&a, &b).unwrap();
    assert!(matches!(b.load(), Err(IdentityError::Revoked { .. })));
    assert!(b.show().unwrap().problem.unwrap().contains("revoked"));
}

#[test]
fn what_may_be_revoked() {
    let folder = folder();
    let a = authority(folder.path());
    issued(&a, folder.path(), "host-b");
    let own = a.show().unwrap().host;
    let unknown =
        |which| matches!(a.revoke(&name("host-b"), &which), Err(IdentityError::UnknownCertificate { .. }));
    assert!(matches!(a.revoke(&name("host-c"), &Which::All), Err(IdentityError::UnknownCertificate { .. })));
    assert!(unknown(Which::Fingerprint("00".to_owned())));
    // Of another host.
    assert!(unknown(Which::Fingerprint(own.fingerprint.clone())));
    assert!(matches!(a.revoke(&name("host-a"), &Which::All), Err(IdentityError::OwnCertificate)));
    for serial in ["", "x", "0", "zz", &"00".repeat(21)] {
        let serial = Which::Serial((*serial).to_owned());
        assert!(a.revoke(&name("host-b"), &serial).is_err());
    }
    assert!(a.revocations().unwrap().is_none(), "what was refused is on a list");
    a.renew(Validity::default()).unwrap();
    let old = a.revoke(&name("host-a"), &Which::Fingerprint(own.fingerprint)).unwrap();
    assert_eq!(old.serials, [own.serial]);
    a.load().unwrap();
    // One from before there was a ledger.
    std::fs::remove_file(folder.path().join("a/ledger.json")).unwrap();
    let serial = IdentityDirectory::new(folder.path().join("host-b")).show().unwrap().host.serial;
    assert!(unknown(Which::All));
    // The ledger is gone, and the list is not: numbers go on, and nothing is taken off it.
    let done = a.revoke(&name("host-b"), &Which::Serial(serial.clone())).unwrap();
    assert!(done.number > old.number);
    assert_eq!(done.serials, std::slice::from_ref(&serial));
    let list = a.revocations().unwrap().unwrap();
    assert_eq!(list.revoked().count(), 2);
    // Again: the same list; written again if it is gone.
    let again = a.revoke(&name("host-b"), &Which::Serial(serial.clone())).unwrap();
    assert_eq!((again.number, again.serials.len()), (done.number, 0));
    std::fs::remove_file(a.list_file()).unwrap();
    let again = a.revoke(&name("host-b"), &Which::Serial(serial.clone())).unwrap();
    assert!(again.number > done.number);
    assert!(a.revocations().unwrap().unwrap().revokes(&serial));
}

#[test]
fn bad_and_older_lists_are_not_taken() {
    let (folder, other) = (folder(), folder());
    let (a, foreign) = (authority(folder.path()), authority(other.path()));
    let c = issued(&a, folder.path(), "host-c");
    for host in ["host-b", "host-d"] {
        issued(&a, folder.path(), host);
        issued(&foreign, other.path(), host);
    }
    let old = revoked(&a, "host-b");
    let first = list(&a);
    let newest = revoked(&a, "host-d");
    revoked(&foreign, "host-b");
    let take = |text: &str| c.take_revocations(Path::new("x"), text);
    let bad = |text: &str| matches!(take(text), Err(IdentityError::RevocationList { .. }));
    assert!(bad(&list(&foreign)) && bad("") && bad("x") && bad(&"x".repeat(3 << 20)));
    assert!(bad(&std::fs::read_to_string(folder.path().join("a/host.pem")).unwrap()));
    assert!(c.revocations().unwrap().is_none());
    assert_eq!(take(&list(&a)).unwrap(), (newest, true));
    match take(&first) {
        Err(IdentityError::OlderRevocationList { number, present, .. }) => {
            assert_eq!((number, present), (old, newest));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(c.revocations().unwrap().unwrap().number(), newest);
    // What cannot be read now may be a newer one: it stays.
    permit(&c.list_file(), 0o644);
    assert!(matches!(take(&first), Err(IdentityError::Permissions { .. })));
    permit(&c.list_file(), 0o600);
    assert_eq!(c.revocations().unwrap().unwrap().number(), newest);

    // Written over by hand, while a process runs: what it knows counts. Another one has nothing to go by.
    let known = IdentityDirectory::new(c.path());
    known.load().unwrap();
    std::fs::write(c.list_file(), &first).unwrap();
    let news = known.look_again();
    assert!(matches!(news.refused, Some(IdentityError::OlderRevocationList { .. })) && news.number.is_none());
    let d = IdentityDirectory::new(folder.path().join("host-d")).load().unwrap();
    assert_eq!(both(&d, &known.load().unwrap(), "host-c").1, Some(TlsFault::Revoked));
    for text in ["x", &list(&foreign)] {
        std::fs::write(c.list_file(), text).unwrap();
        assert!(
            matches!(known.look_again().refused, Some(IdentityError::RevocationList { .. })),
            "{text:.40}"
        );
        assert_eq!(both(&d, &known.load().unwrap(), "host-c").1, Some(TlsFault::Revoked));
        let fresh = IdentityDirectory::new(c.path());
        assert!(matches!(fresh.load(), Err(IdentityError::RevocationList { .. })), "{text:.40}");
        assert!(matches!(fresh.look_again().refused, Some(IdentityError::RevocationList { .. })));
    }
    std::fs::remove_file(c.list_file()).unwrap();
    assert!(known.look_again().refused.is_some());
    assert_eq!(both(&d, &known.load().unwrap(), "host-c").1, Some(TlsFault::Revoked));
    // It is brought again.
    assert_eq!(take(&list(&a)).unwrap(), (newest, true));
    assert!(known.look_again().refused.is_none());
}

/// Whether the other end is gone.
fn ended(mut peer: &UnixStream) -> bool {
    peer.set_nonblocking(true).unwrap();
    matches!(peer.read(&mut [0; 1]), Ok(0))
}

#[test]
fn connections_of_a_revoked_peer_end_when_the_list_is_read() {
    let folder = folder();
    let a = authority(folder.path());
    let (b, c) = (issued(&a, folder.path(), "host-b"), issued(&a, folder.path(), "host-c"));
    let (of_b, of_c) = (b.show().unwrap().host, c.show().unwrap().host);
    a.load().unwrap();
    let pair = || UnixStream::pair().unwrap();
    let ((ours_b, theirs_b), (ours_c, theirs_c), (gone, theirs_gone)) = (pair(), pair(), pair());
    let watched = [a.watch(&of_b, &ours_b).unwrap(), a.watch(&of_c, &ours_c).unwrap()];
    // One that has ended keeps nothing open.
    drop(a.watch(&of_b, &gone).unwrap());
    drop(gone);
    assert!(ended(&theirs_gone));
    // Another process revokes.
    let number = revoked(&IdentityDirectory::new(a.path()), "host-b");
    assert!(!ended(&theirs_b));
    let news = a.look_again();
    assert_eq!(news.number, Some(number));
    let told: Vec<_> = news.ended.iter().map(|peer| (peer.name.as_str(), peer.serial.as_str())).collect();
    assert_eq!(told, [("host-b", of_b.serial.as_str())]);
    assert!(ended(&theirs_b) && !ended(&theirs_c));
    assert!(a.look_again().ended.is_empty() && a.look_again().number.is_none());
    // Revoked while its handshake went on.
    let (late, theirs_late) = pair();
    let _late = a.watch(&of_b, &late).unwrap();
    assert!(ended(&theirs_late));
    assert_eq!(a.ended().len(), 1);
    drop(watched);
}

#[test]
fn a_host_that_leaves_an_authority_leaves_its_list() {
    let (folder, other) = (folder(), folder());
    let (a, foreign) = (authority(folder.path()), authority(other.path()));
    let b = issued(&a, folder.path(), "host-b");
    issued(&a, folder.path(), "host-c");
    revoked(&a, "host-c");
    bring(&a, &b).unwrap();
    b.load().unwrap();
    let file = other.path().join("new.pem");
    foreign.issue(&name("host-b"), Validity::default(), &file).unwrap();
    b.import(&file, true).unwrap();
    assert_eq!(both(&b.load().unwrap(), &foreign.load().unwrap(), "host-a"), (None, None));
    assert!(b.revocations().unwrap().is_none());
}

#[test]
fn no_host_gets_the_name_under_which_the_authority_answers() {
    assert!(matches!(ioplane_identity::ANSWERING.parse::<HostName>(), Err(IdentityError::Reserved(_))));
    assert!(matches!("Authority.ioplane.INVALID".parse::<HostName>(), Err(IdentityError::Reserved(_))));
}

/// Whatever becomes of a list: an error, or the list that it was. Nothing panics.
#[test]
fn damaged_lists_are_refused() {
    use proptest::prelude::*;
    let folder = folder();
    let a = authority(folder.path());
    let c = issued(&a, folder.path(), "host-c");
    issued(&a, folder.path(), "host-b");
    revoked(&a, "host-b");
    let good = std::fs::read(a.list_file()).unwrap();
    let revoked =
        |list: RevocationList| list.revoked().map(|(serial, _)| serial.to_owned()).collect::<Vec<_>>();
    let wanted = revoked(a.revocations().unwrap().unwrap());
    proptest!(ProptestConfig::with_cases(300), |(at in 0..good.len(), value in any::<u8>(), how in 0..4u8)| {
        let mut bytes = good.clone();
        match how {
            0 => bytes.truncate(at),
            1 => drop(bytes.remove(at)),
            2 => bytes.insert(at, value),
            _ => bytes[at] = value,
        }
        std::fs::write(c.list_file(), &bytes).unwrap();
        std::fs::set_permissions(c.list_file(), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        if let Ok(Some(list)) = c.revocations() {
            prop_assert_eq!(revoked(list), wanted.clone());
        }
    });
}
