//! Issue 13, numbers 3 and 4: what a client may share as memory, and how much of what all share it may take.

#![expect(clippy::disallowed_types, reason = "tests of one process take turns")]

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ioplane_memory::account::{CLIENTS, MOST, OWN};
use ioplane_memory::{Account, FileSystem, Files, Limits, MapError, Mapping, MappingError, PAGE, RegionSpec};
use rustix::fs::MemfdFlags;

fn memfd(len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    file
}

/// Maps pages until there are no more for this client.
fn fill(account: &Account, file: &OwnedFd) -> (Vec<Mapping>, MappingError) {
    let mut mappings = Vec::new();
    loop {
        match account.mapping(file.try_clone().unwrap(), 0, PAGE) {
            Ok(mapping) => mappings.push(mapping),
            Err(error) => return (mappings, error),
        }
    }
}

/// What is counted is the process's: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn hole_04_greedy_clients_leave_every_other_client_its_own() {
    let _alone = alone();
    let file = memfd(PAGE);
    let one = Account::new(Limits::default()).unwrap();
    let (mappings, error) = fill(&one, &file);
    assert!(matches!(error, MappingError::OverQuota { most: MOST }), "{error}");
    assert_eq!((mappings.len(), one.mappings(), error.name()), (MOST, MOST, "too_many_mappings"));

    let mut greedy = vec![(one, mappings)];
    let emptied = loop {
        assert!(greedy.len() < CLIENTS, "the pool has no end");
        let account = Account::new(Limits::default()).unwrap();
        let (mappings, error) = fill(&account, &file);
        assert!(mappings.len() >= OWN, "client {} got {}", greedy.len(), mappings.len());
        greedy.push((account, mappings));
        if matches!(error, MappingError::PoolEmpty { own: OWN }) {
            break greedy.len();
        }
    };
    assert!(emptied > 9, "nine did it before: {emptied}");
    // Everybody who comes then has what is its own, and the process what it needs.
    for _ in 0..20 {
        let account = Account::new(Limits::default()).unwrap();
        let (mappings, _) = fill(&account, &file);
        assert_eq!(mappings.len(), OWN);
        greedy.push((account, mappings));
    }
    Mapping::anonymous("a disk in memory", PAGE).unwrap();
    // What is given back is there again; also by those who still hold a mapping of an account that is gone.
    let (account, mut mappings) = greedy.swap_remove(0);
    drop(account);
    let kept = mappings.split_off(MOST - 1);
    drop(mappings);
    let account = Account::new(Limits::default()).unwrap();
    let (mappings, _) = fill(&account, &file);
    assert!(mappings.len() > OWN, "{}", mappings.len());
    drop((greedy, kept, mappings, account));

    let all: Vec<_> = (0..CLIENTS).map(|_| Account::new(Limits::default()).unwrap()).collect();
    assert!(matches!(Account::new(Limits::default()), Err(MappingError::TooManyClients)));
    drop(all);
    let account = Account::new(Limits::default()).unwrap();
    assert_eq!(fill(&account, &file).0.len(), MOST);
}

#[test]
fn a_client_holds_no_part_of_the_pool_while_some_of_its_own_are_free() {
    let _alone = alone();
    let file = memfd(PAGE);
    let mut greedy = Vec::new();
    loop {
        assert!(greedy.len() < CLIENTS, "the pool has no end");
        let account = Account::new(Limits::default()).unwrap();
        let (mappings, error) = fill(&account, &file);
        greedy.push((account, mappings));
        if matches!(error, MappingError::PoolEmpty { .. }) {
            break;
        }
    }
    // Those that it had before the pool was asked go first, as where a VMM replaces its memory.
    let (freed, before) = (10, greedy[0].1.len());
    greedy[0].1.drain(..freed);
    let account = Account::new(Limits::default()).unwrap();
    let (mappings, _) = fill(&account, &file);
    assert_eq!(mappings.len(), OWN + freed);
    // And each is given back once.
    drop(mappings);
    let (mappings, _) = fill(&account, &file);
    assert_eq!(mappings.len(), OWN + freed);
    greedy[0].1.clear();
    assert_eq!(greedy[0].0.mappings(), 0);
    let (more, _) = fill(&account, &file);
    assert_eq!(more.len(), before - OWN - freed);
}

