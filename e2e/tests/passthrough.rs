//! Physical cards in L1: leases, VFIO, handed to guests as they are by the kernel's own vfio-pci, to compare with, and over vfio-user.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::high::shared_memory;
use ioplane_e2e::{L1, L2, Nic, Version};
use std::path::PathBuf;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
const LEASES: &str = "/tmp/leases";

/// An example or a binary of another crate; cargo builds both with that crate's tests, next to this test's folder.
fn built(package: &str, name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let folders = test.ancestors().skip(1).take(2);
    let mut places = folders.flat_map(|folder| [folder.join(name), folder.join("examples").join(name)]);
    let found = places.find(|path| path.is_file());
    found.with_context(|| format!("no {name}; build it: cargo build -p {package} --bins --examples"))
}

fn hold() -> Result<PathBuf> {
    built("ioplane-hardware", "hold")
}

fn driver(l1: &L1, nic: Nic) -> Result<String> {
    let address = nic.address();
    let said =
        l1.run(&format!("basename $(readlink /sys/bus/pci/devices/{address}/driver || echo none)"), MINUTE)?;
    Ok(said.trim().to_owned())
}

/// Taken, used through VFIO, given back.
fn cards_are_used_and_given_back(l1: &L1) -> Result<()> {
    let hold = hold()?;
    let hold = hold.display();
    // Whatever else the kernel could reset it by.
    let only = format!("echo flr >/sys/bus/pci/devices/{}/reset_method", Nic::Virtio.address());
    l1.run(&only, MINUTE)?;
    for nic in [Nic::Rtl8139, Nic::Ne2000, Nic::I82574, Nic::Virtio] {
        let said = l1.run(&format!("{hold} {} {LEASES}", nic.address()), MINUTE)?;
        let wants = |text: &str| {
            ensure!(
                said.lines().any(|line| line.starts_with(text)),
                "{nic:?} does not say {text:?}:\n{said}"
            );
            Ok(())
        };
        wants(&format!("taken from {}", nic.driver()))?;
        wants(&format!("id {} class 020000", nic.id()))?;
        wants(&format!("mac {}", nic.mac()))?;
        wants(&format!("out of reach: {}", nic.address()))?;
        wants("given back")?;
        match nic {
            Nic::Rtl8139 => {
                // A BAR of 256 bytes that is alone on its page.
                wants("BAR 1: 0x1000 bytes, Memory32, mapped [\"0x0+0x1000\"]")?;
                wants("reset false")?;
                wants("INTA# heard, masked, unmasked")?;
            }
            Nic::Ne2000 => {
                wants("BAR 0: 0x100 bytes, Port, mapped []")?;
                wants("INTA# heard, masked, unmasked")?;
            }
            Nic::I82574 => {
                // Without the pages of the MSI-X table and its pending bits.
                wants("BAR 3: 0x4000 bytes, Memory32, mapped [\"0x1000+0x1000\", \"0x3000+0x1000\"]")?;
                wants("reset true")?;
                wants("MSI-X comes")?;
            }
            Nic::Virtio => {
                wants("BAR 1: 0x1000 bytes, Memory32, mapped []")?;
                wants("BAR 4: 0x4000 bytes, Memory64, mapped [\"0x0+0x4000\"]")?;
                // Function-level reset.
                wants("reset true by \"flr\"")?;
                wants("(3, 1), reset true, (0, 0)")?;
            }
        }
        let now = driver(l1, nic)?;
        ensure!(now == nic.driver(), "{nic:?} is driven by {now} now");
    }
    let left = l1.run(&format!("ls {LEASES}"), MINUTE)?;
    ensure!(left.trim().is_empty(), "left on record: {left}");
    Ok(())
}

/// What the host uses is not taken without force, and what a dead process had comes back.
fn leases_are_kept_and_recovered(l1: &L1) -> Result<()> {
    let hold = hold()?;
    let (hold, nic) = (hold.display(), Nic::Rtl8139);
    let address = nic.address();
    let up = format!("ip link set $(ls /sys/bus/pci/devices/{address}/net) up");
    let ended = l1.start(&format!("{up}; {hold} {address} {LEASES}"))?.wait(MINUTE)?;
    ensure!(ended.status == 1 && ended.output.contains("is up"), "{ended:?}");
    ensure!(driver(l1, nic)? == nic.driver());

    let holder = l1.start(&format!("exec {hold} {address} {LEASES} forced wait"))?;
    holder.expect("held", MINUTE)?;
    ensure!(driver(l1, nic)? == "vfio-pci");
    let second = l1.start(&format!("{hold} {address} {LEASES}; {hold} recover {LEASES}"))?.wait(MINUTE)?;
    ensure!(
        second.output.contains("leased by another process") && !second.output.contains("recovered"),
        "{second:?}"
    );
    holder.kill()?;
    ensure!(driver(l1, nic)? == "vfio-pci", "nobody has given it back yet");
    let said = l1.run(&format!("{hold} recover {LEASES}; {hold} recover {LEASES}"), MINUTE)?;
    ensure!(said.trim() == format!("recovered {address}"), "{said}");
    ensure!(driver(l1, nic)? == nic.driver());
    Ok(())
}

