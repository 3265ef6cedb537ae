//! `ioplane exits record` and `diff`: a report in a file, and two of them side by side.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use ioplane_cli::args::{DiffArgs, RecordArgs};
use ioplane_cli::output::{print, print_done};
use ioplane_exits::{ExitRecording, Report};
use ioplane_plain::plain;
use serde::Serialize;

use super::diff::{ExitDiff, ExitLimit};
use super::{usage, watch, write};

/// What was written.
#[derive(Serialize)]
struct Recorded {
    file: String,
    vm: String,
    seconds: f64,
    exits: u64,
}

pub(super) fn record(args: &RecordArgs, json: bool) -> Result<()> {
    let file = &args.file;
    let report = writable(file, || watch(&args.watch, None))?;
    let Report { vm, seconds, exits, .. } = &report;
    let recorded =
        Recorded { file: file.display().to_string(), vm: vm.clone(), seconds: *seconds, exits: *exits };
    write(file, &ExitRecording::new(report).text()?)?;
    print_done(json, &recorded, |recorded| {
        let Recorded { file, vm, seconds, exits } = recorded;
        format!("{exits} exits of {vm} in {seconds:.1} s are in {}\n", plain(file))
    })
}

/// Does something long whose outcome goes to a file: one that cannot be written is refused before it, and one that was made for it goes if it fails.
fn writable<T>(file: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let made = match File::options().write(true).create_new(true).open(file) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            File::options().write(true).open(file).map(|_| false)
        }
        opened => opened.map(|_| true),
    };
    let made = made.with_context(|| format!("{} cannot be written", file.display()))?;
    let done = work();
    if done.is_err() && made {
        let _ = std::fs::remove_file(file);
    }
    done
}

pub(super) fn diff(args: &DiffArgs, json: bool) -> Result<ExitCode> {
    let limits: Result<Vec<ExitLimit>, String> =
        args.fail_if.iter().map(|limit| ExitLimit::parse(limit)).collect();
    let limits = limits.map_err(usage)?;
    let (before, after) = (ExitRecording::read(&args.before)?, ExitRecording::read(&args.after)?);
    let diff = ExitDiff::new(&before, &after, &limits).map_err(usage)?;
    print(json, &diff, ExitDiff::to_string)?;
    Ok(if diff.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_refused_first() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing/a");
        let refused = writable(&missing, || -> Result<()> { panic!("the work was done for nothing") });
        assert!(format!("{:#}", refused.unwrap_err()).contains("cannot be written"));
    }

    #[test]
    fn what_fails_leaves_files_as_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let (new, old) = (folder.path().join("new"), folder.path().join("old"));
        std::fs::write(&old, "before").unwrap();
        for file in [&new, &old] {
            writable(file, || -> Result<()> { bail!("no") }).unwrap_err();
        }
        assert!(!new.exists());
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "before");
        writable(&new, || Ok(())).unwrap();
        assert!(new.exists());
    }
}
