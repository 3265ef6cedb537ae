//! Simulated hardware: an emulated function behind [`Hardware`], with an IOMMU in between and troubles on demand.
//!
//! ```text
//!   Monitor | Passthrough --Hardware--> Simulated --registers--> F: Function (an emulated NIC)
//!   test ------------- Bench ------'   '--- map, unmap ---> the GuestMap of F: bus addresses, nothing else
//! ```
//!
//! Nothing happens by itself: frames move when the hardware is touched or the test calls [`Bench::tick`], or whenever its owner listens
//! to its interrupt ([`Simulated::by_itself`]).

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_device::{Access, AfterStop, Effect, Interrupt, Quiescent, RegisterAddress};
use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::{GuestMap, GuestView, MemoryRegion};
use ioplane_passthrough::monitor::WINDOW;
use ioplane_pci::{BarMap, Function, Identity, Irq, Irqs, Wire, WireError, spec};

/// What is wrong with the hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trouble {
    #[default]
    None,
    /// Unplugged: reads as all ones, takes nothing.
    Gone,
    /// Never answers: registers keep what was written last, and nothing comes of it.
    Deaf,
    /// Interrupts for ever.
    Mad,
    /// Its driver in the kernel fails every call.
    Broken,
    /// It fails every access to the register at this offset, and nothing else.
    BrokenAt(u64),
    /// It fails the first access to the register at this offset, and nothing else; after that, nothing is wrong.
    BrokenOnceAt(u64),
}

/// What the hardware saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Touches {
    pub reads: u64,
    pub writes: u64,
    pub interrupts: u64,
    /// Times that it was reset through the bus.
    pub resets: u64,
}

#[derive(Debug)]
struct EventInterrupt(Arc<OwnedFd>);

impl Interrupt for EventInterrupt {
    fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// Writes to the register at an offset that wait: BAR and bytes.
type Held = (u64, Vec<(u8, Vec<u8>)>);

struct Inner<F: Function> {
    function: Quiescent<F>,
    mapped: Vec<MemoryRegion>,
    trouble: Trouble,
    kept: HashMap<(u8, u64), u8>,
    touches: Touches,
    resets: bool,
    /// Writes to these registers wait for [`Bench::release`].
    held: Option<Held>,
    /// Deaf while its owner's own memory, as it reaches it, has a word with this bit in it, at each sixteen bytes.
    clings: u32,
}

impl<F: Function> Inner<F> {
    fn access(&mut self, at: RegisterAddress, mut op: Access<'_>) {
        self.function.with(|function, proof| match function.access(at, again(&mut op)) {
            Effect::Deactivate(_, AfterStop::Reset) => function.reset(proof),
            Effect::None | Effect::Activate(_) | Effect::Deactivate(..) => {}
        });
    }

    /// What is wrong with it now.
    fn trouble(&self) -> Trouble {
        let owned = |region: &MemoryRegion| {
            let map = GuestMap::new(vec![region.clone()]).expect("one region");
            let view = GuestView::new(Arc::new(map));
            let mut words = (0..region.len()).step_by(16).map(|at| view.bytes(region.gpa() + at));
            words.any(|word| word.is_ok_and(|word| u32::from_le_bytes(word) & self.clings != 0))
        };
        let mut own = self.mapped.iter().filter(|region| region.gpa() < WINDOW);
        if self.clings != 0 && own.any(owned) { Trouble::Deaf } else { self.trouble }
    }

    /// After a failed access: what fails once works from here on.
    fn heal(&mut self) {
        if matches!(self.trouble, Trouble::BrokenOnceAt(_)) {
            self.trouble = Trouble::None;
        }
    }

    /// Tells the function what its bus addresses are now.
    fn remap(&mut self) {
        let map = Arc::new(GuestMap::new(self.mapped.clone()).expect("an IOMMU refuses overlaps first"));
        self.function.with(|function, proof| {
            function.replace_memory(proof, map).expect("an emulated function takes any memory");
        });
    }

