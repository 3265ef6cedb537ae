//! One NIC: plugged into its switch, served, changed, reported.

use std::collections::BTreeMap;
use std::sync::Arc;

use ioplane_api::report::{FrameCounts, NicQueueReport, NicReport, PortReport, Role, ServedState};
use ioplane_api::spec::{NicChangeForm, NicSpec, QUEUE_SIZE_MAX, ServedSpec, set_group};
use ioplane_network::PortOptions;
use ioplane_virtio::DeviceLimits;
use ioplane_virtio::net::{Net, NetOptions};

use super::Daemon;
use super::context::DaemonContext;
use super::groups::Membership;
use super::lower::{Lower, limit};
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

/// The device, plugged into its switch and in a group.
pub(super) fn model(spec: &NicSpec, switches: &Switches, membership: Membership) -> Result<Net, Refusal> {
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
    let (mut tx, mut rx) = (DeviceLimits::default(), DeviceLimits::default());
    limit(&mut tx, &spec.tx_limits());
    limit(&mut rx, &spec.rx_limits());
    let Membership { share, limits: [_, shared_tx, shared_rx] } = membership;
    tx.join(shared_tx);
    rx.join(shared_rx);
    net.set_limits(tx, rx);
    net.set_share(share);
    Ok(net)
}

impl Nic {
    /// Takes its link up or down, and tells the guest; changes the limits of its guest and its group. What is left out stays. All is written down first.
    pub async fn change(&self, change: NicChangeForm) -> Result<(), Refusal> {
        let _changing = self.served.changing.lock().await;
        let mut next = self.served.note.read();
        next.now.link = change.link.unwrap_or(next.now.link);
        let (tx, rx) = (next.now.tx_limits(), next.now.rx_limits());
        next.now.set_limits(tx.changed(change.tx_limits()), rx.changed(change.rx_limits()));
        set_group(&mut next.now.group, change.group);
        next.now.group().map_or(Ok(()), |group| self.served.groups.check(group))?;
        let flaws = [next.now.flaws(), next.now.limit_flaws()].concat();
        if !flaws.is_empty() {
            return Err(Refusal::flaws(&flaws));
        }
        self.become_record(next).await
    }

    /// Writes the record down, and has the device be as that says.
    async fn become_record(&self, next: NicRecord) -> Result<(), Refusal> {
        let Served { note, handle, .. } = &self.served;
        let now = next.now.clone();
        note.change(|record| *record = next)?;
        // Also where the record was so already: the device may not have followed it the last time.
        handle.change(move |model| ((), model.set_link(now.link.lower()))).await?;
        let (tx, rx) = (now.tx_limits(), now.rx_limits());
        let Membership { share, limits: [_, shared_tx, shared_rx] } = self.served.groups.membership(&now);
        let change = move |model: &mut Net| {
            let (sent, received) = model.limits();
            let (mut sent, mut received) = (sent.clone(), received.clone());
            limit(&mut sent, &tx);
            limit(&mut received, &rx);
            sent.join(shared_tx);
            received.join(shared_rx);
            model.set_limits(sent, received);
            model.set_share(share);
        };
        Ok(handle.change_limits(change).await?)
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
    const LET_GO: &'static str = "unplug it or shut the guest down first; its link, its limits and its group are changed by `ioplane nic set`";

    fn configured(config: &Config) -> &[(NicSpec, Place)] {
        &config.nics
    }

    fn records(entries: &mut Entries) -> &mut BTreeMap<String, NicRecord> {
        &mut entries.nics
    }

    fn removed(entries: &mut Entries) -> &mut BTreeMap<String, NicSpec> {
        &mut entries.removed_nics
    }

    /// Only its link, its limits and its group differ.
    fn lives_on(now: &NicSpec, next: &NicSpec) -> bool {
        let mut same = NicSpec { link: next.link, group: next.group.clone(), ..now.clone() };
        same.set_limits(next.tx_limits(), next.rx_limits());
        *next == same
    }

    async fn become_next(&self, next: NicRecord) -> Result<(), Refusal> {
        let _changing = self.served.changing.lock().await;
        let record = self.note().read();
        self.become_record(NicRecord { configured: next.configured, now: next.now, ..record }).await
    }

    async fn rejoin(&self) -> Result<(), Refusal> {
        let _changing = self.served.changing.lock().await;
        self.become_record(self.note().read()).await
    }

    async fn open(
        record: NicRecord,
        context: &Arc<DaemonContext>,
        switches: &Arc<Switches>,
    ) -> Result<Nic, Refusal> {
        let model = model(&record.now, switches, context.groups.membership(&record.now))?;
        Ok(Nic { served: Served::start(model, record, context)? })
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
            group: spec.group.clone(),
            tx_frame_limit: spec.tx_frame_limit,
            tx_frame_burst: spec.tx_frame_burst,
            tx_bandwidth_limit: spec.tx_bandwidth_limit,
            tx_bandwidth_burst: spec.tx_bandwidth_burst,
            rx_frame_limit: spec.rx_frame_limit,
            rx_frame_burst: spec.rx_frame_burst,
            rx_bandwidth_limit: spec.rx_bandwidth_limit,
            rx_bandwidth_burst: spec.rx_bandwidth_burst,
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
