//! A virtual function of Intel's 82599, as the hardware of tests: [`silicon`](crate::silicon) with its registers, and a PF that answers
//! as Linux's ixgbe does.
//!
//! | what is its own | from |
//! |---|---|
//! | a reset leaves VFRDH/T, VFTDH/T, VFPSRTYPE, VFSRRCTL, VFRXDCTL, VFTXDCTL, VFTDWBAL/H and DCA as they were, also queues that are on | specification update, software clarification 5 |
//! | nothing is received or sent until the PF has answered RESET; it switches transmit queues off then | VFRE and VFTE; ixgbe |
//! | counters of octets have 36 bits | ixgbevf |
//! | RESET is refused where no administrator has set an address, and begins nevertheless | ixgbe |
//! | versions of messages; what a version lacks is refused, and RESET takes it back to 1.0 | ixgbe |
//! | where the port takes long frames nothing is delivered before SET_LPE was accepted in version 1.1 | ixgbe, for this chip only |

mod pf;
pub mod spec;

use crate::silicon::{
    Chip, CounterPlace, InterruptLayout, QueueLayout, QueueRegister, RegisterLayout, Statistic,
    VirtualFunction,
};
use spec::*;

pub use crate::silicon::{PfState, SiliconViolation};

/// The function.
pub type Vf82599 = VirtualFunction<Chip82599>;

/// The chip.
#[derive(Debug, Clone, Copy)]
pub enum Chip82599 {}

impl Chip for Chip82599 {
    const LAYOUT: RegisterLayout = RegisterLayout {
        device: DEVICE,
        control: VFCTRL,
        link: (VFLINKS, LINKS_UP | LINKS_SPEED),
        memory: VFMBMEM,
        mailbox: VFMAILBOX,
        split: VFPSRTYPE,
        plain: &[],
        counters: &[
            CounterPlace::word(VFGPRC, Statistic::Received),
            CounterPlace::wide(VFGORC_LSB, VFGORC_MSB, Statistic::ReceivedBytes),
            CounterPlace::word(VFMPRC, Statistic::Multicast),
            CounterPlace::word(VFGPTC, Statistic::Sent),
            CounterPlace::wide(VFGOTC_LSB, VFGOTC_MSB, Statistic::SentBytes),
        ],
        interrupts: InterruptLayout {
            cause: VTEICR,
            set: VTEICS,
            mask: VTEIMS,
            unmask: VTEIMC,
            auto_clear: VTEIAC,
            auto_mask: VTEIAM,
            throttle: VTEITR,
            queues: VTIVAR,
            misc: VTIVAR_MISC,
        },
        receive: QueueLayout {
            from: RX,
            stride: QUEUE_STRIDE,
            count: QUEUES,
            registers: &[
                (BAL, QueueRegister::BaseLow),
                (BAH, QueueRegister::BaseHigh),
                (LEN, QueueRegister::Length),
                (DCA, QueueRegister::Dca),
                (HEAD, QueueRegister::Head),
                (SRRCTL, QueueRegister::Shape),
                (TAIL, QueueRegister::Tail),
                (DCTL, QueueRegister::Control),
            ],
        },
        transmit: QueueLayout {
            from: TX,
            stride: QUEUE_STRIDE,
            count: QUEUES,
            registers: &[
                (BAL, QueueRegister::BaseLow),
                (BAH, QueueRegister::BaseHigh),
                (LEN, QueueRegister::Length),
                (DCA, QueueRegister::Dca),
                (HEAD, QueueRegister::Head),
                (TAIL, QueueRegister::Tail),
                (DCTL, QueueRegister::Control),
                (TDWBAL, QueueRegister::HeadLow),
                (TDWBAH, QueueRegister::HeadHigh),
            ],
        },
        reset_keeps: true,
        gated: true,
    };

    fn answer(pf: &mut PfState, message: &[u32; MAILBOX_WORDS]) -> [u32; MAILBOX_WORDS] {
        pf::answer(pf, message)
    }

    fn promiscuous(pf: &PfState, group: bool) -> bool {
        pf.promiscuous == XCAST_PROMISC || group && pf.promiscuous == XCAST_ALLMULTI
    }
}
