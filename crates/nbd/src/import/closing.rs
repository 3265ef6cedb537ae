//! Connections of queues that are gone: ended politely, and waited for.
//!
//! A server may still carry out what a connection has brought. That it has closed its end is all that NBD can tell: it has read the
//! stream to its end. A server that finishes its requests before it closes is quiet then; of others nothing better is known
//! (docs/decisions/0044-remote-requests-once.md).

use std::sync::Arc;
use std::time::Duration;

use super::quiet::Leave;
use super::socket::Socket;
use crate::records::StreamError;
use crate::spec::NBD_CMD_DISC;
use crate::transmission::Request;

/// Ends a connection, and returns when the server has closed it as well, or after `limit`. `idle`: nothing is in flight, so a
/// disconnect request can be sent (section "Terminating the transmission phase"). `_leave` is held until then.
pub(super) async fn see_out(socket: Arc<Socket>, idle: bool, limit: Duration, _leave: Option<Leave>) {
    if idle {
        let request = Request { flags: 0, command: NBD_CMD_DISC, cookie: 0, offset: 0, length: 0 };
        let _ = socket.send_own(&request.encode());
    }
    socket.finish();
    let Ok(Ok(())) = tokio::time::timeout(limit, read_to_end(&socket)).await else {
        tracing::warn!(
            "an NBD server has not closed a connection that ended: what it still does is not known"
        );
        return socket.abort();
    };
}

/// Throws away what the server still sends, so that it is not held up.
async fn read_to_end(socket: &Arc<Socket>) -> std::io::Result<()> {
    let incoming = socket.incoming()?;
    let mut scrap = vec![0; 64 << 10];
    loop {
        match socket.receive_own(&mut scrap) {
            Ok(1..) | Err(StreamError::System(libc::EINTR)) => {}
            // Before the next attempt, which is made until nothing comes.
            Err(StreamError::System(libc::EAGAIN)) => incoming.readable().await?.clear_ready(),
            // The end, or a reset: its end is gone, too.
            Ok(0) | Err(_) => return Ok(()),
        }
    }
}
