//! The configuration file: read whole, checked whole, and refused whole with every problem's line, reason and remedy.
//!
//! ```text
//!   text --toml--> tables with spans --old_keys, Reader--> forms --spec--> Config { daemon, directory, pool, cores, groups, disks, switches, nics, functions, exports } + where each is
//! ```
//!
//! What is wrong with images is asked separately ([`Config::images`]); what only opening shows (somebody has it) is found by
//! whoever opens it, and reported with the same lines: [`Config::served_problem`].

mod append;
mod directory;
mod function;
mod group;
mod network;
mod old_keys;
mod problem;
mod reader;
mod shared;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ioplane_api::spec::{
    BackingSpec, CoreForm, CoreSpec, DiskForm, DiskSpec, ExportForm, ExportSpec, FieldSource, Flaw,
    FunctionSpec, GroupSpec, NicSpec, PoolForm, PoolSpec, SwitchSpec,
};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub use append::Appended;
pub use directory::{DirectoryPlace, DirectorySpec};
pub use problem::{Problem, Problems};
pub use reader::{Place, nearest};
use reader::{SourceText, TableReader};

use crate::access::SocketAccess;

/// Seconds. A guest gives its requests up before.
const LONGEST_CLAIM_WAIT: u64 = 600;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DaemonSpec {
    pub socket: Option<PathBuf>,
    /// Where disks' sockets and the state file are.
    pub run_dir: Option<PathBuf>,
    /// Where the identity of this host is, for TLS.
    pub identity: Option<PathBuf>,
    /// Where it is kept which exports of others this host may write, and who may write its own: durable.
    pub state_dir: Option<PathBuf>,
    /// How many seconds a guest waits for a disk of another machine that another host holds.
    pub claim_wait_s: Option<u64>,
    /// Where Prometheus may ask, loopback only.
    pub metrics: Option<SocketAddr>,
    /// Who may connect to the sockets of disks and NICs.
    pub access: SocketAccess,
}

/// A configuration without a problem in itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    pub file: PathBuf,
    pub daemon: DaemonSpec,
    /// Where that is.
    pub daemon_place: Place,
    /// `[directory]`, if there is one.
    pub directory: Option<(DirectorySpec, Place)>,
    /// `[pool]`, if there is one.
    pub pool: Option<(PoolSpec, Place)>,
    /// Every `[[core]]`; one if there is neither one nor a pool.
    pub cores: Vec<(CoreSpec, Place)>,
    /// Every `[[group]]`.
    pub groups: Vec<(GroupSpec, Place)>,
    pub disks: Vec<(DiskSpec, Place)>,
    pub switches: Vec<(SwitchSpec, Place)>,
    pub nics: Vec<(NicSpec, Place)>,
    /// Every `[[pci]]`.
    pub functions: Vec<(FunctionSpec, Place)>,
    pub exports: Vec<(ExportSpec, Place)>,
    /// Old names of keys, in the order of their lines: they are read, and have to be changed some day.
    pub warnings: Vec<Problem>,
}

/// The parts of a configuration, for those who look for them.
const PARTS: &str = "there are [daemon], [directory], [pool], [[core]], [[group]], [[disk]], [[switch]], [[nic]], [[pci]] and [[export]]";

/// A configuration is text by people: larger is something else.
const MAX_BYTES: u64 = 1 << 20;

impl Config {
    /// Reads and checks the file.
    pub fn read(file: &Path) -> Result<Config, Problems> {
        let whole = |reason: String, remedy: &str| {
            Problems::new(file, vec![Problem { line: 0, reason, remedy: remedy.to_owned() }])
        };
        let size = std::fs::metadata(file)
            .map_err(|e| whole(format!("cannot be read: {e}"), "name a configuration with --config FILE"))?
            .len();
        if size > MAX_BYTES {
            return Err(whole(
                format!("{size} bytes"),
                "a configuration has at most 1 MiB; is this another file?",
            ));
        }
        let text = std::fs::read_to_string(file).map_err(|e| {
            whole(format!("cannot be read: {e}"), "it must be a file of UTF-8 text that root may read")
        })?;
        Config::parse(file, &text)
    }

