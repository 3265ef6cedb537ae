//! One NIC: plugged into its switch, served, changed, reported.

use std::collections::BTreeMap;
use std::sync::Arc;

use ioplane_api::report::{FrameCounts, NicQueueReport, NicReport, PortReport, Role, ServedState};
use ioplane_api::spec::{LinkWord, NicSpec, QUEUE_SIZE_MAX};
use ioplane_network::PortOptions;
use ioplane_virtio::net::{Net, NetOptions};

use super::Daemon;
use super::context::DaemonContext;
use super::lower::Lower;
use super::readings;
use super::registry::{Registered, Registry};
use super::served::{Queued, Served, ServedKind, Standing};
use super::state_file::{Entries, NicRecord};
use super::switches::Switches;
use crate::config::{Config, Place};
use crate::refusal::Refusal;

/// A NIC that is being served. Its port is its device's, and goes with it.
pub struct Nic {
    pub(super) served: Served<Nic>,
}

/// The device, plugged into its switch.
pub(super) fn model(spec: &NicSpec, switches: &Switches) -> Result<Net, Refusal> {
    let port = switches.switch(&spec.switch)?.plug(PortOptions {
        name: spec.name.clone(),
        mac: Some(spec.mac.0),
        isolated: spec.isolated,
        vlan: spec.vlan.lower(),
        pairs: spec.pairs,
        uplink: false,
        mtu: spec.mtu,
    })?;
    let options = NetOptions {
        name: spec.name.clone(),
        mac: spec.mac.0,
        pairs: spec.pairs,
        queue_size: QUEUE_SIZE_MAX,
        mtu: spec.mtu,
        // Whoever speaks vhost-user for a NIC keeps configuration and control queue itself.
        control: false,
    };
    let mut net = Net::new(options, port);
    net.set_link(spec.link.lower());
    Ok(net)
}

impl Nic {
    /// Takes its link up or down, and tells the guest.
    pub async fn set_link(&self, link: LinkWord) -> Result<(), Refusal> {
        let _changing = self.served.changing.lock().await;
        self.served.note.change(|record| record.now.link = link)?;
        Ok(self.served.handle.change(move |model| ((), model.set_link(link.lower()))).await?)
    }
}

impl Registered for Nic {
    fn registry(daemon: &Daemon) -> &Registry<Nic> {
        &daemon.nics
    }
}

impl ServedKind for Nic {
    type Spec = NicSpec;
    type Report = NicReport;
    type Below = Switches;
    type Service = Served<Nic>;

    const NAME: &'static str = "nic";
    const COMMAND: &'static str = "nic";
    const LET_GO: &'static str =
        "unplug it or shut the guest down first; its link is changed by `ioplane nic set`";

    fn configured(config: &Config) -> &[(NicSpec, Place)] {
        &config.nics
    }

    fn records(entries: &mut Entries) -> &mut BTreeMap<String, NicRecord> {
        &mut entries.nics
    }

    fn removed(entries: &mut Entries) -> &mut BTreeMap<String, NicSpec> {
        &mut entries.removed_nics
    }

    /// Only its link differs.
    fn lives_on(now: &NicSpec, next: &NicSpec) -> bool {
        *next == NicSpec { link: next.link, ..now.clone() }
    }

    async fn become_next(&self, next: NicRecord) -> Result<(), Refusal> {
        self.set_link(next.now.link).await?;
        self.note().adopt(next.configured)
    }

    async fn open(
        record: NicRecord,
        context: &Arc<DaemonContext>,
        switches: &Arc<Switches>,
    ) -> Result<Nic, Refusal> {
        Ok(Nic { served: Served::start(model(&record.now, switches)?, record, context)? })
    }

    fn service(&self) -> &Served<Nic> {
        &self.served
    }

    async fn report(&self) -> NicReport {
        let mut report = self.busy();
        let port = |model: &mut Net| readings::port(model.port().reading());
        let Some((status, port)) = self.served.glance(port).await else { return report };
        report.state = ServedState::Served;
        report.connected = status.connected;
        report.connections = status.connections;
        report.vm = status.peer.map(readings::vm);
        report.features = status.features;
        (report.front_end_faults, report.last_front_end_fault) = readings::faults_of(&status);
        report.mappings = status.mappings;
        report.port = port;
        report.sent = readings::frames(&status.queues, Role::Transmit);
        report.received = readings::frames(&status.queues, Role::Receive);
        report.queues = status.queues.into_iter().map(readings::nic_queue).collect();
        report.queues.truncate(usize::from(2 * report.pairs));
        report
    }

    fn blank(record: &NicRecord, standing: Standing) -> NicReport {
        let spec = &record.now;
        let Standing { name, state, error, remedy, retry, origin, socket } = standing;
        NicReport {
            name,
            state,
            error,
            remedy,
            retry,
            origin,
            connected: false,
            connections: 0,
            vm: None,
            socket,
            switch: spec.switch.clone(),
            mac: spec.mac.to_string(),
            isolated: spec.isolated,
            vlan: spec.vlan.to_string(),
            pairs: spec.pairs,
            queue_size: spec.queue_size,
            mtu: spec.mtu,
            link: spec.link.word().to_owned(),
            core: spec.core,
            features: 0,
            front_end_faults: BTreeMap::new(),
            last_front_end_fault: None,
            mappings: 0,
            port: PortReport { name: spec.name.clone(), ..PortReport::default() },
            received: FrameCounts::default(),
            sent: FrameCounts::default(),
            queues: (0..2 * spec.pairs).map(NicQueueReport::blank).collect(),
        }
    }
}

impl Queued for Nic {
    type Model = Net;
}
