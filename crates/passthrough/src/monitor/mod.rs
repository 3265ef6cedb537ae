//! The monitor: hardware driven by a guest's stock driver, under watch of a state model. It knows no device.
//!
//! ```text
//!   guest --access--> guest.rs --hooked?--> Machine (ask) --> check.rs --> hardware --> Machine (commit)
//!                        '------ not hooked -----------------------------> hardware
//!   feed.rs       rings and blocks as the guest's registers have them
//!   rings.rs      descriptors copied once, checked, translated; statuses copied back
//!   port.rs       memory of the device, behind a data port
//!   interrupt.rs  hardware's status -> virtual status & virtual mask -> INTA# of the guest
//!   still.rs      recognised quiescence: halt, look once more, remember; and back
//!   derive.rs     in which states a device is after it was brought back, by the writes that did it
//!   state.rs      what is remembered, as bytes
//!   ground.rs     guest memory in the IOMMU    page.rs  shadow reads    policy.rs, counts.rs
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

mod banks;
mod bus;
mod check;
mod counts;
mod derive;
mod feed;
mod function;
mod ground;
mod guest;
mod interrupt;
mod page;
mod plan;
mod policy;
mod port;
mod rings;
mod state;
mod still;

use std::sync::Arc;

use ioplane_device::{DeviceInfo, Interrupt};
use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::{MapError, MappingError, Region as Memory};
use ioplane_model::{Machine, ModelFault, Moves, Reads, Seen, StateModel, Transfer};
use ioplane_pci::{Bar, BarMap, ConfigSpace, Line, PAGE, Space};

use bus::Bus;
use counts::Counts;
use ground::Ground;
use page::Page;
use plan::Plan;
use rings::ShadowRing;
use still::Remembered;

pub use counts::{EVENTS, Fault, FaultCount, Happening, Reading, Totals, What};
pub use ground::{OWN, WINDOW};
pub use policy::{Cause, Policies, Policy, PolicyError};
pub use state::{CardV1, StateV1, TransferV1};

/// What can be chosen about a monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The device's name.
    pub name: String,
    /// What becomes of what is denied.
    pub policies: Policies,
    /// Whether to offer a page of registers for shadow reads, where the model's BAR is memory.
    pub shadows: bool,
}

impl Options {
    /// Denials are ignored, shadow pages offered.
    pub fn new(name: &str) -> Self {
        Options { name: name.to_owned(), policies: Policies::default(), shadows: true }
    }
}

/// Why hardware could not be put under watch.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// The hardware.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelFault),
    /// The model asks for what this monitor does not do.
    #[error("model {model} cannot be watched: {why}")]
    Unwatchable {
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

/// The interrupt status and mask as the guest sees them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Virtual {
    status: u32,
    mask: u32,
    /// Live bits of the hardware's status when it was last read.
    live: u32,
}

/// A block of guest memory that the device writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct BlockState {
    /// What the guest wrote.
    low: u32,
    high: u32,
    /// Being written by the device: guest address.
    busy: Option<u64>,
}

/// A physical function under watch: an [`ioplane_pci::Function`] for any host.
pub struct Monitor<H: Hardware> {
    info: DeviceInfo,
    bus: Bus<H>,
    model: &'static StateModel,
    machine: Machine,
    plan: Plan,
    bars: BarMap,
    config: ConfigSpace,
    line: Line,
    ground: Ground,
    rings: Vec<ShadowRing>,
    /// The rings' memory, mapped for the hardware.
    own: Option<Memory>,
    blocks: Vec<BlockState>,
    transfer: Option<Transfer>,
    /// It has just ended.
    all_moved: bool,
    /// Whether the card's address, low and high byte, is what was last written.
    address_told: (bool, bool),
    interrupts: Virtual,
    /// Registers that are shown as another card had them: one bit each. Their values are the model's.
    recalled: u128,
    /// The hardware's INTA# is masked, by itself, until it is unmasked.
    masked: bool,
    /// Interrupts in a row that meant nothing.
    idle: u32,
    storm: bool,
    policies: Policies,
    /// The policy `stop` has struck.
    stopped: bool,
    error_call: Option<Arc<dyn Interrupt>>,
    /// Its last reset failed: nobody knows what the hardware would do. It is left alone, and answers with all ones, until one succeeds.
    unusable: Option<String>,
    page: Option<Page>,
    counts: Counts,
    /// The device stands still: how it is to go on.
    parked: Option<Box<Remembered>>,
}

