//! The monitor: hardware driven by a guest's stock driver, mediated by a state model. It knows no device.
//!
//! ```text
//!   guest --access--> access.rs -hooked?--> Machine (ask) --> check.rs --> hardware --> Machine (commit)
//!                        '------ not hooked -----------------------------> hardware
//!   card.rs       the half that outlives guests       guest.rs  the half that goes with one
//!   feed.rs       rings and blocks as the guest's registers have them
//!   rings.rs      descriptors copied once, checked, translated; statuses copied back
//!   rings/queue.rs  the same of rings with head and tail, whose descriptors have formats
//!   port.rs       memory of the device, behind a data port     words.rs  tables, and counters that reading clears
//!   interrupt.rs  hardware's status -> virtual status & virtual mask -> INTA# of the guest
//!   quiescence.rs recognised quiescence: halt, look once more, remember; and back
//!   wipe.rs       memory of the device, emptied for whoever comes next
//!   derive.rs     in which states a device is after it was brought back, by the writes that did it
//!   state.rs      what is remembered, as bytes
//!   dma_window.rs guest memory in the IOMMU    page.rs  shadow reads    policy.rs, counts.rs
//! ```
//!
//! The names of the paper (VPIO, 3.4 and 5.1): `init_model` is [`Monitor::new`], `update_model` is `Machine::ask` and `commit` on
//! each hooked access and interrupt, `check_model` is `Machine::reusable` and the checks of a transition, `deinit_model` is
//! [`Monitor::into_hardware`]; ports are hooked and unhooked by the states of the table; `port_access` is [`Hardware`].
//!
//! What holds whatever the guest does: the hardware is only told bus addresses of the monitor's own memory and of checked guest
//! memory, and the IOMMU maps nothing else. Card memory is wiped whenever the device changes hands, so nobody reads what a
//! predecessor left there; a wipe is simpler than a map of foreign pages and costs a millisecond a change instead of a hooked data
//! port. Through the data port a guest moves what was checked and no byte more, from where the card is, not from where it was told
//! to be.

mod access;
mod banks;
mod bus;
mod card;
mod check;
mod counts;
mod derive;
mod dma_window;
mod feed;
mod function;
mod guest;
mod interrupt;
mod page;
mod plan;
mod policy;
mod port;
mod quiescence;
mod rings;
mod state;
mod wipe;
mod words;

use ioplane_device::DeviceInfo;
use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::{MapError, MappingError, MemoryRegion};
use ioplane_model::{Machine, ModelFault, ModelInput, Moves, Reads, StateModel};
use ioplane_pci::{Bar, BarMap, PAGE, Space};

use bus::Bus;
use card::Card;
use guest::Guest;
use page::Page;
use plan::MonitorPlan;

pub use counts::{EVENTS, FaultCount, MonitorEvent, MonitorEventKind, MonitorFault, MonitorTotals, Reading};
pub use dma_window::{OWN, WINDOW};
pub use policy::{Cause, Policies, Policy, PolicyError};
pub use state::{CardV1, MonitorStateV1, TransferV1};

/// What can be chosen about a monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorOptions {
    /// The device's name.
    pub name: String,
    /// What becomes of what is denied.
    pub policies: Policies,
    /// Whether to offer a page of registers for shadow reads, where the model's BAR is memory.
    pub shadows: bool,
}

impl MonitorOptions {
    /// Denials are ignored, shadow pages offered.
    pub fn new(name: &str) -> Self {
        MonitorOptions { name: name.to_owned(), policies: Policies::default(), shadows: true }
    }
}

