//! Events that are written down here.

use super::*;
use crate::event::FaultCause;

fn exit(code: u64, rip: u64) -> Event {
    let reason = Reason::from_kvm(2, code);
    Event::Exit { reason, rip, vcpu: Some(0), detail: Detail::Nothing }
}

const ENTRY: Event = Event::Entry { vcpu: Some(0) };

#[test]
fn an_exit_has_its_detail_and_its_time() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let mmio = Detail::Memory { address: 0xfee0_00b0, width: 4, write: true };
    for (at, event) in [
        (5, ENTRY),
        (10, exit(0x400, 0x99)),
        (11, Event::Detail(Detail::Fault(FaultCause::Unknown))),
        (12, Event::Detail(mmio)),
        (13, Event::UserSpace),
        (40, ENTRY),
    ] {
        profile.take(&mut thread, at, event);
    }
    let (site, tally) = profile.sites().next().unwrap();
    assert_eq!((site.detail, site.rip), (mmio, Some(0x99)));
    assert_eq!(
        *tally,
        SiteCounts { count: 1, timed: 1, host_ns: 30, user: 1, user_ns: 27, ..SiteCounts::default() }
    );
    assert_eq!(profile.vcpus(), [(0, *tally)]);
}

/// With APICv or AVIC nothing is injected: a timer that has run out is accepted, and the processor does the rest.
#[test]
fn hole_21_an_accepted_interrupt_ends_a_run_of_its_own_vcpu() {
    let port = |port: u16, rip: u64| Event::Exit {
        reason: Reason::from_kvm(2, 0x7b),
        rip,
        vcpu: Some(0),
        detail: Detail::Port { port, width: 1, write: true, queue: None },
    };
    let seen = |accepted: u32| {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let events =
            [port(0x70, 1), ENTRY, port(0x71, 3), Event::Accepted { vcpu: accepted }, ENTRY, port(0x20, 5)];
        for (at, event) in events.into_iter().enumerate() {
            profile.take(&mut thread, at as u64, event);
        }
        profile.end(&mut thread);
        let lengths: Vec<usize> = profile.runs.iter().map(|(run, _)| run.steps().len()).collect();
        lengths
    };
    assert_eq!(seen(0), [2], "the handler's access is not of the run");
    assert_eq!(seen(1), [3], "an interrupt that it sends to another vCPU");
}

#[test]
fn what_kvm_did_before_it_told_belongs_to_the_exit() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let command = Detail::Msr { index: 0x830, write: true };
    for (at, event) in [
        (1, ENTRY),
        (2, Event::Detail(command)),
        (3, exit(0x7c, 7)),
        (4, ENTRY),
        // Of an entry before, and of another kind: not this one's.
        (5, Event::Detail(command)),
        (6, ENTRY),
        (7, exit(0x7c, 8)),
        (8, ENTRY),
        (9, Event::Detail(command)),
        (10, exit(0x78, 9)),
        (11, ENTRY),
    ] {
        profile.take(&mut thread, at, event);
    }
    let detail = |rip: u64| profile.sites().find(|(site, _)| site.rip == Some(rip)).unwrap().0.detail;
    assert_eq!((detail(7), detail(8), detail(9)), (command, Detail::Nothing, Detail::Nothing));
}

#[test]
fn interrupts_of_a_samples_making_are_no_exits_of_the_guests() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    // Ended by ours; by one that came before; in a halt.
    for (code, at) in [(0x60, 20), (0x60, 10), (0x78, 20)] {
        profile.fresh(&mut thread);
        profile.take(&mut thread, 1, ENTRY);
        profile.take(&mut thread, at, exit(code, 5));
        profile.cut(&mut thread, 15);
    }
    // Begun by ours, told late; the next one is not ours.
    profile.fresh(&mut thread);
    for at in [1, 5] {
        profile.take(&mut thread, at, exit(0x60, 5));
        profile.take(&mut thread, at + 1, ENTRY);
    }
    let mut sites: Vec<_> =
        profile.sites().map(|(s, tally)| (s.reason.kind(), tally.count, tally.timed)).collect();
    sites.sort_unstable();
    let mut wanted = [(Kind::HostInterrupt, 2, 1), (Kind::Halt, 1, 0)];
    wanted.sort_unstable();
    assert_eq!(sites, wanted);
    assert_eq!(profile.cut, 2);
}

