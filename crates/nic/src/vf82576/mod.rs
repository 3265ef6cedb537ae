//! A virtual function of Intel's 82576, as the hardware of tests: [`silicon`](crate::silicon) with its registers, and a PF that answers
//! as Linux's igb does.

pub mod spec;

use crate::silicon::{
    self, Chip, CounterPlace, InterruptLayout, QueueLayout, QueueRegister, RegisterLayout, Statistic,
    VirtualFunction,
};
use spec::*;

pub use crate::silicon::{PfState, SiliconViolation};

/// The function.
pub type Vf82576 = VirtualFunction<Chip82576>;

/// Most VLANs: the 82576 has 32 filters.
const VLANS: usize = 32;

/// Most further addresses.
const MORE: usize = 16;

/// The chip.
#[derive(Debug, Clone, Copy)]
pub enum Chip82576 {}

impl Chip for Chip82576 {
    const LAYOUT: RegisterLayout = RegisterLayout {
        device: DEVICE,
        control: CTRL,
        link: (STATUS, STATUS_LU),
        memory: VMBMEM,
        mailbox: V2PMAILBOX,
        split: PSRTYPE,
        plain: &[PBACL],
        counters: &[
            CounterPlace::word(VFGPRC, Statistic::Received),
            CounterPlace::word(VFGPTC, Statistic::Sent),
            CounterPlace::word(VFGORC, Statistic::ReceivedBytes),
            CounterPlace::word(VFGOTC, Statistic::SentBytes),
            CounterPlace::word(VFMPRC, Statistic::Multicast),
            CounterPlace::word(VFGPRLBC, Statistic::Nothing),
            CounterPlace::word(VFGPTLBC, Statistic::Nothing),
            CounterPlace::word(VFGORLBC, Statistic::Nothing),
            CounterPlace::word(VFGOTLBC, Statistic::Nothing),
        ],
        interrupts: InterruptLayout {
            cause: EICR,
            set: EICS,
            mask: EIMS,
            unmask: EIMC,
            auto_clear: EIAC,
            auto_mask: EIAM,
            throttle: EITR,
            queues: IVAR0,
            misc: IVAR_MISC,
        },
        receive: QueueLayout {
            from: RX,
            stride: QUEUE_STRIDE,
            count: QUEUES,
            registers: &[
                (BAL, QueueRegister::BaseLow),
                (BAH, QueueRegister::BaseHigh),
                (LEN, QueueRegister::Length),
                (SRRCTL, QueueRegister::Shape),
                (HEAD, QueueRegister::Head),
                (TAIL, QueueRegister::Tail),
                (DCTL, QueueRegister::Control),
                (RQDPC, QueueRegister::Dropped),
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
                (HEAD, QueueRegister::Head),
                (DCA, QueueRegister::Dca),
                (TAIL, QueueRegister::Tail),
                (DCTL, QueueRegister::Control),
                (TDWBAL, QueueRegister::HeadLow),
                (TDWBAH, QueueRegister::HeadHigh),
            ],
        },
        reset_keeps: false,
        gated: false,
    };

    fn answer(pf: &mut PfState, message: &[u32; MAILBOX_WORDS]) -> [u32; MAILBOX_WORDS] {
        let mut reply = [0; MAILBOX_WORDS];
        let fine = match message[0] & 0xffff {
            MESSAGE_RESET => {
                pf.begin();
                pf.has_address(pf.own_mac);
                reply[1..3].copy_from_slice(&silicon::words(pf.mac));
                true
            }
            _ if !pf.clear_to_send => false,
            MESSAGE_MAC if silicon::info(message) == MAC_FILTER_CLR => {
                pf.more.clear();
                true
            }
            MESSAGE_MAC if silicon::info(message) == MAC_FILTER_ADD => {
                let room = !pf.mac_is_set && pf.more.len() < MORE;
                if room {
                    pf.more.push(silicon::address(message, 1));
                }
                room
            }
            MESSAGE_MAC if !pf.mac_is_set => {
                pf.has_address(silicon::address(message, 1));
                true
            }
            MESSAGE_MULTICAST => pf.set_multicast(message),
            MESSAGE_VLAN => pf.set_vlan(message, VLANS),
            MESSAGE_LPE => pf.set_longest(message),
            MESSAGE_PROMISC => {
                pf.promiscuous = silicon::info(message);
                true
            }
            _ => false,
        };
        let cts = if pf.clear_to_send { MESSAGE_CTS } else { 0 };
        reply[0] = message[0] | cts | if fine { MESSAGE_ACK } else { MESSAGE_NACK };
        reply
    }

    fn promiscuous(pf: &PfState, _: bool) -> bool {
        pf.promiscuous != 0
    }
}
