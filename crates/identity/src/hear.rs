//! How a client that was refused is told why.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

/// Ends a connection such that what was sent arrives, the alert of a refused handshake too: a connection that is closed with something unread is reset, and
/// what was sent would be lost. Waits for the peer's end, for `patience` at most.
pub async fn let_hear(mut stream: TcpStream, patience: Duration) {
    let ended = async {
        let _ = stream.shutdown().await;
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    };
    let _ = tokio::time::timeout(patience, ended).await;
}
