//! The cards that are moved: their models, and in what their drivers differ.

use ioplane_model::DirectModel;
use ioplane_nic::silicon::Chip;
use ioplane_nic::{vf82576, vf82599};

use crate::driver::Driver;

/// A card and its driver.
pub trait Card: Sized + 'static {
    type Chip: Chip;
    const DIRECT: &'static DirectModel;
    /// Queues that the driver uses, each way.
    const QUEUES: usize;
    /// The driver looks at counters anew after each reset.
    const RELEARNS: bool;
    /// Control registers of queues, beside the enable bit.
    const RECEIVE: u32;
    const TRANSMIT: u32;
    /// Registers that read as they were written, beside those of queues, and that a move may not change.
    const PLAIN: &'static [u64];
    /// A message that makes it promiscuous.
    const PROMISCUOUS: [u32; 2];
    /// Filters of VLANs.
    const VLANS: u32;
    /// Bytes by which a state may be longer than the one of a driver that has said all that there is.
    const MORE: usize;

    /// Which vector a queue has.
    fn vector(queue: usize, transmit: bool) -> usize;
    /// Resets the device and talks to the physical function, until it has an address; `first`: as it is probed.
    fn reset(driver: &mut Driver<Self>, first: bool);
    /// What it says before queues are set up.
    fn filters(driver: &mut Driver<Self>);
    /// What it says at the end of that.
    fn complete(driver: &mut Driver<Self>);
    /// What it looks at now and then, beside counters.
    fn look(driver: &mut Driver<Self>);
    /// It wants frames to its own address only: where an administrator has set that, others are refused.
    fn one_address(driver: &mut Driver<Self>);
    /// Says and switches on what the driver usually does not.
    fn fill(driver: &mut Driver<Self>);
}

/// igbvf: names of its steps are igbvf's.
pub enum Igbvf {}

impl Card for Igbvf {
    type Chip = vf82576::Chip82576;
    const DIRECT: &'static DirectModel = &ioplane_moving::vf82576::DIRECT;
    const QUEUES: usize = 1;
    const RELEARNS: bool = false;
    const RECEIVE: u32 = 0x0004_0808;
    const TRANSMIT: u32 = 0x0101_0800;
    const PLAIN: &'static [u64] = &[0x0f04, 0x0f0c, 0x152c, 0x1530, 0x1680, 0x1684, 0x1688, 0x1700, 0x1740];
    const PROMISCUOUS: [u32; 2] = [vf82576::spec::MESSAGE_PROMISC | 3 << 16, 0];
    const VLANS: u32 = 32;
    /// 34 registers, 9 counters, 16 words and 8 heads and tails take at most 5 bytes each: less than that more than here.
    const MORE: usize = 250;

    fn vector(_: usize, transmit: bool) -> usize {
        transmit.into()
    }

    /// e1000_reset_hw_vf and e1000_init_hw_vf.
    fn reset(driver: &mut Driver<Self>, first: bool) {
        use vf82576::spec::*;
        let control = driver.world.read(CTRL);
        driver.world.write(CTRL, control | CTRL_RST);
        driver.until_reset();
        let answer = driver.say(&[MESSAGE_RESET]);
        let [a, b, c, d] = answer[1].to_le_bytes();
        let [e, f, ..] = answer[2].to_le_bytes();
        // The PF has it back to the address of its own until it is told.
        let own = [a, b, c, d, e, f];
        let mac = if first { own } else { driver.world.mac };
        driver.world.mac = own;
        driver.set_mac(mac);
    }

    /// igbvf_set_rx_mode, igbvf_restore_vlan.
    fn filters(driver: &mut Driver<Self>) {
        use vf82576::spec::*;
        driver.multicast_and_vlans();
        driver.say(&[MESSAGE_MAC | MAC_FILTER_CLR << 16, 0, 0]);
        for last in [1, 2] {
            driver.say(&[MESSAGE_MAC | MAC_FILTER_ADD << 16, 0x0000_7602, last]);
        }
    }

    fn complete(_: &mut Driver<Self>) {}

    fn look(driver: &mut Driver<Self>) {
        driver.v2p();
    }

    fn one_address(driver: &mut Driver<Self>) {
        use vf82576::spec::*;
        driver.say(&[MESSAGE_MAC | MAC_FILTER_CLR << 16, 0, 0]);
    }

    fn fill(driver: &mut Driver<Self>) {
        use vf82576::spec::*;
        for more in 3..=16 {
            driver.say(&[MESSAGE_MAC | MAC_FILTER_ADD << 16, 0xfeff_fff2, 0xff00 | more]);
        }
        let answer = driver.ask(&[MESSAGE_MAC | MAC_FILTER_ADD << 16, 2, 1]);
        assert_eq!(answer[0] & MESSAGE_ACK, 0, "there is no room for more");
    }
}

/// ixgbevf: names of its steps are ixgbevf's.
pub enum Ixgbevf {}

