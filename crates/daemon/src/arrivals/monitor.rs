//! The monitor of the QEMU that waits here, for the host from which its VM comes. Nothing of what that host says goes on as it is: see
//! [`ioplane_qemu::IncomingRequest`].

use std::sync::Arc;
use std::time::Duration;

use ioplane_api::report::ArrivalWord;
use ioplane_netbus::NetbusError;
use ioplane_netbus::channel::{Channel, ChannelRequest};
use ioplane_qemu::{
    Endpoint, IncomingCommand, IncomingPorts, IncomingRequest, LONGEST_LINE, NotIncoming, QemuError, Qmp,
};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::{OwnedMutexGuard, watch};

use super::ExpectedVm;
use crate::functions::are_held;

/// For an answer of QEMU's.
const PATIENCE: Duration = Duration::from_secs(20);
/// For the other host to take an answer.
const PEER: Duration = Duration::from_secs(10);
/// For the connection before it to leave the monitor: less than the other host waits.
const TURN: Duration = Duration::from_secs(4);

/// What a monitor says of its VM.
pub struct SeenVm {
    /// Its process.
    pub pid: u32,
    /// The state of the VM, in QEMU's word.
    pub state: String,
}

/// Connects, if it is the VM's. Blocks.
fn connect(one: &ExpectedVm) -> Result<(Qmp, SeenVm), String> {
    let place = Endpoint::here(&one.qmp);
    let said = |error: QemuError| format!("the monitor at {place}: {error}");
    let mut qmp = Qmp::connect(&place, PATIENCE).map_err(said)?;
    let name = qmp.execute("query-name", &json!({})).map_err(said)?;
    match name["name"].as_str() {
        Some(name) if name == one.vm => {}
        Some(name) => {
            return Err(format!("the monitor at {place} is that of VM {}", ioplane_plain::excerpt(&name)));
        }
        None => return Err(format!("the VM of the monitor at {place} has no name")),
    }
    let status = qmp.execute("query-status", &json!({})).map_err(said)?;
    let pid = qmp.process().map_err(|error| format!("the monitor at {place}: {error}"))?;
    let state = status["status"].as_str().unwrap_or_default().to_owned();
    Ok((qmp, SeenVm { pid, state }))
}

async fn connected(one: &Arc<ExpectedVm>) -> Result<Qmp, String> {
    let of = one.clone();
    let connected = tokio::task::spawn_blocking(move || connect(&of)).await;
    let (qmp, seen) = connected.map_err(|error| error.to_string())??;
    one.seen(&seen);
    Ok(qmp)
}

/// Looks at the VM, unless somebody speaks with its monitor: then it has just been looked at.
pub async fn look(one: &Arc<ExpectedVm>) -> Result<(), String> {
    let Ok(_held) = one.monitor.clone().try_lock_owned() else { return Ok(()) };
    connected(one).await.map(drop)
}

/// One connection of the other host, from its greeting to its end.
pub async fn attend(
    arrival: ChannelRequest,
    one: &Arc<ExpectedVm>,
    ended: &mut watch::Receiver<bool>,
) -> Result<(), NetbusError> {
    // Who was here before may not have noticed yet that it is gone.
    let Ok(held) = tokio::time::timeout(TURN, one.monitor.clone().lock_owned()).await else {
        return arrival.refuse(&format!("the monitor of VM {} serves another connection", one.vm)).await;
    };
    let qmp = match connected(one).await {
        Ok(qmp) => qmp,
        Err(why) => return arrival.refuse(&why).await,
    };
    let channel = arrival.admit().await?;
    let session = Session { one: one.clone(), qmp: Some(qmp), ports: IncomingPorts::default(), _held: held };
    let mut stream = BufReader::new(channel);
    let served = tokio::select! {
        served = session.run(&mut stream) => served,
        _ = ended.wait_for(|ended| *ended) => Ok(()),
    };
    // Without it the other host takes the end for a fault of the network. It may be gone.
    let _ = tokio::time::timeout(PEER, stream.shutdown()).await;
    served
}

