//! A disk is compared with another copy of it while its guest uses it (docs/decisions/0057-verify.md).
//!
//! ```text
//!   begin: the other copy opened, read only; what notes writes put in --> compared by a thread --> taken out
//! ```
//! Nothing is written, neither to the copies nor to the state file: a daemon that dies has nothing to clean up.

use std::os::unix::fs::FileTypeExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioplane_api::report::{EventWord, RangeReport, VerifyReport, VerifyWord};
use ioplane_api::request::VerifyForm;
use ioplane_api::size::Size;
use ioplane_api::spec::{BackingForm, BackingSpec, FormatWord};
use ioplane_nbd::import::Import;
use ioplane_storage::Backing;
use ioplane_storage::compare::{CompareFault, Comparer, Findings, Watched};
use tokio::sync::watch;

use super::swap::on_thread;
use super::{Disk, Opened, open_unchecked, remote};
use crate::context::{DaemonContext, Opener};
use crate::refusal::Refusal;
use crate::served::{ServedKind, blocking};

/// Attempts to put in or take out what notes writes: each waits for the guest's requests to end.
const ATTEMPTS: u32 = 20;
/// Between two attempts, at first.
const PAUSE: Duration = Duration::from_millis(200);
/// How long a command waits for a comparison to be cancelled.
const CANCEL: Duration = Duration::from_secs(60);

/// A comparison, under way or ended.
pub struct Verify {
    with: String,
    bytes: u64,
    other_bytes: u64,
    rate: Option<u64>,
    begun: Instant,
    findings: Mutex<Findings>,
    standing: watch::Sender<Standing>,
    cancelled: watch::Sender<bool>,
}

#[derive(Clone)]
struct Standing {
    state: VerifyWord,
    /// How long it took, once it has ended.
    took: Option<Duration>,
    why: Option<Refusal>,
}

impl Verify {
    fn findings(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_under_way(&self) -> bool {
        self.standing.borrow().state.is_under_way()
    }

    fn end(&self, state: VerifyWord, why: Option<Refusal>) {
        let took = Some(self.begun.elapsed());
        self.standing.send_modify(|standing| *standing = Standing { state, took, why });
    }

    fn report(&self) -> VerifyReport {
        let Standing { state, took, why } = self.standing.borrow().clone();
        let found = self.findings().clone();
        let time = took.unwrap_or_else(|| self.begun.elapsed());
        let range =
            |range: &ioplane_storage::compare::Range| RangeReport { offset: range.offset, len: range.len };
        VerifyReport {
            with: self.with.clone(),
            state,
            bytes: self.bytes,
            other_bytes: self.other_bytes,
            compared: found.compared,
            different: found.different,
            ranges: found.ranges,
            first: found.first.iter().map(range).collect(),
            written: found.written,
            bytes_per_s: (found.compared as f64 / time.as_secs_f64().max(0.001)) as u64,
            rate: self.rate,
            for_ms: time.as_millis() as u64,
            error: why.as_ref().map(|why| why.error.clone()),
            remedy: why.map(|why| why.remedy),
        }
    }

    fn result(&self) -> VerifyWord {
        match self.findings().different > 0 || self.bytes != self.other_bytes {
            true => VerifyWord::Different,
            false => VerifyWord::Equal,
        }
    }
}

/// The other copy as asked for; `None`: nobody has said which.
fn other(form: VerifyForm) -> Result<(Option<BackingSpec>, Option<u64>), Refusal> {
    let VerifyForm { path, remote, rate } = form;
    if rate.is_some_and(|Size(rate)| rate < 4096) {
        let remedy = "give at least 4K bytes per second, or leave it out";
        return Err(Refusal::invalid("a rate at which it would never end", remedy).at("rate"));
    }
    let rate = rate.map(|Size(rate)| rate);
    if path.is_none() && remote.is_none() {
        return Ok((None, rate));
    }
    let mut flaws = Vec::new();
    // Whatever it looks like: its bytes are compared.
    let format = path.is_some().then_some(FormatWord::Raw);
    let backing = BackingForm { path, remote, format, ..BackingForm::default() }.spec(&mut flaws);
    match backing {
        Some(backing) if flaws.is_empty() => Ok((Some(backing), rate)),
        _ => Err(Refusal::flaws(&flaws)),
    }
}

/// Opens the other copy, to be read only, whatever is marked on it. Blocks.
fn open_other(name: &str, backing: &BackingSpec, owner: &Opener) -> Result<Opened, Refusal> {
    match backing {
        BackingSpec::Remote(spec) => remote::open_reader(&spec.remote, owner),
        backing => open_unchecked(name, backing, (true, None), None, owner),
    }
}

/// Which content of which export it is, if its server says so.
fn instance(import: &Import) -> Option<String> {
    import.status().instance
}

/// How many bytes there are to compare with a disk of so many. A device may be longer than its disk, as a swap to one allows.
fn size_of_other(backing: &BackingSpec, other: u64, disk: u64) -> u64 {
    let device = matches!(backing, BackingSpec::File { path, .. }
        if std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device()));
    if device { other.min(disk) } else { other }
}

