//! The command line's side of the API: HTTP over the control socket.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use http_body_util::{BodyExt, Full, Limited};
pub use hyper::Method;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use ioplane_api::refusal::{Code, RefusalBody, RefusalKind};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::output::CommandError;

/// Largest answer: the status of some thousand disks.
const ANSWER: usize = 64 << 20;

async fn whole(body: Incoming) -> Result<Bytes> {
    let body = Limited::new(body, ANSWER).collect().await;
    Ok(body.map_err(broken_off)?.to_bytes())
}

fn bad_answer(error: String, remedy: &str) -> CommandError {
    CommandError::new(Code::BadAnswer, error, remedy)
}

fn broken_off(error: impl std::fmt::Display) -> CommandError {
    bad_answer(format!("the daemon's answer broke off: {error}"), "see its log, and `ioplane status`")
}

fn went_away(error: hyper::Error) -> CommandError {
    let remedy = "see its log, and `ioplane status` for what it did";
    bad_answer(format!("the daemon went away before it answered: {error}"), remedy)
}

/// What the daemon refuses, by its answer's status and body.
fn refused(status: u16, body: &[u8]) -> CommandError {
    match serde_json::from_slice::<RefusalBody>(body) {
        // A daemon from before there were codes.
        Ok(old) if old.code.is_empty() => {
            CommandError::new(Code::usual(RefusalKind::of(status)), old.error, old.remedy)
        }
        Ok(body) => CommandError(body),
        Err(_) => bad_answer(format!("the daemon answered {status}"), "is it another version?"),
    }
}

/// Asks one daemon over its control socket. Each call connects anew (but for [`Client::keeping`]) and blocks; no time-out but by [`Client::with_patience`] and in [`Client::stream`]. Errors are
/// [`CommandError`] (by the daemon, or because none answers) or say what broke off. Not to be called inside an async runtime.
pub struct Client {
    socket: PathBuf,
    patience: Option<Duration>,
    /// Of one that keeps its connection: that, while nobody uses it.
    kept: Option<RefCell<Option<Sender>>>,
    runtime: tokio::runtime::Runtime,
}

type Sender = hyper::client::conn::http1::SendRequest<Full<Bytes>>;

