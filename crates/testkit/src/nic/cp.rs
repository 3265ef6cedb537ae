//! The driver of an RTL8139C+, as Linux's 8139cp does it: two rings of 64 descriptors.

use ioplane_device::RegisterAddress;
use ioplane_memory::GuestView;
use ioplane_network::Mac;

use super::Reach;

// What the driver calls them.
const MAC0: u64 = 0x00;
const MAR0: u64 = 0x08;
const STATS_ADDR: u64 = 0x10;
const TX_RING_ADDR: u64 = 0x20;
const HI_TX_RING_ADDR: u64 = 0x28;
const CMD: u64 = 0x37;
const INTR_MASK: u64 = 0x3c;
const INTR_STATUS: u64 = 0x3e;
const TX_CONFIG: u64 = 0x40;
const RX_CONFIG: u64 = 0x44;
const CFG9346: u64 = 0x50;
const CONFIG1: u64 = 0x52;
const CONFIG3: u64 = 0x59;
const MULTI_INTR: u64 = 0x5c;
const BASIC_MODE_STATUS: u64 = 0x64;
const CONFIG5: u64 = 0xd8;
const TX_POLL: u64 = 0xd9;
const CP_CMD: u64 = 0xe0;
const RX_RING_ADDR: u64 = 0xe4;
const TX_THRESH: u64 = 0xec;

const DESC_OWN: u32 = 1 << 31;
const RING_END: u32 = 1 << 30;
const FIRST_FRAG: u32 = 1 << 29;
const LAST_FRAG: u32 = 1 << 28;

const CMD_RESET: u32 = 0x10;
const RX_ON: u32 = 0x08;
const TX_ON: u32 = 0x04;
const NORMAL_TX_POLL: u32 = 1 << 6;
const DUMP_STATS: u32 = 1 << 3;
const CP_ON: u32 = 3;

/// All that it wants to be interrupted for, and the part that is left to polling.
const NORX: u32 = 0x80ac;
const RX: u32 = 0x0053;

const RING: u64 = 64;
/// Bytes of a receive buffer, as the driver says it, and from one to the next.
const BUFFER: u32 = 1536;
const STRIDE: u64 = 2048;

/// How a frame is laid into descriptors.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cut<'a> {
    /// Where it is cut, in bytes from its beginning, rising.
    pub at: &'a [usize],
    /// Bits of the first words besides those that every frame has: sums, large send.
    pub opts1: u32,
    /// The second words: a tag.
    pub opts2: u32,
}

/// A frame as a receive descriptor has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// First word.
    pub opts1: u32,
    /// Second word.
    pub opts2: u32,
    /// The bytes, without the check sequence.
    pub bytes: Vec<u8>,
    /// The check sequence.
    pub fcs: [u8; 4],
}

pub struct Cp<R> {
    pub reach: R,
    bar: u8,
    memory: GuestView,
    base: u64,
    cpcmd: u32,
    tx_head: u64,
    tx_tail: u64,
    rx_tail: u64,
}

impl<R: Reach> Cp<R> {
    /// Bytes of guest memory that it uses.
    pub const MEMORY: u64 = Self::TX_BUFFERS + RING * STRIDE;
    /// Where the receive buffers are in these; only the card stores there.
    pub const RX_BUFFERS: std::ops::Range<u64> = 0x1000..0x1000 + RING * STRIDE;
    const TX_RING: u64 = RING * 16;
    const STATS: u64 = 2 * RING * 16;
    const TX_BUFFERS: u64 = Self::RX_BUFFERS.end;

    /// A driver with [`Cp::MEMORY`] bytes of memory from `base`, a multiple of a page, on the registers in memory.
    pub fn new(reach: R, memory: GuestView, base: u64) -> Self {
        Cp { reach, bar: 1, memory, base, cpcmd: CP_ON, tx_head: 0, tx_tail: 0, rx_tail: 0 }
    }

