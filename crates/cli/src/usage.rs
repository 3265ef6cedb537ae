//! From words to a command: what cannot be read is said, as JSON as well for programs.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use ioplane_api::refusal::Code;

use crate::args::Cli;
use crate::output::{CommandError, hint, print_json, set_verbosity};
use crate::words;

/// Reads the command line. `Err` has the exit code, and everything is printed already: the text of `--help`, or what cannot be read
/// (code 2). An old word is a warning on standard error. Sets how much this process prints from now on.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, ExitCode> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let cli = Cli::try_parse_from(&arguments).map_err(|error| {
        let _ = error.print();
        let json = arguments.iter().any(|word| word == "--json");
        if json && error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            let _ = print_json(&failure(&error.render().to_string()));
        }
        ExitCode::from(error.exit_code() as u8)
    })?;
    set_verbosity(cli.verbosity());
    words::warnings(&arguments).iter().for_each(hint);
    Ok(cli)
}

/// What clap says, in two parts: `error: WHAT`, and below it tips and the usage.
fn failure(said: &str) -> CommandError {
    let (error, below) = said.split_once("\n\n").unwrap_or((said, ""));
    let lines = below.lines().map(str::trim).filter(|line| !line.is_empty());
    let remedy: Vec<&str> = lines.take_while(|line| !line.starts_with("For more information")).collect();
    let remedy = if remedy.is_empty() { vec!["see `ioplane help`"] } else { remedy };
    let error = error.strip_prefix("error: ").unwrap_or(error);
    let error = error.split_whitespace().collect::<Vec<_>>().join(" ");
    CommandError::new(Code::Usage, error, remedy.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clap_says_is_parted() {
        let error = Cli::try_parse_from(["ioplane", "disk", "remove"]).unwrap_err();
        let CommandError(body) = failure(&error.render().to_string());
        assert!(body.error.starts_with("the following required arguments") && body.error.ends_with("<NAME>"));
        assert_eq!(
            (body.code.as_str(), body.remedy.as_str()),
            ("usage", "Usage: ioplane disk remove <NAME>")
        );
    }
}
