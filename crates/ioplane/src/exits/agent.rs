//! QEMU's guest agent: one JSON object a line, over the socket of a virtio serial port. `guest-exec` runs the script.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use ioplane_exits::{Chardev, Endpoint, Lines, excerpt, part, plain, values};
use serde_json::{Value, json};

use super::reach::{Done, PATIENCE};

/// What is said when the end of a script is not seen.
pub(super) const STARTED: &str = "the script was started, and may still change the guest";
/// An answer is not longer: the agent itself cuts output at 16 MiB.
const ANSWER: usize = 1 << 20;
/// One that runs answers at once; one that does not run never does.
const GREETING: Duration = Duration::from_secs(10);
/// How often the agent is asked whether the script has ended: it does not tell by itself.
const PERIOD: Duration = Duration::from_millis(100);

/// The agent's port in QEMU.
const PORT: &str = "org.qemu.guest_agent.0";

/// The socket of QEMU's command line: a port of that name, its chardev.
pub(super) fn socket(command: &[String]) -> Option<Chardev> {
    let port = values(command, "-device").find(|device| part(device, "name").as_deref() == Some(PORT))?;
    Chardev::find(command, &part(port, "chardev")?)
}

/// Runs a POSIX script.
pub(super) fn run(socket: &Endpoint, script: &str, words: [&str; 2]) -> Result<Done> {
    // It may be of another's command line.
    let said = plain(&format!("the guest agent at {socket}"));
    let lines = Lines::connect(socket, ANSWER, Instant::now() + GREETING);
    let mut agent = Agent { lines: lines.with_context(|| format!("reach {said}"))? };
    agent.greet().with_context(|| said.clone())?;
    let arguments = json!({
        "path": "/bin/sh",
        "arg": ["-s", "--", words[0], words[1]],
        "input-data": BASE64.encode(script),
        "capture-output": true,
    });
    let end = Instant::now() + PATIENCE;
    // So that it is the script that is late, and not the agent.
    agent.lines.until(end + GREETING);
    let started = agent.ask("guest-exec", &arguments).with_context(|| said.clone())?;
    let pid =
        started["pid"].as_i64().with_context(|| format!("{said} says no pid: {}", excerpt(&started)))?;
    loop {
        let state = agent
            .ask("guest-exec-status", &json!({"pid": pid}))
            .with_context(|| format!("{said}: {STARTED}"))?;
        if state["exited"] == true {
            let text = |key: &str| {
                let bytes = BASE64.decode(state[key].as_str().unwrap_or_default()).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            let status = state["exitcode"].as_i64().unwrap_or(-1);
            return Ok(Done { status, said: text("out-data"), error: text("err-data") });
        }
        let seconds = PATIENCE.as_secs();
        ensure!(Instant::now() < end, "{said}: not at its end within {seconds} s; {STARTED}");
        std::thread::sleep(PERIOD);
    }
}

struct Agent {
    lines: Lines,
}

impl Agent {
    /// Whatever somebody else has left in the line ends with a byte that no JSON has, then comes our number.
    fn greet(&mut self) -> Result<()> {
        let number = u64::from(std::process::id());
        let line = json!({"execute": "guest-sync-delimited", "arguments": {"id": number}});
        self.lines.send(b"\xff")?;
        self.lines.send(format!("{line}\n").as_bytes())?;
        loop {
            let line = self.line()?;
            let last = line.rsplit(|byte| *byte == 0xff).next().unwrap_or_default();
            let ours = serde_json::from_slice::<Value>(last).is_ok_and(|value| value["return"] == number);
            if ours && line.contains(&0xff) {
                return Ok(());
            }
        }
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let line = json!({"execute": command, "arguments": arguments});
        self.lines.send(format!("{line}\n").as_bytes())?;
        let line = self.line()?;
        let mut answer: Value = serde_json::from_slice(&line).context("it does not answer with JSON")?;
        if let Some(error) = answer.get("error") {
            let why = excerpt(&error["desc"].as_str().unwrap_or_default());
            bail!("it refuses {command}: {why}; see its --allow-rpcs and --block-rpcs");
        }
        Ok(answer["return"].take())
    }

    fn line(&mut self) -> io::Result<Vec<u8>> {
        self.lines.line().map_err(|error| match error.kind() {
            ErrorKind::TimedOut => {
                io::Error::other("it does not answer; is qemu-guest-agent running in the guest?")
            }
            _ => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_socket_is_found() {
        let words = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
        let line = "qemu -chardev socket,id=qga,path=/run/a,server=on \
                    -device virtserialport,chardev=qga,name=org.qemu.guest_agent.0";
        assert_eq!(socket(&words(line)), Some(Chardev::Path("/run/a".into())));
        let libvirt = "qemu -chardev socket,id=qga,fd=31,server=on \
                       -device {\"driver\":\"virtserialport\",\"chardev\":\"qga\",\"name\":\"org.qemu.guest_agent.0\"}";
        assert_eq!(socket(&words(libvirt)), Some(Chardev::Inherited));
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
        let done = run(&Endpoint::here(&path), "true", ["apply", "console"]).unwrap();
        assert_eq!((done.status, done.said.as_str(), done.error.as_str()), (3, "foo", "f"));
    }

    #[test]
    fn what_is_refused_is_said() {
        // An answer without the mark is somebody else's.
        let (_folder, path) = agent(vec![greeting(&[])]);
        let error = format!("{:#}", run(&Endpoint::here(&path), "true", ["a", "b"]).unwrap_err());
        assert!(error.contains("closed the connection"), "{error}");
        let refused =
            b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"guest-exec is disabled\"}}\n";
        let (_folder, path) = agent(vec![greeting(&[0xff]), refused.into()]);
        let error = format!("{:#}", run(&Endpoint::here(&path), "true", ["a", "b"]).unwrap_err());
        assert!(error.contains("guest-exec is disabled") && error.contains("--block-rpcs"), "{error}");
        // What the guest answers is cut, and a terminal does not obey it.
        let strange = format!("{{\"return\": \"{}\"}}\n", "\u{9b}2J".repeat(10_000));
        let (_folder, path) = agent(vec![greeting(&[0xff]), strange.into_bytes()]);
        let error = format!("{:#}", run(&Endpoint::here(&path), "true", ["a", "b"]).unwrap_err());
        assert!(error.contains("says no pid") && error.len() < 600, "{error}");
        assert!(!error.chars().any(char::is_control), "{error:?}");
        let error = format!("{:#}", run(&Endpoint::here("/nowhere"), "true", ["a", "b"]).unwrap_err());
        assert!(error.contains("reach the guest agent at /nowhere"), "{error}");
    }
}