/// `of_servers`: what is known of why the disk and the other copy cannot be read, if they are exports.
fn fault(fault: CompareFault, of_servers: [Option<String>; 2]) -> Refusal {
    let remedy = match fault {
        CompareFault::Disk { .. } => "see to the disk's backing: `ioplane disk show`",
        CompareFault::Other { .. } => {
            "see to the other copy and, if it is on another machine, to the network; then compare again"
        }
        CompareFault::Cancelled => "compare again",
    };
    let [of_disk, of_other] = of_servers;
    let error = match (fault, of_disk, of_other) {
        (CompareFault::Disk { .. }, Some(why), _) | (CompareFault::Other { .. }, _, Some(why)) => {
            format!("{fault}: {why}")
        }
        _ => fault.to_string(),
    };
    Refusal::failed(error, remedy)
}

impl Disk {
    fn verifying(&self) -> MutexGuard<'_, Option<Arc<Verify>>> {
        self.verify.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The comparison that is under way, or the last one.
    pub(super) fn verify_report(&self) -> Option<VerifyReport> {
        self.verifying().as_ref().map(|verify| verify.report())
    }

    /// Refuses what cannot be done while the disk is compared.
    pub(super) fn not_verifying(&self) -> Result<(), Refusal> {
        let verify = self.verifying().clone().filter(|verify| verify.is_under_way());
        verify.map_or(Ok(()), |verify| {
            let name = self.served.note.read().now.name;
            Err(Refusal::conflict(
                format!("disk {name} is being compared with {}", verify.with),
                format!("wait for the end of that, or cancel it: ioplane verify {name} --cancel"),
            ))
        })
    }

    /// Begins a comparison. When this returns well, writes are noted, and the rest goes on by itself.
    pub async fn begin_verify(
        self: &Arc<Self>,
        form: VerifyForm,
        context: &Arc<DaemonContext>,
    ) -> Result<(), Refusal> {
        let (wanted, rate) = other(form)?;
        let changing = self.served.changing.lock().await;
        self.not_swapping()?;
        let record = self.served.note.read();
        let Some(backing) = wanted.or_else(|| self.swapped_from()) else {
            let error = format!("disk {} has not been swapped since the daemon was started", record.now.name);
            return Err(Refusal::invalid(error, "say with which copy: --with PATH or URI").at("path"));
        };
        // Of an image its lock says so.
        let itself = || {
            let error = format!("{} is what the disk is on", backing.name());
            Refusal::conflict(error, "name another copy").at("remote")
        };
        if matches!(backing, BackingSpec::Remote { .. }) && record.now.backing.same_content(&backing) {
            return Err(itself());
        }
        let (bytes, disk) =
            self.served.handle.change(|model| ((model.bytes(), model.backing().clone()), false)).await?;
        let (owner, name, copy) = (context.opener(&record.now), record.now.name.clone(), backing.clone());
        let opened = blocking(move || open_other(&name, &copy, &owner)).await?;
        // The same export may be reached by several addresses and names.
        if let Some(other) = opened.import.as_deref().and_then(instance)
            && self.import().as_deref().and_then(instance) == Some(other)
        {
            return Err(itself());
        }
        let other_bytes = size_of_other(&backing, opened.backing.info().bytes, bytes);
        let watched = Watched::new(disk);
        let comparer = watched.comparer(&opened.backing)?;
        self.exchange(watched.clone(), |_| Ok(()), || Ok(())).await?;
        let verify = Arc::new(Verify {
            with: backing.name(),
            bytes,
            other_bytes,
            rate,
            begun: Instant::now(),
            findings: Mutex::default(),
            standing: watch::Sender::new(Standing { state: VerifyWord::Comparing, took: None, why: None }),
            cancelled: watch::Sender::new(false),
        });
        *self.verifying() = Some(verify.clone());
        drop(changing);
        let (disk, context) = (self.clone(), context.clone());
        tokio::spawn(async move { disk.compare(verify, watched, comparer, opened, context).await });
        Ok(())
    }

