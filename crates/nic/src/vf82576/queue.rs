//! Receive and transmit queues: advanced descriptors, heads that only the function moves, write-backs that come a step later than the
//! head moves.

use std::collections::VecDeque;

use super::SiliconViolation;
use super::dma::Dma;
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
pub(super) struct Queue {
    base: u64,
    length: u32,
    shape: u32,
    head: u32,
    tail: u32,
    control: u32,
    dca: u32,
    head_address: u64,
    pub(super) dropped: u32,
    on: bool,
    /// Switched off, and not yet done with what it has in hand.
    stopping: bool,
    pending: VecDeque<WriteBack>,
    /// The frame that is being read.
    frame: Vec<u8>,
}

impl Queue {
    pub(super) fn reset(&mut self) {
        *self = Queue { dropped: self.dropped, ..Queue::default() };
    }

    pub(super) fn on(&self) -> bool {
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

    pub(super) fn read(&self, register: u64) -> Option<u32> {
        Some(match register {
            BAL => self.base as u32,
            BAH => (self.base >> 32) as u32,
            LEN => self.length,
            SRRCTL => self.shape,
            HEAD => self.head,
            DCA => self.dca,
            TAIL => self.tail,
            DCTL if self.on => self.control | ENABLE,
            DCTL => self.control & !ENABLE,
            RQDPC => self.dropped,
            TDWBAL => self.head_address as u32,
            TDWBAH => (self.head_address >> 32) as u32,
            _ => return None,
        })
    }

    pub(super) fn write(&mut self, offset: u64, register: u64, value: u32) -> Result<(), SiliconViolation> {
        let half = |old: u64, high: bool| {
            if high {
                old & 0xffff_ffff | u64::from(value) << 32
            } else {
                old & !0xffff_ffff | u64::from(value)
            }
        };
        match register {
            HEAD if value != 0 => return Err(SiliconViolation::Head { offset, value }),
            BAL | BAH | LEN | SRRCTL | HEAD if self.on => return Err(SiliconViolation::QueueOn { offset }),
            BAL => self.base = half(self.base, false) & !127,
            BAH => self.base = half(self.base, true),
            LEN => self.length = value & 0xf_ff80,
            SRRCTL => self.shape = value,
            HEAD => self.head = 0,
            DCA => self.dca = value,
            TAIL if !self.on() => {
                // What stands there is taken when the queue is switched on, so only zero makes sense.
                if value != 0 {
                    return Err(SiliconViolation::TailWhileOff { offset, value });
                }
                self.tail = 0;
            }
            TAIL if value >= self.count() => return Err(SiliconViolation::TailOutside { offset, value }),
            TAIL => self.tail = value,
            DCTL => return self.switch(offset, value),
            TDWBAL => self.head_address = half(self.head_address, false),
            TDWBAH => self.head_address = half(self.head_address, true),
            _ => return Err(SiliconViolation::ReadOnly { offset }),
        }
        Ok(())
    }

    fn switch(&mut self, offset: u64, value: u32) -> Result<(), SiliconViolation> {
        self.control = value & !ENABLE;
        match (self.on(), value & ENABLE != 0) {
            (false, true) => {
                if self.on || self.head != 0 || self.count() == 0 {
                    return Err(SiliconViolation::NotInitialised { offset });
                }
                self.on = true;
            }
            (true, false) => self.stopping = true,
            _ => {}
        }
        Ok(())
    }

    /// Writes to memory what is to be written. How many frames were ended by that; each interrupts.
    pub(super) fn flush(&mut self, dma: &Dma, violations: &mut Vec<SiliconViolation>) -> usize {
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
    pub(super) fn receive(
        &mut self,
        frame: &[u8],
        dma: &Dma,
        violations: &mut Vec<SiliconViolation>,
    ) -> bool {
        let buffer = match self.shape & 0x7f {
            0 => 2048,
            kilobytes => kilobytes as usize * 1024,
        };
        let needed = frame.len().div_ceil(buffer).max(1) as u32;
        let free = (self.tail + self.count().max(1) - self.head) % self.count().max(1);
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
            let status = DD | if last { RX_EOP } else { 0 };
            done[8..12].copy_from_slice(&status.to_le_bytes());
            done[12..14].copy_from_slice(&(chunk.len() as u16).to_le_bytes());
            let data = vec![(address, chunk.to_vec()), (at, done.to_vec())];
            self.pending.push_back(WriteBack { data, last });
            self.head = self.next(self.head);
        }
        true
    }

    /// Takes one descriptor to transmit. A frame that has ended.
    pub(super) fn transmit(
        &mut self,
        link: bool,
        dma: &Dma,
        violations: &mut Vec<SiliconViolation>,
    ) -> Option<Vec<u8>> {
        if !self.on || self.head == self.tail || self.stopping && self.frame.is_empty() {
            return None;
        }
        let at = self.descriptor(self.head);
        let mut descriptor = [0; 16];
        if !dma.read(at, &mut descriptor) {
            violations.push(SiliconViolation::Dma { iova: at });
            return None;
        }
        let command = u32::from_le_bytes(descriptor[8..12].try_into().unwrap_or_default());
        let kind = command & TX_TYPE;
        if command & TX_DEXT == 0 || ![TX_CONTEXT, TX_DATA].contains(&kind) {
            violations.push(SiliconViolation::Descriptor { iova: at });
        }
        // Without a link frames wait in the ring.
        if kind == TX_DATA && !link && self.frame.is_empty() {
            return None;
        }
        if kind == TX_DATA {
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
        (kind == TX_DATA && command & TX_EOP != 0).then(|| std::mem::take(&mut self.frame))
    }
}
