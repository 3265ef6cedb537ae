//! What is done where the authority is: certificates are signed and revoked, tokens made and used.

use rustls::crypto::ring::default_provider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use time::OffsetDateTime;

use crate::authority::{self, CLOCKS, SigningRequest, Validity};
use crate::certificate::CertificateFacts;
use crate::directory::{IdentityDirectory, Installed};
use crate::error::IdentityError;
use crate::files::{self, FileVersion, IfThere};
use crate::ledger::{Ledger, OpenLedger, SignedEntry, TokenAdmission, TokenOrder};
use crate::name::HostName;
use crate::refusal::JoinRefusal;
use crate::revocation::RevocationList;
use crate::tls::HostIdentity;

/// Seconds that making an authority and its ledger may take.
const FOUNDING: i64 = 300;
/// The one-time secret of a token, bytes.
pub const SECRET: usize = 32;

/// What an authority has signed for another host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedCertificate {
    /// The host's certificate (PEM).
    pub certificate: String,
    /// The authority's certificate (PEM).
    pub authority: String,
    /// What it says.
    pub facts: CertificateFacts,
}

/// Which certificates of a host are revoked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// All that are valid.
    All,
    /// The one of this fingerprint.
    Fingerprint(String),
    /// The one of this serial number, also if the ledger does not know it: it was issued before there was one.
    Serial(String),
}

/// What was revoked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revoked {
    /// The number of the list that says so.
    pub number: u64,
    /// Serial numbers. Empty: all had been revoked before.
    pub serials: Vec<String>,
}

pub(crate) fn now() -> i64 {
    OffsetDateTime::now_utc().unix_timestamp()
}

impl IdentityDirectory {
    fn ledger(&self) -> Result<OpenLedger, IdentityError> {
        OpenLedger::open(self.path(), now())
    }

    /// The fingerprint of the authority whose key is here.
    pub fn authority_facts(&self) -> Result<CertificateFacts, IdentityError> {
        let certificate = self.authority_certificate()?;
        CertificateFacts::of(&certificate)
            .map_err(|why| IdentityError::Malformed { path: self.authority(), why })
    }

