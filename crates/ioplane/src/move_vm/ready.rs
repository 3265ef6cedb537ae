//! Whether a VM with PCI functions can move: what both QEMUs are set to, and what the other host has. Nothing is changed.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use ioplane_api::report::{
    DiskReport, DoneReport, FunctionReport, PhysicalReport, ServedState, Stage, StatusReport,
};
use ioplane_api::request::PhysicalForm;
use ioplane_cli::client::{Client, Method};
use ioplane_plain::plain;
use serde_json::{Value, json};

use super::bus::Found;
use super::functions::{Late, announced};
use super::monitor::Monitor;
use super::peer::Reached;
use super::{disks, refused};

/// For an answer of the other QEMU's monitor: a guest stands still meanwhile.
const PATIENCE: Duration = Duration::from_secs(20);
/// For the other daemon to say whether it expects the VM still, while nobody has begun to migrate it.
const STILL: Duration = Duration::from_secs(2);
/// QEMU's device for a vfio-user function.
const DEVICE: &str = "vfio-user-pci";
/// Ways of migrating that bring no PCI function along.
const NOT_WITH: [&str; 5] =
    ["postcopy-ram", "x-colo", "background-snapshot", "mapped-ram", "x-ignore-shared"];

/// Whether a function is such that it can go along at all.
pub(super) fn may_go(function: &FunctionReport) -> Result<()> {
    let name = &function.name;
    if function.mode == "passthrough" {
        return Err(refused(
            format!(
                "PCI function {name} is passed through as it is: nobody knows its state, and it would not go along"
            ),
            format!(
                "take it out of the VM (device_del); for virtual functions of an 82576 or 82599 there is `ioplane pci add {name} --mode migratable`"
            ),
        ));
    }
    if function.state != ServedState::Served {
        return Err(refused(
            format!("PCI function {name} is not served"),
            format!("see `ioplane pci show {name}`"),
        ));
    }
    if function.stage != Stage::Running {
        return Err(refused(
            format!("PCI function {name} is held, or is not settled"),
            format!("see `ioplane pci show {name}`; `ioplane pci resume {name}` lets it go on"),
        ));
    }
    if let Some(why) = function.not_reset.as_ref().or(function.unusable.as_ref()) {
        return Err(refused(
            format!("PCI function {name} does not work: {why}"),
            format!("see `ioplane pci show {name}`"),
        ));
    }
    if let Some(why) = &function.no_replay {
        return Err(refused(
            format!("PCI function {name} could not be brought to where its guest is: {why}"),
            "the card's physical function has to be driven by that host, with its interface up (ip link set NAME up) and its cable plugged in",
        ));
    }
    Ok(())
}

/// Whether the driver of a function here can bring it back, where its driver has to.
pub(super) fn may_leave(function: &FunctionReport) -> Result<()> {
    may_go(function)?;
    if function.mode != "cooperating" {
        return Ok(());
    }
    announced(function).map_err(|why| {
        let name = &function.name;
        refused(
            format!("PCI function {name} is moved by its guest's driver: {why}"),
            format!(
                "load the changed driver (guest/igbvf, guest/ixgbevf) in the guest and raise its interface, or add {name} with --mode migratable; see `ioplane pci show {name}`"
            ),
        )
    })
}

/// The other host.
pub(super) struct Far<'a> {
    pub there: &'a Client,
    /// Of the QEMU that waits there; `None` if it is not there yet.
    pub monitor: Option<Monitor>,
    /// That looks for it later.
    pub late: Option<Late>,
}

impl<'a> Far<'a> {
    /// The monitor there, if its QEMU waits for this VM with the same functions. `own` is the process number of the daemon here.
    pub fn look(
        vm: &str,
        functions: &[FunctionReport],
        there: Option<&'a Client>,
        reached: &Reached<'_>,
        version: &Value,
        own: u32,
    ) -> Result<(&'a Client, Monitor)> {
        let (Some(there), Some(path)) = (there, &reached.qmp_there) else { return Err(not_reached(vm)) };
        Ok((there, waiting(vm, functions, there, (path, reached.host()), version, own)?))
    }

