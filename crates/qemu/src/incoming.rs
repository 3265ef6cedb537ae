//! What another host may say to the monitor of a QEMU that waits for a VM from there: the commands that `ioplane move vm` gives, in exactly its spelling.
//!
//! A monitor can do whatever its QEMU's user can: files (`blockdev-add`, `drive_add`), programs (`migrate exec:`), sockets, memory of the guest (`xp`,
//! `pmemsave`). So a command is not passed on: it is read into [`IncomingCommand`], and made anew from that.

use serde_json::{Value, json};

/// Longest line, bytes.
pub const LONGEST_LINE: usize = 4096;
/// The ports of configuration mechanism #1 (PCI Local Bus Specification 3.0, 3.2.2.3.2): address, and the first of four for data.
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
/// An address that selects a register.
const ENABLE: u32 = 1 << 31;
/// Registers of configuration space that are written (the same specification, 6.1): the command, the BARs; those by which a bridge routes wires (ICH9 data
/// sheet, 13.1.11); behind the header those of capabilities.
const COMMAND: u8 = 0x04;
const BARS: std::ops::RangeInclusive<u8> = 0x10..=0x24;
const ROUTES: u8 = 0x60;
const HEADER: u8 = 0x40;
/// What only tells something.
const QUERIES: [&str; 7] = [
    "query-name",
    "query-status",
    "query-version",
    "query-migrate",
    "query-migrate-capabilities",
    "query-migrate-parameters",
    "query-pci",
];

/// Bytes of an access to a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortSize {
    /// One.
    Byte,
    /// Two.
    Word,
    /// Four.
    Long,
}

impl PortSize {
    const ALL: [PortSize; 3] = [PortSize::Byte, PortSize::Word, PortSize::Long];

    /// As HMP has it.
    fn letter(self) -> char {
        match self {
            PortSize::Byte => 'b',
            PortSize::Word => 'h',
            PortSize::Long => 'w',
        }
    }

    fn bytes(self) -> u16 {
        match self {
            PortSize::Byte => 1,
            PortSize::Word => 2,
            PortSize::Long => 4,
        }
    }
}

/// A command that may be given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IncomingCommand {
    /// Negotiation, which changes nothing.
    Capabilities,
    /// One that only tells something.
    Query(&'static str),
    /// The guest is not to run by itself.
    Stop,
    /// The guest runs.
    Cont,
    /// The QEMU ends.
    Quit,
    /// Reads one of the ports of configuration space.
    ReadPort {
        /// Which.
        port: u16,
        /// How much of it.
        size: PortSize,
    },
    /// Writes one.
    WritePort {
        /// Which.
        port: u16,
        /// How much of it.
        size: PortSize,
        /// What.
        value: u32,
    },
}

/// A command with its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IncomingRequest {
    /// What the answer has, too.
    pub id: Option<u64>,
    /// What is asked.
    pub command: IncomingCommand,
}

/// A line that is none of these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotIncoming {
    /// Its number, as far as it has one.
    pub id: Option<u64>,
    /// What it is, as it may be shown.
    pub what: String,
}

impl IncomingRequest {
    /// Reads a line.
    ///
    /// # Errors
    /// It is none of the commands that may be given, in any other spelling, or has anything else in it.
    pub fn parse(line: &[u8]) -> Result<IncomingRequest, NotIncoming> {
        let unreadable = || NotIncoming { id: None, what: "what is no command of QMP".to_owned() };
        if line.len() > LONGEST_LINE {
            return Err(unreadable());
        }
        let value: Value = serde_json::from_slice(line).map_err(|_| unreadable())?;
        let fields = value.as_object().ok_or_else(unreadable)?;
        let id = fields.get("id").and_then(Value::as_u64);
        let name = fields.get("execute").and_then(Value::as_str).unwrap_or_default();
        let refused = |what: &str| NotIncoming { id, what: ioplane_plain::excerpt(&what) };
        let known = ["execute", "arguments", "id"];
        if fields.keys().any(|field| !known.contains(&field.as_str()))
            || (fields.contains_key("id") && id.is_none())
        {
            return Err(refused(name));
        }
        let arguments = fields.get("arguments");
        let none = arguments.is_none_or(|arguments| arguments.as_object().is_some_and(|all| all.is_empty()));
        let command = match name {
            "qmp_capabilities" if none => IncomingCommand::Capabilities,
            "stop" if none => IncomingCommand::Stop,
            "cont" if none => IncomingCommand::Cont,
            "quit" if none => IncomingCommand::Quit,
            "human-monitor-command" => {
                let all = arguments.and_then(Value::as_object).filter(|all| all.len() == 1);
                let line = all.and_then(|all| all.get("command-line")?.as_str()).unwrap_or_default();
                access(line).ok_or_else(|| refused(line))?
            }
            name => match QUERIES.into_iter().find(|query| none && *query == name) {
                Some(query) => IncomingCommand::Query(query),
                None => return Err(refused(name)),
            },
        };
        Ok(IncomingRequest { id, command })
    }
}

