//! A host that joins, renews, or asks for the list of revoked certificates.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ioplane_identity::{
    ANSWERING, HostIdentity, HostName, IdentityDirectory, Installed, JoinRefusal, NewKey, SignedAnswer,
    pinned_client,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::error::JoinError;
use crate::token::{AuthorityPlace, JoinToken};
use crate::wire::{Answer, Ask, LONGEST_ANSWER, LONGEST_REQUEST, Request, VERSION, receive, send};

/// How long a connection may take to be there.
const CONNECTS: Duration = Duration::from_secs(5);
/// How long an answer may take: longer than the authority's host waits for the request.
const ANSWERS: Duration = Duration::from_secs(15);
/// In errors of what came over the network.
const FROM: &str = "the answer of the authority's host";

/// A host that has a new certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joined {
    /// Whose it is.
    pub name: HostName,
    /// Where the authority answered.
    pub place: AuthorityPlace,
    /// Why the list that came along was not taken: it is older than the one that is here.
    pub older_list: Option<String>,
}

/// Makes a key here, has the authority sign it by the token, and makes that the identity of this host. `name`: how the host is to be called, if the token does
/// not say it. `replaces`: also if this host has another name or another authority now. Nothing is asked for that could not be kept.
///
/// # Errors
/// The authority cannot be reached, is another one, or refuses; an identity is here that is another one's. After [`JoinError::AnswerLost`] the token may be used up.
pub async fn join(
    identity: &IdentityDirectory,
    token: &JoinToken,
    name: Option<HostName>,
    replaces: bool,
) -> Result<Joined, JoinError> {
    let name = match (token.host(), name) {
        (Some(wanted), Some(name)) if wanted != name => return Err(JoinRefusal::OtherName.into()),
        (Some(wanted), _) => wanted,
        (None, Some(name)) => name,
        (None, None) => return Err(JoinRefusal::NoName.into()),
    };
    let fingerprint: String = token.authority.iter().map(|byte| format!("{byte:02x}")).collect();
    let (directory, wanted, authority) = (identity.clone(), name.clone(), fingerprint.clone());
    let key = blocking(move || {
        directory.may_replace(Path::new("the token"), Some(&wanted), &authority, replaces)?;
        Ok(NewKey::generate()?)
    });
    let key = key.await?;
    let secret = token.secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let ask = Ask::Join { secret, name: Some(name.to_string()), request: key.request().to_owned() };
    let (answer, place) = ask_one(&token.places, pinned_client(token.authority), ask).await?;
    let taken = take_issued(identity, answer, key, fingerprint, name, replaces, place).await;
    taken.map_err(|error| match error {
        // Nothing was signed, and the reason says what has become of the token.
        JoinError::Refused(refusal) => refusal.into(),
        other => JoinError::AnswerLost(Box::new(other)),
    })
}

/// Makes a new key here and has the authority sign it, by the certificate that this host has. The old one stays valid until its end.
///
/// # Errors
/// The certificate of this host has expired or is revoked (it joins again by a token), or as [`join`].
pub async fn renew(identity: &IdentityDirectory, places: &[AuthorityPlace]) -> Result<Joined, JoinError> {
    let (own, key) = {
        let directory = identity.clone();
        blocking(move || Ok((directory.load_for_asking()?, NewKey::generate()?))).await?
    };
    let ask = Ask::Renew { request: key.request().to_owned() };
    let (answer, place) = ask_one(places, own.client(), ask).await?;
    let (fingerprint, name) = (own.authority().fingerprint.clone(), own.name().clone());
    take_issued(identity, answer, key, fingerprint, name, false, place).await
}

