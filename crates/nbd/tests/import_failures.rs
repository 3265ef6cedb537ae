//! Networks that fail, disks that fail, and which is which; and queues that stop in the middle.

#![expect(clippy::disallowed_types, reason = "servers of the tests, on threads of their own")]

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use ioplane_device::CoreContext;
use ioplane_memory::{GuestFault, GuestMap, GuestRange, GuestView, MemoryRegion, RegionSpec};
use ioplane_nbd::import::{Confirmed, ConnectionState, Fence, Import, ImportOptions, Loss, Unfenced};
use ioplane_nbd::spec::*;
use ioplane_storage::{Backing, Fault, Op, Submitted, Tag};
use rig::Rig;
use scripted::*;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// A server whose connections take requests and never answer, until `open` is set.
fn silent(terms: Terms) -> (Server, Arc<Disk>, Arc<AtomicBool>) {
    let (disk, open) = (Disk::new(terms.bytes), Arc::new(AtomicBool::new(false)));
    let (served, opened) = (disk.clone(), open.clone());
    let server = Server::start(terms, move |mut session| {
        if opened.load(Ordering::Acquire) {
            return obey(session, &served);
        }
        while session.next().is_some() {}
    });
    (server, disk, open)
}

#[test]
fn silence_is_noticed_within_its_time_and_requests_are_replayed() {
    let (server, disk, open) = silent(Terms::default());
    let import = import(ImportOptions { dead_after: MS(200), ..server.options() });
    let mut rig = Rig::new(&*import, 4);
    rig.view.write(0, &[5; 4096]).unwrap();
    let from = [GuestRange { gpa: 0, len: 4096 }];
    let begun = Instant::now();
    assert_eq!(rig.submit(&Op::Write { offset: 0, from: &from }, Tag(0)), Submitted::Pending);
    rig.push();
    while import.status().connections[0].losses == 0 {
        rig.reap(&mut |_, _| panic!("answered by nobody"));
        rig.readable(5);
    }
    let took = begun.elapsed();
    assert!(took >= MS(200) && took < MS(1000), "noticed after {took:?}");
    open.store(true, Ordering::Release);
    let ended = rig.finish();
    assert_eq!(ended, [(Tag(0), Ok(()))]);
    assert_eq!(disk.bytes.lock().unwrap()[..4096], [5; 4096]);
    assert!(import.status().connections[0].replays >= 1);
}

#[test]
fn a_slow_disk_is_not_a_dead_network() {
    let disk = Disk::new(1 << 20);
    let served = disk.clone();
    let server = Server::start(Terms::default(), move |mut session| {
        while let Some(asked) = session.next() {
            std::thread::sleep(MS(60));
            let data = served.carry_out(&asked);
            let reply = session.reply(&asked, &data);
            session.send(&reply);
        }
    });
    let import = import(ImportOptions { dead_after: MS(200), ..server.options() });
    let mut rig = Rig::new(&*import, 16);
    let into = [GuestRange { gpa: 0, len: 512 }];
    for tag in 0..10 {
        assert_eq!(rig.submit(&Op::Read { offset: 0, into: &into }, Tag(tag)), Submitted::Pending);
    }
    rig.push();
    assert_eq!(rig.finish().len(), 10);
    assert_eq!((import.status().connections[0].losses, server.connections()), (0, 1));
}

#[test]
fn errors_of_the_disk_are_told_at_once_and_never_retried() {
    for structured in [false, true] {
        for (error, fault) in [
            (NBD_EIO, Fault::Io(libc::EIO)),
            (NBD_ENOSPC, Fault::NoSpace),
            (NBD_EPERM, Fault::ReadOnly),
            (NBD_ENOMEM, Fault::Io(libc::ENOMEM)),
            (9999, Fault::Io(libc::EINVAL)),
            // EFAULT of the server says nothing about the guest's memory.
            (14, Fault::Io(libc::EINVAL)),
        ] {
            let asked = Arc::new(Mutex::new(0));
            let counted = asked.clone();
            let server = Server::start(Terms { structured, ..Terms::default() }, move |mut session| {
                while let Some(asked) = session.next() {
                    *counted.lock().unwrap() += 1;
                    let payload = [&error.to_be_bytes()[..], &[0, 2], b"no"].concat();
                    let reply = if session.structured {
                        chunk(&asked, 1, NBD_REPLY_TYPE_ERROR, &payload)
                    } else {
                        simple(&asked, error)
                    };
                    session.send(&reply);
                }
            });
            let import = import(server.options());
            let mut rig = Rig::new(&*import, 4);
            assert_eq!(rig.write(0, &[1; 512]), Err(fault));
            let status = &import.status().connections[0];
            assert_eq!((status.device_errors, status.losses, *asked.lock().unwrap()), (1, 0, 1));
            assert!(is_connected(status));
        }
    }
}