    /// Checks `text`, read from `file`.
    pub fn parse(file: &Path, text: &str) -> Result<Config, Problems> {
        let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let folder = file.parent().unwrap_or(Path::new("/"));
        let source = SourceText { text, folder };
        let (mut document, errors) = DeTable::parse_recoverable(text);
        if !errors.is_empty() {
            let problem = |error: &toml::de::Error| {
                Problem {
                line: error.span().map_or(0, |span| source.line(&span)),
                reason: error.message().lines().next().unwrap_or("not TOML").to_owned(),
                remedy: "write TOML: `key = value` lines under [daemon], [directory], [pool], [[core]], [[group]], [[disk]], [[switch]], [[nic]], [[pci]] and [[export]]".to_owned(),
            }
            };
            return Err(Problems::new(&file, errors.iter().map(problem).collect()));
        }
        let (mut problems, mut warnings) = (Vec::new(), Vec::new());
        old_keys::rename(document.get_mut(), source, &mut warnings, &mut problems);
        let config = build(source, &document, &mut problems);
        if !problems.is_empty() {
            return Err(Problems::new(&file, problems));
        }
        warnings.sort();
        Ok(Config { file, warnings, ..config })
    }

    /// Writes the warnings to the log. For whoever puts the configuration into effect.
    pub fn log_warnings(&self) {
        for Problem { line, reason, remedy } in &self.warnings {
            tracing::warn!("{}:{line}: {reason}: {remedy}", self.file.display());
        }
    }

    /// What can be seen to be wrong with images without opening them; only of the disks that `wanted` names, since one that
    /// is being served may have been given another image meanwhile.
    pub fn images(&self, wanted: impl Fn(&DiskSpec) -> bool) -> Result<(), Problems> {
        let mut list = Vec::new();
        for (disk, place) in self.disks.iter().filter(|(disk, _)| wanted(disk)) {
            if let BackingSpec::File { path, .. } = &disk.backing {
                list.extend(image_flaw(disk, path).map(|flaw| place.problem(flaw)));
            }
        }
        if list.is_empty() { Ok(()) } else { Err(Problems::new(&self.file, list)) }
    }

    /// A disk, a NIC or a PCI function that could not be served, as a problem of its lines.
    pub fn served_problem(&self, kind: &str, name: &str, reason: String, remedy: String) -> Problem {
        let disk = self.disks.iter().find(|(disk, _)| disk.name == name && kind == "disk");
        let nic = self.nics.iter().find(|(nic, _)| nic.name == name && kind == "nic");
        let function = self.functions.iter().find(|(one, _)| one.name == name && kind == "PCI function");
        let export = self.exports.iter().find(|(one, _)| one.name == name && kind == "export");
        // What opening a disk finds wrong is nearly always the image; of a function, what is behind it.
        let line = disk.map(|(_, place)| place.of("path")).or(nic.map(|(_, place)| place.line));
        let line = line.or(function.map(|(_, place)| place.of("host")));
        let line = line.or(export.map(|(_, place)| place.of("path")));
        Problem { line: line.unwrap_or(0), reason: format!("{kind} {name}: {reason}"), remedy }
    }

    /// What the pool of cores is to be, if there is one.
    pub fn pool(&self) -> Option<&PoolSpec> {
        self.pool.as_ref().map(|(pool, _)| pool)
    }

    pub fn disk(&self, name: &str) -> Option<&DiskSpec> {
        self.disks.iter().map(|(disk, _)| disk).find(|disk| disk.name == name)
    }
}

fn build<'t>(
    source: SourceText<'t>,
    document: &'t Spanned<DeTable<'t>>,
    problems: &mut Vec<Problem>,
) -> Config {
    let mut config = Config::default();
    for (key, value) in document.get_ref() {
        let line = source.line(&key.span());
        let known =
            ["daemon", "directory", "pool", "core", "group", "disk", "switch", "nic", "pci", "export"];
        match (key.get_ref().as_ref(), value.get_ref()) {
            ("daemon", DeValue::Table(table)) => {
                let reader = TableReader::new(source, "[daemon]", table, &key.span(), problems);
                (config.daemon, config.daemon_place) = daemon(reader);
            }
            ("directory", DeValue::Table(table)) => {
                let reader = TableReader::new(source, "[directory]", table, &key.span(), problems);
                let (directory, place) = directory::directory(reader);
                config.directory = directory.map(|directory| (directory, place));
            }
            ("pool", DeValue::Table(table)) => {
                let reader = TableReader::new(source, "[pool]", table, &key.span(), problems);
                config.pool = Some(pool(reader));
            }
            (
                name @ ("core" | "group" | "disk" | "switch" | "nic" | "pci" | "export"),
                DeValue::Array(array),
            ) => {
                for item in array.iter() {
                    let Some(table) = element(source, name, item, problems) else { continue };
                    let what = match name {
                        "core" => "[[core]]",
                        "group" => "[[group]]",
                        "disk" => "[[disk]]",
                        "switch" => "[[switch]]",
                        "nic" => "[[nic]]",
                        "export" => "[[export]]",
                        _ => "[[pci]]",
                    };
                    let reader = TableReader::new(source, what, table, &item.span(), problems);
                    match name {
                        "core" => {
                            let position = config.cores.len() as u32;
                            config.cores.push(core(reader, position));
                        }
                        "group" => config.groups.extend(group::group(reader)),
                        "disk" => config.disks.extend(disk(reader)),
                        "switch" => config.switches.extend(network::switch(reader)),
                        "nic" => config.nics.extend(network::nic(reader)),
                        "export" => config.exports.extend(export(reader)),
                        _ => config.functions.extend(function::function(reader)),
                    }
                }
            }
            (name @ ("core" | "group" | "disk" | "switch" | "nic" | "pci" | "export"), _) => {
                problems.push(Problem {
                    line,
                    reason: format!("[{name}] is one table, and there may be several"),
                    remedy: format!("write [[{name}]]"),
                })
            }
            (name @ ("daemon" | "directory" | "pool"), _) => problems.push(Problem {
                line,
                reason: format!("{name} is not one table"),
                remedy: format!("write [{name}] once"),
            }),
            (name, _) => problems.push(Problem {
                line,
                reason: format!("{name:?} is no part of a configuration"),
                remedy: match nearest(name, &known) {
                    Some(one @ ("daemon" | "directory" | "pool")) => format!("write [{one}]"),
                    Some(near) => format!("write [[{near}]]"),
                    None => PARTS.to_owned(),
                },
            }),
        }
    }
    if config.cores.is_empty() && config.pool.is_none() {
        config.cores.push((CoreSpec::new(0), Place::default()));
    }
    check_cores(&config, problems);
    check_images(&config, problems);
    shared::check(&config, problems);
    network::check(&config, problems);
    group::check(&config, problems);
    function::check(&config, problems);
    config
}