/// Fetches the list of revoked certificates, by the certificate that this host has. Answers its number and whether it is another one than before; `None`: nothing has been
/// revoked.
///
/// # Errors
/// As [`renew`], and if the list is none of the authority's or older than the present one.
pub async fn fetch_revocations(
    identity: &IdentityDirectory,
    places: &[AuthorityPlace],
) -> Result<Option<(u64, bool)>, JoinError> {
    let directory = identity.clone();
    let own: HostIdentity = blocking(move || Ok(directory.load_for_asking()?)).await?;
    match ask_one(places, own.client(), Ask::Revocations).await?.0 {
        Answer::Revocations { list: None } => Ok(None),
        Answer::Revocations { list: Some(list) } => {
            let directory = identity.clone();
            blocking(move || Ok(directory.take_revocations(Path::new(FROM), &list)?)).await.map(Some)
        }
        other => Err(unexpected(other)),
    }
}

async fn take_issued(
    identity: &IdentityDirectory,
    answer: Answer,
    key: NewKey,
    fingerprint: String,
    name: HostName,
    replaces: bool,
    place: AuthorityPlace,
) -> Result<Joined, JoinError> {
    let Answer::Issued { certificate, authority, revocations } = answer else {
        return Err(unexpected(answer));
    };
    let directory = identity.clone();
    let installed = blocking(move || {
        let (list, name) = (revocations.as_deref(), Some(&name));
        let received = SignedAnswer {
            certificate: &certificate,
            authority: &authority,
            list,
            fingerprint: &fingerprint,
            name,
        };
        Ok(directory.install(&received, key.key(), replaces)?)
    });
    let Installed { name, older_list } = installed.await?;
    Ok(Joined { name, place, older_list })
}

fn unexpected(answer: Answer) -> JoinError {
    match answer {
        Answer::Refused(refusal) => refusal.into(),
        other => JoinError::Malformed(format!("an answer to another question: {:.40}", format!("{other:?}"))),
    }
}

/// Asks the first place that answers, once: what was sent may have had its effect.
async fn ask_one(
    places: &[AuthorityPlace],
    tls: Arc<ClientConfig>,
    ask: Ask,
) -> Result<(Answer, AuthorityPlace), JoinError> {
    let mut reasons = Vec::new();
    for place in places {
        let connected = tokio::time::timeout(CONNECTS, connect(place, tls.clone())).await;
        let mut stream = match connected.unwrap_or(Err(JoinError::Slow(CONNECTS))) {
            Ok(stream) => stream,
            Err(error) => {
                reasons.push((place, error));
                continue;
            }
        };
        let token = matches!(ask, Ask::Join { .. });
        let answered = async {
            send(&mut stream, &Request { version: VERSION, ask }, LONGEST_REQUEST).await?;
            receive::<_, Answer>(&mut stream, LONGEST_ANSWER).await
        };
        let answered = tokio::time::timeout(ANSWERS, answered).await;
        return match answered.unwrap_or(Err(JoinError::Slow(ANSWERS))) {
            Ok(answer) => Ok((answer, place.clone())),
            Err(error) if token => Err(JoinError::AnswerLost(Box::new(error))),
            Err(error) => Err(error),
        };
    }
    match reasons.pop() {
        // What is wrong with the one place there is.
        Some((_, error @ JoinError::Tls(_))) if reasons.is_empty() => Err(error),
        last => {
            reasons.extend(last);
            let reasons: Vec<_> = reasons.iter().map(|(place, error)| format!("{place}: {error}")).collect();
            Err(JoinError::Unreachable(reasons.join("; ")))
        }
    }
}

async fn connect(place: &AuthorityPlace, tls: Arc<ClientConfig>) -> Result<TlsStream<TcpStream>, JoinError> {
    let failed = JoinError::stream("connecting");
    let stream = TcpStream::connect((place.host.as_str(), place.port)).await.map_err(&failed)?;
    stream.set_nodelay(true).map_err(&failed)?;
    // A constant that is one.
    let name = ServerName::try_from(ANSWERING).map_err(|error| JoinError::Malformed(error.to_string()))?;
    TlsConnector::from(tls).connect(name, stream).await.map_err(JoinError::stream("starting TLS"))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, JoinError> + Send + 'static,
) -> Result<T, JoinError> {
    tokio::task::spawn_blocking(work).await.map_err(JoinError::gone)?
}
