//! Issue 13: what a front end or an ended core could do to others. Each was seen to fail before it was mended.

use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ioplane_cores::EndedCore;
use ioplane_device::{Change, CoreEnded, CoreMessage, CoreSender, Placement, PollerCommand};
use rustix::event::{EventfdFlags, eventfd};

use super::*;

/// What a hostile front end does to an eventfd: sets its counter, and clears its `O_NONBLOCK`.
fn spoil(file: impl AsFd, count: u64) {
    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::NONBLOCK).unwrap();
    // Somebody may raise it in between.
    while rustix::io::write(&file, &count.to_ne_bytes()).is_err() {
        let _ = rustix::io::read(&file, &mut [0u8; 8]);
    }
    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::empty()).unwrap();
}

/// A second disk on the same cores.
fn another_disk(served: &Served) -> Handle<Blk> {
    let options = BlkOptions {
        name: "other".to_owned(),
        serial: "other".to_owned(),
        queues: 4,
        queue_size: 256,
        read_only: false,
        logical_block: None,
    };
    let socket = served.directory.path().join("other.sock");
    let _inside = served.runtime.enter();
    serve(Blk::new(options, memory()), ServerOptions::new(socket, served.pool.clone())).unwrap()
}

#[test]
fn hole_01_a_front_end_that_fills_its_calls_stops_nobody() {
    let served = Served::new(memory());
    let other = another_disk(&served);
    let mut neighbour = Guest::boot_with(FrontEnd::connect(other.socket(), Wants::default()).unwrap());
    let mut hostile = Guest::boot(&served);
    for queue in 0..4 {
        let (kick, call) = hostile.front.events(queue).unwrap();
        spoil(&*call, u64::MAX - 1);
        spoil(&*kick, 1);
    }
    for round in 0..20 {
        // Every request of its own signals; given its call anew, a queue signals too, and when it resumes (invariant 3).
        hostile.works(round);
        for queue in 0..4 {
            hostile.front.attach_events(queue).unwrap();
            hostile.front.enable(queue, false).unwrap();
            hostile.front.enable(queue, true).unwrap();
        }
        neighbour.works(round);
        assert!(served.status().connected, "the control side answers");
    }
    assert!(served.status().queues.iter().all(|queue| queue.counts.interrupts >= 60));
    assert_eq!(served.status().faults.len(), 0);
    served.runtime.block_on(other.stop(true)).unwrap();
    served.runtime.block_on(served.handle.stop(true)).unwrap();
}

#[test]
fn hole_01_the_eventfd_for_errors_is_not_waited_for() {
    let served = Served::new(memory());
    let mut guest = Guest::boot(&served);
    let error = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    guest.front.tell(FrontEndRequest::SET_VRING_ERR, &1u64.to_ne_bytes(), &[error.as_fd()]).unwrap();
    spoil(&error, u64::MAX - 1);
    guest.front.enable(1, false).unwrap();
    guest.front.enable(1, true).unwrap();
    // A head beyond the ring stops the queue, which says so.
    guest.disks[1].ring().raw().offer(SIZE);
    guest.front.kick(1);
    served.until("the fault", |status| status.queues[1].counts.faults == 1);
    let [mut count, full] = [[0; 8], u64::MAX.to_ne_bytes()];
    rustix::io::read(&error, &mut count).unwrap();
    assert_eq!(count, full, "it was signalled");
    assert_eq!(guest.request(0, DiskOp::Id, 0, 0).0, 0);
}

