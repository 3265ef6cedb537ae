//! Moving frames between a TAP device and the switch.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ioplane_device::mutation::{Invariant, bound};
use ioplane_device::{Armed, Budget, Change, CoreContext, PollCost, PollOutcome, Poller, SCRATCH, Wakers};
use rustix::io::Errno;

use super::file::{VNET, decode, encode};
use super::readiness::TapReadiness;
use crate::cause::DropReason;
use crate::fabric::rx::PortRx;
use crate::fabric::tx::PortTx;
use crate::switch::Port;
use crate::{HEAD, LONGEST};

/// Most polls between two looks at a device that had nothing: a look is a system call, and the other queues of the core wait
/// for it.
const MOST_SKIPPED: u32 = 32;

/// What a read or a write costs beside the bytes: a system call, in which the host's network does what it does for each frame.
const COST_OF_CALL: usize = 8 << 10;

// A frame and its header are read into the core's scratch memory.
const _: () = assert!(VNET + LONGEST <= SCRATCH);

/// What the poll may cost in each direction, unless a test has taken the bound out.
fn of_a_poll(budget: Budget) -> usize {
    bound(Invariant::BoundsPolls, budget.bytes.into()) as usize
}

/// Both directions of a TAP device.
pub(super) struct TapPoller {
    file: Arc<OwnedFd>,
    /// What a sleeping core waits on: the device, for as long as it is there.
    readiness: Arc<TapReadiness>,
    port: Arc<Port>,
    port_tx: PortTx,
    port_rx: PortRx,
    /// Polls to let pass before the next look, and how many it was last time.
    skip: u32,
    skipped: u32,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    /// Only a flood that has begun goes on.
    Draining,
    /// What is left of a flood is lost to those who do not have it.
    Suspending,
}

impl TapPoller {
    /// The only queue of `port`.
    pub fn new(file: Arc<OwnedFd>, readiness: Arc<TapReadiness>, port: Arc<Port>) -> Self {
        let (port_tx, port_rx) = (port.tx(0), port.rx(0));
        TapPoller { file, readiness, port, port_tx, port_rx, skip: 0, skipped: 0, phase: Phase::Serving }
    }

    /// Somebody has deleted the device. It will never say anything again but that, which would keep the core awake.
    #[cold]
    fn gone(&mut self) {
        self.readiness.close(&self.file);
        self.port.set_up(false);
    }

    /// Goes on with a flood that has begun; says whether there was one, and what it cost.
    #[cold]
    fn go_on(&mut self, budget: Budget) -> (u32, u64) {
        self.port_tx.allow(of_a_poll(budget));
        let went = self.port_tx.go_on().is_some();
        let spent = self.port_tx.spent();
        self.port_tx.flush();
        (u32::from(went), spent as u64)
    }

    /// From the host: at most `budget` frames. Says how many, and what they cost.
    fn read(&mut self, scratch: &mut [u8; SCRATCH], budget: Budget) -> (u32, u64) {
        if self.port_tx.has_begun() {
            return self.go_on(budget);
        }
        if self.skip > 0 {
            self.skip -= 1;
            return (0, 0);
        }
        let buffer = &mut scratch[..VNET + LONGEST];
        let (mut count, mut cost) = (0, PollCost::of(of_a_poll(budget) as u64));
        while count < budget.requests && !cost.is_used_up() && !self.port_tx.has_begun() {
            let read = match rustix::io::read(&*self.file, &mut *buffer) {
                Ok(read) => read,
                Err(Errno::BADFD) => {
                    self.gone();
                    break;
                }
                Err(_) => break,
            };
            let Some((header, frame)) = buffer[..read].split_first_chunk::<VNET>() else { break };
            count += 1;
            let head = &frame[..frame.len().min(HEAD)];
            cost.spend((COST_OF_CALL + frame.len()) as u64);
            self.port_tx.allow(cost.left() as usize);
            self.port_tx.send(head, frame.len(), decode(header), &mut |to| {
                to.copy_from_slice(frame);
                true
            });
            cost.spend(self.port_tx.spent() as u64);
        }
        self.port_tx.flush();
        self.skipped = if count > 0 { 0 } else { (self.skipped * 2 + 1).min(MOST_SKIPPED) };
        self.skip = self.skipped;
        (count, cost.spent())
    }

    /// To the host: at most `budget` frames; says how many, and what they cost. What it does not take now is dropped and counted:
    /// nothing waits for a host.
    fn write(&mut self, budget: Budget) -> (u32, u64) {
        let (mut count, mut cost) = (0, PollCost::of(of_a_poll(budget) as u64));
        while count < budget.requests && !cost.is_used_up() {
            let Some(frame) = self.port_rx.front() else { break };
            cost.spend((COST_OF_CALL + frame.bytes().len()) as u64);
            let header = encode(&frame.offload());
            let parts = [IoSlice::new(&header), IoSlice::new(frame.bytes())];
            match rustix::io::writev(&*self.file, &parts) {
                Ok(_) => self.port_rx.pop(),
                // Again, if this poll has not spent its time on it.
                Err(Errno::INTR) => continue,
                // The host's side is down, or the device is gone.
                Err(Errno::IO | Errno::BADFD) => self.port_rx.skip(DropReason::Down),
                Err(Errno::INVAL) => self.port_rx.skip(DropReason::Malformed),
                Err(_) => self.port_rx.skip(DropReason::Full),
            }
            count += 1;
        }
        (count, cost.spent())
    }
}

impl Poller for TapPoller {
    fn poll(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        match self.phase {
            Phase::Serving => {}
            Phase::Draining if self.port_tx.has_begun() => {
                let (done, spent) = self.go_on(budget);
                return PollOutcome::busy(done, spent);
            }
            Phase::Draining | Phase::Suspending => return PollOutcome::PARKED,
        }
        let (written, to_host) = self.write(budget);
        let (read, from_host) = self.read(context.scratch(), budget);
        match written + read {
            0 => PollOutcome::IDLE,
            done => {
                let cut_short = |count, cost| count >= budget.requests || cost >= u64::from(budget.bytes);
                let more = cut_short(written, to_host) || cut_short(read, from_host);
                PollOutcome::busy(done, to_host.saturating_add(from_host)).with_more(more)
            }
        }
    }

    fn drain(&mut self) {
        self.phase = Phase::Draining;
    }

    fn undrain(&mut self) {
        self.phase = Phase::Serving;
    }

    fn suspend(&mut self) {
        self.phase = Phase::Suspending;
    }

    fn goes_on(&self) -> bool {
        true
    }

    fn resume(&mut self) {
        self.skip = 0;
    }

    fn arm(&mut self) -> Armed {
        // The device itself is readable for as long as it has something.
        self.skip = 0;
        if self.port_rx.arm() || self.port_tx.has_begun() { Armed::WorkLeft } else { Armed::Armed }
    }

    fn disarm(&mut self, _context: &CoreContext, _polling: bool) {
        self.skip = 0;
        self.port_rx.disarm();
    }

    fn apply(&mut self, _change: Change) {}

    fn wakers(&self) -> Wakers<'_> {
        Wakers { kick: Some(self.port_rx.waker()), completion: Some(self.readiness.as_fd()) }
    }

    fn tidy(&mut self) {
        self.port_rx.tidy();
    }
}
