//! A driver that works as Linux's igbvf does: which registers it touches, in which order, and what it believes to be there. The names of
//! its steps are igbvf's.

use ioplane_nic::vf82576::spec::*;

use crate::hardware::{frame, number};
use crate::world::World;

/// Where the driver's memory is: rings, then buffers.
const RX_RING: u64 = 0x1_0000;
const TX_RING: u64 = 0x1_8000;
const RX_BUFFERS: u64 = 0x2_0000;
const TX_BUFFERS: u64 = 0x9_0000;
/// Room for a buffer.
const SLOT: u64 = 4096;
/// igbvf posts buffers in bunches.
const BUNCH: u32 = 4;
/// Where frames go to.
const PEER: [u8; 6] = [2, 0, 0, 0, 0, 2];

pub struct Driver {
    pub world: World,
    /// Read-to-clear bits of the mailbox that were seen.
    latched: u32,
    rx_count: u32,
    rx_clean: u32,
    rx_use: u32,
    /// The part of a frame that came in the descriptors before.
    partial: Vec<u8>,
    tx_count: u32,
    tx_clean: u32,
    tx_use: u32,
    mtu: u32,
    pub received: Vec<u64>,
    pub sent: u64,
    /// Of each counter: what it was last, and the sum.
    last: [u32; COUNTERS.len()],
    total: [u64; COUNTERS.len()],
    up: bool,
}

impl Driver {
    /// Probes and opens: igbvf_probe, igbvf_open.
    pub fn new(world: World) -> Driver {
        let mut driver = Driver {
            world,
            latched: 0,
            rx_count: 16,
            rx_clean: 0,
            rx_use: 0,
            partial: Vec::new(),
            tx_count: 16,
            tx_clean: 0,
            tx_use: 0,
            mtu: 1500,
            received: Vec::new(),
            sent: 0,
            last: [0; COUNTERS.len()],
            total: [0; COUNTERS.len()],
            up: false,
        };
        driver.reset(true);
        driver.last = COUNTERS.map(|counter| driver.world.read(counter));
        driver.up();
        driver
    }