    /// All of a comparison after its beginning.
    async fn compare(
        self: Arc<Self>,
        verify: Arc<Verify>,
        watched: Arc<Watched>,
        mut comparer: Comparer,
        opened: Opened,
        context: Arc<DaemonContext>,
    ) {
        let name = self.served.note.read().now.name;
        let (seen, own) = (verify.clone(), self.import());
        let compared = on_thread(move || {
            let cancelled = seen.cancelled.subscribe();
            let outcome = comparer.run(seen.rate, &mut |found| {
                let mut told = seen.findings();
                if *told != *found {
                    told.clone_from(found);
                }
                drop(told);
                *cancelled.borrow()
            });
            seen.findings().clone_from(comparer.findings());
            let why = [&own, &opened.import].map(|import| import.as_deref().and_then(remote::why_unreadable));
            // Closing the copies may wait for their last I/O.
            drop((comparer, opened));
            outcome.map_err(|fault| (fault, why))
        });
        let outcome = compared.await;
        self.take_watch_out(watched.disk()).await;
        match outcome {
            Ok(Ok(())) => verify.end(verify.result(), None),
            Ok(Err((CompareFault::Cancelled, _))) => verify.end(VerifyWord::Cancelled, None),
            Ok(Err((why, of_servers))) => verify.end(VerifyWord::Failed, Some(fault(why, of_servers))),
            Err(refused) => verify.end(VerifyWord::Failed, Some(refused)),
        }
        let words = verify.report().words();
        tracing::info!(disk = name, result = words, "compared");
        context.events.tell(EventWord::Changed, Disk::COMMAND, &name, &format!("verify: {words}"));
    }

    async fn take_watch_out(&self, disk: &Arc<dyn Backing>) {
        for attempt in 1..=ATTEMPTS {
            let changing = self.served.changing.lock().await;
            let Err(refused) = self.exchange(disk.clone(), |_| Ok(()), || Ok(())).await else { return };
            drop(changing);
            // It is no more than a detour: the next change of the backing takes it out.
            tracing::warn!(error = refused.error, attempt, "what notes writes cannot be taken out yet");
            tokio::time::sleep(PAUSE * attempt).await;
        }
    }

    /// Ends the comparison that is under way, and waits until nothing is left of it.
    pub async fn cancel_verify(&self) -> Result<(), Refusal> {
        let verify = self.verifying().clone().filter(|verify| verify.is_under_way());
        let Some(verify) = verify else {
            let name = self.served.note.read().now.name;
            return Err(Refusal::conflict(
                format!("disk {name} is not being compared"),
                "there is nothing to cancel",
            ));
        };
        verify.cancelled.send_replace(true);
        let mut standing = verify.standing.subscribe();
        let ended = standing.wait_for(|standing| !standing.state.is_under_way());
        match tokio::time::timeout(CANCEL, ended).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Refusal::busy(
                "requests of the guest do not end, so that its writes are still noted",
                "the guest is not held up by that; see `ioplane disk show`",
            )),
        }
    }
}
