//! What an authority has made: tokens, certificates, revocations. One file beside its key, replaced whole under a lock.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::certificate::{CertificateFacts, hexadecimal};
use crate::error::IdentityError;
use crate::files::{self, IfThere};
use crate::name::HostName;
use crate::refusal::JoinRefusal;
use crate::revocation::RevocationList;

/// Most tokens at a time, those that have ended within [`REMEMBERED`] included.
const MOST_TOKENS: usize = 1024;
/// Most certificates that have not expired.
const MOST_CERTIFICATES: usize = 16_384;
/// Most valid certificates of one name: it renews once a year.
const MOST_OF_A_NAME: usize = 32;
/// Longest file, bytes.
const LONGEST: u64 = 16 << 20;
/// Seconds for which a token or certificate is remembered after its end: a week, so that who comes late is told why, and clocks may differ.
const REMEMBERED: i64 = 7 * 24 * 3600;
/// How long others may work with the file.
const PATIENCE: Duration = Duration::from_secs(10);
/// The form of the file.
const VERSION: u32 = 1;

/// Which token is to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenOrder {
    /// For the host of this name only.
    pub name: Option<HostName>,
    /// Also if a host of that name has a valid certificate.
    pub replaces: bool,
    /// For how many days the certificate is valid.
    pub days: u32,
    /// When the token ends, in seconds since 1970.
    pub until: i64,
}

/// What a token that was used has allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenAdmission {
    /// The name of the host.
    pub name: HostName,
    /// For how many days its certificate is valid.
    pub days: u32,
    /// Also if a host of that name has a valid certificate.
    pub replaces: bool,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenEntry {
    /// SHA-256 of the secret.
    hash: String,
    name: Option<String>,
    replaces: bool,
    days: u32,
    until: i64,
    /// When, in seconds since 1970.
    used: Option<i64>,
}

/// A certificate that the authority has signed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SignedEntry {
    pub name: String,
    pub serial: String,
    /// Empty if only the serial number is known.
    pub fingerprint: String,
    pub not_after: i64,
    /// When, in seconds since 1970.
    pub revoked: Option<i64>,
}

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ledger {
    version: u32,
    /// That of the last revocation list.
    pub list_number: u64,
    /// When it was begun, in seconds since 1970: what was signed before is not in it.
    #[serde(default)]
    pub since: i64,
    tokens: Vec<TokenEntry>,
    pub certificates: Vec<SignedEntry>,
}

/// The ledger of an authority, while nobody else works with it.
#[derive(Debug)]
pub(crate) struct OpenLedger {
    path: PathBuf,
    pub content: Ledger,
    _lock: files::Lock,
}

const WHAT: &str = "ledger of an authority";

impl OpenLedger {
    /// Opens that in `directory`; an authority without one has made nothing yet. What has ended long ago is not in it any more.
    pub fn open(directory: &Path, now: i64) -> Result<OpenLedger, IdentityError> {
        let lock = files::lock(&directory.join("ledger.lock"), PATIENCE)?;
        let path = Ledger::path(directory);
        let content = Ledger::read(&path, now)?;
        Ok(OpenLedger { path, content, _lock: lock })
    }

    /// Makes the changes durable.
    pub fn keep(&self) -> Result<(), IdentityError> {
        let text = serde_json::to_string(&self.content);
        let text = text.map_err(|error| IdentityError::Making(error.to_string()))?;
        files::write(&self.path, &text, IfThere::Replace)
    }

    /// Whether a host of that name has a certificate that is neither revoked nor at its end.
    pub fn has(&self, name: &HostName, now: i64) -> bool {
        self.content.valid(name, now).next().is_some()
    }

    /// Enters a token. It counts when it is kept.
    pub fn add_token(&mut self, secret: &[u8], order: &TokenOrder) -> Result<(), IdentityError> {
        if self.content.tokens.len() >= MOST_TOKENS {
            return Err(IdentityError::Full { what: "tokens", most: MOST_TOKENS });
        }
        self.content.tokens.push(TokenEntry {
            hash: digest(secret),
            name: order.name.as_ref().map(ToString::to_string),
            replaces: order.replaces,
            days: order.days,
            until: order.until,
            used: None,
        });
        Ok(())
    }

