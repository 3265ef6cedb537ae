//! The directory with a host's identity.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, UnixTime};

use crate::authority::{self, Validity};
use crate::certificate::CertificateFacts;
use crate::error::IdentityError;
use crate::files::{self, IfThere};
use crate::name::HostName;
use crate::peers::{EndedPeer, PeerConnection, Peers};
use crate::revocation::{LONGEST_LIST, RevocationList};
use crate::tls::{HostIdentity, certificates};

/// A directory with a host's identity, and on one host with the authority's. Every call reads the files anew. Clones share what a process has learned of
/// revoked certificates, and the connections that end for it.
#[derive(Debug, Clone)]
pub struct IdentityDirectory {
    path: PathBuf,
    peers: Arc<Peers>,
}

/// What is in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The host's certificate.
    pub host: CertificateFacts,
    /// The authority that it trusts.
    pub authority: CertificateFacts,
    /// The authority's key is here: identities are issued by this host.
    pub issues: bool,
    /// Why it cannot be used now, if so.
    pub problem: Option<String>,
}

/// An identity that this host has got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Whose it is.
    pub name: HostName,
    /// Why the list that came along was not taken: it is older than the one that is here.
    pub older_list: Option<String>,
}

/// The file with the revocation list, for an identity that is to come.
enum Present {
    /// There is none, or a damaged one of the identity's authority.
    None,
    /// One of its authority.
    List(RevocationList),
    /// One of another authority.
    Foreign,
}

/// What looking at the revocation list again came to.
#[derive(Debug, Default)]
pub struct ListNews {
    /// The number of a list that was not known before.
    pub number: Option<u64>,
    /// Connections that were ended, by this call or since the last one.
    pub ended: Vec<EndedPeer>,
    /// Why what is in the file does not count. What was known before does.
    pub refused: Option<IdentityError>,
}

const HOST: &str = "identity";
const AUTHORITY: &str = "authority";
const PLACES: &str = "authority.at";
const LIST: &str = "revocation list";
/// How long another process may take a list.
const PATIENCE: Duration = Duration::from_secs(10);