impl Card for Ixgbevf {
    type Chip = vf82599::Chip82599;
    const DIRECT: &'static DirectModel = &ioplane_moving::vf82599::DIRECT;
    const QUEUES: usize = 2;
    const RELEARNS: bool = true;
    /// VME.
    const RECEIVE: u32 = 1 << 30;
    /// WTHRESH 8, PTHRESH 32, HTHRESH 1.
    const TRANSMIT: u32 = 8 << 16 | 1 << 8 | 32;
    const PLAIN: &'static [u64] =
        &[0x0110, 0x0114, 0x0120, 0x0124, 0x0128, 0x012c, 0x0140, 0x0300, 0x0820, 0x0824, 0x0828];
    const PROMISCUOUS: [u32; 2] = [vf82599::spec::MESSAGE_XCAST, vf82599::spec::XCAST_PROMISC];
    const VLANS: u32 = 64;
    /// With all eight queues on, rings below 4 GiB: bases above take 2 bytes each.
    const MORE: usize = 32;

    fn vector(queue: usize, _: bool) -> usize {
        queue
    }

    /// ixgbevf_reset: ixgbevf_stop_hw_vf, ixgbevf_reset_hw_vf, ixgbevf_negotiate_api; then ixgbevf_configure_dcb asks for queues.
    fn reset(driver: &mut Driver<Self>, first: bool) {
        use vf82599::spec::*;
        driver.world.write(VTEIMC, !0);
        driver.world.read(VTEICR);
        driver.modern = false;
        driver.world.write(VFCTRL, CTRL_RST);
        driver.until_reset();
        let answer = driver.ask(&[MESSAGE_RESET]);
        assert_eq!(answer[0], MESSAGE_RESET | MESSAGE_NACK, "no administrator has set an address");
        if first {
            driver.world.mac = [2, 0x99, 0, 0, 0, 1];
        }
        for version in [API_1_5, API_1_4, API_1_3, API_1_2, API_1_1, API_1_0] {
            if driver.ask(&[MESSAGE_API, version])[0] & MESSAGE_ACK != 0 {
                driver.modern = version == API_1_5;
                break;
            }
        }
        let answer = driver.say(&[MESSAGE_QUEUES, 0, 0, 0, 0]);
        assert!(answer[1] >= 2 && answer[2] >= 2, "{answer:x?}");
    }

    /// ixgbevf_set_rx_mode, ixgbevf_restore_vlan, ixgbevf_setup_psrtype.
    fn filters(driver: &mut Driver<Self>) {
        use vf82599::spec::*;
        driver.say(&[MESSAGE_XCAST, XCAST_MULTI]);
        driver.multicast_and_vlans();
        for index in [1, 2] {
            driver.say(&[MESSAGE_MACVLAN | index << 16, 0x0000_9902, index]);
        }
        driver.world.write(VFPSRTYPE, 1 << 29 | 0x1330);
    }

    /// ixgbevf_up_complete.
    fn complete(driver: &mut Driver<Self>) {
        driver.set_mac(driver.world.mac);
    }

    /// ixgbevf_check_mac_link_vf: whether the physical function still listens is in the first word of the mailbox.
    fn look(driver: &mut Driver<Self>) {
        use vf82599::spec::*;
        driver.v2p();
        if driver.modern {
            driver.say(&[MESSAGE_LINK, 0]);
            return;
        }
        driver.lock();
        let word = driver.world.read(VFMBMEM);
        driver.world.write(VFMAILBOX, ACK);
        assert_ne!(word & MESSAGE_CTS, 0, "the physical function listens: {word:#x}");
    }

    fn one_address(driver: &mut Driver<Self>) {
        driver.say(&[vf82599::spec::MESSAGE_MACVLAN, 0, 0]);
    }

    fn fill(driver: &mut Driver<Self>) {
        use vf82599::spec::*;
        for index in 1..=10 {
            driver.say(&[MESSAGE_MACVLAN | index << 16, 0xfeff_fff2, 0xff00 | index]);
        }
        for queue in 2..QUEUES as u64 {
            for (ring, at) in [(RX, 0xf_0000), (TX, 0xf_8000)] {
                let from = ring + queue * QUEUE_STRIDE;
                driver.world.write(from + BAL, at + 0x1000 * queue as u32);
                driver.world.write(from + LEN, 0x1000);
                driver.world.write(from + DCA, 0xffff_ffff);
                driver.world.write(from + if ring == RX { SRRCTL } else { TDWBAH }, 0xf000_2f02);
                driver.world.write(from + DCTL, 0x7fff_ffff);
            }
        }
    }
}

/// Tests of the module that calls it, for each card.
macro_rules! for_each_card {
    ($($test:ident),* $(,)?) => {
        mod igbvf {
            $(#[test]
            fn $test() {
                super::$test::<crate::card::Igbvf>();
            })*
        }

        mod ixgbevf {
            $(#[test]
            fn $test() {
                super::$test::<crate::card::Ixgbevf>();
            })*
        }
    };
}

pub(crate) use for_each_card;
