//! `ioplane exits clamp`: fewer ticks of a guest's timer, by the interposer in one VM's process or by KVM's parameter for all.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ioplane_api::refusal::Code;
use ioplane_cli::args::{ClampAction, ClampArgs};
use ioplane_cli::output::{CommandError, print, print_done};
use ioplane_kvmstat::Vm;
use ioplane_vcpu::kvm::{ClampReport, ClampState, ClusterPage, PIT_HZ, SETTLED};
use serde::Serialize;

use super::{cluster, usage};

mod host;

/// Clocks of guests that count while no tick comes, as Linux calls them.
const CLOCKS: [&str; 6] =
    ["tsc", "tsc-early", "kvm-clock", "acpi_pm", "hyperv_clocksource_tsc_page", "hyperv_clocksource_msr"];
/// Those that are counted by ticks or by the timer's counter.
const TICKS: [&str; 3] = ["pit", "jiffies", "refined-jiffies"];
/// Counts without ticks, but a guest that uses it was not measured.
const HPET: &str = "hpet";
/// How long the guest's own rate may take to come back: the library looks twice a second.
const UNDONE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(50);

/// What is printed of one VM.
#[derive(Debug, Serialize)]
struct Status {
    name: String,
    pid: u32,
    /// The most ticks per second; `null` if the clamp is off.
    hz: Option<u32>,
    /// Whether the timer is slower now than the guest has set it.
    clamped: bool,
    /// How it stands, in words.
    state: &'static str,
    /// Of the guest's timer as it has set it, in ticks per second.
    guest_hz: Option<f64>,
    /// Of the timer in KVM.
    timer_hz: Option<f64>,
    /// How often the timer was set.
    changes: u32,
}

/// Says, or switches.
pub fn run(args: &ClampArgs, json: bool) -> Result<()> {
    if args.host {
        return host::run(args, json, &host::Places::default());
    }
    if let ClampAction::Hz(_) = args.action {
        check_clock(args.clock.as_deref())?;
    }
    let vm = Vm::choose(args.vm.as_deref())?;
    let hz = match args.action {
        ClampAction::Status => None,
        ClampAction::Off => Some(None),
        ClampAction::Hz(hz) => Some(Some(hz)),
    };
    let file = cluster::open(&vm, hz.is_some())?;
    let Some(hz) = hz else {
        return print(json, &status(&vm, &ClusterPage::read_clamp(&file)?), text);
    };
    if hz.is_some() && ClusterPage::read_clamp(&file)?.state == ClampState::NoPit {
        let error = format!("{} (process {}) has no timer in KVM that could be clamped", vm.name, vm.pid);
        let remedy = "its PIT is in the VMM, or it has none: QEMU's is in KVM with kernel-irqchip=on";
        bail!(CommandError::new(Code::Unsupported, error, remedy));
    }
    ClusterPage::set_clamp(&file, hz)?;
    let report = if hz.is_none() { undone(&file, &vm)? } else { ClusterPage::read_clamp(&file)? };
    print_done(json, &status(&vm, &report), |status| match status.hz {
        Some(hz) => format!(
            "at most {hz} ticks per second, once the guest's timer has been the same for {} s\n",
            SETTLED.as_secs()
        ),
        None => "the guest's timer is as it has set it\n".into(),
    })
}

/// Only clocks that do not depend on ticks.
fn check_clock(clock: Option<&str>) -> Result<()> {
    let Some(clock) = clock else {
        let error = "give the guest's clock with --clock: one that counts ticks would go slow";
        let remedy = "in Linux: cat /sys/devices/system/clocksource/clocksource0/current_clocksource";
        bail!(CommandError::new(Code::Usage, error, remedy));
    };
    if TICKS.contains(&clock) {
        let error =
            format!("refused: a guest that tells the time by {clock} would be late, since it loses ticks");
        bail!(CommandError::new(Code::Unsupported, error, "have the guest use kvm-clock or tsc"));
    }
    if clock == HPET {
        let error = "refused: Linux with an HPET ticks by it, so a slower PIT saves nothing; nobody has measured what another system's time does then";
        let remedy = "start QEMU with hpet=off in -machine, and have the guest use kvm-clock or tsc";
        bail!(CommandError::new(Code::Unsupported, error, remedy));
    }
    if !CLOCKS.contains(&clock) {
        bail!(usage(format!("clock {clock} is not known; known are {}", CLOCKS.join(", "))));
    }
    Ok(())
}

