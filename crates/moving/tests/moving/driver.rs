//! A driver that works as Linux's igbvf and ixgbevf do: which registers it touches, in which order, and what it believes to be there. In
//! what they differ is in `card`.

use ioplane_nic::silicon::spec::*;
use ioplane_nic::silicon::{Chip, QueueLayout, QueueRegister, RegisterLayout, Statistic};

use crate::card::Card;
use crate::hardware::{frame, number};
use crate::world::World;

/// Where the driver's memory is: rings, then buffers. Those of the next queue are further on.
const RX_RING: u64 = 0x1_0000;
const TX_RING: u64 = 0x1_8000;
const NEXT_RING: u64 = 0x1000;
const RX_BUFFERS: u64 = 0x2_0000;
const TX_BUFFERS: u64 = 0x9_0000;
const NEXT_BUFFERS: u64 = 0x2_0000;
/// Room for a buffer.
const SLOT: u64 = 4096;
/// Buffers are posted in bunches.
const BUNCH: u32 = 4;
/// Where frames go to.
const PEER: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// A ring's place in memory, and how far the driver is.
#[derive(Default)]
struct Ring {
    at: u64,
    buffers: u64,
    count: u32,
    clean: u32,
    next: u32,
    /// The part of a frame that came in the descriptors before.
    partial: Vec<u8>,
    /// The number of the last frame that came.
    last: Option<u64>,
}

impl Ring {
    fn after(&self, index: u32) -> u32 {
        (index + 1) % self.count
    }

    fn descriptor(&self, index: u32) -> u64 {
        self.at + u64::from(index * DESCRIPTOR)
    }

    fn buffer(&self, index: u32) -> u64 {
        self.buffers + u64::from(index) * SLOT
    }
}

pub struct Driver<C: Card> {
    pub world: World<C>,
    layout: RegisterLayout,
    /// Read-to-clear bits of the mailbox that were seen.
    latched: u32,
    /// It holds the mailbox until the message was taken, and reads answers without holding it.
    pub modern: bool,
    rx: Vec<Ring>,
    tx: Vec<Ring>,
    mtu: u32,
    pub received: Vec<u64>,
    pub sent: u64,
    /// Of each counter: what it was last, and the sum.
    last: Vec<u64>,
    total: Vec<u64>,
    up: bool,
}

impl<C: Card> Driver<C> {
    /// Probes and opens.
    pub fn new(world: World<C>) -> Self {
        let layout = C::Chip::LAYOUT;
        let rings = |at: u64, buffers: u64| {
            let ring = |queue: u64| Ring {
                at: at + queue * NEXT_RING,
                buffers: buffers + queue * NEXT_BUFFERS,
                count: 16,
                ..Ring::default()
            };
            (0..C::QUEUES as u64).map(ring).collect()
        };
        let mut driver = Driver {
            world,
            layout,
            latched: 0,
            modern: false,
            rx: rings(RX_RING, RX_BUFFERS),
            tx: rings(TX_RING, TX_BUFFERS),
            mtu: 1500,
            received: Vec::new(),
            sent: 0,
            last: Vec::new(),
            total: vec![0; layout.counters.len()],
            up: false,
        };
        C::reset(&mut driver, true);
        driver.last = driver.counters();
        driver.up();
        driver
    }

    fn at(queues: &QueueLayout, queue: usize, register: QueueRegister) -> u64 {
        queues.at(register) + queue as u64 * queues.stride
    }

    fn set_rx(&mut self, queue: usize, register: QueueRegister, value: u32) {
        self.world.write(Self::at(&self.layout.receive, queue, register), value);
    }

    fn set_tx(&mut self, queue: usize, register: QueueRegister, value: u32) {
        self.world.write(Self::at(&self.layout.transmit, queue, register), value);
    }

    pub fn v2p(&mut self) -> u32 {
        let value = self.world.read(self.layout.mailbox) | self.latched;
        self.latched |= value & READ_TO_CLEAR;
        value
    }

    /// Waits for a bit that reading clears.
    fn poll(&mut self, bit: u32) {
        for _ in 0..200 {
            if self.v2p() & bit != 0 {
                self.latched &= !bit;
                return;
            }
            self.world.tick();
        }
        panic!("the mailbox does not answer: {bit:#x}");
    }

    pub fn until_reset(&mut self) {
        self.latched = 0;
        self.poll(RSTD);
    }

