//! QEMU's guest agent, over the socket of a virtio serial port.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::answer;
use crate::error::{QemuError, Result};
use crate::socket::{Endpoint, Lines};

/// A line that it sends is not longer than what a program may print, in Base64, and this.
const ANSWER: usize = 1 << 20;
/// Where the agent itself cuts what a program has printed.
const PRINTED: u64 = 16 << 20;
/// What no JSON has: it ends whatever somebody else has left in the line.
const MARK: u8 = 0xff;

/// A connection to the agent in a guest. What comes from there the guest has written. Errors do not say which agent it is; the caller knows.
#[derive(Debug)]
pub struct GuestAgent {
    lines: Lines,
}

impl GuestAgent {
    /// Connects, and finds the beginning of a line in both directions. An agent that runs answers at once, so `patience` may be short. A
    /// program that it runs may print up to `printed` bytes.
    pub fn connect(to: &Endpoint, patience: Duration, printed: u64) -> Result<GuestAgent> {
        let end = Instant::now() + patience;
        let longest = ANSWER + printed.min(PRINTED) as usize / 3 * 4;
        let mut agent = GuestAgent { lines: Lines::connect(to, longest, end).map_err(QemuError::Peer)? };
        agent.synchronize().map_err(explain)?;
        Ok(agent)
    }

    /// What is asked from now on must be answered until then.
    pub fn until(&mut self, end: Instant) {
        self.lines.until(end);
    }

    fn synchronize(&mut self) -> Result<()> {
        let number = u64::from(std::process::id());
        self.lines.send(&[MARK]).map_err(QemuError::Peer)?;
        answer::send(&mut self.lines, "guest-sync-delimited", &json!({ "id": number }), None)?;
        loop {
            let line = self.lines.line().map_err(QemuError::Peer)?;
            let last = line.rsplit(|byte| *byte == MARK).next().unwrap_or_default();
            let ours = serde_json::from_slice::<Value>(last).is_ok_and(|value| value["return"] == number);
            if ours && line.contains(&MARK) {
                return Ok(());
            }
        }
    }

    /// Runs a command; what it returns.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let answer = answer::send(&mut self.lines, command, arguments, None)
            .and_then(|()| answer::receive(&mut self.lines));
        answer.and_then(|answer| answer::outcome(command, answer)).map_err(explain)
    }
}

/// What may be done about it.
fn explain(error: QemuError) -> QemuError {
    match error {
        QemuError::Peer(late) if late.kind() == ErrorKind::TimedOut => {
            let what = "it does not answer; is qemu-guest-agent running in the guest?";
            QemuError::Peer(io::Error::new(ErrorKind::TimedOut, what))
        }
        QemuError::Refused { command, why } => {
            QemuError::Refused { command, why: format!("{why}; see its --allow-rpcs and --block-rpcs") }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn one_that_is_not_there_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let begun = Instant::now();
        let error = GuestAgent::connect(&Endpoint::here(&path), Duration::from_millis(100), 0).unwrap_err();
        assert!(error.to_string().contains("is qemu-guest-agent running"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(5));
        // What was left of another's talk, without the mark, is no answer.
        std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                // What is not read when it closes would be an error of another sort.
                let _ = BufReader::new(&stream).read_until(b'\n', &mut Vec::new());
                let line = format!("{{\"return\": {}}}\n", std::process::id());
                let _ = stream.write_all(line.as_bytes());
            }
        });
        let error = GuestAgent::connect(&Endpoint::here(&path), Duration::from_secs(5), 0).unwrap_err();
        assert!(error.to_string().contains("closed the connection"), "{error}");
    }
}
