//! `ioplane config save`: what was added at run time goes into the configuration, so that it is there after a reboot.
//!
//! The state file is in the run directory, which a reboot empties. What an administrator wrote stays as it is, byte for byte: tables
//! are appended, the whole is read as a start would read it, and only what then says exactly what is served replaces the file.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

use ioplane_api::report::SavedReport;
use ioplane_api::spec::{CoreSpec, GroupSpec, ServedSpec, SwitchSpec};

use crate::Daemon;
use crate::config::{Appended, Config, Place, Problems};
use crate::disk::Disk;
use crate::exports::PublishedDisk;
use crate::functions::Card;
use crate::nic::Nic;
use crate::refusal::Refusal;
use crate::served::ServedKind;
use crate::state_file::Entries;

/// What to do if the file cannot be written.
const BY_HAND: &str = "write it by hand: `ioplane config save --print` says what";

/// What is to be appended, and what was found on the way.
#[derive(Default)]
struct SavePlan {
    appended: Appended,
    saved: Vec<String>,
    unsaved: Vec<String>,
}

impl Daemon {
    /// What [`Daemon::save`] would append. May block.
    pub(crate) fn unsaved(&self) -> Result<SavedReport, Refusal> {
        self.saving().map(|(report, _, _)| report)
    }

    /// Appends what was added at run time to the configuration file. Until the next reload it is still known as added. May block.
    pub(crate) fn save(&self) -> Result<SavedReport, Refusal> {
        let (report, old, new) = self.saving()?;
        if !report.saved.is_empty() {
            replace(&report.file, &old, &new)?;
            tracing::info!(file = %report.file.display(), saved = report.saved.join(", "), "configuration saved");
        }
        Ok(report)
    }

    /// The report, the file's text, and what it would be.
    fn saving(&self) -> Result<(SavedReport, String, String), Refusal> {
        let file = self.config().file.clone();
        let old = std::fs::read_to_string(&file)
            .map_err(|error| Refusal::failed(format!("{}: {error}", file.display()), BY_HAND))?;
        let config = Config::parse(&file, &old).map_err(|problems: Problems| {
            Refusal::invalid(problems.to_string(), "correct the lines named, then save again")
        })?;
        let entries = self.state_file.entries();
        let plan = plan(&config, entries.clone());
        let mut new = old.clone();
        if !plan.saved.is_empty() {
            let gap = if old.is_empty() || old.ends_with('\n') { "" } else { "\n" };
            new += &format!("{gap}\n# Added at run time, saved by `ioplane config save`.\n");
            new += plan.appended.text.trim_start();
            let read = Config::parse(&file, &new)
                .map_err(|problems| Refusal::invalid(problems.to_string(), BY_HAND))?;
            let again = self::plan(&read, entries);
            let mut lost =
                again.saved.iter().chain(again.unsaved.iter().filter(|line| !plan.unsaved.contains(line)));
            if let Some(lost) = lost.next() {
                let error = format!("{lost} cannot be written down: the file would say something else");
                return Err(Refusal::failed(error, BY_HAND));
            }
        }
        let text = new[old.len()..].to_owned();
        let SavePlan { saved, unsaved, .. } = plan;
        Ok((SavedReport { file, saved, unsaved, text }, old, new))
    }
}

/// What of `entries` the file does not say.
fn plan(config: &Config, mut entries: Entries) -> SavePlan {
    let mut plan = SavePlan::default();
    cores(config, &entries, &mut plan);
    served::<Disk>(config, &mut entries, &mut plan, Appended::disk);
    switches(config, &entries, &mut plan);
    groups(config, &entries, &mut plan);
    served::<Nic>(config, &mut entries, &mut plan, Appended::nic);
    served::<Card>(config, &mut entries, &mut plan, Appended::function);
    served::<PublishedDisk>(config, &mut entries, &mut plan, Appended::export);
    plan
}

impl SavePlan {
    /// One thing as it is now, what the configuration said when it was read last, and what the file says.
    fn one<S: PartialEq>(
        &mut self,
        what: String,
        [now, configured, said]: [Option<&S>; 3],
        append: impl FnOnce(&mut Appended, &S),
    ) {
        match (now, configured, said) {
            (now, _, said) if now == said => {}
            (Some(now), None, None) => {
                append(&mut self.appended, now);
                self.saved.push(what);
            }
            (Some(_), None, Some(_)) => {
                self.unsaved.push(format!("{what}: the file has another one of this name"))
            }
            // The file was changed since it was read, and a reload does what it says.
            (_, Some(configured), Some(said)) if configured != said => {}
            (Some(_), Some(_), Some(_)) => self.unsaved.push(format!("{what} was changed at run time")),
            (None, _, Some(_)) => {
                self.unsaved.push(format!("{what} was removed at run time, and is in the file"))
            }
            (Some(_), Some(_), None) | (None, _, None) => {}
        }
    }
}