/// An access of HMP's, in the one spelling that is written here again.
fn access(line: &str) -> Option<IncomingCommand> {
    let (verb, rest) = line.split_once(' ')?;
    let (kind, letter) = verb.split_once('/')?;
    let size = PortSize::ALL.into_iter().find(|size| letter == size.letter().to_string())?;
    let mut words = rest.split(' ').map(|word| u32::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    let port = u16::try_from(words.next()??).ok()?;
    let command = match kind {
        "i" => IncomingCommand::ReadPort { port, size },
        "o" => IncomingCommand::WritePort { port, size, value: words.next()?? },
        _ => return None,
    };
    let within = match port {
        ADDRESS => size == PortSize::Long,
        DATA..0xd00 => (port - DATA).is_multiple_of(size.bytes()),
        _ => false,
    };
    let same = words.next().is_none() && command.line().as_deref() == Some(line);
    (within && same).then_some(command)
}

impl IncomingCommand {
    /// The line of HMP that it is.
    fn line(&self) -> Option<String> {
        match self {
            IncomingCommand::ReadPort { port, size } => Some(format!("i/{} {port:#x}", size.letter())),
            IncomingCommand::WritePort { port, size, value } => {
                Some(format!("o/{} {port:#x} {value:#x}", size.letter()))
            }
            _ => None,
        }
    }

    /// The command and its arguments for QEMU.
    pub fn execute(&self) -> (&'static str, Value) {
        let name = match self {
            IncomingCommand::Capabilities => "qmp_capabilities",
            IncomingCommand::Query(query) => query,
            IncomingCommand::Stop => "stop",
            IncomingCommand::Cont => "cont",
            IncomingCommand::Quit => "quit",
            IncomingCommand::ReadPort { .. } | IncomingCommand::WritePort { .. } => "human-monitor-command",
        };
        let arguments = self.line().map_or(json!({}), |line| json!({ "command-line": line }));
        (name, arguments)
    }

    /// It only tells something, also of a guest that runs.
    pub fn only_tells(&self) -> bool {
        matches!(self, IncomingCommand::Capabilities | IncomingCommand::Query(_))
    }
}

/// What is at the ports, as far as it was written by the same connection: which registers may be written.
#[derive(Debug, Default)]
pub struct IncomingPorts {
    address: Option<u32>,
}

impl IncomingPorts {
    /// Whether this may be done now. What is written to the address port is noted.
    pub fn allow(&mut self, command: &IncomingCommand) -> bool {
        match *command {
            IncomingCommand::WritePort { port: ADDRESS, value, .. } => {
                self.address = Some(value);
                true
            }
            IncomingCommand::WritePort { port, size, .. } => {
                let Some(address) = self.address.filter(|address| address & ENABLE != 0) else {
                    return false;
                };
                let register = (address & 0xfc) as u8 + (port - DATA) as u8;
                match size {
                    PortSize::Byte => false,
                    PortSize::Word => register == COMMAND || register >= HEADER,
                    PortSize::Long => BARS.contains(&register) || register == ROUTES,
                }
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<IncomingCommand, String> {
        IncomingRequest::parse(line.as_bytes()).map(|request| request.command).map_err(|refused| refused.what)
    }

    fn human(line: &str) -> Result<IncomingCommand, String> {
        let asked =
            json!({ "execute": "human-monitor-command", "arguments": { "command-line": line }, "id": 7 });
        parse(&asked.to_string())
    }

    #[test]
    fn what_a_move_says_is_made_anew() {
        for name in QUERIES.into_iter().chain(["qmp_capabilities", "stop", "cont", "quit"]) {
            let line = json!({ "execute": name, "arguments": {}, "id": 3 }).to_string();
            let request = IncomingRequest::parse(line.as_bytes()).unwrap();
            assert_eq!((request.id, request.command.execute()), (Some(3), (name, json!({}))));
            assert_eq!(request.command.only_tells(), name.starts_with('q') && name != "quit", "{name}");
        }
        for line in
            ["i/w 0xcf8", "i/b 0xcff", "i/h 0xcfe", "i/w 0xcfc", "o/w 0xcf8 0x80010004", "o/h 0xcfc 0x407"]
        {
            let (name, arguments) = human(line).unwrap().execute();
            assert_eq!((name, &arguments["command-line"]), ("human-monitor-command", &json!(line)));
        }
    }

    #[test]
    fn everything_else_is_refused() {
        for line in [
            "",
            "[]",
            "{",
            "{}",
            r#"{"execute": "migrate-incoming", "arguments": {"uri": "exec:touch /tmp/x"}}"#,
            r#"{"execute": "blockdev-add", "arguments": {"driver": "file", "filename": "/etc/shadow", "node-name": "x"}}"#,
            r#"{"execute": "blockdev-del", "arguments": {"node-name": "disk0"}}"#,
            r#"{"execute": "xen-save-devices-state"}"#,
            r#"{"execute": "pmemsave", "arguments": {"val": 0, "size": 1, "filename": "/x"}}"#,
            r#"{"execute": "qom-get", "arguments": {"path": "/", "property": "type"}}"#,
            r#"{"execute": "device_del", "arguments": {"id": "x"}}"#,
            r#"{"execute": "quit", "arguments": {"x": 1}}"#,
            r#"{"execute": "quit", "arguments": []}"#,
            r#"{"execute": "quit", "control": true}"#,
            r#"{"execute": "quit", "id": "a"}"#,
            r#"{"execute": "quit", "id": -1}"#,
            r#"{"exec-oob": "migrate-pause"}"#,
            r#"{"execute": "quit"}{"execute": "quit"}"#,
            r#"{"execute": ["quit"]}"#,
            r#"{"execute": "human-monitor-command"}"#,
            r#"{"execute": "human-monitor-command", "arguments": {"command-line": "i/w 0xcf8", "cpu-index": 0}}"#,
            r#"{"execute": "human-monitor-command", "arguments": {"command-line": 7}}"#,
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        for line in [
            "",
            "quit",
            "i/w",
            "i/w 0xcf9",
            "i/w 0xcf4",
            "i/h 0xcf8",
            "i/w 0xcfd",
            "i/h 0xcff",
            "i/w 0xd00",
            "i/b 0x70",
            "o/w 0xcf8",
            "o/b 0x64 0xfe",
            "o/w 0xb2 0x1",
            "i/w 0xCF8",
            "i/w 0x0cf8",
            "i /w 0xcf8",
            "i/w  0xcf8",
            "i/w 0xcf8 ",
            "i/w 3320",
            "i/w 0xcf8 0x1",
            "o/w 0xcf8 0x1 0x2",
            "o/w 0xcf8 0x1\nquit",
            "o/w 0xcf8 0x1;quit",
            "o/w 0xcf8 $rip",
            "o/w 0xcf8 0x100000000",
            "o/w 0xcf8 -1",
            "xp /4xw 0xfee00000",
            "i/wx 0xcf8",
            "i/g 0xcf8",
            "migrate -d exec:id",
        ] {
            assert!(human(line).is_err(), "{line:?}");
        }
        assert!(parse(&" ".repeat(LONGEST_LINE + 1)).is_err());
        let shown = parse("{\"execute\": \"\\u001b[2J\"}").unwrap_err();
        assert!(!shown.chars().any(char::is_control), "{shown:?}");
    }

    #[test]
    fn only_registers_that_a_move_writes_are_written() {
        let mut ports = IncomingPorts::default();
        let mut may = |line: &str| ports.allow(&human(line).unwrap());
        assert!(may("i/w 0xcfc") && !may("o/h 0xcfc 0x7"), "nobody knows where the ports point");
        assert!(
            may("o/w 0xcf8 0x80010004")
                && may("o/h 0xcfc 0x7")
                && !may("o/w 0xcfc 0x7")
                && !may("o/b 0xcfc 0x7")
        );
        // The status register, of which ones clear bits.
        assert!(!may("o/h 0xcfe 0xffff"));
        for (register, long, word) in [
            (0x10, true, false),
            (0x24, true, false),
            (0x28, false, false),
            (0x3c, false, false),
            (0x60, true, true),
        ] {
            assert!(may(&format!("o/w 0xcf8 {:#x}", ENABLE | register)));
            assert_eq!(may("o/w 0xcfc 0x1"), long, "{register:#x}");
            assert_eq!(may("o/h 0xcfc 0x1"), word, "{register:#x}");
        }
        // What the guest had there before.
        assert!(may("o/w 0xcf8 0x1234") && !may("o/h 0xcfc 0x7"));
    }
}