fn element<'t>(
    source: SourceText<'t>,
    name: &str,
    item: &'t Spanned<DeValue<'t>>,
    problems: &mut Vec<Problem>,
) -> Option<&'t DeTable<'t>> {
    let table = item.get_ref().as_table();
    if table.is_none() {
        let line = source.line(&item.span());
        problems.push(Problem {
            line,
            reason: format!("{name} is a list of values"),
            remedy: format!("write [[{name}]]"),
        });
    }
    table
}

fn daemon(mut reader: TableReader<'_, '_>) -> (DaemonSpec, Place) {
    let mut daemon = DaemonSpec {
        socket: reader.path("socket"),
        run_dir: reader.path("run_dir"),
        identity: reader.path("identity"),
        state_dir: reader.path("state_dir"),
        claim_wait_s: reader.number("claim_wait_s"),
        access: access(&mut reader),
        ..DaemonSpec::default()
    };
    for (field, path) in [("socket", &daemon.socket), ("run_dir", &daemon.run_dir)] {
        let flaw = path.as_deref().and_then(ioplane_api::spec::socket_flaw);
        if let Some(Flaw { reason, remedy, .. }) = flaw {
            reader.note(field, reason, remedy);
        }
    }
    if daemon.claim_wait_s.is_some_and(|seconds| !(1..=LONGEST_CLAIM_WAIT).contains(&seconds)) {
        let reason = format!("claim_wait_s is not in 1 to {LONGEST_CLAIM_WAIT}");
        reader.note("claim_wait_s", reason, "leave it out for 30 seconds".to_owned());
    }
    if let Some(text) = reader.text("metrics") {
        let remedy =
            "write metrics = \"127.0.0.1:9750\"; to let others ask, put a proxy that knows them before it";
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() => daemon.metrics = Some(address),
            Ok(address) => {
                let reason = format!("metrics = {text:?}: {} is not a loopback address", address.ip());
                reader.note("metrics", reason, remedy.to_owned());
            }
            Err(_) => {
                reader.note("metrics", format!("metrics = {text:?} is no ADDRESS:PORT"), remedy.to_owned())
            }
        }
    }
    (daemon, reader.finish())
}

/// `socket_group` and `socket_mode`.
fn access(reader: &mut TableReader<'_, '_>) -> SocketAccess {
    let mut access = SocketAccess::default();
    if let Some(name) = reader.text("socket_group") {
        match group(&name) {
            Ok(group) => access.group = Some(group),
            Err(reason) => {
                let remedy =
                    "name a group that `getent group` knows, such as kvm or libvirt-qemu, or give its number";
                reader.note("socket_group", reason, remedy.to_owned());
            }
        }
    }
    if let Some(text) = reader.text("socket_mode") {
        match u32::from_str_radix(&text, 8) {
            Ok(mode) if mode & !0o777 == 0 && mode & 0o600 == 0o600 => access.mode = Some(mode),
            _ => {
                let reason = format!("socket_mode = {text:?} is no mode for a socket");
                let remedy = "write three octal digits, the first of them 6 or 7, as in \"0660\"";
                reader.note("socket_mode", reason, remedy.to_owned());
            }
        }
    }
    access
}

