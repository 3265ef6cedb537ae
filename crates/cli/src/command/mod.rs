//! The commands. All but those of [`Host`] ask the daemon.

mod configuration;
mod devices;
mod expect;
mod follow;
mod group;
pub mod kvm;
mod libvirt;
mod network;
pub mod pci;
mod publish;
pub mod qemu;
pub mod show;
mod swap;
pub mod table;
mod top;
mod verify;
mod vm;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::CommandFactory;
use hyper::Method;
use ioplane_api::SOCKET;
use ioplane_api::refusal::{Code, GET_SHOWS};
use ioplane_api::report::{
    CoreReport, DecisionsReport, DiskReport, DoneReport, ExplainReport, PoolReport, RemoteReport,
    StatusReport, UpgradeReport,
};
use ioplane_api::request::{
    ChangeForm, CoreChangeForm, MigrationSocketForm, MoveForm, NotifyForm, UnpinForm, UpgradeForm,
};
use ioplane_api::spec::{BackingForm, DiskForm, DoubtWord, LimitsSpec, TimeoutSpec};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::args::{
    Cli, Command, CoreCommand, DiskAdd, DiskCommand, ExitsArgs, IdentityArgs, ModelCommand, MoveAttend,
    MoveCommand, MovePrepare, MoveRecover, MoveVm, PciMove, RunArgs,
};
use crate::client::Client;
use crate::output::{CommandError, detail, hint, out, print, print_done, quiet};

/// After this long a person wants to see that something is going on.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long the answer to an upgrade waits for disks that are slow.
const SETTLING: Duration = Duration::from_secs(10);

/// The commands that need this host itself. What they need this crate does not know: the binary does.
pub trait Host {
    /// Runs the daemon on this thread, until it is stopped or has handed over. `log` is a filter of `tracing`.
    fn serve(&self, config: &Path, socket: Option<PathBuf>, inherit: bool, log: &str) -> Result<()>;

    /// Prints what is wrong with a configuration, and what of it this host lacks. Exit code 2 if a daemon would refuse it.
    fn check(&self, config: &Path, json: bool) -> Result<ExitCode>;

    /// Prints what this host lacks, and with a client what that daemon cannot serve. Exit code 1 if disks cannot be served here.
    fn doctor(&self, client: Option<&Client>, json: bool) -> Result<ExitCode>;

    /// `ioplane exits` and its subcommands. Blocks for the time that is watched.
    fn exits(&self, args: &ExitsArgs, json: bool) -> Result<ExitCode>;

    /// `ioplane move vm`: drives the migration of a QEMU of this host. Blocks until that has ended.
    fn move_vm(&self, client: &Client, args: &MoveVm, json: bool) -> Result<()>;

    /// `ioplane move attend`: brings the functions of a VM along with a migration that others drive. Blocks until that has ended.
    fn move_attend(&self, client: &Client, args: &MoveAttend, json: bool) -> Result<()>;

    /// `ioplane move recover`: brings a move that was broken off to its end.
    fn move_recover(&self, client: &Client, args: &MoveRecover, json: bool) -> Result<()>;

    /// `ioplane move prepare`: makes what a VM uses here on the other host.
    fn move_prepare(&self, client: &Client, args: &MovePrepare, json: bool) -> Result<()>;

    /// Puts another function of this host in the place of one that a guest uses.
    fn move_function(&self, client: &Client, args: &PciMove, json: bool) -> Result<()>;

    /// `ioplane run`: puts a VMM in the place of this process. Comes back only with an error.
    fn run(&self, args: &RunArgs) -> Result<ExitCode>;

    /// `ioplane model`: the device state models of this binary. Needs no daemon.
    fn model(&self, command: ModelCommand, json: bool) -> Result<()>;

    /// `ioplane identity`. Needs no daemon.
    fn identity(&self, args: &IdentityArgs, json: bool) -> Result<ExitCode>;

