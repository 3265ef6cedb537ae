//! A second kind of device on the same ground as disks: a byte stream is published in the directory, leased by a claim, and moved. What disks do with
//! requests that are pending, complete them or hand them over, is no rule of the bus or of claims: whatever of this one was not taken is
//! discarded when its holder changes.

#![expect(clippy::disallowed_types, reason = "a host of the test")]

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ioplane_nbd::claim::{
    ClaimBook, ClaimDenial, ClaimQuery, ClaimRecord, ClaimRefusal, ClaimReply, ClaimStore, ClaimVerb,
};
use ioplane_netbus::{
    DeviceRecord, DirectoryServer, DirectorySession, ListedDevice, Security, ServerSecurity,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

const NAME: &str = "console";
const KIND: &str = "byte-stream";

/// A claim in a file.
struct Kept(PathBuf);

impl ClaimStore for Kept {
    fn save(&mut self, record: &ClaimRecord) -> Result<(), String> {
        let mut file = File::create(&self.0).map_err(|error| error.to_string())?;
        file.write_all(record.encode().as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(|error| error.to_string())
    }
}

struct State {
    book: ClaimBook,
    /// What the device has said and nobody has taken.
    pending: VecDeque<u8>,
    discarded: usize,
}

/// The host that has the device. It hears three lines: a claim's query, `open HOLDER/GENERATION`, and `take COUNT`.
struct Exporter {
    state: Arc<Mutex<State>>,
    location: String,
    serving: tokio::task::JoinHandle<()>,
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Exporter {
    /// With the claim that `folder` knows.
    async fn start(folder: &Path) -> Exporter {
        let file = folder.join("claim");
        let kept = std::fs::read(&file).ok().map(|bytes| ClaimRecord::decode(&bytes).unwrap());
        let book = ClaimBook::new(kept, Box::new(Kept(file)));
        let state = Arc::new(Mutex::new(State { book, pending: VecDeque::new(), discarded: 0 }));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let location = listener.local_addr().unwrap().to_string();
        let ours = state.clone();
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(BufReader::new(stream), ours.clone()));
            }
        });
        Exporter { state, location, serving }
    }

    /// The device says something.
    fn says(&self, text: &str) {
        self.state.lock().unwrap().pending.extend(text.bytes());
    }

    fn discarded(&self) -> usize {
        self.state.lock().unwrap().discarded
    }

    fn device(&self) -> DeviceRecord {
        let holder =
            self.state.lock().unwrap().book.record().filter(|last| last.held).map(|last| last.name.clone());
        DeviceRecord {
            name: NAME.to_owned(),
            kind: KIND.to_owned(),
            size: None,
            location: self.location.clone(),
            read_only: false,
            users: u32::from(holder.is_some()),
            holder,
            trouble: None,
            rates: Vec::new(),
        }
    }
}

impl State {
    /// Whose the device is may change: then nothing that is pending is the next one's.
    fn claim(&mut self, query: &ClaimQuery) -> ClaimReply {
        let of = |book: &ClaimBook| book.record().map(|last| (last.generation, last.held));
        let before = of(&self.book);
        let reply = self.book.ask(query, 0, 1_795_730_400);
        if of(&self.book) != before {
            self.discarded += self.pending.len();
            self.pending.clear();
        }
        reply
    }

    fn take(&mut self, claim: Option<&(String, u64)>, count: usize) -> Result<String, ClaimRefusal> {
        // As long as somebody else holds it nobody without a claim takes anything, and asked for each time: a connection may be old.
        self.book.admits(claim.map(|(holder, generation)| (holder.as_str(), *generation)))?;
        let count = count.min(self.pending.len());
        Ok(self.pending.drain(..count).map(char::from).collect())
    }
}

async fn serve(mut stream: BufReader<TcpStream>, state: Arc<Mutex<State>>) {
    let mut opened = None;
    let mut line = String::new();
    while stream.read_line(&mut line).await.is_ok_and(|got| got > 0) {
        let (answer, goes_on) = {
            let (text, mut state) = (line.trim_end(), state.lock().unwrap());
            if let Some(query) = ClaimQuery::of(text) {
                (state.claim(&query).to_string(), true)
            } else if let Some((holder, generation)) =
                text.strip_prefix("open ").and_then(|claim| claim.split_once('/'))
            {
                let generation = generation.parse().unwrap();
                opened = Some((holder.to_owned(), generation));
                match state.book.admits(Some((holder, generation))) {
                    Ok(()) => ("open".to_owned(), true),
                    Err(refusal) => (ClaimReply::Refused(refusal).to_string(), false),
                }
            } else {
                let count = text.strip_prefix("take ").unwrap().parse().unwrap();
                match state.take(opened.as_ref(), count) {
                    Ok(taken) => (format!("{taken:?}"), true),
                    Err(refusal) => (ClaimReply::Refused(refusal).to_string(), false),
                }
            }
        };
        if stream.get_mut().write_all(format!("{answer}\n").as_bytes()).await.is_err() || !goes_on {
            return;
        }
        line.clear();
    }
}

/// A host that uses the device.
struct Importer {
    host: &'static str,
    stream: BufReader<TcpStream>,
}

impl Importer {
    /// Finds it by its name in the directory, as one of its kind.
    async fn find(session: &mut DirectorySession, host: &'static str) -> Importer {
        let entry = listed(session).await;
        assert_eq!((entry.host.as_str(), entry.device.kind.as_str()), ("host-a", KIND));
        Importer { host, stream: BufReader::new(TcpStream::connect(entry.device.location).await.unwrap()) }
    }