struct Session {
    one: Arc<ExpectedVm>,
    /// `None` while a command is with it, and when it is lost.
    qmp: Option<Qmp>,
    ports: IncomingPorts,
    _held: OwnedMutexGuard<()>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.one.left();
    }
}

async fn say(stream: &mut BufReader<Channel>, answer: &Value) -> Result<(), NetbusError> {
    let text = format!("{answer}\n");
    let said = async {
        stream.write_all(text.as_bytes()).await?;
        stream.flush().await
    };
    let said = tokio::time::timeout(PEER, said).await.map_err(|_| NetbusError::Slow(PEER))?;
    said.map_err(|_| NetbusError::Closed)
}

fn refusal(id: Option<u64>, why: &str) -> Value {
    let mut answer = json!({ "error": { "class": "GenericError", "desc": why } });
    if let Some(id) = id {
        answer["id"] = id.into();
    }
    answer
}

impl Session {
    async fn run(mut self, stream: &mut BufReader<Channel>) -> Result<(), NetbusError> {
        say(stream, &json!({ "QMP": { "version": {}, "capabilities": [] } })).await?;
        loop {
            let mut line = Vec::new();
            // A line that is too long has no end here, and is none.
            let read = (&mut *stream).take(LONGEST_LINE as u64 + 1).read_until(b'\n', &mut line).await;
            if read.map_err(|_| NetbusError::Closed)? == 0 {
                return Ok(());
            }
            let answer = match IncomingRequest::parse(&line) {
                Ok(IncomingRequest { id, command }) => match self.perform(command).await {
                    Ok(value) => {
                        let mut answer = json!({ "return": value });
                        if let Some(id) = id {
                            answer["id"] = id.into();
                        }
                        answer
                    }
                    Err(why) => refusal(id, &why),
                },
                Err(NotIncoming { id, what }) => {
                    let ExpectedVm { vm, from, .. } = &*self.one;
                    tracing::warn!(vm, %from, asked = what, "a command that no move needs is refused");
                    refusal(id, &format!("{what}: a host that moves a VM here may not ask that"))
                }
            };
            say(stream, &answer).await?;
            if self.qmp.is_none() || line.len() > LONGEST_LINE {
                return Ok(());
            }
        }
    }

    /// Does what is asked, if it may be done now. Why not.
    async fn perform(&mut self, command: IncomingCommand) -> Result<Value, String> {
        if matches!(command, IncomingCommand::Stop | IncomingCommand::Quit | IncomingCommand::Cont) {
            // Somebody here may have let it run.
            let status = self.ask(IncomingCommand::Query("query-status")).await?;
            if status["status"] == "running" && !are_held(self.one.pid()) {
                self.one.arrived();
            }
        }
        if !command.only_tells() {
            if self.one.state() == ArrivalWord::Arrived {
                return Err(format!("VM {} has arrived: it is this host's", self.one.vm));
            }
            self.one.begin();
        }
        if !self.ports.allow(&command) {
            return Err("a host that moves a VM here may not write that register".to_owned());
        }
        let done = self.ask(command).await?;
        if command == IncomingCommand::Cont {
            self.one.arrived();
        }
        Ok(done)
    }

    async fn ask(&mut self, command: IncomingCommand) -> Result<Value, String> {
        if command == IncomingCommand::Capabilities {
            return Ok(json!({}));
        }
        let mut qmp = self.qmp.take().ok_or("its monitor is lost")?;
        let asked = tokio::task::spawn_blocking(move || {
            let (name, arguments) = command.execute();
            let done = qmp.execute(name, &arguments);
            (qmp, done)
        });
        let (qmp, done) = asked.await.map_err(|error| error.to_string())?;
        match done {
            Err(error @ QemuError::Peer(_)) => Err(error.to_string()),
            done => {
                self.qmp = Some(qmp);
                done.map_err(|error| match error {
                    QemuError::Refused { why, .. } => why,
                    other => other.to_string(),
                })
            }
        }
    }
}
