//! QMP, the protocol of QEMU's monitor: commands, and events that come in between.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::answer;
use crate::error::{QemuError, Result};
use crate::socket::{Endpoint, Lines};

/// An answer is not longer.
const ANSWER: usize = 1 << 22;
/// So many events wait for somebody who asks for them; then the oldest go.
const EVENTS: usize = 1000;

/// A connection to a QEMU's monitor, which serves one client at a time: whoever has it, keeps it. Errors do not say which monitor it is; the caller
/// knows.
#[derive(Debug)]
pub struct Qmp {
    lines: Lines,
    patience: Duration,
    /// The number of the last command.
    last: u64,
    events: VecDeque<Value>,
    /// It takes commands while another one is under way.
    out_of_band: bool,
}

impl Qmp {
    /// Connects, and leaves negotiation. Each step, and each command afterwards, may take `patience`.
    pub fn connect(to: &Endpoint, patience: Duration) -> Result<Qmp> {
        Self::negotiate(to, patience, false)
    }

    /// The same, with out-of-band commands where QEMU offers them (docs/interop/qmp-spec): see [`Qmp::cut_migration`].
    pub fn connect_out_of_band(to: &Endpoint, patience: Duration) -> Result<Qmp> {
        Self::negotiate(to, patience, true)
    }

    fn negotiate(to: &Endpoint, patience: Duration, out_of_band: bool) -> Result<Qmp> {
        let lines = Lines::connect(to, ANSWER, Instant::now() + patience).map_err(QemuError::Peer)?;
        let mut qmp = Qmp { lines, patience, last: 0, events: VecDeque::new(), out_of_band: false };
        let greeting = answer::receive(&mut qmp.lines)?;
        let Some(greeting) = greeting.get("QMP") else {
            return Err(QemuError::Peer(io::Error::other("it does not greet like QMP")));
        };
        let offers =
            greeting["capabilities"].as_array().is_some_and(|all| all.iter().any(|one| one == "oob"));
        qmp.out_of_band = out_of_band && offers;
        let wanted = if qmp.out_of_band { json!({ "enable": ["oob"] }) } else { json!({}) };
        qmp.execute("qmp_capabilities", &wanted)?;
        Ok(qmp)
    }

    /// Which process has made the socket that was connected to.
    pub fn process(&self) -> io::Result<u32> {
        self.lines.process()
    }

