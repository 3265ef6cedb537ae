//! A switch's share of a hand-over: made anew, with its uplink's open device. What it has learned it learns again.

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use ioplane_device::Quiescent;
use ioplane_host::vhost_user;
use ioplane_network::Tap;
use tokio::sync::oneshot;
use tokio::task::block_in_place;

use super::super::Daemon;
use super::super::state_file::SwitchRecord;
use super::super::switches::{SwitchHandover, Switches};
use super::handover::{HandoverExtras, HandoverSet, HandoverSource, HandoverTarget, Stopped};
use super::nic::{carry_out, final_counts};
use super::words::{DeviceV1, NameV1};
use crate::refusal::Refusal;

/// What people call it.
pub const KIND: &str = "switch";

/// A quiescent uplink. Dropped, it resumes where it was.
pub struct QuiescentUplink {
    switches: Arc<Switches>,
    switch: String,
    uplink: Option<Quiescent<Tap>>,
}

impl Stopped for QuiescentUplink {
    /// It has no state of its own.
    fn parcel(&self) -> (&[u8], &[OwnedFd]) {
        (&[], &[])
    }

    fn suspended(&self) -> bool {
        false
    }

    fn has_guest(&self) -> bool {
        false
    }

    fn take_back(self: Box<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        // At once, as when it is dropped.
        drop(self);
        Box::pin(std::future::ready(()))
    }

    fn give_away(self: Box<Self>) {
        std::mem::forget(self);
    }
}

impl Drop for QuiescentUplink {
    fn drop(&mut self) {
        if let Some(uplink) = self.uplink.take() {
            self.switches.resume_uplink(&self.switch, uplink);
        }
    }
}

/// All switches, and those whose uplink has been lost.
pub fn sources(switches: &Arc<Switches>) -> Result<HandoverSet, Refusal> {
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for (name, handover) in switches.handovers()? {
        let of = NameV1 { kind: KIND.to_owned(), name: name.clone() };
        match handover {
            SwitchHandover::Failed(why) => failed.push((of, why)),
            SwitchHandover::Plain => {
                let extras = HandoverExtras { files: Vec::new(), beside: Box::new(Vec::new) };
                all.push(HandoverSource::new(of, extras, Vec::new()));
            }
            SwitchHandover::Uplink(file, port) => {
                let extras = HandoverExtras { files: vec![file], beside: final_counts(port) };
                let switches = switches.clone();
                // It has nothing in flight that could be left to the successor, so it has no patience to run out of.
                let hold = move |_: Duration| {
                    let (switches, switch) = (switches.clone(), name.clone());
                    let quiesce = move || {
                        let uplink = switches.quiesce_uplink(&switch);
                        let uplink =
                            uplink.map_err(|refused| vhost_user::HandleError::Refused(refused.error))?;
                        let quiescent = QuiescentUplink { switches, switch, uplink: Some(uplink) };
                        Ok(Box::new(quiescent) as Box<dyn Stopped>)
                    };
                    Box::pin(async move { block_in_place(quiesce) }) as _
                };
                all.push(HandoverSource::new(of, extras, vec![Box::new(hold)]));
            }
        }
    }
    Ok((all, failed))
}

struct Prepared {
    name: NameV1,
    /// Until it runs.
    uplink: Option<Tap>,
}

fn record(daemon: &Daemon, name: &NameV1) -> Result<SwitchRecord, Refusal> {
    daemon.state_file.entries().switches.remove(&name.name).ok_or_else(|| {
        Refusal::failed(
            format!("state.json does not know switch {}", name.name),
            "this is a bug: report it with the log",
        )
    })
}

/// Makes a switch like the predecessor's, with its uplink not running yet.
pub fn prepare(
    daemon: &Daemon,
    name: NameV1,
    mut files: Vec<OwnedFd>,
) -> Result<Box<dyn HandoverTarget>, Refusal> {
    let switch = daemon.switches.take_in(record(daemon, &name)?, None);
    let adopt = |file| daemon.switches.adopt_uplink(&name.name, &switch, file);
    let uplink = files.pop().map(adopt).transpose()?;
    Ok(Box::new(Prepared { name, uplink }))
}

/// Makes one that has lost its uplink.
pub fn keep_failed(daemon: &Daemon, name: &NameV1, why: Refusal) -> Result<(), Refusal> {
    daemon.switches.take_in(record(daemon, name)?, Some(why));
    Ok(())
}

impl HandoverTarget for Prepared {
    fn name(&self) -> &NameV1 {
        &self.name
    }

    fn replays(&self) -> bool {
        false
    }

    fn sockets(&self) -> usize {
        usize::from(self.uplink.is_some())
    }

    fn adopt(&mut self, device: DeviceV1, _files: Vec<OwnedFd>) -> Result<(), Refusal> {
        self.uplink.as_ref().map_or(Ok(()), |uplink| carry_out(uplink.port(), &device.beside))
    }

    fn start(self: Box<Self>, daemon: &Daemon) -> Vec<oneshot::Receiver<Duration>> {
        if let Some(uplink) = self.uplink {
            daemon.switches.resume_uplink(&self.name.name, Quiescent::new(uplink));
        }
        Vec::new()
    }
}
