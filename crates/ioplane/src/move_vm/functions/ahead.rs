//! What the guest's driver says by a function's mailbox goes ahead of it while memory is copied (docs/decisions/0077-a-function-in-steps.md): the stop then says the
//! difference. By a thread of its own, since a function there is reset for it: neither the migration nor whoever keeps vCPUs waits. What fails here costs the move nothing.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;
use ioplane_api::report::{AheadFunctionReport, DoneReport, SaidFunctionV1};
use ioplane_cli::client::{Client, Method};
use ioplane_cli::output::hint;

use super::way_back::LAST_WORD;
use super::{Functions, Moving, STEP};

/// Between two looks whether the guest has said something else.
const PACE: Duration = Duration::from_millis(500);
/// For an answer. The guest stands still while the last one is waited for.
const PATIENCE: Duration = Duration::from_millis(STEP);
/// How often a function there is told anew. A guest that says something else all the time gets the stop that it had without.
const MOST: u32 = 16;

/// A function whose guest talks by a mailbox.
struct Talking {
    name: String,
    path: String,
    /// What was said there.
    last: Option<SaidFunctionV1>,
    times: u32,
}

/// Tells the functions there, until it is dropped.
pub(super) struct Telling {
    /// Dropped, it ends.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<Vec<String>>>,
}

impl Drop for Telling {
    fn drop(&mut self) {
        drop(self.end.take());
        for trouble in self.thread.take().and_then(|thread| thread.join().ok()).into_iter().flatten() {
            hint(trouble);
        }
    }
}

impl Talking {
    fn of(one: &Moving) -> Option<Talking> {
        let talks = one.direct && !one.cooperates;
        talks.then(|| Talking { name: one.name.clone(), path: one.path("ahead"), last: None, times: 0 })
    }

    /// Tells the one there what this one's guest has said, if that is something else and nobody waits for the end. Says whether it is to be asked again.
    fn tell(&mut self, here: &Client, there: &Client, is_over: impl Fn() -> bool) -> Result<bool> {
        if is_over() {
            return Ok(false);
        }
        let said: SaidFunctionV1 = here.get(&self.path)?;
        if self.last.as_ref() == Some(&said) || is_over() {
            return Ok(true);
        }
        let _: AheadFunctionReport = there.ask(Method::PUT, &self.path, Some(&said))?;
        self.last = Some(said);
        self.times += 1;
        Ok(self.times < MOST)
    }
}

