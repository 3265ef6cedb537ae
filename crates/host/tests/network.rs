//! What a front end says of the network reaches a device that has one, and is not offered to any other.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use ioplane_cores::{CoreSettings, Notify, Pool};
use ioplane_device::{DeviceError, Parked, Poller, QuiescenceProof};
use ioplane_host::vhost_user::{Handle, ServerOptions, serve};
use ioplane_storage::MemoryBacking;
use ioplane_testkit::front::{FrontEnd, FrontEndRequest, FrontError, Wants, protocol};
use ioplane_virtio::blk::{Blk, BlkOptions};
use ioplane_virtio::{QueueStart, RingState, VirtioDevice, VirtioInfo};

#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Announce([u8; 6]),
    Mtu(u16),
}

/// A device that says what it hears; for the rest a disk.
struct Listener {
    disk: Blk,
    network: bool,
    heard: Sender<Heard>,
}

impl VirtioDevice for Listener {
    fn has_network(&self) -> bool {
        self.network
    }

    fn announce(&mut self, mac: [u8; 6]) {
        self.heard.send(Heard::Announce(mac)).unwrap();
    }

    fn set_mtu(&mut self, mtu: u16) {
        self.heard.send(Heard::Mtu(mtu)).unwrap();
    }

    fn info(&self) -> &VirtioInfo {
        self.disk.info()
    }

    fn features(&self) -> u64 {
        self.disk.features()
    }

    fn accept(&mut self, features: u64) {
        self.disk.accept(features);
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        self.disk.read_config(offset, out);
    }

    fn write_config(&mut self, offset: u32, bytes: &[u8]) {
        self.disk.write_config(offset, bytes);
    }

    fn start_queue(&mut self, start: QueueStart) -> Result<Box<dyn Poller>, DeviceError> {
        self.disk.start_queue(start)
    }

    fn stop_queue(&mut self, parked: Parked) -> RingState {
        self.disk.stop_queue(parked)
    }

    fn save_own(&self, proof: &QuiescenceProof) -> Vec<u8> {
        self.disk.save_own(proof)
    }

    fn load_own(&mut self, proof: &QuiescenceProof, bytes: &[u8]) -> Result<(), String> {
        self.disk.load_own(proof, bytes)
    }

    fn reset_own(&mut self) {
        self.disk.reset_own();
    }
}

fn serve_listener(network: bool, heard: Sender<Heard>, folder: &std::path::Path) -> Handle<Listener> {
    let options = BlkOptions {
        name: "listener".into(),
        serial: "serial".into(),
        queues: 1,
        queue_size: 128,
        read_only: false,
        logical_block: None,
    };
    let disk = Blk::new(options, MemoryBacking::new(1 << 20).unwrap());
    let pool =
        Arc::new(Pool::with([CoreSettings { notify: Notify::Polled, ..CoreSettings::default() }]).unwrap());
    let options = ServerOptions::new(folder.join(network.to_string()), pool);
    serve(Listener { disk, network, heard }, options).unwrap()
}

#[test]
fn announcements_and_the_mtu_reach_a_device_with_a_network() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _inside = runtime.enter();
    let (folder, (heard, hears)) = (tempfile::tempdir().unwrap(), channel());
    let wants = Wants::default();
    let wants = Wants { protocol: wants.protocol | protocol::RARP | protocol::MTU, ..wants };
    let connect = |handle: &Handle<Listener>| FrontEnd::connect(handle.socket(), wants).unwrap();

    let with = serve_listener(true, heard.clone(), folder.path());
    let front = connect(&with);
    assert!(front.has(protocol::RARP | protocol::MTU));
    front.tell(FrontEndRequest::SEND_RARP, &[0x52, 0x54, 0, 0x12, 0x34, 0x56, 0, 0], &[]).unwrap();
    assert_eq!(hears.recv().unwrap(), Heard::Announce([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
    front.tell(FrontEndRequest::NET_SET_MTU, &9000u64.to_ne_bytes(), &[]).unwrap();
    assert_eq!(hears.recv().unwrap(), Heard::Mtu(9000));
    drop(front);
    for mtu in [0u64, 67, 65536, u64::MAX] {
        let front = connect(&with);
        let refused = front.tell(FrontEndRequest::NET_SET_MTU, &mtu.to_ne_bytes(), &[]);
        assert!(matches!(refused, Err(FrontError::Refused { .. })), "{mtu}: {refused:?}");
    }

    let without = serve_listener(false, heard, folder.path());
    let front = connect(&without);
    assert!(!front.has(protocol::RARP) && !front.has(protocol::MTU));
    assert!(front.tell(FrontEndRequest::SEND_RARP, &[0; 8], &[]).is_err());
    assert!(front.wire().closed_within(Duration::from_secs(10)));
    assert!(hears.try_recv().is_err());
}
