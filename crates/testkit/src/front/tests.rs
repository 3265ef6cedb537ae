//! The front end against a back end that is not ours: qemu-storage-daemon (package qemu-system-common).

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::super::driver::spec::VIRTIO_F_EVENT_IDX;
use super::super::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use super::*;

struct Peer {
    child: Child,
    folder: PathBuf,
}

impl Peer {
    fn start(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("testkit-front-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (disk, socket) = (folder.join("disk"), folder.join("socket"));
        std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let child = Command::new("qemu-storage-daemon")
            .arg("--blockdev")
            .arg(format!("driver=file,node-name=f,filename={},discard=unmap", disk.display()))
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={},writable=on,num-queues=2",
                socket.display()
            ))
            .stdin(Stdio::null())
            .spawn()
            .expect("these tests need qemu-storage-daemon: apt-get install qemu-system-common");
        let until = Instant::now() + Duration::from_secs(10);
        while !listens(&socket) {
            assert!(Instant::now() < until, "qemu-storage-daemon does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Peer { child, folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Submits, kicks as the ring says, sleeps for the interrupt as Linux does, and returns the status.
fn ask(front: &mut FrontEnd, queue: u16, disk: &mut Disk, op: DiskOp, sector: u64, bytes: u32) -> u8 {
    let token = disk.submit(op, sector, bytes).unwrap();
    if disk.ring().kick_needed() {
        front.kick(queue);
    }
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        disk.ring().disable_interrupts();
        if let Some(done) = disk.reap().unwrap() {
            assert_eq!(done.token, token);
            disk.ring().enable_interrupts();
            return done.status;
        }
        if disk.ring().enable_interrupts() {
            front.events(queue).unwrap().1.wait(Duration::from_secs(1));
        }
        assert!(Instant::now() < until, "{op:?} was never completed");
    }
}

#[test]
fn a_disk_is_served_stopped_started_and_reconnected() {
    for (shape, event_idx) in [(Shape::Direct, true), (Shape::Indirect, true), (Shape::Direct, false)] {
        let peer = Peer::start(&format!("{shape:?}-{event_idx}"));
        let mut wants = Wants::default();
        if !event_idx {
            wants.features &= !VIRTIO_F_EVENT_IDX;
        }
        let mut front = FrontEnd::connect(&peer.socket(), wants).unwrap();
        assert_eq!(front.features() & VIRTIO_F_EVENT_IDX != 0, event_idx);
        assert!(
            front.has(protocol::MQ | protocol::REPLY_ACK | protocol::CONFIG | protocol::CONFIGURE_MEM_SLOTS)
        );
        assert_eq!(front.capacity().unwrap(), 2048);
        assert_eq!(front.queue_count().unwrap(), 2);
        assert!(front.memory_slots().unwrap() >= 2);

        let mut memory = GuestMemory::of(&[(0, 1 << 20), (1 << 32, 1 << 20)]).unwrap();
        let plan = DiskPlan { slots: 4, max_bytes: 65536, segments: 4, shape };
        let mode = RingMode::of(front.features());
        let mut disks: Vec<_> = (0..2).map(|_| Disk::new(&mut memory, 64, mode, plan).unwrap()).collect();
        front.share(&memory).unwrap();
        for (queue, disk) in disks.iter().enumerate() {
            front.start(queue as u16, &memory, disk.place(), 0).unwrap();
        }
        let mut bytes = vec![0u8; 65536];
        for round in 0..6u8 {
            let queue = u16::from(round) % 2;
            let disk = &mut disks[usize::from(queue)];
            bytes.fill(round + 1);
            disk.write_data(disk.next().unwrap(), &bytes).unwrap();
            assert_eq!(ask(&mut front, queue, disk, DiskOp::Write, 128, 65536), 0);
            assert_eq!(ask(&mut front, queue, disk, DiskOp::Flush, 0, 0), 0);
            // Another queue sees it.
            let (other, disk) = (1 - queue, &mut disks[usize::from(1 - queue)]);
            let token = disk.next().unwrap();
            assert_eq!(ask(&mut front, other, disk, DiskOp::Read, 128, 65536), 0);
            bytes.fill(0);
            disk.read_data(token, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == round + 1));
            assert_eq!(ask(&mut front, other, disk, DiskOp::WriteZeroes { unmap: false }, 128, 4096), 0);
            assert_eq!(ask(&mut front, other, disk, DiskOp::Discard, 136, 4096), 0);
            assert_eq!(ask(&mut front, other, disk, DiskOp::Other { kind: 99, write: true }, 0, 512), 2);
            assert_eq!(ask(&mut front, other, disk, DiskOp::Id, 0, 0), 0);
            match round {
                // Stop and start one queue where it was.
                1 | 3 => {
                    let base = front.stop(queue).unwrap();
                    let disk = &mut disks[usize::from(queue)];
                    assert_eq!(base, u32::from(disk.ring().avail_idx()));
                    front.start(queue, &memory, disk.place(), base).unwrap();
                }
                // The connection goes; memory, rings and eventfds stay.
                4 => {
                    front.hang_up();
                    front.reconnect(&peer.socket()).unwrap();
                    front.share(&memory).unwrap();
                    for (queue, disk) in disks.iter_mut().enumerate() {
                        let base = disk.ring().base();
                        front.start(queue as u16, &memory, disk.place(), base).unwrap();
                    }
                }
                _ => {}
            }
        }
        let (kick, call) = front.events(0).unwrap();
        assert!(kick.sum() > 0 && call.sum() > 0 && kick.unread().is_some());
    }
}

#[test]
fn bytes_that_are_no_message_end_the_conversation() {
    let peer = Peer::start("hostile");
    let front = FrontEnd::connect(&peer.socket(), Wants::default()).unwrap();
    front.wire().send_raw(FrontEndRequest::GET_FEATURES as u32, 1, 0x7fff_ffff, &[0; 64], &[]).unwrap();
    assert!(front.wire().closed_within(Duration::from_secs(5)));
}

#[test]
fn messages_and_descriptors_cross_a_socket() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (ours, theirs) = (FrontSocket::on(ours).unwrap(), FrontSocket::on(theirs).unwrap());
    let mut event = EventFd::new().unwrap();
    use std::os::fd::AsFd;
    ours.send(5, wire::NEED_REPLY, b"12345678", &[event.as_fd(), event.as_fd()]).unwrap();
    ours.send(6, 0, &[], &[]).unwrap();
    let message = theirs.receive().unwrap();
    assert_eq!((message.request, message.flags, message.fds.len()), (5, wire::VERSION | wire::NEED_REPLY, 2));
    assert_eq!(message.u64().unwrap(), u64::from_ne_bytes(*b"12345678"));
    rustix::io::write(&message.fds[1], &3u64.to_ne_bytes()).unwrap();
    assert_eq!((event.unread(), event.wait(Duration::from_secs(1)), event.sum()), (Some(3), 3, 3));
    assert_eq!(theirs.receive().unwrap().request, 6);
    theirs.patience(Duration::from_millis(10)).unwrap();
    assert!(matches!(theirs.receive(), Err(FrontSocketError::Timeout)));
    drop(ours);
    assert!(theirs.closed_within(Duration::from_secs(1)));
}