impl Client {
    /// Does not connect yet.
    pub fn new(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Client { socket: socket.to_owned(), patience: None, kept: None, runtime })
    }

    /// Each answer may take this long. What was asked may be done all the same.
    pub fn with_patience(self, patience: Duration) -> Self {
        Client { patience: Some(patience), ..self }
    }

    /// Calls go by one connection, as long as that stands: for a daemon that is far away.
    pub fn keeping(self) -> Self {
        Client { kept: Some(RefCell::default()), ..self }
    }

    /// The control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// GET, and what it answers.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.ask(Method::GET, path, None::<&()>)
    }

    /// Sends a request, with a body if there is one, and reads the answer.
    pub fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T> {
        let body = match body {
            Some(body) => serde_json::to_vec(body)?,
            None => Vec::new(),
        };
        let bytes = self.runtime.block_on(self.in_time(method, path, body))?;
        let unexpected = |error: serde_json::Error| {
            format!("the daemon's answer is not what this version expects: {error}")
        };
        serde_json::from_slice(&bytes)
            .map_err(|error| bad_answer(unexpected(error), "is the daemon another version?").into())
    }

    async fn in_time(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes> {
        let Some(patience) = self.patience else { return self.exchange(method, path, body).await };
        let late = |_| {
            let error = format!("the daemon at {} has not answered for {patience:?}", self.socket.display());
            CommandError::new(Code::Unreachable, error, "see its log, and whether the way to it is open")
        };
        tokio::time::timeout(patience, self.exchange(method, path, body)).await.map_err(late)?
    }

    async fn exchange(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes> {
        let (sender, answer) = self.send(method, path, body).await?;
        let answer = whole(answer).await?;
        if let Some(kept) = &self.kept {
            *kept.borrow_mut() = Some(sender);
        }
        Ok(answer)
    }

    async fn connect(&self) -> Result<Sender> {
        let stream =
            tokio::net::UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(&error))?;
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken_off)?;
        tokio::spawn(connection);
        Ok(sender)
    }

    /// Sends a request; its answer's body, unless it is a refusal, and what it was sent by.
    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<(Sender, Incoming)> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "ioplane")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| {
                CommandError::new(
                    Code::Usage,
                    format!("a name that fits no address: {error}"),
                    "give another",
                )
            })?;
        let (sender, answer) = match self.standing().await {
            Some(mut sender) => match sender.try_send_request(request).await {
                Ok(answer) => (sender, answer),
                Err(mut error) => match error.take_message() {
                    // The connection had gone before anything was sent.
                    Some(unsent) => self.send_anew(unsent).await?,
                    None => return Err(went_away(error.into_error()).into()),
                },
            },
            None => self.send_anew(request).await?,
        };
        let status = answer.status();
        if status.is_success() {
            return Ok((sender, answer.into_body()));
        }
        Err(refused(status.as_u16(), &whole(answer.into_body()).await?).into())
    }

    /// The connection that was kept, if it still stands.
    async fn standing(&self) -> Option<Sender> {
        let mut sender = self.kept.as_ref()?.borrow_mut().take()?;
        sender.ready().await.is_ok().then_some(sender)
    }

    async fn send_anew(&self, request: Request<Full<Bytes>>) -> Result<(Sender, Response<Incoming>)> {
        let mut sender = self.connect().await?;
        let answer = sender.send_request(request).await.map_err(went_away)?;
        Ok((sender, answer))
    }

    /// GET of a body without an end: gives `part` each piece as it comes. Ends without an error when `part` answers false, after `limit`,
    /// at Ctrl-C, or when the daemon closes.
    pub fn stream(
        &self,
        path: &str,
        limit: Duration,
        mut part: impl FnMut(&[u8]) -> Result<bool>,
    ) -> Result<()> {
        self.runtime.block_on(async {
            let (_sender, mut body) = self.send(Method::GET, path, Vec::new()).await?;
            let over = tokio::time::sleep(limit);
            let interrupt = tokio::signal::ctrl_c();
            tokio::pin!(over, interrupt);
            loop {
                let frame = tokio::select! {
                    frame = body.frame() => frame,
                    () = &mut over => return Ok(()),
                    _ = &mut interrupt => return Ok(()),
                };
                let Some(frame) = frame else { return Ok(()) };
                let frame = frame.map_err(broken_off)?;
                if let Some(bytes) = frame.data_ref()
                    && !part(bytes)?
                {
                    return Ok(());
                }
            }
        })
    }

    fn unreachable(&self, error: &std::io::Error) -> CommandError {
        let socket = self.socket.display();
        let remedy = match error.kind() {
            std::io::ErrorKind::PermissionDenied => "the control socket is root's: use sudo".to_owned(),
            _ => format!(
                "start it: ioplane serve --config ioplane.toml --socket {socket}; or name its socket with --socket"
            ),
        };
        let error = format!("no daemon answers on {socket}: {error}");
        CommandError::new(Code::Unreachable, error, remedy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_daemon_answers_has_a_code() {
        let CommandError(now) = refused(409, br#"{"error": "no", "remedy": "wait", "code": "in_use"}"#);
        assert_eq!((now.code.as_str(), now.remedy.as_str()), ("in_use", "wait"));
        let CommandError(old) = refused(503, br#"{"error": "no", "remedy": "wait"}"#);
        assert_eq!((old.code.as_str(), old.retryable, old.error.as_str()), ("busy", true, "no"));
        let CommandError(other) = refused(502, b"<html>");
        assert_eq!((other.code.as_str(), other.error.as_str()), ("bad_answer", "the daemon answered 502"));
    }
}
