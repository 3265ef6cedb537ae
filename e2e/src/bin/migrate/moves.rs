//! Moves of a guest under traffic, there and back, and what the other end of the cable sees of each.

use crate::MINUTE;
use crate::over_time::OverTime;
use crate::place::{Kind, ORIGINAL, Side, bring_module};
use anyhow::{Context, Result, ensure};
use ioplane_e2e::igb::GUEST_IP;
use ioplane_e2e::memories::{self, Stop};
use ioplane_e2e::process::{built, uptime};
use ioplane_e2e::sides::unseen;
use ioplane_e2e::streams::{Driven, Gap};
use ioplane_e2e::travel::VM;
use ioplane_e2e::uplink::Host;
use ioplane_e2e::{L1, L2, Traffic};
use ioplane_figures::report::{median, rounded};
use serde::Serialize;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Echoes before a move, and after it.
const AROUND: u64 = 100;
/// Bytes of TCP a second, each way. With them and [`RATE`] a translated guest whose registers are trapped has half of its time left. At eight times as many its
/// queues are never empty, and the longest gap without a move is two seconds.
const BYTES: u32 = 8192;
/// Datagrams a second.
pub const RATE: u32 = 25;
/// Between two looks at what QEMU is at.
const LOOK: Duration = Duration::from_millis(10);

/// One move.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Moved {
    /// The longest time between two datagrams of the guest, ms; and the longest one that was not during the move.
    pub gap_ms: f64,
    pub next_gap_ms: f64,
    /// The longest time between two reads of TCP.
    pub tcp_gap_ms: f64,
    /// Numbers of the guest's datagrams that never came, and of the peer's that the function had accepted and the guest has not seen.
    pub missed: u64,
    pub duplicated: u64,
    /// Numbers of the peer's datagrams that nobody took in.
    pub lost_while_away: u64,
    /// Echoes that came, and how long the traffic went on.
    pub echoes: u64,
    pub bytes: [u64; 2],
    /// Of a pair: the gap while the first NIC was unplugged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unplug_gap_ms: Option<f64>,
    /// Seconds of this machine in one of L1, whose clock is the daemons': what it has told of time was wrong where it was booted on a busy machine.
    pub l1_clock: f64,
    /// What was said of the move, by L1's clock.
    pub report: Value,
    #[serde(skip)]
    pub over_time: OverTime,
}

impl Moved {
    fn of(driven: &Driven, unseen: u64, l1_clock: f64, report: Value) -> Moved {
        let gap = |at: usize| driven.gaps.get(at).map_or(0.0, |gap| gap.ms);
        Moved {
            gap_ms: gap(0),
            next_gap_ms: gap(1),
            tcp_gap_ms: driven.tcp_gap.ms,
            missed: driven.back.lost + unseen,
            duplicated: driven.there.duplicated + driven.back.duplicated,
            lost_while_away: driven.there.lost.saturating_sub(unseen),
            echoes: driven.back.received,
            bytes: [driven.bytes_there, driven.bytes_back],
            unplug_gap_ms: None,
            l1_clock,
            report,
            over_time: driven.gaps.first().map_or_else(OverTime::default, |gap| OverTime::of(driven, gap)),
        }
    }

    /// A number of the report's only function.
    pub fn of_function(&self, field: &str) -> Option<u64> {
        self.report["functions"][0][field].as_u64()
    }

    /// For how long it stood still before its guest did, ms: that of a driver that cooperates.
    pub fn rested_before_ms(&self) -> Option<f64> {
        Some(self.report["functions"][0]["rested_before_ms"].as_f64()? * self.l1_clock)
    }

    /// What the function took, ms: of the time in which the guest stood still, and [before that](Moved::rested_before_ms). What a driver that cooperates does
    /// when its guest runs again is not in it.
    pub fn device_ms(&self) -> Option<f64> {
        let time = &self.report["device_time"];
        let stood = time["stop_ms"].as_f64()? + time["revive_ms"].as_f64()?;
        Some(stood * self.l1_clock + self.rested_before_ms().unwrap_or(0.0))
    }
}

/// A guest that moves.
pub struct Course<'a> {
    pub l1: &'a L1,
    pub sides: &'a [Side<'a>; 2],
    pub kind: Kind,
    pub rate: u32,
    /// The other end.
    far: &'a Host,
    guest: Option<L2<'a>>,
    /// Moves so far.
    done: usize,
}

