//! What a certificate says.

use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::name::HostName;

/// What a person, or a list of who may do what, wants to know of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// The first DNS name that it is for; the common name of an authority's.
    pub name: String,
    /// SHA-256 of the whole certificate, in hexadecimal.
    pub fingerprint: String,
    /// Its number, unlike that of any other certificate of its authority.
    pub serial: String,
    /// Seconds since 1970.
    pub not_before: i64,
    /// Seconds since 1970.
    pub not_after: i64,
}

impl CertificateFacts {
    /// Reads them. An error says what is wrong with it.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<CertificateFacts, String> {
        let (rest, parsed) = X509Certificate::from_der(certificate).map_err(|error| error.to_string())?;
        if !rest.is_empty() {
            return Err(format!("{} bytes behind a certificate", rest.len()));
        }
        let names = parsed.subject_alternative_name().map_err(|error| error.to_string())?;
        let names = names.iter().flat_map(|names| &names.value.general_names);
        let host = names.into_iter().find_map(|name| match name {
            GeneralName::DNSName(name) => Some((*name).to_owned()),
            _ => None,
        });
        let common = || parsed.subject().iter_common_name().next()?.as_str().ok().map(str::to_owned);
        Ok(CertificateFacts {
            name: host.or_else(common).ok_or("a certificate without a name")?,
            fingerprint: hexadecimal(&Sha256::digest(certificate)),
            serial: hexadecimal(parsed.raw_serial()),
            not_before: parsed.validity().not_before.timestamp(),
            not_after: parsed.validity().not_after.timestamp(),
        })
    }

    /// The fingerprint as bytes. `None` if this was not made by [`CertificateFacts::of`].
    pub fn sha256(&self) -> Option<[u8; 32]> {
        let mut bytes = [0; 32];
        if self.fingerprint.len() != 64 || !self.fingerprint.is_ascii() {
            return None;
        }
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&self.fingerprint[2 * at..2 * at + 2], 16).ok()?;
        }
        Some(bytes)
    }

    /// The host that it is for.
    pub fn host(&self) -> Result<HostName, String> {
        self.name.parse().map_err(|error| format!("{error}"))
    }
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A moment, as people write it.
pub fn moment(seconds: i64) -> String {
    OffsetDateTime::from_unix_timestamp(seconds).map_or_else(
        |_| format!("{seconds} s after 1970"),
        |at| {
            let (date, time) = (at.date(), at.time());
            format!(
                "{}-{:02}-{:02} {:02}:{:02} UTC",
                date.year(),
                u8::from(date.month()),
                date.day(),
                time.hour(),
                time.minute()
            )
        },
    )
}