/// Waits until the guest's own rate is back.
fn undone(file: &File, vm: &Vm) -> Result<ClampReport> {
    let begun = Instant::now();
    loop {
        let report = ClusterPage::read_clamp(file)?;
        let ended = !Path::new(&format!("/proc/{}", vm.pid)).exists();
        let off = matches!(report.state, ClampState::NoPit | ClampState::Off | ClampState::Failed);
        if ended || off && report.count == report.guest_count {
            return Ok(report);
        }
        if begun.elapsed() > UNDONE {
            let error = format!("the clamp of {} is switched off, and its timer is not back yet", vm.name);
            let remedy = "a stopped VM has it back when it runs; look with `ioplane exits clamp`";
            bail!(CommandError::new(Code::Busy, error, remedy));
        }
        std::thread::sleep(LOOK);
    }
}

fn status(vm: &Vm, report: &ClampReport) -> Status {
    let known = |count: u32| (count != 0).then(|| f64::from(PIT_HZ) / f64::from(count));
    Status {
        name: vm.name.clone(),
        pid: vm.pid,
        hz: report.hz,
        clamped: report.count != report.guest_count,
        state: words(report.state),
        guest_hz: known(report.guest_count),
        timer_hz: known(report.count),
        changes: report.changes,
    }
}

/// A state in words.
fn words(state: ClampState) -> &'static str {
    match state {
        ClampState::NoPit => "refused: KVM has no PIT of this VM: it is in the VMM, or there is none",
        ClampState::Off => "off",
        ClampState::Settling => "waits until the guest's timer has been the same for 10 s",
        ClampState::Clamped => "clamped",
        ClampState::Nothing => "the guest's timer is not periodic, or it is slow enough",
        ClampState::ReadsCounter => "refused: the guest reads the timer's counter",
        ClampState::RealMode => "refused: real mode or virtual-8086 mode",
        ClampState::Hpet => "refused: the HPET replaces the timer",
        ClampState::Decimal => "refused: the timer counts decimally",
        ClampState::Speaker => "refused: channel 2 of the PIT runs",
        ClampState::NotFollowed => "refused: a vCPU is not followed",
        ClampState::DoesNotStop => "waits for a vCPU that does not stop",
        ClampState::Failed => "failed",
    }
}

fn text(status: &Status) -> String {
    let mut text = format!("{} (process {}): ", status.name, status.pid);
    match status.hz {
        Some(hz) => text += &format!("at most {hz} ticks per second; {}\n", status.state),
        None => text += &format!("no clamp; {}\n", status.state),
    }
    if let (Some(guest), Some(timer)) = (status.guest_hz, status.timer_hz) {
        text += &format!("the guest has set its timer to {guest:.1} per second; it runs at {timer:.1}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_count_ticks_or_were_not_measured_are_refused() {
        for clock in CLOCKS {
            check_clock(Some(clock)).unwrap();
        }
        for clock in TICKS.into_iter().chain([HPET]) {
            let error = check_clock(Some(clock)).unwrap_err();
            assert_eq!(
                error.downcast_ref::<CommandError>().unwrap().0.code,
                Code::Unsupported.word(),
                "{clock}"
            );
        }
        for clock in [None, Some("sundial")] {
            let error = check_clock(clock).unwrap_err();
            assert_eq!(error.downcast_ref::<CommandError>().unwrap().0.code, Code::Usage.word(), "{clock:?}");
        }
    }
}
