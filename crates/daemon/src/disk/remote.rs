//! What is behind a disk of another machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_api::report::{ClaimWord, ExporterWord, ProtectionWord, RemoteReport, RemoteWord};
use ioplane_api::size::Size;
use ioplane_api::spec::{BackingSpec, DoubtWord, NbdUri, OnTimeout, RemoteSpec, TimeoutWord};
use ioplane_nbd::claim::{ClaimDenial, ClaimRefusal};
use ioplane_nbd::import::{
    Address, ClaimOptions, ClaimStanding, ClaimWish, ConnectionState, ConnectionStatus, ExporterState,
    Import, ImportOptions, ReserveOptions, Told, Unfenced, lets_in,
};
use ioplane_nbd::{NbdError, Protection};
use sha2::{Digest, Sha256};

use super::{LEAVE, Opened, reserve};
use crate::context::Opener;
use crate::refusal::Refusal;

/// How long the server of a copy that is only read may be unreachable.
const READER_PATIENCE: Duration = Duration::from_secs(10);

/// The URI itself, or where the directory says that a device is. Blocks, 10 s at most.
fn located(uri: &NbdUri, owner: &Opener) -> Result<(NbdUri, Address), Refusal> {
    let runtime = tokio::runtime::Handle::current();
    let located = match uri.device() {
        Some(name) => tokio::task::block_in_place(|| runtime.block_on(owner.devices.locate(name)))?,
        None => uri.clone(),
    };
    let address = located.as_str().parse().map_err(|error: NbdError| {
        Refusal::invalid(error.to_string(), "give the URI of an export, such as nbd://host-a/data")
            .at("remote")
    })?;
    Ok((located, address))
}

/// Connects to the server and asks it what the export is. Blocks, 10 s at most.
fn connect(uri: &NbdUri, located: &NbdUri, options: ImportOptions) -> Result<Arc<Import>, Refusal> {
    let runtime = tokio::runtime::Handle::current();
    let opened = tokio::task::block_in_place(|| {
        runtime.block_on(async {
            let without_claim = options.claim.is_none().then(|| options.clone());
            let import = Import::open(options).await?;
            // An exporter of ours may let in its holder only: requests would fail and not say why. Others may end with their first connection.
            if let Some(options) = without_claim.filter(|_| import.status().instance.is_some()) {
                lets_in(&options).await?;
            }
            Ok(import)
        })
    });
    opened.map_err(|error| {
        if let NbdError::Claim(refusal) = &error {
            return refused(uri, refusal);
        }
        if let NbdError::Reservation(why) = &error {
            return reserve::refused(uri.as_str(), why);
        }
        let remedy = match &error {
            NbdError::Identity(_) => "make or import one: ioplane identity".to_owned(),
            NbdError::Tls(_) => "compare both hosts: ioplane identity show".to_owned(),
            _ => format!("see whether the server runs and can be reached: nbdinfo '{located}'"),
        };
        Refusal::failed(format!("{located}: {error}"), remedy)
    })
}

/// Asks the directory where it is, if the name of a device is given, connects to the server and asks it what the export is. Blocks for as long as that
/// takes, 10 s at most for each.
pub fn open(backing: &BackingSpec, owner: &Opener) -> Result<Arc<Import>, Refusal> {
    let BackingSpec::Remote(spec) = backing else {
        return Err(Refusal::bug(format!("{} is on this machine", backing.name())));
    };
    let uri = &spec.remote;
    let rates = reserve::rates(backing.reserved());
    let (located, address) = located(uri, owner)?;
    let disk = (owner.name.as_str(), owner.socket.as_path());
    let keeper = owner.claims.keeper(disk, &uri.export(), owner.wish == ClaimWish::Inherit)?;
    let name = own_name(&owner.name);
    let usual = ImportOptions::new(address.clone());
    let Size(retain) = spec.retain.unwrap_or(Size(RemoteSpec::RETAIN));
    let retain = usize::try_from(retain).unwrap_or(usual.retain);
    let options = ImportOptions {
        claim: Some(ClaimOptions {
            keeper,
            name: name.clone(),
            wish: owner.wish,
            time: owner.claim_time,
            patience: owner.claim_wait,
        }),
        reserve: Some(ReserveOptions { rates, name }),
        give_up_after: backing.on_timeout().error_after(),
        holder: holder(&owner.socket),
        identity: owner.identity.clone(),
        mark: Some(mark(uri, &owner.socket)),
        retain,
        dead_after: Duration::from_secs(spec.silence_s()),
        unfenced: match spec.in_doubt.unwrap_or_default() {
            DoubtWord::Fail => Unfenced::Fail,
            DoubtWord::Resend => Unfenced::Replay,
        },
        news: owner.exporters.news().clone(),
        ..usual
    };
    let import = connect(uri, &located, options)?;
    if spec.in_doubt == Some(DoubtWord::Resend) && import.status().instance.is_none() {
        tracing::warn!(
            device = owner.name,
            remote = %located,
            "writes without an answer are sent again when the connection is lost: a server that carries out the first ones later undoes newer ones"
        );
    }
    owner.exporters.follow(&import, &address, &owner.identity);
    Ok(import)
}

