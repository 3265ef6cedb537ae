//! The driver of an 82574L, as Linux's e1000e does it with INTA#: extended receive descriptors, data descriptors with a context for sums.

use ioplane_device::RegisterAddress;
use ioplane_memory::GuestView;
use ioplane_network::Mac;

use super::Reach;

// What the driver calls them.
const CTRL: u64 = 0x0000;
const STATUS: u64 = 0x0008;
const EECD: u64 = 0x0010;
const EERD: u64 = 0x0014;
const CTRL_EXT: u64 = 0x0018;
const MDIC: u64 = 0x0020;
const ICR: u64 = 0x00c0;
const ITR: u64 = 0x00c4;
const ICS: u64 = 0x00c8;
const IMS: u64 = 0x00d0;
const IMC: u64 = 0x00d8;
const IAM: u64 = 0x00e0;
const RCTL: u64 = 0x0100;
const TCTL: u64 = 0x0400;
const TIPG: u64 = 0x0410;
const RDBAL: u64 = 0x2800;
const RDT: u64 = 0x2818;
const TDBAL: u64 = 0x3800;
const TDT: u64 = 0x3818;
const RFCTL: u64 = 0x5008;
const MTA: u64 = 0x5200;
const RAL0: u64 = 0x5400;
const VFTA: u64 = 0x5600;

const CTRL_RST: u32 = 1 << 26;
const CTRL_SLU: u32 = 1 << 6;
const AUTO_RD: u32 = 1 << 9;
const IAME: u32 = 1 << 27;
const EN: u32 = 1 << 1;
const BAM: u32 = 1 << 15;
const SECRC: u32 = 1 << 26;
const EXTEN: u32 = 1 << 15;
const ASSERTED: u32 = 1 << 31;
/// Of the causes: sent, received, link.
const TXDW: u32 = 1;
const LSC: u32 = 1 << 2;
const RXDMT0: u32 = 1 << 4;
const RXT0: u32 = 1 << 7;
const WANTED: u32 = TXDW | LSC | RXDMT0 | RXT0;
/// Of descriptors.
const DD: u32 = 1;
const EOP: u32 = 1 << 24;
const RS: u32 = 1 << 27;
const DEXT: u32 = 1 << 29;
const DATA: u32 = 1 << 20;
const TXSM: u32 = 1 << 9;

const RING: u64 = 64;
/// From one buffer to the next.
const STRIDE: u64 = 2048;

/// How a frame is sent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sending<'a> {
    /// Where it is cut, in bytes from its beginning, rising.
    pub at: &'a [usize],
    /// Sum up from this byte to the end, into those two bytes: by a context descriptor of its own.
    pub sum: Option<(u8, u8)>,
    /// Sum up as the last context said.
    pub again: bool,
    /// By legacy descriptors.
    pub legacy: bool,
}

pub struct E1000e<R> {
    pub reach: R,
    memory: GuestView,
    base: u64,
    legacy: bool,
    posts: u64,
    tx_next: u64,
    tx_clean: u64,
    rx_clean: u64,
}

impl<R: Reach> E1000e<R> {
    /// Where the rings and the buffers are in its memory, and how much that is.
    pub const RX_RING: u64 = 0;
    pub const TX_RING: u64 = 0x1000;
    pub const RX_BUFFERS: u64 = 0x2000;
    pub const TX_BUFFERS: u64 = Self::RX_BUFFERS + RING * STRIDE;
    pub const MEMORY: u64 = Self::TX_BUFFERS + RING * STRIDE;
    pub const RING: u64 = RING;

    /// A driver with [`E1000e::MEMORY`] bytes of memory from `base`, a multiple of a page.
    pub fn new(reach: R, memory: GuestView, base: u64) -> Self {
        E1000e { reach, memory, base, legacy: false, posts: RING - 1, tx_next: 0, tx_clean: 0, rx_clean: 0 }
    }

    /// It receives by legacy descriptors.
    pub fn by_legacy_descriptors(mut self) -> Self {
        self.legacy = true;
        self
    }

    /// It gives the card so many buffers when it opens.
    pub fn with_buffers(mut self, posts: u64) -> Self {
        self.posts = posts;
        self
    }

    /// The same driver, its registers reached another way: they have moved to another card.
    pub fn map<S: Reach>(self, to: impl FnOnce(R) -> S) -> E1000e<S> {
        let E1000e { reach, memory, base, legacy, posts, tx_next, tx_clean, rx_clean } = self;
        E1000e { reach: to(reach), memory, base, legacy, posts, tx_next, tx_clean, rx_clean }
    }

    pub fn get(&mut self, register: u64) -> Result<u32, String> {
        self.reach.read(RegisterAddress::Bar(0, register), 4)
    }

