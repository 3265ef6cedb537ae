//! Measurements against peers. `script/bench NAME [--json]` is the door; each NAME is a module.
//!
//! Nothing here asserts a time. What is asserted is that the bytes were right: a fast wrong back end fails.

mod elvis;
mod exitless;
mod lan;
mod machine;
mod network;
mod report;
mod served;

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
    /// virtio-net through the switch, against DPDK's testpmd: one core each, same front end on both sides.
    Network(network::Options),
    /// The paper's evaluation: 1 to 7 guests on one I/O core, notification against polling.
    Elvis(elvis::Options),
    /// Serves NICs, for the measurements above.
    #[command(hide = true)]
    Lan(lan::Options),
}

fn main() -> anyhow::Result<()> {
    let (json, value, table) = match Command::parse().name {
        Name::Exitless(options) => {
            let report = exitless::run(&options)?;
            (options.json, report.json(), report.table())
        }
        Name::Network(options) => {
            let report = network::run(&options)?;
            (options.json, report.json(), report.table())
        }
        Name::Elvis(options) => {
            let report = elvis::run(&options)?;
            (options.json, report.json(), report.table())
        }
        Name::Lan(options) => return lan::run(&options),
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        print!("{table}");
    }
    Ok(())
}
