//! The smallest virtio device: the control half. It adds up what its driver sends, and answers with the sum so far.
//!
//! ```text
//!   request:  8 bytes readable (a number) | 8 bytes writable (the sum of all numbers so far, mixed in their order)
//!   Adder: VirtioDevice --start_queue--> AdderPoller (virtio_poller.rs) on an I/O core
//!     |  Bench (bench.rs): what stands below, as a disk does: the sums, and a gate that stalls it
//!     +--- configuration space: two 64-bit adders, one for each vCPU; a write adds, a read gives the sum
//! ```
//!
//! Written to be read: a device of one's own begins as a copy of these two files.

use std::sync::Arc;

use ioplane_device::{DeviceError, Parked, Poller, QuiescenceProof};
use ioplane_virtio::spec::feature::{VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_VERSION_1};
use ioplane_virtio::{QueueStart, RingState, VirtioDevice, VirtioInfo};

pub use super::bench::{Bench, QUEUES};
use super::virtio_poller::AdderPoller;
use super::{decode, encode};

/// Bytes of its configuration space.
const CONFIG: usize = 16;

#[derive(Debug)]
pub struct Adder {
    info: VirtioInfo,
    bench: Arc<Bench>,
    adders: [u64; 2],
}

impl Adder {
    /// A device at power-on.
    pub fn new(bench: Arc<Bench>) -> Self {
        let info = VirtioInfo {
            name: "adder0".into(),
            kind: "toy-adder",
            // None that the specification gives to anybody.
            device_id: 0x7fff,
            queues: QUEUES,
            queue_size: 256,
        };
        Adder { info, bench, adders: [0; 2] }
    }
}

impl VirtioDevice for Adder {
    fn info(&self) -> &VirtioInfo {
        &self.info
    }

    fn features(&self) -> u64 {
        VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX | VIRTIO_F_INDIRECT_DESC
    }

    fn accept(&mut self, _features: u64) {
        // Those of the ring are the ring's to know, and there are no others.
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let config = encode(&self.adders);
        for (at, byte) in (offset as usize..).zip(out) {
            *byte = config.get(at).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, offset: u32, bytes: &[u8]) {
        let adder = (offset as usize).is_multiple_of(8).then(|| self.adders.get_mut(offset as usize / 8));
        if let (Some(Some(adder)), Ok(number)) = (adder, bytes.try_into()) {
            *adder = adder.wrapping_add(u64::from_le_bytes(number));
        }
    }

    fn start_queue(&mut self, start: QueueStart) -> Result<Box<dyn Poller>, DeviceError> {
        Ok(Box::new(AdderPoller::new(start, self.bench.clone())))
    }

    fn stop_queue(&mut self, parked: Parked) -> RingState {
        match parked.into_poller::<AdderPoller>() {
            Ok(poller) => poller.into_state(),
            Err(other) => unreachable!("{other:?} is not of this device"),
        }
    }

    fn save_own(&self, _proof: &QuiescenceProof) -> Vec<u8> {
        encode(&self.adders)
    }

    fn load_own(&mut self, _proof: &QuiescenceProof, bytes: &[u8]) -> Result<(), String> {
        let words = decode(bytes).map_err(|error| error.to_string())?;
        let adders = words.try_into().map_err(|words: Vec<u64>| {
            format!("{} bytes of configuration instead of {CONFIG}", words.len() * 8)
        })?;
        self.adders = adders;
        Ok(())
    }

    fn reset_own(&mut self) {
        self.adders = [0; 2];
    }
}