    /// The same driver, its registers reached another way: they have moved to another card.
    pub fn map<S: Reach>(self, to: impl FnOnce(R) -> S) -> Cp<S> {
        let Cp { reach, bar, memory, base, cpcmd, tx_head, tx_tail, rx_tail } = self;
        Cp { reach: to(reach), bar, memory, base, cpcmd, tx_head, tx_tail, rx_tail }
    }

    /// On the registers in port space instead.
    pub fn by_ports(mut self) -> Self {
        self.bar = 0;
        self
    }

    /// With these bits in the C+ command register too: receive checksums 0x20, VLAN tags taken off 0x40.
    pub fn with_features(mut self, bits: u32) -> Self {
        self.cpcmd |= bits;
        self
    }

    /// Reads a register of `width` bytes.
    pub fn get(&mut self, register: u64, width: usize) -> Result<u32, String> {
        self.reach.read(RegisterAddress::Bar(self.bar, register), width)
    }

    /// Writes a register of `width` bytes.
    pub fn put(&mut self, register: u64, width: usize, value: u32) -> Result<(), String> {
        self.reach.write(RegisterAddress::Bar(self.bar, register), width, value)
    }

    /// Writes a register and reads it, as the driver does to get its write through.
    fn flush(&mut self, register: u64, width: usize, value: u32) -> Result<(), String> {
        self.put(register, width, value)?;
        self.get(register, width).map(drop)
    }

    fn said(fault: ioplane_memory::GuestFault) -> String {
        fault.to_string()
    }

    fn store(&self, at: u64, bytes: &[u8]) -> Result<(), String> {
        self.memory.write(self.base + at, bytes).map_err(Self::said)
    }

    fn word(&self, at: u64) -> Result<u32, String> {
        self.memory.bytes(self.base + at).map(u32::from_le_bytes).map_err(Self::said)
    }

    fn describe(&self, at: u64, opts1: u32, opts2: u32, address: u64) -> Result<(), String> {
        self.store(at + 4, &opts2.to_le_bytes())?;
        self.store(at + 8, &address.to_le_bytes())?;
        // Ownership last.
        self.store(at, &opts1.to_le_bytes())
    }

    fn give_buffer(&self, index: u64) -> Result<(), String> {
        let end = if index == RING - 1 { RING_END } else { 0 };
        let address = self.base + Self::RX_BUFFERS.start + index * STRIDE;
        self.describe(index * 16, DESC_OWN | end | BUFFER, 0, address)
    }

    /// Brings the interface up. `mac` goes into the station address.
    pub fn open(&mut self, mac: Mac) -> Result<(), String> {
        self.reach.enable(true)?;
        for index in 0..RING {
            self.give_buffer(index)?;
            self.describe(Self::TX_RING + index * 16, if index == RING - 1 { RING_END } else { 0 }, 0, 0)?;
        }
        (self.tx_head, self.tx_tail, self.rx_tail) = (0, 0, 0);
        self.put(CMD, 1, CMD_RESET)?;
        if self.get(CMD, 1)? & CMD_RESET != 0 {
            return Err("hardware reset timeout".into());
        }
        self.flush(CFG9346, 1, 0xc0)?;
        let [a, b, c, d, e, f] = mac;
        self.flush(MAC0, 4, u32::from_le_bytes([a, b, c, d]))?;
        self.flush(MAC0 + 4, 4, u32::from_le_bytes([e, f, 0, 0]))?;
        self.start()?;
        self.put(TX_THRESH, 1, 6)?;
        self.flush(RX_CONFIG, 4, 5 << 13 | 4 << 8 | 0x0a)?;
        self.flush(MAR0, 4, 0)?;
        self.flush(MAR0 + 4, 4, 0)?;
        self.flush(TX_CONFIG, 4, 3 << 24 | 6 << 8)?;
        let config1 = self.get(CONFIG1, 1)?;
        self.put(CONFIG1, 1, config1 | 0x21)?;
        self.put(CONFIG3, 1, 0x40)?;
        let config5 = self.get(CONFIG5, 1)?;
        self.put(CONFIG5, 1, config5 & 1)?;
        self.put(MULTI_INTR, 2, 0)?;
        self.flush(CFG9346, 1, 0)?;
        self.flush(INTR_MASK, 2, NORX | RX)?;
        if self.get(BASIC_MODE_STATUS, 2)? & 4 == 0 {
            return Err("the link is down".into());
        }
        Ok(())
    }

