//! The vCPUs of a function's VMM, which enter no guest while they are held: by the library in the VMM's process (docs/decisions/0085-migrations-of-others.md).

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use ioplane_vcpu::kvm::ClusterPage;

use super::Card;
use crate::refusal::Refusal;

/// How long vCPUs that are told to leave the guest may take.
const OUT: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(2);
const LIBRARY: &str = "start the guest's QEMU by `ioplane run -- qemu-system-x86_64 ...`, with clustering on";

/// Whether the process's vCPUs are held. One without the library holds none.
pub(crate) fn are_held(pid: u32) -> bool {
    let file = ClusterPage::open(pid, false).ok().flatten();
    file.and_then(|file| ClusterPage::read_hold(&file).ok()).is_some_and(|report| report.held)
}

impl Card {
    /// Has no vCPU of its VMM enter the guest, or lets them. Refused while the guest runs.
    pub async fn hold_vcpus(&self, held: bool) -> Result<(), Refusal> {
        let name = self.name();
        self.has_guest()?;
        let pid = self.served.handle.status().peer;
        let pid = pid
            .ok_or_else(|| Refusal::conflict(format!("the process of the VMM of {name} is not known"), ""))?;
        let unreadable = |error: io::Error| {
            Refusal::conflict(format!("the library in process {pid}, the VMM of {name}: {error}"), LIBRARY)
        };
        let file = ClusterPage::open(pid, true).map_err(unreadable)?;
        if file.is_none() && !held {
            return Ok(());
        }
        let file = file.ok_or_else(|| {
            Refusal::conflict(format!("process {pid}, the VMM of {name}, has no library of ioplane"), LIBRARY)
        })?;
        if !held {
            return ClusterPage::set_held(&file, false).map_err(unreadable);
        }
        // First of all: a guest that runs does not stand still for a moment because somebody has asked.
        if is_empty(&file).await.map_err(unreadable)? {
            ClusterPage::set_held(&file, true).map_err(unreadable)?;
            match is_empty(&file).await {
                Ok(true) => return Ok(()),
                empty => {
                    ClusterPage::set_held(&file, false).map_err(unreadable)?;
                    empty.map_err(unreadable)?;
                }
            }
        }
        Err(Refusal::conflict(
            format!("the guest of {name} runs"),
            "stop it first (`stop` by the monitor of its QEMU)",
        ))
    }
}

/// Waits until no vCPU is in the guest; `false` if one stays there.
async fn is_empty(file: &File) -> io::Result<bool> {
    let end = Instant::now() + OUT;
    while ClusterPage::read_hold(file)?.inside > 0 {
        if Instant::now() >= end {
            return Ok(false);
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(true)
}