    fn tick(&mut self) {
        if matches!(self.trouble, Trouble::Gone | Trouble::Deaf | Trouble::Broken) {
            return;
        }
        self.function.with(|function, _| function.attend());
    }
}

fn again<'a>(op: &'a mut Access<'_>) -> Access<'a> {
    match op {
        Access::Read(bytes) => Access::Read(bytes),
        Access::Write(bytes) => Access::Write(bytes),
    }
}

/// An emulated function as hardware.
pub struct Simulated<F: Function> {
    inner: Arc<Mutex<Inner<F>>>,
    interrupt: Arc<EventInterrupt>,
    /// Readable when the interrupt fires or the function has something to do, if it moves by itself.
    both: Option<Arc<OwnedFd>>,
    name: String,
    identity: Identity,
    bars: BarMap,
    irqs: Irqs,
}

/// The test's hold on simulated hardware.
pub struct Bench<F: Function> {
    inner: Arc<Mutex<Inner<F>>>,
    interrupt: Arc<EventInterrupt>,
}

impl<F: Function> Clone for Bench<F> {
    fn clone(&self) -> Self {
        Bench { inner: self.inner.clone(), interrupt: self.interrupt.clone() }
    }
}

impl<F: Function> Clone for Simulated<F> {
    /// The same hardware, for who looks at it when its owner has given it up.
    fn clone(&self) -> Self {
        Simulated {
            inner: self.inner.clone(),
            interrupt: self.interrupt.clone(),
            both: self.both.clone(),
            name: self.name.clone(),
            identity: self.identity,
            bars: self.bars.clone(),
            irqs: self.irqs,
        }
    }
}

fn lock<F: Function>(inner: &Mutex<Inner<F>>) -> MutexGuard<'_, Inner<F>> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<F: Function> Bench<F> {
    /// Lets the hardware do what it has to do.
    pub fn tick(&self) {
        lock(&self.inner).tick();
    }

    /// Gives it a trouble, or takes it away.
    pub fn trouble(&self, trouble: Trouble) {
        lock(&self.inner).trouble = trouble;
        if trouble == Trouble::Mad {
            self.interrupt.signal();
        }
    }

    /// Whether it can be reset through the bus; at first it cannot.
    pub fn can_reset(&self, yes: bool) {
        lock(&self.inner).resets = yes;
    }

    /// From now on a write to the register at `offset` waits: a card that is slow to start.
    pub fn hold(&self, offset: u64) {
        lock(&self.inner).held = Some((offset, Vec::new()));
    }

    /// Carries out what was held, and holds no more. How many writes these were.
    pub fn release(&self) -> usize {
        let mut inner = lock(&self.inner);
        let Some((offset, writes)) = inner.held.take() else { return 0 };
        for (bar, bytes) in &writes {
            inner.access(RegisterAddress::Bar(*bar, offset), Access::Write(bytes));
        }
        writes.len()
    }

    /// Forgets what was held, and holds no more: the card was reset meanwhile.
    pub fn forget(&self) {
        lock(&self.inner).held = None;
    }

    /// From now on it is deaf to everything, resets too, while it is given descriptors: what begins with `owned` in its owner's own memory.
    pub fn clings(&self, owned: u32) {
        lock(&self.inner).clings = owned;
    }

    pub fn touches(&self) -> Touches {
        lock(&self.inner).touches
    }

    /// Bus addresses that are mapped: first and length.
    pub fn mapped(&self) -> Vec<(u64, u64)> {
        lock(&self.inner).mapped.iter().map(|region| (region.gpa(), region.len())).collect()
    }

    /// The emulated function itself.
    pub fn with<R>(&self, look: impl FnOnce(&mut F) -> R) -> R {
        lock(&self.inner).function.with(|function, _| look(function))
    }
}