#[test]
fn a_slices_first_and_last_runs_are_not_whole() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let port = |port: u16| {
        let detail = Detail::Port { port, width: 1, write: true, queue: None };
        Event::Exit { reason: Reason::from_kvm(2, 0x7b), rip: u64::from(port), vcpu: None, detail }
    };
    profile.fresh(&mut thread);
    for event in [port(1), port(2), exit(0x78, 9), port(3), port(4), exit(0x78, 9), port(5), port(6)] {
        profile.take(&mut thread, 1, event);
    }
    profile.cut(&mut thread, 9);
    let runs: Vec<_> = profile.runs.iter().map(|(run, seen)| (run.rip, seen.times)).collect();
    assert_eq!(runs, [(3, 1)]);
}

#[test]
fn an_entry_is_enough_to_know_hardware() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    profile.take(&mut thread, 1, Event::Detail(Detail::Msr { index: 1, write: true }));
    assert!(profile.is_by_consequence());
    profile.take(&mut thread, 2, ENTRY);
    assert!(!profile.is_by_consequence());
}

#[test]
fn a_nested_guest_s_exits_have_no_address() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    for (at, event) in [(1, exit(0x78, 7)), (2, Event::Nested), (9, ENTRY), (10, exit(0x78, 7)), (12, ENTRY)]
    {
        profile.take(&mut thread, at, event);
    }
    let mut sites: Vec<_> =
        profile.sites().map(|(site, tally)| (site.nested, site.rip, tally.host_ns)).collect();
    sites.sort_unstable();
    assert_eq!(sites, [(false, Some(7), 2), (true, None, 8)]);
}

#[test]
fn kvm_is_asked_for_ports_until_exits_tell_them() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let port = Detail::Port { port: 0x70, width: 1, write: true, queue: None };
    let told = Event::Exit { reason: Reason::from_kvm(2, 0x7b), rip: 1, vcpu: None, detail: port };
    for at in 0..64 {
        assert!(!profile.tells_ports());
        profile.take(&mut thread, at, told);
        profile.take(&mut thread, at, Event::Detail(port));
    }
    assert!(profile.tells_ports());
    // An encrypted guest's exit has no fields.
    profile.take(&mut thread, 99, exit(0x403, 1));
    profile.take(&mut thread, 99, Event::Detail(port));
    assert!(!profile.tells_ports());
}

#[test]
fn exits_without_entries_count_without_time() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    profile.take(&mut thread, 1, exit(0x78, 1));
    profile.take(&mut thread, 2, exit(0x78, 1));
    profile.lost(&mut thread, 3);
    profile.take(&mut thread, 9, ENTRY);
    profile.take(&mut thread, 10, exit(0x78, 1));
    profile.end(&mut thread);
    assert_eq!(profile.total(), SiteCounts { count: 3, ..SiteCounts::default() });
    assert_eq!(profile.lost_records, 3);
}

#[test]
fn runs_end_where_the_guest_is_interrupted_or_records_are_lost() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let out = |port| {
        let reason = Reason::from_kvm(2, 0x7b);
        let detail = Detail::Port { port, width: 1, write: true, queue: None };
        Event::Exit { reason, rip: port.into(), vcpu: Some(0), detail }
    };
    for event in [out(1), ENTRY, exit(0x60, 5), ENTRY, out(2), Event::Interrupt { vector: 3 }, ENTRY] {
        profile.take(&mut thread, 1, event);
    }
    for port in [3, 4] {
        profile.take(&mut thread, 2, out(port));
    }
    profile.lost(&mut thread, 1);
    for port in [5, 6, 7] {
        profile.take(&mut thread, 3, out(port));
    }
    profile.end(&mut thread);
    let mut runs: Vec<_> =
        profile.runs.iter().map(|(run, seen)| (run.rip, run.steps().len(), seen.times)).collect();
    runs.sort_unstable();
    assert_eq!(runs, [(1, 2, 1), (5, 3, 1)]);
}