/// Descriptors that could make whoever uses them wait are none that a core gets.
#[test]
fn hole_01_only_eventfds_are_kicks_and_calls() {
    let served = Served::new(memory());
    let (reads, writes) = rustix::pipe::pipe().unwrap();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let fifo = served.directory.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let fifo = std::fs::File::options().read(true).write(true).open(fifo).unwrap();
    let file = std::fs::File::create(served.directory.path().join("anon_inode:[eventfd]")).unwrap();
    let files = [reads.as_fd(), writes.as_fd(), socket.as_fd(), fifo.as_fd(), file.as_fd()];
    for (at, file) in files.into_iter().enumerate() {
        for ask in
            [FrontEndRequest::SET_VRING_KICK, FrontEndRequest::SET_VRING_CALL, FrontEndRequest::SET_VRING_ERR]
        {
            let front = served.front();
            assert!(front.tell(ask, &0u64.to_ne_bytes(), &[file]).is_err(), "file {at}");
            served.until("left", |status| !status.connected);
        }
    }
    assert_eq!(served.status().faults["not_an_eventfd"], 15);
    Guest::boot(&served).works(1);
}

/// Puts queues on a core of the pool's, by way of a mailbox that changes wait in until they are let through.
#[derive(Debug, Clone)]
struct Slow {
    core: Arc<dyn CoreSender>,
    gate: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    shut: AtomicBool,
    held: Mutex<Vec<CoreMessage>>,
    most: AtomicUsize,
    came: AtomicUsize,
}

impl CoreSender for Slow {
    fn core(&self) -> CoreId {
        self.core.core()
    }

    fn send(&self, message: CoreMessage) -> Result<(), CoreEnded> {
        let CoreMessage::Poller(_, PollerCommand::Apply(Change::Call(_), _)) = &message else {
            return self.core.send(message);
        };
        let Gate { shut, held, most, came } = &*self.gate;
        came.fetch_add(1, Ordering::SeqCst);
        let mut held = held.lock().unwrap();
        if !shut.load(Ordering::SeqCst) {
            return self.core.send(message);
        }
        held.push(message);
        most.fetch_max(held.len(), Ordering::SeqCst);
        Ok(())
    }
}

impl Placement for Slow {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        Arc::new(self.clone())
    }
}

