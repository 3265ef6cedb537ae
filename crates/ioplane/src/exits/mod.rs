//! `ioplane exits`: which exits a VM takes and who causes them. It asks no daemon: any KVM VM of this host will do.

mod agent;
mod apply;
mod callers;
mod clamp;
mod cluster;
mod diff;
mod learn;
mod libvirt;
mod reach;
mod record;
mod script;
mod top;
mod work;

use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ioplane_api::refusal::Code;
use ioplane_cli::args::{ExitsArgs, ExitsCommand, VmArgs, WatchArgs};
use ioplane_cli::output::{CommandError, out, print};
use ioplane_exits::{
    Devices, GuestRegions, HostFacts, Layout, Names, Report, Source, Subject, Watch, WatchOptions,
};
use ioplane_kvmstat::{KvmStatError, Vm};
use ioplane_qemu::{Chardev, Endpoint};
use ioplane_symbols::{Confidence, GuestFunction, Symbols};

use cluster::Clustered;
use libvirt::Domain;
use reach::Reach;
use work::Measured;

/// How often `--live` draws.
const PERIOD: Duration = Duration::from_secs(1);
/// How soon Ctrl-C is noticed.
const NOTICE: Duration = Duration::from_millis(200);

/// Shows a report of the time so far.
type Draw<'a> = &'a dyn Fn(&Report) -> Result<()>;

/// What was typed does not go together, or is none of what can be typed.
fn usage(error: impl Into<String>) -> CommandError {
    CommandError::new(Code::Usage, error, "")
}

/// An error of the crate `kvmstat` with a code, where that says more than that the command failed.
fn coded(error: anyhow::Error) -> anyhow::Error {
    let code = match error.downcast_ref() {
        Some(KvmStatError::NoVm | KvmStatError::UnknownVm { .. } | KvmStatError::NumberIsName { .. }) => {
            Code::NotFound
        }
        Some(KvmStatError::SeveralVms(_)) => Code::Usage,
        _ => return error,
    };
    CommandError::new(code, format!("{error:#}"), "").into()
}

/// Watches and reports, or what the subcommand says.
pub fn run(args: &ExitsArgs, json: bool) -> Result<ExitCode> {
    perform(args, json).map_err(coded)
}

fn perform(args: &ExitsArgs, json: bool) -> Result<ExitCode> {
    match &args.command {
        Some(ExitsCommand::Advise(args)) => advise(args, json)?,
        Some(ExitsCommand::Apply(args)) => apply::run(args, json)?,
        Some(ExitsCommand::Callers(args)) => callers::run(args, json)?,
        Some(ExitsCommand::Learn(args)) => learn::run(args, json)?,
        Some(ExitsCommand::Top(args)) => top::run(args, json)?,
        Some(ExitsCommand::Record(args)) => record::record(args, json)?,
        Some(ExitsCommand::Diff(args)) => return record::diff(args, json),
        Some(ExitsCommand::Cluster(args)) => cluster::run(args, json)?,
        Some(ExitsCommand::Clamp(args)) => clamp::run(args, json)?,
        None if args.list => list(json)?,
        None => profile(args, json)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn profile(args: &ExitsArgs, json: bool) -> Result<()> {
    let (report, work) = match Reach::given(&args.reach, &args.watch.which)? {
        Some(reach) => {
            let Measured { report, work } = work::measure(&args.watch, &reach)?;
            (report, Some(work))
        }
        None if args.live => (live(args, json)?, None),
        None => (watch(&args.watch, None)?, None),
    };
    for (file, text) in [(&args.html, Report::html as fn(&Report) -> String), (&args.svg, Report::svg)] {
        if let Some(file) = file {
            write(file, &text(&report))?;
        }
    }
    match work {
        Some(work) => print(json, &Measured { report, work }.profiled(), ToString::to_string),
        None if args.live => Ok(()),
        None => print(json, &report, Report::to_string),
    }
}

fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| format!("{} cannot be written", file.display()))
}

fn advise(args: &WatchArgs, json: bool) -> Result<()> {
    let report = watch(args, None)?;
    print(json, &report.findings, |findings| {
        let mut text = format!("{} exits in {:.1} s\n", report.exits, report.seconds);
        text.extend(report.notes.iter().map(|note| format!("note: {note}\n")));
        if findings.is_empty() {
            text += "nothing to advise\n";
        }
        text.extend(findings.iter().map(|finding| format!("\n{finding}")));
        text
    })
}

fn list(json: bool) -> Result<()> {
    let all = Vm::all();
    let rows: Vec<_> = all
        .iter()
        .map(|vm| serde_json::json!({"name": vm.name, "pid": vm.pid, "program": vm.program, "vcpus": vm.vcpus}))
        .collect();
    print(json, &rows, |_| {
        let line =
            |vm: &Vm| format!("{:<24} {:>8}  {:>3} vCPUs  {}\n", vm.name, vm.pid, vm.vcpus, vm.program);
        all.iter().map(line).collect()
    })
}

