//! `--exits`: a stock VM full of old devices takes its exits, then a fraction of them with the interposer. No daemon is needed.
//!
//! ```text
//!   L1 (a KVM host in a VM; its kernel counts)
//!     plain:      qemu-system-x86_64 ...                  boot, IDE reads, pings; what `ioplane exits` sees of both
//!     clustered:  ioplane run -- qemu-system-x86_64 ...   the same
//!                   ioplane exits cluster off, then on: pings each time
//! ```

mod outcome;

pub use outcome::ExitsOutcome;

use crate::show::Show;
use anyhow::{Context, Result};
use ioplane_e2e::clustering::saved;
use ioplane_e2e::{Accelerator, GuestWork, L1, L2, OldWork};
use outcome::{FEW, Named, Switched};
use serde_json::Value;
use std::path::Path;

const MEMORY_MIB: u64 = 1280;

/// Boots the VM twice and has it do the same work each time.
pub fn run(show: &Show) -> Result<ExitsOutcome> {
    let accelerator = Accelerator::detect();
    show.busy("a KVM host in a VM boots");
    let l1 = L1::boot(MEMORY_MIB, "", &|line| show.line(line))?;
    show.line("the KVM host is up");
    let disk = l1.old_disk()?;

    let (plain, before, guest) = work(&l1, "plain", "", &disk, show).context("without the interposer")?;
    guest.kill()?;
    let command = l1.interposed()?;
    let (clustered, after, guest) =
        work(&l1, "clustered", &command, &disk, show).context("with the interposer")?;
    let status = l1.clustering("--vm clustered")?;
    let again = |word: &str| -> Result<GuestWork> {
        l1.clustering(&format!("{word} --vm clustered"))?;
        let pings = guest.ping_by_ne2000(&l1, FEW)?;
        show.line(&format!(
            "ioplane exits cluster {word} --vm clustered: {:.1} exits per ping",
            pings.exits_each()
        ));
        Ok(pings)
    };
    let switched = Switched { off: again("off")?, on: again("on")? };
    guest.kill()?;
    let names = Named::both(&before, &after);
    Ok(ExitsOutcome::judge(accelerator, [plain, clustered], names, switched, saved(&status)))
}

/// One boot and its work; then some of the work again while `ioplane exits` watches, which takes time of the guest's.
fn work<'a>(
    l1: &'a L1,
    name: &str,
    before: &str,
    disk: &Path,
    show: &Show,
) -> Result<(OldWork, Value, L2<'a>)> {
    show.busy(&format!("{name}: the guest boots, reads its IDE disk and pings"));
    let (work, guest) = l1.old_work(name, before, disk, &|line| show.line(line))?;
    show.busy(&format!("{name}: ioplane exits watches"));
    let report = l1.exits_during(name, || {
        guest.read_ide(l1, disk, FEW)?;
        guest.ping_by_ne2000(l1, FEW).map(drop)
    })?;
    Ok((work, report, guest))
}