    /// `None`: the exporter has ended the connection.
    async fn ask(&mut self, line: &str) -> Option<String> {
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).await.ok()?;
        let mut answer = String::new();
        let got = self.stream.read_line(&mut answer).await.ok()?;
        (got > 0).then(|| answer.trim_end().to_owned())
    }

    async fn claim(&mut self, verb: ClaimVerb) -> ClaimReply {
        let query =
            ClaimQuery { holder: self.host.to_owned(), verb, name: format!("{NAME} of {}", self.host) };
        ClaimReply::of(&self.ask(&query.to_string()).await.unwrap()).unwrap()
    }

    async fn open(&mut self, generation: u64) {
        assert_eq!(self.ask(&format!("open {}/{generation}", self.host)).await.as_deref(), Some("open"));
    }

    async fn take(&mut self) -> String {
        self.ask("take 100").await.expect("an answer")
    }
}

async fn listed(session: &mut DirectorySession) -> ListedDevice {
    let mut entries = session.list().await.unwrap();
    assert_eq!(entries.len(), 1);
    entries.remove(0)
}

async fn join(server: &DirectoryServer, host: &str) -> DirectorySession {
    let address = server.address().to_string().parse().unwrap();
    let security = Security::Plain { host: host.to_owned() };
    DirectorySession::connect(&address, &security, "daemon").await.unwrap()
}

fn directory(folder: &Path) -> DirectoryServer {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    DirectoryServer::start(listener, &folder.join("d.redb"), ServerSecurity::Plain).unwrap()
}

fn why(reply: &ClaimReply) -> Option<ClaimDenial> {
    match reply {
        ClaimReply::Refused(refusal) => Some(refusal.why),
        _ => None,
    }
}

fn refused(answer: &str) -> ClaimDenial {
    ClaimReply::of(answer).as_ref().and_then(why).unwrap_or_else(|| panic!("not refused: {answer}"))
}

#[tokio::test]
async fn a_byte_stream_is_published_leased_and_moved() {
    let folder = tempfile::tempdir().unwrap();
    let server = directory(folder.path());
    let (mut a, mut b, mut c) =
        (join(&server, "host-a").await, join(&server, "host-b").await, join(&server, "host-c").await);
    let exporter = Exporter::start(folder.path()).await;
    assert_eq!(a.report(vec![exporter.device()]).await.unwrap(), []);

    let mut here = Importer::find(&mut b, "host-b").await;
    assert_eq!(here.claim(ClaimVerb::Ask).await, ClaimReply::Granted(1));
    here.open(1).await;
    exporter.says("one");
    assert_eq!(here.take().await, "\"one\"");
    a.report(vec![exporter.device()]).await.unwrap();
    assert_eq!(listed(&mut c).await.device.holder.as_deref(), Some("console of host-b"));
    let mut there = Importer::find(&mut c, "host-c").await;
    let ClaimReply::Refused(refusal) = there.claim(ClaimVerb::Ask).await else { panic!("granted twice") };
    assert!(refusal.to_string().starts_with("it is held by console of host-b"), "{refusal}");

    // The move: what is pending when its user lets it go belongs to nobody.
    exporter.says("pending");
    assert_eq!(here.claim(ClaimVerb::Release(1)).await, ClaimReply::Released(1));
    assert_eq!(exporter.discarded(), 7);
    assert_eq!(there.claim(ClaimVerb::Ask).await, ClaimReply::Granted(2));
    there.open(2).await;
    exporter.says("two");
    assert_eq!(refused(&here.take().await), ClaimDenial::Held);
    assert_eq!(here.ask("take 100").await, None, "its connection has ended");
    assert_eq!(there.take().await, "\"two\"");
    a.report(vec![exporter.device()]).await.unwrap();
    let entry = listed(&mut b).await;
    assert_eq!((entry.host.as_str(), entry.device.holder.as_deref()), ("host-a", Some("console of host-c")));
}

#[tokio::test]
async fn whoever_was_taken_over_takes_nothing_more_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let server = directory(folder.path());
    let (mut a, mut b, mut c) =
        (join(&server, "host-a").await, join(&server, "host-b").await, join(&server, "host-c").await);
    let exporter = Exporter::start(folder.path()).await;
    a.report(vec![exporter.device()]).await.unwrap();
    let (mut old, mut new) = (Importer::find(&mut b, "host-b").await, Importer::find(&mut c, "host-c").await);
    assert_eq!(old.claim(ClaimVerb::Ask).await, ClaimReply::Granted(1));
    old.open(1).await;
    exporter.says("for b");
    assert_eq!(new.claim(ClaimVerb::TakeOver).await, ClaimReply::Granted(2));
    exporter.says("for c");
    assert_eq!(refused(&old.take().await), ClaimDenial::Held);
    new.open(2).await;
    assert_eq!(new.take().await, "\"for c\"");
    assert_eq!(exporter.discarded(), 5);

    drop(exporter);
    let exporter = Exporter::start(folder.path()).await;
    a.report(vec![exporter.device()]).await.unwrap();
    exporter.says("later");
    let (mut old, mut new) = (Importer::find(&mut b, "host-b").await, Importer::find(&mut c, "host-c").await);
    assert_eq!(why(&old.claim(ClaimVerb::Own(1)).await), Some(ClaimDenial::Held));
    assert_eq!(refused(&old.ask("open host-b/1").await.unwrap()), ClaimDenial::Held);
    // Nor does one without a claim.
    let mut stranger = Importer::find(&mut b, "host-b").await;
    assert_eq!(refused(&stranger.take().await), ClaimDenial::Held);
    assert_eq!(new.claim(ClaimVerb::Own(2)).await, ClaimReply::Granted(2));
    new.open(2).await;
    assert_eq!(new.take().await, "\"later\"", "what is pending stays its holder's");
}
