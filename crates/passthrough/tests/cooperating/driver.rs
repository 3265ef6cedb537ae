//! A driver that cooperates: igbvf as `guest/igbvf` changes it. The names of its steps are igbvf's, and those of `igbvf_coop.c`.

use ioplane_nic::silicon::Chip;
use ioplane_nic::vf82576::Chip82576;
use ioplane_nic::vf82576::spec::*;
use ioplane_passthrough::cooperating::page::{self, COPIED, MARKED, STILL, SharedEntry, WRITER};

use crate::silicon::vf;
use crate::world::{World, frame, number};

const PAGE: u64 = 0x4000;
const RX_RING: u64 = 0x1_0000;
const TX_RING: u64 = 0x1_8000;
const RX_BUFFERS: u64 = 0x2_0000;
const TX_BUFFERS: u64 = 0x9_0000;
const SLOT: u64 = 2048;
const PEER: [u8; 6] = [2, 0, 0, 0, 0, 2];
const LOCK: u64 = PAGE + 0x08;
const MOVES: u64 = PAGE + 0x0c;
const REPLAYED: u64 = PAGE + 0x10;
const FLAGS: u64 = PAGE + 0x14;
const ENTRIES: u64 = PAGE + 0x40;
/// Of the capability.
const LOW: usize = 8;

/// A ring: index 0 is the descriptor that the function begins with.
struct Ring {
    base: u64,
    clean: u32,
    next: u32,
    buffers: Vec<u64>,
}

impl Ring {
    fn new(base: u64, buffers: u64, count: u32) -> Ring {
        let buffers = (0..u64::from(count)).map(|slot| buffers + slot * SLOT).collect();
        Ring { base, clean: 0, next: 0, buffers }
    }

    fn count(&self) -> u32 {
        self.buffers.len() as u32
    }

    fn at(&self, index: u32) -> u64 {
        self.base + u64::from(index * DESCRIPTOR)
    }

    fn after(&self, index: u32) -> u32 {
        (index + 1) % self.count()
    }

    fn unused(&self) -> u32 {
        (self.clean + self.count() - self.next - 1) % self.count()
    }

    /// Shifts the ring, so that the descriptor at `head` is the first one.
    fn shift(&mut self, world: &mut World, head: u32) {
        let mut bytes = world.bytes(self.base, (self.count() * DESCRIPTOR) as usize);
        bytes.rotate_left((head * DESCRIPTOR) as usize);
        world.store(self.base, &bytes);
        self.buffers.rotate_left(head as usize);
        let back = self.count() - head;
        (self.clean, self.next) = ((self.clean + back) % self.count(), (self.next + back) % self.count());
    }
}

pub struct Driver {
    pub world: World,
    /// Where its capability is; without one it works as the original does.
    capability: Option<usize>,
    latched: u32,
    rx: Ring,
    tx: Ring,
    mtu: u32,
    moves: u32,
    kicked: bool,
    up: bool,
    pub received: Vec<u32>,
    pub sent: u32,
    pub replays: u32,
}

impl Driver {
    /// igbvf_probe, igbvf_open.
    pub fn new(world: World) -> Driver {
        Driver::with(world, true)
    }

    /// One that does not find the capability.
    pub fn without(world: World) -> Driver {
        Driver::with(world, false)
    }

    fn with(world: World, looks: bool) -> Driver {
        let mut driver = Driver {
            world,
            capability: None,
            latched: 0,
            rx: Ring::new(RX_RING, RX_BUFFERS, 16),
            tx: Ring::new(TX_RING, TX_BUFFERS, 16),
            mtu: 1500,
            moves: 0,
            kicked: false,
            up: false,
            received: Vec::new(),
            sent: 0,
            replays: 0,
        };
        driver.capability = driver.find().filter(|_| looks);
        driver.reset(true);
        driver.up();
        driver
    }

    fn find(&mut self) -> Option<usize> {
        let mut at = (self.world.read_config(0x34) & 0xfc) as usize;
        while at >= 0x40 {
            let word = self.world.read_config(at);
            if word & 0xff == 9 && self.world.read_config(at + 4) == page::MAGIC {
                return Some(at);
            }
            at = (word >> 8 & 0xfc) as usize;
        }
        None
    }

