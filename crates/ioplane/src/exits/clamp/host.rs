//! All VMs of a host: KVM's parameter `min_timer_period_us`, which it looks at when a guest sets a periodic timer.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ioplane_api::refusal::Code;
use ioplane_cli::args::{ClampAction, ClampArgs};
use ioplane_cli::output::{CommandError, print, print_done};
use ioplane_kvmstat::Vm;
use serde::Serialize;

/// Files.
pub(super) struct Places {
    parameter: PathBuf,
    /// What the parameter was before.
    before: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            parameter: "/sys/module/kvm/parameters/min_timer_period_us".into(),
            before: "/run/ioplane-min_timer_period_us".into(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Status {
    /// KVM's shortest period of a periodic timer.
    period_us: u32,
    /// What it was before this command has changed it; `null` if it has not.
    before_us: Option<u32>,
    /// All that are hit.
    vms: Vec<Hit>,
}

#[derive(Debug, Serialize)]
struct Hit {
    name: String,
    pid: u32,
}

/// Says, or sets.
pub(super) fn run(args: &ClampArgs, json: bool, places: &Places) -> Result<()> {
    match args.action {
        ClampAction::Status => {}
        ClampAction::Hz(hz) => set(places, 1_000_000_u32.div_ceil(hz))?,
        ClampAction::Off => undo(places)?,
    }
    let vms = Vm::all().into_iter().map(|vm| Hit { name: vm.name, pid: vm.pid }).collect();
    let period_us = read(&places.parameter)?.ok_or_else(|| missing(places))?;
    let status = Status { period_us, before_us: read(&places.before)?, vms };
    if args.action == ClampAction::Status {
        print(json, &status, text)
    } else {
        print_done(json, &status, text)
    }
}

fn missing(places: &Places) -> CommandError {
    let error = format!("KVM has no parameter {}", places.parameter.display());
    CommandError::new(
        Code::Unsupported,
        error,
        "load KVM's module; clamp one VM by its name instead of --host",
    )
}

/// `None` if there is no such file.
fn read(path: &Path) -> Result<Option<u32>> {
    match fs::read_to_string(path) {
        Ok(word) => Ok(Some(word.trim().parse().with_context(|| format!("{}: no number", path.display()))?)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
    }
}

fn write(path: &Path, period: u32) -> Result<()> {
    fs::write(path, format!("{period}\n")).with_context(|| format!("write {}", path.display()))
}

fn set(places: &Places, period: u32) -> Result<()> {
    let now = read(&places.parameter)?.ok_or_else(|| missing(places))?;
    // First: what is set can then be undone, also if this command ends in between.
    if read(&places.before)?.is_none() {
        write(&places.before, now)?;
    }
    write(&places.parameter, period)
}

fn undo(places: &Places) -> Result<()> {
    let Some(before) = read(&places.before)? else {
        let error = "nothing to undo: this command has not changed the host's timers";
        bail!(CommandError::new(Code::NotFound, error, ""));
    };
    write(&places.parameter, before)?;
    fs::remove_file(&places.before).with_context(|| format!("remove {}", places.before.display()))
}

fn text(status: &Status) -> String {
    let mut text = format!("periodic timers take at least {} us", status.period_us);
    match status.before_us {
        Some(before) => text += &format!("; before it was {before} us, and `off` sets that again\n"),
        None => text += ": as the kernel has it\n",
    }
    text += "hit, from when the guest sets its PIT or a local APIC's periodic timer next:\n";
    text.extend(status.vms.iter().map(|vm| format!("  {} (process {})\n", vm.name, vm.pid)));
    if status.vms.is_empty() {
        text += "  no VM runs; those that start\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(folder: &Path) -> Places {
        Places { parameter: folder.join("parameter"), before: folder.join("before") }
    }

    #[test]
    fn what_was_before_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let places = places(folder.path());
        fs::write(&places.parameter, "200\n").unwrap();
        set(&places, 10_000).unwrap();
        set(&places, 5_000).unwrap();
        assert_eq!(read(&places.parameter).unwrap(), Some(5000));
        undo(&places).unwrap();
        assert_eq!(fs::read_to_string(&places.parameter).unwrap(), "200\n");
        assert!(undo(&places).is_err(), "once");
    }

    #[test]
    fn a_kernel_without_it_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let places = places(folder.path());
        let error = set(&places, 10_000).unwrap_err();
        assert_eq!(error.downcast_ref::<CommandError>().unwrap().0.code, Code::Unsupported.word());
        assert!(!places.parameter.exists() && !places.before.exists());
        fs::write(&places.parameter, "many\n").unwrap();
        assert!(set(&places, 10_000).unwrap_err().to_string().contains("no number"));
        assert!(!places.before.exists());
    }

    #[test]
    fn every_vm_is_listed() {
        let hit = |name: &str, pid| Hit { name: name.into(), pid };
        let vms = vec![hit("web", 7), hit("db", 8)];
        let text = text(&Status { period_us: 10_000, before_us: Some(200), vms });
        assert!(text.contains("at least 10000 us; before it was 200 us"), "{text}");
        assert!(text.contains("  web (process 7)\n  db (process 8)\n"), "{text}");
    }
}