#[test]
fn a_server_that_shuts_down_is_waited_for() {
    let disk = Disk::new(1 << 20);
    let served = disk.clone();
    let server = Server::start(Terms::default(), move |mut session| {
        if session.number > 0 {
            return obey(session, &served);
        }
        let asked = session.next().unwrap();
        session.send(&simple(&asked, NBD_ESHUTDOWN));
        while session.next().is_some() {}
    });
    let import = import(server.options());
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.write(0, &[1; 512]), Ok(()));
    let status = &import.status().connections[0];
    assert_eq!((status.losses, status.replays, status.device_errors), (1, 1, 0));
}

#[test]
fn without_fence_or_consent_writes_fail_and_reads_are_replayed() {
    let disk = Disk::new(1 << 20);
    let served = disk.clone();
    let server = Server::start(Terms::default(), move |mut session| {
        if session.number > 0 {
            return obey(session, &served);
        }
        // A write is acknowledged; the next three requests are lost.
        let asked = session.next().unwrap();
        let reply = session.reply(&asked, &[]);
        session.send(&reply);
        for _ in 0..3 {
            session.next();
        }
    });
    let import = import(ImportOptions { unfenced: Unfenced::Fail, ..server.options() });
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.write(0, &[1; 512]), Ok(()));
    assert!(import.status().dirty);
    let range = [GuestRange { gpa: 0, len: 512 }];
    let ops = [Op::Read { offset: 0, into: &range }, Op::Write { offset: 512, from: &range }, Op::Flush];
    for (tag, op) in ops.iter().enumerate() {
        assert_eq!(rig.submit(op, Tag(tag as u16)), Submitted::Pending);
    }
    rig.push();
    let mut ended = rig.finish();
    ended.sort_by_key(|(tag, _)| tag.0);
    let eio = Err(Fault::Io(libc::EIO));
    assert_eq!(ended, [(Tag(0), Ok(())), (Tag(1), eio), (Tag(2), eio)]);
    // The first flush says that what came before may be lost; the next one is of what came since.
    assert_eq!(rig.run(&Op::Flush), eio);
    assert_eq!(rig.run(&Op::Flush), Ok(()));
    assert!(!import.status().dirty);
}

#[test]
fn after_a_time_requests_fail_and_go_on_when_the_server_is_back() {
    let (server, _, open) = silent(Terms::default());
    let import =
        import(ImportOptions { dead_after: MS(50), give_up_after: Some(MS(150)), ..server.options() });
    // From now on nothing answers the handshake, either.
    *server.terms.lock().unwrap() = Terms { bytes: 4096, ..Terms::default() };
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.write(0, &[1; 512]), Err(Fault::Io(libc::EIO)));
    let state = import.status().connections[0].state.clone();
    let ConnectionState::Reconnecting { loss, gave_up, failure, attempts, .. } = state else {
        panic!("{state:?}")
    };
    assert!(matches!(loss, Loss::Silent(_)) && attempts > 0, "{loss} {attempts}");
    assert!(failure.contains("4096 bytes now"), "{failure}");
    // Said once the attempt that is under way has ended.
    assert!(
        gave_up
            || until(&import, "given up", |s| matches!(
                s.connections[0].state,
                ConnectionState::Reconnecting { gave_up: true, .. }
            ))
            .connections
            .len()
                == 1
    );
    let begun = Instant::now();
    assert_eq!(rig.read(0, 512), Err(Fault::Io(libc::EIO)));
    assert!(begun.elapsed() < MS(100), "a request waits although it was given up");
    open.store(true, Ordering::Release);
    *server.terms.lock().unwrap() = Terms::default();
    until(&import, "connected", |status| is_connected(&status.connections[0]));
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
}