    fn v2p(&mut self) -> u32 {
        let value = self.world.read(V2PMAILBOX) | self.latched;
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

    fn lock(&mut self) {
        for _ in 0..200 {
            self.world.write(V2PMAILBOX, VFU);
            if self.v2p() & VFU != 0 {
                return;
            }
            self.world.tick();
        }
        panic!("the mailbox is never free");
    }

    /// write_posted and read_posted: the answer.
    pub fn say(&mut self, words: &[u32]) -> [u32; 3] {
        self.lock();
        self.latched = 0;
        for (at, word) in (0..).zip(words) {
            self.world.write(VMBMEM + 4 * at, *word);
        }
        self.world.write(V2PMAILBOX, REQ);
        self.poll(PFACK);
        self.poll(PFSTS);
        self.lock();
        let answer = [0, 1, 2].map(|at| self.world.read(VMBMEM + 4 * at));
        self.world.write(V2PMAILBOX, ACK);
        assert_eq!(answer[0] & 0xffff, words[0] & 0xffff, "the answer is to what was asked");
        assert_ne!(answer[0] & MESSAGE_ACK, 0, "it is accepted");
        answer
    }

    /// e1000_reset_hw_vf and e1000_init_hw_vf.
    fn reset(&mut self, first: bool) {
        let control = self.world.read(CTRL);
        self.world.write(CTRL, control | CTRL_RST);
        self.latched = 0;
        self.poll(RSTD);
        let answer = self.say(&[MESSAGE_RESET]);
        let [a, b, c, d] = answer[1].to_le_bytes();
        let [e, f, ..] = answer[2].to_le_bytes();
        // The PF has it back to the address of its own until it is told.
        let own = [a, b, c, d, e, f];
        let mac = if first { own } else { self.world.mac };
        self.world.mac = own;
        let [a, b, c, d, e, f] = mac;
        self.say(&[MESSAGE_MAC, u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0])]);
        self.world.mac = mac;
    }

    /// igbvf_up: igbvf_configure, then interrupts.
    fn up(&mut self) {
        self.say(&[MESSAGE_MULTICAST | 3 << 16, 0x0123_0456, 0x0789]);
        for vlan in [10, 20, 30] {
            self.say(&[MESSAGE_VLAN | 1 << 16, vlan]);
        }
        self.say(&[MESSAGE_VLAN, 20]);
        self.configure_tx();
        self.configure_rx();
        self.alloc_rx_buffers();
        self.world.write(IVAR0, (IVAR_VALID | 1) << 8 | IVAR_VALID);
        self.world.write(IVAR_MISC, IVAR_VALID | 2);
        for vector in 0..3 {
            self.world.write(EITR + 4 * vector, 488);
        }
        self.world.write(EIAC, 7);
        self.world.write(EIAM, 7);
        self.world.write(EIMS, 7);
        self.up = true;
        self.world.injecting = true;
    }

    fn configure_tx(&mut self) {
        let control = self.world.read(TX + DCTL);
        self.world.write(TX + DCTL, control & !ENABLE);
        self.world.tick();
        self.world.tick();
        self.world.write(TX + LEN, self.tx_count * DESCRIPTOR);
        self.world.write(TX + BAL, TX_RING as u32);
        self.world.write(TX + BAH, 0);
        self.world.write(TX + HEAD, 0);
        self.world.write(TX + TAIL, 0);
        let dca = self.world.read(TX + DCA);
        self.world.write(TX + DCA, dca & !(1 << 11));
        self.world.write(TX + DCTL, control | ENABLE | 0x0101_0800);
        (self.tx_clean, self.tx_use) = (0, 0);
    }

    fn buffer(&self) -> u32 {
        if self.mtu > 1500 { 1024 } else { 2048 }
    }

    fn configure_rx(&mut self) {
        self.world.write(RX + SRRCTL, (self.buffer() / 1024) | (1 << 25));
        let control = self.world.read(RX + DCTL);
        self.world.write(RX + DCTL, control & !ENABLE);
        self.world.tick();
        self.world.tick();
        self.world.write(RX + BAL, RX_RING as u32);
        self.world.write(RX + BAH, 0);
        self.world.write(RX + LEN, self.rx_count * DESCRIPTOR);
        self.world.write(RX + HEAD, 0);
        self.world.write(RX + TAIL, 0);
        self.say(&[MESSAGE_LPE, self.mtu + 18 + 4]);
        self.world.write(RX + DCTL, control | ENABLE | 0x0004_0808);
        (self.rx_clean, self.rx_use) = (0, 0);
        self.partial.clear();
    }

    fn next(index: u32, count: u32) -> u32 {
        (index + 1) % count
    }

    /// All that are free but one.
    fn alloc_rx_buffers(&mut self) {
        let from = self.rx_use;
        while Self::next(self.rx_use, self.rx_count) != self.rx_clean {
            let mut descriptor = [0; 16];
            let address = RX_BUFFERS + u64::from(self.rx_use) * SLOT;
            descriptor[..8].copy_from_slice(&address.to_le_bytes());
            self.world.store(RX_RING + u64::from(self.rx_use * DESCRIPTOR), &descriptor);
            self.rx_use = Self::next(self.rx_use, self.rx_count);
        }
        if self.rx_use != from {
            self.world.write(RX + TAIL, self.rx_use);
        }
    }

    fn clean_rx(&mut self) {
        loop {
            let at = RX_RING + u64::from(self.rx_clean * DESCRIPTOR);
            let status = u32::from_le_bytes(self.world.load(at + 8));
            if status & DD == 0 {
                break;
            }
            let len = u16::from_le_bytes(self.world.load(at + 12));
            let part = self.world.bytes(RX_BUFFERS + u64::from(self.rx_clean) * SLOT, len.into());
            self.partial.extend(part);
            if status & RX_EOP != 0 {
                let whole = std::mem::take(&mut self.partial);
                self.received.push(number(&whole).expect("a frame as it was sent"));
            }
            self.world.store(at + 8, &[0; 4]);
            self.rx_clean = Self::next(self.rx_clean, self.rx_count);
            let free = (self.rx_clean + self.rx_count - self.rx_use) % self.rx_count;
            if free > BUNCH {
                self.alloc_rx_buffers();
            }
        }
        self.alloc_rx_buffers();
    }

    /// igbvf_xmit_frame: two buffers, the second with EOP and RS. `false`: no room.
    pub fn send(&mut self) -> bool {
        let free = (self.tx_clean + self.tx_count - self.tx_use - 1) % self.tx_count;
        if free < 3 {
            return false;
        }
        let frame = frame(PEER, self.sent, 64 + (self.sent % 11) as usize * 60);
        let (header, body) = frame.split_at(40);
        for (part, last) in [(header, false), (body, true)] {
            let buffer = TX_BUFFERS + u64::from(self.tx_use) * SLOT;
            self.world.store(buffer, part);
            let command = TX_DEXT | TX_DATA | if last { TX_EOP | TX_RS } else { 0 } | part.len() as u32;
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&buffer.to_le_bytes());
            descriptor[8..12].copy_from_slice(&command.to_le_bytes());
            self.world.store(TX_RING + u64::from(self.tx_use * DESCRIPTOR), &descriptor);
            self.tx_use = Self::next(self.tx_use, self.tx_count);
        }
        self.sent += 1;
        self.world.write(TX + TAIL, self.tx_use);
        true
    }

    fn clean_tx(&mut self) {
        while self.tx_clean != self.tx_use {
            let last = Self::next(self.tx_clean, self.tx_count);
            let at = TX_RING + u64::from(last * DESCRIPTOR) + 12;
            if u32::from_le_bytes(self.world.load(at)) & DD == 0 {
                break;
            }
            self.world.store(at, &[0; 4]);
            self.tx_clean = Self::next(last, self.tx_count);
        }
    }

    /// The three handlers. Nothing is looked at that no vector announced.
    pub fn interrupts(&mut self) {
        let [rx, tx, other] = self.world.vectors();
        if !self.up {
            return;
        }
        if rx {
            self.world.write(EITR, 488);
            self.clean_rx();
            self.world.write(EIMS, 1);
        }
        if tx {
            self.clean_tx();
            self.world.write(EIMS, 2);
        }
        if other {
            self.world.write(EIMS, 4);
        }
    }

    /// igbvf_watchdog_task without what it does about lost interrupts: link, counters.
    pub fn watchdog(&mut self) {
        assert_ne!(self.world.read(STATUS) & STATUS_LU, 0, "the link is up");
        self.v2p();
        for (at, counter) in COUNTERS.into_iter().enumerate() {
            let now = self.world.read(counter);
            // igbvf takes a counter that has fallen for one that has wrapped.
            let more = now.wrapping_sub(self.last[at]);
            assert!(more < 1 << 24, "counter {counter:#x} fell from {:#x} to {now:#x}", self.last[at]);
            self.total[at] += u64::from(more);
            self.last[at] = now;
        }
    }

    pub fn counted(&self, counter: u64) -> u64 {
        let at = COUNTERS.iter().position(|own| *own == counter).expect("a counter");
        self.total[at]
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
            if all && self.tx_clean == self.tx_use {
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

    /// igbvf_down.
    fn down(&mut self) {
        self.drain();
        self.up = false;
        let control = self.world.read(RX + DCTL);
        self.world.write(RX + DCTL, control & !ENABLE);
        let control = self.world.read(TX + DCTL);
        self.world.write(TX + DCTL, control & !ENABLE);
        self.world.tick();
        self.world.tick();
        self.world.write(EIMC, !0);
        self.world.write(EIAC, 0);
        self.watchdog();
        self.reset(false);
    }

    pub fn change_mtu(&mut self, mtu: u32) {
        self.down();
        self.mtu = mtu;
        self.up();
    }

    pub fn resize(&mut self, rx: u32, tx: u32) {
        self.down();
        (self.rx_count, self.tx_count) = (rx, tx);
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
    pub fn finish(mut self) -> World {
        self.drain();
        self.watchdog();
        let (received, sent) = (self.counted(VFGPRC), self.counted(VFGPTC));
        assert_eq!(received, self.received.len() as u64, "the counter of received packets");
        assert_eq!(sent, self.sent, "the counter of sent packets");
        self.world.finish(&self.received, self.sent);
        self.world
    }
}
