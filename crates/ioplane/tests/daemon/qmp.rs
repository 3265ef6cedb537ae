//! A monitor that a test plays: QMP for one client at a time.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value, json};

/// Serves a monitor at this path, on a thread that ends with the test: `answer` says what a command returns; `{"error": WORDS}` refuses it.
pub fn serve(path: &Path, mut answer: impl FnMut(&str, &Value) -> Value + Send + 'static) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            // Whoever goes in the middle is no news.
            let _ = attend(stream, &mut answer);
        }
    });
}

fn attend(mut stream: UnixStream, answer: &mut impl FnMut(&str, &Value) -> Value) -> std::io::Result<()> {
    stream.write_all(b"{\"QMP\": {}}\n")?;
    for line in BufReader::new(stream.try_clone()?).lines() {
        let asked: Value = serde_json::from_str(&line?).unwrap();
        let command = asked["execute"].as_str().unwrap();
        let answer = match answer(command, &asked["arguments"]) {
            refused if refused["error"].is_string() => {
                json!({ "error": { "desc": refused["error"] }, "id": asked["id"] })
            }
            returned => json!({ "return": returned, "id": asked["id"] }),
        };
        stream.write_all(format!("{answer}\n").as_bytes())?;
    }
    Ok(())
}

/// A VM of which only the run state matters.
#[derive(Clone)]
pub struct RunState(Arc<Mutex<State>>);

struct State {
    status: &'static str,
    asked: Vec<String>,
}

impl RunState {
    /// One that runs, with its monitor at this path.
    pub fn serve(path: &Path) -> RunState {
        let state = RunState(Arc::new(Mutex::new(State { status: "running", asked: Vec::new() })));
        let of_monitor = state.clone();
        serve(path, move |command, _| {
            let mut state = of_monitor.lock();
            state.asked.push(command.to_owned());
            match command {
                "stop" => state.status = "paused",
                "cont" => state.status = "running",
                "query-status" => return json!({ "status": state.status }),
                _ => {}
            }
            json!({})
        });
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub fn is(&self, status: &str) -> bool {
        self.lock().status == status
    }

    /// What a person does by another monitor.
    pub fn set(&self, status: &'static str) {
        self.lock().status = status;
    }

    /// How often it was asked to do that.
    pub fn asked(&self, command: &str) -> usize {
        self.lock().asked.iter().filter(|asked| *asked == command).count()
    }
}
