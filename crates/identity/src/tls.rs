//! An identity in use: what rustls needs of it.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientCertVerifierBuilder, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    ServerConfig, SignatureScheme,
};

use crate::certificate::{CertificateFacts, moment};
use crate::error::IdentityError;
use crate::name::HostName;
use crate::revocation::RevocationList;

/// The identity of a host, read and checked: its certificate was valid then, and signed by the authority that is trusted.
#[derive(Debug)]
pub struct HostIdentity {
    name: HostName,
    host: CertificateFacts,
    authority: CertificateFacts,
    /// It is on the list itself.
    revoked: bool,
    certificates: [CertificateDer<'static>; 2],
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl HostIdentity {
    /// Of the text of a file; `path` is for errors. Valid or not: see [`HostIdentity::check`]. Peers that are on `list` are refused.
    pub(crate) fn parse(
        path: &Path,
        text: &str,
        list: Option<&RevocationList>,
    ) -> Result<HostIdentity, IdentityError> {
        let malformed = |why: String| IdentityError::Malformed { path: path.to_owned(), why };
        let certificates = certificates(text).map_err(malformed)?;
        let certificates: [CertificateDer<'static>; 2] =
            certificates.try_into().map_err(|found: Vec<_>| {
                malformed(format!(
                    "{} certificates: that of the host, then that of the authority are expected",
                    found.len()
                ))
            })?;
        let [host, authority] = &certificates;
        let key = || key(text).map_err(malformed);
        let facts = |certificate| CertificateFacts::of(certificate).map_err(malformed);
        let (host_facts, authority_facts) = (facts(host)?, facts(authority)?);
        let name = host_facts.host().map_err(malformed)?;
        let broken = |error: Error| malformed(error.to_string());
        let provider = Arc::new(default_provider());
        let clients = clients(authority, &provider, list).map_err(malformed)?;
        let clients = clients.build().map_err(|error| malformed(error.to_string()))?;
        let clients = Arc::new(Telling(clients));
        let servers = servers(authority, &provider, list).map_err(malformed)?;
        let server = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13]);
        let mut server = server
            .map_err(broken)?
            .with_client_cert_verifier(clients)
            .with_single_cert(vec![host.clone()], key()?)
            .map_err(broken)?;
        // A client that comes back shows its certificate again: it may have expired since, or be of an authority that has gone.
        server.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let mut client = client
            .map_err(broken)?
            .with_webpki_verifier(servers)
            .with_client_auth_cert(vec![host.clone()], key()?)
            .map_err(broken)?;
        client.resumption = rustls::client::Resumption::disabled();
        Ok(HostIdentity {
            name,
            authority: authority_facts,
            revoked: list.is_some_and(|list| list.revokes(&host_facts.serial)),
            host: host_facts,
            certificates,
            server: Arc::new(server),
            client: Arc::new(client),
        })
    }

    /// Whether it can be used at `now`.
    pub(crate) fn check(&self, path: &Path, now: UnixTime) -> Result<(), IdentityError> {
        let [host, authority] = &self.certificates;
        let path = path.to_owned();
        if self.revoked {
            return Err(IdentityError::Revoked { path });
        }
        let malformed = |why: String| IdentityError::Malformed { path: path.clone(), why };
        let verifier = clients(authority, &Arc::new(default_provider()), None).map_err(malformed)?;
        let verifier = verifier.build().map_err(|error| malformed(error.to_string()))?;
        match verifier.verify_client_cert(host, &[], now) {
            Ok(_) => Ok(()),
            Err(Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            )) => Err(IdentityError::Expired { path, until: moment(self.host.not_after) }),
            Err(Error::InvalidCertificate(
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
            )) => Err(IdentityError::NotYetValid { path, from: moment(self.host.not_before) }),
            Err(Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            )) => {
                let why = format!("{} has not signed it", self.authority.name);
                Err(IdentityError::WrongAuthority { path, why })
            }
            Err(other) => Err(IdentityError::Malformed { path, why: other.to_string() }),
        }
    }

    /// Whose it is.
    pub fn name(&self) -> &HostName {
        &self.name
    }

    /// Its certificate.
    pub fn host(&self) -> &CertificateFacts {
        &self.host
    }

    /// The certificate of the authority that it trusts.
    pub fn authority(&self) -> &CertificateFacts {
        &self.authority
    }

    /// That of the host, and that of the authority.
    pub(crate) fn certificates(&self) -> &[CertificateDer<'static>; 2] {
        &self.certificates
    }

    /// As a server: TLS 1.3, and only with clients that show a certificate of the same authority.
    pub fn server(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }

    /// As a client: TLS 1.3, with servers that show a certificate of the same authority for the name that is asked for.
    pub fn client(&self) -> Arc<ClientConfig> {
        self.client.clone()
    }
}

/// All certificates of a text.
pub(crate) fn certificates(text: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    read.map_err(|error| format!("a certificate cannot be read: {error}"))
}

fn key(text: &str) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(text.as_bytes())
        .map_err(|error| format!("its private key cannot be read: {error}"))
}

fn roots(authority: &CertificateDer<'static>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone()).map_err(|error| format!("its authority's certificate: {error}"))?;
    Ok(roots)
}

fn clients(
    authority: &CertificateDer<'static>,
    provider: &Arc<CryptoProvider>,
    list: Option<&RevocationList>,
) -> Result<ClientCertVerifierBuilder, String> {
    let roots = Arc::new(roots(authority)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
    Ok(verifier.only_check_end_entity_revocation().with_crls(list.map(RevocationList::der)))
}

fn servers(
    authority: &CertificateDer<'static>,
    provider: &Arc<CryptoProvider>,
    list: Option<&RevocationList>,
) -> Result<Arc<WebPkiServerVerifier>, String> {
    let roots = Arc::new(roots(authority)?);
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider.clone());
    let verifier = verifier.only_check_end_entity_revocation().with_crls(list.map(RevocationList::der));
    verifier.build().map_err(|error| error.to_string())
}

/// The server's part of an authority that answers. `text`: certificate, that of the authority, key. It shows both, so that whoever knows the authority by
/// its fingerprint alone can check the first by the second.
pub(crate) fn answering(
    text: &str,
    authority: &CertificateDer<'static>,
    list: Option<&RevocationList>,
) -> Result<Arc<ServerConfig>, String> {
    let provider = Arc::new(default_provider());
    let clients = clients(authority, &provider, list)?.allow_unauthenticated();
    let clients = Arc::new(Telling(clients.build().map_err(|error| error.to_string())?));
    let broken = |error: Error| error.to_string();
    let server = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
    let mut server = server
        .map_err(broken)?
        .with_client_cert_verifier(clients)
        .with_single_cert(certificates(text)?, key(text)?)
        .map_err(broken)?;
    server.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    Ok(Arc::new(server))
}

/// Says in the log who was refused because its certificate is revoked: the error of a handshake does not.
#[derive(Debug)]
struct Telling(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for Telling {
    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.0.verify_client_cert(end_entity, intermediates, now);
        if let Err(Error::InvalidCertificate(CertificateError::Revoked)) = &verified
            && let Ok(CertificateFacts { name, serial, .. }) = CertificateFacts::of(end_entity)
        {
            // The authority has signed the name, so it can be shown.
            tracing::warn!(host = name, serial, "a host is refused: its certificate is revoked");
        }
        verified
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
