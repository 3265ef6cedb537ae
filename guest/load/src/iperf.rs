//! iperf3 between guests: a load that others wrote, with its own opinion of what arrived.

use crate::network::{link_local, wait};
use crate::protocol::Throughput;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::process::{Command, Output};

const PROGRAM: &str = "/usr/bin/iperf3";

/// Serves one test and ends.
pub fn serve(port: u16) -> Result<Value> {
    run_it(&["--server", "--one-off", "--port", &port.to_string()])?;
    Ok(json!({}))
}

/// Sends to the server at the station `to` and receives from it for `seconds`.
pub fn run(interface: &str, to: &str, port: u16, seconds: u32) -> Result<Throughput> {
    let server = format!("{}%{interface}", link_local(to)?);
    let (port, time) = (port.to_string(), seconds.to_string());
    let args = ["--client", &server, "--port", &port, "--time", &time, "--bidir", "--json"];
    // The server may not listen yet.
    let output = wait("the iperf3 server", || match run_it(&args) {
        Err(error) if error.to_string().contains("Connection refused") => Ok(None),
        done => done.map(Some),
    })?;
    read(&serde_json::from_slice(&output.stdout).context("iperf3 --json")?)
}

fn run_it(args: &[&str]) -> Result<Output> {
    let output = Command::new(PROGRAM).args(args).output().with_context(|| format!("run {PROGRAM}"))?;
    if !output.status.success() {
        let (said, complained) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        bail!("iperf3 {} ended with {}: {said}{complained}", args.join(" "), output.status);
    }
    Ok(output)
}

fn read(said: &Value) -> Result<Throughput> {
    let end = &said["end"];
    let bytes =
        |sum: &str| end[sum]["bytes"].as_u64().with_context(|| format!("iperf3 says no {sum}: {end}"));
    Ok(Throughput {
        there: bytes("sum_received")?,
        back: bytes("sum_received_bidir_reverse")?,
        retransmits: end["sum_sent"]["retransmits"].as_u64().unwrap_or(0),
        seconds: end["sum_sent"]["seconds"].as_f64().unwrap_or(0.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_iperf_says_is_read() {
        let said = json!({ "end": {
            "sum_sent": { "bytes": 30, "seconds": 5.0, "retransmits": 2 },
            "sum_received": { "bytes": 20 },
            "sum_received_bidir_reverse": { "bytes": 10 },
        }});
        let found = read(&said).unwrap();
        assert_eq!((found.there, found.back, found.retransmits), (20, 10, 2));
        let error = read(&json!({ "error": "unable to connect" })).unwrap_err();
        assert!(error.to_string().contains("sum_received"), "{error}");
    }
}
