//! Another function of the host in the place of one that a guest drives itself.
//!
//! ```text
//!   lease and open the other --> the function's thread: stop, save, replay --> the record names the other, the former is given back
//! ```
//!
//! Where the guest's driver cooperates its guest runs: until the driver has given its lock back its accesses are served.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ioplane_api::report::MovedFunctionReport;
use ioplane_api::request::MoveFunctionForm;
use ioplane_api::spec::{PciAddress, SourceSpec};
use ioplane_hardware::lease::Accepted;
use ioplane_hardware::{Lease, Vfio, inventory};
use ioplane_passthrough::{CarryError, ExchangeError, Exchanged};

use super::around::Here;
use super::body::Body;
use super::carry::{Resting, Way};
use super::service::After;
use super::{Card, SYSFS, announce, carry, host};
use crate::refusal::Refusal;
use crate::served::{ServedKind, blocking};

/// The longest deadline that makes sense: a VMM gives up on an access that waits for twice as long.
const LONGEST: Duration = Duration::from_secs(30);
/// How long bringing the former function back may take.
const BACK: Duration = Duration::from_secs(20);
/// The other function, taken from the host.
struct Taken {
    lease: Lease,
    vfio: Vfio,
    there: Here,
    back: Here,
}

fn patience(form: &MoveFunctionForm) -> Duration {
    Duration::from_millis(form.deadline_ms).min(LONGEST)
}

fn take(way: Way, form: &MoveFunctionForm, leases: &Path) -> Result<Taken, Refusal> {
    let there = match &way {
        Way::Direct(frames) => Some(frames.of(form.to).physical()?),
        Way::Cooperating(_) | Way::Saved => None,
    };
    let (there, back) = (Here::new(there, patience(form)), Here::new(way.physical()?, BACK));
    let accepted = Accepted { in_use: form.force, unsafe_interrupts: form.unsafe_interrupts };
    let root = Path::new(SYSFS);
    let lease = Lease::take(root, form.to, leases, accepted)?;
    match Vfio::open(root, form.to) {
        Ok(vfio) => Ok(Taken { lease, vfio, there, back }),
        Err(error) => Err(give_back(lease, host::refuse(&error))),
    }
}

/// The other function goes back to the host; what is refused says if that failed too.
fn give_back(lease: Lease, refused: Refusal) -> Refusal {
    match lease.give_back() {
        Ok(()) => refused,
        Err(more) => Refusal { error: format!("{}; and {more}", refused.error), ..refused },
    }
}

fn refuse(name: &str, error: &ExchangeError) -> Refusal {
    let text = format!("{name}: {error}");
    match error {
        ExchangeError::Unready(CarryError::NoGuest) => {
            Refusal::conflict(text, "remove it, and add the other one")
        }
        ExchangeError::Unready(error) => carry::refuse(name, error),
        ExchangeError::Lost { .. } => Refusal::conflict(text, carry::RESET),
        ExchangeError::OtherKind { .. } => {
            Refusal::conflict(text, "choose a function of the same kind of card")
        }
        ExchangeError::Failed(_) | ExchangeError::BroughtBack(_) => Refusal::conflict(text, carry::LINKS),
    }
}

/// Whether the function at `to` could take the place of the one at `from`, as far as that is seen from outside. Blocks.
fn may_take(
    name: &str,
    (from, way): (PciAddress, Way),
    form: &MoveFunctionForm,
    leases: &Path,
) -> Result<(), Refusal> {
    let root = Path::new(SYSFS);
    let [here, there] = [from, form.to].map(|address| inventory::find(root, address, |_| None));
    let (here, there) = (here?, there?);
    // First of all: nobody is told how to take a physical function.
    if let Way::Direct(frames) = &way {
        frames.of(form.to).is_ready()?;
        frames.is_ready()?;
    }
    let accepted = Accepted { in_use: form.force, unsafe_interrupts: form.unsafe_interrupts };
    Lease::may_take(root, form.to, leases, accepted)?;
    let why = match (here.identity == there.identity, here.bars == there.bars) {
        (false, _) => Some("device, revision, class or subsystem"),
        (true, false) => Some("its BARs"),
        (true, true) => None,
    };
    if let Some(why) = why {
        return Err(refuse(name, &ExchangeError::OtherKind { other: form.to.to_string(), why }));
    }
    Ok(())
}

impl Card {
    /// Says whether [`Card::move_to`] could do what it is asked for, while the guest runs. Touches nothing.
    pub async fn may_move_to(&self, form: MoveFunctionForm, leases: PathBuf) -> Result<(), Refusal> {
        let name = self.name();
        let from = self.may_move(&MoveFunctionForm { guest_stopped: true, ..form.clone() })?;
        self.has_guest()?;
        blocking(move || may_take(&name, from, &form, &leases)).await
    }

