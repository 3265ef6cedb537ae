//! `incoming_monitor`: what another host says to the monitor of a QEMU that waits for a VM.
//!
//! Oracles: no panic; what is let through is one of the commands that a move gives, in exactly its spelling, and is read as itself again; no register
//! is written that no move writes; what is refused may be shown on a terminal.

use arbitrary::{Result, Unstructured};
use ioplane_qemu::{IncomingPorts, IncomingRequest};

use crate::Signature;

const NAMES: [&str; 12] = [
    "query-status",
    "query-pci",
    "stop",
    "cont",
    "quit",
    "qmp_capabilities",
    "human-monitor-command",
    "migrate-incoming",
    "blockdev-add",
    "query-block",
    "device_del",
    "",
];

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let mut input = Unstructured::new(data);
    let mut ports = IncomingPorts::default();
    for _ in 0..16 {
        let Ok(line) = line(&mut input) else { break };
        match IncomingRequest::parse(&line) {
            Ok(request) => {
                let (name, arguments) = request.command.execute();
                signature.saw(name);
                let id = request.id.map_or(String::new(), |id| format!(",\"id\":{id}"));
                let again = format!("{{\"execute\":\"{name}\",\"arguments\":{arguments}{id}}}");
                assert_eq!(IncomingRequest::parse(again.as_bytes()), Ok(request), "{again}");
                let said = arguments.to_string();
                let port = name == "human-monitor-command"
                    && (said.contains(":\"i/") || said.contains(":\"o/"))
                    && said.contains(" 0xcf");
                let plain = name.starts_with("query-")
                    || ["stop", "cont", "quit", "qmp_capabilities"].contains(&name);
                assert!(port || (plain && said == "{}"), "{again}");
                signature.count(u64::from(ports.allow(&request.command)));
            }
            Err(refused) => {
                signature.saw("refused");
                assert!(
                    !refused.what.chars().any(char::is_control) && refused.what.len() < 4096,
                    "{:?}",
                    refused.what
                );
            }
        }
    }
    signature.value()
}

fn line(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    if input.ratio(1, 4)? {
        let length = input.int_in_range(0..=5000)?;
        return Ok(input.bytes(length.min(input.len()))?.to_vec());
    }
    let name = *input.choose(&NAMES)?;
    let arguments = match input.int_in_range(0..=4)? {
        0 => "{}".to_owned(),
        1 => format!("{:?}", input.arbitrary::<String>()?),
        _ => format!("{{\"command-line\":{:?}}}", access(input)?),
    };
    let id =
        if input.arbitrary()? { format!(",\"id\":{}", input.arbitrary::<i64>()?) } else { String::new() };
    Ok(format!("{{\"execute\":{name:?},\"arguments\":{arguments}{id}}}").into_bytes())
}

fn access(input: &mut Unstructured<'_>) -> Result<String> {
    let verb = *input.choose(&["i", "o", "i", "o", "xp ", "I"])?;
    let size = *input.choose(&["b", "h", "w", "h", "w", "g", "wb"])?;
    let port = match input.int_in_range(0..=7)? {
        0 => input.arbitrary::<u32>()?,
        1 => input.int_in_range(0xcf0..=0xd04)?,
        _ => *input.choose(&[0xcf8, 0xcfc, 0xcfd, 0xcfe])?,
    };
    let mut line = format!("{verb}/{size} {port:#x}");
    let usual = if verb == "o" { 7 } else { 1 };
    if input.ratio(usual, 8)? {
        line.push_str(&format!(" {:#x}", input.arbitrary::<u32>()?));
    }
    if input.ratio(1, 8)? {
        line.push_str(&input.arbitrary::<String>()?);
    }
    Ok(line)
}
