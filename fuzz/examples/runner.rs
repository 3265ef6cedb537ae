//! The targets without cargo-fuzz. See script/fuzz.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use ioplane_fuzz::mutate::{self, Rng};
use ioplane_fuzz::{TARGETS, Target};

const USAGE: &str = "usage: runner run TARGET|all SECONDS [SEED]
       runner replay TARGET FILE...
       runner seeds TARGET FOLDER";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["run", name, seconds] => run(name, seconds, None),
        ["run", name, seconds, seed] => run(name, seconds, Some(seed)),
        ["replay", name, files @ ..] if !files.is_empty() => replay(name, files),
        ["seeds", name, folder] => seeds(name, Path::new(folder)),
        _ => Err(anyhow::anyhow!(USAGE)),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::from(2)
        }
    }
}

fn targets(name: &str) -> Result<Vec<Target>> {
    let found: Vec<Target> = TARGETS.iter().filter(|t| name == "all" || t.name == name).copied().collect();
    anyhow::ensure!(!found.is_empty(), "no target is called {name}");
    Ok(found)
}

fn run(name: &str, seconds: &str, seed: Option<&str>) -> Result<bool> {
    let time = Duration::from_secs(seconds.parse().context("SECONDS is a number")?);
    let seed = match seed {
        Some(seed) => seed.parse().context("SEED is a number")?,
        None => SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos() as u64,
    };
    let artifacts = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/artifacts"));
    let mut well = true;
    for target in targets(name)? {
        let outcome = mutate::run(target, time, seed, &artifacts);
        let (runs, signatures) = (outcome.runs, outcome.signatures);
        println!("{}: {runs} inputs, {signatures} signatures, seed {seed}", target.name);
        if let Some((path, text)) = outcome.finding {
            println!(
                "{}: FOUND {text}\n  again: script/fuzz --replay {} {}",
                target.name,
                target.name,
                path.display()
            );
            well = false;
        }
    }
    Ok(well)
}

fn replay(name: &str, files: &[&str]) -> Result<bool> {
    for target in targets(name)? {
        for file in files {
            let input = std::fs::read(file).with_context(|| (*file).to_owned())?;
            println!("{} {file}: {:016x}", target.name, (target.run)(&input));
        }
    }
    Ok(true)
}

/// A corpus for cargo-fuzz to begin with.
fn seeds(name: &str, folder: &Path) -> Result<bool> {
    for target in targets(name)? {
        let folder = folder.join(target.name);
        std::fs::create_dir_all(&folder)?;
        let mut rng = Rng(1);
        for number in 0..64 {
            std::fs::write(folder.join(format!("seed-{number:02}")), mutate::fresh(&mut rng))?;
        }
    }
    Ok(true)
}
