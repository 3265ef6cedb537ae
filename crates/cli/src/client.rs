//! The command line's side of the API: HTTP over the control socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use ioplane_api::refusal::{Code, RefusalBody};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest answer: the status of some thousand disks.
const ANSWER: usize = 64 << 20;

/// A refusal by the daemon. For a person; for a program it is JSON as the daemon has it, with its code.
#[derive(Debug, thiserror::Error)]
#[error("{error}\n  to do: {remedy}", error = .0.error, remedy = .0.remedy)]
pub struct Refused(pub RefusalBody);

async fn whole(body: Incoming) -> Result<Bytes> {
    let body = Limited::new(body, ANSWER).collect().await;
    Ok(body.map_err(|error| anyhow::anyhow!("the daemon's answer broke off: {error}"))?.to_bytes())
}

/// Asks the daemon behind one control socket.
pub struct Client {
    socket: PathBuf,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    /// Nothing is asked yet.
    pub fn new(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Client { socket: socket.to_owned(), runtime })
    }

    /// Reads a resource.
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
        let bytes = self.runtime.block_on(self.exchange(method, path, body))?;
        serde_json::from_slice(&bytes)
            .context("the daemon's answer is not what this version expects: is it another version?")
    }

    async fn exchange(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes> {
        whole(self.send(method, path, body).await?).await
    }

    /// Sends a request; its answer's body, unless it is a refusal.
    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Incoming> {
        let stream =
            tokio::net::UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(&error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "ioplane")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .context("a name that fits no address")?;
        let answer = sender.send_request(request).await.context(
            "the daemon went away before it answered; see its log, and `ioplane status` for what it did",
        )?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer.into_body());
        }
        match serde_json::from_slice(&whole(answer.into_body()).await?) {
            Ok(refusal) => Err(Refused(refusal).into()),
            Err(_) => anyhow::bail!("the daemon answered {status}"),
        }
    }

    /// Reads a resource as it comes, until `part` has enough, `limit` is over, or somebody interrupts.
    pub fn stream(
        &self,
        path: &str,
        limit: Duration,
        mut part: impl FnMut(&[u8]) -> Result<bool>,
    ) -> Result<()> {
        self.runtime.block_on(async {
            let mut body = self.send(Method::GET, path, Vec::new()).await?;
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
                let frame =
                    frame.map_err(|error| anyhow::anyhow!("the daemon's answer broke off: {error}"))?;
                if let Some(bytes) = frame.data_ref()
                    && !part(bytes)?
                {
                    return Ok(());
                }
            }
        })
    }

    fn unreachable(&self, error: &std::io::Error) -> Refused {
        let socket = self.socket.display();
        let remedy = match error.kind() {
            std::io::ErrorKind::PermissionDenied => "the control socket is root's: use sudo".to_owned(),
            _ => format!(
                "start it: ioplane serve --config ioplane.toml --socket {socket}; or name its socket with --socket"
            ),
        };
        let error = format!("no daemon answers on {socket}: {error}");
        Refused(RefusalBody::new(Code::Unreachable, error, remedy))
    }
}