impl<F: Function> Simulated<F> {
    /// `function`, as hardware of that name.
    pub fn new(name: &str, function: F) -> std::io::Result<(Self, Bench<F>)> {
        use rustix::event::{EventfdFlags, eventfd};
        let interrupt =
            Arc::new(EventInterrupt(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)));
        let (bars, irqs) = (function.bars().clone(), function.irqs());
        let mut inner = Inner {
            function: Quiescent::new(function),
            mapped: Vec::new(),
            trouble: Trouble::None,
            kept: HashMap::new(),
            touches: Touches::default(),
            resets: false,
            held: None,
            clings: 0,
        };
        let mut head = [0; 0x40];
        inner.access(RegisterAddress::Config(0), Access::Read(&mut head));
        let short = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let class = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) >> 8;
        let identity = Identity {
            vendor: short(spec::VENDOR_ID),
            device: short(spec::DEVICE_ID),
            revision: head[spec::REVISION_ID],
            class,
            subsystem: (short(spec::SUBSYSTEM_VENDOR_ID), short(spec::SUBSYSTEM_ID)),
        };
        let inner = Arc::new(Mutex::new(inner));
        let bench = Bench { inner: inner.clone(), interrupt: interrupt.clone() };
        Ok((Simulated { inner, interrupt, both: None, name: name.to_owned(), identity, bars, irqs }, bench))
    }

    /// From now on it also does what it has to do whenever its owner listens to its interrupt, which becomes readable for that too.
    /// An owner that stands still does not listen: frames wait on the wire meanwhile.
    pub fn by_itself(self) -> std::io::Result<Self> {
        use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
        let both = create(CreateFlags::CLOEXEC)?;
        add(&both, &self.interrupt.0, EventData::new_u64(0), EventFlags::IN)?;
        lock(&self.inner).function.with(|function, _| match function.attention() {
            Some(attention) => add(&both, attention, EventData::new_u64(1), EventFlags::IN),
            None => Ok(()),
        })?;
        Ok(Simulated { both: Some(Arc::new(both)), ..self })
    }

    fn broken(&self, doing: &str) -> HardwareError {
        HardwareError::Os {
            function: self.name.clone(),
            doing: doing.to_owned(),
            source: std::io::Error::other("broken, as the test wants it"),
        }
    }

    fn check(&self, bar: u8, offset: u64, len: usize) -> Result<(), HardwareError> {
        let inside = self.bars.bar(bar).is_some_and(|known| {
            offset.checked_add(len as u64).is_some_and(|end| end <= known.size) && (1..=8).contains(&len)
        });
        let gone = HardwareError::NoSuchRegister { function: self.name.clone(), bar, offset, len };
        if inside { Ok(()) } else { Err(gone) }
    }
}

impl<F: Function> Hardware for Simulated<F> {
    fn name(&self) -> &str {
        &self.name
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        self.irqs
    }