#[test]
fn threads_of_one_client_take_from_the_pool_what_they_give_back() {
    let _alone = alone();
    let file = memfd(PAGE);
    let account = Account::new(Limits::default()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..200 {
                    let held: Vec<_> = (0..6 + round % 7)
                        .map(|_| account.mapping(file.try_clone().unwrap(), 0, PAGE).unwrap())
                        .collect();
                    drop(held);
                }
            });
        }
    });
    assert_eq!(account.mappings(), 0);
    // The pool has what it had: as many clients as before find all of it.
    let mut greedy = Vec::new();
    let emptied = loop {
        let account = Account::new(Limits::default()).unwrap();
        let (mappings, error) = fill(&account, &file);
        greedy.push((account, mappings));
        if matches!(error, MappingError::PoolEmpty { .. }) {
            break greedy.iter().map(|(_, mappings)| mappings.len() - OWN).sum::<usize>();
        }
    };
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let half = descriptors.map_or(usize::MAX, |all| all as usize / 2);
    assert_eq!(emptied, half.min(32_768 - CLIENTS * OWN - 4096));
}

#[test]
fn hole_04_pinned_bytes_have_a_limit_and_a_sparse_file_costs_nothing() {
    let _alone = alone();
    const LEN: u64 = 1 << 40;
    let account = Account::new(Limits { pinned: 3 << 20, ..Limits::default() }).unwrap();
    let spec = |len| RegionSpec { gpa: 0, len, user: 0, offset: 0, file: memfd(len) };
    let huge = account.region(spec(LEN), true).unwrap();
    assert_eq!(account.pinned(), 0, "mapping pins nothing");
    let refused = huge.pin().unwrap_err();
    let MapError::Mapping(error @ MappingError::TooMuchPinned { now: 0, more: LEN, most }) = refused else {
        panic!("{refused}")
    };
    assert_eq!((most, error.name()), (3 << 20, "too_much_pinned"));
    assert!(error.to_string().contains("pinned_memory"), "{error}");
    let small = account.region(spec(2 << 20), true).unwrap();
    let pin = small.pin().unwrap();
    assert_eq!(account.pinned(), 2 << 20);
    assert!(small.pin().is_err());
    drop(pin);
    assert_eq!(account.pinned(), 0);
    let _again = small.pin().unwrap();
    // Memory of the process itself is nobody's.
    let own = ioplane_memory::MemoryRegion::map(spec(64 << 20)).unwrap();
    own.pin().unwrap();
}

#[test]
fn hole_03_files_that_may_not_answer_are_refused_unless_allowed() {
    let _alone = alone();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("memory");
    let slow = || {
        let file =
            std::fs::File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        file.set_len(PAGE).unwrap();
        OwnedFd::from(file)
    };
    let kind = rustix::fs::fstatfs(slow()).unwrap().f_type as u32;
    assert_ne!(kind, 0x0102_1994, "{} is on tmpfs: set CARGO_TARGET_DIR to a disk", path.display());
    let strict = Account::new(Limits::default()).unwrap();
    let refused = strict.mapping(slow(), 0, PAGE).unwrap_err();
    assert!(matches!(&refused, MappingError::Slow(FileSystem(found)) if *found == kind), "{refused}");
    assert_eq!(refused.name(), "slow_memory");
    for remedy in ["<source type='memfd'/>", "memory-backend-memfd", "guest_memory = \"any\""] {
        assert!(refused.to_string().contains(remedy), "{refused}");
    }
    let any = Account::new(Limits { files: Files::Any, ..Limits::default() }).unwrap();
    any.mapping(slow(), 0, PAGE).unwrap();
    strict.mapping(memfd(PAGE), 0, PAGE).unwrap();
    if let Ok(file) = std::fs::File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open("/dev/shm/ioplane-hole-03")
    {
        std::fs::remove_file("/dev/shm/ioplane-hole-03").unwrap();
        file.set_len(PAGE).unwrap();
        strict.mapping(file.into(), 0, PAGE).unwrap();
    }
    // What is no file is no memory, whatever file system its name is in: /dev is a tmpfs.
    for device in ["/dev/zero", "/dev/null"] {
        let device = || std::fs::File::options().read(true).write(true).open(device).unwrap().into();
        for account in [&strict, &any] {
            assert!(matches!(account.mapping(device(), 0, PAGE), Err(MappingError::NotAFile)));
        }
    }
    assert_eq!((strict.mappings(), any.mappings()), (0, 0), "what was refused is not counted");
}