    /// From now on each command may take this long.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Runs a command to its end; what it returns.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        self.lines.until(Instant::now() + self.patience);
        self.last += 1;
        answer::send(&mut self.lines, command, arguments, Some(self.last))?;
        self.answer(command)
    }

    /// Cuts the connection of the migration that is under way, which fails it (`yank`, QEMU 6.0), also while QEMU answers nothing else: it waits for the
    /// other end to read, with all of its locks held. `Ok` also if there is no such connection.
    pub fn cut_migration(&mut self) -> Result<()> {
        if !self.out_of_band {
            return Err(QemuError::Peer(io::Error::other("it takes no commands out of band")));
        }
        self.lines.until(Instant::now() + self.patience);
        self.last += 1;
        let instances = json!({ "instances": [{ "type": "migration" }] });
        let request = json!({ "exec-oob": "yank", "arguments": instances, "id": self.last });
        answer::send_object(&mut self.lines, &request)?;
        match self.answer("yank") {
            Err(QemuError::Refused { why, .. }) if why.contains("not found") => Ok(()),
            done => done.map(drop),
        }
    }

    /// The answer to the last command.
    fn answer(&mut self, command: &str) -> Result<Value> {
        loop {
            let answer = answer::receive(&mut self.lines)?;
            // The answer to a command whose time was over is not this one's.
            let others = answer.get("id").is_some_and(|id| *id != self.last);
            if answer.get("event").is_some() {
                self.keep(answer);
            } else if !others {
                return answer::outcome(command, answer);
            }
        }
    }

    /// Waits for an event of that name whose `data` are `wanted`; those that came before and were not asked for count too. Its data.
    pub fn event(&mut self, name: &str, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        self.lines.until(Instant::now() + limit);
        let mut looked = 0;
        loop {
            let hit = |event: &Value| event["event"] == name && wanted(&event["data"]);
            if let Some(at) = self.events.iter().skip(looked).position(hit) {
                let event = self.events.remove(looked + at).unwrap_or_default();
                return Ok(event["data"].clone());
            }
            let next = answer::receive(&mut self.lines)?;
            if next.get("event").is_some() {
                self.keep(next);
            }
            looked = self.events.len().saturating_sub(1);
        }
    }

    fn keep(&mut self, event: Value) {
        if self.events.len() >= EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::test_monitor::serve;

    const PATIENCE: Duration = Duration::from_secs(2);

    const OK: &[u8] = b"{\"return\": {}}\n";

    #[test]
    fn commands_have_their_own_answers_and_events_are_kept() {
        let (_folder, path) = serve(
            "qmp",
            vec![
                [b"{\"event\": \"STOP\", \"data\": {\"n\": 1}}\n", OK].concat(),
                // Of a command whose time was over; an event; the answer.
                b"{\"return\": 1, \"id\": 1}\n{\"event\": \"GONE\", \"data\": {\"device\": \"a\"}}\n\
                  {\"return\": 2, \"id\": 2}\n{\"event\": \"GONE\", \"data\": {\"device\": \"b\"}}\n"
                    .to_vec(),
                b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\\u001b[2J\"}, \"id\": 3}\n"
                    .to_vec(),
            ],
        );
        let mut qmp = Qmp::connect(&Endpoint::here(&path), PATIENCE).unwrap();
        assert_eq!(qmp.execute("query-x", &json!({})).unwrap(), 2);
        assert_eq!(
            qmp.event("GONE", PATIENCE, |data| data["device"] == "b").unwrap(),
            json!({"device": "b"})
        );
        assert_eq!(qmp.event("STOP", PATIENCE, |_| true).unwrap(), json!({"n": 1}));
        let refused = qmp.execute("device_del", &json!({"id": "a"})).unwrap_err();
        assert_eq!(refused.to_string(), "it refuses device_del: no?[2J");
        let late = qmp.event("GONE", PATIENCE / 40, |data| data["device"] == "c").unwrap_err();
        assert!(late.to_string().contains("does not answer"), "{late}");
        assert_eq!(qmp.event("GONE", PATIENCE, |_| true).unwrap(), json!({"device": "a"}));
    }

    /// A QEMU that answers nothing in band takes `yank`; one that does not offer that is not asked.
    #[test]
    fn a_migration_is_cut_while_a_command_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = std::thread::spawn(move || {
            let mut heard = Vec::new();
            for greeting in
                ["{\"QMP\": {\"capabilities\": [\"oob\"]}}\n", "{\"QMP\": {\"capabilities\": []}}\n"]
            {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(greeting.as_bytes()).unwrap();
                for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                    let request: Value = serde_json::from_str(&line.unwrap()).unwrap();
                    let answer = json!({ "return": {}, "id": request["id"] });
                    if request["execute"] != "query-status" {
                        stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
                    }
                    heard.push(request);
                }
            }
            heard
        });
        let mut qmp = Qmp::connect_out_of_band(&Endpoint::here(&path), PATIENCE).unwrap();
        qmp.set_patience(PATIENCE / 40);
        assert!(qmp.execute("query-status", &json!({})).is_err());
        qmp.cut_migration().unwrap();
        drop(qmp);
        let mut without = Qmp::connect_out_of_band(&Endpoint::here(&path), PATIENCE).unwrap();
        let refused = without.cut_migration().unwrap_err().to_string();
        assert!(refused.contains("out of band"), "{refused}");
        drop(without);
        let heard = qemu.join().unwrap();
        assert_eq!(heard[0]["arguments"], json!({ "enable": ["oob"] }));
        assert_eq!(heard[2]["exec-oob"], "yank");
        assert_eq!(heard[2]["arguments"], json!({ "instances": [{ "type": "migration" }] }));
        assert_eq!((&heard[3]["arguments"], heard.len()), (&json!({}), 4));
    }

    #[test]
    fn events_are_bounded_and_the_newest_stay() {
        let many: String =
            (0..EVENTS + 5).map(|n| format!("{{\"event\": \"E\", \"data\": {n}}}\n")).collect();
        let (_folder, path) = serve("qmp", vec![OK.to_vec(), [many.as_bytes(), OK].concat()]);
        let mut qmp = Qmp::connect(&Endpoint::here(&path), PATIENCE).unwrap();
        qmp.execute("query-x", &json!({})).unwrap();
        assert_eq!(qmp.events.len(), EVENTS);
        assert_eq!(qmp.event("E", PATIENCE, |_| true).unwrap(), 5);
    }

    #[test]
    fn what_is_no_monitor_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("other");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || listener.accept().unwrap().0.write_all(b"{\"a\": 1}\nx\n"));
        let error = Qmp::connect(&Endpoint::here(&path), PATIENCE).unwrap_err().to_string();
        assert!(error.contains("does not greet like QMP"), "{error}");
    }

    /// Somebody else has the monitor: its queue is full, and nobody is served.
    #[test]
    fn a_monitor_that_is_held_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let begun = Instant::now();
        for _ in 0..4 {
            let error = Qmp::connect(&Endpoint::here(&path), PATIENCE / 20).unwrap_err().to_string();
            assert!(error.contains("somebody else may be using it"), "{error}");
        }
        assert!(begun.elapsed() < 2 * PATIENCE, "{:?}", begun.elapsed());
    }
}