fn found<S>(all: &[(S, Place)], is: impl Fn(&S) -> bool) -> Option<&S> {
    all.iter().map(|(spec, _)| spec).find(|spec| is(spec))
}

/// A file without a `[[core]]` means one core: with one added to it, it would no longer be meant.
fn cores(config: &Config, entries: &Entries, plan: &mut SavePlan) {
    let meant = config.cores.iter().find(|(_, place)| *place == Place::default()).map(|(core, _)| core);
    let before = plan.saved.len();
    for (id, record) in &entries.cores {
        let said = found(&config.cores, |core| core.id == *id);
        // A core of the pool comes again by itself, and draining one is no configuration.
        let now = record.now.as_ref().filter(|core| !core.elastic);
        if record.now.is_some() && now.is_none() {
            continue;
        }
        let now = now.map(|core| CoreSpec { drain: false, ..core.clone() });
        let known = [now.as_ref(), record.configured.as_ref(), said];
        plan.one(format!("core {id}"), known, |appended: &mut Appended, core: &CoreSpec| appended.core(core));
    }
    if let Some(core) = meant.filter(|_| plan.saved.len() > before) {
        plan.appended.core(core);
        plan.saved.push(format!("core {} (there without being written)", core.id));
    }
}

fn switches(config: &Config, entries: &Entries, plan: &mut SavePlan) {
    let removed = entries.removed_switches.iter().map(|(name, spec)| (name, None, Some(spec)));
    let there = entries.switches.iter();
    let there = there.map(|(name, record)| (name, Some(&record.now), record.configured.as_ref()));
    for (name, now, configured) in there.chain(removed) {
        let said = found(&config.switches, |switch| switch.name == *name);
        let append = |appended: &mut Appended, switch: &SwitchSpec| appended.switch(switch);
        plan.one(format!("switch {name}"), [now, configured, said], append);
    }
}

fn groups(config: &Config, entries: &Entries, plan: &mut SavePlan) {
    for (name, record) in &entries.groups {
        let said = found(&config.groups, |group| group.name == *name);
        let append = |appended: &mut Appended, group: &GroupSpec| appended.group(group);
        plan.one(format!("group {name}"), [Some(&record.now), record.configured.as_ref(), said], append);
    }
}

fn served<K: ServedKind>(
    config: &Config,
    entries: &mut Entries,
    plan: &mut SavePlan,
    append: impl Fn(&mut Appended, &K::Spec),
) {
    let removed = std::mem::take(K::removed(entries));
    for (name, record) in std::mem::take(K::records(entries)) {
        let said = found(K::configured(config), |spec: &K::Spec| spec.name() == name);
        let what = format!("{} {name}", K::NAME);
        if !record.moved.is_empty() {
            plan.unsaved.push(format!("{what}: the cores that its queues were moved to"));
        }
        plan.one(what, [Some(&record.now), record.configured.as_ref(), said], &append);
    }
    for (name, spec) in removed {
        let said = found(K::configured(config), |spec: &K::Spec| spec.name() == name);
        plan.one(format!("{} {name}", K::NAME), [None, Some(&spec), said], &append);
    }
}

/// Puts `new` in the place of `old`, whole or not at all, with the same owner and mode.
fn replace(file: &Path, old: &str, new: &str) -> Result<(), Refusal> {
    let failed = |error: std::io::Error| Refusal::failed(format!("{}: {error}", file.display()), BY_HAND);
    // A link stays one.
    let file = file.canonicalize().map_err(failed)?;
    let mut name = file.clone().into_os_string();
    name.push(".new");
    let write = || -> std::io::Result<bool> {
        let meta = std::fs::metadata(&file)?;
        let mut fresh =
            std::fs::OpenOptions::new().write(true).create_new(true).mode(meta.mode() & 0o777).open(&name)?;
        fresh.write_all(new.as_bytes())?;
        let own = fresh.metadata()?;
        if (own.uid(), own.gid()) != (meta.uid(), meta.gid()) {
            fchown(&fresh, Some(meta.uid()), Some(meta.gid()))?;
        }
        fresh.set_permissions(meta.permissions())?;
        fresh.sync_all()?;
        let same = std::fs::read_to_string(&file)? == old;
        if same {
            std::fs::rename(&name, &file)?;
        }
        Ok(same)
    };
    let written = write();
    if !matches!(written, Ok(true)) {
        let exists = written.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::AlreadyExists);
        if exists {
            let remedy = format!("if nobody else is writing it: rm {}", Path::new(&name).display());
            return Err(Refusal::conflict(
                format!("{} is there already", Path::new(&name).display()),
                remedy,
            ));
        }
        let _ = std::fs::remove_file(&name);
    }
    match written {
        Ok(true) => Ok(()),
        Ok(false) => {
            Err(Refusal::conflict(format!("{} has just been changed", file.display()), "save again"))
        }
        Err(error) => Err(failed(error)),
    }
}
