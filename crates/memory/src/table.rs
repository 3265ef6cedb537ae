//! The table of live mappings, and the SIGBUS handler that looks addresses up in it.
//!
//! A page that is touched beyond the end of its file raises SIGBUS. The handler marks the mapping as lost and puts anonymous zero
//! pages in the place of the [`WINDOW`] bytes around the page. Whoever shared the file has broken its contract, so nothing of it has to be
//! kept, and views refuse lost memory from then on: what still faults is the copy that is under way. A copy may be long, so after
//! [`WINDOWS`] of them the **whole** mapping is replaced by one call. It is not replaced at once, because unmapping a guest's
//! pages takes an estimated 10 ms per GiB, on a core that serves other guests. A mapping of huge pages is replaced in whole ones (part of one cannot be).
//! One mapping becomes at most `2 * WINDOWS + 1` that way, however many pages are touched.
//!
//! The handler takes no lock, allocates nothing, and writes only to atomics. It may run on several threads at once for one mapping:
//! what they replace may overlap, and the result is the same. The mapping that faulted cannot be dropped meanwhile, because the faulting
//! thread uses it; the other entries of the table can, so they are read under a sequence count.

#![allow(unsafe_code)]
// UNSAFETY: a signal handler and the mmap in it, over ranges that their owners have entered.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};

/// Most mappings that can live at once in one process; a table of fixed size, since a signal handler reads it. Half of what
/// `vm.max_map_count` allows a process by default.
pub(crate) const SLOTS: usize = 32_768;

/// Bytes that one fault replaces at first, at least a page of the file.
const WINDOW: usize = 2 << 20;
/// So many times; then all of the mapping is replaced.
const WINDOWS: u32 = 16;

struct Slot {
    taken: AtomicBool,
    /// Even while the range is valid; counts every change.
    turn: AtomicU32,
    start: AtomicUsize,
    end: AtomicUsize,
    /// Bytes of one page of the file: a huge page of hugetlbfs.
    page: AtomicUsize,
    lost: AtomicBool,
    /// Faults so far.
    faults: AtomicU32,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        taken: AtomicBool::new(false),
        turn: AtomicU32::new(1),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
        faults: AtomicU32::new(0),
    }
}; SLOTS];

/// Slots beyond this have never been taken.
static USED: AtomicUsize = AtomicUsize::new(0);

/// The entry of one mapping.
#[derive(Debug)]
pub(crate) struct Entry(usize);

impl Entry {
    /// Enters `start..end`, whose file has pages of `page` bytes; `None` if the table is full. Control plane only.
    pub fn of(start: usize, end: usize, page: usize) -> Option<Self> {
        install();
        let free = |slot: &Slot| {
            !slot.taken.load(Ordering::Relaxed)
                && slot.taken.compare_exchange(false, true, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        };
        let index = TABLE.iter().position(free)?;
        let slot = &TABLE[index];
        slot.start.store(start, Ordering::Relaxed);
        slot.end.store(end, Ordering::Relaxed);
        slot.page.store(page, Ordering::Relaxed);
        slot.lost.store(false, Ordering::Relaxed);
        slot.faults.store(0, Ordering::Relaxed);
        USED.fetch_max(index + 1, Ordering::SeqCst);
        slot.turn.fetch_add(1, Ordering::SeqCst);
        Some(Entry(index))
    }

    /// Set when the mapping, or part of it, has been replaced by zero pages. Means this entry's mapping while the entry lives.
    #[inline]
    pub fn lost(&self) -> &'static AtomicBool {
        &TABLE[self.0].lost
    }

    /// Takes the range out, before it is unmapped: the address may be somebody else's afterwards.
    pub fn leave(&self) {
        TABLE[self.0].turn.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Entry {
    /// The range has left, and is unmapped.
    fn drop(&mut self) {
        TABLE[self.0].taken.store(false, Ordering::SeqCst);
    }
}

impl Slot {
    /// Start, end and page size, if the slot is valid and was not changed while it was read.
    fn range(&self) -> Option<(usize, usize, usize)> {
        let turn = self.turn.load(Ordering::Acquire);
        if !turn.is_multiple_of(2) {
            return None;
        }
        let range = (
            self.start.load(Ordering::Relaxed),
            self.end.load(Ordering::Relaxed),
            self.page.load(Ordering::Relaxed),
        );
        fence(Ordering::Acquire);
        (self.turn.load(Ordering::Relaxed) == turn).then_some(range)
    }
}

/// Puts zero pages at `start..end`. Says whether it could.
///
/// # Safety
/// The range is whole pages of one mapping of ours, whose content nobody needs.
unsafe fn zero_pages(start: usize, end: usize) -> bool {
    // SAFETY: the caller's; a mapping that is replaced stays mapped, so that no pointer into it dangles.
    let done = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            end - start,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    done != libc::MAP_FAILED
}

/// Makes the access to `at` repeatable if it is inside a mapping of the table.
fn replace(at: usize) -> bool {
    for slot in &TABLE[..USED.load(Ordering::SeqCst)] {
        let Some((start, end, page)) = slot.range() else { continue };
        if at < start || at >= end {
            continue;
        }
        slot.lost.store(true, Ordering::Release);
        let piece = WINDOW.max(page);
        let first = start + (at - start) / piece * piece;
        let window = (first, end.min(first.saturating_add(piece)));
        let whole = (start, end);
        let again = slot.faults.fetch_add(1, Ordering::Relaxed) >= WINDOWS;
        // Where the host allows no overcommitment the whole may be too much, and where the process may have no further mapping a window may.
        let (one, other) = if again { (whole, window) } else { (window, whole) };
        // SAFETY: within an entered range, in whole pages of its file, in use by the thread that faulted, so that its owner lives.
        return unsafe { zero_pages(one.0, one.1) || zero_pages(other.0, other.1) };
    }
    false
}

static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the SIGBUS handler, once for the process.
fn install() {
    BEFORE.get_or_init(|| {
        // SAFETY: both structures are plain data; the handler is async-signal-safe (atomics and mmap).
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigemptyset(&mut action.sa_mask);
            let mut before: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, &action, &mut before);
            before
        }
    });
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler. Only signals of the kernel (a positive code) have an
    // address: those that a process sends have other fields in its place.
    let at = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr() as usize) };
    if at.is_some_and(replace) {
        return;
    }
    // Not ours: as if we had never been here.
    // SAFETY: restores what was there or the default, and lets the instruction fault again.
    unsafe {
        match BEFORE.get() {
            Some(before) if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN => {
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(before.sa_sigaction);
                    call(signal, info, context);
                } else {
                    let call: extern "C" fn(libc::c_int) = std::mem::transmute(before.sa_sigaction);
                    call(signal);
                }
            }
            _ => {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
                if at.is_none() {
                    // Nothing faults again by itself: who sent the signal wants us to end.
                    libc::raise(libc::SIGBUS);
                }
            }
        }
    }
}
