//! What can be behind a function: one type, so that what is inside can be looked at while a front has it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_api::report::{
    ChipReport, CooperationReport, EventReport, FunctionReport, RegionReport, WatchFaultReport, WatchReport,
};
use ioplane_api::spec::FaultSpec;
use ioplane_device::{
    Access, Activation, Change, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet, Quiescence,
    QuiescenceProof, RegisterAddress, SavedState,
};
use ioplane_hardware::{Keeper, Vfio};
use ioplane_memory::GuestMap;
use ioplane_moving::Surroundings;
use ioplane_nic::ne2000::Ne2000;
use ioplane_nic::rtl8139::Rtl8139;
use ioplane_nic::{ChipCounts, Drops};
use ioplane_passthrough::monitor::{Monitor, MonitorEvent, MonitorEventKind, Reading};
use ioplane_passthrough::{
    Carry, CarryError, Cooperating, Cooperation, DirectFaults, ExchangeError, Exchanged, Lent, Migratable,
    Passthrough, Prepared,
};
use ioplane_pci::{BarMap, Function, Irq, Irqs, NotReady, Wire, WireError};

use crate::lower::Lower;
use crate::readings;

/// A function of any kind that the daemon has.
pub enum Body {
    Rtl8139(Box<Rtl8139>),
    /// An emulated NE2000.
    Ne2000(Box<Ne2000>),
    /// A function of the host, mediated by a state model.
    Mediated(Box<Monitor<Vfio>>),
    /// A function of the host, as it is.
    Passthrough(Box<Passthrough<Vfio>>),
    /// The same, and another function can take its place.
    Migratable(Box<Passthrough<Migratable<Vfio>>>, Arc<Keeper>),
    /// The same by a driver that cooperates.
    Cooperating(Box<Passthrough<Cooperating<Vfio>>>, Arc<Keeper>),
}

impl Body {
    fn inner(&self) -> &dyn Function {
        match self {
            Body::Rtl8139(nic) => &**nic,
            Body::Ne2000(nic) => &**nic,
            Body::Mediated(monitor) => &**monitor,
            Body::Passthrough(direct) => &**direct,
            Body::Migratable(direct, _) => &**direct,
            Body::Cooperating(direct, _) => &**direct,
        }
    }

    fn inner_mut(&mut self) -> &mut dyn Function {
        match self {
            Body::Rtl8139(nic) => &mut **nic,
            Body::Ne2000(nic) => &mut **nic,
            Body::Mediated(monitor) => &mut **monitor,
            Body::Passthrough(direct) => &mut **direct,
            Body::Migratable(direct, _) => &mut **direct,
            Body::Cooperating(direct, _) => &mut **direct,
        }
    }

    /// Has an emulated NIC tell switches where its address is now.
    pub fn announce(&mut self) {
        match self {
            Body::Rtl8139(nic) => nic.announce(),
            Body::Ne2000(nic) => nic.announce(),
            Body::Mediated(_) | Body::Passthrough(_) | Body::Migratable(..) | Body::Cooperating(..) => {}
        }
    }

    /// Other failure policies from now on, of a mediated one.
    pub fn set_policies(&mut self, on_fault: FaultSpec) {
        if let Body::Mediated(monitor) = self {
            monitor.set_policies(on_fault.lower());
        }
    }

    /// Puts another function in the place of one that can be moved; the former is let go. See [`Passthrough::exchange`].
    pub fn exchange(
        &mut self,
        other: Vfio,
        there: &mut dyn Surroundings,
        back: &mut dyn Surroundings,
    ) -> Result<Exchanged, ExchangeError> {
        match self {
            Body::Migratable(direct, _) => {
                direct.exchange(other, there, back).map(|(_, exchanged)| exchanged)
            }
            _ => Err(CarryError::NoGuest.into()),
        }
    }

    /// Lends pages of its registers to its VMM, if they may be. See [`Migratable::lend`].
    pub fn lend(&mut self) -> Option<Lent> {
        match self {
            Body::Migratable(direct, _) => direct.lend(),
            _ => None,
        }
    }

    /// Whether more pages could be lent than are.
    pub fn could_lend_more(&self) -> bool {
        matches!(self, Body::Migratable(direct, _) if direct.could_lend_more())
    }

    /// Nothing that was lent is mapped any more.
    pub fn pages_are_back(&mut self) {
        if let Body::Migratable(direct, _) = self {
            direct.pages_are_back();
        }
    }

    /// Gets another function ready to take the place of one whose driver cooperates. See [`Passthrough::prepare`].
    pub fn prepare(&mut self, other: Vfio) -> Result<Prepared<Vfio>, ExchangeError> {
        self.cooperating()?.prepare(other)
    }

    /// Puts it there, once the guest's one stands still; the former is let go.
    pub fn exchange_at_rest(&mut self, other: Prepared<Vfio>) -> Result<Exchanged, ExchangeError> {
        self.cooperating()?.exchange_at_rest(other).map(|(_, exchanged)| exchanged)
    }

