//! A back end that does nothing but move ring entries, in this process: what is left is the generator, and how fast it
//! could go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};
use ioplane_memory::Window;
use ioplane_testkit::driver::RingPlace;

use super::backend::mac;
use super::belt::{Belt, Mode};
use super::frame::{HEADER, Size};
use super::load::{Load, Outcome, Path};
use super::nic::{Nic, RING, Shape};
use crate::machine::{self, Cpus};

/// Streams frames of 64 bytes through a thread that copies their stamps and nothing else.
pub fn ceiling(cpus: Cpus, packed: bool, time: Duration) -> Result<Outcome> {
    let shape = Shape { packed, size: Size::Small, pairs: 1 };
    let mode = Mode { packed, event_idx: false };
    let a = Nic::furnish(shape, mode, mac(0), mac(1))?;
    let mut b = Nic::furnish(shape, mode, mac(1), mac(0))?;
    b.refill(0);
    let (mut tx, mut rx) = (Device::new(&a, &a.tx[0], packed)?, Device::new(&b, &b.rx[0], packed)?);
    let stop = Arc::new(AtomicBool::new(false));
    let seen = stop.clone();
    // A thread inherits its affinity: it must not need a turn on the generator's processor to leave it.
    machine::pin(cpus.back)?;
    let moving = std::thread::spawn(move || {
        while !seen.load(Ordering::Relaxed) {
            for _ in 0..64 {
                if !(rx.ready() && tx.ready()) {
                    std::hint::spin_loop();
                    break;
                }
                let (from, to) = (tx.head(), rx.head());
                let stamp_at = Size::Small.stamp_at();
                rx.buffers.put_u64(rx.at(to), 0);
                rx.buffers.put_u32(rx.at(to) + 8, 1 << 16);
                rx.buffers.put_u64(rx.at(to) + stamp_at, tx.buffers.load_u64(tx.at(from) + stamp_at));
                tx.used(from, 0);
                rx.used(to, HEADER + Size::Small.bytes());
            }
            tx.publish();
            rx.publish();
        }
    });
    machine::pin(cpus.front)?;
    let mut path = Path::new(a, b);
    let load = Load { rate: None, sleeps: false, warm: time / 4, time };
    let outcome = path.stream(&load, &[]);
    stop.store(true, Ordering::Relaxed);
    moving.join().map_err(|_| anyhow!("the null back end panicked"))?;
    outcome
}

/// The device's side of a belt, as little of it as can be.
struct Device {
    packed: bool,
    desc: Window,
    driver: Window,
    device: Window,
    buffers: Window,
    stride: usize,
    next: u16,
    seen: u16,
}

impl Device {
    fn new(nic: &Nic, belt: &Belt, packed: bool) -> Result<Self> {
        let (view, place) = (nic.memory().view(), belt.place());
        Ok(Device {
            packed,
            desc: view.window(place.desc, RingPlace::desc_bytes(RING), 16)?,
            driver: view.window(place.avail, RingPlace::avail_bytes(RING), 2)?,
            device: view.window(place.used, RingPlace::used_bytes(RING), 4)?,
            buffers: belt.buffers().clone(),
            stride: belt.slots().stride as usize,
            next: 0,
            seen: 0,
        })
    }

    fn place(&self) -> (usize, bool) {
        (usize::from(self.next & (RING - 1)), self.next & RING == 0)
    }

    fn at(&self, slot: u16) -> usize {
        usize::from(slot) * self.stride
    }

    fn ready(&mut self) -> bool {
        let (at, wrap) = self.place();
        if self.packed {
            let flags = self.desc.load_u16(16 * at + 14);
            return (flags & 0x80 != 0) == wrap && (flags & 0x8000 != 0) != wrap;
        }
        if self.seen == self.next {
            self.seen = self.driver.load_u16(2);
        }
        self.seen != self.next
    }

    fn head(&self) -> u16 {
        let (at, _) = self.place();
        if self.packed { self.desc.load_u16(16 * at + 12) } else { self.driver.load_u16(4 + 2 * at) }
    }

    fn used(&mut self, head: u16, len: u32) {
        let (at, wrap) = self.place();
        if self.packed {
            self.desc.put_u32(16 * at + 8, len);
            self.desc.put_u16(16 * at + 14, if wrap { 0x8080 } else { 0 });
        } else {
            self.device.put_u32(4 + 8 * at, head.into());
            self.device.put_u32(8 + 8 * at, len);
        }
        self.next = self.next.wrapping_add(1);
    }

    fn publish(&self) {
        if !self.packed {
            self.device.put_u16(2, self.next);
        }
    }
}