    fn authority_certificate(&self) -> Result<CertificateDer<'static>, IdentityError> {
        CertificateDer::from_pem_slice(self.read_authority()?.as_bytes())
            .map_err(|error| IdentityError::Malformed { path: self.authority(), why: error.to_string() })
    }

    /// The list of what the authority has revoked, if there is one. If the file is gone or lacks something of the ledger, it is written again.
    ///
    /// # Errors
    /// There is no authority here, the list is none of its, or the files cannot be used.
    pub fn authority_revocations(&self) -> Result<Option<RevocationList>, IdentityError> {
        let authority = self.read_authority()?;
        self.say_again(&authority, self.ledger()?)
    }

    fn say_again(
        &self,
        authority: &str,
        ledger: OpenLedger,
    ) -> Result<Option<RevocationList>, IdentityError> {
        let certificate = self.authority_certificate()?;
        let present = self.read_list(&certificate)?;
        if ledger.content.is_said(present.as_ref()) {
            return Ok(present);
        }
        self.write_list(authority, &certificate, ledger, present)?;
        self.read_list(&certificate)
    }

    /// Signs a certificate for a key that is made here, and enters it into the ledger before anybody has it; so it does with the `old` one, which is to be
    /// replaced.
    pub(crate) fn issue_known(
        &self,
        name: &HostName,
        validity: Validity,
        old: Option<&CertificateFacts>,
    ) -> Result<String, IdentityError> {
        let authority = self.read_authority()?;
        let text = authority::issue(&authority, name, validity)?;
        let mut ledger = self.ledger()?;
        ledger.may_sign(name, now())?;
        let new = facts(&text)?;
        old.into_iter().chain([&new]).for_each(|facts| ledger.signed(facts));
        ledger.keep()?;
        self.say_again(&authority, ledger)?;
        Ok(text)
    }

    /// Whether the ledger has been there since the authority was made. If not, hosts may have certificates that it does not know: those that were issued
    /// before. They are neither revoked by name nor in the way of a token for any name.
    ///
    /// # Errors
    /// There is no authority here, or its files cannot be used.
    pub fn knows_all(&self) -> Result<bool, IdentityError> {
        let begun = self.authority_facts()?.not_before.saturating_add(CLOCKS.whole_seconds());
        Ok(self.ledger()?.content.since <= begun.saturating_add(FOUNDING))
    }

    /// Whether a token with that secret was made here. Waits for nobody: what works is seen when it is used.
    ///
    /// # Errors
    /// [`IdentityError::Refused`]: it was not. Others: the ledger cannot be used.
    pub fn knows_token(&self, secret: &[u8]) -> Result<(), IdentityError> {
        match Ledger::read(&Ledger::path(self.path()), now())?.knows(secret) {
            true => Ok(()),
            false => Err(JoinRefusal::UnknownToken.into()),
        }
    }

    /// Makes a token and answers its secret, which is kept nowhere.
    ///
    /// # Errors
    /// There is no authority here; a host of that name has a valid certificate, and the token is not to replace it; the ledger cannot be used.
    pub fn make_token(&self, order: &TokenOrder) -> Result<[u8; SECRET], IdentityError> {
        self.read_authority()?;
        let mut ledger = self.ledger()?;
        if let Some(name) = order.name.as_ref().filter(|_| !order.replaces)
            && (ledger.has(name, now()) || self.is_own(name))
        {
            return Err(JoinRefusal::NameIssued.into());
        }
        let mut secret = [0; SECRET];
        let filled = default_provider().secure_random.fill(&mut secret);
        filled.map_err(|_| IdentityError::Making("no random numbers".to_owned()))?;
        ledger.add_token(&secret, order)?;
        ledger.keep()?;
        Ok(secret)
    }

    /// Uses a token up: durably, before anything is signed for it.
    ///
    /// # Errors
    /// [`IdentityError::Refused`]: the token is unknown, used, expired or for another name; it is not used up. Others: the ledger cannot be used.
    pub fn use_token(&self, secret: &[u8], name: Option<&HostName>) -> Result<TokenAdmission, IdentityError> {
        let mut ledger = self.ledger()?;
        let admission = ledger.use_token(secret, name, now())?;
        if !admission.replaces && self.is_own(&admission.name) {
            return Err(JoinRefusal::NameIssued.into());
        }
        ledger.keep()?;
        Ok(admission)
    }

    /// Signs the certificate that a token allows.
    ///
    /// # Errors
    /// Another token has brought the name a certificate meanwhile; the files cannot be used.
    pub fn sign_admitted(
        &self,
        request: &SigningRequest,
        admission: &TokenAdmission,
    ) -> Result<SignedCertificate, IdentityError> {
        let TokenAdmission { name, days, replaces } = admission;
        self.sign(request, name, *days, None, |ledger| match !replaces && ledger.has(name, now()) {
            true => Err(JoinRefusal::NameIssued.into()),
            false => Ok(()),
        })
    }

    /// Signs another certificate for a host that has shown a valid one. The ledger knows the shown one from then on, if it did not.
    ///
    /// # Errors
    /// The certificate that was shown is revoked; the host has too many; the files cannot be used.
    pub fn sign_renewal(
        &self,
        request: &SigningRequest,
        shown: &CertificateFacts,
        days: u32,
    ) -> Result<SignedCertificate, IdentityError> {
        let name = shown.host().map_err(|_| JoinRefusal::NoCertificate)?;
        let authority = self.authority_certificate()?;
        self.sign(request, &name, days, Some(shown), |ledger| {
            // It may have been revoked since the handshake; the ledger says so also where the list is lost, and the list where the ledger is.
            let on_list = self.read_list(&authority)?.is_some_and(|list| list.revokes(&shown.serial));
            match on_list || ledger.content.revokes(&shown.serial) {
                true => Err(JoinRefusal::NoCertificate.into()),
                false => Ok(()),
            }
        })
    }

    fn sign(
        &self,
        request: &SigningRequest,
        name: &HostName,
        days: u32,
        shown: Option<&CertificateFacts>,
        may: impl FnOnce(&OpenLedger) -> Result<(), IdentityError>,
    ) -> Result<SignedCertificate, IdentityError> {
        let authority = self.read_authority()?;
        let mut ledger = self.ledger()?;
        may(&ledger)?;
        ledger.may_sign(name, now())?;
        let certificate = authority::sign(&authority, request, name, Validity::days(days))?;
        let facts = facts(&certificate)?;
        shown.into_iter().chain([&facts]).for_each(|facts| ledger.signed(facts));
        ledger.keep()?;
        let authority = authority::authority_certificate(&authority)?;
        Ok(SignedCertificate { certificate, authority, facts })
    }

    /// Revokes certificates of a host, of those that the ledger knows, and writes the list that says so. Doing it again writes the list again if it is gone.
    ///
    /// # Errors
    /// There is no such certificate; it is the one that this host uses; there is no authority here; the files cannot be used.
    pub fn revoke(&self, name: &HostName, which: &Which) -> Result<Revoked, IdentityError> {
        let authority = self.read_authority()?;
        let certificate = self.authority_certificate()?;
        let now = now();
        let mut ledger = self.ledger()?;
        let present = self.read_list(&certificate)?;
        let entries = &mut ledger.content.certificates;
        let mut chosen = choose(entries, name, which, now);
        if let (true, Which::Serial(serial)) = (chosen.is_empty(), which) {
            let until = CertificateFacts::of(&certificate).map_or(i64::MAX, |facts| facts.not_after);
            let (name, serial) = (name.to_string(), serial.clone());
            entries.push(SignedEntry {
                name,
                serial,
                fingerprint: String::new(),
                not_after: until,
                revoked: None,
            });
            chosen.push(entries.len() - 1);
        }
        if chosen.is_empty() {
            let which = match which {
                Which::All => format!("of {name}"),
                Which::Fingerprint(one) => format!("of {name} with the fingerprint {one}"),
                Which::Serial(one) => format!("of {name} with the serial number {one}"),
            };
            return Err(IdentityError::UnknownCertificate { which });
        }
        let own = self.show().ok().map(|shown| shown.host.serial);
        let mut serials = Vec::new();
        for at in chosen {
            let entry = &mut entries[at];
            if own.as_ref() == Some(&entry.serial) {
                return Err(IdentityError::OwnCertificate);
            }
            if entry.revoked.is_none() {
                entry.revoked = Some(now);
                serials.push(entry.serial.clone());
            }
        }
        let number = self.write_list(&authority, &certificate, ledger, present)?;
        Ok(Revoked { number, serials })
    }

    /// Makes the list of all that was revoked. What is on the present one stays on it, also if the ledger has been lost.
    fn write_list(
        &self,
        authority: &str,
        certificate: &CertificateDer<'static>,
        mut ledger: OpenLedger,
        present: Option<RevocationList>,
    ) -> Result<u64, IdentityError> {
        let mut revoked: std::collections::BTreeMap<String, i64> = std::collections::BTreeMap::new();
        let known = &ledger.content.certificates;
        for (serial, at) in present.iter().flat_map(RevocationList::revoked) {
            revoked.insert(serial.to_owned(), at);
        }
        for one in known {
            if let Some(at) = one.revoked {
                revoked.insert(one.serial.clone(), at);
            }
        }
        let before = present.as_ref().map_or(0, RevocationList::number);
        let last = ledger.content.list_number;
        let same = |list: RevocationList| list.revoked().map(|(serial, _)| serial).eq(revoked.keys());
        if before >= last && present.is_some_and(same) {
            return Ok(before);
        }
        // The time as well: numbers go on also if both files come from an old backup.
        let number = last.max(before).max(now().max(0).unsigned_abs()).saturating_add(1);
        ledger.content.list_number = number;
        let text = authority::revocation_list(authority, number, &revoked)?;
        let malformed = |why| IdentityError::RevocationList { path: self.list_file(), why };
        RevocationList::parse(&text, certificate).map_err(malformed)?;
        // What was revoked is known before it is said; doing it again says it.
        ledger.keep()?;
        files::write(&self.list_file(), &text, IfThere::Replace)?;
        Ok(number)
    }

    /// A server's part of TLS with which the authority answers hosts that join, renew or ask for the list: under a certificate of its own that is made
    /// for this call, ends in a day, and that no host can have. Clients with a certificate have to show a good one; others may come without. The list of
    /// revoked ones is written again if it lacks something.
    ///
    /// # Errors
    /// There is no authority here, or its files cannot be used.
    pub fn answering(&self) -> Result<std::sync::Arc<rustls::ServerConfig>, IdentityError> {
        let authority = self.read_authority()?;
        let certificate = self.authority_certificate()?;
        let list = self.say_again(&authority, self.ledger()?)?;
        let now = OffsetDateTime::now_utc();
        let validity = Validity { from: now - CLOCKS, until: now + time::Duration::days(1) };
        let text = authority::answering(&authority, validity)?;
        crate::tls::answering(&text, &certificate, list.as_ref())
            .map_err(|why| IdentityError::Malformed { path: self.authority(), why })
    }

    /// What changes whenever [`IdentityDirectory::answering`] would answer something else.
    pub fn answering_version(&self) -> [Option<FileVersion>; 3] {
        [self.authority(), self.list_file(), Ledger::path(self.path())].map(|path| FileVersion::of(&path))
    }

    /// Whether this host is called so.
    fn is_own(&self, name: &HostName) -> bool {
        self.show().is_ok_and(|shown| shown.host.name == name.as_str())
    }

    /// Makes what the authority has answered the identity of this host, and takes the list that came along. `key`: the private key (PEM) that the
    /// certificate is for.
    ///
    /// # Errors
    /// What came is not for this key, not of the authority `fingerprint`, not for the host `name`, or not valid; or an identity is here that it may not
    /// replace. Nothing has changed then.
    pub fn install(
        &self,
        received: &SignedAnswer<'_>,
        key: &str,
        replaces: bool,
    ) -> Result<Installed, IdentityError> {
        let text = format!("{}{}{key}", received.certificate, received.authority);
        let path = std::path::Path::new("the answer of the authority's host");
        if [received.certificate, received.authority].iter().any(|text| text.contains("PRIVATE KEY")) {
            let why = "a private key came along: that of this host never leaves it".to_owned();
            return Err(IdentityError::Malformed { path: path.to_owned(), why });
        }
        let new = HostIdentity::parse(path, &text, None)?;
        if new.authority().fingerprint != received.fingerprint {
            let why = format!("{}, which is another one than asked for", new.authority().name);
            return Err(IdentityError::WrongAuthority { path: path.to_owned(), why });
        }
        if let Some(name) = received.name.filter(|name| *name != new.name()) {
            let (got, wanted) = (new.name().to_string(), name.to_string());
            return Err(IdentityError::WrongHost { path: path.to_owned(), got, wanted });
        }
        let [_, authority] = new.certificates();
        let list = received.list.map(|text| RevocationList::parse(text, authority)).transpose();
        let list = list.map_err(|why| IdentityError::RevocationList { path: path.to_owned(), why })?;
        self.replace_by(path, &new, &text, list, replaces)
    }
}

