//! The directory with a host's identity.

use std::path::{Path, PathBuf};

use rustls::pki_types::UnixTime;

use crate::authority::{self, Validity};
use crate::certificate::CertificateFacts;
use crate::error::IdentityError;
use crate::files::{self, IfThere};
use crate::name::HostName;
use crate::tls::{HostIdentity, certificates};

/// A directory with a host's identity, and on one host with the authority's. Every call reads the files anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityDirectory(PathBuf);

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

const HOST: &str = "identity";
const AUTHORITY: &str = "authority";

impl IdentityDirectory {
    /// Nothing is looked at yet.
    pub fn new(path: impl Into<PathBuf>) -> IdentityDirectory {
        IdentityDirectory(path.into())
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn host(&self) -> PathBuf {
        self.0.join("host.pem")
    }

    fn authority(&self) -> PathBuf {
        self.0.join("authority.pem")
    }

    /// Makes an authority, and the identity of this host, `name`.
    pub fn create(&self, name: &HostName, validity: Validity) -> Result<(), IdentityError> {
        files::prepare(&self.0)?;
        if self.host().exists() {
            return Err(IdentityError::Exists { path: self.host(), what: HOST });
        }
        // An authority without a host is what a crash in here leaves: it is gone on with.
        if !self.authority().exists() {
            files::write(&self.authority(), &authority::found(name)?, IfThere::Refuse(AUTHORITY))?;
        }
        let host = authority::issue(&self.read_authority()?, name, validity)?;
        files::write(&self.host(), &host, IfThere::Refuse(HOST))
    }

    /// Makes an identity of another host, in the file `out`, which that host imports. Whoever has the file is that host.
    pub fn issue(&self, name: &HostName, validity: Validity, out: &Path) -> Result<(), IdentityError> {
        let host = authority::issue(&self.read_authority()?, name, validity)?;
        files::write(out, &host, IfThere::Refuse(HOST))
    }

    /// Makes what is in `from` the identity of this host. Says whose it is. With an identity of another name or authority in place that is refused,
    /// unless it is to be `replaced`.
    pub fn import(&self, from: &Path, replaces: bool) -> Result<HostName, IdentityError> {
        let text = files::read_file(from, HOST)?;
        let new = HostIdentity::parse(from, &text)?;
        new.check(from, UnixTime::now())?;
        files::prepare(&self.0)?;
        match files::read(&self.host(), HOST) {
            Err(IdentityError::Missing { .. }) => {}
            Err(error) if !replaces => return Err(error),
            Err(_) => {}
            Ok(old) if !replaces => {
                let old = HostIdentity::parse(&self.host(), &old)?;
                if old.name() != new.name() {
                    let (got, wanted) = (new.name().to_string(), old.name().to_string());
                    return Err(IdentityError::WrongHost { path: from.to_owned(), got, wanted });
                }
                if old.authority() != new.authority() {
                    let why =
                        format!("{}, and this host's is {}", new.authority().name, old.authority().name);
                    return Err(IdentityError::WrongAuthority { path: from.to_owned(), why });
                }
            }
            Ok(_) => {}
        }
        files::write(&self.host(), &text, IfThere::Replace)?;
        Ok(new.name().clone())
    }

    /// A new key and certificate for this host, where the authority is.
    pub fn renew(&self, validity: Validity) -> Result<HostName, IdentityError> {
        let path = self.host();
        let old = HostIdentity::parse(&path, &files::read(&path, HOST)?)?;
        let authority = self.read_authority()?;
        let text = authority::issue(&authority, old.name(), validity)?;
        if HostIdentity::parse(&path, &text)?.authority() != old.authority() {
            let why =
                format!("it is of {}, which is not the authority of this directory", old.authority().name);
            return Err(IdentityError::WrongAuthority { path, why });
        }
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
        let identity = HostIdentity::parse(&path, &files::read(&path, HOST)?)?;
        identity.check(&path, moment)?;
        Ok(identity)
    }

    /// Reads the identity, usable or not.
    pub fn show(&self) -> Result<Shown, IdentityError> {
        let path = self.host();
        let identity = HostIdentity::parse(&path, &files::read(&path, HOST)?)?;
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

    fn read_authority(&self) -> Result<String, IdentityError> {
        let text = files::read(&self.authority(), AUTHORITY)?;
        let malformed = |why| IdentityError::Malformed { path: self.authority(), why };
        match certificates(&text).map_err(malformed)?.as_slice() {
            [one] => CertificateFacts::of(one).map_err(malformed)?,
            found => return Err(malformed(format!("{} certificates: one is expected", found.len()))),
        };
        Ok(text)
    }
}
