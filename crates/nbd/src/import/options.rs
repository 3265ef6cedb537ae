//! How to import.

use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use ioplane_identity::IdentityDirectory;
use tokio::sync::Notify;

use super::address::Address;
use crate::reserve::{RESERVE, ReserveQuery, ReservedRates};

/// What becomes of writes and flushes in flight when a connection is lost and nobody can say whether the server still works on them:
/// a server of others, or one of ours without a [`Fence`]. Reads are always sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unfenced {
    /// They fail, and so does the next flush if acknowledged writes were not flushed. The guest decides.
    #[default]
    Fail,
    /// They are sent again. A server that carries the old ones out later undoes newer writes: only for servers that finish or forget
    /// the requests of a connection when it is lost, and whose cache survives whatever ends the connection.
    Replay,
}

/// What becomes of an import whose exporter cannot be reached when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AtStart {
    /// Opening fails.
    #[default]
    Refuse,
    /// Opening waits until it can be reached.
    Wait,
}

/// What [`Fence::confirm`] returns.
pub type Confirmed<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// Asks an exporter of ours whether an old connection is done with. Control half.
pub trait Fence: Send + Sync + fmt::Debug {
    /// Ends when the exporter has confirmed that it reads no older connection of this import any more, and that all it had begun for them has
    /// ended. Before that nothing is sent on the new connection. `instance` is what the exporter calls itself, `epoch` counts the connections of
    /// one channel. An error is a reason to connect again; waiting for too long is one as well.
    fn confirm<'a>(&'a self, instance: &'a str, epoch: u32) -> Confirmed<'a>;
}

/// Where an import keeps what it needs to come back as the same holder. Control half; all may block.
pub trait ClaimKeeper: Send + Sync + fmt::Debug {
    /// Its identity: like nobody else's, and the same after a restart. Letters, digits, `-`. Durable when it is told.
    fn holder(&self) -> Result<String, String>;
    /// What was remembered last.
    fn remembered(&self) -> RememberedClaim;
    /// Another process may have written what is remembered since it was read.
    fn read_again(&self) -> Result<(), String>;
    /// A claim that is used from now on. Durable when it returns.
    fn remember(&self, generation: u64) -> Result<(), String>;
    /// Nobody writes by the claim any more, and its release begins. Durable when it returns.
    fn set_down(&self) -> Result<(), String>;
    /// The claim has been released. The holder stays the same.
    fn released(&self);
    /// The claim has been given back, or is another's, and the disk goes.
    fn forget(&self);
}

/// What an import remembers of its claim over restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RememberedClaim {
    /// It has none.
    #[default]
    None,
    /// It has this generation, and a guest may write by it.
    Held(u64),
    /// No guest writes by this generation any more; whether the exporter knows that is not certain.
    SetDown(u64),
}

/// When an import gets its claim for the first time. After each [`ioplane_storage::Backing::rest`] it gets it again with the next channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimTime {
    /// When it is opened.
    Open,
    /// With its first channel.
    FirstChannel,
}

/// What an import does to get its claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ClaimWish {
    /// Goes on with what it remembers; without that it asks for the next generation.
    #[default]
    Own,
    /// The same; if what it remembers is not good any more it asks for the next one.
    New,
    /// Takes the next one, whoever holds the export.
    TakeOver,
    /// Goes on with what it remembers and asks nobody: its predecessor still uses it.
    Inherit,
}

/// Whose claim, and what for.
#[derive(Debug, Clone)]
pub struct ClaimOptions {
    /// See [`ClaimKeeper`].
    pub keeper: Arc<dyn ClaimKeeper>,
    /// Who this is, for people.
    pub name: String,
    /// See [`ClaimWish`].
    pub wish: ClaimWish,
    /// See [`ClaimTime`].
    pub time: ClaimTime,
    /// How long a channel waits for it while another one holds the export, whose release may be on its way.
    pub patience: Duration,
}

/// What an exporter is to keep for an import of its capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReserveOptions {
    /// How much per second; nothing if nothing is reserved yet.
    pub rates: ReservedRates,
    /// Who this is, for people.
    pub name: String,
}