/// While a request waits: it fails once the time is changed to one that has passed, and waits again without one. The exporter is asked without a channel.
#[test]
fn the_time_after_which_requests_fail_changes_while_the_server_is_away() {
    let (server, _, open) = silent(Terms::default());
    let import = import(ImportOptions { dead_after: MS(50), ..server.options() });
    let probe = || runtime().block_on(import.probe()).map_err(|error| error.to_string());
    assert!(!import.is_stalled());
    *server.terms.lock().unwrap() = Terms { bytes: 4096, ..Terms::default() };
    let refused = probe().unwrap_err();
    assert!(refused.contains("4096 bytes now"), "{refused}");
    let mut rig = Rig::new(&*import, 4);
    let range = [GuestRange { gpa: 0, len: 512 }];
    assert_eq!(rig.submit(&Op::Read { offset: 0, into: &range }, Tag(0)), Submitted::Pending);
    rig.push();
    until(&import, "lost", |s| matches!(s.connections[0].state, ConnectionState::Reconnecting { .. }));
    assert!(import.is_stalled());
    import.set_give_up_after(Some(MS(1)));
    assert_eq!(rig.finish(), [(Tag(0), Err(Fault::Io(libc::EIO)))]);
    import.set_give_up_after(None);
    until(&import, "waits again", |s| {
        matches!(s.connections[0].state, ConnectionState::Reconnecting { gave_up: false, .. })
    });
    open.store(true, Ordering::Release);
    *server.terms.lock().unwrap() = Terms::default();
    until(&import, "connected", |status| is_connected(&status.connections[0]));
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(probe(), Ok(()));
}

#[test]
fn without_multi_conn_there_is_one_channel_at_a_time() {
    let (server, _) = Server::obedient(Terms { flags: ALL & !NBD_FLAG_CAN_MULTI_CONN, ..Terms::default() });
    let import = import(server.options());
    let rig = Rig::new(&*import, 4);
    let refused = import.channel(4).err().unwrap().to_string();
    assert!(refused.contains("CAN_MULTI_CONN") && refused.contains("queues = 1"), "{refused}");
    drop(rig);
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.write(0, &[1; 512]), Ok(()));
    assert_eq!(server.connections(), 2);
}

#[test]
fn with_multi_conn_each_channel_has_a_connection() {
    let (server, disk) = Server::obedient(Terms::default());
    let import = import(server.options());
    let mut rigs: Vec<_> = (0..4).map(|_| Rig::new(&*import, 4)).collect();
    for (at, rig) in rigs.iter_mut().enumerate() {
        assert_eq!(rig.write(at as u64 * 512, &[at as u8 + 1; 512]), Ok(()));
    }
    assert_eq!(rigs[0].read(1024, 512), Ok(vec![3; 512]));
    assert_eq!((server.connections(), import.status().connections.len()), (4, 4));
    assert_eq!(disk.count(NBD_CMD_WRITE), 4);
}

#[test]
fn what_the_server_cannot_do_is_done_without_it() {
    let terms = Terms { flags: NBD_FLAG_HAS_FLAGS, blocks: Some([512, 4096, 16384]), ..Terms::default() };
    let (server, disk) = Server::obedient(terms);
    disk.bytes.lock().unwrap().fill(1);
    let import = import(server.options());
    let info = import.info();
    assert!(!info.discards && !info.volatile_cache && !info.read_only);
    assert_eq!((info.bytes, info.logical_block, info.physical_block), (1 << 20, 512, 4096));
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.channel.slice(), 16384);
    assert_eq!(rig.run(&Op::Flush), Ok(()));
    assert_eq!(rig.run(&Op::Discard { offset: 0, len: 4096 }), Ok(()));
    assert_eq!(rig.run(&Op::WriteZeroes { offset: 4096, len: 100_000 / 512 * 512, unmap: true }), Ok(()));
    let zeros = 4096..4096 + 100_000 / 512 * 512;
    let right = |at: usize| if zeros.contains(&at) { 0 } else { 1 };
    assert!(disk.bytes.lock().unwrap().iter().enumerate().all(|(at, byte)| *byte == right(at)));
    let done = disk.done.lock().unwrap();
    assert!(done.iter().all(|asked| asked.command == NBD_CMD_WRITE && asked.length <= 16384), "{done:?}");
    drop(done);
    // Longer than a request of this server may be, and not in its units.
    let pattern: Vec<u8> = (0..50_176).map(|at| (at % 251) as u8).collect();
    assert_eq!(rig.write(512, &pattern), Ok(()));
    assert_eq!(rig.read(512, 50_176), Ok(pattern));
    assert_eq!(rig.read(1, 512), Err(Fault::Io(libc::EINVAL)));
    assert_eq!(rig.read((1 << 20) - 512, 1024), Err(Fault::BeyondEnd));
}

