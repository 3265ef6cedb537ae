//! An L1 with an Intel 82576 (QEMU's igb) and virtual functions of it, behind an IOMMU. At the other end of the card's cable is an
//! interface of L1 itself, `peer14`.
//!
//! ```text
//!   L1:  pf14 (the physical function, up) --cable-- peer14: 10.0.20.1/24
//!         |-- virtual function 0, 1, ... without a driver
//!   L2:  a virtual function: 10.0.20.2/24
//! ```

use crate::assets::News;
use crate::l1::{L1, Shape};
use crate::l2::L2;
use anyhow::{Context, Result, ensure};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
/// The slot of the card's port, and of the network's number.
const SLOT: u8 = 0x14;
const CARD_MAC: &str = "52:54:00:00:14:02";
const PEER_MAC: &str = "52:54:00:00:14:01";
/// Where the physical function is: bus 1 is behind the only port.
pub const CARD: &str = "0000:01:00.0";
/// The address of whoever is at the other end, in L1.
pub const PEER_IP: &str = "10.0.20.1";
/// The address that a guest gives its virtual function.
pub const GUEST_IP: &str = "10.0.20.2";
/// Interface of the other end, and of the physical function.
pub const PEER: &str = "peer14";
pub const PHYSICAL: &str = "pf14";

/// Virtual functions, by address.
pub type VirtualFunctions = Vec<String>;

impl L1 {
    /// Boots one with the card and so many virtual functions, which have no driver. The host's own QEMU of Debian 12 has no igb: the
    /// newer one runs it.
    pub fn boot_with_igb(memory_mib: u64, functions: u32, news: News<'_>) -> Result<(L1, VirtualFunctions)> {
        let args = format!(
            "-device intel-iommu,intremap=on -netdev hubport,id=near,hubid={SLOT} -netdev hubport,id=far,hubid={SLOT} \
             -device pcie-root-port,id=port{SLOT:x},addr={SLOT:x},chassis={SLOT} \
             -device igb,bus=port{SLOT:x},netdev=near,mac={CARD_MAC},romfile= \
             -device virtio-net-pci,netdev=far,mac={PEER_MAC},romfile="
        );
        let l1 = L1::boot_as(
            &Shape {
                memory_mib,
                args: &args,
                append: "intel_iommu=on iommu=nopt",
                load: ",vfio-pci,vfio_iommu_type1,igb,virtio_net",
                newer: true,
                by_instructions: false,
            },
            news,
        )?;
        let (find_peer, find_card) = (crate::nics::find(PEER_MAC), crate::nics::find(CARD_MAC));
        // The physical function is up before it has virtual ones, as its driver wants it.
        let said = l1.run(
            &format!(
                "set -e
                 up() {{ ip link set $name name $1; echo 1 >/proc/sys/net/ipv6/conf/$1/disable_ipv6; ip link set $1 up; }}
                 {find_peer} up {PEER}; ip addr add {PEER_IP}/24 dev {PEER}
                 {find_card} up {PHYSICAL}
                 for try in $(seq 300); do [ \"$(cat /sys/class/net/{PHYSICAL}/carrier)\" = 1 ] && break; sleep 0.1; done
                 cd /sys/bus/pci/devices/{CARD}
                 echo 0 >sriov_drivers_autoprobe; echo {functions} >sriov_numvfs
                 for n in $(seq 0 $(({functions} - 1))); do basename $(readlink -f virtfn$n); done"
            ),
            MINUTE,
        );
        let said = said.context("virtual functions of the card")?;
        let found: VirtualFunctions =
            said.split_whitespace().filter(|word| word.starts_with("0000:")).map(Into::into).collect();
        ensure!(found.len() == functions as usize, "virtual functions: {said}");
        Ok((l1, found))
    }
}

impl L2<'_> {
    /// Loads igbvf, gives the only virtual function its address and raises it; the other end answers when this returns.
    pub fn raise_igbvf(&self) -> Result<()> {
        let script = format!(
            "set -e; modprobe igbvf; bb=/folder/busybox
             name=$(ls /sys/bus/pci/drivers/igbvf/*/net)
             $bb ip addr replace {GUEST_IP}/24 dev $name; $bb ip link set $name up
             for try in 1 2 3 4 5 6 7 8 9 10; do
                 $bb ping -q -c 1 -W 2 {PEER_IP} >/dev/null && exit 0
             done
             echo {PEER_IP} does not answer; $bb ip addr; dmesg | tail -n 20; exit 1"
        );
        self.run(&script).map(drop).context("raise the virtual function in the guest")
    }
}