    /// Lists this host's PCI functions, and those that a daemon serves.
    fn functions(&self, client: &Client, json: bool) -> Result<()>;
}

/// Does what was typed, on this thread, and prints the answer. An error has not been printed yet: [`complain`](crate::output::complain)
/// does that.
pub fn perform(cli: Cli, host: &impl Host) -> Result<ExitCode> {
    let client = || Client::new(cli.socket.as_deref().unwrap_or(Path::new(SOCKET)));
    let (json, log) = (cli.json, cli.log_filter().to_owned());
    match cli.command {
        Command::Serve { config, check: true, .. } => return host.check(&config, json),
        Command::Serve { config, inherit, .. } => host.serve(&config, cli.socket, inherit, &log)?,
        Command::Upgrade { binary, deadline } => {
            let patience_s = deadline.map(upgrade_seconds).transpose()?;
            let form = UpgradeForm { binary: binary.as_deref().map(absolute).transpose()?, patience_s };
            let client = client()?;
            let report: UpgradeReport = working("waiting for the new daemon to get ready", || {
                let report = ask(&client, Method::POST, "/v1/upgrade", Some(&form))?;
                Ok(settled(&client, report))
            })?;
            print_done(json, &report, show::upgrade)?;
        }
        Command::Status => {
            let status: StatusReport = get(&client()?, "/v1/status")?;
            print(json, &status, show::status)?;
        }
        Command::Disk(command) => disk(&client()?, command, json)?,
        Command::Swap(args) => swap::run(&client()?, args, json)?,
        Command::Verify(args) => return Ok(verify::run(client, args, json)),
        Command::Move(MoveCommand::Vm(args)) => host.move_vm(&client()?, &args, json)?,
        Command::Move(MoveCommand::Attend(args)) => host.move_attend(&client()?, &args, json)?,
        Command::Move(MoveCommand::Recover(args)) => host.move_recover(&client()?, &args, json)?,
        Command::Move(MoveCommand::Prepare(args)) => host.move_prepare(&client()?, &args, json)?,
        Command::Move(MoveCommand::Expect(args)) => expect::run(&client()?, args, json)?,
        Command::Move(MoveCommand::Expected) => expect::list(&client()?, json)?,
        Command::Move(MoveCommand::Unexpect { name }) => expect::end(&client()?, &name, json)?,
        Command::Publish(command) => publish::run(&client()?, command, json)?,
        Command::Devices(args) => devices::run(&client()?, args, json)?,
        Command::Identity(args) => return host.identity(&args, json),
        Command::Nic(command) => network::nic(&client()?, command, json)?,
        Command::Switch(command) => network::switch(&client()?, command, json)?,
        Command::Group(command) => group::run(&client()?, command, json)?,
        Command::Pci(command) => pci::run(&client()?, command, json, host)?,
        Command::Model(command) => host.model(command, json)?,
        Command::Capture(args) => network::capture(&client()?, &args, json)?,
        Command::Top(args) => top::run(&client()?, &args, json)?,
        Command::Explain { name, interval } => explain(&client()?, &name, interval, json)?,
        Command::LibvirtXml(args) => vm::libvirt_xml(&client()?, &args, json)?,
        Command::Core(command) => core(&client()?, command, json)?,
        Command::QemuArgs(args) => vm::qemu_args(&client()?, &args, json)?,
        Command::Doctor => return host.doctor(client().ok().as_ref(), json),
        Command::Exits(args) => return host.exits(&args, json),
        Command::Run(args) => return host.run(&args),
        Command::Config(command) => configuration::run(&client()?, &command, json)?,
        Command::Reload => {
            let done: DoneReport = working("reading the configuration", || {
                ask(&client()?, Method::POST, "/v1/reload", None::<&()>)
            })?;
            print_done(json, &done, |done| match done.done.as_slice() {
                [] => "nothing to do\n".to_owned(),
                lines => lines.join("\n") + "\n",
            })?;
        }
        Command::Completion { shell } => {
            // Written whole first: whoever reads may stop in the middle.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "ioplane", &mut script);
            out(&script)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn explain(client: &Client, name: &str, interval: Duration, json: bool) -> Result<()> {
    let path = format!("{}?seconds={}", address_of("explain", name), interval.as_millis().div_ceil(1000));
    let report: ExplainReport = working("looking where the time goes", || get(client, &path))?;
    print(json, &report, show::explain)
}

/// How an upgrade went, also for devices with slow requests: these start when the old daemon has gone, and the new one knows
/// how long their guests have waited.
fn settled(client: &Client, report: UpgradeReport) -> UpgradeReport {
    let waits = |report: &UpgradeReport| {
        report.devices.iter().any(|device| device.suspended && device.pause_us.is_none())
    };
    let end = Instant::now() + SETTLING;
    let mut last = report;
    while waits(&last) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
        // Whoever answers may be the old one still.
        let now = client.get::<StatusReport>("/v1/status").ok().and_then(|status| status.upgrade);
        last = now.filter(|now| now.pid == last.pid).unwrap_or(last);
    }
    last
}

/// An upgrade's deadline counts in seconds; what is begun is whole.
fn upgrade_seconds(deadline: Duration) -> Result<u64> {
    let seconds = deadline.as_millis().div_ceil(1000) as u64;
    if !(1..=600).contains(&seconds) {
        let error = format!("--deadline {seconds}s: an upgrade has at most ten minutes");
        return Err(CommandError::new(Code::Usage, error, "give 1s to 10m").into());
    }
    Ok(seconds)
}

fn get<T: DeserializeOwned>(client: &Client, path: &str) -> Result<T> {
    detail(format_args!("GET {path}"));
    client.get(path)
}

fn ask<T: DeserializeOwned>(
    client: &Client,
    method: Method,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<T> {
    detail(format_args!("{method} {path}"));
    client.ask(method, path, body)
}

/// PUT of a new one at `path`. If one of this name is there, what shows that is a command, not a request.
fn put<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    form: &impl Serialize,
    (command, name): (&str, &str),
) -> Result<T> {
    ask(client, Method::PUT, path, Some(form)).map_err(|error| match error.downcast::<CommandError>() {
        Ok(CommandError(mut body)) => {
            let shows = format!("`ioplane {command} show {name}` shows how it is");
            body.remedy = body.remedy.replace(GET_SHOWS, &shows);
            CommandError(body).into()
        }
        Err(other) => other,
    })
}

/// Does `work`; if it takes long, a terminal shows that it goes on.
fn working<T>(what: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    if quiet() || !std::io::stderr().is_terminal() {
        return work();
    }
    let (done, wait) = mpsc::channel::<()>();
    let spinner = std::thread::spawn(move || {
        if wait.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            let bar = indicatif::ProgressBar::new_spinner().with_message(what);
            bar.enable_steady_tick(Duration::from_millis(100));
            let _ = wait.recv();
            bar.finish_and_clear();
        }
    });
    let outcome = work();
    drop(done);
    let _ = spinner.join();
    outcome
}

/// As seen from here, not from the daemon.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("the path {}", path.display()))
}

