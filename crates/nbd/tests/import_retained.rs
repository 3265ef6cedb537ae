//! Retained writes: how many bytes of them there are at most, what happens when these are taken, and what is sent again.

#![expect(clippy::disallowed_types, reason = "servers of the tests, on threads of their own")]

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ioplane_memory::GuestRange;
use ioplane_nbd::import::{Import, ImportOptions};
use ioplane_nbd::spec::*;
use ioplane_storage::{Fault, Op, Submitted, Tag};
use rig::Rig;
use scripted::*;

const MIB: usize = 1 << 20;
const PIECE: u32 = 64 << 10;

/// Of an exporter that says which instance it is.
fn terms(instance: &str) -> Terms {
    Terms { bytes: 16 << 20, instance: Some(instance.into()), ..Terms::default() }
}

fn retaining(server: &Server) -> Arc<Import> {
    import(ImportOptions { retain: MIB, ..server.options() })
}

/// Submits writes of [`PIECE`] bytes, one behind the other in the export.
fn submit_writes(rig: &mut Rig, tags: std::ops::Range<u16>) {
    let from = [GuestRange { gpa: 0, len: PIECE }];
    for tag in tags {
        let op = Op::Write { offset: u64::from(tag) * u64::from(PIECE), from: &from };
        assert_eq!(rig.submit(&op, Tag(tag)), Submitted::Pending);
    }
    rig.push();
}

/// Sixteen MiB of writes without a flush of the guest's, of which one MiB may be retained: the importer flushes by itself, none fails, and the
/// server never has more unflushed bytes than that.
#[test]
fn more_writes_than_are_retained_make_the_importer_flush() {
    let disk = Disk::new(16 << 20);
    let (unflushed, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (served, now, highest) = (disk.clone(), unflushed.clone(), most.clone());
    let server = Server::start(terms("a@1"), move |mut session| {
        while let Some(asked) = session.next() {
            served.carry_out(&asked);
            match asked.command {
                NBD_CMD_WRITE => {
                    let bytes =
                        now.fetch_add(asked.length as usize, Ordering::SeqCst) + asked.length as usize;
                    highest.fetch_max(bytes, Ordering::SeqCst);
                }
                NBD_CMD_FLUSH => now.store(0, Ordering::SeqCst),
                _ => {}
            }
            let reply = session.reply(&asked, &[]);
            session.send(&reply);
        }
    });
    let import = retaining(&server);
    let mut rig = Rig::new(&*import, 256);
    submit_writes(&mut rig, 0..256);
    let ended = rig.finish();
    assert_eq!(ended.len(), 256);
    assert!(ended.iter().all(|(_, outcome)| *outcome == Ok(())), "{ended:?}");
    assert_eq!(disk.count(NBD_CMD_WRITE), 256);
    assert!(disk.count(NBD_CMD_FLUSH) >= 15, "{} flushes", disk.count(NBD_CMD_FLUSH));
    let most = most.load(Ordering::SeqCst);
    assert!(most <= MIB, "{most} bytes were neither durable nor retained");
    assert_eq!(import.status().connections[0].device_errors, 0);
}

/// A server that does not answer flushes gets no more writes than are retained; they wait, and go on when it does.
#[test]
fn without_room_writes_wait_and_reads_go_on() {
    let disk = Disk::new(16 << 20);
    let stuck = Arc::new(AtomicBool::new(true));
    let (served, sticks) = (disk.clone(), stuck.clone());
    let server = Server::start(terms("a@1"), move |mut session| {
        let mut flushes = Vec::new();
        while let Some(asked) = session.next() {
            let data = served.carry_out(&asked);
            let reply = session.reply(&asked, &data);
            if asked.command == NBD_CMD_FLUSH && sticks.load(Ordering::SeqCst) {
                flushes.push(reply);
                continue;
            }
            session.send(&reply);
            if !sticks.load(Ordering::SeqCst) {
                for reply in flushes.drain(..) {
                    session.send(&reply);
                }
            }
        }
    });
    let import = retaining(&server);
    let mut rig = Rig::new(&*import, 64);
    submit_writes(&mut rig, 0..32);
    let mut done = 0;
    while done < MIB / PIECE as usize {
        rig.reap(&mut |_, outcome| done += usize::from(outcome == Ok(())));
    }
    // The others have no room; a read needs none.
    let into = [GuestRange { gpa: 0, len: 512 }];
    let mut read = false;
    assert_eq!(rig.submit(&Op::Read { offset: 0, into: &into }, Tag(40)), Submitted::Pending);
    rig.push();
    while !read {
        rig.reap(&mut |tag, outcome| {
            assert_eq!((tag, outcome), (Tag(40), Ok(())), "a write without room has ended");
            read = true;
        });
    }
    assert_eq!(disk.count(NBD_CMD_WRITE), MIB / PIECE as usize);
    assert_eq!(disk.count(NBD_CMD_FLUSH), 1, "one at a time");
    stuck.store(false, Ordering::SeqCst);
    // What the server answers next has the flush's answer behind it.
    assert_eq!(rig.submit(&Op::Read { offset: 0, into: &into }, Tag(40)), Submitted::Pending);
    rig.push();
    assert_eq!(rig.finish().len(), 17);
    assert_eq!(disk.count(NBD_CMD_WRITE), 32);
}

/// The exporter's disk fails: what waits for room fails as the flush did, and does not wait for ever.
#[test]
fn a_flush_that_fails_fails_what_waits_for_it() {
    let server = Server::start(terms("a@1"), |mut session| {
        while let Some(asked) = session.next() {
            let error = if asked.command == NBD_CMD_FLUSH { NBD_EIO } else { 0 };
            session.send(&simple(&asked, error));
        }
    });
    let import = retaining(&server);
    let mut rig = Rig::new(&*import, 64);
    submit_writes(&mut rig, 0..64);
    let ended = rig.finish();
    let failed = ended.iter().filter(|(_, outcome)| *outcome == Err(Fault::Io(libc::EIO))).count();
    assert!(failed > 0 && ended.len() == 64, "{ended:?}");
    assert_eq!(ended.iter().filter(|(_, outcome)| *outcome == Ok(())).count() + failed, 64);
    let status = import.status();
    assert!(status.dirty && status.retained, "{status:?}");
}

/// A flush has failed, and the exporter is started again: what that flush should have covered is written once more, although the
/// instance is the same.
#[test]
fn after_a_flush_that_failed_all_is_written_again() {
    let disk = Disk::new(16 << 20);
    let served = disk.clone();
    let server = Server::start(terms("a@1"), move |mut session| {
        while let Some(asked) = session.next() {
            served.carry_out(&asked);
            let fails = asked.command == NBD_CMD_FLUSH && session.number == 0;
            session.send(&simple(&asked, if fails { NBD_EIO } else { 0 }));
            if fails {
                // The process ends.
                return;
            }
        }
    });
    let import = retaining(&server);
    let mut rig = Rig::new(&*import, 4);
    rig.write(0, &[7; 4096]).unwrap();
    assert_eq!(rig.run(&Op::Flush), Err(Fault::Io(libc::EIO)));
    assert_eq!(rig.run(&Op::Flush), Ok(()));
    assert_eq!((disk.count(NBD_CMD_WRITE), import.status().rewritten), (2, 1));
    assert!(!import.status().dirty);
}

/// What is sent again after a lost connection is what was sent first, whatever the guest has done to its buffer since.
#[test]
fn what_is_sent_again_is_what_was_sent() {
    let writes: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let seen = writes.clone();
    let server = Server::start(terms("a@1"), move |mut session| {
        while let Some(asked) = session.next() {
            seen.lock().unwrap().push(asked.data.clone());
            if session.number == 0 {
                return;
            }
            session.send(&simple(&asked, 0));
        }
    });
    let import = retaining(&server);
    let mut rig = Rig::new(&*import, 4);
    rig.view.write(0, &[1; 4096]).unwrap();
    let from = [GuestRange { gpa: 0, len: 4096 }];
    assert_eq!(rig.submit(&Op::Write { offset: 0, from: &from }, Tag(0)), Submitted::Pending);
    while writes.lock().unwrap().is_empty() {
        rig.push();
        std::thread::sleep(Duration::from_millis(1));
    }
    rig.view.write(0, &[2; 4096]).unwrap();
    assert_eq!(rig.finish(), [(Tag(0), Ok(()))]);
    assert_eq!(*writes.lock().unwrap(), [vec![1; 4096], vec![1; 4096]]);
}

/// The queue is stopped and started while writes are neither flushed nor lost: they are still there to be written again.
#[test]
fn copies_outlive_their_queue() {
    let (server, disk) = Server::obedient(terms("a@1"));
    let import = retaining(&server);
    let mut rig = Rig::new(&*import, 4);
    rig.write(4096, &[9; 4096]).unwrap();
    drop(rig);
    // Another boot of the host, which has lost the write.
    disk.bytes.lock().unwrap().fill(0);
    server.terms.lock().unwrap().instance = Some("a@2".into());
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.read(4096, 4096), Ok(vec![9; 4096]));
    let status = import.status();
    assert!(!status.dirty && status.rewritten == 1, "{status:?}");
}

