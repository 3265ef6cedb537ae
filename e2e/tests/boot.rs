//! Stock guests boot from ioplane's disks by firmware; direct kernel boot is in every other story. That the guests' disk boots
//! without ioplane too is proven by `ioplane-e2e-assets --boot`.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::stage::{MINUTE, Stage, expect_quiet, finish, mixed, play};
use ioplane_e2e::{Firmware, Version, Vm};

const DATA: u64 = 64 << 20;

fn launch(stage: &Stage, name: &str, firmware: Firmware, version: Version) -> Result<Vm> {
    let (root, data) = (format!("{name}-root"), format!("{name}-data"));
    stage.add_root(&root)?;
    stage.add_blank(&data, DATA, &[])?;
    stage.qemu(name, version, &[&root, &data])?.firmware(firmware).launch(&stage.guest)
}

/// Two ways at once, to save time: SeaBIOS in the host's QEMU, OVMF in a newer one.
#[test]
fn guests_boot_from_their_disks_by_seabios_and_by_ovmf() -> Result<()> {
    play("", |stage| {
        let mut guests = [
            launch(stage, "seabios", Firmware::SeaBios, Version::Host)?,
            launch(stage, "ovmf", Firmware::Ovmf, Version::Newer)?,
        ];
        for vm in &mut guests {
            let hello = vm.wait_up(MINUTE, &|line| eprintln!("{line}"))?.clone();
            let name = vm.name().to_owned();
            ensure!((hello.firmware == "efi") == (name == "ovmf"), "{name}: {hello:?}");
        }
        let mut loads = Vec::new();
        for vm in &guests {
            let data = format!("{}-data", vm.name());
            let found = vm.agent().blockdev(&format!("serial:{data}"))?;
            ensure!(found.size == DATA && !found.ro && found.write_cache == "write back", "{found:?}");
            ensure!(found.discard_max > 0 && found.write_zeroes_max > 0, "{found:?}");
            loads.push(vm.agent().load(mixed(&data, DATA))?);
        }
        for load in &loads {
            for _ in 0..3 {
                load.progress(MINUTE)?;
            }
        }
        for (vm, load) in guests.iter().zip(loads) {
            let (report, verified) = finish(vm.agent(), load).map_err(|error| vm.explain(error))?;
            stage.say(format!("{}: {report:?}; {} blocks verified", vm.name(), verified.blocks));
            let data = format!("serial:{}-data", vm.name());
            let copied = vm.agent().copy_check(&data, 0, 4 << 20, MINUTE)?;
            ensure!(copied.same, "{copied:?}");
            expect_quiet(vm.agent())?;
        }
        for vm in guests {
            let name = vm.name().to_owned();
            vm.poweroff().with_context(|| format!("switch {name} off"))?;
        }
        stage.expect_clean()
    })
}
