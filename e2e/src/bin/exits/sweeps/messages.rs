//! The paper's figure 3, round trips by the size of a message, and streams by the size of what is sent at once: three NICs, with and
//! without clusters.

use super::{Done, E1000, Follower, Nic, RTL8139, Test, VIRTIO};
use anyhow::{Context, Result};
use ioplane_e2e::clustering::saved;
use ioplane_e2e::{L1, L2};
use serde::Serialize;

const NICS: [Nic; 3] = [E1000, RTL8139, VIRTIO];
const SIZES: [u32; 5] = [1, 64, 1024, 4096, 16384];
const ROUND_TRIPS: u32 = 24;
/// Messages of a stream: so many, and fewer if that is more bytes than these.
const MESSAGES: u32 = 100;
const STREAM: u32 = 128 << 10;

/// What one message takes.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub nic: &'static str,
    pub mode: &'static str,
    /// `ping-pong` or `stream`.
    pub kind: &'static str,
    pub bytes: u32,
    pub messages: u32,
    pub exits: f64,
    pub port_exits: f64,
    pub mmio_exits: f64,
    pub interrupts: f64,
    /// Accesses that took no exit.
    pub spared: f64,
    /// By the guest's clock: of a round trip, or until all of the stream has arrived.
    pub us: f64,
}

fn tests() -> Vec<(&'static str, Test)> {
    let round_trips =
        SIZES.map(|bytes| ("ping-pong", Test { kind: "tcp-rr".into(), bytes, units: ROUND_TRIPS }));
    let streams = SIZES.map(|bytes| {
        ("stream", Test { kind: "tcp-stream".into(), bytes, units: MESSAGES.min(STREAM / bytes) })
    });
    round_trips.into_iter().chain(streams).collect()
}

pub fn rows(l1: &L1, guest: &L2<'_>, name: &str, say: &dyn Fn(&str)) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for nic in NICS {
        let follower = Follower::start(l1, guest, nic)?;
        for (mode, word) in [("plain", "off"), ("clusters", "on")] {
            l1.clustering(&format!("{word} --vm {name}"))?;
            // The first one resolves addresses, and the library learns which places pay.
            follower.tests(&[Test { kind: "tcp-rr".into(), bytes: 64, units: ROUND_TRIPS }])?;
            for (kind, test) in tests() {
                let before = saved(&l1.clustering(&format!("--vm {name}"))?);
                let done = follower
                    .tests(std::slice::from_ref(&test))
                    .with_context(|| format!("{}, {test:?}", nic.name))?;
                let spared = saved(&l1.clustering(&format!("--vm {name}"))?) - before;
                rows.extend(done.iter().map(|done| Row::of(nic.name, mode, kind, &test, done, spared)));
            }
            say(&format!("messages through {}, {mode}", nic.name));
        }
        follower.end()?;
    }
    Ok(rows)
}

impl Row {
    fn of(
        nic: &'static str,
        mode: &'static str,
        kind: &'static str,
        test: &Test,
        done: &Done,
        spared: u64,
    ) -> Row {
        let each = |count: f64| count / done.units;
        Row {
            nic,
            mode,
            kind,
            bytes: test.bytes,
            messages: test.units,
            exits: each(done.exits),
            port_exits: each(done.port_exits),
            mmio_exits: each(done.mmio_exits),
            interrupts: each(done.interrupts),
            spared: each(spared as f64),
            us: each(done.ns / 1000.0),
        }
    }
}

pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "\nFor each message, in L1 (times are of a translated processor; plain is the library switched off):\n\n\
         | NIC | | bytes | exits, plain | clusters | MMIO that QEMU answers, plain | clusters | interrupts, plain | clusters | \
         us, plain | clusters |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for plain in rows.iter().filter(|row| row.mode == "plain") {
        let other = rows.iter().find(|row| {
            row.mode != plain.mode && (row.nic, row.kind, row.bytes) == (plain.nic, plain.kind, plain.bytes)
        });
        let Some(other) = other else { continue };
        text += &format!(
            "| {} | {} | {} | {:.1} | {:.1} | {:.2} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} |\n",
            plain.nic,
            plain.kind,
            plain.bytes,
            plain.exits,
            other.exits,
            plain.mmio_exits,
            other.mmio_exits,
            plain.interrupts,
            other.interrupts,
            plain.us,
            other.us
        );
    }
    text
}