fn live(args: &ExitsArgs, json: bool) -> Result<Report> {
    if json || !std::io::stdout().is_terminal() {
        bail!(usage("--live draws on a terminal; use --for SECONDS with --json or a file"));
    }
    let draw = |report: &Report| {
        let (rows, columns) = size();
        out(screen(&report.to_string(), rows, columns).as_bytes())
    };
    out(b"\x1b[2J")?;
    watch(&args.watch, Some(&draw))
}

/// Rows and columns of the terminal.
fn size() -> (usize, usize) {
    rustix::termios::tcgetwinsize(std::io::stdout())
        .map_or((40, 120), |size| (usize::from(size.ws_row), usize::from(size.ws_col)))
}

/// As much of a text as a terminal has room for, from its top left; what was below is cleared. Nothing is wrapped.
fn screen(text: &str, rows: usize, columns: usize) -> String {
    let mut shown = String::from("\x1b[H");
    for line in text.lines().take(rows.saturating_sub(1)) {
        shown.extend(line.chars().take(columns.max(1)));
        shown += "\x1b[K\n";
    }
    shown + "\x1b[J"
}

/// Set by the first Ctrl-C (or SIGTERM, or SIGHUP as the terminal goes), which ends the watch; the second ends the program.
fn interrupted() -> Result<&'static AtomicBool> {
    use tokio::signal::unix::{SignalKind, signal};
    static LISTENS: AtomicBool = AtomicBool::new(false);
    static INTERRUPTED: AtomicBool = AtomicBool::new(false);
    if LISTENS.swap(true, Ordering::Relaxed) {
        return Ok(&INTERRUPTED);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let (mut interrupt, mut end, mut hangup) = {
        let _inside = runtime.enter();
        // Nohup's wish is kept: then it is not listened for.
        let hangup = (!ignores_hangup(&status)).then(|| signal(SignalKind::hangup())).transpose()?;
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, hangup)
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            loop {
                let hung_up = async {
                    match &mut hangup {
                        Some(hangup) => hangup.recv().await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! { _ = interrupt.recv() => {}, _ = end.recv() => {}, _ = hung_up => {} }
                if INTERRUPTED.swap(true, Ordering::Relaxed) {
                    end_at_once();
                }
            }
        })
    })?;
    Ok(&INTERRUPTED)
}

/// Of `/proc/self/status`: whether SIGHUP, the first bit, is ignored.
fn ignores_hangup(status: &str) -> bool {
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 != 0)
}

/// Waits for nothing and nobody. An instance of tracefs would go on recording, and cannot be removed while this program has it open: so
/// another takes its place, and removes it.
fn end_at_once() -> ! {
    let folders = ioplane_exits::instances();
    if !folders.is_empty() {
        // It comes back only if there is no shell. Then the next watch sweeps.
        let _ = remover(&folders).exec();
    }
    std::process::exit(KILLED)
}

/// The exit status after a second Ctrl-C.
const KILLED: i32 = 130;

fn remover(folders: &[PathBuf]) -> Command {
    let mut shell = Command::new("/bin/sh");
    let script = format!("trap '' INT TERM HUP; rmdir \"$@\" 2>/dev/null; exit {KILLED}");
    shell.args(["-c", &script, "sh"]).args(folders);
    shell
}

/// The VM that is meant.
fn chosen(which: &VmArgs) -> Result<Vm> {
    match &which.libvirt {
        Some(domain) => Domain::new(domain)?.vm(),
        None => Ok(Vm::choose(which.vm.as_deref())?),
    }
}

/// Watches for the time that was asked for, or until the VM ends or Ctrl-C; hands reports of the time so far to `draw`.
fn watch(args: &WatchArgs, draw: Option<Draw<'_>>) -> Result<Report> {
    let vm = chosen(&args.which)?;
    let (name, pid) = (vm.name.clone(), vm.pid);
    // What can be refused is refused before anything is watched.
    let mut names = Naming::new(args, &vm)?;
    let interrupted = interrupted()?;
    let source = match args.source.as_str() {
        "bpf" => Source::Programs,
        "perf" => Source::Perf,
        "tracefs" => Source::Tracefs,
        _ => Source::Any,
    };
    let queues = names.devices.pci.queue_ports();
    let mut watch = Watch::start(vm, WatchOptions { sample: args.sample, source, queues })?;
    let begun = Instant::now();
    let mut drawn = begun;
    if draw.is_none() {
        eprintln!("watching {name} (process {pid}) for {:.0} s", args.time.as_secs_f64());
    }
    let mut runs = true;
    while runs && !interrupted.load(Ordering::Relaxed) {
        let left = args.time.saturating_sub(begun.elapsed());
        if draw.is_none() && left.is_zero() {
            break;
        }
        runs = watch.turn(if draw.is_some() { NOTICE } else { left.min(NOTICE) })?;
        if let Some(draw) = draw
            && drawn.elapsed() >= PERIOD
        {
            drawn = Instant::now();
            watch.refresh()?;
            draw(&names.report(&watch, watch.elapsed()))?;
        }
    }
    let time = watch.stop()?;
    let mut report = names.report(&watch, time);
    // What it has in tracefs does not wait for a monitor.
    drop(watch);
    if !runs {
        report.notes.push("the VM has ended; this is what it did until then".into());
    } else if let Some(state) = names.state() {
        report.notes.push(format!("the VM does not run any more, says its VMM: {state}"));
    }
    Ok(report)
}

