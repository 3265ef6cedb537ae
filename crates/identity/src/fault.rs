//! Why TLS did not start, or ended.

use rustls::{AlertDescription, CertificateError, Error};

/// What the handshake of TLS came to, by name. The side that checks a certificate says what is wrong with it; the other side is told in an alert.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsFault {
    /// The peer's certificate is too old.
    #[error("the peer's certificate has expired: renew it there")]
    Expired,
    /// The peer's certificate is too young.
    #[error("the peer's certificate is not yet valid: are the clocks of both hosts right?")]
    NotYetValid,
    /// Another authority has signed the peer's certificate.
    #[error("the peer's certificate is of another authority than this host's")]
    WrongAuthority,
    /// The authority has revoked the peer's certificate.
    #[error("the peer's certificate has been revoked by the authority")]
    Revoked,
    /// The peer is another host than it should be.
    #[error("the peer's certificate is for another host than the one that was asked for{0}")]
    WrongHost(String),
    /// The peer has no certificate.
    #[error("the peer has shown no certificate")]
    Missing,
    /// Anything else about the peer's certificate.
    #[error("the peer's certificate cannot be used: {0}")]
    Certificate(String),
    /// The peer refuses ours.
    #[error("the peer refuses this host's certificate: {0}")]
    Refused(&'static str),
    /// The stream was cut off, or changed on its way.
    #[error("TLS ended: {0}")]
    Ended(String),
}

impl TlsFault {
    /// Of an error that reading from a stream, writing to it, or starting TLS on it has returned. `None` if TLS has no part in it.
    pub fn of(error: &std::io::Error) -> Option<TlsFault> {
        error.get_ref()?.downcast_ref::<Error>().map(TlsFault::from)
    }
}

impl From<&Error> for TlsFault {
    fn from(error: &Error) -> TlsFault {
        use AlertDescription as Alert;
        match error {
            Error::InvalidCertificate(bad) => match bad {
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => TlsFault::Expired,
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    TlsFault::NotYetValid
                }
                CertificateError::UnknownIssuer | CertificateError::BadSignature => TlsFault::WrongAuthority,
                CertificateError::Revoked => TlsFault::Revoked,
                CertificateError::NotValidForName => TlsFault::WrongHost(String::new()),
                CertificateError::NotValidForNameContext { expected, presented } => TlsFault::WrongHost(
                    format!(": {} was asked for, it is for {}", expected.to_str(), presented.join(", ")),
                ),
                other => TlsFault::Certificate(other.to_string()),
            },
            Error::NoCertificatesPresented => TlsFault::Missing,
            Error::AlertReceived(alert) => match alert {
                Alert::CertificateExpired => TlsFault::Refused("it has expired or is not yet valid"),
                Alert::CertificateRevoked => TlsFault::Refused("its authority has revoked it"),
                Alert::UnknownCA => TlsFault::Refused("it is of another authority than the peer's"),
                Alert::CertificateRequired => TlsFault::Refused("it has shown none"),
                Alert::BadCertificate | Alert::CertificateUnknown | Alert::UnsupportedCertificate => {
                    TlsFault::Refused("it is for another host, or malformed")
                }
                other => TlsFault::Ended(format!("the peer sent the alert {other:?}")),
            },
            other => TlsFault::Ended(other.to_string()),
        }
    }
}