    pub fn lock(&mut self) {
        for _ in 0..200 {
            let value = if self.modern { self.v2p() | VFU } else { VFU };
            self.world.write(self.layout.mailbox, value);
            if self.v2p() & VFU != 0 {
                return;
            }
            self.world.tick();
        }
        panic!("the mailbox is never free");
    }

    /// Writes a message and reads the answer.
    pub fn ask(&mut self, words: &[u32]) -> [u32; 5] {
        let (memory, control) = (self.layout.memory, self.layout.mailbox);
        self.lock();
        self.latched = 0;
        for (at, word) in (0..).zip(words) {
            self.world.write(memory + 4 * at, *word);
        }
        if self.modern {
            let value = self.v2p();
            self.world.write(control, value | REQ);
            self.poll(PFACK);
            let value = self.v2p();
            self.world.write(control, value & !VFU);
        } else {
            self.world.write(control, REQ);
            self.poll(PFACK);
        }
        self.poll(PFSTS);
        if !self.modern {
            self.lock();
        }
        let answer = [0, 1, 2, 3, 4].map(|at| self.world.read(memory + 4 * at));
        self.world.write(control, ACK);
        assert_eq!(answer[0] & 0xffff, words[0] & 0xffff, "the answer is to what was asked");
        answer
    }

    /// The same, where the message is accepted.
    pub fn say(&mut self, words: &[u32]) -> [u32; 5] {
        let answer = self.ask(words);
        assert_ne!(answer[0] & MESSAGE_ACK, 0, "it is accepted: {answer:x?} to {words:x?}");
        answer
    }

