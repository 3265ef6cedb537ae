//! Issue 13, number 2: whoever shares memory with us truncates its file while we use it. The process must live, and what the client
//! can make it hold must stay bounded.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_memory::{
    DirtyLog, GuestFault, GuestMap, GuestView, Mapping, MemoryRegion, PAGE, RegionSpec, Window,
};
use rustix::fs::MemfdFlags;

const MIB: u64 = 1 << 20;

fn memfd(flags: MemfdFlags, len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("guest", flags | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    file
}

fn region(file: &OwnedFd, gpa: u64, offset: u64, len: u64) -> MemoryRegion {
    let file = file.try_clone().unwrap();
    MemoryRegion::map(RegionSpec { gpa, len, user: gpa, offset, file }).unwrap()
}

/// Ranges of this process's address space that begin inside `start .. start + len`.
fn ranges_inside(start: u64, len: u64) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let begin = |line: &str| u64::from_str_radix(line.split('-').next()?, 16).ok();
    maps.lines().filter_map(begin).filter(|at| (start..start + len).contains(at)).count()
}

fn anonymous_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Huge pages of the host for as long as this lives. One test at a time, in all processes that use this lock.
struct HugePages {
    before: String,
    _lock: std::fs::File,
}

const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

impl HugePages {
    /// At least `count` free ones of 2 MiB, or a loud skip (a failure with `IOPLANE_NO_SKIP`, where everything is known to be there).
    fn reserve(count: usize) -> Option<Self> {
        let lock = std::fs::File::create(std::env::temp_dir().join("ioplane-huge-pages.lock")).unwrap();
        lock.lock().unwrap();
        let before = std::fs::read_to_string(HUGE_PAGES).unwrap().trim().to_owned();
        let pages = HugePages { before, _lock: lock };
        let wanted = pages.before.parse::<usize>().unwrap() + count;
        let written = std::fs::write(HUGE_PAGES, wanted.to_string());
        let info = std::fs::read_to_string("/proc/meminfo").unwrap();
        let number = |name: &str| {
            let line = info.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<usize>().ok()
        };
        if number("HugePages_Free:") >= Some(count) && number("Hugepagesize:") == Some(2048) {
            return Some(pages);
        }
        let why =
            format!("{count} huge pages of 2 MiB cannot be had ({written:?}): run as root, with memory free");
        let _ = writeln!(std::io::stderr(), "\n*** SKIPPED: {why} ***");
        assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "skipped: {why}");
        None
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(HUGE_PAGES, &self.before);
    }
}

#[test]
fn hole_02_a_truncated_hugetlb_file_is_survived() {
    let Some(_pages) = HugePages::reserve(4) else { return };
    let file = memfd(MemfdFlags::HUGETLB, 8 * MIB);
    let region = region(&file, 0, 0, 8 * MIB);
    let view = GuestView::new(Arc::new(GuestMap::new(vec![region]).unwrap()));
    view.write(5 * MIB + 17, b"here").unwrap();
    rustix::fs::ftruncate(&file, 2 * MIB).unwrap();
    // The access that meets the hole reads anything; what matters is that it ends, and that the next one is told.
    let _ = view.bytes::<4>(5 * MIB + 17);
    assert_eq!(view.check(), Err(GuestFault::MemoryShrank));
    assert_eq!(view.bytes::<4>(5 * MIB + 17), Err(GuestFault::MemoryShrank));
}

#[test]
fn hole_02_a_part_of_a_huge_page_is_mapped_and_unmapped_whole() {
    let Some(_pages) = HugePages::reserve(4) else { return };
    let file = memfd(MemfdFlags::HUGETLB, 8 * MIB);
    // QEMU cuts its memory at 640 KiB and wherever firmware asks for it: not at huge pages.
    let bytes = region(&file, 0, 3 * MIB + 4096, 4096);
    let whole = region(&file, 0, 0, 8 * MIB);
    let part = GuestView::new(Arc::new(GuestMap::new(vec![bytes]).unwrap()));
    let whole = GuestView::new(Arc::new(GuestMap::new(vec![whole]).unwrap()));
    part.write(8, b"seen").unwrap();
    assert_eq!(whole.bytes::<4>(3 * MIB + 4096 + 8), Ok(*b"seen"));
    // A length that is no multiple of the huge page used to make munmap fail: the mapping stayed for ever.
    let at = part.map().regions()[0].host_address() & !(2 * MIB - 1);
    assert_eq!(ranges_inside(at, 2 * MIB), 1);
    drop(part);
    assert_eq!(ranges_inside(at, 2 * MIB), 0, "still mapped");
}

#[test]
fn hole_02_every_second_page_of_a_truncated_gigabyte_costs_one_mapping() {
    const LEN: u64 = 1 << 30;
    let file = memfd(MemfdFlags::empty(), LEN);
    let mapping = Arc::new(Mapping::of_file(file.try_clone().unwrap(), 0, LEN).unwrap());
    // A window has no check of its own: whoever uses one asks at the end of its batch.
    let window = Window::of_mapping(&mapping, 0, LEN as usize).unwrap();
    rustix::fs::ftruncate(&file, 0).unwrap();
    for page in (0..LEN / PAGE).step_by(2) {
        assert_eq!(window.load_u16((page * PAGE) as usize), 0);
    }
    assert!(mapping.poisoned());
    let start = std::ptr::from_ref(&window.shorts(0)[0]) as u64;
    assert!(ranges_inside(start, LEN) <= 1, "{} ranges", ranges_inside(start, LEN));
}