    fn start(&mut self) -> Result<(), String> {
        self.put(CP_CMD, 2, self.cpcmd)?;
        self.flush(HI_TX_RING_ADDR, 4, 0)?;
        self.flush(HI_TX_RING_ADDR + 4, 4, 0)?;
        for (register, ring) in [(RX_RING_ADDR, self.base), (TX_RING_ADDR, self.base + Self::TX_RING)] {
            self.flush(register, 4, ring as u32)?;
            self.flush(register + 4, 4, (ring >> 32) as u32)?;
        }
        self.put(CMD, 1, RX_ON | TX_ON)
    }

    /// Takes the interface down.
    pub fn close(&mut self) -> Result<(), String> {
        let status = self.get(INTR_STATUS, 2)?;
        self.put(INTR_STATUS, 2, !status)?;
        self.flush(INTR_MASK, 2, 0)?;
        self.put(CMD, 1, 0)?;
        self.flush(CP_CMD, 2, 0)
    }

    /// Free transmit descriptors.
    pub fn free(&self) -> u64 {
        (self.tx_tail + RING - 1 - self.tx_head) % RING
    }

    /// Puts a frame into the ring, without ringing.
    pub fn queue(&mut self, frame: &[u8], cut: Cut<'_>) -> Result<(), String> {
        let ends = cut.at.iter().copied().chain([frame.len()]);
        let starts = [0].into_iter().chain(cut.at.iter().copied());
        let pieces: Vec<_> = starts.zip(ends).collect();
        if self.free() < pieces.len() as u64 {
            return Err("Tx ring full when queue awake".into());
        }
        let last = pieces.len() - 1;
        let mut first = None;
        for (n, (from, to)) in pieces.into_iter().enumerate() {
            let index = (self.tx_head + n as u64) % RING;
            let buffer = Self::TX_BUFFERS + index * STRIDE;
            self.store(buffer, &frame[from..to])?;
            let mut opts1 = DESC_OWN | cut.opts1 | (to - from) as u32;
            opts1 |= if index == RING - 1 { RING_END } else { 0 };
            opts1 |= if n == 0 { FIRST_FRAG } else { 0 };
            opts1 |= if n == last { LAST_FRAG } else { 0 };
            if n == 0 {
                first = Some((Self::TX_RING + index * 16, opts1, self.base + buffer));
            } else {
                self.describe(Self::TX_RING + index * 16, opts1, cut.opts2, self.base + buffer)?;
            }
        }
        // The first piece is given to the card last.
        if let Some((at, opts1, address)) = first {
            self.describe(at, opts1, cut.opts2, address)?;
        }
        self.tx_head = (self.tx_head + 1 + last as u64) % RING;
        Ok(())
    }

    pub fn kick(&mut self) -> Result<(), String> {
        self.put(TX_POLL, 1, NORMAL_TX_POLL)
    }

    pub fn xmit(&mut self, frame: &[u8], cut: Cut<'_>) -> Result<(), String> {
        self.queue(frame, cut)?;
        self.kick()
    }

    /// Takes back the descriptors that the card is done with: the first words of those that end a frame.
    pub fn reclaim(&mut self) -> Result<Vec<u32>, String> {
        let mut done = Vec::new();
        while self.tx_tail != self.tx_head {
            let opts1 = self.word(Self::TX_RING + self.tx_tail * 16)?;
            if opts1 & DESC_OWN != 0 {
                break;
            }
            if opts1 & LAST_FRAG != 0 {
                done.push(opts1);
            }
            self.tx_tail = (self.tx_tail + 1) % RING;
        }
        Ok(done)
    }

