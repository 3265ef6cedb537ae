//! In what chips differ: where their registers are, and how their physical function answers.

use super::pf::PfState;
use super::spec::MAILBOX_WORDS;

/// A kind of virtual function.
pub trait Chip: Send + 'static {
    /// Of its registers.
    const LAYOUT: RegisterLayout;

    /// The physical function's answer to a message.
    fn answer(pf: &mut PfState, message: &[u32; MAILBOX_WORDS]) -> [u32; MAILBOX_WORDS];

    /// Whether frames that are for somebody else are delivered as well: to groups, or to one address.
    fn promiscuous(pf: &PfState, group: bool) -> bool;
}

/// Offsets of registers in BAR 0, all of 32 bits, and what a reset does.
#[derive(Debug, Clone, Copy)]
pub struct RegisterLayout {
    /// PCI device ID.
    pub device: u16,
    /// Has the bit that resets.
    pub control: u64,
    /// Says whether there is a link: the register and the bits, with the speed if it has that.
    pub link: (u64, u32),
    /// First word of the mailbox.
    pub memory: u64,
    /// Control register of the mailbox.
    pub mailbox: u64,
    /// PSRTYPE: how headers are split and frames are shared out.
    pub split: u64,
    /// Registers that read as written, with no effect here.
    pub plain: &'static [u64],
    /// Counters.
    pub counters: &'static [CounterPlace],
    /// Causes and vectors.
    pub interrupts: InterruptLayout,
    /// Receive queues.
    pub receive: QueueLayout,
    /// Transmit queues.
    pub transmit: QueueLayout,
    /// A reset leaves heads, tails, control registers and buffer sizes of the queues, and how frames are split, as they are.
    pub reset_keeps: bool,
    /// Nothing is received or sent before the physical function has answered RESET.
    pub gated: bool,
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statistic {
    /// Frames received.
    Received,
    /// Bytes of these.
    ReceivedBytes,
    /// Frames to groups received.
    Multicast,
    /// Frames sent.
    Sent,
    /// Bytes of these.
    SentBytes,
    /// What this model has none of.
    Nothing,
}

/// Where a counter is.
#[derive(Debug, Clone, Copy)]
pub struct CounterPlace {
    /// Its register, or the low half.
    pub low: u64,
    /// The high half, and its bits.
    pub high: Option<(u64, u32)>,
    /// What it counts.
    pub counts: Statistic,
}

impl CounterPlace {
    /// One of 32 bits.
    pub const fn word(low: u64, counts: Statistic) -> CounterPlace {
        CounterPlace { low, high: None, counts }
    }

    /// One of 36 bits.
    pub const fn wide(low: u64, high: u64, counts: Statistic) -> CounterPlace {
        CounterPlace { low, high: Some((high, 0xf)), counts }
    }

    /// All its bits.
    pub(crate) fn mask(&self) -> u64 {
        u64::from(u32::MAX) | self.high.map_or(0, |(_, bits)| u64::from(bits) << 32)
    }
}

/// Registers of causes and vectors.
#[derive(Debug, Clone, Copy)]
pub struct InterruptLayout {
    /// EICR.
    pub cause: u64,
    /// EICS.
    pub set: u64,
    /// EIMS.
    pub mask: u64,
    /// EIMC.
    pub unmask: u64,
    /// EIAC.
    pub auto_clear: u64,
    /// EIAM.
    pub auto_mask: u64,
    /// EITR of vector 0; the others follow.
    pub throttle: u64,
    /// IVAR of queues 0 and 1; the others follow.
    pub queues: u64,
    /// IVAR_MISC.
    pub misc: u64,
}

/// Registers of queues.
#[derive(Debug, Clone, Copy)]
pub struct QueueLayout {
    /// Those of queue 0 begin here.
    pub from: u64,
    /// Bytes to those of the next queue.
    pub stride: u64,
    /// Queues.
    pub count: usize,
    /// A queue's registers, by their distance from its first one.
    pub registers: &'static [(u64, QueueRegister)],
}

/// A register of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueRegister {
    /// RDBAL, TDBAL.
    BaseLow,
    /// RDBAH, TDBAH.
    BaseHigh,
    /// RDLEN, TDLEN.
    Length,
    /// SRRCTL.
    Shape,
    /// RDH, TDH.
    Head,
    /// RDT, TDT.
    Tail,
    /// DCA_RXCTRL, DCA_TXCTRL.
    Dca,
    /// RXDCTL, TXDCTL.
    Control,
    /// RQDPC.
    Dropped,
    /// TDWBAL.
    HeadLow,
    /// TDWBAH.
    HeadHigh,
}

impl QueueLayout {
    /// Which queue's register this is.
    pub(crate) fn find(&self, offset: u64) -> Option<(usize, QueueRegister)> {
        let at = offset.checked_sub(self.from)?;
        let queue = usize::try_from(at / self.stride).ok().filter(|queue| *queue < self.count)?;
        let found = self.registers.iter().find(|(own, _)| *own == at % self.stride)?;
        Some((queue, found.1))
    }

    /// Where a register of queue 0 is.
    ///
    /// # Panics
    ///
    /// The chip has none.
    pub fn at(&self, register: QueueRegister) -> u64 {
        let found = self.registers.iter().find(|(_, own)| *own == register);
        self.from + found.expect("a register of this chip").0
    }
}