/// The same to read only, and for a while: it claims nothing, so that it is refused what another disk holds, and reads fail when the server has not been
/// reachable for [`READER_PATIENCE`]. Blocks.
pub fn open_reader(uri: &NbdUri, owner: &Opener) -> Result<Opened, Refusal> {
    let (located, address) = located(uri, owner)?;
    let options = ImportOptions {
        give_up_after: Some(READER_PATIENCE),
        identity: owner.identity.clone(),
        retain: 0,
        ..ImportOptions::new(address)
    };
    Ok(Opened::remote(connect(uri, &located, options)?))
}

/// Why an export cannot be read, as far as its connections know.
pub fn why_unreadable(import: &Import) -> Option<String> {
    let lost = import.status().claim_lost.map(|refusal| refusal.to_string());
    lost.or_else(|| report(import).why)
}

/// Somebody else writes there.
fn refused(uri: &NbdUri, refusal: &ClaimRefusal) -> Refusal {
    let remedy = match refusal.why {
        ClaimDenial::Held => {
            "remove the disk there; if that host is gone: ioplane publish release, on the machine that has the disk; or add it with --takeover, \
             by which what that host has not flushed is lost"
        }
        ClaimDenial::Released | ClaimDenial::Unknown => {
            "shut the guest down, then remove the disk and add it again: others may have written to it"
        }
        ClaimDenial::Shared => "disconnect them first; or add it with --takeover",
        ClaimDenial::Exhausted | ClaimDenial::Failed => "see to the machine that has the disk",
    };
    Refusal::conflict(format!("{uri}: {refusal}"), remedy).at("remote")
}

/// Where it is counted which writes are not flushed: beside the disk's socket, as a rule in the run directory, which is in memory. Of this export
/// only: what was written to another one is no reason to stop this one.
fn mark(uri: &NbdUri, owner: &Path) -> PathBuf {
    let export: String =
        Sha256::digest(uri.export()).iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    let mut name = owner.as_os_str().to_owned();
    name.push(format!(".{export}.unflushed"));
    PathBuf::from(name)
}

/// What was written to an export and not flushed is of no consequence any more. Nobody of this daemon has it open for this disk.
pub fn forget_mark(uri: &NbdUri, owner: &Path) {
    let mark = mark(uri, owner);
    if let Err(error) = std::fs::remove_file(&mark)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(mark = %mark.display(), %error, "a mark file could not be removed");
    }
}

/// Flushes what no flush of the guest has covered, since nobody has copies of it from now on. `gives_back`: others may write from then on.
pub async fn leave(import: &Import, gives_back: bool) {
    let address = import.status().address;
    match tokio::time::timeout(LEAVE, import.finish()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(address, %error, "writes of a disk that is closed were not flushed"),
        Err(_) => tracing::warn!(address, "writes of a disk that is closed were not flushed: no answer"),
    }
    if !gives_back {
        return;
    }
    reserve::give_back(import).await;
    let kept = |error: String| {
        tracing::warn!(
            address,
            error,
            "the claim to an export was not given back: `ioplane publish release` there does it"
        );
    };
    match tokio::time::timeout(LEAVE, import.release()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => kept(error.to_string()),
        Err(_) => kept("no answer".to_owned()),
    }
}