    /// The interrupt handler: what the card says, with all but receiving acknowledged; receiving is masked until
    /// [`Cp::poll`] has found nothing more. `None`: it was not this card.
    pub fn interrupt(&mut self) -> Result<Option<u32>, String> {
        let status = self.get(INTR_STATUS, 2)?;
        if status == 0 || status == 0xffff {
            return Ok(None);
        }
        self.put(INTR_STATUS, 2, status & !RX)?;
        if status & RX != 0 {
            self.flush(INTR_MASK, 2, NORX)?;
        }
        Ok(Some(status))
    }

    /// What has been received, until there is nothing more; then receiving interrupts again.
    pub fn poll(&mut self) -> Result<Vec<Received>, String> {
        let mut all = Vec::new();
        loop {
            self.put(INTR_STATUS, 2, RX)?;
            while let Some(received) = self.receive()? {
                all.push(received);
            }
            if self.get(INTR_STATUS, 2)? & RX == 0 {
                self.flush(INTR_MASK, 2, NORX | RX)?;
                return Ok(all);
            }
        }
    }

    fn receive(&mut self) -> Result<Option<Received>, String> {
        let at = self.rx_tail * 16;
        let opts1 = self.word(at)?;
        if opts1 & DESC_OWN != 0 {
            return Ok(None);
        }
        let whole = FIRST_FRAG | LAST_FRAG;
        if opts1 & whole != whole {
            return Err(format!("a fragment: {opts1:#x}"));
        }
        let len = (opts1 & 0x1fff) as usize;
        let mut bytes = vec![0; len];
        self.memory
            .read(self.base + Self::RX_BUFFERS.start + self.rx_tail * STRIDE, &mut bytes)
            .map_err(Self::said)?;
        let fcs = bytes.split_off(len.checked_sub(4).ok_or("shorter than a check sequence")?);
        let fcs = [fcs[0], fcs[1], fcs[2], fcs[3]];
        let opts2 = self.word(at + 4)?;
        self.give_buffer(self.rx_tail)?;
        self.rx_tail = (self.rx_tail + 1) % RING;
        Ok(Some(Received { opts1, opts2, bytes, fcs }))
    }

    /// The card's statistics, 64 bytes.
    pub fn stats(&mut self) -> Result<[u8; 64], String> {
        let at = self.base + Self::STATS;
        self.put(STATS_ADDR + 4, 4, (at >> 32) as u32)?;
        self.put(STATS_ADDR, 4, at as u32 | DUMP_STATS)?;
        if self.get(STATS_ADDR, 4)? & DUMP_STATS != 0 {
            return Err("the dump of statistics does not end".into());
        }
        self.put(STATS_ADDR, 4, 0)?;
        self.put(STATS_ADDR + 4, 4, 0)?;
        self.memory.bytes(at).map_err(Self::said)
    }

    /// A word of the EEPROM, whose addresses have so many bits.
    pub fn eeprom(&mut self, address: u32, bits: u32) -> Result<u16, String> {
        const ENABLE: u32 = 0x88;
        self.put(CFG9346, 1, 0x80)?;
        self.put(CFG9346, 1, ENABLE)?;
        let command = 6 << bits | address;
        for bit in (0..bits + 3).rev() {
            let data = (command >> bit & 1) << 1;
            self.flush(CFG9346, 1, ENABLE | data)?;
            self.flush(CFG9346, 1, ENABLE | data | 4)?;
        }
        self.flush(CFG9346, 1, ENABLE)?;
        let mut word = 0;
        for _ in 0..16 {
            self.flush(CFG9346, 1, ENABLE | 4)?;
            word = word << 1 | (self.get(CFG9346, 1)? & 1) as u16;
            self.flush(CFG9346, 1, ENABLE)?;
        }
        self.flush(CFG9346, 1, 0)?;
        Ok(word)
    }
}
