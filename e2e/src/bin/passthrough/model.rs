//! What an update of a model costs: natively, and in instructions, by an example of ioplane-passthrough.

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// Of one update, the loop around it included.
#[derive(Serialize)]
pub struct Update {
    /// Natively.
    pub ns: f64,
    /// Counted by callgrind; nothing where there is no valgrind.
    pub instructions: Option<f64>,
}

/// An example of ioplane-passthrough or ioplane-host, built beside this program.
pub fn example(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = own.with_file_name("examples").join(name);
    ensure!(path.is_file(), "no {}: cargo build --release -p ioplane-passthrough --examples", path.display());
    Ok(path)
}

fn said(command: &mut Command) -> Result<(Value, String)> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    let (text, errors) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    ensure!(output.status.success(), "{command:?}: {errors}");
    let line = text.lines().find(|line| line.starts_with('{')).with_context(|| text.clone())?;
    Ok((serde_json::from_str(line)?, errors))
}

pub fn update(name: &str) -> Result<Update> {
    let example = example("update")?;
    let (native, _) = said(Command::new(&example).args([name, "300000"]))?;
    let ns = native["ns_per_update"].as_f64().with_context(|| native.to_string())?;
    let folder = tempfile::tempdir()?;
    let file = format!("--callgrind-out-file={}", folder.path().join("out").display());
    let counted = said(
        Command::new("valgrind")
            .args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*pings*", &file])
            .arg(&example)
            .args([name, "1000"]),
    );
    let instructions = match counted {
        Ok((counted, errors)) => {
            let line = errors.lines().find(|line| line.contains("Collected"));
            let word = line.and_then(|line| line.split_whitespace().last()).context("callgrind counts")?;
            let updates = counted["updates"].as_f64().context("updates")?;
            Some(word.parse::<f64>().with_context(|| word.to_owned())? / updates)
        }
        Err(error) => {
            eprintln!("instructions are not counted: {error:#} (apt install valgrind)");
            None
        }
    };
    Ok(Update { ns, instructions })
}

pub fn table(models: &BTreeMap<&'static str, Update>) -> String {
    let mut text = String::from("| model | instructions an update | ns an update |\n|---|---|---|\n");
    for (name, update) in models {
        let instructions = update.instructions.map_or("not counted".into(), |n| format!("{n:.0}"));
        text += &format!("| {name} | {instructions} | {:.0} |\n", update.ns);
    }
    text + "\n"
}
