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
use super::super::switches::{Inheritance, Switches};
use super::estate::{Bequest, Estate, Heir, Luggage, Stopped};
use super::nic::{carry_out, last_will};
use super::words::{DeviceV1, NameV1};
use crate::refusal::Refusal;

/// What people call it.
pub const KIND: &str = "switch";

/// An uplink that rests. Dropped, it goes on where it was.
pub struct Resting {
    switches: Arc<Switches>,
    switch: String,
    uplink: Option<Quiescent<Tap>>,
}

impl Stopped for Resting {
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

impl Drop for Resting {
    fn drop(&mut self) {
        if let Some(uplink) = self.uplink.take() {
            self.switches.resume_uplink(&self.switch, uplink);
        }
    }
}

/// All switches, and those whose uplink has been lost.
pub fn bequests(switches: &Arc<Switches>) -> Result<Estate, Refusal> {
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for (name, inheritance) in switches.inheritance()? {
        let of = NameV1 { kind: KIND.to_owned(), name: name.clone() };
        match inheritance {
            Inheritance::Failed(why) => failed.push((of, why)),
            Inheritance::Plain => {
                let luggage = Luggage { files: Vec::new(), beside: Box::new(Vec::new) };
                all.push(Bequest::new(of, luggage, Vec::new()));
            }
            Inheritance::Uplink(file, port) => {
                let luggage = Luggage { files: vec![file], beside: last_will(port) };
                let switches = switches.clone();
                // It has nothing in flight that could be left to the successor, so it has no patience to run out of.
                let door = move |_: Duration| {
                    let (switches, switch) = (switches.clone(), name.clone());
                    let rest = move || {
                        let uplink = switches.rest_uplink(&switch);
                        let uplink = uplink.map_err(|refused| vhost_user::Refusal::Refused(refused.error))?;
                        let resting = Resting { switches, switch, uplink: Some(uplink) };
                        Ok(Box::new(resting) as Box<dyn Stopped>)
                    };
                    Box::pin(async move { block_in_place(rest) }) as _
                };
                all.push(Bequest::new(of, luggage, vec![Box::new(door)]));
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
    daemon.ledger.entries().switches.remove(&name.name).ok_or_else(|| {
        Refusal::failed(
            format!("state.json does not know switch {}", name.name),
            "this is a bug: report it with the log",
        )
    })
}

/// Makes a switch like the predecessor's, with its uplink not running yet.
pub fn prepare(daemon: &Daemon, name: NameV1, mut files: Vec<OwnedFd>) -> Result<Box<dyn Heir>, Refusal> {
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

impl Heir for Prepared {
    fn name(&self) -> &NameV1 {
        &self.name
    }

    fn replays(&self) -> bool {
        false
    }

    fn doors(&self) -> usize {
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
