//! Sessions of two hosts: a byte stream, of which nobody here knows what it is, is published, grows, fails and goes; and peers that are slow, silent or hostile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ioplane_netbus::NetbusError;
use ioplane_netbus::control::{
    DeviceEvent, DeviceNews, DevicePresence, DeviceState, MOST_SUBSCRIPTIONS, Publications, PublisherLink,
    SessionTiming, Subscriber, serve,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;

/// For what takes milliseconds on a machine that has time.
const LIMIT: Duration = Duration::from_secs(60);

fn timing() -> SessionTiming {
    SessionTiming {
        keep_alive: Duration::from_millis(20),
        silence: Duration::from_secs(30),
        patience: Duration::from_secs(30),
        retry: (Duration::from_millis(1), Duration::from_millis(20)),
    }
}

fn stream(units: u64) -> DeviceState {
    DeviceState {
        kind: "byte-stream".to_owned(),
        incarnation: "7@boot".to_owned(),
        units,
        presence: DevicePresence::Served,
        trouble: None,
        holder: None,
    }
}

/// A host that publishes.
#[derive(Default)]
struct Host {
    devices: Mutex<BTreeMap<String, watch::Sender<DeviceState>>>,
    sessions: AtomicUsize,
    subscriptions: AtomicUsize,
    ends: Notify,
}

impl Publications for Host {
    fn subscribe(&self, device: &str) -> Result<watch::Receiver<DeviceState>, String> {
        self.subscriptions.fetch_add(1, Ordering::SeqCst);
        let devices = self.devices.lock().unwrap();
        devices.get(device).map(watch::Sender::subscribe).ok_or_else(|| format!("no {device} here"))
    }
}

impl Host {
    fn publish(&self, device: &str, units: u64) {
        self.devices.lock().unwrap().insert(device.to_owned(), watch::Sender::new(stream(units)));
    }

    fn change(&self, device: &str, change: impl FnOnce(&mut DeviceState)) {
        self.devices.lock().unwrap()[device].send_modify(change);
    }

    fn withdraw(&self, device: &str) {
        self.change(device, |state| state.presence = DevicePresence::Withdrawn);
        self.devices.lock().unwrap().remove(device);
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Heard {
    State(u64, DevicePresence, Vec<DeviceEvent>),
    Refused(String),
    Unknown,
}

/// Connects to `host` in this process.
struct Link {
    host: Arc<Host>,
    heard: mpsc::UnboundedSender<(String, Heard)>,
    /// Streams of sessions, to be cut.
    served: Arc<Mutex<JoinSet<Result<(), NetbusError>>>>,
}

impl PublisherLink for Link {
    type Stream = DuplexStream;

    async fn connect(&self, _device: &str) -> Result<DuplexStream, String> {
        let (near, far) = duplex(1024);
        self.host.sessions.fetch_add(1, Ordering::SeqCst);
        let host = self.host.clone();
        self.served.lock().unwrap().spawn(async move {
            let ends = host.clone();
            serve(far, &*host, timing(), async move { ends.ends.notified().await }).await
        });
        Ok(near)
    }

    fn told(&self, device: &str, news: DeviceNews<'_>) {
        let heard = match news {
            DeviceNews::State(state, events) => Heard::State(state.units, state.presence, events.to_vec()),
            DeviceNews::Refused(why) => Heard::Refused(why.to_owned()),
            DeviceNews::Unknown(_) => Heard::Unknown,
        };
        let _ = self.heard.send((device.to_owned(), heard));
    }
}

struct Rig {
    host: Arc<Host>,
    subscriber: Subscriber,
    heard: mpsc::UnboundedReceiver<(String, Heard)>,
    served: Arc<Mutex<JoinSet<Result<(), NetbusError>>>>,
}

impl Rig {
    fn new() -> Rig {
        let (host, served) = (Arc::<Host>::default(), Arc::default());
        let (send, heard) = mpsc::unbounded_channel();
        let link = Link { host: host.clone(), heard: send, served: Arc::clone(&served) };
        Rig { host, subscriber: Subscriber::start(link, timing()), heard, served }
    }

    fn want(&self, devices: &[&str]) {
        self.subscriber.want(devices.iter().map(|device| (*device).to_owned()).collect());
    }

    async fn next(&mut self) -> (String, Heard) {
        tokio::time::timeout(LIMIT, self.heard.recv()).await.expect("nothing is told").unwrap()
    }

    async fn next_of(&mut self, device: &str) -> Heard {
        let (of, heard) = self.next().await;
        assert_eq!(of, device, "{heard:?}");
        heard
    }

    /// Until something that `wanted` takes has been told.
    async fn until(&mut self, wanted: impl Fn(&Heard) -> bool) -> Heard {
        loop {
            let (_, heard) = self.next().await;
            if wanted(&heard) {
                return heard;
            }
        }
    }
}

fn served(units: u64) -> Heard {
    Heard::State(units, DevicePresence::Served, vec![])
}

#[tokio::test]
async fn two_devices_of_one_host_share_one_session() {
    let mut rig = Rig::new();
    rig.host.publish("a", 1);
    rig.host.publish("b", 2);
    rig.want(&["a"]);
    assert_eq!(rig.next_of("a").await, served(1));
    rig.want(&["a", "b"]);
    assert_eq!(rig.next_of("b").await, served(2));
    rig.host.change("a", |state| state.units = 5);
    let grown = vec![DeviceEvent::Capacity { from: 1, to: 5 }];
    assert_eq!(rig.next_of("a").await, Heard::State(5, DevicePresence::Served, grown));
    let count = |count: &AtomicUsize| count.load(Ordering::SeqCst);
    assert_eq!((count(&rig.host.sessions), count(&rig.host.subscriptions)), (1, 2));
    // Who wants nothing any more has no session.
    rig.want(&[]);
    let ended = async {
        loop {
            if let Some(ended) = rig.served.lock().unwrap().try_join_next() {
                return ended;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, ended).await.unwrap().unwrap().unwrap();
    assert_eq!(rig.host.devices.lock().unwrap()["a"].receiver_count(), 0);
}

#[tokio::test]
async fn what_happens_to_a_device_is_told_as_it_happens() {
    let mut rig = Rig::new();
    rig.host.publish("a", 1);
    rig.want(&["a"]);
    assert_eq!(rig.next_of("a").await, served(1));
    let text = |text: &str| Some(text.to_owned());
    let state = |events| Heard::State(1, DevicePresence::Served, events);
    rig.host.change("a", |state| state.holder = text("host-b"));
    assert_eq!(rig.next_of("a").await, state(vec![DeviceEvent::Holder(text("host-b"))]));
    rig.host.change("a", |state| state.trouble = text("cable\u{1b}[2J cut"));
    assert_eq!(rig.next_of("a").await, state(vec![DeviceEvent::Trouble(text("cable[2J cut"))]));
    rig.host.change("a", |state| state.trouble = None);
    assert_eq!(rig.next_of("a").await, state(vec![DeviceEvent::Trouble(None)]));
    rig.host.withdraw("a");
    assert_eq!(
        rig.next_of("a").await,
        Heard::State(1, DevicePresence::Withdrawn, vec![DeviceEvent::Withdrawn])
    );
    // It is found again when it is published again, by the same session.
    rig.host.publish("a", 3);
    let capacity = DeviceEvent::Capacity { from: 1, to: 3 };
    let gone = DeviceEvent::Holder(None);
    assert_eq!(
        rig.next_of("a").await,
        Heard::State(3, DevicePresence::Served, vec![DeviceEvent::Served, capacity, gone])
    );
    assert_eq!(rig.host.sessions.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn what_is_not_for_it_is_refused_until_it_is() {
    let mut rig = Rig::new();
    rig.want(&["a"]);
    assert_eq!(rig.next_of("a").await, Heard::Refused("no a here".to_owned()));
    rig.host.publish("a", 1);
    assert_eq!(rig.until(|heard| !matches!(heard, Heard::Refused(_))).await, served(1));
}

#[tokio::test]
async fn a_lost_session_is_made_again_and_says_what_happened_meanwhile() {
    let mut rig = Rig::new();
    rig.host.publish("a", 1);
    rig.want(&["a"]);
    assert_eq!(rig.next_of("a").await, served(1));
    rig.served.lock().unwrap().abort_all();
    assert_eq!(rig.next_of("a").await, Heard::Unknown);
    rig.host.change("a", |state| state.units = 9);
    let heard = rig.until(|heard| matches!(heard, Heard::State(9, ..))).await;
    // Between the loss and the change it may have been connected already.
    let Heard::State(_, _, events) = heard else { panic!() };
    assert_eq!(events, [DeviceEvent::Capacity { from: 1, to: 9 }]);
    assert!(rig.host.sessions.load(Ordering::SeqCst) >= 2);
}

#[tokio::test]
async fn a_device_that_was_added_to_a_session_hears_of_its_loss_too() {
    let mut rig = Rig::new();
    rig.host.publish("a", 1);
    rig.host.publish("b", 2);
    rig.want(&["a"]);
    assert_eq!(rig.next_of("a").await, served(1));
    rig.want(&["a", "b"]);
    assert_eq!(rig.next_of("b").await, served(2));
    rig.served.lock().unwrap().abort_all();
    assert_eq!(rig.next_of("a").await, Heard::Unknown);
    assert_eq!(rig.next_of("b").await, Heard::Unknown);
}

/// Whoever ends says so before the connection does.
#[tokio::test]
async fn a_host_that_stops_has_said_so_when_the_session_ends() {
    let mut rig = Rig::new();
    rig.host.publish("a", 1);
    rig.want(&["a"]);
    assert_eq!(rig.next_of("a").await, served(1));
    rig.host.change("a", |state| state.presence = DevicePresence::Stopping);
    rig.host.ends.notify_waiters();
    assert_eq!(
        rig.next_of("a").await,
        Heard::State(1, DevicePresence::Stopping, vec![DeviceEvent::Stopping])
    );
    assert_eq!(rig.next_of("a").await, Heard::Unknown);
}

/// What a subscriber of its own hand says, with the length before it.
async fn say(stream: &mut DuplexStream, text: &str) {
    stream.write_all(&(text.len() as u32).to_be_bytes()).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
}

async fn hear(stream: &mut DuplexStream) -> String {
    let length = tokio::time::timeout(LIMIT, stream.read_u32()).await.unwrap().unwrap();
    let mut text = vec![0; length as usize];
    stream.read_exact(&mut text).await.unwrap();
    String::from_utf8(text).unwrap()
}

/// A subscriber that reads nothing while a thousand things happen gets the newest state, and not what was before.
#[tokio::test]
async fn a_slow_subscriber_gets_the_newest_state_and_no_backlog() {
    let host = Arc::<Host>::default();
    host.publish("a", 0);
    // Room for a few messages.
    let (mut near, far) = duplex(512);
    let publisher = host.clone();
    let task = tokio::spawn(async move { serve(far, &*publisher, timing(), std::future::pending()).await });
    say(&mut near, r#"{"say":"hello","version":1}"#).await;
    say(&mut near, r#"{"say":"subscribe","device":"a"}"#).await;
    assert!(hear(&mut near).await.contains("welcome"));
    const LAST: u64 = 1000;
    for units in 1..=LAST {
        host.change("a", |state| state.units = units);
        tokio::task::yield_now().await;
    }
    let (mut states, last) = (0, format!("\"units\":{LAST},"));
    loop {
        states += 1;
        if hear(&mut near).await.contains(&last) {
            break;
        }
    }
    assert!(states < 10, "{states} states were kept for it");
    drop(near);
    task.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_peer_that_breaks_the_protocol_is_cut_off_and_named() {
    let serve_one = async |said: &[&str], raw: &[u8]| {
        let host = Host::default();
        host.publish("a", 1);
        let (mut near, far) = duplex(1 << 20);
        for text in said {
            say(&mut near, text).await;
        }
        near.write_all(raw).await.unwrap();
        let served = serve(far, &host, timing(), std::future::pending());
        tokio::time::timeout(LIMIT, served).await.expect("it is still served").unwrap_err()
    };
    let hello = r#"{"say":"hello","version":1}"#;
    for (said, raw, words) in [
        (&[r#"{"say":"subscribe","device":"a"}"#][..], &b""[..], "hello first"),
        (&[r#"{"say":"hello","version":0}"#], b"", "version 0"),
        (&[hello, hello], b"", "hello again"),
        (&[hello, r#"{"say":"subscribe","device":"../a"}"#], b"", "no name of a device"),
        (&[hello, "{"], b"", "protocol"),
        (&[hello], b"\xff\xff\xff\xff", "longer than any"),
        (&[hello], b"\x00\x01\x00\x00", "longer than any"),
    ] {
        let error = serve_one(said, raw).await;
        assert!(error.to_string().contains(words), "{said:?} {raw:?}: {error}");
    }
}

#[tokio::test]
async fn silence_and_a_message_that_does_not_end_are_noticed() {
    let quick =
        SessionTiming { silence: Duration::from_millis(50), patience: Duration::from_millis(50), ..timing() };
    for rest in [&b""[..], b"\0\0"] {
        let host = Host::default();
        let (mut near, far) = duplex(1024);
        say(&mut near, r#"{"say":"hello","version":1}"#).await;
        near.write_all(rest).await.unwrap();
        let ended = tokio::time::timeout(LIMIT, serve(far, &host, quick, std::future::pending())).await;
        assert!(matches!(ended, Ok(Err(NetbusError::Slow(_)))), "{ended:?}");
    }
    // Nobody reads what is answered.
    let host = Host::default();
    let (mut near, far) = duplex(64);
    let flood = async {
        say(&mut near, r#"{"say":"hello","version":1}"#).await;
        loop {
            say(&mut near, r#"{"say":"ping","number":1}"#).await;
        }
    };
    let quick = SessionTiming { patience: Duration::from_millis(100), ..quick };
    tokio::select! {
        ended = serve(far, &host, quick, std::future::pending()) => assert!(ended.is_err()),
        () = flood => {}
        () = tokio::time::sleep(LIMIT) => panic!("it is still served"),
    }
}

#[tokio::test]
async fn one_session_is_about_so_many_devices_and_no_more() {
    let host = Host::default();
    for number in 0..=MOST_SUBSCRIPTIONS {
        host.publish(&format!("d{number}"), 1);
    }
    let (mut near, far) = duplex(8 << 20);
    say(&mut near, r#"{"say":"hello","version":1}"#).await;
    for number in 0..=MOST_SUBSCRIPTIONS {
        say(&mut near, &format!(r#"{{"say":"subscribe","device":"d{number}"}}"#)).await;
    }
    // The same one again takes no place.
    say(&mut near, r#"{"say":"subscribe","device":"d0"}"#).await;
    say(&mut near, r#"{"say":"ping","number":7}"#).await;
    let listen = async {
        let (mut states, mut refused) = (BTreeSet::new(), 0);
        let (mut answered, mut told) = (false, 0);
        while !answered || told < MOST_SUBSCRIPTIONS {
            let heard = hear(&mut near).await;
            if heard.contains("pong") {
                answered = true;
            } else if heard.contains("refused") {
                refused += 1;
            } else if heard.contains("\"state\"") {
                states.insert(heard);
                told = states.len();
            }
        }
        refused
    };
    tokio::select! {
        ended = serve(far, &host, timing(), std::future::pending()) => panic!("{ended:?}"),
        refused = listen => assert_eq!(refused, 1),
    }
}

/// A publisher that lies about what was not asked for, or in texts.
#[tokio::test]
async fn a_publisher_that_lies_is_not_believed() {
    struct Liar(Mutex<Option<DuplexStream>>, mpsc::UnboundedSender<String>);
    impl PublisherLink for Liar {
        type Stream = DuplexStream;
        async fn connect(&self, _: &str) -> Result<DuplexStream, String> {
            self.0.lock().unwrap().take().ok_or_else(|| "gone".to_owned())
        }
        fn told(&self, device: &str, news: DeviceNews<'_>) {
            let _ = self.1.send(format!("{device} {news:?}"));
        }
    }
    let state = |kind: &str, trouble: &str| {
        format!(
            r#"{{"kind":{kind:?},"incarnation":"x","units":1,"presence":"served","trouble":{trouble:?},"holder":null}}"#
        )
    };
    let welcome = r#"{"say":"welcome","version":1}"#.to_owned();
    let told =
        |device: &str, state: String| format!(r#"{{"say":"state","device":{device:?},"state":{state}}}"#);
    for (said, words) in [
        (vec![r#"{"say":"welcome","version":9}"#.to_owned()], "version 9"),
        (vec![r#"{"say":"pong","number":1}"#.to_owned()], "welcome first"),
        (vec![welcome.clone(), told("a", state("byte stream", ""))], "kind"),
        (vec![welcome.clone(), told("a", state("s", "\u{1}"))], "trouble"),
        (vec![welcome.clone(), welcome.clone()], "welcome again"),
        (vec![welcome.clone(), told("b", state("s", "\u{1}")), r#"{"say":"bye"}"#.to_owned()], "it ends"),
    ] {
        let (near, mut far) = duplex(1 << 20);
        let (send, mut heard) = mpsc::unbounded_channel();
        for text in &said {
            // `{:?}` of a control character is no JSON.
            say(&mut far, &text.replace("\\u{1}", "\\u0001")).await;
        }
        let subscriber = Subscriber::start(Liar(Mutex::new(Some(near)), send), timing());
        subscriber.want(BTreeSet::from(["a".to_owned()]));
        let first = tokio::time::timeout(LIMIT, heard.recv()).await.unwrap().unwrap();
        assert!(first.starts_with("a Unknown") && first.contains(words), "{said:?}: {first}");
    }
}
