//! `session`: a subscriber that says anything to the host of a device, and such a host that says anything to a subscriber.
//!
//! Oracles: no panic on either side; each side ends within its limits; what a subscriber tells may be shown on a terminal, and is of a device that was
//! asked for; no subscription outlives its session.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use ioplane_netbus::control::{
    DeviceNews, DevicePresence, DeviceState, Publications, PublisherLink, SessionTiming, Subscriber, serve,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::watch;

use crate::Signature;
use crate::directory::framed;

/// Longer than any limit of a session.
const PATIENCE: Duration = Duration::from_secs(60);

fn timing() -> SessionTiming {
    SessionTiming {
        keep_alive: Duration::from_secs(1),
        silence: Duration::from_secs(5),
        patience: Duration::from_secs(5),
        retry: (Duration::from_secs(30), Duration::from_secs(30)),
    }
}

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let mut input = Unstructured::new(data);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let talk = async {
        if input.arbitrary().unwrap_or(true) {
            bad_subscriber(&mut input, &mut signature).await;
        } else {
            bad_publisher(&mut input, &mut signature).await;
        }
    };
    runtime.block_on(async { tokio::time::timeout(PATIENCE, talk).await }).expect("it does not end");
    signature.value()
}

/// A text as a message may have it, or not, as JSON.
fn text(input: &mut Unstructured<'_>) -> Result<String> {
    Ok(match input.int_in_range(0..=6)? {
        0 | 1 => r#""a""#.to_owned(),
        2 => r#""../../etc/passwd""#.to_owned(),
        3 => r#""\u001b[2J\u0007""#.to_owned(),
        4 => format!("\"{}\"", "x".repeat(input.int_in_range(0..=3000)?)),
        5 => "null".to_owned(),
        _ => format!("{:?}", input.arbitrary::<String>()?),
    })
}

fn message(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let said = match input.int_in_range(0..=9)? {
        0 => format!(r#"{{"say":"hello","version":{}}}"#, input.int_in_range(0..=2)?),
        1 | 2 => format!(r#"{{"say":"subscribe","device":{}}}"#, text(input)?),
        3 => format!(r#"{{"say":"unsubscribe","device":{}}}"#, text(input)?),
        4 => format!(r#"{{"say":"ping","number":{}}}"#, input.arbitrary::<u64>()?),
        5 => format!(r#"{{"say":"welcome","version":{}}}"#, input.int_in_range(0..=2)?),
        6 | 7 => {
            let presence = *input.choose(&["served", "withdrawn", "stopping", "elsewhere"])?;
            format!(
                r#"{{"say":"state","device":{},"state":{{"kind":{},"incarnation":{},"units":{},"presence":{presence:?},"trouble":{},"holder":{}}}}}"#,
                text(input)?,
                text(input)?,
                text(input)?,
                input.arbitrary::<u64>()?,
                text(input)?,
                text(input)?,
            )
        }
        8 => format!(r#"{{"say":"refused","device":{},"why":{}}}"#, text(input)?, text(input)?),
        _ => r#"{"say":"bye"}"#.to_owned(),
    };
    framed(input, &said)
}

/// `first`, if it is said, and a few messages.
fn messages(input: &mut Unstructured<'_>, first: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    if input.ratio(7, 8).unwrap_or(true) {
        bytes.extend((first.len() as u32).to_be_bytes());
        bytes.extend(first.as_bytes());
    }
    for _ in 0..input.int_in_range(0..=8).unwrap_or(0) {
        bytes.extend(message(input).unwrap_or_default());
    }
    bytes
}

struct OneDevice(watch::Sender<DeviceState>);

impl Publications for OneDevice {
    fn subscribe(&self, device: &str) -> std::result::Result<watch::Receiver<DeviceState>, String> {
        if device == "a" { Ok(self.0.subscribe()) } else { Err("there is none".to_owned()) }
    }
}

async fn bad_subscriber(input: &mut Unstructured<'_>, signature: &mut Signature) {
    let host = OneDevice(watch::Sender::new(DeviceState {
        kind: "byte-stream".to_owned(),
        incarnation: "1".to_owned(),
        units: 1,
        presence: DevicePresence::Served,
        trouble: None,
        holder: None,
    }));
    let said = messages(input, r#"{"say":"hello","version":1}"#);
    let (mut near, far) = duplex(4096);
    let talk = async {
        let (mut reads, mut writes) = tokio::io::split(&mut near);
        let write = async {
            let _ = writes.write_all(&said).await;
            let _ = writes.shutdown().await;
        };
        let mut heard = Vec::new();
        let (_, _) = tokio::join!(write, reads.read_to_end(&mut heard));
        heard
    };
    let (served, heard) = tokio::join!(serve(far, &host, timing(), std::future::pending()), talk);
    signature.saw(if served.is_ok() { "ended" } else { "broken" });
    let heard = String::from_utf8_lossy(&heard);
    for word in ["welcome", "state", "refused", "pong"] {
        if heard.contains(word) {
            signature.saw(word);
        }
    }
    // Its tasks end when the runtime comes to them.
    tokio::task::yield_now().await;
    assert_eq!(host.0.receiver_count(), 0, "a subscription has outlived its session");
}

/// A publisher that is reached once.
struct Once(Mutex<Option<DuplexStream>>, Sender<()>, Sender<&'static str>);

impl PublisherLink for Once {
    type Stream = DuplexStream;

    async fn connect(&self, device: &str) -> std::result::Result<DuplexStream, String> {
        assert_eq!(device, "a");
        let stream = self.0.lock().expect("nobody panics").take();
        stream.ok_or_else(|| {
            let _ = self.1.send(());
            "once".to_owned()
        })
    }

    fn told(&self, device: &str, news: DeviceNews<'_>) {
        assert_eq!(device, "a", "of a device that nobody has asked for");
        let shown = |text: &str| assert!(!text.chars().any(char::is_control), "{text:?}");
        let word = match news {
            DeviceNews::State(state, _) => {
                [Some(&state.kind), Some(&state.incarnation), state.trouble.as_ref(), state.holder.as_ref()]
                    .into_iter()
                    .flatten()
                    .for_each(|text| shown(text));
                "told"
            }
            DeviceNews::Refused(why) => {
                shown(why);
                "refused"
            }
            DeviceNews::Unknown(why) => {
                shown(why);
                let _ = self.1.send(());
                "unknown"
            }
        };
        let _ = self.2.send(word);
    }
}

async fn bad_publisher(input: &mut Unstructured<'_>, signature: &mut Signature) {
    let said = messages(input, r#"{"say":"welcome","version":1}"#);
    let (near, mut far) = duplex(4096);
    let ((end, ends), (word, words)) = (channel(), channel());
    let subscriber = Subscriber::start(Once(Mutex::new(Some(near)), end, word), timing());
    subscriber.want(BTreeSet::from(["a".to_owned()]));
    let _ = far.write_all(&said).await;
    let _ = far.shutdown().await;
    let _ = tokio::io::copy(&mut far, &mut tokio::io::sink()).await;
    drop(far);
    // It has noticed when it says that it knows nothing more.
    while ends.try_recv().is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    words.try_iter().for_each(|word| signature.saw(word));
}
