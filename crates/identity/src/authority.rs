//! The authority: makes certificates.

use std::collections::BTreeMap;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertificateSigningRequestParams,
    DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKey, PublicKeyData, RevocationReason, RevokedCertParams, SerialNumber,
};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use time::{Duration, OffsetDateTime};

use crate::error::IdentityError;
use crate::name::{ANSWERING, HostName};
use crate::refusal::JoinRefusal;

/// How long an authority is valid.
const AUTHORITY_DAYS: u32 = 3653;
/// How far the clocks of two hosts may be apart.
pub(crate) const CLOCKS: Duration = Duration::hours(1);

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

/// Signs in the name of an authority. `authority`: what [`found`] has made.
fn issuer(authority: &str) -> Result<Issuer<'static, KeyPair>, IdentityError> {
    let key = PrivateKeyDer::from_pem_slice(authority.as_bytes()).map_err(making)?;
    let certificate = CertificateDer::from_pem_slice(authority.as_bytes()).map_err(making)?;
    let key = KeyPair::try_from(&key).map_err(making)?;
    Issuer::from_ca_cert_der(&certificate, key).map_err(making)
}

/// A certificate of that name for a key (PEM).
fn certify(
    authority: &str,
    key: &impl PublicKeyData,
    name: &str,
    validity: Validity,
) -> Result<String, IdentityError> {
    let mut parameters = parameters(vec![name.to_owned()], name, validity)?;
    parameters.use_authority_key_identifier_extension = true;
    parameters.is_ca = IsCa::ExplicitNoCa;
    // TLS 1.3 needs the first only; QEMU before version 10.1 refuses certificates without the second.
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    // Each host is a server of what it publishes and a client of what it imports.
    parameters.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    Ok(parameters.signed_by(key, &issuer(authority)?).map_err(making)?.pem())
}

/// Certificate and key of a host, and the certificate of the authority, as PEM. `authority`: what [`found`] has made.
pub fn issue(authority: &str, host: &HostName, validity: Validity) -> Result<String, IdentityError> {
    issue_named(authority, host.as_str(), validity)
}

/// The same under the name that is no host's.
pub fn answering(authority: &str, validity: Validity) -> Result<String, IdentityError> {
    issue_named(authority, ANSWERING, validity)
}

fn issue_named(authority: &str, name: &str, validity: Validity) -> Result<String, IdentityError> {
    let own = KeyPair::generate().map_err(making)?;
    let certificate = certify(authority, &own, name, validity)?;
    Ok(certificate + &authority_certificate(authority)? + &own.serialize_pem())
}

/// Who asks for a certificate: a public key, whose private key the asker has. What else a request says does not count.
#[derive(Debug, Clone)]
pub struct SigningRequest(PublicKey);

/// Bytes of a public key of P-256, uncompressed: a mark and two coordinates.
const POINT: usize = 65;
/// Longest text of a request, bytes.
pub const LONGEST_REQUEST: usize = 8 << 10;

impl SigningRequest {
    /// Of a certificate signing request (PKCS #10, RFC 2986) as PEM, whose signature is checked.
    ///
    /// # Errors
    /// [`JoinRefusal::BadRequest`]: it is too long, malformed, wrongly signed, or for another kind of key than ours.
    pub fn parse(text: &str) -> Result<SigningRequest, JoinRefusal> {
        if text.len() > LONGEST_REQUEST {
            return Err(JoinRefusal::BadRequest);
        }
        let request = CertificateSigningRequestParams::from_pem(text).map_err(|_| JoinRefusal::BadRequest)?;
        let key = request.public_key;
        // The algorithm is that of the signature, which says nothing of the curve. A point of 65 bytes (RFC 5480, section 2.2), whose signature was right, is
        // one of P-256: what checks signatures knows no other curve with such points.
        let point = key.der_bytes().len() == POINT && key.der_bytes().first() == Some(&4);
        match PublicKeyData::algorithm(&key) == &PKCS_ECDSA_P256_SHA256 && point {
            true => Ok(SigningRequest(key)),
            false => Err(JoinRefusal::BadRequest),
        }
    }
}

/// A key pair that is made here and whose private half stays here.
pub struct NewKey {
    key: String,
    request: String,
}

impl std::fmt::Debug for NewKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewKey").finish_non_exhaustive()
    }
}

impl NewKey {
    /// Makes one.
    ///
    /// # Errors
    /// There are no random numbers.
    pub fn generate() -> Result<NewKey, IdentityError> {
        let key = KeyPair::generate().map_err(making)?;
        let parameters = CertificateParams::new(Vec::new()).map_err(making)?;
        let request = parameters.serialize_request(&key).map_err(making)?.pem().map_err(making)?;
        Ok(NewKey { key: key.serialize_pem(), request })
    }

    /// The private key (PEM).
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The certificate signing request (PEM): the public key, and a signature that says who has the private one.
    pub fn request(&self) -> &str {
        &self.request
    }
}

/// A certificate for the key of a request (PEM). The name is not the request's to choose.
pub fn sign(
    authority: &str,
    request: &SigningRequest,
    host: &HostName,
    validity: Validity,
) -> Result<String, IdentityError> {
    certify(authority, &request.0, host.as_str(), validity)
}

/// A list of revoked certificates (PEM). `revoked`: serial numbers in hexadecimal, and when, in seconds since 1970.
pub fn revocation_list(
    authority: &str,
    number: u64,
    revoked: &BTreeMap<String, i64>,
) -> Result<String, IdentityError> {
    let now = OffsetDateTime::now_utc();
    let entry = |(serial, at): (&String, &i64)| {
        Ok(RevokedCertParams {
            serial_number: SerialNumber::from(bytes(serial).ok_or_else(|| making("a bad serial number"))?),
            revocation_time: OffsetDateTime::from_unix_timestamp(*at).map_err(making)?,
            reason_code: Some(RevocationReason::Unspecified),
            invalidity_date: None,
        })
    };
    let list = CertificateRevocationListParams {
        this_update: now,
        // RFC 5280 wants one. No list of ours is too old to be used: a host that cannot fetch a newer one keeps its disks.
        next_update: now.saturating_add(Duration::days(AUTHORITY_DAYS.into())),
        crl_number: SerialNumber::from(number),
        issuing_distribution_point: None,
        revoked_certs: revoked.iter().map(entry).collect::<Result<_, IdentityError>>()?,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    list.signed_by(&issuer(authority)?).map_err(making)?.pem().map_err(making)
}

/// A serial number: at most 20 bytes (RFC 5280, section 4.1.2.2), in hexadecimal.
fn bytes(serial: &str) -> Option<Vec<u8>> {
    let digits = serial.is_ascii() && serial.len().is_multiple_of(2) && (2..=40).contains(&serial.len());
    let pair = |at: usize| u8::from_str_radix(&serial[at..at + 2], 16).ok();
    if digits { (0..serial.len()).step_by(2).map(pair).collect() } else { None }
}

/// Of certificate and key the certificate.
pub fn authority_certificate(pem: &str) -> Result<String, IdentityError> {
    const END: &str = "-----END CERTIFICATE-----";
    let end = pem.find(END).ok_or_else(|| making("the authority has no certificate"))?;
    let begin = pem.find("-----BEGIN CERTIFICATE-----").filter(|begin| *begin < end);
    let begin = begin.ok_or_else(|| making("the authority has no certificate"))?;
    Ok(pem[begin..end + END.len()].to_owned() + "\n")
}