/// What came from an authority's host.
#[derive(Debug, Clone, Copy)]
pub struct SignedAnswer<'a> {
    /// The host's certificate (PEM).
    pub certificate: &'a str,
    /// The authority's certificate (PEM).
    pub authority: &'a str,
    /// The revocation list (PEM), if there is one.
    pub list: Option<&'a str>,
    /// SHA-256 of the authority's certificate, as it has to be.
    pub fingerprint: &'a str,
    /// The name of the host, as it has to be.
    pub name: Option<&'a HostName>,
}

fn choose(entries: &[SignedEntry], name: &HostName, which: &Which, now: i64) -> Vec<usize> {
    let chosen = |one: &SignedEntry| {
        one.name == name.as_str()
            && one.not_after >= now
            && match which {
                Which::All => true,
                Which::Fingerprint(wanted) => one.fingerprint == *wanted,
                Which::Serial(wanted) => one.serial == *wanted,
            }
    };
    entries.iter().enumerate().filter(|(_, one)| chosen(one)).map(|(at, _)| at).collect()
}

/// What the first certificate of a text says.
fn facts(text: &str) -> Result<CertificateFacts, IdentityError> {
    let certificate = CertificateDer::from_pem_slice(text.as_bytes());
    let certificate = certificate.map_err(|error| IdentityError::Making(error.to_string()))?;
    CertificateFacts::of(&certificate).map_err(IdentityError::Making)
}