/// The number of a group, from its name, wherever this host has its groups from, or from its number. May block: a directory may be
/// asked over a network.
fn group(name: &str) -> Result<u32, String> {
    match uzers::get_group_by_name(name) {
        Some(group) => Ok(group.gid()),
        None => name.parse().map_err(|_| format!("there is no group {name:?}")),
    }
}

fn core(mut reader: TableReader<'_, '_>, position: u32) -> (CoreSpec, Place) {
    let id = reader.small("id").unwrap_or(position);
    let core = CoreForm::read(&mut reader).spec(id);
    for Flaw { field, reason, remedy } in core.flaws() {
        reader.note(field, reason, remedy);
    }
    (core, reader.finish())
}

fn pool(mut reader: TableReader<'_, '_>) -> (PoolSpec, Place) {
    let pool = PoolForm::read(&mut reader).spec();
    for Flaw { field, reason, remedy } in pool.flaws() {
        reader.note(field, reason, remedy);
    }
    (pool, reader.finish())
}

fn disk(mut reader: TableReader<'_, '_>) -> Option<(DiskSpec, Place)> {
    let name = network::name(&mut reader, "disk");
    let form = DiskForm::read(&mut reader);
    let spec = name.and_then(|name| network::checked(&mut reader, form.spec(&name)));
    let place = reader.finish();
    spec.map(|spec| (spec, place))
}

fn export(mut reader: TableReader<'_, '_>) -> Option<(ExportSpec, Place)> {
    let name = network::name(&mut reader, "export");
    let form = ExportForm::read(&mut reader);
    let spec = name.and_then(|name| network::checked(&mut reader, form.spec(&name)));
    let place = reader.finish();
    spec.map(|spec| (spec, place))
}

fn check_cores(config: &Config, problems: &mut Vec<Problem>) {
    for (index, (core, place)) in config.cores.iter().enumerate() {
        if let Some((_, first)) = config.cores[..index].iter().find(|(other, _)| other.id == core.id) {
            let reason = format!("core {} is there already, in line {}", core.id, first.line);
            problems.push(place.problem(Flaw::new("id", reason, "give every core a number of its own")));
        }
    }
}

fn check_images(config: &Config, problems: &mut Vec<Problem>) {
    // The same file by another name is the same file.
    let image = |backing: &BackingSpec| match backing {
        BackingSpec::File { path, .. } => std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino())),
        BackingSpec::Memory { .. } | BackingSpec::Remote { .. } => None,
    };
    let disks =
        config.disks.iter().map(|(disk, place)| ("disk", &disk.name, &disk.backing, disk.read_only, place));
    let exports = config.exports.iter();
    let exports =
        exports.map(|(export, place)| ("export", &export.name, &export.backing, export.read_only, place));
    let all: Vec<_> = disks.chain(exports).collect();
    for (index, (_, _, backing, read_only, place)) in all.iter().enumerate() {
        for (kind, other, others, shared, earlier) in &all[..index] {
            let shared = *shared && *read_only;
            if image(backing).is_some() && image(others) == image(backing) && !shared {
                let reason = format!(
                    "{} is the image of {kind} {other} already, in line {}",
                    backing.name(),
                    earlier.of("path")
                );
                let remedy = "give each its own copy, or make both read_only; a disk uses an export of its host by remote";
                problems.push(place.problem(Flaw::new("path", reason, remedy)));
            }
        }
    }
}

/// What can be seen of an image without opening it.
fn image_flaw(disk: &DiskSpec, path: &Path) -> Option<Flaw> {
    let flaw = |reason: String, remedy: String| Some(Flaw::new("path", reason, remedy));
    let shown = path.display();
    let file = match std::fs::metadata(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return flaw(format!("there is no image {shown}"), format!("make it: truncate -s 10G {shown}"));
        }
        Err(e) => return flaw(format!("{shown}: {e}"), "let the daemon's user reach the image".to_owned()),
    };
    if file.is_dir() {
        return flaw(format!("{shown} is a directory"), "name a file or a block device".to_owned());
    }
    let unit = u64::from(disk.block_size.unwrap_or(512));
    if file.is_file() && (file.len() == 0 || !file.len().is_multiple_of(unit)) {
        let bytes = file.len();
        let next = bytes.max(1).next_multiple_of(unit);
        return flaw(
            format!("{shown} has {bytes} bytes, which is no multiple of {unit}, or zero"),
            format!("if nobody uses it: truncate -s {next} {shown}"),
        );
    }
    None
}