    pub fn set_mac(&mut self, mac: [u8; 6]) {
        let [a, b, c, d, e, f] = mac;
        self.say(&[MESSAGE_MAC, u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0])]);
        self.world.mac = mac;
    }

    pub fn multicast_and_vlans(&mut self) {
        self.say(&[MESSAGE_MULTICAST | 3 << 16, 0x0123_0456, 0x0789]);
        for vlan in [10, 20, 30] {
            self.say(&[MESSAGE_VLAN | 1 << 16, vlan]);
        }
        self.say(&[MESSAGE_VLAN, 20]);
    }

    /// Configures, then switches interrupts on.
    fn up(&mut self) {
        C::filters(self);
        for queue in 0..C::QUEUES {
            self.configure_tx(queue);
        }
        for queue in 0..C::QUEUES {
            self.configure_rx(queue);
        }
        let interrupts = self.layout.interrupts;
        let entry = |queue: usize, transmit: bool| IVAR_VALID | C::vector(queue, transmit) as u32;
        let ivar = (0..C::QUEUES)
            .fold(0, |ivar, queue| ivar | (entry(queue, true) << 8 | entry(queue, false)) << (16 * queue));
        self.world.write(interrupts.queues, ivar);
        self.world.write(interrupts.misc, IVAR_VALID | 2);
        for vector in 0..3 {
            self.world.write(interrupts.throttle + 4 * vector, 488);
        }
        C::complete(self);
        if C::RELEARNS {
            self.last = self.counters();
        }
        self.world.write(interrupts.auto_clear, 7);
        self.world.write(interrupts.auto_mask, 7);
        self.world.write(interrupts.mask, 7);
        self.up = true;
        self.world.injecting = true;
    }

    fn off(&mut self, queues: &QueueLayout, queue: usize) {
        let control = Self::at(queues, queue, QueueRegister::Control);
        let value = self.world.read(control);
        self.world.write(control, value & !ENABLE);
        for _ in 0..10 {
            if self.world.read(control) & ENABLE == 0 {
                return;
            }
            self.world.tick();
        }
        panic!("queue {queue} does not end");
    }

    fn configure_tx(&mut self, queue: usize) {
        use QueueRegister::*;
        self.off(&self.layout.transmit.clone(), queue);
        let ring = &mut self.tx[queue];
        (ring.clean, ring.next) = (0, 0);
        let (at, count) = (ring.at, ring.count);
        self.set_tx(queue, Length, count * DESCRIPTOR);
        self.set_tx(queue, BaseLow, at as u32);
        self.set_tx(queue, BaseHigh, 0);
        self.set_tx(queue, Head, 0);
        self.set_tx(queue, Tail, 0);
        self.set_tx(queue, Dca, 1 << 9 | 1 << 13);
        self.set_tx(queue, Control, C::TRANSMIT | ENABLE);
    }

    fn configure_rx(&mut self, queue: usize) {
        use QueueRegister::*;
        self.off(&self.layout.receive.clone(), queue);
        let ring = &mut self.rx[queue];
        (ring.clean, ring.next) = (0, 0);
        ring.partial.clear();
        let (at, count) = (ring.at, ring.count);
        let buffer = if self.mtu > 1500 { 1024 } else { 2048 };
        self.set_rx(queue, Shape, (buffer / 1024) | (1 << 25));
        self.set_rx(queue, BaseLow, at as u32);
        self.set_rx(queue, BaseHigh, 0);
        self.set_rx(queue, Length, count * DESCRIPTOR);
        self.set_rx(queue, Head, 0);
        self.set_rx(queue, Tail, 0);
        self.say(&[MESSAGE_LPE, self.mtu + 18 + 4]);
        self.set_rx(queue, Control, C::RECEIVE | ENABLE);
        self.alloc_rx_buffers(queue);
    }

    /// All that are free but one.
    fn alloc_rx_buffers(&mut self, queue: usize) {
        let from = self.rx[queue].next;
        loop {
            let ring = &mut self.rx[queue];
            let slot = ring.next;
            if ring.after(slot) == ring.clean {
                break;
            }
            ring.next = ring.after(slot);
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&ring.buffer(slot).to_le_bytes());
            let at = ring.descriptor(slot);
            self.world.store(at, &descriptor);
        }
        let next = self.rx[queue].next;
        if next != from {
            self.set_rx(queue, QueueRegister::Tail, next);
        }
    }

    fn clean_rx(&mut self, queue: usize) {
        loop {
            let ring = &self.rx[queue];
            let (at, buffer) = (ring.descriptor(ring.clean), ring.buffer(ring.clean));
            let status = u32::from_le_bytes(self.world.load(at + 8));
            let len = u16::from_le_bytes(self.world.load(at + 12));
            if status & DD == 0 {
                break;
            }
            assert!(len > 0, "what was written has a length");
            let part = self.world.bytes(buffer, len.into());
            let ring = &mut self.rx[queue];
            ring.partial.extend(part);
            if status & RX_EOP != 0 {
                let whole = std::mem::take(&mut ring.partial);
                let number = number(&whole).expect("a frame as it was sent");
                assert!(ring.last.is_none_or(|last| last < number), "frames of a queue come in order");
                ring.last = Some(number);
                self.received.push(number);
            }
            ring.clean = ring.after(ring.clean);
            let free = (ring.clean + ring.count - ring.next) % ring.count;
            self.world.store(at + 8, &[0; 4]);
            if free > BUNCH {
                self.alloc_rx_buffers(queue);
            }
        }
        self.alloc_rx_buffers(queue);
    }

    /// Two buffers, the second with EOP and RS; queues take turns. `false`: no room.
    pub fn send(&mut self) -> bool {
        let queue = self.sent as usize % C::QUEUES;
        let ring = &self.tx[queue];
        let free = (ring.clean + ring.count - ring.next - 1) % ring.count;
        if free < 3 {
            return false;
        }
        let frame = frame(PEER, self.sent, 64 + (self.sent % 11) as usize * 60);
        let (header, body) = frame.split_at(40);
        for (part, last) in [(header, false), (body, true)] {
            let ring = &mut self.tx[queue];
            let (at, buffer) = (ring.descriptor(ring.next), ring.buffer(ring.next));
            ring.next = ring.after(ring.next);
            self.world.store(buffer, part);
            let command = TX_DEXT | TX_DATA | if last { TX_EOP | TX_RS } else { 0 } | part.len() as u32;
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&buffer.to_le_bytes());
            descriptor[8..12].copy_from_slice(&command.to_le_bytes());
            self.world.store(at, &descriptor);
        }
        self.sent += 1;
        let next = self.tx[queue].next;
        self.set_tx(queue, QueueRegister::Tail, next);
        true
    }

    fn clean_tx(&mut self, queue: usize) {
        while self.tx[queue].clean != self.tx[queue].next {
            let ring = &mut self.tx[queue];
            let last = ring.after(ring.clean);
            let at = ring.descriptor(last) + 12;
            if u32::from_le_bytes(self.world.load(at)) & DD == 0 {
                break;
            }
            ring.clean = ring.after(last);
            self.world.store(at, &[0; 4]);
        }
    }

    /// The handlers of vectors. Nothing is looked at that no vector announced.
    pub fn interrupts(&mut self) {
        let vectors = self.world.vectors();
        if !self.up {
            return;
        }
        for vector in (0..vectors.len()).filter(|vector| vectors[*vector]) {
            for queue in 0..C::QUEUES {
                if C::vector(queue, false) == vector {
                    self.world.write(self.layout.interrupts.throttle + 4 * vector as u64, 488);
                    self.clean_rx(queue);
                }
                if C::vector(queue, true) == vector {
                    self.clean_tx(queue);
                }
            }
            self.world.write(self.layout.interrupts.mask, 1 << vector);
        }
    }

    fn counters(&mut self) -> Vec<u64> {
        let counters = self.layout.counters;
        let read = |place: &ioplane_nic::silicon::CounterPlace| {
            let low = u64::from(self.world.read(place.low));
            place.high.map_or(0, |(high, _)| u64::from(self.world.read(high))) << 32 | low
        };
        counters.iter().map(read).collect()
    }

    /// The watchdog without what it does about lost interrupts: link, counters.
    pub fn watchdog(&mut self) {
        assert_ne!(self.world.read(self.layout.link.0) & self.layout.link.1, 0, "the link is up");
        C::look(self);
        self.count();
    }

    fn count(&mut self) {
        let now = self.counters();
        for (at, place) in self.layout.counters.iter().enumerate() {
            let bits = if place.high.is_some() { 36 } else { 32 };
            // A counter that has fallen is taken for one that has wrapped.
            let more = now[at].wrapping_sub(self.last[at]) & ((1 << bits) - 1);
            assert!(
                more < 1 << 24,
                "counter {:#x} fell from {:#x} to {:#x}",
                place.low,
                self.last[at],
                now[at]
            );
            self.total[at] += more;
        }
        self.last = now;
    }

    fn counted(&self, counted: Statistic) -> u64 {
        let at = self.layout.counters.iter().position(|place| place.counts == counted);
        self.total[at.expect("a counter")]
    }

    /// Time passes, with the interrupts that come.
    pub fn run(&mut self, ticks: u32) {
        for _ in 0..ticks {
            self.world.tick();
            self.interrupts();
        }
    }

    /// Until everything that came was received and everything that was given was sent.
    pub fn drain(&mut self) {
        self.world.injecting = false;
        for _ in 0..400 {
            let all =
                self.received.len() == self.world.accepted.len() && self.world.sent.len() as u64 == self.sent;
            if all && self.tx.iter().all(|ring| ring.clean == ring.next) {
                return;
            }
            self.run(1);
        }
        panic!(
            "an interrupt was lost: {} of {} received, {} of {} sent",
            self.received.len(),
            self.world.accepted.len(),
            self.world.sent.len(),
            self.sent
        );
    }

    fn down(&mut self) {
        self.drain();
        self.up = false;
        for queue in 0..C::QUEUES {
            self.off(&self.layout.receive.clone(), queue);
            self.off(&self.layout.transmit.clone(), queue);
        }
        let interrupts = self.layout.interrupts;
        self.world.write(interrupts.unmask, !0);
        self.world.write(interrupts.auto_clear, 0);
        self.count();
        C::reset(self, false);
    }

    pub fn change_mtu(&mut self, mtu: u32) {
        self.down();
        self.mtu = mtu;
        self.up();
    }

    pub fn resize(&mut self, rx: u32, tx: u32) {
        self.down();
        self.rx.iter_mut().for_each(|ring| ring.count = rx);
        self.tx.iter_mut().for_each(|ring| ring.count = tx);
        self.up();
    }

    pub fn reset_task(&mut self) {
        self.down();
        self.up();
    }

    /// Everything that it does, once.
    pub fn work(&mut self) {
        self.traffic(6);
        self.watchdog();
        self.change_mtu(3000);
        self.traffic(6);
        self.resize(24, 8);
        self.traffic(8);
        self.watchdog();
        self.reset_task();
        self.traffic(4);
        self.drain();
        self.watchdog();
    }

    pub fn traffic(&mut self, turns: u32) {
        for turn in 0..turns {
            if self.send() && turn.is_multiple_of(2) {
                self.send();
            }
            self.run(2);
        }
    }

    /// What must hold at the end.
    pub fn finish(mut self) -> World<C> {
        self.drain();
        self.watchdog();
        let (received, sent) = (self.counted(Statistic::Received), self.counted(Statistic::Sent));
        assert_eq!(received, self.received.len() as u64, "the counter of received packets");
        assert_eq!(sent, self.sent, "the counter of sent packets");
        self.world.finish(&self.received, self.sent);
        self.world
    }
}