/// What an MMIO exit was about KVM tells after it, and whether the VMM has answered it.
#[test]
fn mmio_is_of_a_run_with_what_kvm_says_of_it() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let mmio = |address: u64| Event::Detail(Detail::Memory { address, width: 4, write: true });
    let events = [
        exit(0x400, 1),
        mmio(0xfebf_0000),
        Event::UserSpace,
        ENTRY,
        exit(0x400, 2),
        mmio(0xfebf_0004),
        Event::UserSpace,
        // Injected after the second: the next access is the handler's.
        Event::Interrupt { vector: 9 },
        ENTRY,
        exit(0x400, 3),
        mmio(0xfebf_0008),
        ENTRY,
    ];
    for (at, event) in events.into_iter().enumerate() {
        profile.take(&mut thread, at as u64, event);
    }
    profile.end(&mut thread);
    let runs: Vec<_> = profile.runs.iter().map(|(run, seen)| (run.steps().to_vec(), seen)).collect();
    let step = |address: u64| Detail::Memory { address, width: 4, write: true };
    let counts = crate::runs::RunCounts { times: 1, user: 2 };
    assert_eq!(runs, [(vec![step(0xfebf_0000), step(0xfebf_0004)], counts)]);
}

#[test]
fn time_without_a_processor_is_nobodys_work() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let preempted = Event::SwitchedOut { preempted: true };
    let waits = Event::SwitchedOut { preempted: false };
    for (at, event) in [
        // Told of a thread that has lost its processor before the watch.
        (1, Event::SwitchedIn),
        (100, exit(0x7b, 7)),
        (110, preempted),
        (130, Event::SwitchedIn),
        (140, Event::UserSpace),
        (150, waits),
        (250, Event::SwitchedIn),
        (260, preempted),
        (262, Event::SwitchedIn),
        // The same exit still: the VMM has called KVM_RUN and was sent back.
        (265, Event::UserSpace),
        (300, ENTRY),
        (400, exit(0x78, 9)),
        (410, waits),
        (1410, Event::SwitchedIn),
        (1420, ENTRY),
    ] {
        profile.take(&mut thread, at, event);
    }
    let of = |rip: u64| *profile.sites().find(|(site, _)| site.rip == Some(rip)).unwrap().1;
    let port = of(7);
    assert_eq!((port.host_ns, port.user_ns), (200, 160 - 102));
    assert_eq!((port.preempted_ns, port.blocked_ns), (22, 100));
    let halt = of(9);
    assert_eq!((halt.host_ns, halt.user_ns, halt.preempted_ns, halt.blocked_ns), (1020, 0, 0, 1000));
    let site = *profile.sites().find(|(site, _)| site.rip == Some(9)).unwrap().0;
    assert_eq!(profile.times(&site).unwrap().max_ns, 1020);
}

/// What was lost in between is no time without a processor.
#[test]
fn a_switch_whose_end_is_lost_does_not_count() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    profile.take(&mut thread, 1, exit(0x7b, 7));
    profile.take(&mut thread, 2, Event::SwitchedOut { preempted: true });
    profile.lost(&mut thread, 1);
    profile.take(&mut thread, 50, exit(0x7b, 7));
    profile.take(&mut thread, 60, Event::SwitchedIn);
    profile.take(&mut thread, 70, ENTRY);
    assert_eq!((profile.total().host_ns, profile.total().preempted_ns), (20, 0));
}

/// The first exit of a slice is still the one that has begun it.
#[test]
fn a_switch_is_not_the_first_thing_in_a_slice() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    profile.fresh(&mut thread);
    profile.take(&mut thread, 1, Event::SwitchedIn);
    profile.take(&mut thread, 2, exit(0x60, 5));
    assert_eq!(profile.cut, 1);
}