    fn cooperating(&mut self) -> Result<&mut Passthrough<Cooperating<Vfio>>, CarryError> {
        match self {
            Body::Cooperating(direct, _) => Ok(direct),
            _ => Err(CarryError::NoGuest),
        }
    }

    /// One that can be moved. The record says which are: another one has no guest whose state could go along.
    pub fn carry(&mut self) -> Result<&mut dyn Carry, CarryError> {
        match self {
            Body::Migratable(direct, _) => Ok(&mut **direct),
            Body::Cooperating(direct, _) => Ok(&mut **direct),
            _ => Err(CarryError::NoGuest),
        }
    }

    /// What its physical function has for it, of one that can be moved.
    pub fn keeper(&self) -> Option<&Arc<Keeper>> {
        match self {
            Body::Migratable(_, keeper) | Body::Cooperating(_, keeper) => Some(keeper),
            _ => None,
        }
    }

    /// Fills in what can be seen inside.
    pub fn report(&self, report: &mut FunctionReport) {
        report.unusable = self.unusable();
        match self {
            Body::Rtl8139(nic) => {
                report.port = Some(readings::port(nic.port().reading()));
                report.chip = Some(chip(nic.counts()));
            }
            Body::Ne2000(nic) => {
                report.port = Some(readings::port(nic.port().reading()));
                report.chip = Some(chip(nic.counts()));
            }
            Body::Mediated(monitor) => {
                report.model = Some(monitor.model().name.to_owned());
                report.watch = Some(watch_report(monitor.reading(), monitor.events(0)));
            }
            Body::Passthrough(direct) => {
                report.hardware_faults = hardware_faults(direct.faults(), 0);
                report.not_reset = direct.not_reset().map(ToString::to_string);
            }
            Body::Migratable(direct, _) => {
                let hardware = direct.hardware();
                report.model = Some(hardware.model().model.name.to_owned());
                report.hardware_faults = hardware_faults(direct.faults(), hardware.hardware().forbidden());
                report.not_reset = direct.not_reset().map(ToString::to_string);
                report.mapped_pages = hardware.lent().map(|pages| u64::from(pages.count_ones()));
            }
            Body::Cooperating(direct, _) => {
                report.hardware_faults = hardware_faults(direct.faults(), 0);
                report.not_reset = direct.not_reset().map(ToString::to_string);
                report.cooperation = Some(cooperation(direct.hardware()));
            }
        }
    }
}

/// What is known of a driver that cooperates, or should.
fn cooperation(hardware: &Cooperating<Vfio>) -> CooperationReport {
    let refused = hardware.flaw().map(ToString::to_string);
    match hardware.cooperation() {
        Some(Cooperation { entries, moves, replayed }) => {
            CooperationReport { announced: true, refused, entries: entries as u64, moves, replayed }
        }
        None => CooperationReport { refused, ..CooperationReport::default() },
    }
}

/// What a guest or the hardware got wrong, by name.
fn hardware_faults(faults: DirectFaults, forbidden: u64) -> BTreeMap<String, u64> {
    let counts = [("accesses", faults.accesses), ("resets", faults.resets), ("forbidden", forbidden)];
    counts.into_iter().filter(|(_, n)| *n > 0).map(|(name, n)| (name.to_owned(), n)).collect()
}

/// What a monitor tells of itself.
fn watch_report(reading: Reading, events: Vec<MonitorEvent>) -> WatchReport {
    let Reading { totals, states, reusable, stopped, gone, page_used, faults, .. } = reading;
    let region = |(region, state): (&str, &str)| RegionReport { region: region.into(), state: state.into() };
    let event = |event: MonitorEvent| EventReport {
        number: event.number,
        at_us: event.at,
        what: in_words(event.what),
    };
    WatchReport {
        states: states.into_iter().map(region).collect(),
        reusable,
        stopped,
        gone,
        shadow_page: page_used,
        accesses: totals.accesses,
        hooked: totals.hooked,
        hooked_percent: 100.0 * totals.hooked as f64 / totals.accesses.max(1) as f64,
        straight: totals.straight,
        kept: totals.kept,
        updates: totals.updates,
        dma_vetted: totals.descriptors,
        dma_bytes: totals.vetted_bytes,
        port_bytes: totals.port_bytes,
        interrupts: totals.heard,
        interrupts_given: totals.given,
        denied: totals.denied,
        faults: faults
            .into_iter()
            .map(|fault| WatchFaultReport {
                name: fault.name.to_owned(),
                cause: fault.cause.name().to_owned(),
                count: fault.count,
                last: fault.last,
            })
            .collect(),
        events: events.into_iter().map(event).collect(),
    }
}

fn in_words(what: MonitorEventKind) -> String {
    match what {
        MonitorEventKind::Moved { region, from, to } => format!("{region}: {from} -> {to}"),
        MonitorEventKind::Fault { name, cause, text } => format!("denied ({}): {name}: {text}", cause.name()),
        MonitorEventKind::Reset => "reset by the guest".to_owned(),
        MonitorEventKind::Parked => "quiescent".to_owned(),
        MonitorEventKind::Resumed => "resumed".to_owned(),
    }
}