#[test]
fn hole_06_a_front_end_has_one_message_at_a_time_in_a_mailbox() {
    const FLOOD: usize = 100;
    let served = Served::new(memory());
    let gate = Arc::new(Gate::default());
    let slow = Arc::new(Slow { core: served.pool.core(CoreId(0)).unwrap().sender(), gate: gate.clone() });
    let mut guest = Guest::boot(&served);
    served.runtime.block_on(served.handle.move_queue(0, slow)).unwrap();
    let before = gate.came.load(Ordering::SeqCst);
    gate.shut.store(true, Ordering::SeqCst);
    let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    // Without waiting for answers.
    for _ in 0..FLOOD {
        let ask = FrontEndRequest::SET_VRING_CALL as u32;
        guest.front.wire().send(ask, 0, &0u64.to_ne_bytes(), &[call.as_fd()]).unwrap();
    }
    // Time enough for the whole flood, were it let in.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(gate.most.load(Ordering::SeqCst), 1, "messages of one front end in the mailbox");
    gate.shut.store(false, Ordering::SeqCst);
    for message in std::mem::take(&mut *gate.held.lock().unwrap()) {
        served.pool.core(CoreId(0)).unwrap().sender().send(message).unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while gate.came.load(Ordering::SeqCst) < before + FLOOD {
        assert!(Instant::now() < deadline, "messages were lost");
        std::thread::sleep(Duration::from_millis(1));
    }
    guest.front.attach_events(0).unwrap();
    guest.works(1);
}

/// VHOST_USER_VRING_NOFD_MASK: the driver does not kick, whatever it is asked.
#[test]
fn hole_08_a_ring_without_a_kick_is_served_by_a_core_that_would_sleep() {
    let served = Served::new(memory());
    let mut guest = Guest::boot(&served);
    for queue in 0..4u16 {
        guest
            .front
            .tell(FrontEndRequest::SET_VRING_KICK, &(u64::from(queue) | 0x100).to_ne_bytes(), &[])
            .unwrap();
    }
    for round in 0..3 {
        // Longer than a core spins.
        std::thread::sleep(Duration::from_millis(100));
        for queue in 0..4 {
            guest.disks[queue].submit(DiskOp::Read, 8 * round, 4096).unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            while guest.disks[queue].reap().unwrap().is_none() {
                assert!(Instant::now() < deadline, "round {round}: queue {queue} waits for a kick");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    // By short sleeps: a core that nobody kicks does not spin.
    assert!(served.pool.read().iter().map(|core| core.short_sleeps).sum::<u64>() > 10);
}

/// The pool's cores, or none.
#[derive(Debug)]
struct Fickle {
    pool: Arc<Pool>,
    gone: AtomicBool,
}

impl Placement for Fickle {
    fn place(&self, device: &str, queue: u16) -> Arc<dyn CoreSender> {
        if self.gone.load(Ordering::SeqCst) {
            Arc::new(EndedCore(CoreId(9)))
        } else {
            self.pool.place(device, queue)
        }
    }
}

#[test]
fn hole_08_a_device_that_cannot_go_on_is_not_lost() {
    let stalled = Stall::new(memory());
    let served = Served::new(memory());
    let fickle = Arc::new(Fickle { pool: served.pool.clone(), gone: AtomicBool::new(false) });
    let options = BlkOptions {
        name: "fickle".to_owned(),
        serial: "fickle".to_owned(),
        queues: 4,
        queue_size: 256,
        read_only: false,
        logical_block: None,
    };
    let socket = served.directory.path().join("fickle.sock");
    let handle = {
        let _inside = served.runtime.enter();
        let server = ServerOptions::new(socket, fickle.clone());
        serve(Blk::new(options, stalled.clone()), server).unwrap().with_patience(Duration::from_millis(300))
    };
    let mut guest = Guest::boot_with(FrontEnd::connect(handle.socket(), Wants::default()).unwrap());
    guest.works(1);
    stalled.stall();
    let token = guest.disks[0].submit(DiskOp::Read, 0, 4096).unwrap();
    guest.front.kick(0);
    let deadline = Instant::now() + Duration::from_secs(60);
    let quiesces = || served.runtime.block_on(handle.at_quiescence(|_, _| ((), false))).is_ok();
    while quiesces() {
        assert!(Instant::now() < deadline, "the request was never taken");
    }
    // The deadline passes with the request in flight; the other queues, at rest already, find no core to go on.
    fickle.gone.store(true, Ordering::SeqCst);
    assert!(!quiesces());
    let status = served.runtime.block_on(handle.status()).unwrap();
    assert_eq!(status.queues.len(), 4, "the device is gone");
    assert!(status.connected && status.faults.is_empty(), "{status:?}");
    // A core comes back, and the disk: the front end starts its rings, and nothing is lost.
    fickle.gone.store(false, Ordering::SeqCst);
    stalled.release();
    for queue in 0..4 {
        guest.front.enable(queue, true).unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    let done = loop {
        if let Some(done) = guest.disks[0].reap().unwrap() {
            break done;
        }
        assert!(Instant::now() < deadline, "the request in flight was lost");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(done.token == token && done.ok());
    guest.works(2);
    served.runtime.block_on(handle.stop(true)).unwrap();
}

#[test]
fn hole_08_a_queue_that_no_core_takes_stays_where_it_was() {
    let served = Served::new(memory());
    let mut guest = Guest::boot(&served);
    let to = |core| Arc::new(served.pool.on(CoreId(core)).unwrap());
    for queue in 0..4 {
        served.runtime.block_on(served.handle.move_queue(queue, to(0))).unwrap();
    }
    let gone = to(1);
    served.pool.retire(CoreId(1), Instant::now() + Duration::from_secs(10)).unwrap();
    let moved = served.runtime.block_on(served.handle.move_queue(2, gone));
    assert!(matches!(moved, Err(HandleError::Refused(_))), "{moved:?}");
    assert_eq!(served.status().queues[2].core, Some(0), "the queue stands still");
    guest.works(1);
    // Not asked for again when it resumes.
    guest.front.share_table(&guest.memory).unwrap();
    assert!(served.status().queues.iter().all(|queue| queue.core == Some(0)));
    guest.works(2);
}