    /// The same of a QEMU that is started later. `there` has been reached.
    pub fn later(
        vm: &str,
        (functions, disks): (&[FunctionReport], &[DiskReport]),
        there: &'a Client,
        reached: &Reached<'_>,
        version: &Value,
        own: u32,
    ) -> Result<Far<'a>> {
        let (Some(socket), Some(path)) = (&reached.there, reached.qmp_there.clone()) else {
            return Err(not_reached(vm));
        };
        reached.expects_later(there)?;
        let Some(looking) = reached.daemon()? else { return Err(not_reached(vm)) };
        let (vm, functions, disks) = (vm.to_owned(), functions.to_vec(), disks.to_vec());
        let (host, version) = (reached.host().map(str::to_owned), version.clone());
        let still = host.is_some().then(|| Client::new(socket)).transpose()?;
        let still = still.map(|there| there.with_patience(STILL).keeping());
        let look = move || {
            disks::is_ready(&looking, &disks)?;
            waiting(&vm, &functions, &looking, (&path, host.as_deref()), &version, own)
        };
        let late = Late { look: Some(Box::new(look)), still };
        Ok(Far { there, monitor: None, late: Some(late) })
    }
}

/// The monitor of the QEMU there, at a socket here, if that QEMU waits for this VM with the same functions.
fn waiting(
    vm: &str,
    functions: &[FunctionReport],
    there: &Client,
    (path, host): (&Path, Option<&str>),
    version: &Value,
    own: u32,
) -> Result<Monitor> {
    has_the_same(there, vm, functions, own)?;
    let mut monitor = Monitor::connect(path)?.of_host(host);
    monitor.set_patience(PATIENCE);
    monitor.is_surely_of(vm)?;
    let state = monitor.state()?;
    if state != "inmigrate" {
        return Err(refused(
            format!("the QEMU there does not wait for a guest: its VM is {}", plain(&state)),
            "start it with -incoming",
        ));
    }
    let other = monitor.execute("query-version", &json!({}))?;
    let number = |version: &Value| {
        let part = |field: &str| version["qemu"][field].as_u64().unwrap_or(0);
        (part("major"), part("minor"))
    };
    if number(&other) != number(version) {
        let ((major, minor), (others, other)) = (number(version), number(&other));
        return Err(refused(
            format!("the QEMU here is {major}.{minor}, and the one there is {others}.{other}"),
            "use the same version on both hosts",
        ));
    }
    settings(&mut monitor, "there")?;
    Ok(monitor)
}

/// Neither was named.
fn not_reached(vm: &str) -> anyhow::Error {
    refused(
        format!("VM {vm} has PCI functions of this daemon, which go along only if the other host is reached"),
        "name the host that expects the VM (`ioplane move expect` there): --to HOST or --there HOST; or give --there SOCKET, the control socket of the daemon there, and \
         --qmp-there SOCKET, the monitor of the QEMU there, as ssh -L forwards them",
    )
}

/// Whether a QEMU is set to migrate as functions can. Says whether it pauses before the switch-over.
pub(super) fn settings(monitor: &mut Monitor, at: &str) -> Result<bool> {
    let capabilities = monitor.execute("query-migrate-capabilities", &json!({}))?;
    let is_on = |name: &str| {
        let mut all = capabilities.as_array().into_iter().flatten();
        all.any(|one| one["capability"] == name && one["state"] == true)
    };
    if let Some(name) = NOT_WITH.into_iter().find(|name| is_on(name)) {
        return Err(refused(
            format!("the QEMU {at} is set to migrate with {name}, by which no PCI function goes along"),
            format!("switch it off by the monitor {at}: migrate_set_capability {name} off"),
        ));
    }
    let parameters = monitor.execute("query-migrate-parameters", &json!({}))?;
    match parameters["mode"].as_str() {
        None | Some("normal") => Ok(is_on("pause-before-switchover")),
        Some(mode) => Err(refused(
            format!(
                "the QEMU {at} is set to migrate in mode {}, by which no PCI function goes along",
                plain(mode)
            ),
            format!("set it back by the monitor {at}: migrate_set_parameter mode normal"),
        )),
    }
}

