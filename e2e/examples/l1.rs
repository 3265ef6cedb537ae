//! An L1 with network cards, for people: `cargo run -p ioplane-e2e --example l1 [-- rtl8139 ne2000 82574 virtio]`. Stays until it is
//! killed (Ctrl-C), and prints its folder. Write a script as `FOLDER/1.half` and rename it to `FOLDER/1.sh`: it runs in L1, its output comes as
//! `FOLDER/1.out`, and its status as `FOLDER/1.status` when it has ended; then 2, 3 and so on. L1 sees this machine's root by the
//! same paths, but what changes there while it runs may come late: copy new binaries into the folder.

use anyhow::{Result, bail};
use ioplane_e2e::assets::newer_qemu;
use ioplane_e2e::{L1, Nic};
use std::time::Duration;

fn main() -> Result<()> {
    let mut nics = Vec::new();
    for name in std::env::args().skip(1) {
        nics.push(match name.as_str() {
            "rtl8139" => Nic::Rtl8139,
            "ne2000" => Nic::Ne2000,
            "82574" => Nic::I82574,
            "virtio" => Nic::Virtio,
            _ => bail!("{name:?}? usage: l1 [rtl8139] [ne2000] [82574] [virtio]"),
        });
    }
    if nics.is_empty() {
        nics = vec![Nic::Rtl8139, Nic::Ne2000, Nic::I82574, Nic::Virtio];
    }
    let news = |line: &str| eprintln!("{line}");
    let tree = newer_qemu(&news)?;
    let l1 = L1::boot_with_nics(2048, &nics, &news)?;
    let host = &l1.host;
    println!("folder    {}", l1.folder().display());
    // The first numbers are taken.
    println!("next      {}.sh", nics.len() + 1);
    println!("modules   {}    (modprobe -d)", host.modules.display());
    println!("kernel    {}", host.packed.display());
    println!("initrd    {}", host.guest.display());
    println!("debian    {}", host.debian.display());
    println!("qemu 11   {}", tree.map_or("here".into(), |tree| tree.display().to_string()));
    for nic in nics {
        let (address, id, driver) = (nic.address(), nic.id(), nic.driver());
        println!("{address}  {id} {driver} {}, at the other end {} {}", nic.mac(), nic.peer(), nic.peer_ip());
    }
    loop {
        std::thread::sleep(Duration::from_secs(1));
        l1.still_runs()?;
    }
}