/// What names are made of.
struct Naming {
    symbols: Option<Symbols>,
    devices: Devices,
    /// The monitor, if it can be asked: whoever else has it is not waited for twice.
    monitor: Option<Monitor>,
    /// What the interposer had done before.
    clustered: Option<Clustered>,
    notes: Vec<String>,
}

/// The ways to a QEMU's monitor.
#[derive(Debug, PartialEq, Eq)]
enum Monitor {
    Socket(Endpoint),
    Libvirt(Domain),
}

impl Monitor {
    fn of(which: &VmArgs, vm: &Vm) -> Result<Option<Monitor>> {
        Ok(match (&which.libvirt, Layout::monitor(vm)) {
            (Some(domain), _) => Some(Monitor::Libvirt(Domain::new(domain)?)),
            (None, Some(Chardev::Path(socket))) => Some(Monitor::Socket(vm.socket(&socket))),
            (None, _) => None,
        })
    }

    fn layout(&self) -> Result<Layout> {
        match self {
            Monitor::Socket(socket) => Ok(Layout::from_qmp(socket)?),
            Monitor::Libvirt(domain) => domain.layout(),
        }
    }

    fn state(&self) -> Result<String> {
        match self {
            Monitor::Socket(socket) => Ok(Layout::state(socket)?),
            Monitor::Libvirt(domain) => domain.state(),
        }
    }
}

impl Naming {
    fn new(args: &WatchArgs, vm: &Vm) -> Result<Naming> {
        // A file, or a directory of `exits learn`.
        let learned = args.symbols.as_deref().filter(|path| path.is_dir());
        let guest = learned.map(GuestRegions::read).transpose()?.unwrap_or_default();
        let file = learned.map(|directory| directory.join("kallsyms")).or_else(|| args.symbols.clone());
        let symbols = file.as_deref().map(Symbols::read).transpose()?;
        let mut notes = symbols.as_ref().map(|symbols| symbols.notes.clone()).unwrap_or_default();
        let given = args.devices.as_deref().map(Layout::from_file).transpose()?;
        let mut monitor = Monitor::of(&args.which, vm)?;
        let pci = if let Some(layout) = given {
            layout
        } else if let Some(asked) = &monitor {
            // A convenience: whoever has the monitor keeps it, and the profile goes without these names.
            asked.layout().unwrap_or_else(|error| {
                notes.push(format!("PCI devices are not named: {error:#}; give them with --devices"));
                monitor = None;
                Layout::default()
            })
        } else {
            let handed = Layout::monitor(vm) == Some(Chardev::Inherited);
            notes.extend(handed.then(|| INHERITED.into()));
            Layout::default()
        };
        let clustered = Clustered::of(vm);
        Ok(Naming { symbols, devices: Devices { pci, guest }, monitor, clustered, notes })
    }

    /// What the VMM calls its VM's state, if it can be asked and the VM does not run.
    fn state(&self) -> Option<String> {
        let state = self.monitor.as_ref()?.state().ok()?;
        (state != "running").then(|| if state == "postmigrate" { "it has migrated".into() } else { state })
    }