    fn word(&self, at: u64) -> u32 {
        u32::from_le_bytes(self.world.load(at))
    }

    fn put(&mut self, at: u64, value: u32) {
        self.world.store(at, &value.to_le_bytes());
    }

    fn list(&self) -> Vec<SharedEntry> {
        let mut list = vec![
            SharedEntry::Clear { offset: RX + DCTL, bits: ENABLE },
            SharedEntry::Equal { offset: TX + HEAD, other: TX + TAIL },
            SharedEntry::Clear { offset: TX + DCTL, bits: ENABLE },
        ];
        let queues = [RX, TX].into_iter().flat_map(|queue| [BAL, BAH, LEN, DCTL].map(|at| queue + at));
        let interrupts = [EITR, EITR + 4, EITR + 8, IVAR0, IVAR_MISC, EIAC, EIAM];
        let keep = queues.chain([RX + SRRCTL, TX + DCA]).chain(interrupts);
        list.extend(keep.map(|offset| SharedEntry::Keep { offset }));
        let counters = Chip82576::LAYOUT.counters.iter();
        list.extend(counters.map(|place| SharedEntry::Counter { offset: place.low }));
        for ring in [&self.rx, &self.tx] {
            list.push(SharedEntry::Area { gpa: ring.base, len: u64::from(ring.count() * DESCRIPTOR) });
        }
        list
    }

    /// Writes the list and says where it is. The lock is held, or nobody knows of the page.
    fn announce(&mut self) {
        let Some(at) = self.capability else { return };
        let bytes = page::written(&self.list());
        if self.word(PAGE) == 0 {
            self.world.store(PAGE, &bytes);
        }
        self.world.store(PAGE + 0x18, &bytes[0x18..0x1c]);
        self.world.store(ENTRIES, &bytes[0x40..]);
        self.world.config(at + LOW, &(PAGE as u32).to_le_bytes());
        self.world.config(at + LOW + 4, &[0; 4]);
        self.world.config(at + LOW + 8, &1_u32.to_le_bytes());
        assert_eq!(self.world.read_config(at + LOW + 8), 1, "{:?}", self.world.device.hardware().flaw());
    }

    fn announced(&self) -> bool {
        self.capability.is_some() && self.word(PAGE) == page::MAGIC
    }

    /// The read lock, of a version that it knows; or somebody has to look into it later.
    fn enter(&mut self) -> bool {
        if !self.announced() {
            return true;
        }
        let lock = self.word(LOCK);
        if lock & WRITER == 0 && self.word(MOVES) == self.moves {
            self.put(LOCK, lock + 1);
            return true;
        }
        self.kicked = true;
        false
    }

    fn leave(&mut self) {
        if self.announced() {
            let lock = self.word(LOCK);
            assert_ne!(lock & !WRITER, 0, "it has the lock");
            self.put(LOCK, lock - 1);
        }
    }

    /// The same for who can wait.
    fn begin(&mut self) {
        for _ in 0..400 {
            if self.enter() {
                return;
            }
            self.world.tick();
            self.work_later();
        }
        panic!("the lock is never free");
    }

    /// The same; what it has written has arrived.
    fn end(&mut self) {
        if self.announced() {
            self.world.read(STATUS);
        }
        self.leave();
    }

    /// The worker.
    fn work_later(&mut self) {
        let lock = self.word(LOCK);
        if !std::mem::take(&mut self.kicked) {
            return;
        }
        if lock & WRITER != 0 {
            self.mark_unseen();
            self.kicked = true;
            return;
        }
        self.put(LOCK, lock + 1);
        let moves = self.word(MOVES);
        if moves != self.moves {
            self.replay();
            self.put(REPLAYED, moves);
            self.moves = moves;
        }
        if self.up {
            self.world.write(EIMS, 7);
            self.world.write(EICS, 7);
        }
        self.end();
    }

    /// What the function has written and nobody has seen is written to, so that it is sent.
    fn mark_unseen(&mut self) {
        if self.word(FLAGS) != STILL || self.word(MOVES) != self.moves {
            return;
        }
        let mut at = self.rx.clean;
        while self.up && at != self.rx.next && self.word(self.rx.at(at) + 8) & DD != 0 {
            let buffer = self.rx.buffers[at as usize];
            let first = self.world.bytes(buffer, 1);
            self.world.store(buffer, &first);
            at = self.rx.after(at);
        }
        self.put(FLAGS, STILL | MARKED);
    }

