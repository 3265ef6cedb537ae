//! One descriptor for everything that a NIC wants to be called for.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ioplane_network::Port;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::NicError;

/// Readable when frames have arrived, when some are left of a batch, or when the chip's timer has run out.
#[derive(Debug)]
pub(crate) struct WakeSources {
    all: Arc<OwnedFd>,
    /// Written by the NIC itself: there is more to do.
    more: OwnedFd,
    timer: OwnedFd,
}

impl WakeSources {
    pub fn new(name: &str, port: &Port) -> Result<Self, NicError> {
        let failed = |source: rustix::io::Errno| NicError::Os {
            name: name.to_owned(),
            doing: "making its wake sources",
            source: source.into(),
        };
        let all = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
        let more = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map_err(failed)?;
        // The epoll instance has its own reference to the port's eventfd.
        let port_rx = port.rx(0);
        for event in [port_rx.waker(), more.as_fd(), timer.as_fd()] {
            epoll::add(&all, event, EventData::new_u64(0), EventFlags::IN).map_err(failed)?;
        }
        Ok(WakeSources { all: Arc::new(all), more, timer })
    }

    /// Readable when one of them is.
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.all
    }

    /// Something is left to do.
    pub fn wake(&self) {
        // Fails only if the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.more, &1u64.to_ne_bytes());
    }

    /// Clears the NIC's own sources. The port RX clears the port's eventfd.
    pub fn clear(&self) {
        for event in [&self.more, &self.timer] {
            let _ = rustix::io::read(event, &mut [0u8; 8]);
        }
    }

    /// Becomes readable once after `wait`; `None`: stops the timer.
    pub fn wake_after(&self, wait: Option<Duration>) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Zero would be never.
        let wait = wait.map(|wait| wait.max(Duration::from_nanos(1)));
        let value = wait.map_or(zero, |wait| Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        // Cannot fail for a valid time.
        let _ = timerfd_settime(
            &self.timer,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval: zero, it_value: value },
        );
    }
}
