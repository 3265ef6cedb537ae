//! `ioplane run`: a VMM with the interposer loaded into it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use ioplane_api::refusal::Code;
use ioplane_cli::args::RunArgs;
use ioplane_cli::output::CommandError;

const LIBRARY: &str = "libioplane_interposer.so";
const PRELOAD: &str = "LD_PRELOAD";
/// Where the interposer reads its own time limit.
const MICROSECONDS: &str = "IOPLANE_EXITS_CLUSTER_MICROSECONDS";
/// Where the interposer reads whether it offers batches.
const BATCH: &str = "IOPLANE_EXITS_BATCH";
/// Where the interposer reads the most ticks per second of a guest.
const CLAMP: &str = "IOPLANE_EXITS_CLAMP";

/// Puts the VMM in the place of this process. Comes back only with an error.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    let library = library(args.library.as_deref())?;
    let (name, rest) = args.command.split_first().context("clap has seen a command")?;
    let program = find(name)?;
    let file = File::open(&program).with_context(|| format!("{} cannot be read", program.display()))?;
    if let Some(why) = out_of_reach(&file) {
        let error = format!("nothing can be loaded into {}: {why}", program.display());
        bail!(CommandError::new(Code::Unsupported, error, "take a VMM that is linked dynamically"));
    }
    let mut command = Command::new(&program);
    command.arg0(name).args(rest).env(PRELOAD, preload(library.as_os_str(), std::env::var_os(PRELOAD)));
    if let Some(limit) = args.time_limit {
        command.env(MICROSECONDS, limit.as_micros().to_string());
    }
    if args.batch || args.batch_only {
        command.env(BATCH, if args.batch_only { "only" } else { "on" });
    }
    if let Some(hz) = args.clamp {
        command.env(CLAMP, hz.to_string());
    }
    Err(command.exec()).with_context(|| format!("{} does not start", program.display()))
}

/// Before what else is loaded: it has to see the VMM's calls first.
fn preload(library: &OsStr, others: Option<OsString>) -> OsString {
    let mut all = library.to_owned();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        all.push(":");
        all.push(others);
    }
    all
}

fn library(given: Option<&Path>) -> Result<PathBuf> {
    let places = match given {
        Some(given) => vec![given.to_owned()],
        None => {
            let own = std::env::current_exe().context("where this program is cannot be said")?;
            let here = own.parent().unwrap_or(Path::new("/"));
            vec![here.join(LIBRARY), here.join("../lib/ioplane").join(LIBRARY)]
        }
    };
    // The loader takes a name without a slash for one of the system's, and a blank or a colon for the end of it.
    for place in &places {
        let Ok(found) = place.canonicalize() else { continue };
        if found.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':')) {
            let error = format!("{} has a blank or a colon in its path", found.display());
            bail!(CommandError::new(Code::Usage, error, "move it, or give another path with --library"));
        }
        return Ok(found);
    }
    let looked: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
    let error = format!("the interposer is not there: {}", looked.join(", "));
    bail!(CommandError::new(Code::NotFound, error, "give its path with --library"))
}

/// As `execvp` finds it.
fn find(name: &OsStr) -> Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Ok(name.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let found = std::env::split_paths(&path).map(|place| place.join(name)).find(|path| path.is_file());
    let error = || CommandError::new(Code::NotFound, format!("{} is not in PATH", name.display()), "");
    Ok(found.ok_or_else(error)?)
}

/// Why the loader does not load anything into this program; `None` if it does, or if that cannot be said: a script starts
/// another program, which gets the environment.
fn out_of_reach(program: &File) -> Option<&'static str> {
    const PROGRAM_HEADER: usize = 56;
    const INTERPRETER: u32 = 3;
    let mut header = [0; 64];
    program.read_exact_at(&mut header, 0).ok()?;
    if !header.starts_with(b"\x7fELF\x02") {
        return None;
    }
    let offset = u64::from_le_bytes(header[32..40].try_into().ok()?);
    let count = u16::from_le_bytes([header[56], header[57]]);
    for index in 0..u64::from(count) {
        let mut entry = [0; PROGRAM_HEADER];
        program.read_exact_at(&mut entry, offset.checked_add(index * PROGRAM_HEADER as u64)?).ok()?;
        if u32::from_le_bytes(entry[..4].try_into().ok()?) == INTERPRETER {
            return None;
        }
    }
    Some("it is linked statically")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_loaded_before_is_kept() {
        assert_eq!(preload("/a.so".as_ref(), None), "/a.so");
        assert_eq!(preload("/a.so".as_ref(), Some("".into())), "/a.so");
        assert_eq!(preload("/a.so".as_ref(), Some("/b.so".into())), "/a.so:/b.so");
    }

    #[test]
    fn a_program_without_a_loader_is_out_of_reach() {
        let own = File::open("/proc/self/exe").unwrap();
        assert_eq!(out_of_reach(&own), None);
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"#!/bin/sh\n", 0).unwrap();
        assert_eq!(out_of_reach(&file), None, "a script");
        // An ELF header without program headers.
        file.write_all_at(b"\x7fELF\x02", 0).unwrap();
        file.set_len(64).unwrap();
        file.write_all_at(&[0; 2], 56).unwrap();
        assert_eq!(out_of_reach(&file), Some("it is linked statically"));
    }

    #[test]
    fn a_library_that_is_not_there_is_said() {
        let error = library(Some(Path::new("/nowhere/x.so"))).unwrap_err();
        assert!(error.to_string().contains("/nowhere/x.so"), "{error}");
    }
}
