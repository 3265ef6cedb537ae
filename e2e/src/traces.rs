//! Work of a guest whose accesses to devices are the same each time, and whether they are: traces of QEMU, with clusters and without.

use crate::clustering::saved;
use crate::l1::L1;
use crate::l2::L2;
use crate::preload::access_trace;
use anyhow::{Result, ensure};

/// What a guest has found: its PCI functions with their configuration spaces, ports, memory, and what the kernel complains of.
pub const INVENTORY: &str = "
    for function in /sys/bus/pci/devices/*; do
        echo \"${function##*/}\"; od -An -v -tx1 \"$function/config\"; cat \"$function/resource\"
    done
    cat /proc/ioports; grep -v -e Kernel -e 'System RAM' /proc/iomem
    dmesg -l err,crit,alert,emerg | sed 's/^[^]]*] //'";
/// Reads, writes what was there, and looks at configuration spaces.
pub const TRACED: &str = "set -e
    dd if=/dev/sda of=/dev/null bs=4k count=4 skip=64 iflag=direct 2>&1
    dd if=/folder/copy of=/dev/sda bs=4k count=4 skip=64 seek=64 oflag=direct conv=notrunc 2>&1
    for function in /sys/bus/pci/devices/*; do od -An -v -tx1 \"$function/config\"; done";
/// Those of [`TRACED`], as QEMU calls them.
pub const REGIONS: [&str; 3] = ["ide", "pci-conf-idx", "pci-conf-data"];
/// A serial port that is no console is opened and written to. The RTC's memory is read: an index and a value for each byte. An NE2000's driver finds it,
/// brings it up and sends frames that are the same each time; QEMU answers every second one, which asks for its address.
pub const DEVICES: &str = "set -e
    for place in default all; do echo 1 >/proc/sys/net/ipv6/conf/$place/disable_ipv6; done
    modprobe -r ne2k-pci
    stty -F /dev/ttyS1 38400 raw
    for line in first second third; do echo \"the $line line\" >/dev/ttyS1; done
    cat /sys/bus/nvmem/devices/cmos_nvram*/nvmem | od -An -v -tx1
    modprobe ne2k-pci
    for place in /sys/class/net/*; do
        [ \"$(basename \"$(readlink $place/device/driver)\")\" = ne2k-pci ] && break
    done
    /folder/busybox ip link set ${place##*/} up
    perl -e '
        my ($index, $mac) = @ARGV;
        $mac =~ s/://g;
        socket(my $socket, 17, 3, 0) or die \"socket: $!\";
        my $to = pack(\"S n l S C C a8\", 17, 0x88b5, $index, 0, 0, 0, \"\");
        my $asks = pack(\"H*\", \"ffffffffffff${mac}08060001080006040001${mac}0a00020f0000000000000a000202\");
        my $long = pack(\"H*\", \"ffffffffffff${mac}88b5\") . join(\"\", map { chr($_ % 251) } 1 .. 1000);
        for my $frame (($asks . \"\\0\" x 18, $long) x 4) {
            send($socket, $frame, 0, $to) == length($frame) or die \"send: $!\";
        }' $(cat $place/ifindex $place/address)
    /folder/busybox ip link set ${place##*/} down
    modprobe -r ne2k-pci";
/// QEMU's names of their regions, and the fewest accesses that prove anything.
pub const DEVICE_REGIONS: [(&str, usize); 4] =
    [("serial", 40), ("rtc", 100), ("rtc-index", 100), ("ne2000", 1000)];

/// What these regions get during `work`, without the accesses of the guest's console, whose lines begin with the time.
pub fn device_trace(
    l1: &L1,
    guest: &L2<'_>,
    name: &str,
    regions: &[(&str, usize)],
    work: &str,
) -> Result<Vec<String>> {
    let names: Vec<&str> = regions.iter().map(|(region, _)| *region).collect();
    let mut trace = access_trace(l1, guest, name, &names, work)?;
    trace.retain(|line| !line.contains(" addr 0x3f"));
    Ok(trace)
}

/// Traces with clustering on, when more than `enough` exits are to be saved, and then off.
pub fn on_and_off(
    l1: &L1,
    name: &str,
    enough: u64,
    trace: impl Fn() -> Result<Vec<String>>,
) -> Result<[Vec<String>; 2]> {
    let begun = saved(&l1.clustering(&format!("on --vm {name}"))?);
    let with = trace()?;
    let on = saved(&l1.clustering(&format!("off --vm {name}"))?);
    let without = trace()?;
    let off = saved(&l1.clustering(&format!("--vm {name}"))?);
    ensure!(on > begun + enough && off <= on + 2, "exits saved: {begun}, with clusters {on}, without {off}");
    Ok([with, without])
}

/// Without what depends on how long something takes: a device that is asked whether it is busy yet, and asked again.
fn timeless(trace: &[String]) -> Vec<&str> {
    let busy = |line: &str| {
        let status = line.starts_with("read addr 0x1f7 ") || line.starts_with("read addr 0x3f6 ");
        let value = line.split("value 0x").nth(1).and_then(|rest| rest.split(' ').next());
        status
            && value
                .and_then(|word| u64::from_str_radix(word, 16).ok())
                .is_some_and(|value| value & 0x80 != 0)
    };
    let mut kept: Vec<&str> = trace.iter().map(String::as_str).filter(|line| !busy(line)).collect();
    kept.dedup_by(|next, before| next == before && next.starts_with("read addr 0x"));
    kept
}

/// Where these differ first, and what is around.
fn difference(with: &[&str], without: &[&str]) -> Option<String> {
    let at = (0..with.len().max(without.len())).find(|at| with.get(*at) != without.get(*at))?;
    let around = |trace: &[&str]| -> String {
        trace.iter().skip(at.saturating_sub(8)).take(16).map(|line| format!("{line}\n")).collect()
    };
    Some(format!("number {at} differs; with clusters:\n{}without:\n{}", around(with), around(without)))
}

/// The same accesses of [`REGIONS`], of each more than a hundred.
pub fn same_trace(with: &[String], without: &[String]) -> Result<()> {
    let (with, without) = (timeless(with), timeless(without));
    for region in REGIONS {
        let of = without.iter().filter(|line| line.contains(&format!("name '{region}'"))).count();
        ensure!(of > 100, "{of} accesses of {region} prove nothing: {without:#?}");
    }
    if let Some(difference) = difference(&with, &without) {
        anyhow::bail!("{difference}");
    }
    eprintln!("{} accesses are the same", with.len());
    Ok(())
}

/// Each device gets the same writes, and its registers are read in the same order. What is read depends on time, and so does how often a driver
/// reads one register in a row. An NE2000 interrupts when it likes: of it the data that are written are the same, and which registers are used.
pub fn same_devices(with: &[String], without: &[String], regions: &[(&str, usize)]) -> Result<()> {
    let mut wrong = String::new();
    for (region, enough) in regions {
        let name = format!("name '{region}'");
        let count = without.iter().filter(|line| line.ends_with(&name)).count();
        ensure!(count >= *enough, "{count} accesses of {region} prove nothing: {without:#?}");
        for what in ["write", "read"] {
            let [with, without] = [with, without].map(|trace| accesses(trace, what, region));
            match difference(&with, &without) {
                Some(difference) => wrong += &format!("{region}, {what}: {difference}"),
                None => eprintln!("{region}, {what}: {} accesses are the same", with.len()),
            }
        }
    }
    ensure!(wrong.is_empty(), "{wrong}");
    Ok(())
}

/// Writes to a region whole; of reads where they read, and several in a row once. The RTC's memory is read byte by byte at one port.
fn accesses<'a>(trace: &'a [String], what: &str, region: &str) -> Vec<&'a str> {
    let name = format!("name '{region}'");
    let lines = trace.iter().filter(|line| line.ends_with(&name) && line.starts_with(what));
    let lines: Vec<&str> = lines.map(String::as_str).collect();
    let place = |line: &'a str| line.split(" value").next().unwrap_or(line);
    let once = |lines: &[&'a str]| -> Vec<&'a str> {
        let mut places: Vec<&str> = lines.iter().map(|line| place(line)).collect();
        if region != "rtc" {
            places.dedup();
        }
        places
    };
    match (what, region) {
        (_, "ne2000") => {
            // Its registers have a byte each, its data come by words.
            let (registers, data): (Vec<&str>, Vec<&str>) =
                lines.into_iter().partition(|line| line.contains(" size 1 "));
            let mut used = once(&registers);
            used.sort_unstable();
            used.dedup();
            used.extend(if what == "write" { data } else { once(&data) });
            used
        }
        ("read", _) => once(&lines),
        _ => lines,
    }
}