    fn report(&mut self, watch: &Watch, time: Duration) -> Report {
        let profile = watch.profile();
        let mut notes = self.notes.clone();
        if let Some(why) = watch.fallback() {
            notes.push(format!("read by tracefs, not by perf events, and every exit of it ({why})"));
        }
        if let Some(why) = watch.refused() {
            notes.push(format!("recorded by perf events, which cost the guest more: {why}"));
        }
        notes.extend(watch.problem().map(str::to_owned));
        notes.extend(
            watch.unsampled().map(|why| format!("the VMM's functions are not known, or not all: {why}")),
        );
        let clustered = self.clustered.zip(Clustered::of(watch.vm()));
        notes.extend(clustered.and_then(|(before, now)| now.note(before)));
        let fit = self.symbols.as_mut().map(|symbols| {
            symbols.fit(
                profile.sites().filter_map(|(site, _)| Some((site.rip?, site.reason.kind().instruction()?))),
            )
        });
        notes.extend(fit.map(|fit| fit.to_string()));
        let fits = fit.is_some_and(|fit| fit.confidence > Confidence::None);
        let named = |rip: u64| self.symbols.as_ref()?.function(rip);
        let function: Option<&dyn Fn(u64) -> Option<GuestFunction>> = if fits { Some(&named) } else { None };
        let (devices, host) = (self.devices.clone(), HostFacts::read());
        let names = Names { function, symbols: fit, devices, host, notes };
        let subject = Subject { vm: watch.vm(), time, seen: watch.seen(), sample: watch.sample() };
        Report { vmm: watch.vmm(), ..Report::new(subject, profile, watch.kernel(), &names) }
    }
}

/// What is said where QEMU's monitor is a descriptor.
const INHERITED: &str = "PCI devices are not named: QEMU was given its monitor's socket as a descriptor (libvirt does so), \
     to which there is no path; say --libvirt DOMAIN in place of --vm, or give them with --devices FILE, made by \
     virsh qemu-monitor-command VM '{\"execute\":\"query-pci\"}' >FILE";

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn a_screen_is_not_left() {
        let shown = screen("abc\nde\u{df}fg\nhij\n", 3, 2);
        assert_eq!(shown, "\x1b[Hab\x1b[K\nde\x1b[K\n\x1b[J");
        assert_eq!(screen("a\n", 0, 0), "\x1b[H\x1b[J");
    }

    #[test]
    fn an_instance_does_not_outlive_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let instances = ["a b", "$c"].map(|name| folder.path().join(name));
        instances.iter().for_each(|instance| std::fs::create_dir(instance).unwrap());
        let status = remover(&instances).status().unwrap();
        assert_eq!(status.code(), Some(KILLED));
        assert!(!instances.iter().any(|instance| instance.exists()));
    }

    #[test]
    fn the_wish_of_nohup_is_kept() {
        assert!(ignores_hangup("Name:\ta\nSigIgn:\t0000000000001001\n"));
        assert!(!ignores_hangup("SigIgn:\t0000000000001000\nSigCgt:\t1\n"));
        assert!(!ignores_hangup(""));
    }

    fn naming(line: &str) -> Naming {
        named(&["ioplane", "exits"], line.split(' ').map(String::from).collect())
    }

    /// What a command line makes names of.
    pub(super) fn naming_of(words: &[&str]) -> Naming {
        named(words, Vec::new())
    }

    fn named(words: &[&str], command: Vec<String>) -> Naming {
        let args = ioplane_cli::args::Cli::try_parse_from(words).unwrap();
        let ioplane_cli::args::Command::Exits(args) = args.command else { panic!("exits") };
        let (name, program) = ("vm".into(), "qemu".into());
        let vm = Vm { pid: 1, name, program, vcpus: 1, vm_fds: Vec::new(), command };
        Naming::new(&args.watch, &vm).unwrap()
    }

    #[test]
    fn what_names_no_devices_is_said() {
        let handed =
            naming("qemu -chardev socket,id=m,fd=24,server=on -mon chardev=m,id=monitor,mode=control");
        assert_eq!(handed.monitor, None);
        for word in ["not named", "--devices FILE", "virsh qemu-monitor-command"] {
            assert!(handed.notes[0].contains(word), "{:?}", handed.notes);
        }
        assert!(naming("qemu -m 1").notes.is_empty());
    }

    /// There is no such domain: the profile goes without these names, and virsh is not asked again.
    #[test]
    fn a_domain_is_asked_through_virsh() {
        let words = ["ioplane", "exits", "--libvirt", "no-such-domain"];
        let naming = naming_of(&words);
        assert!(naming.notes[0].contains("virsh") && naming.monitor.is_none(), "{:?}", naming.notes);
        assert!(ioplane_cli::args::Cli::try_parse_from([&words[..], &["--vm", "a"]].concat()).is_err());
    }

    /// Any process may open /dev/kvm and have any words: they do not reach root's terminal, and the monitor is not asked again.
    #[test]
    fn a_monitor_of_strange_words_is_asked_once() {
        let strange = naming("qemu -qmp unix:/nowhere/\u{1b}]0;x\u{7}\u{1b}[2J\n");
        let note = &strange.notes[0];
        assert!(
            note.contains("PCI devices are not named") && note.contains("/nowhere/?]0;x??[2J?"),
            "{note:?}"
        );
        assert!(!note.chars().any(char::is_control), "{note:?}");
        assert!(strange.monitor.is_none() && strange.state().is_none());
    }
}