/// Takes the export as it is, if that is what its requests wait for.
pub fn accept(import: &Import) -> Result<(), Refusal> {
    let stopped = |one: &ConnectionStatus| matches!(one.state, ConnectionState::Stopped { .. });
    if !import.status().connections.iter().any(stopped) {
        return Err(Refusal::conflict(
            "its server has not failed: there is nothing to accept",
            "see `ioplane disk show`: a network failure ends by itself",
        ));
    }
    import.retry();
    Ok(())
}

/// Whoever serves the disk at this socket of this host, whichever process that is.
fn holder(owner: &Path) -> String {
    let mut host = Sha256::new();
    host.update(std::fs::read("/etc/machine-id").unwrap_or_default());
    host.update(rustix::system::uname().nodename().to_bytes());
    host.update(owner.as_os_str().as_encoded_bytes());
    host.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// How its connections stand.
pub fn report(import: &Import) -> RemoteReport {
    let status = import.status();
    let open = || status.connections.iter().filter(|one| one.state != ConnectionState::Closed);
    let worst = open().max_by_key(|one| word(&one.state));
    let sum = |of: fn(&ConnectionStatus) -> u64| status.connections.iter().map(of).sum();
    let state = worst.map_or(RemoteWord::Connected, |one| word(&one.state));
    let (claim, claim_why) = claim_words(&status.claim);
    let (exporter, exporter_why) = exporter_words(&status.told);
    RemoteReport {
        uri: status.address.clone(),
        state: if claim == ClaimWord::Refused { RemoteWord::Refused } else { state },
        why: worst.and_then(|one| why(&one.state)).or_else(|| status.claim_lost.map(|lost| lost.to_string())),
        for_ms: worst.and_then(|one| since(&one.state)).map(|since| since.elapsed().as_millis() as u64),
        timeout_s: None,
        on_timeout: TimeoutWord::Wait,
        qmp: None,
        silence_s: import.dead_after().as_secs(),
        retain: import.retain() as u64,
        in_doubt: match import.resends() {
            true => DoubtWord::Resend,
            false => DoubtWord::Fail,
        },
        exporter,
        exporter_why,
        exporter_holder: status.told.holder.clone(),
        instance: status.instance.clone(),
        claim,
        claim_why,
        generation: status.generation,
        reserved_iops: status.reserved.requests,
        reserved_bandwidth: status.reserved.bytes,
        reserved_why: status.reserved_why,
        connections: open().count() as u64,
        protection: open().filter_map(|one| protection(&one.state)).min(),
        in_flight: sum(|one| one.in_flight as u64),
        requests: sum(|one| one.requests),
        replays: sum(|one| one.replays),
        losses: sum(|one| one.losses),
        changed: sum(|one| one.changed),
        device_errors: sum(|one| one.device_errors),
        bytes_read: sum(|one| one.bytes_read),
        bytes_written: sum(|one| one.bytes_written),
        dirty: status.dirty,
        retained: status.retained,
        rewritten: status.rewritten,
    }
}

/// No queue has a connection, and its server could not be reached by another one.
pub fn add_loss(report: &mut RemoteReport, why: String) {
    if report.connections == 0 && report.state == RemoteWord::Connected {
        (report.state, report.why) = (RemoteWord::Reconnecting, Some(why));
    }
}

/// What its policy is while its server is not reachable.
pub fn add_policy(report: &mut RemoteReport, backing: &BackingSpec) {
    report.qmp = backing.timeout_fields().qmp.filter(|qmp| !qmp.as_os_str().is_empty());
    (report.timeout_s, report.on_timeout) = match backing.on_timeout() {
        OnTimeout::Wait => (None, TimeoutWord::Wait),
        OnTimeout::Error(time) => (Some(time.as_secs()), TimeoutWord::Error),
        OnTimeout::Pause(time, _) => (Some(time.as_secs()), TimeoutWord::Pause),
    };
}

fn exporter_words(told: &Told) -> (ExporterWord, Option<String>) {
    match &told.state {
        ExporterState::Silent => (ExporterWord::Unknown, told.why.clone()),
        ExporterState::Served => (ExporterWord::Served, None),
        ExporterState::Troubled(why) => (ExporterWord::Failing, Some(why.clone())),
        ExporterState::Withdrawn => (ExporterWord::Withdrawn, None),
        ExporterState::Stopping => (ExporterWord::Stopped, None),
    }
}

/// How exporters are told whose a disk is, for people.
fn own_name(disk: &str) -> String {
    format!("disk {disk} of {}", rustix::system::uname().nodename().to_string_lossy())
}

/// What of that is news of `disk` for people, after `before`.
pub fn exporter_news(disk: &str, before: &Told, now: &Told) -> Option<String> {
    let (was, (word, why)) = (exporter_words(before).0, exporter_words(now));
    if before.state != now.state && (word, was) != (ExporterWord::Served, ExporterWord::Unknown) {
        let why = why.map_or(String::new(), |why| format!(" ({why})"));
        return Some(match word.words() {
            Some(words) => format!("its exporter says: {words}{why}"),
            None if word == ExporterWord::Served => "its exporter serves it again".to_owned(),
            None => format!("its exporter tells nothing any more{why}"),
        });
    }
    // Of its own claim it knows by itself. A certificate is named behind it.
    let other = |holder: &&String| !holder.starts_with(&own_name(disk));
    let held = |told: &Told| told.holder.as_ref().filter(other).cloned();
    let (was, is) = (held(before), held(now));
    (was != is && now.state != ExporterState::Silent).then(|| match is {
        Some(holder) => format!("its exporter says: held by {holder}"),
        None => "its exporter says: held by no other host any more".to_owned(),
    })
}

fn claim_words(standing: &ClaimStanding) -> (ClaimWord, Option<String>) {
    match standing {
        ClaimStanding::Untracked => (ClaimWord::None, None),
        ClaimStanding::Free => (ClaimWord::Free, None),
        ClaimStanding::Waiting { since, refusal } => (
            ClaimWord::Waiting,
            Some(format!("{refusal}; waiting for {:.1} s", since.elapsed().as_secs_f64())),
        ),
        ClaimStanding::Held => (ClaimWord::Held, None),
        ClaimStanding::Releasing { failure, .. } => {
            (ClaimWord::Releasing, (!failure.is_empty()).then(|| failure.clone()))
        }
        ClaimStanding::Refused { why } => (ClaimWord::Refused, Some(why.clone())),
    }
}

fn word(state: &ConnectionState) -> RemoteWord {
    match state {
        ConnectionState::Connecting => RemoteWord::Connecting,
        ConnectionState::Connected { .. } | ConnectionState::Closed => RemoteWord::Connected,
        ConnectionState::Reconnecting { gave_up: true, .. } => RemoteWord::Failing,
        ConnectionState::Reconnecting { .. } => RemoteWord::Reconnecting,
        ConnectionState::Stopped { .. } => RemoteWord::Stopped,
    }
}

fn why(state: &ConnectionState) -> Option<String> {
    match state {
        ConnectionState::Connecting | ConnectionState::Connected { .. } | ConnectionState::Closed => None,
        ConnectionState::Reconnecting { loss, failure, .. } if failure.is_empty() => Some(loss.to_string()),
        ConnectionState::Reconnecting { loss, failure, attempts, .. } => {
            Some(format!("{loss}; {attempts} attempts to connect again, the last: {failure}"))
        }
        ConnectionState::Stopped { why, .. } => Some(why.clone()),
    }
}

fn protection(state: &ConnectionState) -> Option<ProtectionWord> {
    let ConnectionState::Connected { protection, .. } = state else { return None };
    Some(match protection {
        Protection::None => ProtectionWord::None,
        Protection::Sums => ProtectionWord::Crc32c,
        Protection::Tls => ProtectionWord::Tls,
    })
}

fn since(state: &ConnectionState) -> Option<Instant> {
    match state {
        ConnectionState::Connecting | ConnectionState::Closed => None,
        ConnectionState::Connected { since, .. }
        | ConnectionState::Reconnecting { since, .. }
        | ConnectionState::Stopped { since, .. } => Some(*since),
    }
}
