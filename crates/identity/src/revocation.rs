//! The list of revoked certificates of an authority: a CRL (RFC 5280, section 5).

use std::collections::BTreeMap;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::revocation_list::CertificateRevocationList;

use crate::certificate::hexadecimal;

/// Longest text of a list, bytes: that of as many certificates as an authority may have.
pub const LONGEST_LIST: usize = 2 << 20;

/// A list, read and checked: the authority has signed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RevocationList {
    der: CertificateRevocationListDer<'static>,
    text: String,
    number: u64,
    authority: CertificateDer<'static>,
    /// When each was revoked, in seconds since 1970, by serial number.
    revoked: BTreeMap<String, i64>,
}

impl RevocationList {
    /// Whether a text (PEM) is a list that another authority than this says it has made. Nothing else of it is checked.
    pub(crate) fn is_foreign(text: &str, authority: &CertificateDer<'_>) -> bool {
        let Ok(der) = CertificateRevocationListDer::from_pem_slice(text.as_bytes()) else { return false };
        let list = CertificateRevocationList::from_der(&der);
        let issuer = X509Certificate::from_der(authority);
        match (list, issuer) {
            (Ok((_, list)), Ok((_, issuer))) => list.issuer().as_raw() != issuer.subject().as_raw(),
            _ => false,
        }
    }

    /// Of a text (PEM, `X509 CRL`). An error says what is wrong with it.
    pub(crate) fn parse(text: &str, authority: &CertificateDer<'static>) -> Result<RevocationList, String> {
        if text.len() > LONGEST_LIST {
            return Err(format!("it is longer than {LONGEST_LIST} bytes"));
        }
        let der = CertificateRevocationListDer::from_pem_slice(text.as_bytes());
        let der = der.map_err(|error| format!("it cannot be read: {error}"))?;
        let broken = |error: x509_parser::nom::Err<_>| format!("it cannot be read: {error}");
        let (rest, parsed) = CertificateRevocationList::from_der(&der).map_err(broken)?;
        if !rest.is_empty() {
            return Err(format!("{} bytes behind it", rest.len()));
        }
        let (_, issuer) = X509Certificate::from_der(authority).map_err(broken)?;
        if parsed.issuer().as_raw() != issuer.subject().as_raw() {
            return Err("another authority has made it".to_owned());
        }
        let signed = parsed.verify_signature(issuer.public_key());
        signed.map_err(|_| "its signature is wrong".to_owned())?;
        let number = parsed.crl_number().ok_or("it has no number")?.to_bytes_be();
        let number =
            number.iter().try_fold(0u64, |sum, byte| sum.checked_mul(256)?.checked_add(u64::from(*byte)));
        let revoked = parsed.iter_revoked_certificates();
        let revoked =
            revoked.map(|one| (hexadecimal(one.raw_serial()), one.revocation_date.timestamp())).collect();
        let number = number.ok_or("its number is too large")?;
        let (text, authority) = (text.to_owned(), authority.clone());
        Ok(RevocationList { der, text, number, authority, revoked })
    }

    /// Each list of an authority has a higher one than the one before.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The serial numbers in hexadecimal, and when each was revoked, in seconds since 1970.
    pub fn revoked(&self) -> impl Iterator<Item = (&str, i64)> {
        self.revoked.iter().map(|(serial, at)| (serial.as_str(), *at))
    }

    /// Whether the certificate of that number is on it.
    pub fn revokes(&self, serial: &str) -> bool {
        self.revoked.contains_key(serial)
    }

    /// As PEM.
    pub fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn der(&self) -> CertificateRevocationListDer<'static> {
        self.der.clone()
    }

    /// Whether the authority has signed both at once: texts may differ in what is around.
    pub(crate) fn is_same(&self, other: &RevocationList) -> bool {
        self.der == other.der
    }

    pub(crate) fn is_of(&self, authority: &CertificateDer<'_>) -> bool {
        self.authority == *authority
    }
}
