//! The lines between the host and the program in the guest: one JSON object a line, both ways.
//!
//! The host numbers its requests; each line that answers a request carries that number. A request ends with exactly
//! one `ok` or `error`; `load` and `write-stamp` send `progress` lines before it.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;

/// The version of this protocol; `hello` tells it, and the host refuses another.
pub const VERSION: u32 = 1;

/// The virtio-serial port the program listens on.
pub const PORT: &str = "org.ioplane.load";

/// One line from the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the host; repeated in every answer.
    pub id: u64,
    /// What to do.
    #[serde(flatten)]
    pub command: Command,
}

/// What the host can ask for. `device` is a node (`/dev/vdb`), a name (`vdb`) or `serial:NAME`, which finds a disk by its
/// virtio serial: names change with hot-plug, serials do not.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Command {
    /// Answers [`Hello`].
    Hello,
    /// Answers a list of [`Blockdev`], one a disk.
    List,
    /// Answers one [`Blockdev`].
    Blockdev {
        /// Which disk.
        device: String,
    },
    /// Answers how many interrupts the disk's queues have raised since boot, as `{"interrupts": n}`.
    Interrupts {
        /// Which disk.
        device: String,
    },
    /// Runs a verified mixed load; progress each second, [`Report`] at the end.
    Load(LoadSpec),
    /// Answers the [`Report`] of the time since the last mark (or the start), and starts a new count.
    Mark {
        /// Name of a running load.
        load: String,
    },
    /// Asks a load to end; its own request then answers.
    Stop {
        /// Name of a load.
        load: String,
    },
    /// Reads again everything an ended load knows and answers [`Verified`].
    Verify {
        /// Name of a load that has ended.
        load: String,
    },
    /// Drops what is remembered of an ended load.
    Forget {
        /// Name of a load that has ended.
        load: String,
    },
    /// Writes a pattern, syncs, reads it back past the page cache; answers [`CopyCheck`].
    CopyCheck {
        /// Which disk.
        device: String,
        /// First byte, a multiple of 4096.
        #[serde(default)]
        offset: u64,
        /// How many bytes, a multiple of 4096.
        bytes: u64,
        /// Chooses the pattern.
        #[serde(default)]
        seed: u64,
    },
    /// Answers `{"sha256": hex}` of a range, read past the page cache.
    Sha256 {
        /// Which disk.
        device: String,
        /// First byte, a multiple of 4096.
        #[serde(default)]
        offset: u64,
        /// How many bytes, a multiple of 4096.
        bytes: u64,
    },
    /// Writes stamped blocks with a flush after each `flush_every`; `progress` tells what is on the disk for good.
    WriteStamp(StampSpec),
    /// Reads them back, usually after a crash; answers [`Stamps`].
    ReadStamp(StampSpec),
    /// Brings up a virtio-net interface; answers [`Interface`].
    NetUp {
        /// Its Ethernet address.
        mac: String,
    },
    /// Takes one TCP connection and receives to its end; answers [`Transfer`].
    NetReceive {
        /// Number of the interface.
        index: u32,
        /// Port to listen on.
        port: u16,
    },
    /// Sends a pattern by TCP; answers [`Transfer`] when the other end has all of it.
    NetSend {
        /// Number of the interface.
        index: u32,
        /// Ethernet address of the other end.
        to: String,
        /// Its port.
        port: u16,
        /// For how long; without it until the other end says that it is enough.
        seconds: Option<f64>,
        /// Chooses the pattern.
        #[serde(default)]
        seed: u64,
        /// Bytes of each write, each sent as soon as it can be; 0 for large ones.
        #[serde(default)]
        write: usize,
    },
    /// Sends UDP requests to an echo, one at a time; answers [`Requests`].
    NetRequests {
        /// Number of the interface.
        index: u32,
        /// Ethernet address of the echo.
        to: String,
        /// Its port.
        port: u16,
        /// For how long.
        seconds: f64,
        /// Bytes of each.
        bytes: usize,
    },
    /// Runs iperf3 as a server for one test; answers `{}` when that is over.
    IperfServe {
        /// Port to listen on.
        port: u16,
    },
    /// Runs iperf3 against the server at another guest; answers [`Throughput`].
    IperfRun {
        /// Name of the interface.
        interface: String,
        /// Ethernet address of the other end.
        to: String,
        /// Its port.
        port: u16,
        /// For how long.
        seconds: u32,
    },
    /// Answers a list of kernel log lines that tell of I/O errors, stuck tasks or kernel bugs.
    DmesgErrors,
    /// Syncs, remounts read-only, answers, and switches the machine off.
    Poweroff,
}