fn run(sockets: [PathBuf; 2], mut all: Vec<Talking>, end: &Receiver<()>) -> Vec<String> {
    let mut troubles = Vec::new();
    let client =
        |socket: &PathBuf| Client::new(socket).map(|client| client.with_patience(PATIENCE).keeping());
    let [Ok(here), Ok(there)] = sockets.each_ref().map(client) else { return troubles };
    while !all.is_empty() {
        let is_over = || end.try_recv() == Err(TryRecvError::Disconnected);
        all.retain_mut(|one| match one.tell(&here, &there, is_over) {
            Ok(more) => more,
            Err(error) => {
                let why = "what its guest has said does not go ahead of it, and is said while the guest stands still";
                troubles.push(format!("PCI function {}: {why}: {error:#}", one.name));
                false
            }
        });
        if end.recv_timeout(PACE) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    troubles
}

impl Functions<'_> {
    /// Has what the guest says go ahead from here on.
    pub(super) fn tell_ahead(&mut self) {
        let all: Vec<Talking> = self.all.iter().filter_map(Talking::of).collect();
        if all.is_empty() {
            return;
        }
        let sockets = [self.here, self.there].map(|client| client.socket().to_owned());
        let (end, ended) = channel();
        let thread =
            std::thread::Builder::new().name("ahead".into()).spawn(move || run(sockets, all, &ended));
        self.went_ahead = true;
        self.telling = thread.ok().map(|thread| Telling { end: Some(end), thread: Some(thread) });
    }

    /// The guest does not come: functions there leave its groups. A host that is not reached, or whose QEMU has ended, has reset them.
    pub(super) fn forget_ahead(&mut self) {
        self.telling = None;
        if !std::mem::take(&mut self.went_ahead) {
            return;
        }
        let Ok(there) = Client::new(self.there.socket()).map(|there| there.with_patience(LAST_WORD)) else {
            return;
        };
        for talking in self.all.iter().filter_map(Talking::of) {
            let _ = there.ask::<DoneReport>(Method::DELETE, &talking.path, None::<&()>);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    /// A daemon of one answer for each request, which also tells of it: the method, and the body.
    fn daemon(
        socket: &Path,
        mut answer: impl FnMut(&str) -> (u16, Value) + Send + 'static,
    ) -> Receiver<(String, Value)> {
        let listener = UnixListener::bind(socket).unwrap();
        let (tell, told) = channel();
        std::thread::spawn(move || {
            let mut serve = |stream: UnixStream| -> Option<()> {
                let mut reader = BufReader::new(stream.try_clone().ok()?);
                loop {
                    let (mut method, mut length) = (String::new(), 0);
                    loop {
                        let mut line = String::new();
                        (reader.read_line(&mut line).ok()? > 0).then_some(())?;
                        let line = line.trim_end().to_ascii_lowercase();
                        match line.strip_prefix("content-length: ") {
                            Some(bytes) => length = bytes.parse().ok()?,
                            None if method.is_empty() => method = line.split(' ').next()?.to_owned(),
                            None if line.is_empty() => break,
                            None => {}
                        }
                    }
                    let mut body = vec![0; length];
                    reader.read_exact(&mut body).ok()?;
                    let (status, said) = answer(&method);
                    let said = said.to_string();
                    let head = format!(
                        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                        said.len()
                    );
                    (&stream).write_all((head + &said).as_bytes()).ok()?;
                    tell.send((method, serde_json::from_slice(&body).unwrap_or_default())).ok()?;
                }
            };
            for stream in listener.incoming().flatten() {
                let _ = serve(stream);
            }
        });
        told
    }

    fn said(words: &str) -> Value {
        json!({ "format": SaidFunctionV1::FORMAT, "version": 1, "said": words })
    }

    fn talking() -> Talking {
        Talking { name: "nic0".into(), path: "/v1/pci/nic0/ahead".into(), last: None, times: 0 }
    }

    #[test]
    fn whoever_is_there_is_told_when_the_guest_has_said_something_else_and_only_then() {
        let directory = tempfile::tempdir().unwrap();
        let sockets = ["here", "there"].map(|name| directory.path().join(name));
        let mut asked = 0;
        let _here = daemon(&sockets[0], move |_| {
            asked += 1;
            (200, said(if asked < 3 { "AA==" } else { "AQ==" }))
        });
        let there =
            daemon(&sockets[1], |_| (200, json!({ "name": "nic0", "messages_ahead": 4, "took_us": 1 })));
        let (end, ended) = channel();
        let telling = std::thread::spawn(move || run(sockets, vec![talking()], &ended));
        assert_eq!(there.recv().unwrap(), ("put".into(), said("AA==")));
        assert_eq!(there.recv().unwrap(), ("put".into(), said("AQ==")), "the second look is the same");
        drop(end);
        assert_eq!(telling.join().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_daemon_that_does_not_know_it_is_asked_once_and_that_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let sockets = ["here", "there"].map(|name| directory.path().join(name));
        let _here = daemon(&sockets[0], |_| (200, said("AA==")));
        let _there = daemon(&sockets[1], |_| (404, json!({ "error": "there is no such resource" })));
        let (_end, ended) = channel();
        // It ends by itself: nobody else is to be told.
        let troubles = run(sockets, vec![talking()], &ended);
        let [trouble] = &troubles[..] else { panic!("{troubles:?}") };
        assert!(
            trouble.starts_with("PCI function nic0: what its guest has said does not go ahead"),
            "{trouble}"
        );
        // Nor is anybody where no host is reached at all.
        let nowhere = ["here", "there"].map(|_| directory.path().join("none"));
        assert_eq!(run(nowhere, vec![talking()], &ended).len(), 1);
    }
}
