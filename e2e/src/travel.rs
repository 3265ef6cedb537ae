//! Guests of L1 that go from one QEMU to another with a virtual function of a card, and how they are talked to meanwhile: a shared folder is
//! nothing that can migrate, so a shell at their second serial port listens.

use crate::inner::Inner;
use crate::l1::L1;
use crate::l2::L2;
use crate::process::built;
use crate::version::Version;
use anyhow::{Context, Result};
use std::fs;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
/// Where `ioplane-stream` answers in the guest.
pub const PORT: u16 = 7;

/// Starts the shell and what answers to traffic, then takes the folder away as soon as this script has ended.
const DEPART: &str = "set -e
    cp /folder/ioplane-stream /folder/busybox /tmp/
    cat >/tmp/shell <<'END'
stty -F /dev/ttyS1 raw -echo
while read -r line; do eval \"$line\"; echo \"@@$?@@\"; done </dev/ttyS1 >/dev/ttyS1 2>&1
END
    cat >/tmp/depart <<'END'
cd /tmp
until umount /folder; do sleep 0.1; done
until chroot /proc/1/root /bin/busybox umount /folder; do sleep 0.1; done
echo departed
END
    # What a slow guest reads late is not lost here.
    echo 8388608 >/proc/sys/net/core/rmem_max; echo 8388608 >/proc/sys/net/core/rmem_default
    setsid sh /tmp/shell </dev/null >/dev/null 2>&1 &
    setsid sh /tmp/depart </dev/null >/dev/ttyS0 2>&1 &
    setsid /tmp/ioplane-stream answer 7 </dev/null >/tmp/answer 2>&1 &";

/// Name of the VM, in each QEMU.
pub const VM: &str = "web";

/// QEMU's arguments for such a guest in the QEMU called `name`: the serial port; a second monitor, `/tmp/NAME.watch`, for whoever looks on while
/// somebody uses the first one; and the name of the VM, which goes before that of the QEMU.
fn ways(name: &str) -> String {
    format!(
        "-serial unix:/tmp/{name}.shell,server=on,wait=off -qmp unix:/tmp/{name}.watch,server=on,wait=off -name {VM}"
    )
}

impl L1 {
    /// Boots a guest that can leave; more arguments for QEMU.
    pub fn traveller(&self, name: &str, args: &str) -> Result<L2<'_>> {
        self.traveller_by("", name, args)
    }

    /// The same with words before the command, as [`L1::interposed`] gives them.
    pub fn traveller_by(&self, before: &str, name: &str, args: &str) -> Result<L2<'_>> {
        self.traveller_with(before, name, args, "")
    }

    /// The same with more words for the kernel.
    pub fn traveller_with(&self, before: &str, name: &str, args: &str, append: &str) -> Result<L2<'_>> {
        let args = format!("{args} {}", ways(name));
        let guest = self.debian_after(before, Version::Newer, name, &args, append)?;
        guest.run("echo pfifo_fast >/proc/sys/net/core/default_qdisc")?;
        Ok(guest)
    }

    /// Starts a QEMU where such a guest can arrive, at `/tmp/NAME.in`; it stands still there until somebody lets it go on.
    pub fn awaits_traveller(&self, name: &str, args: &str) -> Result<L2<'_>> {
        self.awaits_traveller_at(name, args, &format!("unix:/tmp/{name}.in"))
    }

    /// The same where QEMU's `-incoming` says, a socket or a port of TCP.
    pub fn awaits_traveller_at(&self, name: &str, args: &str, at: &str) -> Result<L2<'_>> {
        self.awaits_traveller_by("", name, args, at)
    }

    /// The same with words before the command, as [`L1::interposed`] gives them.
    pub fn awaits_traveller_by(&self, before: &str, name: &str, args: &str, at: &str) -> Result<L2<'_>> {
        let args = format!("{args} {} -incoming {at}", ways(name));
        let guest = self.start_debian(before, Version::Newer, name, &args, "")?;
        guest.takes_guests_at(at)?;
        Ok(guest)
    }
}

impl L2<'_> {
    /// From here on it is talked to by [`L2::ask`] alone, it answers to traffic, and it can migrate.
    pub fn depart(&self) -> Result<()> {
        fs::copy(built("ioplane-stream")?, self.folder().join("ioplane-stream"))?;
        self.run(DEPART)?;
        let end = std::time::Instant::now() + MINUTE;
        while !self.console().contains("departed") {
            anyhow::ensure!(std::time::Instant::now() < end, "the folder stays: {}", self.console());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

impl L1 {
    /// Has the shell of the guest in the QEMU `name` do a line; what it prints.
    pub fn ask(&self, name: &str, line: &str) -> Result<String> {
        let (client, line) = (built("ioplane-stream")?, line.replace('\'', "'\\''"));
        let script = format!("exec {} ask /tmp/{name}.shell '{line}'", client.display());
        self.run(&script, 2 * MINUTE).with_context(|| format!("ask the guest in {name}"))
    }
}

impl L1 {
    /// The status of the migration of the QEMU `name`, by its second monitor.
    pub fn migration_of(&self, name: &str) -> Result<String> {
        let said = self
            .run(&format!("{} /tmp/{name}.watch query-migrate", built("ioplane-qmp")?.display()), MINUTE)?;
        let status: serde_json::Value = serde_json::from_str(&said).with_context(|| said.clone())?;
        Ok(status["status"].as_str().unwrap_or("none").to_owned())
    }
}

impl Inner<'_> {
    /// As [`Inner::guest_args`], of one function, which is on the guest's bus `bus`.
    pub fn args_on_bus(&self, function: &str, memory_mib: u64, bus: &str) -> Result<String> {
        let (device, placed) =
            (r#""driver":"vfio-user-pci","#, format!(r#""driver":"vfio-user-pci","bus":"{bus}","#));
        let args = self.guest_args(&[function], memory_mib)?;
        anyhow::ensure!(args.matches(device).count() == 1, "where the device is cannot be told: {args}");
        Ok(args.replace(device, &placed))
    }
}
