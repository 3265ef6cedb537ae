//! Captures: frames of one port as a stream of pcapng, until whoever asked for it goes away.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use http_body_util::channel::{Channel, Sender};
use hyper::body::Bytes;
use ioplane_network::{Capture, CaptureOptions, Direction};
use serde::Deserialize;

use super::switches::Switches;
use crate::pcapng;
use crate::refusal::Refusal;

/// How often what has been captured is fetched.
const FETCH: Duration = Duration::from_millis(20);
/// How often the statistics are written, also into a capture without frames: whoever has gone is noticed by it.
const STATISTICS: Duration = Duration::from_secs(1);
/// Bytes that are sent at a time.
const CHUNK: usize = 64 << 10;
/// Memory for frames that wait to be fetched, and most of them.
const ROOM: usize = 32 << 20;
const FRAMES: usize = 16 << 10;
/// Bytes of a frame that can be asked for: all of the longest.
const SNAPLEN: usize = ioplane_network::LONGEST;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CaptureQuery {
    /// First bytes of each frame.
    snaplen: usize,
}

impl Default for CaptureQuery {
    fn default() -> Self {
        CaptureQuery { snaplen: 2048 }
    }
}

/// Begins a capture of the port `name`, a NIC or an uplink; `end` ends it.
pub fn begin(
    switches: &Arc<Switches>,
    name: &str,
    query: &CaptureQuery,
    end: impl Future<Output = ()> + Send + 'static,
) -> Result<Response, Refusal> {
    let CaptureQuery { snaplen } = *query;
    if !(64..=SNAPLEN).contains(&snaplen) {
        return Err(Refusal::invalid(format!("snaplen = {snaplen}"), format!("give 64 to {SNAPLEN}")));
    }
    let options = CaptureOptions { snaplen, frames: (ROOM / snaplen).min(FRAMES) };
    let capture = switches.with_port(name)?.capture(name, options)?;
    tracing::info!(port = name, snaplen, "capturing");
    let (sender, body) = Channel::<Bytes, Infallible>::new(4);
    let passing = pass_on(capture, sender, snaplen as u32);
    tokio::spawn(async move {
        tokio::select! {
            () = passing => {}
            () = end => {}
        }
    });
    Ok(([(CONTENT_TYPE, "application/x-pcapng")], Body::new(body)).into_response())
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Sends frames until the receiver has gone. While that one does not read, frames wait in the capture's ring, and those for
/// which there is no room are counted.
async fn pass_on(mut capture: Capture, mut sender: Sender<Bytes, Infallible>, snaplen: u32) {
    let mut chunk = pcapng::head(capture.port(), snaplen);
    let (mut seen, mut said) = (0, Duration::ZERO);
    loop {
        for frame in &mut capture {
            seen += 1;
            let inbound = frame.direction == Direction::Received;
            let ns = u64::try_from(frame.at.as_nanos()).unwrap_or(u64::MAX);
            chunk.extend(pcapng::packet(ns, inbound, frame.len as u32, &frame.bytes));
            if chunk.len() >= CHUNK {
                break;
            }
        }
        let full = chunk.len() >= CHUNK;
        if now().saturating_sub(said) >= STATISTICS {
            said = now();
            let (lost, ns) = (capture.overflow(), u64::try_from(said.as_nanos()).unwrap_or(u64::MAX));
            chunk.extend(pcapng::statistics(ns, seen + lost, lost));
        }
        if !chunk.is_empty() && sender.send_data(Bytes::from(std::mem::take(&mut chunk))).await.is_err() {
            break;
        }
        if !full {
            tokio::time::sleep(FETCH).await;
        }
    }
    tracing::info!(port = capture.port(), frames = seen, lost = capture.overflow(), "the capture has ended");
}
