//! A NIC's share of a hand-over: a port like its own in the successor's switch, and the counts.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_network::{DropReason, Port, SideReading};
use ioplane_virtio::net::Net;
use serde::{Deserialize, Serialize};

use super::super::context::DaemonContext;
use super::super::nic::{self, Nic};
use super::super::served::Served;
use super::super::state_file::NicRecord;
use super::super::switches::Switches;
use super::handover::{HandoverExtras, HandoverKind};
use crate::refusal::Refusal;

/// The counts of a port. Causes go by name, so that versions may differ in them.
#[derive(Debug, Serialize, Deserialize)]
struct PortV1 {
    /// Its link was up, and when it came up, among the ports of its switch.
    link: Option<u64>,
    /// What its guest was told by the front end, at most what the NIC allows.
    mtu: u16,
    sent: SideV1,
    received: SideV1,
}

#[derive(Debug, Serialize, Deserialize)]
struct SideV1 {
    frames: u64,
    bytes: u64,
    drops: BTreeMap<String, u64>,
}

impl From<SideReading> for SideV1 {
    fn from(SideReading { frames, bytes, drops }: SideReading) -> Self {
        let drops = drops.into_iter().map(|(cause, count)| (cause.name().to_owned(), count)).collect();
        SideV1 { frames, bytes, drops }
    }
}

impl From<SideV1> for SideReading {
    fn from(SideV1 { frames, bytes, drops }: SideV1) -> Self {
        let known = DropReason::ALL.iter().filter_map(|cause| Some((*cause, *drops.get(cause.name())?)));
        SideReading { frames, bytes, drops: known.collect() }
    }
}

/// What is to be said of a port when everything is quiescent.
pub fn final_counts(port: Arc<Port>) -> Box<dyn Fn() -> Vec<u8> + Send + Sync> {
    Box::new(move || {
        let (sent, received) = port.final_counts();
        let port =
            PortV1 { link: port.link(), mtu: port.mtu(), sent: sent.into(), received: received.into() };
        serde_json::to_vec(&port).unwrap_or_default()
    })
}

/// A port takes over the counts of another.
pub fn carry_out(port: &Port, counts: &[u8]) -> Result<(), Refusal> {
    let PortV1 { link, mtu, sent, received } = serde_json::from_slice(counts).map_err(|error| {
        Refusal::failed(format!("the counts of port {}: {error}", port.name()), "restart the daemon instead")
    })?;
    port.restore((&sent.into(), &received.into()));
    port.set_mtu(mtu);
    // Before any poller runs: a frame for a guest that does not receive yet waits for it, and nobody else gets it.
    port.restore_link(link);
    Ok(())
}

impl HandoverKind for Nic {
    type Kept = Arc<Port>;

    async fn extras(&self) -> Result<HandoverExtras, Refusal> {
        let port = self.served.handle.change(|model| (model.port().clone(), false)).await?;
        Ok(HandoverExtras { files: Vec::new(), beside: final_counts(port) })
    }

    fn prepare(
        record: &NicRecord,
        context: &DaemonContext,
        switches: &Switches,
        _files: Vec<OwnedFd>,
    ) -> Result<(Net, Arc<Port>), Refusal> {
        let model = nic::model(&record.now, switches, context.groups.membership(&record.now))?;
        let port = model.port().clone();
        Ok((model, port))
    }

    fn take_extras(port: &Arc<Port>, beside: &[u8]) -> Result<(), Refusal> {
        carry_out(port, beside)
    }

    fn succeed(_port: Arc<Port>, served: Served<Nic>) -> Nic {
        Nic { served }
    }
}
