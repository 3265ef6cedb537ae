//! An L1 with Intel 82576s (QEMU's igb) and virtual functions of them, behind an IOMMU. At the other end of each card's cable is one hub,
//! with an interface of L1 itself, `peer14`, and where it is asked for one of this machine.
//!
//! ```text
//!   L1:  pf14, pf15, ... (physical functions, up) --cables-- a hub -- peer14: 10.0.20.1/24
//!         |-- virtual function 0, 1, ... of each, without a driver
//!   L2:  a virtual function: 10.0.20.2/24
//! ```
//!
//! [`crate::lan`] has L1s whose cables end on this machine.

use crate::assets::News;
use crate::l1::{L1, Shape};
use crate::l2::L2;
use anyhow::{Context, Result, ensure};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
/// The slot of the first card's port, and the hub's number.
const SLOT: u8 = 0x14;
const PEER_MAC: &str = "52:54:00:00:14:01";
/// The address of whoever is at the other end, in L1.
pub const PEER_IP: &str = "10.0.20.1";
/// The address that a guest gives its virtual function.
pub const GUEST_IP: &str = "10.0.20.2";
/// Interface of the other end.
pub const PEER: &str = "peer14";

/// Interfaces of the first two cards.
pub(crate) const PHYSICAL: [&str; 2] = ["pf14", "pf15"];

/// Virtual functions, by address.
pub type VirtualFunctions = Vec<String>;

/// Hardware address of a card's physical function.
fn card_mac(card: u8) -> String {
    format!("52:54:00:00:14:{:02x}", 2 + card)
}

/// The card, behind a port of its own. The cable is a network device of QEMU's.
pub(crate) fn card_args(card: u8, cable: &str) -> String {
    let (slot, mac) = (SLOT + card, card_mac(card));
    format!(
        " -netdev {cable},id=near{slot:x} \
         -device pcie-root-port,id=port{slot:x},addr={slot:x},chassis={slot} \
         -device igb,bus=port{slot:x},netdev=near{slot:x},mac={mac},romfile="
    )
}

impl L1 {
    /// Boots one with one card; see [`L1::boot_with_igbs`].
    pub fn boot_with_igb(memory_mib: u64, functions: u32, news: News<'_>) -> Result<(L1, VirtualFunctions)> {
        let (l1, mut cards) = L1::boot_with_igbs(memory_mib, 1, functions, news)?;
        Ok((l1, cards.pop().context("one card")?))
    }

    /// Boots one with so many cards, and so many virtual functions of each, which have no driver. The host's own QEMU of Debian 12 has no
    /// igb: the newer one runs it. It drops a frame without a word when it cannot map one of its buffers in one piece, as where a buffer crosses a page and
    /// the guest's next page is not L1's next one; silicon has no such limit. So guests have huge pages of L1, which no buffer of Linux crosses.
    pub fn boot_with_igbs(
        memory_mib: u64,
        cards: u8,
        functions: u32,
        news: News<'_>,
    ) -> Result<(L1, Vec<VirtualFunctions>)> {
        L1::boot_with_igbs_and(memory_mib, cards, functions, "", news)
    }

    /// The same with a TAP interface of this machine at that hub, which QEMU makes.
    pub fn boot_with_igbs_at(
        tap: &str,
        memory_mib: u64,
        cards: u8,
        functions: u32,
        news: News<'_>,
    ) -> Result<(L1, Vec<VirtualFunctions>)> {
        let outside = format!(
            "-netdev tap,ifname={tap},script=no,downscript=no,vnet_hdr=off,id=outside \
             -netdev hubport,hubid={SLOT},netdev=outside,id=out "
        );
        L1::boot_with_igbs_and(memory_mib, cards, functions, &outside, news)
    }

    fn boot_with_igbs_and(
        memory_mib: u64,
        cards: u8,
        functions: u32,
        outside: &str,
        news: News<'_>,
    ) -> Result<(L1, Vec<VirtualFunctions>)> {
        let hub = format!("hubport,hubid={SLOT}");
        let far = format!("-netdev {hub},id=far -device virtio-net-pci,netdev=far,mac={PEER_MAC},romfile=");
        let cards_args: String = (0..cards).map(|card| card_args(card, &hub)).collect();
        let l1 = L1::boot_for_igbs(memory_mib, &format!("{outside}{far}{cards_args}"), news)?;
        l1.raise_own(PEER_MAC, PEER, PEER_IP)?;
        let made = (0..cards).map(|card| l1.virtual_functions(card, functions)).collect::<Result<_>>()?;
        Ok((l1, made))
    }

