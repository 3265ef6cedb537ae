//! Reads requests line by line and answers them; each request has a thread, so that a stuck disk holds up its own
//! commands only.

use crate::load::Load;
use crate::protocol::{Answer, Body, Command, LoadSpec, Request};
use crate::{blockdev, copy, iperf, journal, kernel, network};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::sync::{Arc, Mutex, MutexGuard};

/// The longest line that is taken; a request is far shorter.
pub const LONGEST_LINE: usize = 64 << 10;
/// Loads remembered at a time.
pub const MOST_LOADS: usize = 16;

/// The loads of this guest and the way back to the host.
pub struct Server {
    out: Mutex<Box<dyn Write + Send>>,
    loads: Mutex<HashMap<String, Arc<Load>>>,
}

impl Server {
    /// Answers go to `out`.
    pub fn new(out: Box<dyn Write + Send>) -> Arc<Self> {
        Arc::new(Server { out: Mutex::new(out), loads: Mutex::default() })
    }

    /// Serves requests from `input` until it ends.
    pub fn run(self: &Arc<Self>, input: &mut dyn BufRead) -> std::io::Result<()> {
        let mut line = Vec::new();
        loop {
            let part = input.fill_buf()?;
            if part.is_empty() {
                return Ok(());
            }
            let (taken, whole) = match part.iter().position(|byte| *byte == b'\n') {
                Some(end) => (end + 1, true),
                None => (part.len(), false),
            };
            if line.len() + taken <= LONGEST_LINE {
                line.extend_from_slice(&part[..taken]);
            } else {
                line.clear();
                line.extend_from_slice(b"too long");
            }
            input.consume(taken);
            if whole {
                self.line(&line);
                line.clear();
            }
        }
    }

    fn line(self: &Arc<Self>, line: &[u8]) {
        if line.trim_ascii().is_empty() {
            return;
        }
        match serde_json::from_slice::<Request>(line) {
            Ok(request) => {
                let server = Arc::clone(self);
                let id = request.id;
                let thread = std::thread::Builder::new().stack_size(512 << 10);
                if let Err(error) = thread.spawn(move || server.request(request)) {
                    self.say(id, Body::Error(format!("no thread for the request: {error}")));
                }
            }
            Err(error) => {
                let id =
                    serde_json::from_slice::<Value>(line).ok().and_then(|v| v["id"].as_u64()).unwrap_or(0);
                self.say(id, Body::Error(format!("not a request this program knows: {error}")));
            }
        }
    }

    fn request(self: &Arc<Self>, request: Request) {
        let id = request.id;
        let off = matches!(request.command, Command::Poweroff);
        let body = match self.answer(id, request.command) {
            Ok(value) => Body::Ok(value),
            Err(error) => Body::Error(format!("{error:#}")),
        };
        self.say(id, body);
        if off {
            std::thread::sleep(std::time::Duration::from_millis(50));
            if let Err(error) = kernel::poweroff() {
                eprintln!("ioplane-load: {error:#}");
            }
        }
    }

    fn answer(&self, id: u64, command: Command) -> Result<Value> {
        let tell = |news: Value| self.say(id, Body::Progress(news));
        match command {
            Command::Hello => value(kernel::hello()?),
            Command::List => value(blockdev::list()?),
            Command::Blockdev { device } => value(blockdev::describe_device(&device)?),
            Command::Interrupts { device } => Ok(json!({ "interrupts": blockdev::interrupts(&device)? })),
            Command::Load(spec) => {
                let load = self.begin(&spec)?;
                value(load.join(|progress| tell(json!(progress))))
            }
            Command::Mark { load } => value(self.named(&load)?.mark()),
            Command::Stop { load } => {
                self.named(&load)?.stop();
                Ok(json!({}))
            }
            Command::Verify { load } => value(self.named(&load)?.verify()?),
            Command::Forget { load } => {
                if !self.named(&load)?.ended() {
                    bail!("load {load:?} still runs; stop it first");
                }
                lock(&self.loads).remove(&load);
                Ok(json!({}))
            }
            Command::CopyCheck { device, offset, bytes, seed } => {
                value(copy::copy_check(&device, offset, bytes, seed)?)
            }
            Command::Sha256 { device, offset, bytes } => {
                Ok(json!({ "sha256": copy::sha256(&device, offset, bytes)? }))
            }
            Command::WriteStamp(spec) => value(journal::write(&spec, |progress| tell(json!(progress)))?),
            Command::ReadStamp(spec) => value(journal::read(&spec)?),
            Command::NetUp { mac } => value(network::up(&mac)?),
            Command::NetReceive { index, port } => value(network::receive(index, port)?),
            Command::NetSend { index, to, port, seconds, seed, write } => value(match seconds {
                Some(seconds) => network::send(index, &to, port, seconds, seed, write)?,
                None => network::send_enough(index, &to, port, seed)?,
            }),
            Command::NetRequests { index, to, port, seconds, bytes } => {
                value(network::requests(index, &to, port, seconds, bytes)?)
            }
            Command::IperfServe { port } => value(iperf::serve(port)?),
            Command::IperfRun { interface, to, port, seconds } => {
                value(iperf::run(&interface, &to, port, seconds)?)
            }
            Command::DmesgErrors => value(kernel::errors()?),
            Command::Poweroff => {
                kernel::settle();
                Ok(json!({}))
            }
        }
    }

    fn begin(&self, spec: &LoadSpec) -> Result<Arc<Load>> {
        let mut loads = lock(&self.loads);
        if loads.get(&spec.load).is_some_and(|old| !old.ended()) {
            bail!("load {:?} still runs; choose another name", spec.load);
        }
        if loads.len() >= MOST_LOADS && !loads.contains_key(&spec.load) {
            bail!("{MOST_LOADS} loads are remembered; `forget` one first");
        }
        let load = Arc::new(Load::start(spec)?);
        loads.insert(spec.load.clone(), Arc::clone(&load));
        Ok(load)
    }

    fn named(&self, load: &str) -> Result<Arc<Load>> {
        let found = lock(&self.loads).get(load).cloned();
        found.with_context(|| format!("no load is called {load:?}"))
    }

    fn say(&self, id: u64, body: Body) {
        let mut line = match serde_json::to_vec(&Answer { id, body }) {
            Ok(line) => line,
            Err(error) => return eprintln!("ioplane-load: an answer cannot be written as JSON: {error}"),
        };
        line.push(b'\n');
        let mut out = lock(&self.out);
        if let Err(error) = out.write_all(&line).and_then(|()| out.flush()) {
            eprintln!("ioplane-load: the host cannot be told: {error}");
        }
    }
}

fn value(answer: impl Serialize) -> Result<Value> {
    serde_json::to_value(answer).context("write an answer as JSON")
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
