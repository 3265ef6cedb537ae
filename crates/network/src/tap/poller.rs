//! Moving frames between a TAP device and the switch.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ioplane_device::{Armed, Budget, Change, Poller, Progress, Wakers};
use rustix::io::Errno;

use super::eyes::Eyes;
use super::file::{VNET, decode, encode};
use crate::cause::Drop;
use crate::inlet::Inlet;
use crate::outlet::Outlet;
use crate::port::Port;
use crate::{HEAD, LONGEST};

/// Most polls between two looks at a device that had nothing: a look is a system call, and the other queues of the core wait
/// for it.
const MOST_SKIPPED: u32 = 32;

/// Both directions of a TAP device.
pub(super) struct TapPoller {
    file: Arc<OwnedFd>,
    /// What a sleeping core waits on: the device, for as long as it is there.
    eyes: Arc<Eyes>,
    port: Arc<Port>,
    outlet: Outlet,
    inlet: Inlet,
    buffer: Box<[u8]>,
    /// Polls to let pass before the next look, and how many it was last time.
    skip: u32,
    skipped: u32,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    Stopping,
}

impl TapPoller {
    /// The only queue of `port`.
    pub fn new(file: Arc<OwnedFd>, eyes: Arc<Eyes>, port: Arc<Port>) -> Self {
        let buffer = vec![0; VNET + LONGEST].into();
        let (outlet, inlet) = (port.outlet(0), port.inlet(0));
        TapPoller { file, eyes, port, outlet, inlet, buffer, skip: 0, skipped: 0, phase: Phase::Serving }
    }

    /// Somebody has deleted the device. It will never say anything again but that, which would keep the core awake.
    #[cold]
    fn gone(&mut self) {
        self.eyes.close(&self.file);
        self.port.set_up(false);
    }

    /// From the host: at most `budget` frames.
    fn read(&mut self, budget: u32) -> u32 {
        if self.skip > 0 {
            self.skip -= 1;
            return 0;
        }
        let mut count = 0;
        while count < budget {
            let read = match rustix::io::read(&*self.file, &mut self.buffer[..]) {
                Ok(read) => read,
                Err(Errno::BADFD) => {
                    self.gone();
                    break;
                }
                Err(_) => break,
            };
            let Some((header, frame)) = self.buffer[..read].split_first_chunk::<VNET>() else { break };
            count += 1;
            let head = &frame[..frame.len().min(HEAD)];
            self.outlet.send(head, frame.len(), decode(header), &mut |to| {
                to.copy_from_slice(frame);
                true
            });
        }
        self.outlet.flush();
        self.skipped = if count > 0 { 0 } else { (self.skipped * 2 + 1).min(MOST_SKIPPED) };
        self.skip = self.skipped;
        count
    }

    /// To the host: at most `budget` frames. What it does not take now is dropped and counted: nothing waits for a host.
    fn write(&mut self, budget: u32) -> u32 {
        let mut count = 0;
        while count < budget {
            let Some(frame) = self.inlet.front() else { break };
            let header = encode(&frame.offload());
            let parts = [IoSlice::new(&header), IoSlice::new(frame.bytes())];
            match rustix::io::writev(&*self.file, &parts) {
                Ok(_) => self.inlet.pop(),
                Err(Errno::INTR) => continue,
                // The host's side is down, or the device is gone.
                Err(Errno::IO | Errno::BADFD) => self.inlet.skip(Drop::Down),
                Err(Errno::INVAL) => self.inlet.skip(Drop::Malformed),
                Err(_) => self.inlet.skip(Drop::Full),
            }
            count += 1;
        }
        count
    }
}

impl Poller for TapPoller {
    fn poll(&mut self, budget: Budget) -> Progress {
        if self.phase == Phase::Stopping {
            return Progress::Parked;
        }
        let done = self.write(budget.0) + self.read(budget.0);
        if done == 0 { Progress::Idle } else { Progress::Busy(done) }
    }

    /// Nothing is ever in flight.
    fn drain(&mut self) {
        self.phase = Phase::Stopping;
    }

    fn undrain(&mut self) {
        self.phase = Phase::Serving;
    }

    fn suspend(&mut self) {
        self.phase = Phase::Stopping;
    }

    fn resume(&mut self) {
        self.skip = 0;
    }

    fn arm(&mut self) -> Armed {
        // The device itself is readable for as long as it has something.
        self.skip = 0;
        if self.inlet.arm() { Armed::WorkLeft } else { Armed::Armed }
    }

    fn disarm(&mut self, _polling: bool) {
        self.skip = 0;
        self.inlet.disarm();
    }

    fn apply(&mut self, _change: Change) {}

    fn wakers(&self) -> Wakers<'_> {
        Wakers { kick: Some(self.inlet.waker()), completion: Some(self.eyes.as_fd()) }
    }

    fn tidy(&mut self) {
        self.inlet.tidy();
    }
}