/// Whether the other daemon has the same functions, each used by the QEMU that waits there.
fn has_the_same(there: &Client, vm: &str, functions: &[FunctionReport], own: u32) -> Result<()> {
    let status: StatusReport = there.get("/v1/status")?;
    let same = |other: &FunctionReport| {
        functions.iter().any(|function| function.socket == other.socket && function.vm == other.vm)
    };
    if status.pid == own && status.functions.iter().any(same) {
        return Err(refused(
            "--there leads to this host's own daemon",
            "give the control socket of the other one, as ssh -L forwards it",
        ));
    }
    for function in functions {
        let name = &function.name;
        let Some(other) = status.functions.iter().find(|other| other.name == *name) else {
            return Err(refused(
                format!("the other host has no PCI function {name}"),
                "add it there with `ioplane pci add`, then start QEMU there with -incoming",
            ));
        };
        is_same(function, other)?;
        may_go(other).map_err(|error| super::with_remedy(error, "the other host", ""))?;
        let used_by = other.vm.as_ref().filter(|_| other.connected).map(|vm| vm.name.as_str());
        match used_by {
            Some(other) if other == vm => {}
            Some(other) => {
                return Err(refused(
                    format!("VM {} of the other host uses PCI function {name}", plain(other)),
                    "give the VM there the same name (-name), or the function to the right one",
                ));
            }
            None => {
                return Err(refused(
                    format!("no QEMU of the other host uses PCI function {name} yet"),
                    format!(
                        "start it there with -incoming, and what `ioplane qemu-args {name}` prints there"
                    ),
                ));
            }
        }
        may_have(there, function)?;
    }
    Ok(())
}

/// Whether the other host can give a function what its guest has at the physical function here.
fn may_have(there: &Client, function: &FunctionReport) -> Result<()> {
    let Some(PhysicalReport { address, settings, .. }) = function.physical else { return Ok(()) };
    let path = format!("/v1/pci/{}/carried/check", function.name);
    let form = PhysicalForm { address, settings };
    let checked = there.ask::<DoneReport>(Method::POST, &path, Some(&form));
    checked.map(drop).map_err(|error| super::with_remedy(error, "the other host", ""))
}

/// Whether a function of the other host can take this one's place.
fn is_same(function: &FunctionReport, other: &FunctionReport) -> Result<()> {
    let of = |report: &FunctionReport| (report.mode.clone(), report.model.clone(), report.id.clone());
    let shown = |report: &FunctionReport| {
        let (mode, model, id) = of(report);
        [Some(mode), model, id].into_iter().flatten().collect::<Vec<_>>().join(" ")
    };
    let name = &function.name;
    if of(function) != of(other) {
        return Err(refused(
            format!(
                "PCI function {name} is {} here, and {} on the other host",
                shown(function),
                shown(other)
            ),
            "give it the same mode and the same kind of function on both hosts",
        ));
    }
    if function.mapped_pages.is_some() != other.mapped_pages.is_some() {
        let mapped = |report: &FunctionReport| if report.mapped_pages.is_some() { "with" } else { "without" };
        return Err(refused(
            format!(
                "PCI function {name} was added {} --mapped here, and {} it on the other host: its BAR has another size there",
                mapped(function),
                mapped(other)
            ),
            "remove it there, and add it as it is here",
        ));
    }
    if function.mac != other.mac {
        return Err(refused(
            format!("PCI function {name} of the other host has another address"),
            format!("add it there with --mac {}", function.mac.as_deref().unwrap_or_default()),
        ));
    }
    Ok(())
}

