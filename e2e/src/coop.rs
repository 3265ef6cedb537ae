//! A driver that cooperates, whose function goes to another one again and again while the driver does what takes many steps: each move lands in another
//! of them.

use crate::inner::Inner;
use crate::l2::L2;
use crate::nics::Pings;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// `ethtool -G NAME rx N tx N`, by its system call.
const RING: &str = r#"
use Socket; my ($name, $count) = @ARGV;
socket(my $socket, AF_INET, SOCK_DGRAM, 0) or die "socket: $!";
my $ring = pack("L9", 0x11, 0, 0, 0, 0, $count, 0, 0, $count);
my $request = pack("a16Px16", $name, $ring);
ioctl($socket, 0x8946, $request) or die "rings: $!";
"#;

/// `ethtool -S NAME`, by its system call, so often; prints the values of the last call, and how long all of them took in the guest, ns.
pub const STATISTICS: &str = r#"
use Socket; my ($name, $count) = @ARGV;
socket(my $socket, AF_INET, SOCK_DGRAM, 0) or die "socket: $!";
my $data = pack("LLx104", 0x1d, 13);
my $request = pack("a16Px16", $name, $data);
sub now {
    my $time = pack("QQ", 0, 0);
    syscall(228, 1, $time) == 0 or die "time: $!";
    my ($s, $ns) = unpack("QQ", $time);
    return $s * 1_000_000_000 + $ns;
}
my $begun = now();
for (1 .. $count) { ioctl($socket, 0x8946, $request) or die "statistics: $!"; }
my $took = now() - $begun;
print join(" ", unpack("x8Q13", $data)), "\n$took\n";
"#;

/// Loads the changed igbvf from the guest's folder.
pub const LOAD_IGBVF: &str = "insmod /folder/igbvf.ko";

/// Frame size, rings, down and up, again and again until `/folder/enough` is there. Prints `round`, and `failed` with what.
const OPERATIONS: &str = "ip=\"/folder/busybox ip\"; name=$(ls /sys/bus/pci/drivers/DRIVER/*/net)
     while ! [ -e /folder/enough ]; do
         for mtu in 1400 1500; do
             $ip link set mtu $mtu dev $name || echo failed: mtu
             perl /folder/ring.pl $name $((mtu == 1400 ? 128 : 256)) || echo failed: rings
             $ip link set promisc on dev $name || echo failed: promisc
             $ip link set down dev $name || echo failed: down
             $ip link set up dev $name || echo failed: up
             $ip link set promisc off dev $name || echo failed: promisc
         done
         echo round
     done";

/// Operations that go on in a guest.
struct Operations<'a> {
    guest: &'a L2<'a>,
    job: u32,
}

impl Operations<'_> {
    fn output(&self) -> String {
        let path: PathBuf = self.guest.folder().join(format!("{}.out", self.job));
        fs::read_to_string(path).unwrap_or_default()
    }

    fn rounds(&self) -> usize {
        self.output().matches("round").count()
    }

    /// They go on, and none has failed.
    fn go_on(&self) -> Result<()> {
        let (before, end) = (self.rounds(), Instant::now() + 3 * MINUTE);
        while self.rounds() == before {
            ensure!(!self.output().contains("failed"), "{}", self.output());
            ensure!(Instant::now() < end, "the driver is stuck in one of its operations: {}", self.output());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Moves the function `nic0` of the guest, driven by `driver`, so often between these two, whatever its driver does at that moment. How often all the operations
/// were carried out meanwhile.
pub fn moves_inside_operations(
    guest: &L2<'_>,
    daemon: &Inner<'_>,
    functions: [&str; 2],
    driver: &str,
    moves: usize,
) -> Result<usize> {
    fs::write(guest.folder().join("ring.pl"), RING)?;
    let job = guest.start(&OPERATIONS.replace("DRIVER", driver))?;
    let operations = Operations { guest, job };
    operations.go_on()?;
    let before = daemon.brought_back("nic0")?;
    for number in 1..=moves {
        let at = daemon.json("pci show nic0")?["host"].clone();
        let to = if at == *functions[0] { functions[1] } else { functions[0] };
        let report = daemon.json(&format!("pci move nic0 --to {to} --deadline 20s"))?;
        ensure!(report.get("complaint").is_none_or(Value::is_null), "{report}");
        let after = daemon.brought_back("nic0").with_context(|| format!("move {number}"))?;
        ensure!(after == before + number as u64, "{after} after {number} moves");
        if number % 10 == 0 {
            operations.go_on().with_context(|| format!("after {number} moves"))?;
        }
    }
    fs::write(guest.folder().join("enough"), "")?;
    guest.wait_for(&format!("{job}.status"), 3 * MINUTE)?;
    ensure!(!operations.output().contains("failed"), "{}", operations.output());
    guest.raise_vf(driver, "true")?;
    let got = guest.ping(crate::igb::PEER_IP, 50, 1000)?;
    ensure!(got == Pings { sent: 50, received: 50 }, "{got:?}");
    Ok(operations.rounds())
}
