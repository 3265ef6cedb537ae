//! A process that may have few descriptors. Alone in its process: the limit is read once.

use std::os::fd::OwnedFd;

use ioplane_memory::account::OWN;
use ioplane_memory::{Account, Limits, Mapping, MappingError, PAGE};
use rustix::fs::MemfdFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const LIMIT: usize = 1024;

#[test]
fn two_greedy_clients_leave_most_of_a_small_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(LIMIT as u64), maximum }).unwrap();
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, PAGE).unwrap();
    let mut greedy = Vec::new();
    for _ in 0..2 {
        let account = Account::new(Limits::default()).unwrap();
        let (mappings, error) = fill(&account, &file);
        assert!(matches!(error, MappingError::OverQuota { most } if most == mappings.len()), "{error}");
        assert!(mappings.len() > 4 * OWN, "{}", mappings.len());
        greedy.push((account, mappings));
    }
    let taken: usize = greedy.iter().map(|(_, mappings)| mappings.len()).sum();
    assert!(taken < LIMIT / 3, "{taken} of {LIMIT}");
    // Others find something in the pool too.
    let account = Account::new(Limits::default()).unwrap();
    assert!(fill(&account, &file).0.len() > OWN);
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