/// Whether QEMU has it by vfio-user. Of one without an `id` nobody can tell.
fn is_ours(monitor: &mut Monitor, found: &Found) -> Result<bool> {
    if found.id.is_empty() {
        return Ok(false);
    }
    let path = format!("/machine/peripheral/{}", found.id);
    match monitor.execute("qom-get", &json!({ "path": path, "property": "type" })) {
        Ok(kind) => Ok(kind == DEVICE),
        // Not one that a person has added.
        Err(error) if format!("{error:#}").contains("not found") => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the VM has functions by vfio-user besides those that move: they would arrive dead.
pub(super) fn no_others(monitor: &mut Monitor, all: &[Found], moving: &[Found]) -> Result<()> {
    for found in all.iter().filter(|found| !moving.contains(found)) {
        if is_ours(monitor, found)? {
            let error = format!(
                "the VM's device {} at {} is no PCI function of this daemon",
                plain(&found.id),
                found.place
            );
            return Err(refused(error, "it would not go along: unplug it (device_del)"));
        }
    }
    Ok(())
}

/// Which of the guest's functions is this one: by the `id` that `ioplane qemu-args` gives it, else the only one of its kind that QEMU has by vfio-user.
pub(super) fn on_the_bus(monitor: &mut Monitor, all: &[Found], report: &FunctionReport) -> Result<Found> {
    let id = format!("ioplane-{}", report.name);
    let mut candidates = Vec::new();
    for found in all.iter().filter(|found| report.id.as_ref() == Some(&found.kind)) {
        if is_ours(monitor, found)? {
            candidates.push(found);
        }
    }
    if let Some(found) = candidates.iter().find(|found| found.id == id) {
        return Ok((*found).clone());
    }
    match candidates[..] {
        [found] => Ok(found.clone()),
        _ => Err(refused(
            format!("which device of the VM is PCI function {} cannot be told", report.name),
            format!(
                "start its QEMU with what `ioplane qemu-args {}` prints: the device has id={id}",
                report.name
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(mode: &str, cooperation: Value) -> Value {
        json!({
            "name": "nic0", "state": "served", "origin": "added", "connected": true, "connections": 1, "socket": "/run/nic0.sock",
            "mode": mode, "id": "8086:10ca", "guard": "/run/nic0.vdi", "stage": "running", "front_end_faults": {},
            "traffic": serde_json::to_value(ioplane_api::report::TrafficReport::default()).unwrap(),
            "hardware_faults": {}, "cooperation": cooperation,
        })
    }

    fn left(function: Value) -> String {
        let function: FunctionReport = serde_json::from_value(function).unwrap();
        may_leave(&function).err().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    fn driver(announced: bool, refused: Option<&str>) -> Value {
        json!({ "announced": announced, "refused": refused, "entries": 28, "moves": 0, "replayed": 0 })
    }

    #[test]
    fn a_function_whose_driver_cooperates_needs_one_that_does() {
        assert_eq!(left(function("cooperating", driver(true, None))), "");
        let said = left(function("cooperating", driver(false, None)));
        assert!(
            said.contains("nic0 is moved by its guest's driver") && said.contains("has not announced a page"),
            "{said}"
        );
        let said = left(function("cooperating", driver(false, Some("the driver's page is of format 9"))));
        assert!(said.contains("is of format 9"), "{said}");
        assert!(!left(function("cooperating", Value::Null)).is_empty());
        // Of the others nobody asks for one.
        assert_eq!(left(function("migratable", Value::Null)), "");
        // There, where no guest is yet, there is no driver either.
        let there: FunctionReport =
            serde_json::from_value(function("cooperating", driver(false, None))).unwrap();
        may_go(&there).unwrap();
    }

    #[test]
    fn a_function_has_the_same_bars_on_both_hosts() {
        let of = |pages: Value| -> FunctionReport {
            let mut function = function("migratable", Value::Null);
            function["mapped_pages"] = pages;
            serde_json::from_value(function).unwrap()
        };
        let (trapped, idle, used) = (of(Value::Null), of(json!(0)), of(json!(3)));
        is_same(&trapped, &trapped).unwrap();
        is_same(&used, &idle).unwrap();
        for (here, there, said) in [
            (&used, &trapped, "with --mapped here, and without it"),
            (&trapped, &idle, "without --mapped here, and with it"),
        ] {
            let refused = format!("{:#}", is_same(here, there).unwrap_err());
            assert!(refused.contains(said), "{refused}");
        }
    }

    #[test]
    fn what_cannot_go_along_is_refused() {
        assert!(left(function("passthrough", Value::Null)).contains("passed through as it is"));
        let with = |field: &str, value: Value| {
            let mut function = function("cooperating", driver(true, None));
            function[field] = value;
            left(function)
        };
        assert!(with("state", json!("failed")).contains("is not served"));
        assert!(with("stage", json!("held")).contains("is held"));
        assert!(with("not_reset", json!("it is gone")).contains("does not work: it is gone"));
        assert!(with("unusable", json!("somebody has it")).contains("does not work: somebody has it"));
    }
}