/// Taking out all pages of a large guest takes long, and the core that does it serves others.
#[test]
fn hole_02_one_page_costs_a_window() {
    const LEN: u64 = 64 * MIB;
    let file = memfd(MemfdFlags::empty(), LEN);
    let mapping = Arc::new(Mapping::of_file(file.try_clone().unwrap(), 0, LEN).unwrap());
    let window = Window::of_mapping(&mapping, 0, LEN as usize).unwrap();
    (0..LEN / MIB).for_each(|at| window.put_u16((at * MIB) as usize, 7));
    rustix::fs::ftruncate(&file, LEN / 2).unwrap();
    assert_eq!(window.load_u16((48 * MIB) as usize), 0);
    assert!(mapping.poisoned());
    let kept = (0..LEN / 2 / MIB).filter(|at| window.load_u16((at * MIB) as usize) == 7).count();
    assert_eq!(kept as u64, LEN / 2 / MIB, "pages that the file still has are the file's");
    let start = std::ptr::from_ref(&window.shorts(0)[0]) as u64;
    assert!(ranges_inside(start, LEN) <= 3, "{} ranges", ranges_inside(start, LEN));
}

#[test]
fn hole_02_lost_memory_is_not_filled() {
    const LEN: u64 = 1 << 30;
    let file = memfd(MemfdFlags::empty(), LEN);
    let map = GuestMap::new(vec![region(&file, 0, 0, LEN)]).unwrap();
    let view = GuestView::new(Arc::new(map));
    rustix::fs::ftruncate(&file, 0).unwrap();
    let before = anonymous_kib();
    // A device that nobody stops (a NIC that receives) goes on storing. None of it may become memory of ours.
    let stored = (0..LEN / PAGE).filter(|page| view.write(page * PAGE, &[1; 64]).is_ok()).count();
    assert!(stored <= 1, "{stored} stores to memory that is gone");
    let grown = anonymous_kib().saturating_sub(before);
    assert!(grown < 64 << 10, "{grown} KiB more");
}

/// Where the host does not overcommit, zero pages for all of a large mapping may be more than it allows.
#[test]
fn hole_02_a_host_that_allows_no_more_memory_is_survived_too() {
    const CHILD: &str = "IOPLANE_TEST_NO_MORE_MEMORY";
    if std::env::var_os(CHILD).is_none() {
        // The limit holds for a whole process, so it gets one of its own.
        let name = "hole_02_a_host_that_allows_no_more_memory_is_survived_too";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let status = child.args([name, "--exact"]).env(CHILD, "1").status().unwrap();
        assert!(status.success(), "{status}");
        return;
    }
    const LEN: u64 = 1 << 40;
    let file = memfd(MemfdFlags::empty(), LEN);
    let view = GuestView::new(Arc::new(GuestMap::new(vec![region(&file, 0, 0, LEN)]).unwrap()));
    rustix::fs::ftruncate(&file, 0).unwrap();
    let limit = rustix::process::Rlimit { current: Some(256 * MIB), maximum: None };
    rustix::process::setrlimit(rustix::process::Resource::Data, limit).unwrap();
    let _ = view.bytes::<8192>(LEN / 2 - 8);
    assert_eq!(view.write(0, b"x"), Err(GuestFault::MemoryShrank));
}

#[test]
fn hole_02_a_truncated_dirty_log_stops_who_marks_it() {
    let log = memfd(MemfdFlags::empty(), PAGE);
    let mut view = GuestView::new(Arc::new(GuestMap::anonymous(MIB).unwrap()));
    view.set_log(Some(Arc::new(DirtyLog::of_file(log.try_clone().unwrap(), 0, PAGE).unwrap())));
    view.write(0, b"x").unwrap();
    assert_eq!(view.check(), Ok(()));
    rustix::fs::ftruncate(&log, 0).unwrap();
    view.write(0, b"x").unwrap();
    assert_eq!(view.check(), Err(GuestFault::MemoryShrank));
}

#[test]
fn hole_02_threads_that_fault_at_once_all_go_on() {
    const LEN: u64 = 64 * MIB;
    for round in 0..6 {
        let file = memfd(MemfdFlags::empty(), LEN);
        let mapping = Arc::new(Mapping::of_file(file.try_clone().unwrap(), 0, LEN).unwrap());
        let window = Window::of_mapping(&mapping, 0, LEN as usize).unwrap();
        let start = std::sync::Barrier::new(6);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (window, start) = (&window, &start);
                scope.spawn(move || {
                    start.wait();
                    for page in 0..LEN / PAGE {
                        let page = (page.wrapping_mul(2_654_435_761) ^ thread) % (LEN / PAGE);
                        let at = (page * PAGE) as usize;
                        if page.is_multiple_of(2) {
                            window.put_u16(at, 1);
                        } else {
                            let _ = window.load_u16(at);
                        }
                    }
                });
            }
            // Others come and go in the table meanwhile: the handler must never take their range for ours.
            scope.spawn(|| {
                start.wait();
                for n in 1..500 {
                    let other = Arc::new(Mapping::anonymous("other", n * PAGE).unwrap());
                    let window = Window::of_mapping(&other, 0, 8).unwrap();
                    window.put_u64(0, n);
                    assert!(!other.poisoned());
                    assert_eq!(window.load_u64(0), n);
                }
            });
            start.wait();
            rustix::fs::ftruncate(&file, (round % 3) * PAGE).unwrap();
        });
        assert!(mapping.poisoned());
    }
}