/// All that one reap may do is used up by the data; the end of the reply has come with them.
#[test]
fn a_reply_that_takes_a_whole_reap_ends() {
    const LEN: u32 = 256 << 10;
    for hole in (0..=LEN).step_by(4096) {
        let server = Server::start(Terms::default(), move |mut session| {
            while let Some(asked) = session.next() {
                let (first, rest) = (hole, LEN - hole);
                let mut reply = Vec::new();
                if first > 0 {
                    reply.extend(hole_chunk(&asked, u16::from(rest == 0), asked.offset, first));
                }
                if rest > 0 {
                    reply.extend(data_chunk(
                        &asked,
                        1,
                        asked.offset + u64::from(first),
                        &vec![4; rest as usize],
                    ));
                }
                session.send(&reply);
            }
        });
        let import = import(server.options());
        let mut rig = Rig::new(&*import, 4);
        let read = rig.read(0, LEN).unwrap();
        assert!(read.iter().enumerate().all(|(at, byte)| *byte == if at < hole as usize { 0 } else { 4 }));
    }
}

#[test]
fn a_read_only_export_is_a_read_only_disk() {
    let (server, disk) = Server::obedient(Terms { flags: ALL | NBD_FLAG_READ_ONLY, ..Terms::default() });
    let import = import(server.options());
    assert!(import.info().read_only);
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.write(0, &[1; 512]), Err(Fault::ReadOnly));
    assert_eq!(rig.run(&Op::Discard { offset: 0, len: 512 }), Err(Fault::ReadOnly));
    assert_eq!(rig.run(&Op::Flush), Ok(()));
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(disk.done.lock().unwrap().len(), 1);
}

#[test]
fn a_resize_is_the_exporters_and_a_changed_size_does_not_fit() {
    let (server, _) = Server::obedient(Terms::default());
    let import = import(server.options());
    assert!(import.resize(1 << 20).is_ok());
    assert!(import.resize(2 << 20).unwrap_err().to_string().contains("publish resize"));
}

/// A suspended queue: the reply comes after the guest has its memory back.
#[test]
fn after_a_stop_no_late_reply_reaches_guest_memory() {
    let (tell, told) = mpsc::channel::<()>();
    let told = Mutex::new(told);
    let server = Server::start(Terms::default(), move |mut session| {
        let asked = session.next().unwrap();
        told.lock().unwrap().recv().unwrap();
        let reply = session.reply(&asked, &[0xee; 4096]);
        session.send(&reply);
        while session.next().is_some() {}
    });
    let import = import(ImportOptions { dead_after: Duration::from_secs(5), ..server.options() });
    until(&import, "open", |_| true);
    let view = GuestView::new(Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
    let mut context = CoreContext::default();
    let mut channel = import.channel(4).unwrap();
    until(&import, "connected", |status| status.connections.iter().any(is_connected));
    let into = [GuestRange { gpa: 0, len: 4096 }];
    assert_eq!(
        channel.submit(&mut context, &view, &Op::Read { offset: 0, into: &into }, Tag(0)),
        Submitted::Pending
    );
    channel.push(&mut context);
    until(&import, "sent", |status| status.connections[0].requests == 1);
    channel.detach(&mut context);
    assert_eq!(channel.in_flight(), 0);
    assert!(!import.wait_quiet(Instant::now() + MS(50)), "quiet while the server still has a request");
    tell.send(()).unwrap();
    assert!(import.wait_quiet(Instant::now() + Duration::from_secs(5)));
    assert_eq!(channel.reap(&mut context, &mut |_, _| panic!("a request that was given up has ended")), 0);
    let mut bytes = [0; 4096];
    view.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4096], "a late reply was stored");
    drop(channel);
    until(&import, "closed", |status| status.connections.is_empty() && !status.closing);
}

