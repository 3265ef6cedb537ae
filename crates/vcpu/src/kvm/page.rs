//! The memory by which a VMM's process and others speak of clustering: counters one way, a switch the other way. It is a file
//! without a name in any directory; whoever may look into the process finds it among its descriptors.

use std::fs::{self, File};
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::clamp::page::{ClampPage, ClampReport, HZ_AT};
use super::counters::{BatchCounts, ClusterCounts, ClusterSite, VcpuCounters};
use super::hold::{HELD_AT, HoldPage, HoldReport, STOP_AT, VcpuStop};

/// How the file is called where descriptors are listed.
pub const CLUSTER_PAGE_NAME: &str = "ioplane-exits-cluster";
/// vCPUs that have counters; others are left alone.
pub const MOST_VCPUS: usize = 64;
const MAGIC: u64 = u64::from_le_bytes(*b"ioplexit");
/// Of the layout: it changes with every field.
const VERSION: u32 = 8;

/// The file's content. All zeros are a value of it, which has not begun.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct ClusterPage {
    magic: AtomicU64,
    version: AtomicU32,
    vcpus: AtomicU32,
    /// Written by others: a [`ClusterSwitch`].
    switch: AtomicU32,
    /// Guests are offered batches.
    batches: AtomicU32,
    /// The interposer has failed.
    failed: AtomicU32,
    cycles_per_microsecond: AtomicU64,
    /// The timer's.
    clamp: ClampPage,
    /// Whether vCPUs may enter the guest.
    hold: HoldPage,
    counters: [VcpuCounters; MOST_VCPUS],
}

/// What is done for guests, as others have switched it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterSwitch {
    /// Clusters and batches.
    On,
    /// Every exit is the kernel's.
    Off,
    /// Batches, and no clusters.
    BatchOnly,
}

impl ClusterSwitch {
    /// What others have written may be anything: what is not known is off.
    fn of(word: u32) -> Self {
        match word {
            0 => Self::On,
            2 => Self::BatchOnly,
            _ => Self::Off,
        }
    }

    fn word(self) -> u32 {
        match self {
            Self::On => 0,
            Self::Off => 1,
            Self::BatchOnly => 2,
        }
    }
}

/// What such a file says of one vCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuReport {
    /// The totals.
    pub counts: ClusterCounts,
    /// What has become of batches.
    pub batches: BatchCounts,
    /// Why nothing was interpreted after an access, by [`REASONS`](super::REASONS).
    pub not_begun: Vec<u64>,
    /// The places that have been seen.
    pub sites: Vec<ClusterSite>,
    /// Instructions that are not interpreted and have ended clusters, and how often.
    pub instructions: Vec<(String, u64)>,
}

/// What such a file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterReport {
    /// What is switched on.
    pub switch: ClusterSwitch,
    /// Guests were offered batches when they began.
    pub batches: bool,
    /// The interposer has failed and does nothing any more.
    pub failed: bool,
    /// Of the time stamp counter.
    pub cycles_per_microsecond: u64,
    /// In the order in which the VMM has made them.
    pub vcpus: Vec<VcpuReport>,
}

impl ClusterPage {
    /// Begins. `switch` is how it stands at first, `batches` whether guests are offered them.
    pub fn begin(&self, switch: ClusterSwitch, batches: bool, cycles_per_microsecond: u64) {
        self.cycles_per_microsecond.store(cycles_per_microsecond, Ordering::Relaxed);
        self.switch.store(switch.word(), Ordering::Relaxed);
        self.batches.store(u32::from(batches), Ordering::Relaxed);
        self.version.store(VERSION, Ordering::Relaxed);
        self.magic.store(MAGIC, Ordering::Release);
    }

