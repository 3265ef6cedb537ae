//! The monitor of the QEMU that waits here, for the host from which its VM comes. Nothing of what that host says goes on as it is: see
//! [`ioplane_qemu::IncomingRequest`].

use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
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
use crate::Daemon;
use crate::functions::are_held;

/// For an answer of QEMU's.
const PATIENCE: Duration = Duration::from_secs(20);
/// The same of one that may not have been started: somebody looks again soon.
const STARTING: Duration = Duration::from_secs(2);
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

/// Why a VM is not seen.
#[derive(Debug, thiserror::Error)]
pub enum Unseen {
    /// Nobody serves its monitor.
    #[error("{0}")]
    Absent(String),
    /// Somebody else does.
    #[error("{0}")]
    Other(String),
    /// It does not say.
    #[error("{0}")]
    Silent(String),
}

/// Connects, if it is the VM's, which it has to say in this time. Blocks.
fn connect(one: &ExpectedVm, patience: Duration) -> Result<(Qmp, SeenVm), Unseen> {
    let place = Endpoint::here(&one.qmp);
    let of_it = |what: &dyn std::fmt::Display| format!("the monitor at {place}: {what}");
    let said = |error: QemuError| Unseen::Silent(of_it(&error));
    if std::fs::metadata(&one.qmp).is_ok_and(|file| !file.file_type().is_socket()) {
        return Err(Unseen::Other(of_it(&"the file there is no socket")));
    }
    let mut qmp = Qmp::connect(&place, patience).map_err(|error| match &error {
        QemuError::Peer(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            Unseen::Absent(of_it(&error))
        }
        _ => said(error),
    })?;
    let name = qmp.execute("query-name", &json!({})).map_err(said)?;
    match name["name"].as_str() {
        Some(name) if name == one.vm => {}
        Some(name) => {
            let name = ioplane_plain::excerpt(&name);
            return Err(Unseen::Other(format!("the monitor at {place} is that of VM {name}")));
        }
        None => return Err(Unseen::Other(format!("the VM of the monitor at {place} has no name"))),
    }
    let status = qmp.execute("query-status", &json!({})).map_err(said)?;
    let pid = qmp.process().map_err(|error| Unseen::Silent(of_it(&error)))?;
    let state = status["status"].as_str().unwrap_or_default().to_owned();
    qmp.set_patience(PATIENCE);
    Ok((qmp, SeenVm { pid, state }))
}

async fn connected(daemon: &Daemon, one: &Arc<ExpectedVm>, patience: Duration) -> Result<Qmp, Unseen> {
    let of = one.clone();
    let connected = tokio::task::spawn_blocking(move || connect(&of, patience)).await;
    let connected = connected.map_err(|error| Unseen::Silent(error.to_string()))?;
    let mut checked = connected;
    // Nobody has seen that monitor when it was named: whoever may write to its directory could have put a socket there.
    if let Ok((_, SeenVm { pid, .. })) = &checked
        && one.libvirt
        && !uses_a_function(daemon, *pid).await
    {
        let place = one.qmp.display();
        checked = Err(Unseen::Other(format!(
            "the monitor at {place} is served by process {pid}, which uses no PCI function of this daemon"
        )));
    }
    if one.libvirt && matches!(checked, Err(Unseen::Absent(_) | Unseen::Other(_))) {
        one.is_absent();
    }
    let (qmp, seen) = checked?;
    one.seen(&seen);
    Ok(qmp)
}

async fn uses_a_function(daemon: &Daemon, pid: u32) -> bool {
    let functions = daemon.functions.report().await;
    let mut used = functions.iter().filter(|function| function.connected);
    used.any(|function| function.vm.as_ref().is_some_and(|vm| vm.pid == pid))
}

/// Looks at the VM, unless somebody speaks with its monitor: then it has just been looked at.
pub async fn look(daemon: &Daemon, one: &Arc<ExpectedVm>) -> Result<(), Unseen> {
    let Ok(_held) = one.monitor.clone().try_lock_owned() else { return Ok(()) };
    let patience = if one.libvirt { STARTING } else { PATIENCE };
    connected(daemon, one, patience).await.map(drop)
}

/// The same, where a QEMU that is started later need not be there yet.
pub async fn may_come(daemon: &Daemon, one: &Arc<ExpectedVm>) -> Result<(), String> {
    match look(daemon, one).await {
        Err(Unseen::Absent(_)) if one.libvirt => Ok(()),
        looked => looked.map_err(|unseen| unseen.to_string()),
    }
}

/// One connection of the other host, from its greeting to its end.
pub async fn attend(
    arrival: ChannelRequest,
    daemon: &Daemon,
    one: &Arc<ExpectedVm>,
    ended: &mut watch::Receiver<bool>,
) -> Result<(), NetbusError> {
    // Who was here before may not have noticed yet that it is gone.
    let Ok(held) = tokio::time::timeout(TURN, one.monitor.clone().lock_owned()).await else {
        return arrival.refuse(&format!("the monitor of VM {} serves another connection", one.vm)).await;
    };
    let qmp = match connected(daemon, one, PATIENCE).await {
        Ok(qmp) => qmp,
        Err(why) => return arrival.refuse(&why.to_string()).await,
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
            if status["status"] == "running" && !self.one.pid().is_some_and(are_held) {
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