    /// ioplane_coop_replay.
    fn replay(&mut self) {
        self.replays += 1;
        let copied = self.word(FLAGS) & (COPIED | MARKED) == COPIED;
        self.latched |= self.world.read(V2PMAILBOX) & READ_TO_CLEAR;
        let answer = self.say(&[MESSAGE_RESET]);
        let [a, b, c, d] = answer[1].to_le_bytes();
        let [e, f, ..] = answer[2].to_le_bytes();
        let mac = self.world.mac;
        if [a, b, c, d, e, f] != mac {
            self.set_mac(mac);
        }
        if self.up {
            self.filters();
            self.say(&[MESSAGE_LPE, self.mtu + 18 + 4]);
            self.shift(copied);
            for (ring, tail) in
                [(TX, self.tx.next), (RX, (self.rx.next + self.rx.count() - 1) % self.rx.count())]
            {
                self.world.write(ring + HEAD, 0);
                self.world.write(ring + TAIL, 0);
                let control = self.world.read(ring + DCTL);
                self.world.write(ring + DCTL, control | ENABLE);
                self.world.write(ring + TAIL, tail);
            }
        }
        self.put(FLAGS, 0);
    }

    fn shift(&mut self, copied: bool) {
        let mut head = self.tx.clean;
        while head != self.tx.next && self.word(self.tx.at(head) + 12) & DD != 0 {
            head = self.tx.after(head);
        }
        self.tx.shift(&mut self.world, head);
        let mut head = self.rx.clean;
        while !copied && head != self.rx.next && self.word(self.rx.at(head) + 8) & DD != 0 {
            head = self.rx.after(head);
        }
        if copied {
            // What the function wrote there may not have come along: those frames are lost.
            let mut at = head;
            while at != self.rx.next && self.word(self.rx.at(at) + 8) & DD != 0 {
                at = self.rx.after(at);
            }
            let lost = (at + self.rx.count() - head) % self.rx.count();
            let seen = self.received.len() + self.world.missed.len();
            let lost: Vec<u32> = self.world.accepted[seen..seen + lost as usize].to_vec();
            self.world.missed.extend(lost);
        }
        self.rx.shift(&mut self.world, head);
        let mut at = 0;
        while at != self.rx.next {
            self.post(at);
            at = self.rx.after(at);
        }
    }

    fn poll(&mut self, bit: u32) {
        for _ in 0..200 {
            let value = self.world.read(V2PMAILBOX) | self.latched;
            self.latched |= value & READ_TO_CLEAR;
            if value & bit != 0 {
                self.latched &= !bit;
                return;
            }
            self.world.tick();
        }
        panic!("the mailbox does not answer: {bit:#x}");
    }

    fn say(&mut self, words: &[u32]) -> [u32; 3] {
        self.world.write(V2PMAILBOX, VFU);
        self.poll(VFU);
        self.latched = 0;
        for (at, word) in (0..).zip(words) {
            self.world.write(VMBMEM + 4 * at, *word);
        }
        self.world.write(V2PMAILBOX, REQ);
        self.poll(PFACK);
        self.poll(PFSTS);
        self.world.write(V2PMAILBOX, VFU);
        let answer = [0, 1, 2].map(|at| self.world.read(VMBMEM + 4 * at));
        self.world.write(V2PMAILBOX, ACK);
        assert_eq!(answer[0] & 0xffff, words[0] & 0xffff, "the answer is to what was asked");
        assert_ne!(answer[0] & MESSAGE_ACK, 0, "it is accepted");
        answer
    }

