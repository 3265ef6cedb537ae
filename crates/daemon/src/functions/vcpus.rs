//! The vCPUs of a function's VMM, which enter no guest while they are held, and do not come back while they are kept: by the library in the VMM's process
//! (docs/decisions/0085-migrations-of-others.md, docs/decisions/0087-virsh-migrate.md).

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use ioplane_api::request::StopWord;
use ioplane_vcpu::kvm::{ClusterPage, HoldReport, VcpuStop as Word};

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

/// The library in the process of a function's VMM.
struct Library {
    pid: u32,
    /// The function's name.
    name: String,
    /// `None`: the VMM has none.
    file: Option<File>,
}

impl Library {
    fn unreadable(&self, error: io::Error) -> Refusal {
        let Library { pid, name, .. } = self;
        Refusal::conflict(format!("the library in process {pid}, the VMM of {name}: {error}"), LIBRARY)
    }

    fn file(&self) -> Result<&File, Refusal> {
        let Library { pid, name, file } = self;
        file.as_ref().ok_or_else(|| {
            Refusal::conflict(format!("process {pid}, the VMM of {name}, has no library of ioplane"), LIBRARY)
        })
    }

    fn set_held(&self, held: bool) -> Result<(), Refusal> {
        ClusterPage::set_held(self.file()?, held).map_err(|error| self.unreadable(error))
    }

    fn set_stop(&self, word: Word) -> Result<(), Refusal> {
        ClusterPage::set_stop(self.file()?, word).map_err(|error| self.unreadable(error))
    }

    fn report(&self) -> Result<HoldReport, Refusal> {
        ClusterPage::read_hold(self.file()?).map_err(|error| self.unreadable(error))
    }

    /// Waits until no vCPU is in the guest; `false` if one stays there.
    async fn is_empty(&self) -> Result<bool, Refusal> {
        let end = Instant::now() + OUT;
        while self.report()?.inside > 0 {
            if Instant::now() >= end {
                return Ok(false);
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(true)
    }
}

impl Card {
    fn library(&self) -> Result<Library, Refusal> {
        let name = self.name();
        self.has_guest()?;
        let pid = self.served.handle.status().peer;
        let pid = pid
            .ok_or_else(|| Refusal::conflict(format!("the process of the VMM of {name} is not known"), ""))?;
        let mut library = Library { pid, name, file: None };
        library.file = ClusterPage::open(pid, true).map_err(|error| library.unreadable(error))?;
        Ok(library)
    }

    /// Has no vCPU of its VMM enter the guest, or lets them. Refused while the guest runs.
    pub async fn hold_vcpus(&self, held: bool) -> Result<(), Refusal> {
        let library = self.library()?;
        if !held {
            return if library.file.is_none() { Ok(()) } else { library.set_held(false) };
        }
        // First of all: a guest that runs does not stand still for a moment because somebody has asked.
        if library.is_empty().await? {
            library.set_held(true)?;
            match library.is_empty().await {
                Ok(true) => return Ok(()),
                empty => {
                    library.set_held(false)?;
                    empty?;
                }
            }
        }
        Err(Refusal::conflict(
            format!("the guest of {} runs", library.name),
            "stop it first (`stop` by the monitor of its QEMU)",
        ))
    }

    /// What becomes of vCPUs that its VMM wants back.
    pub async fn keep_vcpus(&self, stop: StopWord) -> Result<(), Refusal> {
        let library = self.library()?;
        match stop {
            StopWord::Free if library.file.is_none() => Ok(()),
            StopWord::Free => library.set_stop(Word::Free),
            StopWord::Ask => library.set_stop(library.report()?.stop.next()),
            StopWord::Keep => {
                library.set_stop(Word::Kept)?;
                let empty = library.is_empty().await;
                if matches!(empty, Ok(true)) && library.report()?.kept > 0 {
                    return Ok(());
                }
                library.set_stop(Word::Free)?;
                empty?;
                Err(Refusal::conflict(
                    format!("the VMM of {} wants no vCPU back, or one is in the guest still", library.name),
                    "vCPUs are kept while the VMM waits for them, to stop its guest",
                ))
            }
        }
    }
}
