//! A guest whose rings are packed (QEMU's `packed=on`): it boots, its data is right, and the daemon's death is a pause.

use anyhow::{Result, ensure};
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MINUTE, expect_quiet, expect_right, finish, mixed, play};
use ioplane_e2e::{Qemu, Version};
use std::time::Duration;

/// VIRTIO_F_RING_PACKED (virtio 1.3, section 6).
const RING_PACKED: u64 = 1 << 34;
const MEMORY_MIB: u64 = 256;

#[test]
fn a_guest_with_packed_rings_boots_works_and_outlives_the_daemon() -> Result<()> {
    play("[[core]]\nspin_us = 200\n", |stage| {
        stage.add_root("root")?;
        stage.add_blank("data", 64 << 20, &["--queues", "2"])?;
        let args = stage.daemon.qemu_args(Version::Host, MEMORY_MIB, &["root", "data"])?;
        let args = args.replace("-device vhost-user-blk-pci,", "-device vhost-user-blk-pci,packed=on,");
        let vm = stage.boot(Qemu::new("packed").memory_mib(MEMORY_MIB).args(&args))?;
        for disk in ["root", "data"] {
            let features = stage.daemon.disk(disk)?.features;
            ensure!(features & RING_PACKED != 0, "{disk}'s rings are not packed: features {features:#x}");
        }
        let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
        let load = vm.agent().load(LoadSpec { mix, ..mixed("data", 32 << 20) })?;
        load.progress(MINUTE)?;
        let mut replayed = 0;
        // Until a kill has hit a request in flight; twelve that do not are no chance.
        for kill in 0..12 {
            if replayed > 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(150 + 37 * kill));
            stage.daemon.kill9();
            stage.daemon.restart()?;
            stage.until("the guest's requests are answered again", || {
                let disk = stage.daemon.disk("data")?;
                Ok(disk.connected && disk.totals.requests > disk.totals.replayed + 20)
            })?;
            load.progress(MINUTE)?;
            let report = load.mark()?;
            expect_right(&report).map_err(|error| vm.explain(error))?;
            replayed += stage.daemon.disk("data")?.totals.replayed;
        }
        let (report, verified) = finish(vm.agent(), load).map_err(|error| vm.explain(error))?;
        stage.say(format!("{report:?}; {} blocks right; {replayed} requests replayed", verified.blocks));
        let copied = vm.agent().copy_check("serial:data", 0, 4 << 20, MINUTE)?;
        ensure!(copied.same, "{copied:?}");
        expect_quiet(vm.agent()).map_err(|error| vm.explain(error))?;
        ensure!(replayed > 0, "no kill hit a request in flight: the load is too weak to prove anything");
        vm.poweroff()?;
        stage.expect_clean()
    })
}
