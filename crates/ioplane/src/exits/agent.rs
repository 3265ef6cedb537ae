//! By QEMU's guest agent: its `guest-exec` runs the script.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use ioplane_plain::{excerpt, plain};
use ioplane_qemu::{Endpoint, GuestAgent};
use serde_json::json;

use super::script::{Done, PATIENCE, STARTED};

/// One that runs answers at once; one that does not run never does.
const GREETING: Duration = Duration::from_secs(10);
/// How often the agent is asked whether the script has ended: it does not tell by itself.
const PERIOD: Duration = Duration::from_millis(100);

/// Runs a POSIX script that says up to so many bytes.
pub(super) fn run(socket: &Endpoint, script: &str, words: [&str; 2], limit: u64) -> Result<Done> {
    // It may be of another's command line.
    let said = plain(&format!("the guest agent at {socket}"));
    let mut agent = GuestAgent::connect(socket, GREETING, limit).with_context(|| format!("reach {said}"))?;
    let arguments = json!({
        "path": "/bin/sh",
        "arg": ["-s", "--", words[0], words[1]],
        "input-data": BASE64.encode(script),
        "capture-output": true,
    });
    let end = Instant::now() + PATIENCE;
    // So that it is the script that is late, and not the agent.
    agent.until(end + GREETING);
    let started = agent.execute("guest-exec", &arguments).with_context(|| said.clone())?;
    let pid =
        started["pid"].as_i64().with_context(|| format!("{said} says no pid: {}", excerpt(&started)))?;
    loop {
        let state = agent
            .execute("guest-exec-status", &json!({"pid": pid}))
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

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;

    const WORDS: u64 = 64 << 10;

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
        let done = run(&Endpoint::here(&path), "true", ["apply", "console"], WORDS).unwrap();
        assert_eq!((done.status, done.said.as_str(), done.error.as_str()), (3, "foo", "f"));
    }

    #[test]
    fn what_is_refused_is_said() {
        // An answer without the mark is somebody else's.
        let (_folder, path) = agent(vec![greeting(&[])]);
        let error = format!("{:#}", run(&Endpoint::here(&path), "true", ["a", "b"], WORDS).unwrap_err());
        assert!(error.contains("closed the connection"), "{error}");
        let refused =
            b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"guest-exec is disabled\"}}\n";
        let (_folder, path) = agent(vec![greeting(&[0xff]), refused.into()]);
        let error = format!("{:#}", run(&Endpoint::here(&path), "true", ["a", "b"], WORDS).unwrap_err());
        assert!(error.contains("guest-exec is disabled") && error.contains("--block-rpcs"), "{error}");
        // What the guest answers is cut, and a terminal does not obey it.
        let strange = format!("{{\"return\": \"{}\"}}\n", "\u{9b}2J".repeat(10_000));
        let (_folder, path) = agent(vec![greeting(&[0xff]), strange.into_bytes()]);
        let error = format!("{:#}", run(&Endpoint::here(&path), "true", ["a", "b"], WORDS).unwrap_err());
        assert!(error.contains("says no pid") && error.len() < 600, "{error}");
        assert!(!error.chars().any(char::is_control), "{error:?}");
        let error = format!("{:#}", run(&Endpoint::here("/nowhere"), "true", ["a", "b"], WORDS).unwrap_err());
        assert!(error.contains("reach the guest agent at /nowhere"), "{error}");
    }
}