    /// Boots one with an IOMMU, huge pages for guests, and these devices.
    pub(crate) fn boot_for_igbs(memory_mib: u64, devices: &str, news: News<'_>) -> Result<L1> {
        L1::boot_as(
            &Shape {
                memory_mib,
                huge_mib: memory_mib * 3 / 8,
                args: &format!("-device intel-iommu,intremap=on {devices}"),
                append: "intel_iommu=on iommu=nopt",
                load: ",vfio-pci,vfio_iommu_type1,igb,virtio_net",
                newer: true,
                by_instructions: false,
            },
            news,
        )
    }

    /// Gives the interface with that hardware address a name and an address.
    pub(crate) fn raise_own(&self, mac: &str, name: &str, ip: &str) -> Result<()> {
        let find = crate::nics::find(mac);
        self.run(&format!("set -e\n{RAISE}\n{find} up {name}; ip addr add {ip}/24 dev {name}"), MINUTE)
            .map(drop)
    }

    /// Makes virtual functions of a card.
    pub(crate) fn virtual_functions(&self, card: u8, count: u32) -> Result<VirtualFunctions> {
        let (find_card, physical) = (crate::nics::find(&card_mac(card)), format!("pf{:x}", SLOT + card));
        // The physical function is up before it has virtual ones, as its driver wants it. It is at the same hub as the interface that has the address, and
        // Linux would answer for that by each of them: guests would learn one or the other.
        let said = self.run(
            &format!(
                "set -e
                 {RAISE}
                 {find_card} up {physical}; echo 8 >/proc/sys/net/ipv4/conf/{physical}/arp_ignore
                 {}
                 cd /sys/class/net/{physical}/device/
                 echo 0 >sriov_drivers_autoprobe; echo {count} >sriov_numvfs
                 for n in $(seq 0 $(({count} - 1))); do basename $(readlink -f virtfn$n); done",
                linked(&physical)
            ),
            MINUTE,
        );
        let said = said.context("virtual functions of a card")?;
        let found: VirtualFunctions =
            said.split_whitespace().filter(|word| word.starts_with("0000:")).map(Into::into).collect();
        ensure!(found.len() == count as usize, "virtual functions: {said}");
        Ok(found)
    }
}

/// Waits until an interface has its link, half a minute at most.
pub(crate) fn linked(port: &str) -> String {
    format!(
        "for try in $(seq 300); do [ \"$(cat /sys/class/net/{port}/carrier)\" = 1 ] && break; sleep 0.1; done"
    )
}

/// Names the interface `$name` and raises it, without IPv6.
const RAISE: &str =
    "up() { ip link set $name name $1; echo 1 >/proc/sys/net/ipv6/conf/$1/disable_ipv6; ip link set $1 up; }";

impl L2<'_> {
    /// Loads igbvf, gives the only virtual function its address and raises it; the other end answers when this returns.
    pub fn raise_igbvf(&self) -> Result<()> {
        self.raise_vf("igbvf", "modprobe igbvf")
    }

    /// The same of this driver, which `load` loads.
    pub fn raise_vf(&self, driver: &str, load: &str) -> Result<()> {
        let script = format!(
            "set -e; {load}; bb=/folder/busybox
             name=$(ls /sys/bus/pci/drivers/{driver}/*/net)
             $bb ip addr replace {GUEST_IP}/24 dev $name; $bb ip link set $name up
             for try in 1 2 3 4 5 6 7 8 9 10; do
                 $bb ping -q -c 1 -W 2 {PEER_IP} >/dev/null && exit 0
             done
             echo {PEER_IP} does not answer; $bb ip addr; dmesg | tail -n 20; exit 1"
        );
        self.run(&script).map(drop).context("raise the virtual function in the guest")
    }
}
