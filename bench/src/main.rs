//! Measurements against peers. `script/bench NAME [--json]` is the door; each NAME is a module.
//!
//! Nothing here asserts a time. What is asserted is that the bytes were right: a fast wrong back end fails.

mod exitless;
mod machine;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "bench", about = "Measures ioplane against its peers")]
struct Command {
    #[command(subcommand)]
    name: Name,
}

#[derive(Subcommand)]
enum Name {
    /// virtio-blk served by polling, against qemu-storage-daemon: one core each, same front end, same backing.
    Exitless(exitless::Options),
}

fn main() -> anyhow::Result<()> {
    match Command::parse().name {
        Name::Exitless(options) => {
            let json = options.json;
            let report = exitless::run(&options)?;
            if json {
                println!("{}", serde_json::to_string_pretty(&report.json())?);
            } else {
                print!("{}", report.table());
            }
        }
    }
    Ok(())
}
