//! `ioplane`: see the library of the same name.

use clap::Parser;

fn main() -> std::process::ExitCode {
    ioplane::command::run(ioplane::cli::Cli::parse())
}
