//! A command on a terminal, by `script` (package bsdutils, which every Debian has).

use std::ffi::OsString;
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{BINARY, LIMIT, TestDaemon};

/// A command whose terminal is this test.
pub struct Terminal {
    script: Child,
    keyboard: ChildStdin,
    shown: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Terminal {
    /// Runs `ioplane` with these words, which no shell need quote, for `daemon`.
    pub fn start(daemon: &TestDaemon, words: &[&str]) -> Terminal {
        let socket = daemon.path("control.sock");
        let (socket, words) = (socket.display(), words.join(" "));
        // A pipe has no width.
        let line = format!("stty cols 100 rows 30; exec {BINARY} --socket {socket} {words}");
        let mut script = Command::new("script")
            .args(["--quiet", "--flush", "--return", "--command"])
            .args([OsString::from(line), "/dev/null".into()])
            .env("TERM", "xterm")
            .env_remove("NO_COLOR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script, of the package bsdutils");
        let (keyboard, mut screen) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
        let shown = Arc::<Mutex<Vec<u8>>>::default();
        let kept = shown.clone();
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(bytes @ 1..) = screen.read(&mut buffer) {
                kept.lock().unwrap().extend(&buffer[..bytes]);
            }
        });
        Terminal { script, keyboard, shown, reader }
    }

    /// All that it was sent, control sequences included.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    pub fn until(&self, text: &str) {
        let end = Instant::now() + LIMIT;
        while !self.shown().contains(text) {
            assert!(Instant::now() < end, "it never shows {text:?}: {:?}", self.shown());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// As a key is pressed.
    pub fn press(&mut self, key: u8) {
        self.keyboard.write_all(&[key]).unwrap();
    }

    /// Waits for its end: the status, and all that was shown.
    pub fn end(self) -> (i32, String) {
        let Terminal { mut script, keyboard, shown, reader } = self;
        let status = script.wait().unwrap();
        drop(keyboard);
        reader.join().unwrap();
        let shown = String::from_utf8_lossy(&shown.lock().unwrap()).into_owned();
        (status.code().unwrap_or(-1), shown)
    }

    /// The window is closed under it.
    pub fn close(mut self) {
        self.script.kill().unwrap();
        self.script.wait().unwrap();
    }
}
