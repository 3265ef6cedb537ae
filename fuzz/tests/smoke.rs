//! Every target for a few seconds, by any cargo: half from a fixed seed, half from one that is new each time and said.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use ioplane_fuzz::{TARGETS, mutate};

fn smoke(name: &str) {
    let seconds: u64 = std::env::var("IOPLANE_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(4);
    let target = TARGETS.iter().find(|target| target.name == name).copied().expect("a target of that name");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64);
    let artifacts = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/artifacts"));
    for seed in [1, now] {
        let outcome = mutate::run(target, Duration::from_millis(seconds * 500), seed, &artifacts);
        println!("{name}: {} inputs, {} signatures, seed {seed}", outcome.runs, outcome.signatures);
        if let Some((path, text)) = outcome.finding {
            panic!("{name}, seed {seed}: {text}\nagain: script/fuzz --replay {name} {}", path.display());
        }
        assert!(outcome.signatures > 1, "{name} sees nothing");
    }
}

#[test]
fn ring_walk() {
    smoke("ring_walk");
}

#[test]
fn packed_ring() {
    smoke("packed_ring");
}

#[test]
fn blk_request() {
    smoke("blk_request");
}

#[test]
fn state_load() {
    smoke("state_load");
}

#[test]
fn vhost_user() {
    smoke("vhost_user");
}

#[test]
fn vfio_user() {
    smoke("vfio_user");
}

#[test]
fn segmentation() {
    smoke("segmentation");
}

#[test]
fn frames() {
    smoke("frames");
}

#[test]
fn net_headers() {
    smoke("net_headers");
}

#[test]
fn net_control() {
    smoke("net_control");
}

#[test]
fn directory() {
    smoke("directory");
}

#[test]
fn join() {
    smoke("join");
}

#[test]
fn incoming_monitor() {
    smoke("incoming_monitor");
}

#[test]
fn session() {
    smoke("session");
}

#[test]
fn symbols() {
    smoke("symbols");
}

#[test]
fn tracepoints() {
    smoke("tracepoints");
}

#[test]
fn monitor() {
    smoke("monitor");
}

#[test]
fn nbd_server() {
    smoke("nbd_server");
}

#[test]
fn nbd_client() {
    smoke("nbd_client");
}

#[test]
fn nbd_requests() {
    smoke("nbd_requests");
}

#[test]
fn nbd_replies() {
    smoke("nbd_replies");
}

#[test]
fn nbd_sums() {
    smoke("nbd_sums");
}

#[test]
fn moved_state() {
    smoke("moved_state");
}