    /// Puts another function of the host in its place, under its guest, which stands still.
    pub async fn move_to(
        &self,
        form: MoveFunctionForm,
        leases: PathBuf,
    ) -> Result<MovedFunctionReport, Refusal> {
        let name = self.name();
        // Its guest stands still: nobody waits here for somebody else.
        let Ok(_changing) = self.served.changing.try_lock() else {
            return Err(Refusal::busy(format!("{name} is being changed"), "try again in a moment"));
        };
        let (from, way) = self.may_move(&form)?;
        let (asked, to) = (form.clone(), form.to);
        let _trapped = self.trapped().await?;
        let taken = way.clone();
        let Taken { lease, vfio, mut there, mut back } =
            blocking(move || take(taken, &asked, &leases)).await?;
        let exchanged = match way {
            Way::Cooperating(_) => {
                let exchanged = self.exchange_cooperating(vfio, patience(&form)).await;
                exchanged.map(|exchanged| (exchanged, None))
            }
            Way::Direct(_) | Way::Saved => {
                let exchange = move |body: &mut Body| {
                    let exchanged = body.exchange(vfio, &mut there, &mut back)?;
                    Ok((exchanged, there.physical()))
                };
                self.exchanged(exchange).await
            }
        };
        let (Exchanged { state_bytes, stop_accesses, replay_accesses, took }, physical) = match exchanged {
            Ok(exchanged) => exchanged,
            Err(refused) => return blocking(move || Err(give_back(lease, refused))).await,
        };
        announce::begin(&self.served.handle, &name, physical, None);
        let ends: After = Box::new(move || Ok(lease.give_back()?));
        let mut complaints = Vec::new();
        let former = self.served.replace_after(self.put_back().into_iter().chain([ends]).collect());
        let keeper = self.keeper.clone();
        complaints.extend(
            blocking(move || {
                let mut refused: Vec<Refusal> = former.into_iter().filter_map(|end| end().err()).collect();
                refused.extend(keeper.and_then(|keeper| keeper.moved_to(to).err()).map(Refusal::from));
                Ok(refused)
            })
            .await?,
        );
        // It is the other one, whatever could not be written down.
        let noted = self.note().change(|record| {
            if let SourceSpec::Host { address, forced, unsafe_interrupts, .. } = &mut record.now.source {
                *address = to;
                *forced |= form.force;
                *unsafe_interrupts |= form.unsafe_interrupts;
            }
        });
        complaints.extend(noted.err());
        let complaints: Vec<String> = complaints.into_iter().map(|refusal| refusal.error).collect();
        tracing::info!(function = name, %from, %to, stop_accesses, replay_accesses, "moved");
        for error in &complaints {
            tracing::warn!(function = name, error, "moved, and not all was done afterwards");
        }
        Ok(MovedFunctionReport {
            name,
            from: from.to_string(),
            to: to.to_string(),
            state_bytes: state_bytes as u64,
            stop_accesses,
            replay_accesses,
            took_us: took.as_micros() as u64,
            complaint: (!complaints.is_empty()).then(|| complaints.join("; ")),
        })
    }

    async fn exchanged<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Body) -> Result<R, ExchangeError> + Send + 'static,
    ) -> Result<R, Refusal> {
        self.on_its_thread(act).await?.map_err(|error| refuse(&self.name(), &error))
    }

    /// Its VMM is served while its driver gives the lock back.
    async fn exchange_cooperating(&self, vfio: Vfio, patience: Duration) -> Result<Exchanged, Refusal> {
        let begun = Instant::now();
        let prepared = self.exchanged(move |body| body.prepare(vfio)).await?;
        let moving = Resting::new(&self.served.handle, Some(BACK));
        let stop_accesses = self.rest_direct(begun + patience).await?;
        let exchanged = self.exchanged(move |body| body.exchange_at_rest(prepared)).await?;
        moving.done();
        Ok(Exchanged { stop_accesses, took: begun.elapsed(), ..exchanged })
    }

    /// Which one it is now, if another may take its place, and how.
    fn may_move(&self, form: &MoveFunctionForm) -> Result<(PciAddress, Way), Refusal> {
        let (address, way) = self.may_be_exchanged()?;
        let record = self.note().read();
        let name = &record.now.name;
        if record.configured.is_some() {
            return Err(Refusal::conflict(
                format!("{name} is in the configuration, which names {address}"),
                "add functions that are to be moved with `ioplane pci add`",
            ));
        }
        if address == form.to {
            return Err(Refusal::invalid(format!("{name} is {address} already"), "name another one").at("to"));
        }
        way.stands_still(name, form.guest_stopped)?;
        Ok((address, way))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_done_says_what_to_do() {
        let refused = refuse("nic0", &ExchangeError::Unready(CarryError::NoGuest));
        assert_eq!(refused.error, "nic0: no guest uses it");
        assert_eq!(refused.remedy, "remove it, and add the other one");
        let other = ExchangeError::OtherKind { other: "0000:02:10.0".into(), why: "its BARs" };
        assert_eq!(refuse("nic0", &other).error, "nic0: 0000:02:10.0 is another kind of function: its BARs");
    }
}