/// What an emulated NIC tells of itself.
fn chip(counts: ChipCounts) -> ChipReport {
    let Drops { disabled, filtered, no_room, fault, malformed, refused } = counts.drops;
    let drops = [
        ("disabled", disabled),
        ("filtered", filtered),
        ("no_room", no_room),
        ("fault", fault),
        ("malformed", malformed),
        ("refused", refused),
    ];
    ChipReport {
        sent: counts.sent,
        sent_bytes: counts.sent_bytes,
        received: counts.received,
        received_bytes: counts.received_bytes,
        drops: drops.into_iter().filter(|(_, n)| *n > 0).map(|(name, n)| (name.to_owned(), n)).collect(),
        wrong_dma: counts.faults,
        interrupts: counts.interrupts,
        resets: counts.resets,
    }
}

impl Device for Body {
    fn info(&self) -> &DeviceInfo {
        self.inner().info()
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        self.inner_mut().access(at, op)
    }

    fn active(&self) -> QueueSet {
        self.inner().active()
    }

    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
        self.inner_mut().activate(activation)
    }

    fn deactivate(&mut self, parked: Parked) {
        self.inner_mut().deactivate(parked);
    }

    fn quiescence(&mut self) -> Quiescence {
        self.inner_mut().quiescence()
    }

    fn suspend(&mut self) -> Result<(), DeviceError> {
        self.inner_mut().suspend()
    }

    fn save(&self, proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        self.inner().save(proof)
    }

    fn load(&mut self, proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        self.inner_mut().load(proof, state)
    }

    fn reset(&mut self, proof: &QuiescenceProof) {
        self.inner_mut().reset(proof);
        if let Some(keeper) = self.keeper() {
            keeper.was_reset();
        }
    }

    fn apply(&mut self, queues: &QueueSet, change: &Change) {
        self.inner_mut().apply(queues, change);
    }

    fn config_changed(&mut self) {
        self.inner_mut().config_changed();
    }
}

impl Function for Body {
    fn bars(&self) -> &BarMap {
        self.inner().bars()
    }

    fn config_size(&self) -> u64 {
        self.inner().config_size()
    }

    fn irqs(&self) -> Irqs {
        self.inner().irqs()
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        self.inner_mut().wire(irq, vector, wire)
    }

    fn grow_memory(&mut self, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        self.inner_mut().grow_memory(map)
    }

    fn replace_memory(&mut self, proof: &QuiescenceProof, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        self.inner_mut().replace_memory(proof, map)
    }

    fn attention(&self) -> Option<&Arc<OwnedFd>> {
        self.inner().attention()
    }

    fn attend(&mut self) {
        self.inner_mut().attend();
    }

    fn admit(&mut self, proof: &QuiescenceProof) -> Result<(), NotReady> {
        self.inner_mut().admit(proof)?;
        let Some(keeper) = self.keeper() else { return Ok(()) };
        // With what a former guest was allowed nobody else gets it.
        keeper.begins().map_err(|error| NotReady::Unusable(format!("its physical function: {error}")))
    }

    fn dismiss(&mut self) {
        self.inner_mut().dismiss();
        if let Some(Err(error)) = self.keeper().map(|keeper| keeper.ends()) {
            tracing::warn!(%error, "what the physical function had for a function is not put back: the next VMM's start tries again");
        }
    }

    fn unusable(&self) -> Option<String> {
        self.inner().unusable()
    }

    fn use_shadows(&mut self, yes: bool) {
        self.inner_mut().use_shadows(yes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ioplane_passthrough::monitor::{Cause, FaultCount, MonitorTotals};

    #[test]
    fn what_a_monitor_tells_is_told_on() {
        let totals = MonitorTotals {
            accesses: 200,
            hooked: 50,
            descriptors: 7,
            denied: 2,
            ..MonitorTotals::default()
        };
        let fault =
            FaultCount { name: "descriptor-outside", cause: Cause::Dma, count: 2, last: "at 0x1000".into() };
        let reading = Reading {
            totals,
            states: vec![("transmit", "Idle")],
            reusable: true,
            stopped: true,
            gone: false,
            page_used: true,
            faults: vec![fault],
            next_event: 3,
        };
        let fault = MonitorEventKind::Fault {
            name: "descriptor-outside",
            cause: Cause::Dma,
            text: "at 0x1000".into(),
        };
        let events = vec![
            MonitorEvent {
                number: 1,
                at: 5,
                what: MonitorEventKind::Moved { region: "transmit", from: "Idle", to: "Run" },
            },
            MonitorEvent { number: 2, at: 9, what: fault },
        ];
        let watch = watch_report(reading, events);
        assert_eq!((watch.hooked_percent, watch.dma_vetted, watch.stopped), (25.0, 7, true));
        assert!(watch.shadow_page);
        assert_eq!((watch.faults[0].cause.as_str(), watch.faults[0].count), ("dma", 2));
        assert_eq!(watch.events[0].what, "transmit: Idle -> Run");
        assert_eq!(watch.events[1].what, "denied (dma): descriptor-outside: at 0x1000");
        assert_eq!((watch.events[1].number, watch.events[1].at_us), (2, 9));
    }
}