/// A server that never closes its end is waited for, longer than for a silent network: that says nothing of what its disk still writes.
#[test]
fn a_server_that_does_not_close_is_given_up_after_its_time() {
    let server = Server::start(Terms::default(), |mut session| {
        while session.next().is_some() {}
        std::thread::sleep(Duration::from_secs(3600));
    });
    let import = import(ImportOptions {
        dead_after: Duration::from_secs(5),
        closes_within: Duration::from_secs(3),
        ..server.options()
    });
    let mut rig = Rig::new(&*import, 4);
    until(&import, "connected", |status| is_connected(&status.connections[0]));
    let into = [GuestRange { gpa: 0, len: 512 }];
    assert_eq!(rig.submit(&Op::Read { offset: 0, into: &into }, Tag(0)), Submitted::Pending);
    rig.push();
    drop(rig);
    assert!(!import.wait_quiet(Instant::now() + MS(200)), "it was not waited for");
    assert!(import.wait_quiet(Instant::now() + Duration::from_secs(60)));
}

#[test]
fn a_connection_lost_while_idle_is_made_again_and_wakes_nobody() {
    let disk = Disk::new(1 << 20);
    let server = Server::start(Terms::default(), move |mut session| {
        if session.number > 0 {
            return obey(session, &disk);
        }
        let asked = session.next().unwrap();
        let reply = session.reply(&asked, &[0; 512]);
        session.send(&reply);
    });
    let import = import(server.options());
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
    until(&import, "another connection", |status| {
        status.connections[0].losses == 1 && is_connected(&status.connections[0])
    });
    assert!(!rig.readable(0), "an idle core is kept awake");
    assert_eq!(rig.write(0, &[1; 512]), Ok(()));
    let status = import.status();
    assert_eq!((status.connections[0].replays, server.connections()), (0, 2));
}

/// Counts what it was asked, and confirms when it may.
#[derive(Debug)]
struct Gate(Arc<AtomicBool>, Arc<Mutex<Vec<(String, u32)>>>);

impl Fence for Gate {
    fn confirm<'a>(&'a self, instance: &'a str, epoch: u32) -> Confirmed<'a> {
        self.1.lock().unwrap().push((instance.into(), epoch));
        Box::pin(async move {
            if self.0.load(Ordering::Acquire) {
                Ok(())
            } else {
                Err("the old connection is still read".into())
            }
        })
    }
}

