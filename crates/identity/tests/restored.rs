//! Files that come from a backup, are damaged or gone, or were half written: nobody who was revoked gets in by that.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ioplane_identity::{
    CertificateFacts, IdentityDirectory, IdentityError, JoinRefusal, ListWatch, NewKey, SignedAnswer,
    SignedCertificate, SigningRequest, TlsFault, TokenOrder, Validity, Which,
};
use support::{authority, both, folder, issued, name};
use time::OffsetDateTime;

fn order(host: Option<&str>) -> TokenOrder {
    let until = OffsetDateTime::now_utc().unix_timestamp() + 60;
    TokenOrder { name: host.map(name), replaces: false, days: 10, until }
}

fn renewed(a: &IdentityDirectory, shown: &CertificateFacts) -> Result<SignedCertificate, IdentityError> {
    a.sign_renewal(&SigningRequest::parse(NewKey::generate().unwrap().request()).unwrap(), shown, 5)
}

fn is_refused<T>(outcome: Result<T, IdentityError>, why: &JoinRefusal) -> bool {
    matches!(outcome, Err(IdentityError::Refused(refusal)) if refusal == *why)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    permit(path, 0o600);
}

fn permit(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn ledger(a: &IdentityDirectory) -> PathBuf {
    a.path().join("ledger.json")
}

/// Signs a certificate for a host by a token, and has the host take it, with `list`.
fn join(
    a: &IdentityDirectory,
    b: &IdentityDirectory,
    list: Option<&str>,
) -> Result<Option<String>, IdentityError> {
    let secret = a.make_token(&TokenOrder { replaces: true, ..order(Some("host-b")) }).unwrap();
    let key = NewKey::generate().unwrap();
    let admission = a.use_token(&secret, None).unwrap();
    let signed = a.sign_admitted(&SigningRequest::parse(key.request()).unwrap(), &admission).unwrap();
    let (certificate, authority) = (&signed.certificate[..], &signed.authority[..]);
    let fingerprint = &a.authority_facts().unwrap().fingerprint[..];
    let answer = SignedAnswer { certificate, authority, list, fingerprint, name: None };
    b.install(&answer, key.key(), true).map(|installed| installed.older_list)
}

#[test]
fn what_the_ledger_has_revoked_stays_so_without_the_list() {
    let folder = folder();
    let a = authority(folder.path());
    let [b, c] = ["host-b", "host-c"].map(|host| issued(&a, folder.path(), host).show().unwrap().host);
    let first = a.revoke(&name("host-b"), &Which::All).unwrap().number;
    let older = read(&a.list_file());
    std::fs::remove_file(a.list_file()).unwrap();
    assert!(is_refused(renewed(&a, &b), &JoinRefusal::NoCertificate));
    renewed(&a, &c).unwrap();
    // Whoever answers writes it again first, with a number that those who have the first one take.
    a.answering().unwrap();
    let list = a.revocations().unwrap().unwrap();
    assert!(list.revokes(&b.serial) && list.number() > first);
    // An older one comes from a backup.
    a.revoke(&name("host-c"), &Which::Serial(c.serial.clone())).unwrap();
    write(&a.list_file(), &older);
    assert!(is_refused(renewed(&a, &c), &JoinRefusal::NoCertificate));
    let list = a.authority_revocations().unwrap().unwrap();
    assert!(list.revokes(&b.serial) && list.revokes(&c.serial));
    assert_eq!(read(&a.list_file()), list.text());
    // Nothing is written without need.
    a.answering().unwrap();
    assert_eq!(read(&a.list_file()), list.text());
    // The authority lives on elsewhere, without the list.
    for file in [a.list_file(), a.path().join("host.pem")] {
        std::fs::remove_file(file).unwrap();
    }
    IdentityDirectory::new(a.path()).create(&name("host-x"), Validity::default()).unwrap();
    assert!(a.revocations().unwrap().unwrap().revokes(&b.serial));
    // One that is damaged may have said more: nobody is answered.
    write(&a.list_file(), "x");
    assert!(matches!(a.answering(), Err(IdentityError::RevocationList { .. })));
    assert!(matches!(renewed(&a, &c), Err(IdentityError::RevocationList { .. })));
}

/// Both files come from a backup, and the authority revokes another host then: who has a list from before takes the next one.
#[test]
fn numbers_go_on_after_a_restore() {
    let folder = folder();
    let a = authority(folder.path());
    for host in ["host-b", "host-c", "host-d"] {
        issued(&a, folder.path(), host);
    }
    let d = IdentityDirectory::new(folder.path().join("host-d"));
    let before = read(&ledger(&a));
    let began = OffsetDateTime::now_utc().unix_timestamp().unsigned_abs();
    let first = a.revoke(&name("host-b"), &Which::All).unwrap().number;
    assert!(first > began, "{first}");
    let newer = read(&a.list_file());
    write(&ledger(&a), &before);
    std::fs::remove_file(a.list_file()).unwrap();
    // As if it had been a while ago: two lists within a second have the same number otherwise.
    while OffsetDateTime::now_utc().unix_timestamp().unsigned_abs() < first {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    d.take_revocations(Path::new("x"), &newer).unwrap();
    let second = a.revoke(&name("host-c"), &Which::All).unwrap().number;
    assert_eq!(d.take_revocations(Path::new("x"), &read(&a.list_file())).unwrap(), (second, true));
    // An older one that comes along is told, and not taken.
    let b = IdentityDirectory::new(folder.path().join("host-b"));
    let newest = read(&a.list_file());
    assert_eq!(join(&a, &b, Some(&newest)).unwrap(), None);
    let told = join(&a, &b, Some(&newer)).unwrap();
    assert!(told.is_some_and(|why| why.contains("older than the present one")));
    assert_eq!(read(&b.list_file()), newest);
}

/// A process that knows a list takes no other one of that number.
#[test]
fn two_lists_of_one_number_are_told_apart() {
    let folder = folder();
    let a = authority(folder.path());
    let hosts = ["host-b", "host-c"].map(|host| issued(&a, folder.path(), host));
    let before = read(&ledger(&a)).replace("\"list_number\":0", "\"list_number\":9000000000");
    let made = hosts.each_ref().map(|host| {
        write(&ledger(&a), &before);
        let _ = std::fs::remove_file(a.list_file());
        let host = host.show().unwrap().host;
        (a.revoke(&name(&host.name), &Which::All).unwrap().number, read(&a.list_file()))
    });
    assert_eq!(made[0].0, made[1].0);
    let known = &hosts[1];
    known.take_revocations(Path::new("x"), &made[0].1).unwrap();
    known.load().unwrap();
    write(&known.list_file(), &made[1].1);
    assert!(matches!(known.look_again().refused, Some(IdentityError::RevocationList { .. })));
    known.load().unwrap();
    // The same one, with something around it.
    write(&known.list_file(), &format!("\n{}\n", made[0].1));
    assert!(known.look_again().refused.is_none());
}

#[test]
fn what_the_ledger_does_not_know_is_entered_when_it_renews() {
    let folder = folder();
    let a = authority(folder.path());
    let old = issued(&a, folder.path(), "host-b").show().unwrap().host;
    assert!(a.knows_all().unwrap());
    std::fs::remove_file(ledger(&a)).unwrap();
    let any = a.make_token(&order(None)).unwrap();
    // It was begun later than the authority.
    let text = read(&ledger(&a));
    let at = text.find("\"since\":").unwrap() + 8;
    let since: i64 = text[at..].split(',').next().unwrap().parse().unwrap();
    write(&ledger(&a), &text.replacen(&since.to_string(), &(since + 1000).to_string(), 1));
    assert!(!a.knows_all().unwrap());

    assert!(matches!(a.revoke(&name("host-b"), &Which::All), Err(IdentityError::UnknownCertificate { .. })));
    renewed(&a, &old).unwrap();
    assert!(is_refused(a.use_token(&any, Some(&name("host-b"))), &JoinRefusal::NameIssued));
    let revoked = a.revoke(&name("host-b"), &Which::All).unwrap().serials;
    assert!(revoked.len() == 2 && revoked.contains(&old.serial), "{revoked:?}");
    assert!(is_refused(renewed(&a, &old), &JoinRefusal::NoCertificate));
    // The same of this host's own.
    std::fs::remove_file(ledger(&a)).unwrap();
    let own = a.show().unwrap().host;
    a.renew(Validity::default()).unwrap();
    let revoked = a.revoke(&name("host-a"), &Which::Fingerprint(own.fingerprint)).unwrap();
    assert_eq!(revoked.serials, [own.serial]);
}

/// A token whose certificate could not be signed is not used up.
#[test]
fn a_name_with_too_many_certificates_uses_no_token_up() {
    let folder = folder();
    let a = authority(folder.path());
    let b = issued(&a, folder.path(), "host-b").show().unwrap().host;
    while renewed(&a, &b).is_ok() {}
    assert!(is_refused(renewed(&a, &b), &JoinRefusal::TooManyCertificates));
    let token = a.make_token(&TokenOrder { replaces: true, ..order(Some("host-b")) }).unwrap();
    assert!(is_refused(a.use_token(&token, None), &JoinRefusal::TooManyCertificates));
    a.revoke(&name("host-b"), &Which::Fingerprint(b.fingerprint)).unwrap();
    a.use_token(&token, None).unwrap();
}

/// Makes a file unwritable, until it is dropped: a folder is where its new content would be.
struct Obstacle(PathBuf);

impl Obstacle {
    fn of(file: &Path) -> Obstacle {
        let name = file.file_name().unwrap().to_str().unwrap();
        let at = file.with_file_name(format!("{name}.{}.new", std::process::id()));
        std::fs::create_dir(&at).unwrap();
        Obstacle(at)
    }
}

impl Drop for Obstacle {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn no_identity_comes_into_use_without_the_list_of_its_authority() {
    let (folder, other) = (folder(), folder());
    let (a, foreign) = (authority(folder.path()), authority(other.path()));
    for host in ["host-b", "host-c"] {
        issued(&a, folder.path(), host);
        issued(&foreign, other.path(), host);
    }
    a.revoke(&name("host-c"), &Which::All).unwrap();
    foreign.revoke(&name("host-c"), &Which::All).unwrap();
    let (ours, theirs) = (read(&a.list_file()), read(&foreign.list_file()));
    let b = IdentityDirectory::new(folder.path().join("host-b"));
    let host = b.path().join("host.pem");
    let c = IdentityDirectory::new(other.path().join("host-c")).load().unwrap();
    let fresh = || IdentityDirectory::new(b.path());
    let (old, again) = (read(&host), folder.path().join("again.pem"));
    a.issue(&name("host-b"), Validity::default(), &again).unwrap();

    // Damaged, of the same authority: it stays, and so does the identity, unless a good one comes along.
    write(&b.list_file(), "x");
    assert!(matches!(b.import(&again, false), Err(IdentityError::RevocationList { .. })));
    assert!(matches!(join(&a, &b, None), Err(IdentityError::RevocationList { .. })));
    assert_eq!((read(&host), read(&b.list_file())), (old, "x".to_owned()));
    join(&a, &b, Some(&ours)).unwrap();
    assert_eq!(read(&b.list_file()), ours);
    fresh().load().unwrap();

    // To another authority, whose list cannot be written: nobody is let in then, until it is done again.
    let obstacle = Obstacle::of(&b.list_file());
    assert!(matches!(join(&foreign, &b, Some(&theirs)), Err(IdentityError::Unwritable { .. })));
    assert_eq!(read(&b.list_file()), ours);
    assert!(matches!(fresh().load(), Err(IdentityError::RevocationList { .. })));
    drop(obstacle);
    join(&foreign, &b, Some(&theirs)).unwrap();
    assert_eq!(read(&b.list_file()), theirs);
    let (_, refused) = both(&c, &fresh().load().unwrap(), "host-b");
    assert_eq!(refused, Some(TlsFault::Revoked));

    // The host's file cannot be written: the old identity is as good as before, also if it had no list.
    for list in [Some(&theirs), None] {
        if list.is_none() {
            std::fs::remove_file(b.list_file()).unwrap();
        }
        let (old, _obstacle) = (read(&host), Obstacle::of(&host));
        assert!(matches!(join(&a, &b, Some(&ours)), Err(IdentityError::Unwritable { .. })));
        assert_eq!(read(&host), old);
        assert_eq!(fresh().revocations().unwrap().map(|list| list.text().to_owned()).as_ref(), list);
        fresh().load().unwrap();
    }
}

#[test]
fn a_certificate_that_is_revoked_already_is_not_imported() {
    let folder = folder();
    let a = authority(folder.path());
    let b = issued(&a, folder.path(), "host-b");
    let (file, other) =
        (folder.path().join("other.pem"), IdentityDirectory::new(folder.path().join("other")));
    a.issue(&name("host-b"), Validity::default(), &file).unwrap();
    other.import(&file, false).unwrap();
    let new = other.show().unwrap().host.fingerprint;
    a.revoke(&name("host-b"), &Which::Fingerprint(new)).unwrap();
    b.take_revocations(Path::new("x"), &read(&a.list_file())).unwrap();
    let before = read(&b.path().join("host.pem"));
    assert!(matches!(b.import(&file, true), Err(IdentityError::Revoked { .. })));
    assert_eq!(read(&b.path().join("host.pem")), before);
    b.load().unwrap();
}

/// A list that others may write does not count, and does when that is mended: also to a process that looks at changes of the file only.
#[test]
fn a_list_counts_when_its_permissions_are_mended() {
    let folder = folder();
    let a = authority(folder.path());
    let (b, c) = (issued(&a, folder.path(), "host-b"), issued(&a, folder.path(), "host-c"));
    let of_b = b.show().unwrap().host;
    let mut watch = ListWatch::new(c.clone());
    assert!(watch.look().refused.is_none());
    c.load().unwrap();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let _watched = c.watch(&of_b, &ours).unwrap();
    let number = a.revoke(&name("host-b"), &Which::All).unwrap().number;
    write(&c.list_file(), &read(&a.list_file()));
    permit(&c.list_file(), 0o644);
    let news = watch.look();
    assert!(matches!(news.refused, Some(IdentityError::Permissions { .. })) && news.number.is_none());
    // Told once.
    let news = watch.look();
    assert!(news.refused.is_none() && news.number.is_none() && news.ended.is_empty());
    permit(&c.list_file(), 0o600);
    let news = watch.look();
    assert_eq!((news.number, news.ended.len()), (Some(number), 1));
    assert!(matches!(std::io::Read::read(&mut &theirs, &mut [0; 1]), Ok(0)));
    // What is wrong with the folder is not seen in the file.
    issued(&a, folder.path(), "host-d");
    let number = a.revoke(&name("host-d"), &Which::All).unwrap().number;
    permit(c.path(), 0o755);
    write(&c.list_file(), &read(&a.list_file()));
    assert!(watch.look().refused.is_some());
    permit(c.path(), 0o700);
    assert_eq!(watch.look().number, Some(number));
    // The same reason again, after it was gone, is told again.
    permit(&c.list_file(), 0o644);
    assert!(watch.look().refused.is_some());
}