/// How to import an export.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The export.
    pub address: Address,
    /// Without headway for so long, with requests in flight, the network counts as lost. Longer than the server's disk may take.
    pub dead_after: Duration,
    /// How long a server that confirms no epochs may take to close a connection that its channel has left with requests in flight: until then
    /// [`ioplane_storage::Backing::wait_quiet`] waits for what these still write. Whatever `dead_after` is, which says nothing of the server's disk. At most 10 s, which is less
    /// than whoever waits for quiet does.
    pub closes_within: Duration,
    /// Most time for one attempt to connect, handshake included.
    pub connect_timeout: Duration,
    /// Least and most time between two attempts, each cut or lengthened by a quarter at random.
    pub retry: (Duration, Duration),
    /// Without a connection for so long, requests fail with EIO until there is one again. `None`: they wait.
    pub give_up_after: Option<Duration>,
    /// See [`Unfenced`].
    pub unfenced: Unfenced,
    /// See [`Fence`].
    pub fence: Option<Arc<dyn Fence>>,
    /// Who uses the export, the same after a restart and unlike anybody else: letters, digits and `-`. An exporter of ours ends what an earlier session of
    /// the holder has begun before a later one is served.
    pub holder: String,
    /// See [`AtStart`].
    pub at_start: AtStart,
    /// Who this host is, for addresses with TLS. Read anew for each connection.
    pub identity: IdentityDirectory,
    /// Bytes for each channel in which writes are kept until they are durable at the exporter (at least 1 MiB; 0: they are not kept). Only used if
    /// the exporter says which instance it is, and requests are sent again.
    pub retain: usize,
    /// A file in which the counts of acknowledged and of flushed writes outlive this process. In a directory of a file system in memory, since
    /// I/O cores store into it; no other import at a time has it, except during an upgrade of the daemon.
    pub mark: Option<PathBuf>,
    /// The claim to write, at exporters that keep claims. Without it such an export cannot be used while another one has it.
    pub claim: Option<ClaimOptions>,
    /// What is reserved when it is opened, for the holder above, and until [`super::Import::reserve`] or [`super::Import::give_back_reservation`]; opening fails if the exporter refuses it
    /// and [`ClaimWish`] is not to go on with what was there before.
    pub reserve: Option<ReserveOptions>,
    /// Which of the server's addresses is tried first: it grows with each attempt that comes to nothing.
    pub turn: Arc<AtomicUsize>,
    /// The last instance of the exporter that has had sums: one handshake without them is not believed.
    pub summed: Arc<ArcSwapOption<String>>,
    /// Handshakes in a row in which that instance had none.
    pub without_sums: Arc<AtomicU32>,
    /// Woken when the export has grown, or its exporter has told something.
    pub news: Arc<Notify>,
}

/// See [`ImportOptions::closes_within`].
const LONGEST_CLOSING: Duration = Duration::from_secs(10);

/// Copies of 16 MiB for each channel.
const RETAIN: usize = 16 << 20;

/// A holder that has not been there before.
fn anybody() -> String {
    let random = || RandomState::new().hash_one(());
    format!("{:016x}{:016x}", random(), random())
}

impl ImportOptions {
    /// The identity is that of the usual directory; 10 s until a silent network counts as lost, 10 s to connect, attempts every 0.1 to 5 s, for ever;
    /// writes are kept in 16 MiB for each channel.
    pub fn new(address: Address) -> Self {
        ImportOptions {
            address,
            dead_after: Duration::from_secs(10),
            closes_within: LONGEST_CLOSING,
            connect_timeout: Duration::from_secs(10),
            retry: (Duration::from_millis(100), Duration::from_secs(5)),
            give_up_after: None,
            unfenced: Unfenced::default(),
            fence: None,
            holder: anybody(),
            at_start: AtStart::default(),
            identity: IdentityDirectory::new(ioplane_identity::DEFAULT_DIRECTORY),
            retain: RETAIN,
            mark: None,
            claim: None,
            reserve: None,
            turn: Arc::default(),
            summed: Arc::default(),
            without_sums: Arc::default(),
            news: Arc::default(),
        }
    }
}

impl ImportOptions {
    /// How long a server has to close a connection that has ended. What one that is `fenced` still does lands before the next connection is used, so there it
    /// need not be waited for longer than for a silent network.
    pub(super) fn closing_limit(&self, fenced: bool) -> Duration {
        let most = self.closes_within.min(LONGEST_CLOSING);
        if fenced { self.dead_after.min(most) } else { most }
    }

    /// How an exporter is asked to reserve so much; nothing where nobody is named who asks.
    pub(super) fn reserve_query(&self, rates: ReservedRates) -> Option<String> {
        let ReserveOptions { name, .. } = self.reserve.as_ref()?;
        Some(ReserveQuery { holder: self.holder.clone(), rates, name: name.clone() }.to_string())
    }

    /// The same for what is reserved when it is opened. An import that was there before asks for nothing, too: what it was granted before it was killed, and
    /// has not written down, is given back. Others that reserve nothing ask whether the exporter knows reservations, and leave what the holder has.
    pub(super) fn opening_query(&self) -> Option<String> {
        let rates = self.reserve.as_ref()?.rates;
        if rates.is_none() && !self.resumes() {
            return Some(RESERVE.to_owned());
        }
        self.reserve_query(rates)
    }

    /// Whether it goes on with a disk that was there before.
    pub(super) fn resumes(&self) -> bool {
        let wish = self.claim.as_ref().map(|claim| claim.wish);
        matches!(wish, Some(ClaimWish::Own | ClaimWish::Inherit))
    }
}
