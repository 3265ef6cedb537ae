//! The vCPUs of a function's VMM, which enter no guest while they are held, and do not come back while they are kept: by the library in the VMM's process
//! (docs/decisions/0085-migrations-of-others.md, docs/decisions/0087-virsh-migrate.md).

use std::fs::File;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ioplane_api::report::VcpusReport;
use ioplane_api::request::StopWord;
use ioplane_vcpu::kvm::{ClusterPage, HoldReport, VcpuStop as Word};

use super::Card;
use crate::refusal::Refusal;

/// How long vCPUs that are told to leave the guest may take.
const OUT: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(2);
const LIBRARY: &str = "start the guest's QEMU by `ioplane run -- qemu-system-x86_64 ...`, with clustering on";

/// Whoever changes what becomes of vCPUs by what it was before.
static CHANGES: Mutex<()> = Mutex::new(());

/// Whether a process's main thread, which is the main loop of a QEMU, waits for another thread, by `/proc/PID/syscall`. One that waits for a processor, for a
/// disk or for events does not, and of one whose call nobody may read that is not known.
fn waits(syscall: Option<&str>) -> bool {
    let call: Option<i64> = syscall.and_then(|line| line.split_whitespace().next()?.parse().ok());
    call == Some(libc::SYS_futex)
}

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

    /// What they do.
    pub fn vcpus(&self) -> Result<VcpusReport, Refusal> {
        let library = self.library()?;
        let HoldReport { held, inside, stop, kept } = library.report()?;
        let syscall = std::fs::read_to_string(format!("/proc/{}/syscall", library.pid)).ok();
        let stop = match stop {
            Word::Free => StopWord::Free,
            Word::Kept => StopWord::Keep,
            Word::Asked(_) => StopWord::Ask,
        };
        let main_waits = waits(syscall.as_deref());
        Ok(VcpusReport { held, inside, waiting: kept, stop, main_waits })
    }

    /// What becomes of vCPUs that its VMM wants back.
    pub async fn keep_vcpus(&self, stop: StopWord) -> Result<(), Refusal> {
        let library = self.library()?;
        let changes = || CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        let set = |word: Word| {
            let _changing = changes();
            library.set_stop(word)
        };
        match stop {
            StopWord::Free if library.file.is_none() => Ok(()),
            StopWord::Free => set(Word::Free),
            StopWord::Ask => {
                let _changing = changes();
                library.set_stop(library.report()?.stop.next())
            }
            StopWord::Pass => {
                let _changing = changes();
                match library.report()? {
                    HoldReport { stop: word @ Word::Asked(_), kept: 1.., .. } => {
                        library.set_stop(word.pass())
                    }
                    _ => Err(Refusal::conflict(
                        format!("no vCPU that the VMM of {} wants back waits to be let go", library.name),
                        "",
                    )),
                }
            }
            StopWord::Keep => {
                set(Word::Kept)?;
                let empty = library.is_empty().await;
                if matches!(empty, Ok(true)) && library.report()?.kept > 0 {
                    return Ok(());
                }
                set(Word::Free)?;
                empty?;
                Err(Refusal::conflict(
                    format!("the VMM of {} wants no vCPU back, or one is in the guest still", library.name),
                    "vCPUs are kept while the VMM waits for them, to stop its guest",
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_main_thread_waits_for_another_one_or_for_something_else() {
        let futex = format!("{} 0x7f 0x189 0x0 0x0 0x0 0xffffffff 0x7ffc 0x7f", libc::SYS_futex);
        let poll = format!("{} 0x7f 0x9 0x0 0x0 0x8 0x0 0x7ffc 0x7f", libc::SYS_ppoll);
        assert!(waits(Some(&futex)));
        // Nobody may read that, or it is gone.
        assert!(!waits(Some(&poll)) && !waits(Some("running\n")) && !waits(None));
    }
}