/// Function-level reset by a guest: its kernel sets a bit in the configuration space (PCI Express 3.0, 6.6.2), under a driver that knows nothing
/// of it. The status that the driver has left in the card is gone; with the driver bound anew the card works.
fn a_guest_resets_it(guest: &L2<'_>, nic: Nic) -> Result<()> {
    let find = ioplane_e2e::nics::find(&nic.mac());
    let said = guest.run(&format!(
        "set -e; {find} virtio=$(readlink -f /sys/class/net/$name/device); card=$(dirname $virtio)
         echo flr >$card/reset_method; cat $card/reset_method $virtio/status
         echo 1 >$card/reset; cat $virtio/status
         driver=$(readlink -f $card/driver)
         basename $card >$driver/unbind; basename $card >$driver/bind"
    ))?;
    let words: Vec<&str> = said.split_whitespace().collect();
    ensure!(words == ["flr", "0x0000000f", "0x00000000"], "{said}");
    guest.raise(nic)
}

/// QEMU's own vfio-pci, with the same cards in the same guest: what ours has to be like. And a lease whose holder has died is
/// not given back under a guest's feet.
fn the_kernels_way(l1: &L1) -> Result<()> {
    let hold = hold()?;
    let hold = hold.display();
    let nics = [Nic::Rtl8139, Nic::Ne2000];
    let mut holders = Vec::new();
    let mut args = shared_memory(256);
    for nic in nics {
        let address = nic.address();
        let holder = l1.start(&format!("exec {hold} {address} {LEASES} bound"))?;
        holder.expect("bound", MINUTE)?;
        holders.push(holder);
        args += &format!(" -device vfio-pci,host={address}");
    }
    let guest = l1.debian_by(Version::Newer, "kernel-vfio", &args, "")?;
    for nic in nics {
        guest.raise(nic)?;
        guest.ping_all(nic, 200, 1000)?;
    }
    guest.writes_high(Nic::Rtl8139)?;
    for holder in holders {
        holder.kill()?;
    }
    let early = l1.start(&format!("{hold} recover {LEASES}"))?.wait(MINUTE)?;
    ensure!(early.status == 1 && early.output.contains("still open"), "{early:?}");
    guest.ping_all(Nic::Rtl8139, 10, 1000)?;
    guest.kill()?;
    let said = l1.run(&format!("{hold} recover {LEASES}"), MINUTE)?;
    for nic in nics {
        ensure!(said.contains(&format!("recovered {}", nic.address())), "{said}");
        ensure!(driver(l1, nic)? == nic.driver());
    }
    Ok(())
}

/// The same cards over vfio-user, passed through by our daemon, in stock QEMU; with MSI-X too.
fn our_way(l1: &L1, news: &dyn Fn(&str)) -> Result<()> {
    let nics = [Nic::Rtl8139, Nic::Ne2000, Nic::I82574, Nic::Virtio];
    let names = ["nic1", "nic2", "nic3", "nic4"];
    let daemon = l1.serve("passing", "")?;
    for (nic, name) in nics.iter().zip(names) {
        daemon.text(&format!("pci add {name} --host {} --mode passthrough", nic.address()))?;
        ensure!(driver(l1, *nic)? == "vfio-pci");
    }
    let guest = l1.debian_by(Version::Newer, "passed", &daemon.guest_args(&names, 256)?, "")?;
    news("the guest is up");
    // NE2000 moves each word by a message of its own.
    for (nic, count) in nics.into_iter().zip([300, 10, 300, 100]) {
        let passed = guest.raise(nic).and_then(|()| guest.ping_all(nic, count, 1000));
        passed.with_context(|| format!("QEMU said:\n{}\nioplane said:\n{}", guest.said(), daemon.said()))?;
    }
    guest.writes_high(Nic::I82574)?;
    news("a guest resets one");
    a_guest_resets_it(&guest, Nic::Virtio)?;
    guest.ping_all(Nic::Virtio, 100, 1000)?;
    let faults = daemon.json("pci show nic4")?["hardware_faults"].clone();
    ensure!(faults.get("resets").is_none(), "{faults}");
    news("they are given back");
    daemon.refused("pci remove nic1")?;
    guest.lower(Nic::I82574)?;
    guest.kill()?;
    // The VMM's end is heard a moment later than it happens.
    daemon.text("pci remove nic1 --force")?;
    ensure!(driver(l1, Nic::Rtl8139)? == Nic::Rtl8139.driver());
    // A daemon that is killed leaves the others to the one that comes after it.
    daemon.kill()?;
    let daemon = l1.serve("passing", "")?;
    for (nic, name) in nics.iter().zip(names).skip(1) {
        daemon.text(&format!("pci remove {name}"))?;
        ensure!(driver(l1, *nic)? == nic.driver());
    }
    daemon.stop()
}