/// One line to the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The number of the request.
    pub id: u64,
    /// What is said.
    #[serde(flatten)]
    pub body: Body,
}

/// What an [`Answer`] says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Body {
    /// Done; the request ends.
    Ok(Value),
    /// Failed, with the reason; the request ends.
    Error(String),
    /// News; the request goes on.
    Progress(Value),
}

/// The answer to `hello`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u32,
    /// `uname -r`.
    pub kernel: String,
    /// Seconds since the kernel started.
    pub uptime: f64,
    /// How many vCPUs are on line.
    pub cpus: u32,
    /// `efi` or `bios` (direct kernel boot counts as `bios`).
    pub firmware: String,
    /// The kernel's command line.
    pub cmdline: String,
}

/// A disk as the guest's kernel sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Blockdev {
    /// `vdb`.
    pub name: String,
    /// The virtio serial; empty if it has none.
    pub serial: String,
    /// Bytes.
    pub size: u64,
    /// Read-only.
    pub ro: bool,
    /// Bytes.
    pub logical_block_size: u32,
    /// Bytes.
    pub physical_block_size: u32,
    /// `write back` or `write through`.
    pub write_cache: String,
    /// Bytes; 0 where discard is not offered.
    pub discard_max: u64,
    /// Bytes; 0 where write zeroes is not offered.
    pub write_zeroes_max: u64,
    /// Bytes.
    pub minimum_io_size: u32,
    /// Bytes; 0 if not told.
    pub optimal_io_size: u32,
    /// How many hardware queues.
    pub queues: u32,
}

/// How often each kind of request is chosen; weights, not percent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Mix {
    /// Reads, each verified.
    pub read: u32,
    /// Writes.
    pub write: u32,
    /// `fdatasync`.
    pub sync: u32,
    /// `BLKDISCARD`.
    pub discard: u32,
    /// `BLKZEROOUT`.
    pub zero: u32,
}

impl Default for Mix {
    fn default() -> Self {
        Mix { read: 55, write: 43, sync: 2, discard: 0, zero: 0 }
    }
}

/// A verified mixed load. `threads * depth` requests are kept in flight.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct LoadSpec {
    /// A name by which to mark, stop and verify it.
    pub load: String,
    /// Which disk.
    pub device: String,
    /// How long; until `stop` if absent.
    pub seconds: Option<u64>,
    /// Threads.
    pub threads: u32,
    /// Requests in flight a thread.
    pub depth: u32,
    /// Sizes to choose from, in bytes, each a multiple of the logical block size, at most 1 MiB.
    pub block_sizes: Vec<u32>,
    /// What to do how often.
    pub mix: Mix,
    /// Where the region starts, a multiple of 4096.
    pub offset: u64,
    /// How long the region is; 0 means to the end of the disk.
    pub bytes: u64,
    /// All requests past the page cache; otherwise one in four goes through it.
    pub direct: bool,
    /// Write the whole region once before the mix starts, so that every read has something to check.
    pub prefill: bool,
    /// Chooses the sequence of requests.
    pub seed: u64,
}

impl Default for LoadSpec {
    fn default() -> Self {
        LoadSpec {
            load: "load".into(),
            device: String::new(),
            seconds: Some(3),
            threads: 1,
            depth: 4,
            block_sizes: vec![4096],
            mix: Mix::default(),
            offset: 0,
            bytes: 0,
            direct: false,
            prefill: false,
            seed: 1,
        }
    }
}

/// A line of progress of a load; counts are since its start.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Seconds since the start.
    pub seconds: f64,
    /// Requests completed.
    pub requests: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Blocks that did not hold what they must.
    pub mismatches: u64,
    /// Age of the oldest request now in flight, in microseconds.
    pub oldest_us: u64,
}

/// What a load, or a stretch of one, came to.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Seconds it covers.
    pub seconds: f64,
    /// All requests completed.
    pub requests: u64,
    /// Of those, reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Syncs.
    pub syncs: u64,
    /// Discards.
    pub discards: u64,
    /// Zeroings.
    pub zeroes: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Bytes, in units of a million, a second.
    pub mb_per_s: f64,
    /// Median time of a request.
    pub p50_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// The longest stall.
    pub max_us: u64,
    /// All times, for adding up guests.
    #[serde(default)]
    pub times: Times,
    /// Requests that failed.
    pub errors: u64,
    /// Blocks that did not hold what they must.
    pub mismatches: u64,
    /// The first few of both, in words.
    pub problems: Vec<String>,
}

