//! An L1 with network cards to hand to its guests: emulated by the outer QEMU, physical for L1, behind an IOMMU. At the other end of
//! each card's cable is an interface of L1 itself, `peerNN`, so that what a guest sends is seen there.
//!
//! ```text
//!   L1:  0000:00:10.0 (a card, bound to its driver, down) --cable-- peer10: 10.0.16.1/24
//!   L2:  the same card: 10.0.16.2/24
//! ```

use crate::assets::News;
use crate::l1::{L1, Shape};
use crate::l2::L2;
use anyhow::{Context, Result, ensure};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
/// Slots between the first of a kind and the second.
const SECOND: u8 = 8;

/// A card. Each kind has a slot of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nic {
    /// RTL8139C+ of revision 0x20, for `8139cp`.
    Rtl8139,
    /// NE2000 on PCI, for `ne2k-pci`.
    Ne2000,
    /// Intel's 82574, for `e1000e`: MSI-X, PCI Express.
    I82574,
    /// A network card of virtio 1, for `virtio-pci`, behind a port of PCI Express: the one with function-level reset (FLR).
    Virtio,
}

impl Nic {
    /// Its device and vendor, as Linux writes them: `10ec:8139`.
    pub fn id(self) -> &'static str {
        match self {
            Nic::Rtl8139 => "10ec:8139",
            Nic::Ne2000 => "10ec:8029",
            Nic::I82574 => "8086:10d3",
            Nic::Virtio => "1af4:1041",
        }
    }

    /// Linux's driver.
    pub fn driver(self) -> &'static str {
        match self {
            Nic::Rtl8139 => "8139cp",
            Nic::Ne2000 => "ne2k-pci",
            Nic::I82574 => "e1000e",
            Nic::Virtio => "virtio-pci",
        }
    }

    /// The module that makes it a network interface.
    fn module(self) -> &'static str {
        match self {
            // The driver of the function only finds a device on a bus of its own.
            Nic::Virtio => "virtio_net",
            _ => self.driver(),
        }
    }

    /// Its model here, if there is one: what `ioplane` calls it.
    pub fn model(self) -> Option<&'static str> {
        match self {
            Nic::Rtl8139 => Some("rtl8139"),
            Nic::Ne2000 => Some("ne2000"),
            Nic::I82574 => Some("i82574"),
            Nic::Virtio => None,
        }
    }

    fn device(self) -> &'static str {
        match self {
            Nic::Rtl8139 => "rtl8139",
            Nic::Ne2000 => "ne2k_pci",
            Nic::I82574 => "e1000e",
            // Not past the IOMMU, as virtio is otherwise. Without a control queue and what needs it: a driver waits for ever for an answer
            // there if the card is reset under it.
            Nic::Virtio => {
                "virtio-net-pci,disable-legacy=on,iommu_platform=on,ctrl_vq=off,ctrl_rx=off,ctrl_rx_extra=off,\
                 ctrl_vlan=off,ctrl_mac_addr=off,ctrl_guest_offloads=off,guest_announce=off"
            }
        }
    }

    fn slot(self) -> u8 {
        match self {
            Nic::Rtl8139 => 0x10,
            Nic::Ne2000 => 0x11,
            Nic::I82574 => 0x12,
            Nic::Virtio => 0x13,
        }
    }

    /// Where it is in L1. Behind the only port is bus 1.
    pub fn address(self) -> String {
        match self {
            Nic::Virtio => "0000:01:00.0".into(),
            _ => format!("0000:00:{:02x}.0", self.slot()),
        }
    }

    /// Where the second one of its kind is: see [`L1::boot_with_twins`].
    pub fn second_address(self) -> String {
        format!("0000:00:{:02x}.0", self.slot() + SECOND)
    }

    /// Hardware address of the second one. QEMU's NE2000 takes in what is for the address in its PROM, whatever its driver or a replay has set
    /// (real ones do not), so both have one.
    fn second_mac(self) -> String {
        match self {
            Nic::Ne2000 => self.mac(),
            _ => format!("52:54:00:00:{:02x}:03", self.slot()),
        }
    }

    /// Its hardware address.
    pub fn mac(self) -> String {
        format!("52:54:00:00:{:02x}:02", self.slot())
    }

    /// The address that a guest gives it.
    pub fn guest_ip(self) -> String {
        format!("10.0.{}.2", self.slot())
    }

    /// The address of whoever is at the other end.
    pub fn peer_ip(self) -> String {
        format!("10.0.{}.1", self.slot())
    }

    /// That end's interface in L1.
    pub fn peer(self) -> String {
        format!("peer{:02x}", self.slot())
    }

    fn peer_mac(self) -> String {
        format!("52:54:00:00:{:02x}:01", self.slot())
    }

    /// The card of L1 at the other end of the cable: QEMU's device and Linux's module. No sender on a real cable makes frames of
    /// less than 60 bytes. Linux's virtio-net does (an ARP reply has 42), and QEMU 8.1 and later hand them to an NE2000 as they
    /// are, whose driver then drops them as damaged. Linux's driver of an e1000 pads.
    fn far(self) -> [&'static str; 2] {
        match self {
            Nic::Ne2000 => ["e1000", "e1000"],
            _ => ["virtio-net-pci", "virtio_net"],
        }
    }

    /// The cable is a hub of QEMU's, with the card and another card of L1 at its ends.
    fn args(self) -> String {
        let (device, slot, mac, peer) = (self.device(), self.slot(), self.mac(), self.peer_mac());
        let [far, _] = self.far();
        let (port, place) = match self {
            Nic::Virtio => (
                format!("-device pcie-root-port,id=port{slot:x},addr={slot:x},chassis={slot}"),
                format!("bus=port{slot:x}"),
            ),
            _ => (String::new(), format!("addr={slot:x}")),
        };
        format!(
            "-netdev hubport,id=near{slot:x},hubid={slot} -netdev hubport,id=far{slot:x},hubid={slot} \
             {port} -device {device},{place},netdev=near{slot:x},mac={mac},romfile= \
             -device {far},netdev=far{slot:x},mac={peer},romfile= "
        )
    }

    /// The second one of its kind, at the same hub.
    fn second_args(self) -> String {
        let (device, slot, mac) = (self.device(), self.slot(), self.second_mac());
        let place = slot + SECOND;
        format!(
            "-netdev hubport,id=near{place:x},hubid={slot} -device {device},addr={place:x},netdev=near{place:x},mac={mac},romfile= "
        )
    }
}

