//! A backend that does nothing but move ring entries, in this process: what is left is the generator, and how fast it
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
use ioplane_figures::machine::{self, Cpus};

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
            let count = tx.heads().min(rx.heads());
            if count == 0 {
                std::hint::spin_loop();
            }
            for index in 0..count {
                let (from, to) = (tx.at(index), rx.at(index));
                let stamp_at = Size::Small.stamp_at();
                rx.buffers.put_u64(to, 0);
                rx.buffers.put_u32(to + 8, 1 << 16);
                rx.buffers.put_u64(to + stamp_at, tx.buffers.load_u64(from + stamp_at));
                tx.used(index, 0);
                rx.used(index, HEADER + Size::Small.bytes());
            }
            if count > 0 {
                tx.publish(count);
                rx.publish(count);
            }
        }
    });
    machine::pin(cpus.front)?;
    let mut path = Path::new(a, b);
    let load = Load { rate: None, sleeps: false, warm: time / 4, time };
    let outcome = path.stream(&load, &[]);
    stop.store(true, Ordering::Relaxed);
    moving.join().map_err(|_| anyhow!("the null backend panicked"))?;
    outcome
}

/// Buffers that are taken at a time.
const BATCH: usize = 64;

/// The device's side of a belt, as little of it as can be.
struct Device {
    packed: bool,
    desc: Window,
    driver: Window,
    device: Window,
    buffers: Window,
    stride: usize,
    next: u16,
    /// The buffers at hand: `have` of them from `next` on.
    heads: [u16; BATCH],
    have: usize,
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
            heads: [0; BATCH],
            have: 0,
        })
    }

    fn place(&self, index: usize) -> (usize, bool) {
        let at = self.next.wrapping_add(index as u16);
        (usize::from(at & (RING - 1)), at & RING == 0)
    }

    /// Where the buffer of entry `index` begins.
    fn at(&self, index: usize) -> usize {
        usize::from(self.heads[index]) * self.stride
    }

    /// How many there are; looks for more when there are none, so that lines do not go to and fro for one entry each.
    fn heads(&mut self) -> usize {
        if self.have > 0 {
            return self.have;
        }
        let there = self.driver.load_u16(2).wrapping_sub(self.next).into();
        while self.have < BATCH {
            let (at, wrap) = self.place(self.have);
            self.heads[self.have] = if self.packed {
                let flags = self.desc.load_u16(16 * at + 14);
                if (flags & 0x80 != 0) != wrap || (flags & 0x8000 != 0) == wrap {
                    break;
                }
                self.desc.load_u16(16 * at + 12)
            } else {
                if self.have >= there {
                    break;
                }
                self.driver.load_u16(4 + 2 * at)
            };
            self.buffers.prefetch(self.at(self.have));
            self.have += 1;
        }
        self.have
    }

    fn used(&mut self, index: usize, len: u32) {
        let (at, wrap) = self.place(index);
        if self.packed {
            self.desc.put_u32(16 * at + 8, len);
            self.desc.put_u16(16 * at + 14, if wrap { 0x8080 } else { 0 });
        } else {
            self.device.put_u32(4 + 8 * at, self.heads[index].into());
            self.device.put_u32(8 + 8 * at, len);
        }
    }

    /// Shows the first `count` as used.
    fn publish(&mut self, count: usize) {
        self.next = self.next.wrapping_add(count as u16);
        self.heads.copy_within(count..self.have, 0);
        self.have -= count;
        if !self.packed {
            self.device.put_u16(2, self.next);
        }
    }
}