    fn set_mac(&mut self, mac: [u8; 6]) {
        let [a, b, c, d, e, f] = mac;
        self.say(&[MESSAGE_MAC, u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0])]);
    }

    /// igbvf_reset. The lock is held.
    fn reset(&mut self, first: bool) {
        let control = self.world.read(CTRL);
        self.world.write(CTRL, control | CTRL_RST);
        self.latched = 0;
        self.poll(RSTD);
        let answer = self.say(&[MESSAGE_RESET]);
        if first {
            let [a, b, c, d] = answer[1].to_le_bytes();
            let [e, f, ..] = answer[2].to_le_bytes();
            self.world.mac = [a, b, c, d, e, f];
        }
        self.set_mac(self.world.mac);
    }

    fn filters(&mut self) {
        self.say(&[MESSAGE_MULTICAST | 3 << 16, 0x0123_0456, 0x0789]);
        for vlan in [10, 30] {
            self.say(&[MESSAGE_VLAN | 1 << 16, vlan]);
        }
    }

    fn post(&mut self, index: u32) {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&self.rx.buffers[index as usize].to_le_bytes());
        self.world.store(self.rx.at(index), &descriptor);
    }

    fn alloc_rx_buffers(&mut self) {
        let from = self.rx.next;
        while self.rx.unused() > 0 {
            self.post(self.rx.next);
            self.rx.next = self.rx.after(self.rx.next);
        }
        if from != self.rx.next {
            self.world.write(RX + TAIL, (self.rx.next + self.rx.count() - 1) % self.rx.count());
        }
    }

    /// igbvf_up.
    pub fn up(&mut self) {
        self.begin();
        self.filters();
        for (queue, base, count) in [(TX, TX_RING, self.tx.count()), (RX, RX_RING, self.rx.count())] {
            let control = self.world.read(queue + DCTL);
            self.world.write(queue + DCTL, control & !ENABLE);
            self.world.tick();
            self.world.tick();
            self.world.write(queue + LEN, count * DESCRIPTOR);
            self.world.write(queue + BAL, base as u32);
            self.world.write(queue + BAH, 0);
            self.world.write(queue + HEAD, 0);
            self.world.write(queue + TAIL, 0);
            if queue == RX {
                self.world.write(RX + SRRCTL, 2 | 1 << 25);
                self.say(&[MESSAGE_LPE, self.mtu + 18 + 4]);
            }
            self.world.write(queue + DCTL, control | ENABLE | 0x0004_0808);
        }
        self.alloc_rx_buffers();
        self.world.write(IVAR0, (IVAR_VALID | 1) << 8 | IVAR_VALID);
        self.world.write(IVAR_MISC, IVAR_VALID | 2);
        (0..3).for_each(|vector| self.world.write(EITR + 4 * vector, 488));
        self.world.write(EIAC, 7);
        self.world.write(EIAM, 7);
        self.world.write(EIMS, 7);
        (self.up, self.world.injecting) = (true, true);
        self.announce_held();
        self.end();
    }

    /// The first time nobody knows of the lock, and it is not held.
    fn announce_held(&mut self) {
        let first = self.capability.is_some() && !self.announced();
        self.announce();
        if first {
            self.put(LOCK, 1);
        }
    }

    /// igbvf_down.
    pub fn down(&mut self) {
        self.drain();
        self.begin();
        self.up = false;
        for queue in [RX, TX] {
            let control = self.world.read(queue + DCTL);
            self.world.write(queue + DCTL, control & !ENABLE);
        }
        self.world.tick();
        self.world.tick();
        self.world.write(EIMC, !0);
        self.world.write(EIAC, 0);
        self.reset(false);
        self.end();
        let (rx, tx) = (self.rx.count(), self.tx.count());
        self.resize(rx, tx);
    }

    fn resize(&mut self, rx: u32, tx: u32) {
        (self.rx, self.tx) = (Ring::new(RX_RING, RX_BUFFERS, rx), Ring::new(TX_RING, TX_BUFFERS, tx));
    }

    /// igbvf_poll.
    fn clean_rx(&mut self) {
        if !self.enter() {
            return;
        }
        loop {
            let at = self.rx.at(self.rx.clean);
            if self.word(at + 8) & DD == 0 {
                break;
            }
            let len = u16::from_le_bytes(self.world.load(at + 12));
            let buffer = self.rx.buffers[self.rx.clean as usize];
            let bytes = self.world.bytes(buffer, len.into());
            // The page was written by the function, and nobody knows yet.
            self.world.store(buffer, &bytes[..1]);
            self.received.push(number(&bytes).expect("a frame as it was sent"));
            self.put(at + 8, 0);
            self.rx.clean = self.rx.after(self.rx.clean);
            if self.rx.unused() > 4 {
                self.alloc_rx_buffers();
            }
        }
        self.alloc_rx_buffers();
        self.world.write(EIMS, 1);
        self.leave();
    }

    fn clean_tx(&mut self) {
        if !self.enter() {
            return;
        }
        while self.tx.clean != self.tx.next {
            let at = self.tx.at(self.tx.clean) + 12;
            if self.word(at) & DD == 0 {
                break;
            }
            self.put(at, 0);
            self.tx.clean = self.tx.after(self.tx.clean);
        }
        self.world.write(EIMS, 2);
        self.leave();
    }

    /// igbvf_xmit_frame. `false`: no room, or the lock is not to be had.
    pub fn send(&mut self) -> bool {
        if self.tx.unused() < 2 || !self.enter() {
            return false;
        }
        let frame = frame(PEER, self.sent, 64 + (self.sent % 11) as usize * 60);
        let (index, buffer) = (self.tx.next, self.tx.buffers[self.tx.next as usize]);
        self.world.store(buffer, &frame);
        let command = TX_DEXT | TX_DATA | TX_EOP | TX_RS | frame.len() as u32;
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&buffer.to_le_bytes());
        descriptor[8..12].copy_from_slice(&command.to_le_bytes());
        self.world.store(self.tx.at(index), &descriptor);
        self.tx.next = self.tx.after(index);
        self.sent += 1;
        self.world.write(TX + TAIL, self.tx.next);
        self.leave();
        true
    }

    /// A counter's register, which traps, and the same in the page, which does not.
    pub fn counted(&mut self, counter: u64) -> (u32, u64) {
        self.begin();
        let register = self.world.read(counter);
        self.end();
        let entry = self.list().iter().position(|entry| *entry == SharedEntry::Counter { offset: counter });
        let at = ENTRIES + 16 * entry.expect("a counter") as u64 + 8;
        (register, u64::from_le_bytes(self.world.load(at)))
    }

    pub fn interrupts(&mut self) {
        let [rx, tx, _] = self.world.vectors();
        if !self.up {
            return;
        }
        if rx {
            self.clean_rx();
        }
        if tx {
            self.clean_tx();
        }
    }

    pub fn run(&mut self, ticks: u32) {
        for _ in 0..ticks {
            self.world.tick();
            self.interrupts();
            self.work_later();
        }
    }

    pub fn traffic(&mut self, turns: u32) {
        for turn in 0..turns {
            if self.send() && turn.is_multiple_of(2) {
                self.send();
            }
            self.run(2);
        }
    }

    /// Until everything that came was received and everything that was given was sent.
    pub fn drain(&mut self) {
        self.world.injecting = false;
        for _ in 0..400 {
            let seen = self.received.len() + self.world.missed.len();
            let sent = self.world.sent.len() as u32 == self.sent && self.tx.clean == self.tx.next;
            if seen == self.world.accepted.len() && sent && !self.kicked {
                return;
            }
            self.run(1);
        }
        let (seen, missed) = (self.received.len(), self.world.missed.len());
        panic!("an interrupt was lost: {seen} and {missed} of {} received", self.world.accepted.len());
    }

    /// Everything that it does, once.
    pub fn work(&mut self) {
        self.traffic(8);
        self.down();
        self.mtu = 3000;
        self.up();
        self.traffic(4);
        self.down();
        self.resize(24, 8);
        self.up();
        self.traffic(6);
        self.down();
        self.up();
        self.traffic(8);
    }

    /// What must hold at the end.
    pub fn finish(mut self) -> World {
        self.drain();
        if self.announced() {
            let (register, page) = self.counted(VFGPTC);
            assert_eq!(
                (register, page),
                (1000 + self.sent, u64::from(1000 + self.sent)),
                "frames sent, counted"
            );
            let accepted = self.world.accepted.len() as u32;
            assert_eq!(self.counted(VFGPRC).0, 1000 + accepted, "frames received, counted");
            let cooperation = self.world.device.hardware().cooperation().expect("a driver");
            assert_eq!(u64::from(cooperation.moves), self.world.moves);
            assert_eq!(cooperation.replayed, cooperation.moves, "it has brought its function back");
        }
        let pf = vf(&self.world.vf).pf().clone();
        assert_eq!((pf.mac, pf.longest, pf.vlans.len(), pf.multicast.len()), (self.world.mac, 3022, 2, 3));
        let received = std::mem::take(&mut self.received);
        self.world.finish(&received, self.sent);
        self.world
    }
}