    fn read(&mut self, bar: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        self.check(bar, offset, out.len())?;
        let mut inner = lock(&self.inner);
        inner.touches.reads += 1;
        match inner.trouble() {
            Trouble::Gone => out.fill(0xff),
            Trouble::Broken => return Err(self.broken("reading a register")),
            Trouble::BrokenAt(at) | Trouble::BrokenOnceAt(at) if at == offset => {
                inner.heal();
                return Err(self.broken("reading that register"));
            }
            trouble => {
                inner.access(RegisterAddress::Bar(bar, offset), Access::Read(out));
                if trouble == Trouble::Deaf {
                    for (at, byte) in (offset..).zip(out) {
                        *byte = inner.kept.get(&(bar, at)).copied().unwrap_or(*byte);
                    }
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        self.check(bar, offset, bytes.len())?;
        let mut inner = lock(&self.inner);
        inner.touches.writes += 1;
        match inner.trouble() {
            Trouble::Gone => {}
            Trouble::Broken => return Err(self.broken("writing a register")),
            Trouble::BrokenAt(at) | Trouble::BrokenOnceAt(at) if at == offset => {
                inner.heal();
                return Err(self.broken("writing that register"));
            }
            Trouble::Deaf => inner.kept.extend((offset..).zip(bytes).map(|(at, byte)| ((bar, at), *byte))),
            Trouble::None | Trouble::Mad | Trouble::BrokenAt(_) | Trouble::BrokenOnceAt(_) => {
                match &mut inner.held {
                    Some((register, writes)) if *register == offset => writes.push((bar, bytes.to_vec())),
                    _ => inner.access(RegisterAddress::Bar(bar, offset), Access::Write(bytes)),
                }
            }
        }
        Ok(())
    }

    fn read_config(&mut self, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        let mut inner = lock(&self.inner);
        match inner.trouble() {
            Trouble::Gone => out.fill(0xff),
            Trouble::Broken => return Err(self.broken("reading the configuration space")),
            _ => inner.access(RegisterAddress::Config(offset), Access::Read(out)),
        }
        Ok(())
    }

    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        let mut inner = lock(&self.inner);
        match inner.trouble() {
            Trouble::Gone => {}
            Trouble::Broken => return Err(self.broken("writing the configuration space")),
            _ => inner.access(RegisterAddress::Config(offset), Access::Write(bytes)),
        }
        Ok(())
    }

    fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError> {
        let mut inner = lock(&self.inner);
        if inner.trouble == Trouble::Broken {
            return Err(self.broken("mapping memory"));
        }
        let os = |doing: &str, source| HardwareError::Os {
            function: self.name.clone(),
            doing: doing.to_owned(),
            source,
        };
        let mut spec = region.spec().map_err(|source| os("mapping memory", source))?;
        spec.gpa = iova;
        spec.user = 0;
        let region =
            if region.writable() { MemoryRegion::map(spec) } else { MemoryRegion::map_read_only(spec) };
        let region = region.map_err(|e| os("mapping memory", std::io::Error::other(e)))?;
        let mut mapped = inner.mapped.clone();
        mapped.push(region);
        // As an IOMMU does, it refuses what overlaps.
        GuestMap::new(mapped.clone()).map_err(|e| os("mapping memory", std::io::Error::other(e)))?;
        inner.mapped = mapped;
        inner.remap();
        Ok(())
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError> {
        let mut inner = lock(&self.inner);
        if inner.trouble == Trouble::Broken {
            return Err(self.broken("unmapping memory"));
        }
        let before = inner.mapped.len();
        inner.mapped.retain(|region| (region.gpa(), region.len()) != (iova, len));
        if inner.mapped.len() == before {
            return Err(HardwareError::Os {
                function: self.name.clone(),
                doing: format!("unmapping {iova:#x}+{len:#x}"),
                source: std::io::ErrorKind::NotFound.into(),
            });
        }
        inner.remap();
        Ok(())
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        lock(&self.inner).function.with(|function, _| function.wire(irq, vector, wire))
    }

    fn listen(&mut self) -> Result<(), HardwareError> {
        let mut inner = lock(&self.inner);
        let call: Arc<dyn Interrupt> = self.interrupt.clone();
        let wired = inner.function.with(|function, _| function.wire(Irq::Intx, 0, Wire::Call(Some(call))));
        wired.map_err(|error| HardwareError::Os {
            function: self.name.clone(),
            doing: "listening to its interrupt".into(),
            source: std::io::Error::other(error),
        })
    }

    fn interrupt(&self) -> Option<&Arc<OwnedFd>> {
        Some(self.both.as_ref().unwrap_or(&self.interrupt.0))
    }

    fn take_interrupt(&mut self) -> bool {
        let mut inner = lock(&self.inner);
        if self.both.is_some() {
            inner.tick();
        }
        let mut count = [0; 8];
        let came = rustix::io::read(&self.interrupt.0, &mut count).is_ok();
        inner.touches.interrupts += u64::from(came);
        if inner.trouble == Trouble::Mad {
            return true;
        }
        came
    }

    fn unmask(&mut self) -> Result<(), HardwareError> {
        let mut inner = lock(&self.inner);
        match inner.trouble() {
            Trouble::Mad => self.interrupt.signal(),
            Trouble::Broken => return Err(self.broken("unmasking its interrupt")),
            _ => {
                let _ = inner.function.with(|function, _| function.wire(Irq::Intx, 0, Wire::Unmask));
            }
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<bool, HardwareError> {
        let mut inner = lock(&self.inner);
        if !inner.resets || matches!(inner.trouble(), Trouble::Gone | Trouble::Deaf) {
            return Ok(false);
        }
        inner.touches.resets += 1;
        inner.function.reset();
        Ok(true)
    }
}