impl<H: Hardware> Monitor<H> {
    /// Takes hardware over: resets it, wipes its memory, listens to its interrupt. It runs when its host activates it.
    pub fn new(hardware: H, model: &'static StateModel, options: Options) -> Result<Self, MonitorError> {
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
        let unwatchable = |why: String| MonitorError::Unwatchable { model: model.name, why };
        if let Some(why) = plan::complaint(model) {
            return Err(unwatchable(why));
        }
        let plan =
            Plan::new(model, &machine).ok_or_else(|| unwatchable("it names what it does not have".into()))?;
        let Some(registers) = hardware.bars().bar(model.bar) else {
            return Err(unwatchable(format!("{} has no BAR {}", hardware.name(), model.bar)));
        };
        if registers.size < u64::from(model.size) {
            let why = format!("BAR {} of {} has {} bytes only", model.bar, hardware.name(), registers.size);
            return Err(unwatchable(why));
        }
        let effects = model.registers.iter().any(|register| register.reads == Reads::Effect);
        let mut page = None;
        let mut bars = BarMap::new();
        for (index, bar) in hardware.bars().iter() {
            let size = if bar.space == Space::Port { bar.size } else { bar.size.max(PAGE) };
            let mut ours = Bar::new(size, bar.space);
            ours.prefetchable = bar.prefetchable;
            let watched = index == model.bar || model.aliases.contains(&index);
            if watched && options.shadows && page.is_none() && !effects && bar.space != Space::Port {
                let (shadow, pages) = Page::new()?;
                if let Ok(offered) = ours.clone().with_pages(pages) {
                    (ours, page) = (offered, Some(shadow));
                }
            }
            bars = bars.with(index, ours);
        }
        let (rings, own) = rings::make(model.rings)?;
        let mut monitor = Monitor {
            info: DeviceInfo { name: options.name, kind: model.name, queues: 0 },
            config: ConfigSpace::new(&identity, &bars, function::IRQS),
            bus: Bus::new(hardware, model.bar),
            model,
            machine,
            plan,
            bars,
            line: Line::new(),
            ground: Ground::new(!model.rings.is_empty() || !model.blocks.is_empty()),
            rings,
            own,
            blocks: vec![BlockState::default(); model.blocks.len()],
            transfer: None,
            all_moved: false,
            address_told: (false, false),
            interrupts: Virtual::default(),
            recalled: 0,
            masked: false,
            idle: 0,
            storm: false,
            policies: options.policies,
            stopped: false,
            error_call: None,
            unusable: None,
            page,
            counts: Counts::new(),
            parked: None,
        };
        monitor.take_over()?;
        Ok(monitor)
    }

    /// The hardware as nobody's: reset, deaf to the network, its registers open, its interrupt ours.
    fn take_over(&mut self) -> Result<(), MonitorError> {
        use ioplane_pci::spec;
        let open = spec::COMMAND_IO | spec::COMMAND_MEMORY;
        let hardware = self.bus.hardware();
        let mut command = [0; 2];
        hardware.read_config(spec::COMMAND as u64, &mut command)?;
        let command =
            (u16::from_le_bytes(command) | open) & !spec::COMMAND_MASTER & !spec::COMMAND_INTX_DISABLE;
        hardware.write_config(spec::COMMAND as u64, &command.to_le_bytes())?;
        if let Some(own) = &self.own {
            hardware.map(OWN, own)?;
        }
        self.reset_hardware()?;
        self.bus.hardware().listen()?;
        self.remember_fresh();
        self.settle_faults();
        if self.bus.gone() { Err(self.lost().into()) } else { Ok(()) }
    }

