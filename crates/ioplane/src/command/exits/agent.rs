//! QEMU's guest agent: one JSON object a line, over the socket of a virtio serial port. `guest-exec` runs the script.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use serde_json::{Value, json};

use super::reach::{Done, PATIENCE};

/// An answer is not longer: the agent itself cuts output at 16 MiB.
const ANSWER: usize = 1 << 20;
/// One that runs answers at once; one that does not run never does.
const GREETING: Duration = Duration::from_secs(10);
/// How often the agent is asked whether the script has ended: it does not tell by itself.
const PERIOD: Duration = Duration::from_millis(100);

/// The socket of QEMU's command line: a port called `org.qemu.guest_agent.0`, its chardev's path.
pub(super) fn socket(command: &[String]) -> Option<PathBuf> {
    let part = |value: &str, key: &str| {
        value.split(',').find_map(|part| part.strip_prefix(key)?.strip_prefix('=').map(String::from))
    };
    let port = command.iter().find(|word| word.contains("name=org.qemu.guest_agent.0"))?;
    let id = part(port, "chardev")?;
    let chardev = command
        .iter()
        .find(|word| word.starts_with("socket,") && part(word, "id").as_deref() == Some(id.as_str()))?;
    part(chardev, "path").map(PathBuf::from)
}

/// Runs a POSIX script.
pub(super) fn run(socket: &Path, script: &str, words: [&str; 2]) -> Result<Done> {
    let said = format!("the guest agent at {}", socket.display());
    let stream = UnixStream::connect(socket).with_context(|| format!("reach {said}"))?;
    let mut agent = Agent { stream, buffer: Vec::new() };
    agent.greet().with_context(|| said.clone())?;
    let arguments = json!({
        "path": "/bin/sh",
        "arg": ["-s", "--", words[0], words[1]],
        "input-data": BASE64.encode(script),
        "capture-output": true,
    });
    let end = Instant::now() + PATIENCE;
    let started = agent.ask("guest-exec", &arguments, end).with_context(|| said.clone())?;
    let pid = started["pid"].as_i64().with_context(|| format!("{said} says no pid: {started:.200}"))?;
    loop {
        let state =
            agent.ask("guest-exec-status", &json!({"pid": pid}), end).with_context(|| said.clone())?;
        if state["exited"] == true {
            let text = |key: &str| {
                let bytes = BASE64.decode(state[key].as_str().unwrap_or_default()).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            let status = state["exitcode"].as_i64().unwrap_or(-1);
            return Ok(Done { status, said: text("out-data"), error: text("err-data") });
        }
        ensure!(Instant::now() < end, "{said}: the script has not ended within {} s", PATIENCE.as_secs());
        std::thread::sleep(PERIOD);
    }
}

struct Agent {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Agent {
    /// Whatever somebody else has left in the line ends with a byte that no JSON has, then comes our number.
    fn greet(&mut self) -> Result<()> {
        let number = u64::from(std::process::id());
        let line = json!({"execute": "guest-sync-delimited", "arguments": {"id": number}});
        self.stream.write_all(b"\xff")?;
        self.stream.write_all(format!("{line}\n").as_bytes())?;
        let end = Instant::now() + GREETING;
        loop {
            let line = self.line(end)?;
            let last = line.rsplit(|byte| *byte == 0xff).next().unwrap_or_default();
            let ours = serde_json::from_slice::<Value>(last).is_ok_and(|value| value["return"] == number);
            if ours && line.contains(&0xff) {
                return Ok(());
            }
        }
    }

    fn ask(&mut self, command: &str, arguments: &Value, end: Instant) -> Result<Value> {
        let line = json!({"execute": command, "arguments": arguments});
        self.stream.write_all(format!("{line}\n").as_bytes())?;
        let line = self.line(end)?;
        let mut answer: Value = serde_json::from_slice(&line).context("it does not answer with JSON")?;
        if let Some(error) = answer.get("error") {
            let why =
                error["desc"].as_str().unwrap_or_default().chars().filter(|c| !c.is_control()).take(200);
            bail!("it refuses {command}: {}; see its --allow-rpcs and --block-rpcs", why.collect::<String>());
        }
        Ok(answer["return"].take())
    }

    fn line(&mut self, end: Instant) -> Result<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(at + 1);
                return Ok(std::mem::replace(&mut self.buffer, rest));
            }
            ensure!(self.buffer.len() < ANSWER, "it talks too much");
            let left = end.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "it does not answer; is qemu-guest-agent running in the guest?");
            self.stream.set_read_timeout(Some(left))?;
            let mut part = [0; 4096];
            match self.stream.read(&mut part) {
                Ok(0) => bail!("it has closed the connection; somebody else may be using it"),
                Ok(length) => self.buffer.extend_from_slice(&part[..length]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_socket_is_found() {
        let words = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
        let line = "qemu -chardev socket,id=qga,path=/run/a,server=on \
                    -device virtserialport,chardev=qga,name=org.qemu.guest_agent.0";
        assert_eq!(socket(&words(line)), Some("/run/a".into()));
        assert_eq!(socket(&words("qemu -m 1")), None);
    }

    /// Answers the lines that come with these, in turn.
    fn agent(answers: Vec<Vec<u8>>) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap());
            for answer in answers {
                let mut line = Vec::new();
                lines.read_until(b'\n', &mut line).unwrap();
                stream.write_all(&answer).unwrap();
            }
        });
        (folder, path)
    }

    fn greeting(mark: &[u8]) -> Vec<u8> {
        let answer = format!("{{\"return\": {}}}\n", std::process::id());
        [b"{\"return\": {}}\nleft over", mark, answer.as_bytes()].concat()
    }

    #[test]
    fn a_script_is_run_and_its_words_come_back() {
        let (_folder, path) = agent(vec![
            greeting(&[0xff]),
            b"{\"return\": {\"pid\": 7}}\n".into(),
            b"{\"return\": {\"exited\": false}}\n".into(),
            b"{\"return\": {\"exited\": true, \"exitcode\": 3, \"out-data\": \"Zm9v\", \"err-data\": \"Zg==\"}}\n".into(),
        ]);
        let done = run(&path, "true", ["apply", "console"]).unwrap();
        assert_eq!((done.status, done.said.as_str(), done.error.as_str()), (3, "foo", "f"));
    }

    #[test]
    fn what_is_refused_is_said() {
        // An answer without the mark is somebody else's.
        let (_folder, path) = agent(vec![greeting(&[])]);
        let error = format!("{:#}", run(&path, "true", ["a", "b"]).unwrap_err());
        assert!(error.contains("closed the connection"), "{error}");
        let refused =
            b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"guest-exec is disabled\"}}\n";
        let (_folder, path) = agent(vec![greeting(&[0xff]), refused.into()]);
        let error = format!("{:#}", run(&path, "true", ["a", "b"]).unwrap_err());
        assert!(error.contains("guest-exec is disabled") && error.contains("--block-rpcs"), "{error}");
        let error = format!("{:#}", run(Path::new("/nowhere"), "true", ["a", "b"]).unwrap_err());
        assert!(error.contains("reach the guest agent at /nowhere"), "{error}");
    }
}
