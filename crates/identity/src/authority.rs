//! The authority: makes certificates.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SerialNumber,
};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use time::{Duration, OffsetDateTime};

use crate::error::IdentityError;
use crate::name::HostName;

/// How long an authority is valid.
const AUTHORITY_DAYS: u32 = 3653;
/// How far the clocks of two hosts may be apart.
const CLOCKS: Duration = Duration::hours(1);

/// From when to when a certificate is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// First moment.
    pub from: OffsetDateTime,
    /// Last moment.
    pub until: OffsetDateTime,
}

impl Validity {
    /// So many days from now on. It begins an hour ago: clocks differ.
    pub fn days(days: u32) -> Validity {
        let now = OffsetDateTime::now_utc();
        Validity { from: now - CLOCKS, until: now.saturating_add(Duration::days(days.into())) }
    }
}

impl Default for Validity {
    /// A year.
    fn default() -> Self {
        Validity::days(365)
    }
}

fn making(error: impl std::fmt::Display) -> IdentityError {
    IdentityError::Making(error.to_string())
}

/// Random, so that no two certificates of an authority have the same, also if it is restored from a backup.
fn serial() -> Result<SerialNumber, IdentityError> {
    let mut bytes = [0; 16];
    default_provider().secure_random.fill(&mut bytes).map_err(|_| making("no random numbers"))?;
    // A positive number (RFC 5280, section 4.1.2.2).
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

fn parameters(
    names: Vec<String>,
    common: &str,
    validity: Validity,
) -> Result<CertificateParams, IdentityError> {
    let mut parameters = CertificateParams::new(names).map_err(making)?;
    parameters.distinguished_name = DistinguishedName::new();
    parameters.distinguished_name.push(DnType::CommonName, common);
    (parameters.not_before, parameters.not_after) = (validity.from, validity.until);
    parameters.serial_number = Some(serial()?);
    Ok(parameters)
}

/// Certificate and key of a new authority, as PEM.
pub fn found(name: &HostName) -> Result<String, IdentityError> {
    // Two authorities are told apart by their names, too: an error then says which one has signed.
    let mut number = [0; 4];
    default_provider().secure_random.fill(&mut number).map_err(|_| making("no random numbers"))?;
    let common = format!("ioplane authority of {name} {:08x}", u32::from_be_bytes(number));
    let mut parameters = parameters(Vec::new(), &common, Validity::days(AUTHORITY_DAYS))?;
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate().map_err(making)?;
    let certificate = parameters.self_signed(&key).map_err(making)?;
    Ok(certificate.pem() + &key.serialize_pem())
}

/// Certificate and key of a host, and the certificate of the authority, as PEM. `authority`: what [`found`] has made.
pub fn issue(authority: &str, host: &HostName, validity: Validity) -> Result<String, IdentityError> {
    let key = PrivateKeyDer::from_pem_slice(authority.as_bytes()).map_err(making)?;
    let certificate = CertificateDer::from_pem_slice(authority.as_bytes()).map_err(making)?;
    let key = KeyPair::try_from(&key).map_err(making)?;
    let issuer = Issuer::from_ca_cert_der(&certificate, key).map_err(making)?;
    let mut parameters = parameters(vec![host.to_string()], host.as_str(), validity)?;
    parameters.use_authority_key_identifier_extension = true;
    parameters.is_ca = IsCa::ExplicitNoCa;
    // TLS 1.3 needs the first only; QEMU before version 10.1 refuses certificates without the second.
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    // Each host is a server of what it publishes and a client of what it imports.
    parameters.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let own = KeyPair::generate().map_err(making)?;
    let certificate = parameters.signed_by(&own, &issuer).map_err(making)?;
    let authority = authority_certificate(authority)?;
    Ok(certificate.pem() + &authority + &own.serialize_pem())
}

/// Of certificate and key the certificate.
fn authority_certificate(pem: &str) -> Result<String, IdentityError> {
    const END: &str = "-----END CERTIFICATE-----";
    let end = pem.find(END).ok_or_else(|| making("the authority has no certificate"))?;
    let begin = pem.find("-----BEGIN CERTIFICATE-----").filter(|begin| *begin < end);
    let begin = begin.ok_or_else(|| making("the authority has no certificate"))?;
    Ok(pem[begin..end + END.len()].to_owned() + "\n")
}