/// How long requests took: pairs of a time in microseconds and how many took about that long (within a hundredth), shortest
/// first.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Times(pub Vec<(u64, u64)>);

impl Times {
    /// Adds those of another load.
    pub fn add(&mut self, other: &Times) {
        self.0.extend(&other.0);
        self.0.sort_unstable();
    }

    /// The time within which `part` (0 to 1) of the requests were done; 0 without requests.
    pub fn quantile(&self, part: f64) -> u64 {
        let all: u64 = self.0.iter().map(|(_, count)| count).sum();
        let mut left = (all as f64 * part).ceil().max(1.0) as u64;
        for (time, count) in &self.0 {
            if left <= *count {
                return *time;
            }
            left -= count;
        }
        self.0.last().map_or(0, |(time, _)| *time)
    }
}

impl fmt::Debug for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} different", self.0.len())
    }
}

/// The answer to `verify`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Verified {
    /// Blocks whose content is known and was checked.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Blocks that did not hold what they must.
    pub mismatches: u64,
    /// Reads that failed.
    pub errors: u64,
    /// SHA-256 of all checked blocks in order.
    pub sha256: String,
    /// The first few mismatches in words.
    pub problems: Vec<String>,
}

/// The answer to `copy-check`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CopyCheck {
    /// Bytes written and read back.
    pub bytes: u64,
    /// What was written.
    pub written_sha256: String,
    /// What came back.
    pub read_sha256: String,
    /// Whether they are equal.
    pub same: bool,
    /// Time of writing and syncing.
    pub write_seconds: f64,
    /// Time of reading.
    pub read_seconds: f64,
}

/// Stamped blocks for power-cut tests: block `i` lies at `offset + i * block`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct StampSpec {
    /// Which disk.
    pub device: String,
    /// Where block 0 lies, a multiple of 4096.
    pub offset: u64,
    /// Bytes a block, a multiple of 4096.
    pub block: u32,
    /// How many.
    pub count: u64,
    /// Flush after so many blocks.
    pub flush_every: u64,
    /// Which round; a later round overwrites an earlier one and must have a higher number. From 1.
    pub round: u32,
}

impl Default for StampSpec {
    fn default() -> Self {
        StampSpec { device: String::new(), offset: 0, block: 4096, count: 64, flush_every: 1, round: 1 }
    }
}

/// A line of progress of `write-stamp`: blocks below `flushed` of this round are on the disk, the flush was acknowledged.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct StampProgress {
    /// How many blocks are acknowledged by a flush.
    pub flushed: u64,
}

/// The answer to `read-stamp`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Stamps {
    /// For each block the round found in it; 0 where there is no whole stamp.
    pub rounds: Vec<u32>,
    /// Blocks that hold parts of different rounds, or broken ones.
    pub broken: Vec<String>,
}

/// The answer to `net-up`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Interface {
    /// `eth0`.
    pub name: String,
    /// Its number, for the scope of link-local addresses.
    pub index: u32,
    /// Its Ethernet address.
    pub mac: String,
    /// Bytes of a packet.
    pub mtu: u32,
    /// Its link-local address.
    pub address: String,
}

/// The answer to `net-receive` and `net-send`: equal but for the time if every byte was right.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Transfer {
    /// Bytes.
    pub bytes: u64,
    /// SHA-256 of them.
    pub sha256: String,
    /// Seconds.
    pub seconds: f64,
}

/// The answer to `net-requests`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Requests {
    /// Answered.
    pub answered: u64,
    /// Not answered within a second.
    pub lost: u64,
    /// Half of them took no longer, microseconds.
    pub p50_us: u64,
    /// 99 of 100 took no longer, microseconds.
    pub p99_us: u64,
}

/// The answer to `iperf-run`: what arrived, both ways at once.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Throughput {
    /// Bytes that the other end has received.
    pub there: u64,
    /// Bytes that this end has received.
    pub back: u64,
    /// Segments that this end had to send again.
    pub retransmits: u64,
    /// Seconds.
    pub seconds: f64,
}
