//! Another function of the host in the place of one that a guest drives itself.
//!
//! ```text
//!   lease and open the other --> the function's thread: stop, save, replay --> the record names the other, the former is given back
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use ioplane_api::report::MovedFunctionReport;
use ioplane_api::request::MoveFunctionForm;
use ioplane_api::spec::{PciAddress, SourceSpec};
use ioplane_device::Lifecycle;
use ioplane_hardware::lease::Accepted;
use ioplane_hardware::{Lease, Vfio};
use ioplane_passthrough::{CarryError, ExchangeError, Exchanged};

use super::around::{Here, physical};
use super::body::Body;
use super::hold::gone;
use super::service::After;
use super::{Card, SYSFS, carry, host};
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

fn take(from: PciAddress, form: &MoveFunctionForm, leases: &Path) -> Result<Taken, Refusal> {
    let patience = Duration::from_millis(form.deadline_ms).min(LONGEST);
    let (there, back) = (Here::new(physical(form.to)?, patience), Here::new(physical(from)?, BACK));
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

impl Card {
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
        let from = self.may_move(&form)?;
        let (asked, to) = (form.clone(), form.to);
        let Taken { lease, vfio, mut there, mut back } =
            blocking(move || take(from, &asked, &leases)).await?;
        let exchanged = self.served.handle.with(move |device: &mut Lifecycle<Body>| {
            device.with(|body| body.exchange(vfio, &mut there, &mut back))
        });
        let exchanged = match exchanged.await {
            Ok(Ok(Ok(exchanged))) => Ok(exchanged),
            Ok(Ok(Err(error))) => Err(refuse(&name, &error)),
            Ok(Err(error)) => Err(Refusal::busy(format!("{name}: {error}"), "try again in a moment")),
            Err(_) => Err(gone(&name)),
        };
        let Exchanged { state_bytes, stop_accesses, replay_accesses, took } = match exchanged {
            Ok(exchanged) => exchanged,
            Err(refused) => return blocking(move || Err(give_back(lease, refused))).await,
        };
        let ends: After = Box::new(move || Ok(lease.give_back()?));
        let mut complaints = Vec::new();
        let former = self.served.replace_after(vec![ends]);
        complaints.extend(
            blocking(move || Ok(former.into_iter().filter_map(|end| end().err()).collect::<Vec<_>>()))
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

    /// Which one it is now, if another may take its place.
    fn may_move(&self, form: &MoveFunctionForm) -> Result<PciAddress, Refusal> {
        let address = self.may_be_exchanged()?;
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
        carry::stands_still(name, form.guest_stopped)?;
        Ok(address)
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