impl<'a> Course<'a> {
    /// Boots the guest at the first side.
    pub fn begin(l1: &'a L1, sides: &'a [Side<'a>; 2], far: &'a Host, kind: Kind, rate: u32) -> Result<Self> {
        let name = format!("{}0", kind.word());
        let guest = l1.traveller(&name, &sides[0].args(kind)?)?;
        if kind == Kind::Cooperating {
            bring_module(l1, &guest)?;
        }
        let raised = kind.raise(&guest).and_then(|()| guest.depart());
        raised.with_context(|| {
            format!("QEMU said {}\nioplane said {}", guest.said(), sides[0].daemon.said())
        })?;
        Ok(Course { l1, sides, kind, rate, far, guest: Some(guest), done: 0 })
    }

    pub fn qemu(&self) -> String {
        format!("{}{}", self.kind.word(), self.done)
    }

    fn next(&self) -> String {
        format!("{}{}", self.kind.word(), self.done + 1)
    }

    pub fn has_moved(&self) -> bool {
        self.done > 0
    }

    pub fn here(&self) -> &'a Side<'a> {
        &self.sides[self.done % 2]
    }

    pub fn there(&self) -> &'a Side<'a> {
        &self.sides[(self.done + 1) % 2]
    }

    pub fn guest(&self) -> Result<&L2<'a>> {
        self.guest.as_ref().context("no guest is left")
    }

