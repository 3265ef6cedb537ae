//! The program as the host sees it, over a socket pair, on regular files in place of disks.

use ioplane_guest_load::protocol::{CopyCheck, LoadSpec, Mix, Report, StampSpec, Stamps, Verified};
use ioplane_guest_load::serve::Server;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

struct Host {
    stream: UnixStream,
    lines: std::io::Lines<BufReader<UnixStream>>,
    next: u64,
    folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Host {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = Server::new(Box::new(theirs.try_clone().unwrap()));
        std::thread::spawn(move || server.run(&mut BufReader::new(theirs)));
        let lines = BufReader::new(ours.try_clone().unwrap()).lines();
        // In the target folder, not in a tmpfs: the loads use O_DIRECT.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Host { stream: ours, lines, next: 1, folder }
    }

    fn disk(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.folder.path().join(name);
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    fn send(&mut self, mut request: Value) -> u64 {
        let id = self.next;
        self.next += 1;
        request["id"] = json!(id);
        writeln!(self.stream, "{request}").unwrap();
        id
    }

    fn end(&mut self, id: u64) -> Result<Value, String> {
        loop {
            let line: Value = serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap();
            if line["id"] == id && line.get("progress").is_none() {
                return match line.get("error") {
                    Some(error) => Err(error.as_str().unwrap().into()),
                    None => Ok(line["ok"].clone()),
                };
            }
        }
    }

    fn call(&mut self, request: Value) -> Result<Value, String> {
        let id = self.send(request);
        self.end(id)
    }

    fn load(&mut self, spec: &LoadSpec) -> Report {
        let mut request = serde_json::to_value(spec).unwrap();
        request["do"] = json!("load");
        serde_json::from_value(self.call(request).unwrap()).unwrap()
    }

    fn verify(&mut self, load: &str) -> Verified {
        serde_json::from_value(self.call(json!({"do": "verify", "load": load})).unwrap()).unwrap()
    }
}

fn until(mut met: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !met() {
        assert!(Instant::now() < end, "it does not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn spec(device: &std::path::Path) -> LoadSpec {
    LoadSpec {
        device: device.to_str().unwrap().into(),
        seconds: Some(1),
        threads: 2,
        depth: 4,
        block_sizes: vec![512, 4096, 24576, 65536],
        mix: Mix { read: 50, write: 40, sync: 2, discard: 4, zero: 4 },
        prefill: true,
        ..LoadSpec::default()
    }
}

#[test]
fn an_honest_disk_passes() {
    let mut host = Host::new();
    let disk = host.disk("a", 16 << 20);
    let report = host.load(&spec(&disk));
    assert_eq!((report.errors, report.mismatches, &report.problems[..]), (0, 0, &[][..]));
    assert!(
        report.reads > 0 && report.writes > 0 && report.syncs > 0 && report.discards > 0 && report.zeroes > 0
    );
    assert!(report.p50_us <= report.p99_us && report.p99_us <= report.max_us && report.max_us > 0);
    let verified = host.verify("load");
    assert_eq!((verified.errors, verified.mismatches), (0, 0));
    assert_eq!(verified.bytes, 16 << 20);
}

#[test]
fn a_lying_disk_is_caught() {
    let mut host = Host::new();
    let disk = host.disk("a", 8 << 20);
    let only = LoadSpec { mix: Mix { read: 0, write: 1, sync: 0, discard: 0, zero: 0 }, ..spec(&disk) };
    let sizes = LoadSpec { block_sizes: vec![4096], ..only };
    host.load(&sizes);
    let file = OpenOptions::new().read(true).write(true).open(&disk).unwrap();
    let mut block = vec![0; 4096];
    // Misplaced: block 2 on block 3. Lost: block 5. Corrupt: one byte of block 7.
    file.read_exact_at(&mut block, 2 * 4096).unwrap();
    file.write_all_at(&block, 3 * 4096).unwrap();
    file.write_all_at(&[0; 4096], 5 * 4096).unwrap();
    file.write_all_at(&[0xee], 7 * 4096 + 100).unwrap();
    let verified = host.verify("load");
    assert_eq!(verified.mismatches, 3, "{:?}", verified.problems);
    for (problem, word) in verified.problems.iter().zip(["misplaced", "zeroes", "corrupt"]) {
        assert!(problem.contains(word), "{problem}");
    }
    // A reading load finds nothing wrong in blocks it does not know, a second one on the same disk is told apart.
    let again = LoadSpec { load: "other".into(), prefill: false, ..sizes };
    host.load(&again);
    assert!(host.verify("load").problems.iter().any(|problem| problem.contains("foreign")));
}

#[test]
fn a_stale_disk_is_caught_while_it_runs() {
    let mut host = Host::new();
    let disk = host.disk("a", 4 << 20);
    let mix = Mix { read: 50, write: 50, sync: 0, discard: 0, zero: 0 };
    let endless = LoadSpec { seconds: None, direct: true, mix, ..spec(&disk) };
    let mut request = serde_json::to_value(endless).unwrap();
    request["do"] = json!("load");
    let running = host.send(request);
    let file = OpenOptions::new().read(true).write(true).open(&disk).unwrap();
    let content = || {
        let mut bytes = vec![0; 4 << 20];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    let blocks = |bytes: &[u8]| bytes.chunks(512).map(<[u8]>::to_vec).collect::<Vec<_>>();
    // All is written once, and then most of it again.
    until(|| blocks(&content()).iter().all(|block| block.iter().any(|byte| *byte != 0)));
    let old = content();
    until(|| {
        let (before, now) = (blocks(&old), blocks(&content()));
        before.iter().zip(&now).filter(|(before, now)| before != now).count() > before.len() / 2
    });
    file.write_all_at(&old, 0).unwrap();
    file.sync_all().unwrap();
    assert!(host.call(json!({"do": "verify", "load": "load"})).unwrap_err().contains("still runs"));
    let mut mark = Report::default();
    until(|| {
        mark = serde_json::from_value(host.call(json!({"do": "mark", "load": "load"})).unwrap()).unwrap();
        mark.mismatches > 0
    });
    assert!(mark.problems.iter().any(|problem| problem.contains("stale")), "{:?}", mark.problems);
    host.call(json!({"do": "stop", "load": "load"})).unwrap();
    let report: Report = serde_json::from_value(host.end(running).unwrap()).unwrap();
    assert!(report.requests >= mark.requests && report.mismatches >= mark.mismatches);
    host.call(json!({"do": "forget", "load": "load"})).unwrap();
    assert!(host.call(json!({"do": "mark", "load": "load"})).is_err());
}

#[test]
fn copies_and_digests_agree() {
    let mut host = Host::new();
    let disk = host.disk("a", 4 << 20);
    let request =
        json!({"do": "copy-check", "device": disk, "offset": 8192, "bytes": 1_000_000 / 4096 * 4096});
    let copied: CopyCheck = serde_json::from_value(host.call(request).unwrap()).unwrap();
    assert!(copied.same);
    let request = json!({"do": "sha256", "device": disk, "offset": 8192, "bytes": copied.bytes});
    assert_eq!(host.call(request).unwrap()["sha256"], copied.read_sha256);
}

#[test]
fn stamps_tell_which_round_is_on_the_disk() {
    let mut host = Host::new();
    let disk = host.disk("a", 1 << 20);
    let spec = |round, count| StampSpec {
        device: disk.to_str().unwrap().into(),
        count,
        round,
        flush_every: 2,
        ..StampSpec::default()
    };
    let ask = |what: &str, spec: StampSpec| {
        let mut request = serde_json::to_value(spec).unwrap();
        request["do"] = json!(what);
        request
    };
    host.call(ask("write-stamp", spec(1, 10))).unwrap();
    host.call(ask("write-stamp", spec(2, 4))).unwrap();
    OpenOptions::new().write(true).open(&disk).unwrap().write_all_at(&[1], 9 * 4096 + 512).unwrap();
    let found: Stamps = serde_json::from_value(host.call(ask("read-stamp", spec(1, 12))).unwrap()).unwrap();
    assert_eq!(found.rounds, [2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0]);
    assert_eq!(found.broken.len(), 1);
}

#[test]
fn bad_requests_are_answered_with_the_reason() {
    let mut host = Host::new();
    let disk = host.disk("a", 1 << 20);
    let path = disk.to_str().unwrap();
    for (request, word) in [
        (json!({"do": "fly"}), "unknown variant"),
        (json!({"do": "load", "device": "/dev/none"}), "does not exist"),
        (json!({"do": "load", "device": "serial:none"}), "no disk has the serial"),
        (json!({"do": "load", "device": path, "block_sizes": [1000]}), "not a multiple"),
        (json!({"do": "load", "device": path, "depth": 1000}), "lower one"),
        (json!({"do": "load", "device": path, "depth": 64}), "workers"),
        (json!({"do": "load", "device": path, "offset": 4096, "bytes": 1 << 20}), "are not on"),
        (json!({"do": "copy-check", "device": path, "bytes": 100}), "multiples"),
    ] {
        let error = host.call(request.clone()).unwrap_err();
        assert!(error.contains(word), "{request}: {error}");
    }
}