    /// Gives the hardware back: its memory wiped, reset, with nothing mapped for it. Dropping the monitor does the same.
    pub fn into_hardware(mut self) -> H {
        self.let_go();
        self.bus.give_back().expect("it is given back once: this takes the monitor")
    }

    fn let_go(&mut self) {
        let _ = self.bus.hardware().master(false);
        self.wipe();
        // What fails here will be noticed by whoever takes it over next.
        let _ = self.reset_hardware();
        self.ground.clear(self.bus.hardware());
        if let Some(own) = &self.own {
            let _ = self.bus.hardware().unmap(OWN, own.len());
        }
    }

    /// The model that runs.
    pub fn model(&self) -> &'static StateModel {
        self.model
    }

    /// The failure policies in force.
    pub fn policies(&self) -> Policies {
        self.policies
    }

    /// Other failure policies, from now on.
    pub fn set_policies(&mut self, policies: Policies) {
        self.policies = policies;
    }

    /// Everything that it counts, and where the model is.
    pub fn reading(&self) -> Reading {
        let totals = Totals {
            updates: self.machine.updates(),
            given: self.line.signals(),
            ..self.counts.totals.clone()
        };
        Reading {
            totals,
            states: self.machine.states().map(|(region, state)| (region, state.name)).collect(),
            reusable: self.machine.reusable(),
            stopped: self.stopped,
            gone: self.bus.gone(),
            faults: self.counts.faults().to_vec(),
            next_event: self.counts.next(),
        }
    }

    /// The events that are still kept, from number `since` on: at most [`EVENTS`].
    pub fn events(&self, since: u64) -> Vec<Happening> {
        self.counts.events(since)
    }

    /// Tells the model of something that has happened. What it would have to check first cannot be undone any more, and is denied
    /// where it matters: at the registers.
    fn tell(&mut self, seen: Seen) {
        let pending = self.machine.ask(seen);
        let moves = self.machine.commit(pending);
        self.moved(&moves);
    }

    /// Notes which regions moved.
    fn moved(&mut self, moves: &Moves) {
        if moves.is_empty() {
            return;
        }
        for (region, from, to) in self.machine.moves(moves) {
            self.counts.happened(What::Moved { region, from, to });
        }
    }

    /// A denial, or trouble with the hardware: counted, named, and answered as the policy says.
    fn fault(&mut self, fault: Fault) {
        let policy = self.policies.of(fault.cause);
        let hardware = fault.cause == Cause::Hardware;
        let gone = fault.name == "gone";
        self.counts.fault(fault);
        match policy {
            Policy::Ignore => {}
            Policy::Error => {
                let error = self.model.interrupts.error;
                // The model does not hear of it: it follows the hardware, which knows nothing of this.
                self.interrupts.status |= error;
                self.show_status();
                self.level();
            }
            Policy::Stop => {
                if !self.stopped {
                    self.stopped = true;
                    // It does nothing for this guest any more.
                    let silenced = self.bus.hardware().master(false);
                    self.bus.judge(silenced);
                    self.cry();
                }
            }
        }
        if hardware && gone {
            self.line.set(false);
            self.show_dead();
            self.cry();
        }
    }

    /// Tells the VMM that something is wrong with the function.
    fn cry(&self) {
        if let Some(call) = &self.error_call {
            call.signal();
        }
    }

    /// Whether it is beyond use: gone, or not to be reset.
    fn dead(&self) -> bool {
        self.bus.gone() || self.unusable.is_some()
    }

    /// Counts what went wrong below since the last call.
    fn settle_faults(&mut self) {
        while let Some(faults) = self.bus.faults() {
            for fault in faults {
                self.fault(fault);
            }
        }
    }
}

impl<H: Hardware> std::fmt::Debug for Monitor<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor")
            .field("info", &self.info)
            .field("model", &self.model.name)
            .finish_non_exhaustive()
    }
}

impl<H: Hardware> Drop for Monitor<H> {
    /// Whoever gets the hardware next, a driver of the host included, finds nothing of the guest's in it.
    fn drop(&mut self) {
        if self.bus.is_here() {
            self.let_go();
        }
    }
}
