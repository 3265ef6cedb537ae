//! Receive and transmit queues: advanced descriptors, heads that only the function moves, write-backs that come a step later than the
//! head moves.

use std::borrow::Cow;
use std::collections::VecDeque;

use super::SiliconViolation;
use super::chip::QueueRegister;
use super::dma::Dma;
use super::offload::{Asked, TxContext};
use super::spec::*;

/// Bytes that are to be written to memory, in this order.
#[derive(Debug)]
struct WriteBack {
    data: Vec<(u64, Vec<u8>)>,
    /// The last of a frame: it interrupts.
    last: bool,
}

/// One queue's registers and what it has in hand.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    base: u64,
    length: u32,
    shape: u32,
    head: u32,
    tail: u32,
    control: u32,
    dca: u32,
    head_address: u64,
    pub(crate) dropped: u32,
    on: bool,
    /// Switched off, and not yet done with what it has in hand.
    stopping: bool,
    /// It was on since the last reset, and was switched off.
    ended: bool,
    pending: VecDeque<WriteBack>,
    /// The frame that is being read.
    frame: Vec<u8>,
    /// What its first descriptor has asked for.
    asked: Asked,
    contexts: [TxContext; 2],
}

impl Queue {
    /// `keeps`: all but where the ring is stays, also that it is on. What was in hand is gone.
    pub(crate) fn reset(&mut self, keeps: bool) {
        let fresh = Queue { dropped: self.dropped, ..Queue::default() };
        *self = if keeps {
            Queue {
                shape: self.shape,
                head: self.head,
                tail: self.tail,
                control: self.control,
                dca: self.dca,
                head_address: self.head_address,
                on: self.on,
                stopping: self.stopping,
                ..fresh
            }
        } else {
            fresh
        };
    }

    /// The PF switches it off as it answers RESET.
    pub(crate) fn switch_off(&mut self) {
        (self.on, self.stopping) = (false, false);
    }

    pub(crate) fn on(&self) -> bool {
        self.on && !self.stopping
    }

    fn count(&self) -> u32 {
        self.length / DESCRIPTOR
    }

    fn descriptor(&self, index: u32) -> u64 {
        self.base + u64::from(index) * u64::from(DESCRIPTOR)
    }

    fn next(&self, index: u32) -> u32 {
        if index + 1 >= self.count() { 0 } else { index + 1 }
    }

    pub(crate) fn read(&self, register: QueueRegister) -> u32 {
        match register {
            QueueRegister::BaseLow => self.base as u32,
            QueueRegister::BaseHigh => (self.base >> 32) as u32,
            QueueRegister::Length => self.length,
            QueueRegister::Shape => self.shape,
            QueueRegister::Head => self.head,
            QueueRegister::Dca => self.dca,
            QueueRegister::Tail => self.tail,
            QueueRegister::Control if self.on => self.control | ENABLE,
            QueueRegister::Control => self.control & !ENABLE,
            QueueRegister::Dropped => self.dropped,
            QueueRegister::HeadLow => self.head_address as u32,
            QueueRegister::HeadHigh => (self.head_address >> 32) as u32,
        }
    }

    pub(crate) fn write(
        &mut self,
        offset: u64,
        register: QueueRegister,
        value: u32,
    ) -> Result<(), SiliconViolation> {
        use QueueRegister::*;
        let half = |old: u64, high: bool| {
            if high {
                old & 0xffff_ffff | u64::from(value) << 32
            } else {
                old & !0xffff_ffff | u64::from(value)
            }
        };
        match register {
            Head if value != 0 => return Err(SiliconViolation::Head { offset, value }),
            BaseLow | BaseHigh | Length | Shape | Head if self.on => {
                return Err(SiliconViolation::QueueOn { offset });
            }
            BaseLow => self.base = half(self.base, false) & !127,
            BaseHigh => self.base = half(self.base, true),
            Length => self.length = value & 0xf_ff80,
            Shape => self.shape = value,
            Head => self.head = 0,
            Dca => self.dca = value,
            Tail if !self.on() => {
                // Linux's drivers tell a receive queue to end while their poll may still be posting buffers: that is ignored.
                if value != 0 && self.ended {
                    return Ok(());
                }
                // What stands there is taken when the queue is switched on, so only zero makes sense.
                if value != 0 {
                    return Err(SiliconViolation::TailWhileOff { offset, value });
                }
                self.tail = 0;
            }
            Tail if value >= self.count() => return Err(SiliconViolation::TailOutside { offset, value }),
            Tail => self.tail = value,
            Control => return self.switch(offset, value),
            HeadLow => self.head_address = half(self.head_address, false),
            HeadHigh => self.head_address = half(self.head_address, true),
            Dropped => return Err(SiliconViolation::ReadOnly { offset }),
        }
        Ok(())
    }

    fn switch(&mut self, offset: u64, value: u32) -> Result<(), SiliconViolation> {
        self.control = value & !ENABLE;
        match (self.on(), value & ENABLE != 0) {
            (false, true) => {
                if self.on || (self.head, self.tail) != (0, 0) || self.count() == 0 {
                    return Err(SiliconViolation::NotInitialised { offset });
                }
                (self.on, self.ended) = (true, false);
            }
            (true, false) => (self.stopping, self.ended) = (true, true),
            _ => {}
        }
        Ok(())
    }