#[test]
fn halts_are_kept_apart() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    for (at, event) in [(0, exit(0x78, 1)), (900, ENTRY), (1000, exit(0x7b, 1)), (1030, ENTRY)] {
        profile.take(&mut thread, at, event);
    }
    assert_eq!((profile.vcpus()[0].1.host_ns, profile.halted_ns(0)), (930, 900));
}

#[test]
fn memory_is_bounded() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    for rip in 0..SITES as u64 + 1000 {
        profile.take(&mut thread, rip, exit(0x7b, rip));
    }
    profile.end(&mut thread);
    assert_eq!(profile.crowded, 1000);
    assert_eq!(profile.sites().count(), SITES + 1);
    assert_eq!(profile.total().count, SITES as u64 + 1000);
}

/// As many different things as can be, for as long as a test may take: what is kept does not grow with the time.
#[test]
fn hours_of_anything_are_bounded() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let mut random = 88_172_645_463_325_252_u64;
    let mut exits = 0;
    for at in 0..2_000_000_u64 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let address = Detail::Memory { address: random, width: 4, write: false };
        let event = match random % 8 {
            0 => ENTRY,
            1 => Event::Detail(address),
            2 => Event::Interrupt { vector: (random >> 9) as u8 },
            3 => Event::Entry { vcpu: Some((random >> 20) as u32) },
            _ => {
                exits += 1;
                let reason = Reason::from_kvm(2, random >> 16);
                let vcpu = Some((random >> 40) as u32);
                Event::Exit { reason, rip: random, vcpu, detail: Detail::Nothing }
            }
        };
        profile.take(&mut thread, at, event);
    }
    profile.end(&mut thread);
    assert!(profile.sites.len() <= 2 * SITES + 1 && profile.consequences.len() <= SITES);
    assert!(profile.halted.len() <= profile.vcpus.len());
    assert!(profile.vcpus.len() <= VCPUS && profile.interrupts.len() <= 256);
    assert_eq!(profile.total().count, exits);
}

#[test]
fn a_software_kvm_shows_consequences_only() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let port = Detail::Port { port: 0x3f8, width: 1, write: true, queue: None };
    profile.take(&mut thread, 1, Event::Detail(port));
    profile.take(&mut thread, 2, Event::Detail(port));
    let read = Detail::Memory { address: 0xd_0000, width: 4, write: false };
    profile.take(&mut thread, 2, Event::Asked(read));
    profile.take(&mut thread, 2, Event::Detail(read));
    assert!(profile.is_by_consequence());
    assert_eq!(profile.total().count, 3);
    profile.take(&mut thread, 3, exit(0x7b, 7));
    profile.end(&mut thread);
    assert!(!profile.is_by_consequence());
    assert_eq!(profile.total().count, 1);
}

/// The exit tells its port, and KVM's next word the queue: then the exit is of that queue, and still one that tells its port.
#[test]
fn a_port_of_queues_is_refined() {
    let port = |queue: Option<u16>| Detail::Port { port: 0xc050, width: 2, write: true, queue };
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    for queue in [0, 1, 1] {
        let reason = Reason::from_kvm(2, 0x7b);
        profile.take(&mut thread, 1, Event::Exit { reason, rip: 7, vcpu: None, detail: port(None) });
        let other = Detail::Port { port: 0xc051, width: 2, write: true, queue: Some(9) };
        profile.take(&mut thread, 2, Event::Detail(other));
        profile.take(&mut thread, 3, Event::Detail(port(Some(queue))));
        profile.take(&mut thread, 4, Event::Detail(port(Some(8))));
        profile.take(&mut thread, 5, ENTRY);
    }
    let mut seen: Vec<_> = profile.sites().map(|(site, counts)| (site.detail, counts.count)).collect();
    seen.sort();
    assert_eq!(seen, [(port(Some(0)), 1), (port(Some(1)), 2)]);
    assert_eq!(profile.ports, [3, 0]);
}