/// A queue that was suspended with writes in flight: nobody was told of them, and nobody is who comes later.
#[test]
fn what_a_queue_has_given_up_is_not_written_again() {
    let disk = Disk::new(16 << 20);
    let served = disk.clone();
    let server = Server::start(terms("a@1"), move |mut session| {
        let silent = session.number == 0;
        while let Some(asked) = session.next() {
            if !silent {
                let data = served.carry_out(&asked);
                let reply = session.reply(&asked, &data);
                session.send(&reply);
            }
        }
    });
    let import =
        import(ImportOptions { dead_after: Duration::from_secs(30), retain: MIB, ..server.options() });
    let mut rig = Rig::new(&*import, 4);
    submit_writes(&mut rig, 0..2);
    while import.status().connections[0].requests < 2 {
        rig.push();
        std::thread::sleep(Duration::from_millis(1));
    }
    // Its queue is suspended.
    drop(rig);
    server.terms.lock().unwrap().instance = Some("a@2".into());
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.read(0, 4096), Ok(vec![0; 4096]));
    assert_eq!((disk.count(NBD_CMD_WRITE), import.status().rewritten), (0, 0));
}

/// A disk that is closed is flushed, and leaves no mark; one whose server is away leaves it.
#[test]
fn a_disk_that_is_closed_is_flushed() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("mark");
    let (server, disk) = Server::obedient(terms("a@1"));
    let import = import(ImportOptions { mark: Some(mark.clone()), ..server.options() });
    let mut rig = Rig::new(&*import, 4);
    rig.write(0, &[7; 4096]).unwrap();
    drop(rig);
    assert!(import.status().dirty && mark.exists());
    runtime().block_on(import.finish()).unwrap();
    assert!(!import.status().dirty && !mark.exists());
    assert_eq!(disk.count(NBD_CMD_FLUSH), 1);

    let import = scripted::import(ImportOptions { mark: Some(mark.clone()), ..server.options() });
    let mut rig = Rig::new(&*import, 4);
    rig.write(0, &[7; 4096]).unwrap();
    drop(rig);
    drop(server);
    assert!(runtime().block_on(import.finish()).is_err());
    assert!(import.status().dirty && mark.exists());
}
