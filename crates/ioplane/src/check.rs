//! `serve --check`: what is wrong with a configuration, for people and as JSON.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_cli::output::{CommandError, print_done, print_json};
use ioplane_daemon::config::{Problem, Problems};
use ioplane_daemon::{Checked, check};
use serde::Serialize;

/// Exit code of a configuration that is refused.
const REFUSED: u8 = 2;

/// One line of the configuration, and what is the matter with it.
#[derive(Debug, Serialize)]
struct ProblemReport {
    /// From 1; nothing if it belongs to no line.
    line: Option<usize>,
    reason: String,
    remedy: String,
}

impl From<&Problem> for ProblemReport {
    fn from(problem: &Problem) -> Self {
        let Problem { line, reason, remedy } = problem;
        let line = (*line > 0).then_some(*line);
        ProblemReport { line, reason: reason.clone(), remedy: remedy.clone() }
    }
}

/// What a configuration came to.
#[derive(Debug, Serialize)]
struct CheckReport {
    file: PathBuf,
    /// A daemon would start with it.
    accepted: bool,
    /// The same in words, as every error has it; nothing if it is accepted.
    #[serde(flatten)]
    error: Option<CommandError>,
    /// Why not.
    problems: Vec<ProblemReport>,
    /// What this host lacks for it. The daemon starts without, and tries again.
    missing: Vec<ProblemReport>,
    /// Old names of keys, which are read nevertheless.
    warnings: Vec<ProblemReport>,
}

/// Looks at a configuration.
pub fn run(config: &Path, json: bool) -> Result<ExitCode> {
    let checked = check(config)?;
    let reports = |problems: &[Problem]| problems.iter().map(ProblemReport::from).collect::<Vec<_>>();
    let (missing, warnings) = (reports(&checked.missing), reports(&checked.warnings));
    let report = CheckReport {
        file: checked.file.clone(),
        accepted: true,
        error: None,
        problems: Vec::new(),
        missing,
        warnings,
    };
    print_done(json, &report, |_| text(&checked))?;
    Ok(ExitCode::SUCCESS)
}

fn text(checked: &Checked) -> String {
    let Checked { file, counts, missing, warnings } = checked;
    let names = ["core", "pool", "group", "disk", "switch", "NIC", "PCI function", "export"];
    let counts = counts.iter().zip(names).filter(|(count, _)| **count > 0);
    let counts = counts.map(|(count, name)| match (count, name) {
        (1, _) => format!("1 {name}"),
        (_, "switch") => format!("{count} switches"),
        _ => format!("{count} {name}s"),
    });
    let counts: Vec<String> = counts.collect();
    let mut text = format!("{}: accepted: {}\n", file.display(), counts.join(", "));
    if !missing.is_empty() {
        // In the words of what would be refused.
        let missing = Problems::new(file, missing.clone());
        text +=
            &format!("this host lacks some of it; the daemon starts without, and tries again:\n{missing}\n");
    }
    if !warnings.is_empty() {
        let warnings = Problems::new(file, warnings.clone());
        text += &format!("some keys have old names:\n{warnings}\n");
    }
    text
}

/// Says why a configuration is refused.
pub fn refused(problems: &Problems, json: bool) -> ExitCode {
    eprintln!("ioplane: {problems}");
    if json {
        let list = problems.list.iter().map(ProblemReport::from).collect();
        let error =
            CommandError::new(Code::Configuration, "the configuration is refused", "correct the lines named");
        let report = CheckReport {
            file: problems.file.clone(),
            accepted: false,
            error: Some(error),
            problems: list,
            missing: Vec::new(),
            warnings: Vec::new(),
        };
        let _ = print_json(&report);
    }
    ExitCode::from(REFUSED)
}
