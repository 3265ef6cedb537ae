//! What happens, for programs that want to know without asking: `GET /v1/events`.
//!
//! ```text
//!   whoever changes something --tell--> the last ROOM events --> each reader at its own pace
//! ```
//!
//! Telling never waits. A reader that is slower than what happens loses the oldest, and is told how many.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use http_body_util::channel::{Channel, Sender};
use hyper::body::Bytes;
use ioplane_api::operation::JSON_LINES;
use ioplane_api::report::{DaemonEvent, EventWord};
use tokio::sync::broadcast::{self, error::RecvError};

/// Events that are kept for readers that have not come to them.
const ROOM: usize = 256;
/// How long nothing may be sent: whoever has gone is noticed by it.
const QUIET: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub struct Events {
    /// Number of the last one. Held while one is sent, so that they come in order.
    last: Mutex<u64>,
    sender: broadcast::Sender<DaemonEvent>,
}

impl Default for Events {
    fn default() -> Self {
        Events { last: Mutex::default(), sender: broadcast::channel(ROOM).0 }
    }
}

fn event(number: u64, event: EventWord, text: &str) -> DaemonEvent {
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at_ms = u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
    DaemonEvent { number, at_ms, event, kind: None, name: None, text: text.to_owned(), lost: None }
}

impl Events {
    /// Says to everybody who listens what has happened; of the daemon itself if `kind` is empty. Never waits.
    pub fn tell(&self, word: EventWord, kind: &str, name: &str, text: &str) {
        let of = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last += 1;
        // Nobody listens: nothing is kept.
        let _ = self.sender.send(DaemonEvent { kind: of(kind), name: of(name), ..event(*last, word, text) });
    }

    /// A stream of what happens from now on, until the reader goes or `end` comes.
    pub fn stream(&self, end: impl Future<Output = ()> + Send + 'static) -> Response {
        let (events, begun) = {
            let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            let text = format!("process {}", std::process::id());
            (self.sender.subscribe(), event(*last, EventWord::Subscribed, &text))
        };
        let (mut sender, body) = Channel::<Bytes, Infallible>::new(1);
        tokio::spawn(async move {
            let mut last = begun.number;
            if !send(&mut sender, &begun).await {
                return;
            }
            tokio::select! {
                () = pass_on(events, &mut sender, &mut last) => return,
                () = end => {}
            }
            let text = "another process serves everything now: subscribe again";
            send(&mut sender, &event(last, EventWord::Upgraded, text)).await;
        });
        ([(CONTENT_TYPE, JSON_LINES)], Body::new(body)).into_response()
    }
}

/// Sends events until the reader goes.
async fn pass_on(
    mut events: broadcast::Receiver<DaemonEvent>,
    sender: &mut Sender<Bytes, Infallible>,
    last: &mut u64,
) {
    loop {
        let next = match tokio::time::timeout(QUIET, events.recv()).await {
            Ok(Ok(next)) => next,
            Ok(Err(RecvError::Lagged(lost))) => {
                let text = format!("{lost} events were dropped: read how everything is");
                DaemonEvent { lost: Some(lost), ..event(*last, EventWord::Lost, &text) }
            }
            Ok(Err(RecvError::Closed)) => return,
            Err(_) => event(*last, EventWord::Alive, "nothing has happened"),
        };
        *last = next.number;
        if !send(sender, &next).await {
            return;
        }
    }
}

/// Sends one line; whether somebody reads it. Waits while the reader does not.
async fn send(sender: &mut Sender<Bytes, Infallible>, event: &DaemonEvent) -> bool {
    let Ok(mut line) = serde_json::to_vec(event) else { return false };
    line.push(b'\n');
    sender.send_data(line.into()).await.is_ok()
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    async fn next(body: &mut Body) -> DaemonEvent {
        let frame = body.frame().await.unwrap().unwrap();
        serde_json::from_slice(frame.data_ref().unwrap()).unwrap()
    }

    #[tokio::test]
    async fn a_reader_that_is_too_slow_is_told_how_much_it_has_lost() {
        let events = Events::default();
        events.tell(EventWord::Served, "disk", "before", "");
        let mut body = events.stream(std::future::pending()).into_body();
        assert_eq!(
            (next(&mut body).await.event, events.last.lock().map(|last| *last).unwrap()),
            (EventWord::Subscribed, 1)
        );
        let sent = ROOM as u64 + 100;
        for _ in 0..sent {
            events.tell(EventWord::Changed, "disk", "a", "");
        }
        let (mut seen, mut lost, mut last) = (0, 0, 1);
        while last < sent + 1 {
            let event = next(&mut body).await;
            match event.lost {
                Some(some) => lost += some,
                None => {
                    seen += 1;
                    assert!(event.number > last);
                    last = event.number;
                }
            }
        }
        assert_eq!((seen + lost, seen <= sent && lost >= 100 - 2), (sent, true), "{seen} {lost}");
    }

    #[tokio::test]
    async fn the_stream_says_that_it_ends() {
        let events = Events::default();
        let mut body = events.stream(std::future::ready(())).into_body();
        assert_eq!(next(&mut body).await.event, EventWord::Subscribed);
        assert_eq!(next(&mut body).await.event, EventWord::Upgraded);
        assert!(body.frame().await.is_none());
    }
}