/// The same of a path that may be left out.
fn seen(path: Option<PathBuf>) -> Result<Option<PathBuf>> {
    path.as_deref().map(absolute).transpose()
}

/// Path of a disk's resource.
fn address(name: &str) -> String {
    address_of("disks", name)
}

/// The address of something. Names that are not plain cannot be one, and the daemon says why.
fn address_of(kind: &str, name: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let encoded: String = name
        .bytes()
        .map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect();
    format!("/v1/{kind}/{encoded}")
}

fn disk(client: &Client, command: DiskCommand, json: bool) -> Result<()> {
    let one = |disk: &DiskReport| show::disks(std::slice::from_ref(disk));
    match command {
        DiskCommand::Add(add) => {
            let DiskAdd { name, form: asked, takeover } = *add;
            let query = if takeover { "?takeover=true" } else { "" };
            let (path, form) = (address(&name) + query, form(asked)?);
            let disk: DiskReport =
                working("opening the image", || put(client, &path, &form, ("disk", &name)))?;
            warn_of_doubt(disk.backing.remote.as_ref());
            print_done(json, &disk, one)
        }
        DiskCommand::Remove { name, force } => {
            let path = format!("{}?force={force}", address(&name));
            let done: DoneReport =
                working("waiting for requests to end", || ask(client, Method::DELETE, &path, None::<&()>))?;
            print_done(json, &done, |done| done.done.join("\n") + "\n")
        }
        DiskCommand::List => {
            let disks: Vec<DiskReport> = get(client, "/v1/disks")?;
            print(json, &disks, |disks| show::disks(disks))
        }
        DiskCommand::Show { name } => {
            let disk: DiskReport = get(client, &address(&name))?;
            print(json, &disk, show::disk)
        }
        DiskCommand::Resize { name, size, shrink } => {
            let form = ChangeForm { size: Some(size), shrink, ..ChangeForm::default() };
            let disk: DiskReport =
                working("resizing", || ask(client, Method::PATCH, &address(&name), Some(&form)))?;
            print_done(json, &disk, one)
        }
        DiskCommand::Set { name, limits } => {
            let mut form = ChangeForm::from(limits);
            if let Some(qmp) = form.qmp.as_mut().filter(|qmp| !qmp.as_os_str().is_empty()) {
                *qmp = absolute(qmp)?;
            }
            let waits = form.on_timeout() != TimeoutSpec::default();
            let limited = form.limits() != LimitsSpec::default();
            let reserved = form.reserved() != LimitsSpec::default();
            let group =
                |disk: &DiskReport| form.group.as_ref().map(|_| show::group_of(disk.group.as_deref()));
            let disk: DiskReport = ask(client, Method::PATCH, &address(&name), Some(&form))?;
            print_done(json, &disk, |disk| {
                let reserved = if reserved { show::reservation(disk) } else { String::new() };
                let waits = if waits { show::on_timeout(disk) } else { String::new() };
                let group = group(disk).unwrap_or_default();
                one(disk) + &show::disk_limits(disk, limited) + &reserved + &group + &waits
            })
        }
        DiskCommand::Accept { name } => {
            let path = format!("{}/accept", address(&name));
            let disk: DiskReport = ask(client, Method::POST, &path, None::<&()>)?;
            print_done(json, &disk, one)
        }
        DiskCommand::MigrationSocket { name, remove: true, force, .. } => {
            let path = format!("{}/migration-socket?force={force}", address(&name));
            let disk: DiskReport =
                working("waiting for requests to end", || ask(client, Method::DELETE, &path, None::<&()>))?;
            print_done(json, &disk, one)
        }
        DiskCommand::MigrationSocket { name, vhost_socket, .. } => {
            let form = MigrationSocketForm { socket: vhost_socket.as_deref().map(absolute).transpose()? };
            let path = format!("{}/migration-socket", address(&name));
            let disk: DiskReport = ask(client, Method::PUT, &path, Some(&form))?;
            print_done(json, &disk, |disk| {
                let socket = disk.migration_socket.as_deref().unwrap_or(Path::new("-"));
                format!("{} has a migration socket: {}\n", disk.name, socket.display())
            })
        }
        DiskCommand::Replace { name, backing } => {
            let (path, qmp) = (seen(backing.path)?, seen(backing.qmp)?);
            let form = ChangeForm::from(BackingForm { path, qmp, ..backing });
            let disk: DiskReport = working("waiting for a quiet moment", || {
                ask(client, Method::PATCH, &address(&name), Some(&form))
            })?;
            if disk.origin == "config" && !json {
                hint("to keep this after a reboot of the host, write it into the configuration as well");
            }
            warn_of_doubt(disk.backing.remote.as_ref());
            print_done(json, &disk, one)
        }
    }
}