/// Why hardware could not be mediated.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// The hardware.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelFault),
    /// The model asks for what this monitor does not do.
    #[error("model {model} does not fit the monitor: {why}")]
    Unfit {
        /// Which.
        model: &'static str,
        /// What it asks for.
        why: String,
    },
    /// The function is another.
    #[error("model {model} is not of {function} ({vendor:04x}:{device:04x} revision {revision:02x})")]
    Other {
        /// Which model.
        model: &'static str,
        /// Which function.
        function: String,
        /// Its vendor.
        vendor: u16,
        /// Its device.
        device: u16,
        /// Its revision.
        revision: u8,
    },
    /// Memory of our own.
    #[error("memory for the copies of descriptors: {0}")]
    Map(#[from] MapError),
    /// Memory of our own.
    #[error("memory for the page of registers: {0}")]
    Mapping(#[from] MappingError),
}

/// A mediated physical function: an [`ioplane_pci::Function`] for any host. In two halves: what is there whoever the guest is (`card.rs`), and
/// what goes with the guest (`guest.rs`).
pub struct Monitor<H: Hardware> {
    card: Card<H>,
    guest: Guest,
}

/// All of a monitor but the hardware, so that whatever speaks against the hardware is found before it is taken.
struct Halves {
    info: DeviceInfo,
    model: &'static StateModel,
    plan: MonitorPlan,
    own: Option<MemoryRegion>,
    policies: Policies,
    guest: Guest,
}

impl Halves {
    fn new<H: Hardware>(
        hardware: &H,
        model: &'static StateModel,
        options: MonitorOptions,
    ) -> Result<Self, MonitorError> {
        let machine = Machine::new(model)?;
        let identity = hardware.identity();
        let fits = |id: &ioplane_model::Id| {
            (id.vendor, id.device) == (identity.vendor, identity.device)
                && id.revisions.is_none_or(|(low, high)| (low..=high).contains(&identity.revision))
        };
        if !model.ids.iter().any(fits) {
            return Err(MonitorError::Other {
                model: model.name,
                function: hardware.name().to_owned(),
                vendor: identity.vendor,
                device: identity.device,
                revision: identity.revision,
            });
        }
        let unfit = |why: String| MonitorError::Unfit { model: model.name, why };
        if let Some(why) = plan::complaint(model) {
            return Err(unfit(why));
        }
        let plan = MonitorPlan::new(model, &machine)
            .ok_or_else(|| unfit("it names what it does not have".into()))?;
        let Some(registers) = hardware.bars().bar(model.bar) else {
            return Err(unfit(format!("{} has no BAR {}", hardware.name(), model.bar)));
        };
        if registers.size < u64::from(model.size) {
            let why = format!("BAR {} of {} has {} bytes only", model.bar, hardware.name(), registers.size);
            return Err(unfit(why));
        }
        let effects = model.registers.iter().any(|register| register.reads == Reads::Effect);
        let mut page = None;
        let mut bars = BarMap::new();
        for (index, bar) in hardware.bars().iter() {
            let mediated = index == model.bar || model.aliases.contains(&index);
            let small = bar.space != Space::Port && bar.size <= PAGE;
            let shown = mediated && small && options.shadows && page.is_none() && !effects;
            let size = match bar.space {
                Space::Port => bar.size,
                _ if shown => page::BAR,
                _ => bar.size.max(PAGE),
            };
            let mut ours = Bar::new(size, bar.space);
            ours.prefetchable = bar.prefetchable;
            if shown {
                let shadow = Page::new()?;
                if let Ok(offered) = shadow.offered_by(ours.clone()) {
                    (ours, page) = (offered, Some(shadow));
                }
            }
            bars = bars.with(index, ours);
        }
        let (rings, own) = rings::make(model.rings)?;
        let info = DeviceInfo { name: options.name, kind: model.name, queues: 0 };
        let guest = Guest::new(machine, &identity, (bars, page), rings);
        Ok(Halves { info, model, plan, own, policies: options.policies, guest })
    }

    fn around<H: Hardware>(self, hardware: H) -> Monitor<H> {
        let Halves { info, model, plan, own, policies, guest } = self;
        Monitor { card: Card::new(info, Bus::new(hardware, model.bar), model, plan, own, policies), guest }
    }
}

impl<H: Hardware> Monitor<H> {
    /// Takes hardware over: resets it, wipes its memory, listens to its interrupt. It runs when its host activates it.
    pub fn new(
        hardware: H,
        model: &'static StateModel,
        options: MonitorOptions,
    ) -> Result<Self, MonitorError> {
        let halves = Halves::new(&hardware, model, options)?;
        let mut monitor = halves.around(hardware);
        monitor.take_over()?;
        Ok(monitor)
    }

    /// The hardware as nobody's: reset, deaf to the network, its registers open, its interrupt ours.
    fn take_over(&mut self) -> Result<(), MonitorError> {
        self.open_registers()?;
        let hardware = self.card.bus.hardware();
        if let Some(own) = &self.card.own {
            hardware.map(OWN, own)?;
        }
        self.reset_hardware()?;
        self.card.bus.hardware().listen()?;
        self.remember_fresh();
        self.settle_faults();
        if self.card.bus.gone() { Err(self.card.lost().into()) } else { Ok(()) }
    }

    /// Its registers answer, and it is off the bus.
    fn open_registers(&mut self) -> Result<(), HardwareError> {
        use ioplane_pci::spec;
        let open = spec::COMMAND_IO | spec::COMMAND_MEMORY;
        let hardware = self.card.bus.hardware();
        let mut command = [0; 2];
        hardware.read_config(spec::COMMAND as u64, &mut command)?;
        let command =
            (u16::from_le_bytes(command) | open) & !spec::COMMAND_MASTER & !spec::COMMAND_INTX_DISABLE;
        hardware.write_config(spec::COMMAND as u64, &command.to_le_bytes())
    }

    /// Gives the hardware back: its memory wiped, reset, with nothing mapped for it. Dropping the monitor does the same.
    pub fn into_hardware(mut self) -> H {
        self.let_go();
        self.card.bus.give_back().expect("it is given back once: this takes the monitor")
    }

    fn let_go(&mut self) {
        let _ = self.card.bus.hardware().master(false);
        // What fails here will be noticed by whoever takes it over next.
        let _ = self.wipe();
        let _ = self.reset_hardware();
        self.guest.dma.clear(self.card.bus.hardware());
        if let Some(own) = &self.card.own {
            let _ = self.card.bus.hardware().unmap(OWN, own.len());
        }
    }

    /// The model that runs.
    pub fn model(&self) -> &'static StateModel {
        self.card.model
    }

    /// The failure policies in force.
    pub fn policies(&self) -> Policies {
        self.card.policies
    }

    /// Other failure policies, from now on.
    pub fn set_policies(&mut self, policies: Policies) {
        self.card.policies = policies;
    }

    /// Everything that it counts, and where the model is.
    pub fn reading(&self) -> Reading {
        let totals = MonitorTotals {
            updates: self.guest.machine.updates(),
            given: self.card.counts.totals.given + self.guest.line.signals(),
            ..self.card.counts.totals.clone()
        };
        Reading {
            totals,
            states: self.guest.machine.states().map(|(region, state)| (region, state.name)).collect(),
            reusable: self.guest.machine.reusable(),
            page_used: self.guest.page.as_ref().is_some_and(Page::used),
            stopped: self.guest.stopped,
            gone: self.card.bus.gone(),
            faults: self.card.counts.faults().to_vec(),
            next_event: self.card.counts.next(),
        }
    }

    /// The events that are still kept, from number `since` on: at most [`EVENTS`].
    pub fn events(&self, since: u64) -> Vec<MonitorEvent> {
        self.card.counts.events(since)
    }

    /// Tells the model of something that has happened. What it would have to check first cannot be undone any more, and is denied
    /// where it matters: at the registers.
    fn tell(&mut self, seen: ModelInput) {
        let pending = self.guest.machine.ask(seen);
        let moves = self.guest.machine.commit(pending);
        self.moved(&moves);
    }

    /// Notes which regions moved.
    fn moved(&mut self, moves: &Moves) {
        if moves.is_empty() {
            return;
        }
        for (region, from, to) in self.guest.machine.moves(moves) {
            self.card.counts.happened(MonitorEventKind::Moved { region, from, to });
        }
    }

    /// A denial, or trouble with the hardware: counted, named, and answered as the policy says.
    fn fault(&mut self, fault: MonitorFault) {
        let policy = self.card.policies.of(fault.cause);
        let hardware = fault.cause == Cause::Hardware;
        let gone = fault.name == "gone";
        self.card.counts.fault(fault);
        match policy {
            Policy::Ignore => {}
            Policy::Error => {
                let error = self.card.model.interrupts.error;
                // The model does not hear of it: it follows the hardware, which knows nothing of this.
                self.guest.interrupts.status |= error;
                self.show_status();
                self.level();
            }
            Policy::Stop => {
                if !self.guest.stopped {
                    self.guest.stopped = true;
                    // It does nothing for this guest any more.
                    self.card.silence();
                    self.guest.cry();
                }
            }
        }
        if hardware && gone {
            self.guest.line.set(false);
            self.show_dead();
            self.guest.cry();
        }
    }

    /// The guest has left, and its half with it: nothing that it has written, granted or begun is there for the next one.
    fn change_guest(&mut self) {
        let next = self.guest.leave(self.card.bus.hardware());
        let gone = std::mem::replace(&mut self.guest, next);
        self.card.counts.totals.given += gone.line.signals();
        self.guest.reset_at = self.card.counts.totals.accesses;
    }

    /// Counts what went wrong below since the last call.
    fn settle_faults(&mut self) {
        while let Some(faults) = self.card.bus.faults() {
            for fault in faults {
                self.fault(fault);
            }
        }
    }
}

impl<H: Hardware> std::fmt::Debug for Monitor<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor")
            .field("info", &self.card.info)
            .field("model", &self.card.model.name)
            .finish_non_exhaustive()
    }
}

impl<H: Hardware> Drop for Monitor<H> {
    /// Whoever gets the hardware next, a driver of the host included, finds nothing of the guest's in it.
    fn drop(&mut self) {
        if self.card.bus.is_here() {
            self.let_go();
        }
    }
}