impl IdentityDirectory {
    /// Nothing is looked at yet.
    pub fn new(path: impl Into<PathBuf>) -> IdentityDirectory {
        IdentityDirectory { path: path.into(), peers: Arc::default() }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn host(&self) -> PathBuf {
        self.path.join("host.pem")
    }

    pub(crate) fn authority(&self) -> PathBuf {
        self.path.join("authority.pem")
    }

    /// Where the revocation list is, if there is one.
    pub fn list_file(&self) -> PathBuf {
        self.path.join("revoked.pem")
    }

    /// Makes an authority, and the identity of this host, `name`.
    pub fn create(&self, name: &HostName, validity: Validity) -> Result<(), IdentityError> {
        files::prepare(&self.path)?;
        if self.host().exists() {
            return Err(IdentityError::Exists { path: self.host(), what: HOST });
        }
        // An authority without a host is what a crash in here leaves: it is gone on with.
        if !self.authority().exists() {
            files::write(&self.authority(), &authority::found(name)?, IfThere::Refuse(AUTHORITY))?;
        }
        let host = self.issue_known(name, validity, None)?;
        files::write(&self.host(), &host, IfThere::Refuse(HOST))
    }

    /// Makes an identity of another host, in the file `out`, which that host imports. Whoever has the file is that host.
    pub fn issue(&self, name: &HostName, validity: Validity, out: &Path) -> Result<(), IdentityError> {
        if out.exists() {
            return Err(IdentityError::Exists { path: out.to_owned(), what: HOST });
        }
        files::write(out, &self.issue_known(name, validity, None)?, IfThere::Refuse(HOST))
    }

    /// Makes what is in `from` the identity of this host. Says whose it is. With an identity of another name or authority in place that is refused,
    /// unless it is to be `replaced`.
    ///
    /// # Errors
    /// It is not for this host, not valid, or revoked; the list of its authority that is here is damaged; the files cannot be used.
    pub fn import(&self, from: &Path, replaces: bool) -> Result<HostName, IdentityError> {
        let text = files::read_file(from, HOST, files::LONGEST)?;
        let new = HostIdentity::parse(from, &text, None)?;
        Ok(self.replace_by(from, &new, &text, None, replaces)?.name)
    }

    /// Whether an identity of that name (`None`: any) and authority may become this host's. It may not if it is another one's than the one that is here,
    /// unless it is to be `replaced`. `from` is for errors.
    ///
    /// # Errors
    /// It may not, or the directory cannot be used.
    pub fn may_replace(
        &self,
        from: &Path,
        name: Option<&HostName>,
        fingerprint: &str,
        replaces: bool,
    ) -> Result<(), IdentityError> {
        files::prepare(&self.path)?;
        if replaces {
            return Ok(());
        }
        let old = match files::read(&self.host(), HOST) {
            Err(IdentityError::Missing { .. }) => return Ok(()),
            Err(error) => return Err(error),
            Ok(old) => HostIdentity::parse(&self.host(), &old, None)?,
        };
        if let Some(name) = name.filter(|name| old.name() != *name) {
            let (got, wanted) = (name.to_string(), old.name().to_string());
            return Err(IdentityError::WrongHost { path: from.to_owned(), got, wanted });
        }
        if old.authority().fingerprint != fingerprint {
            let why = format!("{fingerprint}, and this host's is {}", old.authority().name);
            return Err(IdentityError::WrongAuthority { path: from.to_owned(), why });
        }
        Ok(())
    }

    /// Makes `new`, whose text is `text`, the identity of this host, and takes a list of its authority. At no moment a revoked peer is let in by the new
    /// identity; if the host leaves another authority, a crash may leave one that lets nobody in, and doing it again helps.
    pub(crate) fn replace_by(
        &self,
        from: &Path,
        new: &HostIdentity,
        text: &str,
        list: Option<RevocationList>,
        replaces: bool,
    ) -> Result<Installed, IdentityError> {
        new.check(from, UnixTime::now())?;
        self.may_replace(from, Some(new.name()), &new.authority().fingerprint, replaces)?;
        let [_, authority] = new.certificates();
        let present = match self.read_list(authority) {
            Err(IdentityError::RevocationList { path, why }) => match self.leaves_list(authority) {
                true => Present::Foreign,
                // Without it revoked peers would be let in.
                false if list.is_none() => return Err(IdentityError::RevocationList { path, why }),
                false => Present::None,
            },
            Err(error) => return Err(error),
            Ok(list) => list.map_or(Present::None, Present::List),
        };
        let lists = list.iter().chain(match &present {
            Present::List(list) => Some(list),
            _ => None,
        });
        if lists.into_iter().any(|list| list.revokes(&new.host().serial)) {
            return Err(IdentityError::Revoked { path: from.to_owned() });
        }
        let name = new.name().clone();
        if let Present::Foreign = present {
            // The other authority's list lets nobody in until the new one has taken its place.
            files::write(&self.host(), text, IfThere::Replace)?;
            match list {
                Some(list) => drop(self.take_list(from, list, authority)?),
                None => files::remove(&self.list_file())?,
            }
            return Ok(Installed { name, older_list: None });
        }
        // The list first: with the new certificate no revoked peer is let in.
        let (taken, older_list) = match list.map(|list| self.take_list(from, list, authority)).transpose() {
            Ok(taken) => (taken.is_some_and(|(_, new)| new), None),
            // This host knows more than whoever answered.
            Err(error @ IdentityError::OlderRevocationList { .. }) => (false, Some(error.to_string())),
            Err(error) => return Err(error),
        };
        let written = files::write(&self.host(), text, IfThere::Replace);
        if written.is_err() && taken && matches!(present, Present::None) && self.is_of_another(authority) {
            // The old identity, of another authority, goes on without.
            files::remove(&self.list_file())?;
        }
        written?;
        Ok(Installed { name, older_list })
    }

    /// Whether the list in the file, which is none of `authority`, belongs to another authority, which this host leaves for it. If not, it is damaged.
    fn leaves_list(&self, authority: &CertificateDer<'static>) -> bool {
        let text = files::read_long(&self.list_file(), LIST, LONGEST_LIST as u64);
        text.is_ok_and(|text| RevocationList::is_foreign(&text, authority)) || self.is_of_another(authority)
    }

    /// Whether this host has an identity, and that is of another authority.
    fn is_of_another(&self, authority: &CertificateDer<'static>) -> bool {
        let certificates = files::read(&self.host(), HOST).ok().and_then(|text| certificates(&text).ok());
        certificates.is_some_and(|all| all.get(1).is_some_and(|present| present != authority))
    }

    /// A new key and certificate for this host, where the authority is.
    pub fn renew(&self, validity: Validity) -> Result<HostName, IdentityError> {
        let path = self.host();
        let old = HostIdentity::parse(&path, &files::read(&path, HOST)?, None)?;
        if self.authority_facts()? != *old.authority() {
            let why =
                format!("it is of {}, which is not the authority of this directory", old.authority().name);
            return Err(IdentityError::WrongAuthority { path, why });
        }
        let text = self.issue_known(old.name(), validity, Some(old.host()))?;
        files::write(&path, &text, IfThere::Replace)?;
        Ok(old.name().clone())
    }

    /// Reads the identity, and checks that it can be used now.
    pub fn load(&self) -> Result<HostIdentity, IdentityError> {
        self.load_at(UnixTime::now())
    }

    /// The same for another moment.
    pub fn load_at(&self, moment: UnixTime) -> Result<HostIdentity, IdentityError> {
        let path = self.host();
        let identity = self.parse(&path)?;
        identity.check(&path, moment)?;
        Ok(identity)
    }

    /// The same for asking the authority, whose name no other host has: also with a revocation list that cannot be used, since another one is to be had there.
    ///
    /// # Errors
    /// There is no identity, or it cannot be used.
    pub fn load_for_asking(&self) -> Result<HostIdentity, IdentityError> {
        match self.load() {
            Err(IdentityError::RevocationList { .. }) => {
                let path = self.host();
                let identity = HostIdentity::parse(&path, &files::read(&path, HOST)?, None)?;
                identity.check(&path, UnixTime::now())?;
                Ok(identity)
            }
            loaded => loaded,
        }
    }

    /// Reads the identity, with the revocation list that counts in this process.
    fn parse(&self, path: &Path) -> Result<HostIdentity, IdentityError> {
        let text = files::read(path, HOST)?;
        let authority = certificates(&text).ok().and_then(|certificates| certificates.into_iter().nth(1));
        // Whatever is wrong with the text is said below.
        let heard = authority.map(|authority| {
            let read = self.read_list(&authority);
            self.peers.hear(read, &authority, &self.list_file())
        });
        let list = heard.transpose()?.and_then(|heard| heard.list);
        HostIdentity::parse(path, &text, list.as_deref())
    }

    /// Reads the revocation list again, and ends connections with peers that are on it. Cheap: a daemon does it every few seconds.
    pub fn look_again(&self) -> ListNews {
        let look = || {
            let [_, authority] = HostIdentity::parse(&self.host(), &files::read(&self.host(), HOST)?, None)?
                .certificates()
                .clone();
            self.peers.hear(self.read_list(&authority), &authority, &self.list_file())
        };
        let mut news = ListNews::default();
        match look() {
            Ok(heard) => {
                news.number = heard.list.filter(|_| heard.changed).map(|list| list.number());
                news.refused = heard.refused;
            }
            // A host without an identity has no peers.
            Err(IdentityError::Missing { .. }) => {}
            Err(error) => news.refused = Some(error),
        }
        news.ended = self.ended();
        news
    }

    /// Connections that were ended since this was last asked.
    pub fn ended(&self) -> Vec<EndedPeer> {
        self.peers.ended()
    }

    /// Has a connection end when its peer's certificate is revoked: `socket` is shut down then. The answer holds a copy of its descriptor, so it is dropped with the
    /// connection. If the certificate has been revoked since the handshake began, it is shut down at once.
    ///
    /// # Errors
    /// There is no descriptor left for the copy.
    pub fn watch(&self, peer: &CertificateFacts, socket: impl AsFd) -> std::io::Result<PeerConnection> {
        Ok(self.peers.enter(peer, socket.as_fd().try_clone_to_owned()?))
    }

    /// Where the authority answers, as it was last kept.
    pub fn places(&self) -> Vec<String> {
        let text = files::read(&self.path.join(PLACES), "known place of its authority").unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Keeps where the authority answers, for those that renew and fetch.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn keep_places(&self, places: &[String]) -> Result<(), IdentityError> {
        let text: String = places.iter().map(|place| format!("{place}\n")).collect();
        files::write(&self.path.join(PLACES), &text, IfThere::Replace)
    }

    /// The revocation list in the file, if there is one.
    ///
    /// # Errors
    /// It is none of this host's authority.
    pub fn revocations(&self) -> Result<Option<RevocationList>, IdentityError> {
        let text = files::read(&self.host(), HOST)?;
        let identity = HostIdentity::parse(&self.host(), &text, None)?;
        self.read_list(&identity.certificates()[1])
    }

    /// Takes a newer revocation list (PEM) of this host's authority. `from` is for errors. Answers its number, and whether it is another one than before.
    ///
    /// # Errors
    /// It is none of this authority's, or older than the present one; it stays then.
    pub fn take_revocations(&self, from: &Path, text: &str) -> Result<(u64, bool), IdentityError> {
        let host = files::read(&self.host(), HOST)?;
        let identity = HostIdentity::parse(&self.host(), &host, None)?;
        let [_, authority] = identity.certificates();
        let list = RevocationList::parse(text, authority);
        let list = list.map_err(|why| IdentityError::RevocationList { path: from.to_owned(), why })?;
        self.take_list(from, list, authority)
    }

    fn take_list(
        &self,
        from: &Path,
        list: RevocationList,
        authority: &CertificateDer<'static>,
    ) -> Result<(u64, bool), IdentityError> {
        // Two that come at once are taken one after the other.
        let _lock = files::lock(&self.path.join("revoked.lock"), PATIENCE)?;
        let number = list.number();
        let present = match self.read_list(authority) {
            // One that is damaged, or another authority's, is replaced.
            Err(IdentityError::RevocationList { .. }) => None,
            read => read?,
        };
        match present {
            Some(present) if present.is_same(&list) => return Ok((number, false)),
            Some(present) if present.number() >= number => {
                let (path, present) = (from.to_owned(), present.number());
                return Err(IdentityError::OlderRevocationList { path, number, present });
            }
            _ => {}
        }
        files::write(&self.list_file(), list.text(), IfThere::Replace)?;
        Ok((number, true))
    }

    pub(crate) fn read_list(
        &self,
        authority: &CertificateDer<'static>,
    ) -> Result<Option<RevocationList>, IdentityError> {
        let path = self.list_file();
        let malformed = |why| IdentityError::RevocationList { path: path.clone(), why };
        match files::read_long(&path, LIST, LONGEST_LIST as u64) {
            Ok(text) => RevocationList::parse(&text, authority).map(Some).map_err(malformed),
            Err(IdentityError::Missing { .. }) => Ok(None),
            Err(IdentityError::Malformed { why, .. }) => Err(malformed(why)),
            Err(IdentityError::Unreadable { source, .. }) if source.kind() == ErrorKind::InvalidData => {
                Err(malformed(source.to_string()))
            }
            Err(error) => Err(error),
        }
    }

    /// Reads the identity, usable or not.
    pub fn show(&self) -> Result<Shown, IdentityError> {
        let path = self.host();
        let identity = self.parse(&path)?;
        let problem = identity.check(&path, UnixTime::now()).err().map(|error| error.to_string());
        let (host, authority) = (identity.host().clone(), identity.authority().clone());
        Ok(Shown { host, authority, issues: self.authority().exists(), problem })
    }

    /// Copies for programs that look for GnuTLS's names of files, as qemu and libnbd do. `to` is made, and its files are replaced.
    pub fn export(&self, to: &Path) -> Result<(), IdentityError> {
        self.load()?;
        let text = files::read(&self.host(), HOST)?;
        let parts: Vec<&str> = text.split_inclusive("-----END CERTIFICATE-----\n").collect();
        let [host, authority, key] = parts[..] else {
            let why = "two certificates and a key are expected, in this order".into();
            return Err(IdentityError::Malformed { path: self.host(), why });
        };
        files::prepare(to)?;
        files::write(&to.join("ca-cert.pem"), authority, IfThere::Replace)?;
        for role in ["client", "server"] {
            files::write(&to.join(format!("{role}-key.pem")), key, IfThere::Replace)?;
            files::write(&to.join(format!("{role}-cert.pem")), host, IfThere::Replace)?;
        }
        Ok(())
    }

    pub(crate) fn read_authority(&self) -> Result<String, IdentityError> {
        let text = files::read(&self.authority(), AUTHORITY)?;
        let malformed = |why| IdentityError::Malformed { path: self.authority(), why };
        match certificates(&text).map_err(malformed)?.as_slice() {
            [one] => CertificateFacts::of(one).map_err(malformed)?,
            found => return Err(malformed(format!("{} certificates: one is expected", found.len()))),
        };
        Ok(text)
    }
}