    /// Counters for one more vCPU, with memory behind them; `None` if there are no more.
    pub fn next_vcpu(&self) -> Option<&VcpuCounters> {
        let taken = self.vcpus.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |vcpus| {
            usize::try_from(vcpus).is_ok_and(|vcpus| vcpus < MOST_VCPUS).then_some(vcpus + 1)
        });
        let counters = self.counters.get(usize::try_from(taken.ok()?).ok()?)?;
        counters.reset();
        Some(counters)
    }

    /// The part that is the timer clamp's.
    pub fn clamp(&self) -> &ClampPage {
        &self.clamp
    }

    /// The part that says whether vCPUs may enter the guest.
    pub fn hold(&self) -> &HoldPage {
        &self.hold
    }

    /// How it stands now.
    pub fn switched(&self) -> ClusterSwitch {
        ClusterSwitch::of(self.switch.load(Ordering::Relaxed))
    }

    /// Says that the interposer has failed.
    pub fn set_failed(&self) {
        self.failed.store(1, Ordering::Relaxed);
    }

    /// Switches in the process that has this file.
    pub fn switch(file: &File, to: ClusterSwitch) -> io::Result<()> {
        read_header(file)?;
        file.write_all_at(&to.word().to_ne_bytes(), offset_of!(ClusterPage, switch) as u64)
    }

    /// Sets the most ticks per second in the process that has this file; `None` switches the clamp off.
    pub fn set_clamp(file: &File, hz: Option<u32>) -> io::Result<()> {
        read_header(file)?;
        let at = offset_of!(ClusterPage, clamp) + HZ_AT;
        file.write_all_at(&hz.unwrap_or(0).to_ne_bytes(), at as u64)
    }

    /// Opens that of a process, if it has one. The process may be anybody's, and may have put anything there.
    pub fn open(pid: u32, write: bool) -> io::Result<Option<File>> {
        let wanted = format!("/memfd:{CLUSTER_PAGE_NAME} (deleted)");
        let entries = fs::read_dir(format!("/proc/{pid}/fd"))?;
        let mut paths = entries.flatten().map(|entry| entry.path());
        let is_it =
            |path: &PathBuf| fs::read_link(path).is_ok_and(|link| link.as_os_str() == wanted.as_str());
        let Some(path) = paths.find(is_it) else { return Ok(None) };
        // A FIFO that was put there since would be waited for.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        File::options().read(true).write(write).custom_flags(flags).open(path).map(Some)
    }

    /// Has no vCPU of the process that has this file enter the guest, or lets them go on.
    pub fn set_held(file: &File, held: bool) -> io::Result<()> {
        read_header(file)?;
        let at = offset_of!(ClusterPage, hold) + HELD_AT;
        file.write_all_at(&u32::from(held).to_ne_bytes(), at as u64)
    }

    /// Says what becomes of the vCPUs of the process that has this file when it wants them back.
    pub fn set_stop(file: &File, word: VcpuStop) -> io::Result<()> {
        read_header(file)?;
        let at = offset_of!(ClusterPage, hold) + STOP_AT;
        file.write_all_at(&word.word().to_ne_bytes(), at as u64)
    }

    /// Reads whether they are held, and whether those that are wanted back are kept.
    pub fn read_hold(file: &File) -> io::Result<HoldReport> {
        let header = read_header(file)?;
        let word = |at: usize| u32::from_ne_bytes(array(&header, offset_of!(ClusterPage, hold) + at));
        Ok(HoldPage::report_of(word))
    }

    /// Reads how the clamp stands.
    pub fn read_clamp(file: &File) -> io::Result<ClampReport> {
        let header = read_header(file)?;
        let word = |at: usize| u32::from_ne_bytes(array(&header, offset_of!(ClusterPage, clamp) + at));
        Ok(ClampPage::report_of(word))
    }

    /// Reads such a file. What it says is another process's word.
    pub fn read(file: &File) -> io::Result<ClusterReport> {
        let header = read_header(file)?;
        let word = |at: usize| u32::from_ne_bytes(array(&header, at));
        let vcpus = usize::try_from(word(offset_of!(ClusterPage, vcpus))).unwrap_or(0).min(MOST_VCPUS);
        let mut reports = Vec::with_capacity(vcpus);
        for vcpu in 0..vcpus {
            let at = offset_of!(ClusterPage, counters) + vcpu * size_of::<VcpuCounters>();
            let mut bytes = vec![0; size_of::<VcpuCounters>()];
            file.read_exact_at(&mut bytes, at as u64)?;
            let counters = VcpuCounters::of(&bytes);
            reports.push(VcpuReport {
                counts: counters.counts(),
                batches: counters.batches(),
                not_begun: counters.not_begun().to_vec(),
                sites: counters.sites().collect(),
                instructions: counters
                    .instructions()
                    .map(|(number, count)| (crate::instruction_name(number), count))
                    .collect(),
            });
        }
        Ok(ClusterReport {
            switch: ClusterSwitch::of(word(offset_of!(ClusterPage, switch))),
            batches: word(offset_of!(ClusterPage, batches)) != 0,
            failed: word(offset_of!(ClusterPage, failed)) != 0,
            cycles_per_microsecond: u64::from_ne_bytes(array(
                &header,
                offset_of!(ClusterPage, cycles_per_microsecond),
            )),
            vcpus: reports,
        })
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    for (to, from) in array.iter_mut().zip(bytes.iter().skip(at)) {
        *to = *from;
    }
    array
}

fn read_header(file: &File) -> io::Result<Vec<u8>> {
    let mut header = vec![0; offset_of!(ClusterPage, counters)];
    file.read_exact_at(&mut header, 0)?;
    let magic = u64::from_ne_bytes(array(&header, offset_of!(ClusterPage, magic)));
    let version = u32::from_ne_bytes(array(&header, offset_of!(ClusterPage, version)));
    if magic != MAGIC || version != VERSION {
        let why = format!("this is not version {VERSION} of the interposer's counters");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(header)
}