/// Names an interface by its hardware address, for a shell: sets `$name`.
pub fn find(mac: &str) -> String {
    format!(
        "name=; for a in /sys/class/net/*/address; do
             [ \"$(cat $a)\" = {mac} ] && name=$(basename $(dirname $a)); done
         [ -n \"$name\" ] || {{ echo no interface is {mac}; ls -l /sys/class/net; exit 1; }}\n"
    )
}

/// What came of some pings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pings {
    pub sent: u32,
    /// Replies that came.
    pub received: u32,
}

/// Each as soon as the one before is answered, or twenty seconds later: on a busy machine a translated guest of a translated host is slow.
fn ping(busybox: &str, ip: &str, count: u32, size: u32) -> String {
    // Its status tells whether any came; the count says more.
    format!(
        "{busybox} ping -q -A -i 20 -s {size} -c {count} -W 20 -w {limit} {ip} || true",
        limit = 100 + count / 10
    )
}

impl Pings {
    /// What busybox's ping says at its end.
    pub fn of(said: &str) -> Result<Pings> {
        let line = said.lines().find(|line| line.contains("packets transmitted"));
        let line = line.with_context(|| format!("ping counts nothing:\n{said}"))?;
        let mut numbers = line.split_whitespace().filter_map(|word| word.parse().ok());
        let mut number = || numbers.next().with_context(|| line.to_owned());
        Ok(Pings { sent: number()?, received: number()? })
    }
}

/// The mean of what busybox's ping says of round trips.
fn mean_ms(said: &str) -> Option<f64> {
    let (_, times) = said.split_once("round-trip min/avg/max = ")?;
    times.split('/').nth(1)?.parse().ok()
}

impl L1 {
    /// Boots one with these cards, VFIO loaded and the cards bound to their drivers.
    pub fn boot_with_nics(memory_mib: u64, nics: &[Nic], news: News<'_>) -> Result<L1> {
        Self::boot_with_nics_and(memory_mib, nics, "", news)
    }

    /// The same, with more words for the kernel.
    pub fn boot_with_nics_and(memory_mib: u64, nics: &[Nic], append: &str, news: News<'_>) -> Result<L1> {
        Self::boot_with_more(memory_mib, nics, "", append, news)
    }

    /// Boots one that has each of these cards, which are no [`Nic::Virtio`], twice: both at one hub.
    pub fn boot_with_twins(memory_mib: u64, nics: &[Nic], news: News<'_>) -> Result<L1> {
        let second: String = nics.iter().map(|nic| nic.second_args()).collect();
        Self::boot_with_more(memory_mib, nics, &second, "", news)
    }

    fn boot_with_more(memory_mib: u64, nics: &[Nic], more: &str, append: &str, news: News<'_>) -> Result<L1> {
        let cards: String = nics.iter().map(|nic| nic.args()).chain([more.to_owned()]).collect();
        let load: String = nics.iter().map(|nic| format!(",{},{}", nic.module(), nic.far()[1])).collect();
        let l1 = L1::boot_as(
            &Shape {
                memory_mib,
                args: &format!("-device intel-iommu,intremap=on {cards}"),
                append: &format!("intel_iommu=on iommu=nopt {append}"),
                load: &format!(",vfio-pci,vfio_iommu_type1,tun{load}"),
                ..Shape::default()
            },
            news,
        )?;
        for nic in nics {
            let (peer, ip) = (nic.peer(), nic.peer_ip());
            let find = find(&nic.peer_mac());
            let script = format!(
                "set -e; {find} ip link set $name name {peer}; echo 1 >/proc/sys/net/ipv6/conf/{peer}/disable_ipv6; ip addr add {ip}/24 dev {peer}; ip link set {peer} up"
            );
            l1.run(&script, MINUTE).with_context(|| format!("the other end of {nic:?}"))?;
        }
        Ok(l1)
    }

    /// Pings from the guest in the QEMU `name`, which can leave: see [`L2::ping_timed`].
    pub fn ask_ping_timed(
        &self,
        name: &str,
        ip: &str,
        count: u32,
        size: u32,
    ) -> Result<(Pings, Option<f64>)> {
        let said = self.ask(name, &ping("/tmp/busybox", ip, count, size))?;
        Ok((Pings::of(&said)?, mean_ms(&said)))
    }

    /// Pings from L1.
    pub fn ping(&self, ip: &str, count: u32, size: u32) -> Result<Pings> {
        Pings::of(
            &self.run(&ping("busybox", ip, count, size), 2 * MINUTE + Duration::from_millis(100) * count)?,
        )
    }
}

impl L2<'_> {
    /// Loads the driver of a card that this guest has, gives it its address and raises it; the other end answers when this returns.
    pub fn raise(&self, nic: Nic) -> Result<()> {
        let (module, ip, peer) = (nic.module(), nic.guest_ip(), nic.peer_ip());
        let find = find(&nic.mac());
        let script = format!(
            "set -e; modprobe {module}; {find} bb=/folder/busybox
             $bb ip addr replace {ip}/24 dev $name; $bb ip link set $name up
             for try in 1 2 3 4 5 6 7 8 9 10; do
                 $bb ping -q -c 1 -W 1 {peer} >/dev/null && exit 0
             done
             echo {peer} does not answer; $bb ip addr; dmesg | tail -n 20; exit 1"
        );
        self.run(&script).map(drop).with_context(|| format!("raise {nic:?} in the guest"))
    }

    /// Takes a card down: its driver stops it and it makes no more interrupts. L1's QEMU (7.2) aborts if MSI-X of an 82574 is switched off
    /// within 128 us of a message, and the end of a guest does that.
    pub fn lower(&self, nic: Nic) -> Result<()> {
        let script = format!("set -e; {} /folder/busybox ip link set $name down", find(&nic.mac()));
        self.run(&script).map(drop).with_context(|| format!("lower {nic:?} in the guest"))
    }

    /// Pings from the guest.
    pub fn ping(&self, ip: &str, count: u32, size: u32) -> Result<Pings> {
        self.ping_timed(ip, count, size).map(|(pings, _)| pings)
    }

    /// The same, and the mean round trip in ms by the guest's clock, if any reply has come.
    pub fn ping_timed(&self, ip: &str, count: u32, size: u32) -> Result<(Pings, Option<f64>)> {
        let said = self.run(&ping("/folder/busybox", ip, count, size))?;
        Ok((Pings::of(&said)?, mean_ms(&said)))
    }

    /// Pings the other end of a card; an error unless every reply has come.
    pub fn ping_all(&self, nic: Nic, count: u32, size: u32) -> Result<()> {
        let got = self.ping(&nic.peer_ip(), count, size)?;
        ensure!(got == Pings { sent: count, received: count }, "{nic:?}: {got:?}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pings_are_counted() {
        let said = "PING 10.0.16.1 (10.0.16.1): 1000 data bytes\n\n--- 10.0.16.1 ping statistics ---\n\
                    1000 packets transmitted, 999 packets received, 0% packet loss\n";
        assert_eq!(Pings::of(said).expect("a count"), Pings { sent: 1000, received: 999 });
        assert!(Pings::of("ping: bad address").is_err());
        assert_eq!(mean_ms(said), None);
        assert_eq!(mean_ms(&format!("{said}round-trip min/avg/max = 4.041/5.641/9.100 ms\n")), Some(5.641));
    }
}
