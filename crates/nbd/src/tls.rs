//! TLS: the identity by which it starts. Its records in the transmission phase are [`crate::records`].

use std::io::Error;

use ioplane_identity::{HostIdentity, IdentityDirectory, TlsFault};

use crate::error::NbdError;

/// An error of a stream that TLS may have a part in.
pub(crate) fn stream_error(doing: &'static str) -> impl Fn(Error) -> NbdError {
    move |source| match TlsFault::of(&source) {
        Some(fault) => NbdError::Tls(fault),
        None => NbdError::Os { doing, source },
    }
}

/// Reads the identity of this host: a few small files.
pub(crate) async fn load(directory: &IdentityDirectory) -> Result<HostIdentity, NbdError> {
    let directory = directory.clone();
    let loaded = tokio::task::spawn_blocking(move || directory.load()).await;
    let gone =
        |error: tokio::task::JoinError| NbdError::Os { doing: "reading an identity", source: error.into() };
    Ok(loaded.map_err(gone)??)
}