    /// Writes to memory what is to be written. How many frames were ended by that; each interrupts.
    pub(crate) fn flush(&mut self, dma: &Dma, violations: &mut Vec<SiliconViolation>) -> usize {
        let mut ended = 0;
        for write_back in self.pending.drain(..) {
            for (iova, bytes) in write_back.data {
                if !dma.write(iova, &bytes) {
                    violations.push(SiliconViolation::Dma { iova });
                }
            }
            ended += usize::from(write_back.last);
        }
        // A frame that was begun is sent before the queue is off.
        if self.stopping && (self.frame.is_empty() || self.head == self.tail) {
            (self.on, self.stopping) = (false, false);
        }
        ended
    }

    /// Takes a frame in, if there is room: data and write-backs come with the next [`Queue::flush`].
    pub(crate) fn receive(
        &mut self,
        frame: &[u8],
        dma: &Dma,
        violations: &mut Vec<SiliconViolation>,
    ) -> bool {
        let buffer = match self.shape & 0x7f {
            0 => 2048,
            kilobytes => kilobytes as usize * 1024,
        };
        let (frame, tag) = match self.control & RX_VME != 0 {
            true => without_tag(frame),
            false => (frame.into(), None),
        };
        let needed = frame.len().div_ceil(buffer).max(1) as u32;
        // One that a reset has left on, and whose length is gone, has nowhere to put anything.
        let count = self.count();
        let free = if self.head < count { (self.tail + count - self.head) % count } else { 0 };
        if !self.on() || free < needed {
            self.dropped = self.dropped.wrapping_add(1);
            return false;
        }
        let mut chunks = frame.chunks(buffer).peekable();
        while let Some(chunk) = chunks.next() {
            let at = self.descriptor(self.head);
            let mut descriptor = [0; 16];
            if !dma.read(at, &mut descriptor) {
                violations.push(SiliconViolation::Dma { iova: at });
                return false;
            }
            let address = u64::from_le_bytes(descriptor[..8].try_into().unwrap_or_default());
            let last = chunks.peek().is_none();
            let mut done = [0; 16];
            let status = DD | if last { RX_EOP } else { 0 } | if tag.is_some() { RX_VP } else { 0 };
            done[8..12].copy_from_slice(&status.to_le_bytes());
            done[12..14].copy_from_slice(&(chunk.len() as u16).to_le_bytes());
            done[14..16].copy_from_slice(&tag.unwrap_or(0).to_le_bytes());
            let data = vec![(address, chunk.to_vec()), (at, done.to_vec())];
            self.pending.push_back(WriteBack { data, last });
            self.head = self.next(self.head);
        }
        true
    }

    /// Takes one descriptor to transmit. What leaves by the wire when a frame has ended.
    pub(crate) fn transmit(
        &mut self,
        link: bool,
        dma: &Dma,
        violations: &mut Vec<SiliconViolation>,
    ) -> Vec<Vec<u8>> {
        let idle = self.head == self.tail || self.head >= self.count();
        if !self.on || idle || self.stopping && self.frame.is_empty() {
            return Vec::new();
        }
        let at = self.descriptor(self.head);
        let mut descriptor = [0; 16];
        if !dma.read(at, &mut descriptor) {
            violations.push(SiliconViolation::Dma { iova: at });
            return Vec::new();
        }
        let command = u32::from_le_bytes(descriptor[8..12].try_into().unwrap_or_default());
        let kind = command & TX_TYPE;
        if command & TX_DEXT == 0 || ![TX_CONTEXT, TX_DATA].contains(&kind) {
            violations.push(SiliconViolation::Descriptor { iova: at });
        }
        // Without a link frames wait in the ring.
        if kind == TX_DATA && !link && self.frame.is_empty() {
            return Vec::new();
        }
        if kind == TX_CONTEXT {
            let (which, context) = TxContext::of(&descriptor);
            self.contexts[which] = context;
        }
        if kind == TX_DATA {
            if self.frame.is_empty() {
                self.asked = Asked::of(&descriptor);
            }
            let address = u64::from_le_bytes(descriptor[..8].try_into().unwrap_or_default());
            let from = self.frame.len();
            self.frame.resize(from + (command & 0xffff) as usize, 0);
            if !dma.read(address, &mut self.frame[from..]) {
                violations.push(SiliconViolation::Dma { iova: address });
            }
        }
        if command & TX_RS != 0 {
            let mut done = [0; 16];
            done[12..].copy_from_slice(&DD.to_le_bytes());
            self.pending.push_back(WriteBack { data: vec![(at, done.to_vec())], last: true });
        }
        self.head = self.next(self.head);
        if kind != TX_DATA || command & TX_EOP == 0 {
            return Vec::new();
        }
        let context = self.contexts[self.asked.context()];
        self.asked.frames(std::mem::take(&mut self.frame), &context).unwrap_or_else(|| {
            violations.push(SiliconViolation::Offload { iova: at });
            Vec::new()
        })
    }
}

/// A frame without its VLAN tag, and that.
fn without_tag(frame: &[u8]) -> (Cow<'_, [u8]>, Option<u16>) {
    match vlan(frame) {
        None => (frame.into(), None),
        Some(tag) => ([&frame[..12], &frame[16..]].concat().into(), Some(tag)),
    }
}

/// The tag of a frame (IEEE 802.1Q-2018, 9.6).
pub(crate) fn vlan(frame: &[u8]) -> Option<u16> {
    let tag = frame.get(14..16).filter(|_| frame[12..14] == [0x81, 0x00])?;
    Some(u16::from_be_bytes([tag[0], tag[1]]))
}
