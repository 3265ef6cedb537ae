//! What a pool's policy is given, written down while a load rises and falls, one queue takes a whole core, and a disk goes silent. With `IOPLANE_WRITE_TRACE=1`
//! the trace becomes the one that `crates/scheduler/tests/pool_replay.rs` replays.

mod daemon;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use daemon::load::free_port;
use daemon::reader::Reader;
use daemon::{LIMIT, TestDaemon};
use serde_json::Value;

/// What a guest does.
const IDLE: u8 = 0;
/// A few percent of a core.
const MODEST: u8 = 1;
/// All that it can get.
const ALL: u8 = 2;
const OVER: u8 = 3;

/// Requests in flight of a guest that wants all, and the bytes of each.
const MOST: usize = 64;
const BYTES: u32 = 512 << 10;

/// A guest on a thread of its own.
struct Load {
    does: Arc<AtomicU8>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    fn of(mut guest: Reader) -> Load {
        let does = Arc::new(AtomicU8::new(IDLE));
        let told = does.clone();
        let work = move || {
            let mut in_flight = 0;
            loop {
                match told.load(Ordering::Acquire) {
                    OVER => return,
                    IDLE => {
                        guest.wait(std::mem::take(&mut in_flight));
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    MODEST => {
                        guest.wait(std::mem::take(&mut in_flight));
                        guest.submit(1);
                        guest.wait(1);
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    _ => {
                        if in_flight < MOST {
                            guest.submit(MOST - in_flight);
                        }
                        let done = guest.reap();
                        in_flight = MOST - done;
                        if done == 0 {
                            std::thread::yield_now();
                        }
                    }
                }
            }
        };
        Load { does, thread: Some(std::thread::spawn(work)) }
    }

    fn set(&self, what: u8) {
        self.does.store(what, Ordering::Release);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.set(OVER);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// What was decided about cores and places, in words.
fn decided(daemon: &TestDaemon) -> Vec<String> {
    let (_, log) = daemon.http("GET", "/v1/pool/decisions", "");
    let text = |one: &Value| one["text"].as_str().unwrap().to_owned();
    log["decisions"].as_array().unwrap().iter().map(text).collect()
}

/// Waits for so long until `words` were said since decision `from`; whether they were.
fn decided_within(daemon: &TestDaemon, time: Duration, from: usize, words: &str) -> bool {
    let end = Instant::now() + time;
    while Instant::now() < end {
        if decided(daemon).iter().skip(from).any(|one| one.contains(words)) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

fn cores(daemon: &TestDaemon) -> usize {
    daemon.json(&["core", "list"]).as_array().unwrap().len()
}

#[test]
fn what_a_pool_decides_by_is_written_down() {
    let daemon = TestDaemon::new("");
    let trace = daemon.path("trace");
    let mut disks = String::new();
    for name in ["hot", "b", "c"] {
        disks += &format!("[[disk]]\nname = \"{name}\"\nmemory = \"1M\"\n");
    }
    let port = free_port();
    let export = format!("name = \"s\"\nmemory = \"1M\"\nlisten = \"127.0.0.1:{port}\"\nplain = true\n");
    let exporter = TestDaemon::open(&format!("[[core]]\n[[export]]\n{export}"));
    disks += &format!("[[disk]]\nname = \"s\"\nremote = \"nbd://127.0.0.1:{port}/s\"\n");
    let at_least = |min: u32| format!("[pool]\nmin = {min}\nmax = 2\n{disks}");
    daemon.configure(&at_least(1));
    let daemon = daemon.start_by(&["env", &format!("IOPLANE_TEST_POOL_TRACE={}", trace.display())]);
    let loads = ["hot", "b", "c"].map(|name| Load::of(Reader::of(&daemon, name, BYTES)));
    let [_, others @ ..] = &loads;

    // The load rises: a core comes, and queues move to it.
    loads.iter().for_each(|load| load.set(ALL));
    for words in ["one core more: 1 core carries", "moves from core 0"] {
        assert!(decided_within(&daemon, LIMIT, 0, words), "{words}: {:#?}", decided(&daemon));
    }
    // One queue takes a core, and the others do not stay beside it.
    let from = decided(&daemon).len();
    others.iter().for_each(|load| load.set(MODEST));
    // On a machine that is busy with something else its guest may be too slow for that: such a trace is not for the tree.
    let alone =
        decided_within(&daemon, Duration::from_secs(20), from, "hot queue 0 stays: it takes a whole core");
    // The load goes from one queue to the next, faster than a policy that followed it could be right.
    for round in 0..9 {
        for (at, load) in loads.iter().enumerate() {
            load.set(if at == round % 3 { ALL } else { MODEST });
        }
        std::thread::sleep(Duration::from_millis(400));
    }
    // A disk answers no more while its core is drained. The looks at it come as fast as before.
    loads.iter().for_each(|load| load.set(IDLE));
    daemon.configure(&at_least(2));
    assert_eq!(daemon.cli(&["reload"]).code, 0);
    daemon.until(|| cores(&daemon) == 2);
    go_silent(&daemon, &exporter);
    daemon.configure(&at_least(1));
    assert_eq!(daemon.cli(&["reload"]).code, 0);
    // The load has fallen, and a core goes.
    let end = Instant::now() + LIMIT;
    while cores(&daemon) > 1 {
        assert!(Instant::now() < end, "no core ends: {:#?}", decided(&daemon));
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(loads);
    check(&trace, &decided(&daemon));
    if std::env::var_os("IOPLANE_WRITE_TRACE").is_some() {
        assert!(alone, "not all of it came: record it on a quiet machine");
        let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scheduler/tests/traces/pool.jsonl");
        std::fs::copy(&trace, recorded).unwrap();
    }
}

/// The machine of disk `s` answers no more, and the core of its queue is drained meanwhile: the queue cannot be moved until it answers again.
fn go_silent(daemon: &TestDaemon, exporter: &TestDaemon) {
    let from = decided(daemon).len();
    let mut guest = Reader::of(daemon, "s", 4096);
    guest.submit(1);
    guest.wait(1);
    exporter.signal("STOP");
    guest.submit(1);
    daemon.until(|| daemon.disk("s")["backing"]["remote"]["in_flight"].as_u64() > Some(0));
    let core = daemon.disk("s")["queues"][0]["core"].clone();
    daemon.json(&["core", "drain", &core.to_string()]);
    let words = "s queue 0 stays: its requests in flight do not end";
    assert!(decided_within(daemon, LIMIT, from, words), "{words}: {:#?}", decided(daemon));
    exporter.signal("CONT");
    guest.wait(1);
    daemon.until(|| daemon.disk("s")["queues"][0]["core"] != core);
    // The pool may have taken it away meanwhile, since it carries nothing, and may be starting it again.
    let opened = daemon.cli(&["core", "open", &core.to_string()]);
    let others = ["there is no I/O core", "is only starting"].iter().any(|words| opened.err.contains(words));
    assert!(opened.code == 0 || others, "{}", opened.err);
}

/// The trace has looks, and all that was decided by them.
fn check(trace: &Path, decided: &[String]) {
    let text = std::fs::read_to_string(trace).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines[0].get("settings").is_some(), "{}", lines[0]);
    let looks: Vec<u64> = lines.iter().filter_map(|line| line["t"].as_u64()).collect();
    assert!(looks.is_sorted() && looks.len() > 50, "{} looks", looks.len());
    let planned: usize = lines.iter().filter_map(|line| line["plan"].as_array()).map(Vec::len).sum();
    // The log has besides how queues are served.
    let places = ["core more", " moves from ", " ends: ", " stays: "];
    let logged = decided.iter().filter(|one| places.iter().any(|word| one.contains(word))).count();
    assert!(planned >= logged && logged > 3, "{planned} planned, {logged} in the log");
    println!("{} looks, {} bytes, {planned} decisions", looks.len(), text.len());
}