    pub fn put(&mut self, register: u64, value: u32) -> Result<(), String> {
        self.reach.write(RegisterAddress::Bar(0, register), 4, value)
    }

    fn said(fault: ioplane_memory::GuestFault) -> String {
        fault.to_string()
    }

    fn store(&self, at: u64, bytes: &[u8]) -> Result<(), String> {
        self.memory.write(self.base + at, bytes).map_err(Self::said)
    }

    /// A descriptor of one of the rings.
    pub fn words(&self, ring: u64, index: u64) -> Result<[u32; 4], String> {
        let bytes: [u8; 16] = self.memory.bytes(self.base + ring + index * 16).map_err(Self::said)?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Ok([word(0), word(4), word(8), word(12)])
    }

    pub fn describe(&self, ring: u64, index: u64, words: [u32; 4]) -> Result<(), String> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.store(ring + index * 16, &bytes)
    }

    /// A register of the transceiver at address 1.
    pub fn phy(&mut self, register: u32) -> Result<u16, String> {
        self.put(MDIC, 2 << 26 | 1 << 21 | register << 16)?;
        for _ in 0..100 {
            let value = self.get(MDIC)?;
            if value & 1 << 28 != 0 {
                return Ok(value as u16);
            }
        }
        Err("MDI Read did not complete".into())
    }

    /// A word of the NVM.
    pub fn nvm(&mut self, word: u32) -> Result<u16, String> {
        self.put(EERD, word << 2 | 1)?;
        for _ in 0..100 {
            let value = self.get(EERD)?;
            if value & 2 != 0 {
                return Ok((value >> 16) as u16);
            }
        }
        Err("NVM read did not complete".into())
    }

    fn reset(&mut self) -> Result<(), String> {
        self.put(IMC, !0)?;
        self.put(RCTL, 0)?;
        self.put(TCTL, 1 << 3)?;
        self.get(STATUS)?;
        let ctrl = self.get(CTRL)?;
        self.put(CTRL, ctrl | CTRL_RST)?;
        if self.get(EECD)? & AUTO_RD == 0 {
            return Err("auto read of the NVM did not complete".into());
        }
        self.put(IMC, !0)?;
        self.get(ICR)?;
        Ok(())
    }

    /// What the driver does when it finds the card: its address.
    pub fn probe(&mut self) -> Result<Mac, String> {
        self.reach.enable(true)?;
        self.reset()?;
        self.phy(2)?;
        let mut mac = [0; 6];
        for word in 0..3 {
            let [low, high] = self.nvm(word)?.to_le_bytes();
            (mac[word as usize * 2], mac[word as usize * 2 + 1]) = (low, high);
        }
        Ok(mac)
    }

    /// Brings the interface up.
    pub fn open(&mut self, mac: Mac) -> Result<(), String> {
        self.reach.enable(true)?;
        self.reset()?;
        (self.tx_next, self.tx_clean, self.rx_clean) = (0, 0, 0);
        let [a, b, c, d, e, f] = mac;
        self.put(RAL0, u32::from_le_bytes([a, b, c, d]))?;
        self.put(RAL0 + 4, u32::from_le_bytes([e, f, 0, 0]) | 1 << 31)?;
        for other in 1..15 {
            self.put(RAL0 + other * 8, 0)?;
            self.put(RAL0 + other * 8 + 4, 0)?;
        }
        for word in 0..128 {
            self.put(MTA + word * 4, 0)?;
            self.put(VFTA + word * 4, 0)?;
        }
        let ctrl = self.get(CTRL)?;
        self.put(CTRL, ctrl | CTRL_SLU)?;
        self.put(ITR, 488)?;
        self.place(TDBAL, Self::TX_RING)?;
        self.put(TIPG, 0x0060_2008)?;
        self.put(TCTL, 1 << 3 | EN | 0xf << 4 | 0x3f << 12)?;
        // The receiver is on before it has a ring.
        self.put(RFCTL, if self.legacy { 0 } else { EXTEN })?;
        self.put(RCTL, EN | BAM | SECRC)?;
        self.put(IAM, !0)?;
        let ext = self.get(CTRL_EXT)?;
        self.put(CTRL_EXT, ext | IAME)?;
        self.place(RDBAL, Self::RX_RING)?;
        for index in 0..RING {
            self.give_buffer(index)?;
        }
        self.put(RDT, self.posts as u32)?;
        self.put(IMS, WANTED)?;
        if self.get(STATUS)? & 2 == 0 {
            return Err("the link is down".into());
        }
        Ok(())
    }

    fn place(&mut self, low: u64, ring: u64) -> Result<(), String> {
        let address = self.base + ring;
        self.put(low, address as u32)?;
        self.put(low + 4, (address >> 32) as u32)?;
        self.put(low + 8, RING as u32 * 16)?;
        // Head, tail.
        self.put(low + 0x10, 0)?;
        self.put(low + 0x18, 0)
    }

    fn give_buffer(&self, index: u64) -> Result<(), String> {
        let address = self.base + Self::RX_BUFFERS + index * STRIDE;
        self.describe(Self::RX_RING, index, [address as u32, (address >> 32) as u32, 0, 0])
    }

    /// Takes the interface down.
    pub fn close(&mut self) -> Result<(), String> {
        self.put(IMC, !0)?;
        self.reset()
    }

    /// Free transmit descriptors.
    pub fn free(&self) -> u64 {
        (self.tx_clean + RING - 1 - self.tx_next) % RING
    }

    /// Puts a frame into the ring, without writing the tail.
    pub fn queue(&mut self, frame: &[u8], how: Sending<'_>) -> Result<(), String> {
        let ends = how.at.iter().copied().chain([frame.len()]);
        let starts = [0].into_iter().chain(how.at.iter().copied());
        let pieces: Vec<_> = starts.zip(ends).collect();
        if self.free() < pieces.len() as u64 + 1 {
            return Err("no descriptors".into());
        }
        if let Some((start, offset)) = how.sum {
            let words = [0, u32::from(start) | u32::from(offset) << 8, DEXT, 0];
            self.describe(Self::TX_RING, self.tx_next, words)?;
            self.tx_next = (self.tx_next + 1) % RING;
        }
        let last = pieces.len() - 1;
        for (n, (from, to)) in pieces.into_iter().enumerate() {
            let buffer = Self::TX_BUFFERS + self.tx_next * STRIDE;
            self.store(buffer, &frame[from..to])?;
            let address = self.base + buffer;
            let kind = if how.legacy { 0 } else { DEXT | DATA };
            let end = if n == last { EOP | RS } else { 0 };
            let sums = if how.sum.is_some() || how.again { TXSM } else { 0 };
            let words = [address as u32, (address >> 32) as u32, kind | end | (to - from) as u32, sums];
            self.describe(Self::TX_RING, self.tx_next, words)?;
            self.tx_next = (self.tx_next + 1) % RING;
        }
        Ok(())
    }

    /// Writes the tail.
    pub fn kick(&mut self) -> Result<(), String> {
        self.put(TDT, self.tx_next as u32)
    }

    pub fn xmit(&mut self, frame: &[u8], how: Sending<'_>) -> Result<(), String> {
        self.queue(frame, how)?;
        self.kick()
    }

    /// Takes back what was sent: how many frames.
    pub fn reclaim(&mut self) -> Result<u32, String> {
        let mut done = 0;
        let mut at = self.tx_clean;
        while at != self.tx_next {
            let words = self.words(Self::TX_RING, at)?;
            at = (at + 1) % RING;
            if words[2] & EOP == 0 || words[2] & DEXT != 0 && words[2] & DATA == 0 {
                continue;
            }
            if words[3] & DD == 0 {
                break;
            }
            done += 1;
            self.tx_clean = at;
        }
        Ok(done)
    }

    /// The interrupt handler: what the card says. Everything is masked from here on until [`E1000e::poll`] ends. `None`: it was not this card.
    pub fn interrupt(&mut self) -> Result<Option<u32>, String> {
        let icr = self.get(ICR)?;
        // The mask follows only where this was asserted.
        Ok((icr & ASSERTED != 0).then_some(icr & !ASSERTED))
    }

    /// What has been received; then the card may interrupt again.
    pub fn poll(&mut self) -> Result<Vec<Vec<u8>>, String> {
        let mut all = Vec::new();
        let mut frame = Vec::new();
        let first = self.rx_clean;
        loop {
            let words = self.words(Self::RX_RING, self.rx_clean)?;
            let (status, length) =
                if self.legacy { (words[3], words[2] & 0xffff) } else { (words[2], words[3] & 0xffff) };
            if status & DD == 0 {
                break;
            }
            let mut bytes = vec![0; length as usize];
            let buffer = self.base + Self::RX_BUFFERS + self.rx_clean * STRIDE;
            self.memory.read(buffer, &mut bytes).map_err(Self::said)?;
            frame.extend(bytes);
            if status & 2 != 0 {
                all.push(std::mem::take(&mut frame));
            }
            self.give_buffer(self.rx_clean)?;
            self.rx_clean = (self.rx_clean + 1) % RING;
        }
        if self.rx_clean != first {
            self.put(RDT, ((self.rx_clean + RING - 1) % RING) as u32)?;
        }
        self.put(IMS, WANTED)?;
        Ok(all)
    }

    /// Has the card interrupt for this.
    pub fn cause(&mut self, bits: u32) -> Result<(), String> {
        self.put(ICS, bits)
    }
}