    /// Uses a token up, for the host that calls itself `name`. It is used when it is kept.
    pub fn use_token(
        &mut self,
        secret: &[u8],
        name: Option<&HostName>,
        now: i64,
    ) -> Result<TokenAdmission, IdentityError> {
        // Whoever guesses a secret cannot choose its digest: comparing digests tells nothing of the time that it takes.
        let hash = digest(secret);
        let token = self.content.tokens.iter().position(|token| token.hash == hash);
        let token = token.ok_or(JoinRefusal::UnknownToken)?;
        let entry = &self.content.tokens[token];
        if entry.used.is_some() {
            return Err(JoinRefusal::UsedToken.into());
        }
        if now > entry.until {
            return Err(JoinRefusal::ExpiredToken.into());
        }
        let name = match (&entry.name, name) {
            (Some(wanted), Some(name)) if wanted != name.as_str() => {
                return Err(JoinRefusal::OtherName.into());
            }
            (Some(wanted), _) => wanted.parse()?,
            (None, Some(name)) => name.clone(),
            (None, None) => return Err(JoinRefusal::NoName.into()),
        };
        if !entry.replaces && self.has(&name, now) {
            return Err(JoinRefusal::NameIssued.into());
        }
        // What could not be signed does not use it up.
        self.may_sign(&name, now)?;
        let entry = &mut self.content.tokens[token];
        entry.used = Some(now);
        Ok(TokenAdmission { name, days: entry.days, replaces: entry.replaces })
    }

    /// Whether one more may be signed for `name`.
    pub fn may_sign(&self, name: &HostName, now: i64) -> Result<(), IdentityError> {
        if self.content.certificates.len() >= MOST_CERTIFICATES {
            return Err(IdentityError::Full { what: "certificates", most: MOST_CERTIFICATES });
        }
        match self.content.valid(name, now).count() {
            0..MOST_OF_A_NAME => Ok(()),
            _ => Err(JoinRefusal::TooManyCertificates.into()),
        }
    }

    /// Enters a certificate that was signed, unless it is there.
    pub fn signed(&mut self, facts: &CertificateFacts) {
        if self.content.certificates.iter().any(|one| one.serial == facts.serial) {
            return;
        }
        self.content.certificates.push(SignedEntry {
            name: facts.name.clone(),
            serial: facts.serial.clone(),
            fingerprint: facts.fingerprint.clone(),
            not_after: facts.not_after,
            revoked: None,
        });
    }
}

impl Ledger {
    pub fn path(directory: &Path) -> PathBuf {
        directory.join("ledger.json")
    }

    /// As it is: whoever has no lock changes nothing.
    pub fn read(path: &Path, now: i64) -> Result<Ledger, IdentityError> {
        let malformed = |why: String| IdentityError::Malformed { path: path.to_owned(), why };
        let mut content = match files::read_long(path, WHAT, LONGEST) {
            Err(IdentityError::Missing { .. }) => {
                let (tokens, certificates) = (Vec::new(), Vec::new());
                Ledger { version: VERSION, list_number: 0, since: now, tokens, certificates }
            }
            Err(error) => return Err(error),
            Ok(text) => serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?,
        };
        if content.version != VERSION {
            return Err(malformed(format!(
                "its form is {}, and this program knows {VERSION}",
                content.version
            )));
        }
        let since = now.saturating_sub(REMEMBERED);
        content.tokens.retain(|token| token.until >= since);
        content.certificates.retain(|certificate| certificate.not_after >= since);
        Ok(content)
    }

    /// Whether a token with that secret was made, used or not.
    pub fn knows(&self, secret: &[u8]) -> bool {
        let hash = digest(secret);
        self.tokens.iter().any(|token| token.hash == hash)
    }

    /// Whether the certificate of that number was revoked.
    pub fn revokes(&self, serial: &str) -> bool {
        self.certificates.iter().any(|one| one.serial == serial && one.revoked.is_some())
    }

    /// Whether `list` says all that was revoked, and is not older than the last one.
    pub fn is_said(&self, list: Option<&RevocationList>) -> bool {
        let mut revoked = self.certificates.iter().filter(|one| one.revoked.is_some());
        match list {
            Some(list) => list.number() >= self.list_number && revoked.all(|one| list.revokes(&one.serial)),
            None => self.list_number == 0 && revoked.next().is_none(),
        }
    }

    fn valid(&self, name: &HostName, now: i64) -> impl Iterator<Item = &SignedEntry> {
        self.certificates
            .iter()
            .filter(move |one| one.name == name.as_str() && one.revoked.is_none() && one.not_after >= now)
    }
}

fn digest(secret: &[u8]) -> String {
    hexadecimal(&Sha256::digest(secret))
}
