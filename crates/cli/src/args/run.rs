//! `run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::duration;

fn time_limit(word: &str) -> Result<Duration, String> {
    let time = duration(word)?;
    let range = Duration::from_micros(1)..=Duration::from_millis(100);
    if range.contains(&time) { Ok(time) } else { Err("it must be 1us to 100ms".into()) }
}

/// A VMM to be started.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The interposer [default: libioplane_interposer.so beside this program, or in ../lib/ioplane]
    #[arg(long, value_name = "FILE")]
    pub library: Option<PathBuf>,
    /// How long a cluster may keep a guest from its interrupts, 1 us to 100 ms [default: 50us]
    #[arg(long, value_name = "TIME", value_parser = time_limit)]
    pub time_limit: Option<Duration>,
    /// Tell the guest by CPUID that it can have many device accesses in one exit
    #[arg(long)]
    pub batch: bool,
    /// The same, and no clusters: the guest has fewer exits only where it asks for it. `ioplane exits cluster on` begins clusters
    #[arg(long, conflicts_with = "batch")]
    pub batch_only: bool,
    /// At most so many ticks per second of the guest's PIT (19 to 1000), for guests that tell the time by another clock: as
    /// `ioplane exits clamp` does it later
    #[arg(long, value_name = "HZ", value_parser = super::clamp::hz)]
    pub clamp: Option<u32>,
    /// The VMM and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}