#[test]
fn cards_are_taken_through_vfio() -> Result<()> {
    let begun = std::time::Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_with_nics(2048, &[Nic::Rtl8139, Nic::Ne2000, Nic::I82574, Nic::Virtio], &news)?;
    news("cards are used and given back");
    cards_are_used_and_given_back(&l1)?;
    news("leases are kept and recovered");
    leases_are_kept_and_recovered(&l1)?;
    news("the kernel's way");
    the_kernels_way(&l1)?;
    news("our way");
    our_way(&l1, &news)?;
    news("done");
    Ok(())
}

/// A client that has left and keeps the descriptor of a card, or a mapping of it, could drive the card into the memory of the next
/// guest. So nobody is let in until it has ended, by itself or by signal 9.
#[test]
fn hole_09_who_keeps_a_card_keeps_the_next_client_out() -> Result<()> {
    let begun = std::time::Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_with_nics(1024, &[Nic::Rtl8139], &news)?;
    let keeper = built("ioplane-testkit", "keeper")?;
    let (keeper, address) = (keeper.display(), Nic::Rtl8139.address());
    let daemon = l1.serve("keeping", "")?;
    daemon.text(&format!("pci add nic1 --host {address} --mode passthrough"))?;
    let socket = "/tmp/keeping/nic1.sock";
    let knock = || l1.start(&format!("{keeper} knock {socket}"))?.wait(MINUTE);
    let admitted = || -> Result<()> {
        let said = knock()?;
        ensure!(said.status == 0 && said.output.contains("admitted"), "{said:?}\n{}", daemon.said());
        Ok(())
    };
    admitted()?;
    for what in ["fd", "map"] {
        news(what);
        let holder = l1.start(&format!("exec {keeper} keep {socket} {what}"))?;
        holder.expect("kept", MINUTE)?;
        for _ in 0..2 {
            let said = knock()?;
            ensure!(said.status == 1 && said.output.contains("busy"), "{said:?}\n{}", daemon.said());
        }
        let shown = daemon.text("pci list")?;
        ensure!(shown.contains("UNUSABLE") && shown.contains("keeper, pid"), "{shown}");
        // What may be asked for now, and is refused for the same reason.
        let refused = daemon.refused("pci reset nic1")?;
        ensure!(refused.contains("keeper, pid"), "{refused}");
        holder.kill()?;
        admitted()?;
        let shown = daemon.text("pci list")?;
        ensure!(!shown.contains("UNUSABLE"), "{shown}");
    }
    // On demand, with nobody there.
    let holder = l1.start(&format!("exec {keeper} keep {socket} fd"))?;
    holder.expect("kept", MINUTE)?;
    ensure!(knock()?.status == 1);
    holder.kill()?;
    daemon.text("pci reset nic1")?;
    admitted()?;
    daemon.text("pci remove nic1")?;
    ensure!(driver(&l1, Nic::Rtl8139)? == Nic::Rtl8139.driver());
    daemon.stop()
}

/// Without interrupt remapping a card can write any interrupt of the host into its interrupt controllers: no card is taken, whatever the module's
/// parameter says, unless whoever adds it says so too.
#[test]
fn hole_15_no_card_is_taken_without_interrupt_remapping() -> Result<()> {
    let begun = std::time::Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_with_nics_and(1024, &[Nic::Rtl8139], "intremap=off", &news)?;
    let address = Nic::Rtl8139.address();
    let daemon = l1.serve("remapping", "")?;
    let said = daemon.text("doctor")?;
    let finding = said.lines().position(|line| line.contains("remapping")).with_context(|| said.clone())?;
    let lines: Vec<&str> = said.lines().skip(finding).take(3).collect();
    ensure!(lines[0].starts_with("lacking") && lines[2].contains("intremap"), "{said}");
    let add = format!("pci add nic1 --host {address}");
    let unsafely = format!("{add} --unsafe-interrupts");
    for words in [&add, &unsafely, &format!("{add} --force")] {
        let said = daemon.refused(words)?;
        ensure!(said.contains("interrupt remapping"), "{words}: {said}");
        ensure!(driver(&l1, Nic::Rtl8139)? == Nic::Rtl8139.driver(), "{words}: touched");
    }
    l1.run("echo Y >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", MINUTE)?;
    for words in [&add, &format!("{add} --force")] {
        let said = daemon.refused(words)?;
        ensure!(said.contains("interrupt remapping"), "{words}: {said}");
    }
    daemon.text(&unsafely)?;
    daemon.text("pci remove nic1")?;
    daemon.stop()
}