    /// A QEMU that waits at the other side.
    pub fn awaited(&self) -> Result<L2<'a>> {
        self.l1.awaits_traveller(&self.next(), &self.there().args(self.kind)?)
    }

    /// See [`unseen`]; of a NIC that is no function there is nothing to count.
    fn unseen(&self) -> Result<i64> {
        if self.kind.is_function() { unseen(self.l1, self.guest()?, &self.qemu()) } else { Ok(0) }
    }

    /// The command that moves it: for a NIC of ours the same one as for a function.
    fn command(&self) -> String {
        let (from, to) = (self.qemu(), self.next());
        let command = format!("move vm {VM} --to unix:/tmp/{to}.in --qmp /tmp/{from}.qmp");
        match self.kind {
            kind if kind.is_function() => {
                format!("{command} --there {} --qmp-there /tmp/{to}.qmp", self.there().control())
            }
            _ => command,
        }
    }

    /// Moves it to the other side under traffic. The QEMU that it has left ends.
    pub fn moves(&mut self) -> Result<Moved> {
        let before = self.unseen()?;
        let destination = self.awaited()?;
        let traffic = self.traffic()?;
        traffic.goes_on(AROUND)?;
        let pair = self.kind == Kind::FailoverVf;
        let clocks = self.clocks()?;
        let moved = if pair { self.migrates() } else { self.here().daemon.json(&self.command()) };
        let runs = moved.and_then(|report| {
            let state = destination.qmp("query-status", &json!({}))?;
            ensure!(state["status"] == "running", "the guest is there and {state}; {report}");
            Ok(report)
        });
        let report = match runs {
            Ok(report) => report,
            Err(error) => {
                let (here, there) = (self.here().daemon.said(), self.there().daemon.said());
                let said = format!("QEMU said {}\nioplane said {here}\n{there}", destination.said());
                destination.kill()?;
                return Err(error.context(said));
            }
        };
        if let Some(left) = self.guest.take() {
            left.kill()?;
        }
        (self.guest, self.done) = (Some(destination), self.done + 1);
        if self.kind == Kind::Cooperating {
            self.here().daemon.brought_back("nic0")?;
        }
        traffic.goes_on(AROUND)?;
        let l1_clock = self.clocks()?.since(&clocks);
        let driven = traffic.end()?;
        let unseen =
            u64::try_from(self.unseen()? - before).context("the driver had frames that were not counted")?;
        let mut moved = Moved::of(&driven, unseen, l1_clock, report);
        if pair {
            apart(&driven, &mut moved)?;
        }
        Ok(moved)
    }

    /// What the other end sends it, until that is ended.
    pub fn traffic(&self) -> Result<Traffic<'static>> {
        Traffic::start_at(&self.far.place(), GUEST_IP, self.rate, BYTES)
    }

    /// Its memory, compared with a copy at the other side. It stays where it is.
    pub fn compared(&self, number: usize, log: bool, traffic: &Traffic<'_>) -> Result<Stop> {
        let next = format!("compared{number}{}", self.kind.word());
        let there = self.l1.awaits_traveller(&next, &self.there().args(self.kind)?)?;
        let (guest, control) = ((self.guest()?, self.qemu()), self.here().control());
        let uri = format!("unix:/tmp/{next}.in");
        memories::stop((guest.0, &guest.1), &control, (there, &next, &uri), log, traffic)
    }

    /// L1's and this machine's.
    fn clocks(&self) -> Result<Clocks> {
        let before = uptime()?;
        let said = self.l1.run("cut -d' ' -f1 /proc/uptime", MINUTE)?;
        let inside = said.trim().parse().with_context(|| said)?;
        // Half of the way there and back.
        Ok(Clocks { inside, outside: f64::midpoint(before, uptime()?) })
    }

    /// By QEMU alone: when it came to which state.
    fn migrates(&self) -> Result<Value> {
        let (from, to, client) = (self.qemu(), self.next(), built("ioplane-qmp")?);
        let client = client.display();
        // With the guard of a function as it is nobody migrates.
        let guard = match self.kind {
            Kind::FailoverVf => format!(
                "{client} /tmp/{from}.watch blockdev-del '{{\"node-name\":\"unmovable-{ORIGINAL}\"}}'"
            ),
            _ => String::new(),
        };
        let job = self.l1.start(
            &format!(
                "set -e; {guard}
                 {client} /tmp/{from}.watch migrate '{{\"uri\":\"unix:/tmp/{to}.in\"}}'
                 last=
                 for try in $(seq 2000); do
                     now=$({client} /tmp/{from}.watch query-migrate | sed 's/.*\"status\":\"\\([a-z-]*\\)\".*/\\1/')
                     [ \"$now\" = \"$last\" ] || echo $now
                     last=$now
                     case $now in completed) exit 0;; failed|cancelled) break;; esac
                 done
                 {client} /tmp/{from}.watch query-migrate; exit 1"
            ),
        )?;
        let (mut states, end) = (serde_json::Map::new(), Instant::now() + 8 * MINUTE);
        loop {
            let over = job.has_ended();
            let (said, now) = (job.output(), uptime()?);
            // The last line may not be whole yet.
            for state in said.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
                states.entry(state.to_owned()).or_insert(json!(now));
            }
            ensure!(!over || states.contains_key("completed"), "QEMU did not migrate its guest: {said}");
            if over {
                return Ok(json!({ "states": states }));
            }
            ensure!(Instant::now() < end, "it does not come to its end: {said}");
            std::thread::sleep(LOOK);
        }
    }

    /// Ends the guest.
    pub fn end(self) -> Result<()> {
        self.guest.map_or(Ok(()), L2::kill)
    }
}

/// Seconds since both were booted, at one moment.
struct Clocks {
    inside: f64,
    outside: f64,
}

impl Clocks {
    /// Seconds of this machine in one of L1's, since then.
    fn since(&self, then: &Clocks) -> f64 {
        (self.outside - then.outside) / (self.inside - then.inside)
    }
}

/// Tells the gap while a pair's first NIC was unplugged from that of the switch-over, which ends after memory was copied.
fn apart(driven: &Driven, moved: &mut Moved) -> Result<()> {
    let states = &moved.report["states"];
    let active = states["active"].as_f64().with_context(|| states.to_string())?;
    let after = |gap: &&Gap| driven.begun_s + gap.at_ms / 1e3 >= active;
    let longest =
        |gaps: Vec<&Gap>| gaps.into_iter().copied().max_by(|a, b| a.ms.total_cmp(&b.ms)).unwrap_or_default();
    let (late, early) = driven.gaps.iter().partition(after);
    let (late, early) = (longest(late), longest(early));
    (moved.gap_ms, moved.unplug_gap_ms) = (late.ms, Some(early.ms));
    moved.over_time = OverTime::of(driven, &late);
    Ok(())
}

/// Of some moves.
pub fn middle(moves: &[Moved], of: impl Fn(&Moved) -> f64) -> Option<f64> {
    (!moves.is_empty()).then(|| rounded(median(moves.iter().map(of))))
}