#[test]
fn nothing_is_replayed_before_the_fence_has_confirmed() {
    let disk = Disk::new(1 << 20);
    let served = disk.clone();
    let terms = Terms { instance: Some("a".into()), ..Terms::default() };
    let server = Server::start(terms, move |mut session| {
        if session.number > 0 {
            return obey(session, &served);
        }
        session.next();
    });
    let (open, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let fence: Option<Arc<dyn Fence>> = Some(Arc::new(Gate(open.clone(), asked.clone())));
    let import = import(ImportOptions { fence, unfenced: Unfenced::Fail, ..server.options() });
    assert_eq!(import.status().instance.as_deref(), Some("a"));
    let mut rig = Rig::new(&*import, 4);
    let from = [GuestRange { gpa: 0, len: 512 }];
    assert_eq!(rig.submit(&Op::Write { offset: 0, from: &from }, Tag(0)), Submitted::Pending);
    rig.push();
    while asked.lock().unwrap().len() < 3 {
        rig.reap(&mut |_, _| panic!("answered before the fence"));
        rig.readable(5);
    }
    assert!(disk.done.lock().unwrap().is_empty(), "a request passed the fence");
    open.store(true, Ordering::Release);
    assert_eq!(rig.finish(), [(Tag(0), Ok(()))]);
    assert!(asked.lock().unwrap().iter().all(|(instance, epoch)| instance == "a" && *epoch == 2));
}

#[test]
fn another_instance_with_unflushed_writes_stops_and_without_or_with_copies_goes_on() {
    for (flushed, retain) in [(true, 0), (false, 0), (false, 1 << 20)] {
        let disk = Disk::new(1 << 20);
        let (served, cut) = (disk.clone(), Arc::new(AtomicBool::new(false)));
        let cuts = cut.clone();
        let terms = Terms { instance: Some("a".into()), ..Terms::default() };
        let server = Server::start(terms, move |mut session| {
            while let Some(asked) = session.next() {
                if session.number == 0 && cuts.load(Ordering::Acquire) {
                    return;
                }
                let data = served.carry_out(&asked);
                let reply = session.reply(&asked, &data);
                session.send(&reply);
            }
        });
        let import = import(ImportOptions { retain, ..server.options() });
        let mut rig = Rig::new(&*import, 4);
        assert_eq!(rig.write(0, &[1; 512]), Ok(()));
        if flushed {
            assert_eq!(rig.run(&Op::Flush), Ok(()));
        }
        server.terms.lock().unwrap().instance = Some("b".into());
        cut.store(true, Ordering::Release);
        let outcome = rig.write(512, &[2; 512]);
        if flushed || retain > 0 {
            assert_eq!(outcome, Ok(()));
            assert_eq!(import.status().instance.as_deref(), Some("b"));
            continue;
        }
        assert_eq!(outcome, Err(Fault::Io(libc::EIO)));
        let state = import.status().connections[0].state.clone();
        let ConnectionState::Stopped { why, .. } = state else { panic!("{state:?}") };
        assert!(why.contains("another instance (b, was a)"), "{why}");
    }
}

/// A mebibyte of guest memory that stays, and one in a file that the guest truncates.
fn shrinking() -> (OwnedFd, GuestView) {
    let region =
        |gpa, file| MemoryRegion::map(RegionSpec { gpa, len: 1 << 20, user: gpa, offset: 0, file }).unwrap();
    let file = || {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        file
    };
    let (stays, goes) = (file(), file());
    let map = GuestMap::new(vec![region(0, stays), region(1 << 20, goes.try_clone().unwrap())]).unwrap();
    (goes, GuestView::new(Arc::new(map)))
}

/// One operation to its end, with that guest's memory.
fn run_on(import: &Import, view: &GuestView, ops: &[Op<'_>]) -> Vec<Result<(), Fault>> {
    let mut context = CoreContext::default();
    let mut channel = import.channel(8).unwrap();
    let mut outcomes = vec![None; ops.len()];
    for (tag, op) in ops.iter().enumerate() {
        assert_eq!(channel.submit(&mut context, view, op, Tag(tag as u16)), Submitted::Pending);
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while channel.in_flight() > 0 {
        assert!(Instant::now() < deadline, "{:?}", import.status());
        channel.push(&mut context);
        channel.reap(&mut context, &mut |tag, outcome| outcomes[usize::from(tag.0)] = Some(outcome));
    }
    outcomes.into_iter().map(Option::unwrap).collect()
}

#[test]
fn guest_memory_that_goes_away_costs_its_own_requests() {
    let gone = Err(Fault::Guest(GuestFault::MemoryShrank));
    // Sent from the guest's memory, or from copies.
    for (part, copies) in [0u64, 8192, 100_000].into_iter().flat_map(|part| [(part, false), (part, true)]) {
        let instance = copies.then(|| "image@boot".to_owned());
        let (server, disk) = Server::obedient(Terms { bytes: 4 << 20, instance, ..Terms::default() });
        disk.bytes.lock().unwrap().fill(6);
        let import = import(server.options());
        let (good, bad) =
            (GuestRange { gpa: 0, len: 4096 }, GuestRange { gpa: (1 << 20) + 500_000 - part, len: 199_680 });
        let (file, view) = shrinking();
        rustix::fs::ftruncate(&file, 500_000 / 4096 * 4096).unwrap();
        let other = [GuestRange { gpa: 16384, len: 512 }];
        let ops = [
            Op::Read { offset: 0, into: &[good] },
            Op::Read { offset: 4096, into: &[bad] },
            Op::Read { offset: 512, into: &other },
        ];
        assert_eq!(run_on(&import, &view, &ops), [Ok(()), gone, Ok(())], "reads, {part}");
        assert_eq!(view.bytes::<4>(16384), Ok([6; 4]));
        // Another one, whose loss nobody has met yet.
        let (file, view) = shrinking();
        rustix::fs::ftruncate(&file, 500_000 / 4096 * 4096).unwrap();
        view.write(16384, &[6; 512]).unwrap();
        view.write(0, &[8; 4096]).unwrap();
        let ops = [
            Op::Write { offset: 1 << 20, from: &[good] },
            Op::Write { offset: 2 << 20, from: &[bad] },
            Op::Write { offset: 3 << 20, from: &other },
        ];
        assert_eq!(run_on(&import, &view, &ops), [Ok(()), gone, Ok(())], "writes, {part}, {copies}");
        let bytes = disk.bytes.lock().unwrap();
        assert_eq!(bytes[1 << 20..][..4096], [8; 4096]);
        assert!(bytes[2 << 20..3 << 20].iter().all(|byte| *byte == 6), "half a write was carried out");
        assert_eq!(bytes[3 << 20..][..512], [6; 512]);
    }
}
