//! `ioplane-qmp SOCKET COMMAND [ARGUMENTS]`: asks a QEMU's monitor, and prints what it returns as JSON. For guests of L1, whose sockets are there.

use anyhow::{Context, Result, bail};
use ioplane_qemu::{Endpoint, Qmp};
use serde_json::{Value, json};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (socket, command, arguments) = match &words[..] {
        [socket, command] => (socket, command, json!({})),
        [socket, command, arguments] => {
            let arguments: Value = serde_json::from_str(arguments).context("ARGUMENTS are no JSON")?;
            (socket, command, arguments)
        }
        _ => bail!("ioplane-qmp SOCKET COMMAND [ARGUMENTS]"),
    };
    let mut qmp =
        Qmp::connect(&Endpoint::here(socket), PATIENCE).with_context(|| format!("connect to {socket}"))?;
    println!("{}", qmp.execute(command, &arguments)?);
    Ok(())
}