/// Warns of a disk whose writes are sent again to a server that cannot say what became of the first ones.
fn warn_of_doubt(remote: Option<&RemoteReport>) {
    if remote.is_some_and(|remote| remote.instance.is_none() && remote.in_doubt == DoubtWord::Resend) {
        hint(
            "--in-doubt resend is for servers that finish or forget the requests of a lost connection before they serve the next: with others old data overwrite newer",
        );
    }
}

fn form(form: DiskForm) -> Result<DiskForm> {
    let (path, socket, qmp) = (seen(form.path)?, seen(form.socket)?, seen(form.qmp)?);
    let migration_socket = seen(form.migration_socket)?;
    Ok(DiskForm { path, socket, migration_socket, qmp, ..form })
}

fn core(client: &Client, command: CoreCommand, json: bool) -> Result<()> {
    let one = |core: &CoreReport| show::cores(std::slice::from_ref(core));
    let change = |id: u32, form: CoreChangeForm| {
        let core: CoreReport = ask(client, Method::PATCH, &format!("/v1/cores/{id}"), Some(&form))?;
        print_done(json, &core, one)
    };
    match command {
        CoreCommand::List => {
            let cores: Vec<CoreReport> = get(client, "/v1/cores")?;
            print(json, &cores, |cores| show::cores(cores))
        }
        CoreCommand::Add(form) => {
            let core: CoreReport = ask(client, Method::POST, "/v1/cores", Some(&form))?;
            print_done(json, &core, one)
        }
        CoreCommand::Retire { id } => {
            let done: DoneReport = ask(client, Method::DELETE, &format!("/v1/cores/{id}"), None::<&()>)?;
            print_done(json, &done, |done| done.done.join("\n") + "\n")
        }
        CoreCommand::Mode { mode, core: Some(id) } => {
            change(id, CoreChangeForm { notify: Some(mode), ..CoreChangeForm::default() })
        }
        CoreCommand::Mode { mode, core: None } => {
            let form = NotifyForm { notify: Some(mode), spin_us: None };
            let cores: Vec<CoreReport> = ask(client, Method::PUT, "/v1/notify", Some(&form))?;
            print_done(json, &cores, |cores| show::cores(cores))
        }
        CoreCommand::Drain { id } => {
            change(id, CoreChangeForm { drain: Some(true), ..CoreChangeForm::default() })
        }
        CoreCommand::Reserve { id, group } => {
            change(id, CoreChangeForm { reserve: Some(group), ..CoreChangeForm::default() })
        }
        CoreCommand::Open { id } => {
            let reserve = Some(String::new());
            change(id, CoreChangeForm { drain: Some(false), reserve, ..CoreChangeForm::default() })
        }
        CoreCommand::Unpin { device, queue } => {
            let form = UnpinForm { device, queue };
            let report: serde_json::Value = ask(client, Method::POST, "/v1/queues/unpin", Some(&form))?;
            print_done(json, &report, |_| format!("queue {queue} of {} may be on any core\n", form.device))
        }
        CoreCommand::Pool => {
            let pool: PoolReport = get(client, "/v1/pool")?;
            print(json, &pool, show::pool)
        }
        CoreCommand::Decisions { from } => {
            let decisions: DecisionsReport = get(client, &format!("/v1/pool/decisions?from={from}"))?;
            print(json, &decisions, show::decisions)
        }
        CoreCommand::Set { id, change: form } => change(id, form),
        CoreCommand::Move { disk, queue, core } => {
            let form = MoveForm { disk, queue, core };
            let report: serde_json::Value = working("waiting for requests to end", || {
                ask(client, Method::POST, "/v1/queues/move", Some(&form))
            })?;
            print_done(json, &report, |_| format!("queue {queue} of {} is on core {core}\n", form.disk))
        }
    }
}
