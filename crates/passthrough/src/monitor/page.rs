//! Shadow reads: a page that the guest reads without an exit, with what its registers would say.
//!
//! Only registers whose reading has no effect are in it. It is written before the guest can know that something changed: after
//! each write to a register, and before each interrupt. What the device changes without an interrupt (the end of a reset or of a dump
//! of counters, missed frames, the link, a timer; every bit of the status that the guest has masked) is looked at by the clock: each
//! [`SOON`] while the guest does something or the model waits for something, each [`LATER`] otherwise.
//!
//! Each client has a page of its own, which nobody but this process can write: not either who opens its file anew. It is kept up to date
//! while the host maps it ([`ioplane_pci::Function::use_shadows`]).
//!
//! For clients that cannot map it there is a register file ([`ioplane_pci::register_file`]), which shows the same while a library in
//! the VMM's process wants it. The VMM has that file for writing, since it maps another page of it; nothing is read back from it but
//! whether it is wanted, so who writes there deceives its own guest.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ioplane_hardware::Hardware;
use ioplane_memory::{Mapping, MappingError, PAGE, Window};
use ioplane_model::{Reads, RegisterId};
use ioplane_pci::{Bar, BarMap, PageError, Pages, RegisterFile, Touch};
use rustix::event::epoll;
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::Monitor;
use super::bus::bit;
use super::counts::MonitorFault;
use super::plan::Role;

/// Bytes of a BAR that offers a page: the registers, and the page that marks their place.
pub(super) const BAR: u64 = 2 * PAGE;
/// Bytes of the widest register that is shown whole.
const WIDEST: usize = 8;

/// Time between two looks at what changes without an interrupt.
const SOON: Duration = Duration::from_millis(1);
const LATER: Duration = Duration::from_millis(16);
/// Looks at the faster pace after the last write or interrupt.
const LIVELY: u32 = 32;

/// The page of one BAR.
#[derive(Debug)]
pub(super) struct Page {
    window: Window,
    pages: Pages,
    /// The host maps it.
    hosted: bool,
    file: RegisterFile,
    /// A library in the VMM's process maps the one of the file.
    wanted: bool,
    clock: Option<Clock>,
}

/// When the page is looked after next.
#[derive(Debug)]
struct Clock {
    timer: OwnedFd,
    /// Readable when the timer has run out or the hardware interrupts.
    both: Arc<OwnedFd>,
    /// Looks left at the faster pace.
    lively: u32,
}

impl Clock {
    fn new(interrupt: &OwnedFd) -> Result<Self, Errno> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let both = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (file, name) in [(interrupt, 0), (&timer, 1)] {
            epoll::add(&both, file, epoll::EventData::new_u64(name), epoll::EventFlags::IN)?;
        }
        let clock = Clock { timer, both: Arc::new(both), lively: LIVELY };
        clock.set(SOON)?;
        Ok(clock)
    }

    fn set(&self, after: Duration) -> Result<(), Errno> {
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let once = Timespec { tv_sec: 0, tv_nsec: after.subsec_nanos().into() };
        let spec = Itimerspec { it_interval: none, it_value: once };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec).map(drop)
    }
}

impl Page {
    /// Pages of zeros.
    pub(super) fn new() -> Result<Self, MappingError> {
        let mapping = Arc::new(Mapping::anonymous("shadow-page", PAGE)?);
        // From here on it can be written through this mapping alone (Linux 5.1).
        rustix::fs::fcntl_add_seals(mapping.file(), SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        let file = mapping.file().try_clone_to_owned().map_err(|error| {
            MappingError::Os(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::MFILE))
        })?;
        let window = Window::of_mapping(&mapping, 0, PAGE as usize)
            .ok_or(MappingError::Shape { offset: 0, len: PAGE })?;
        let pages = Pages { offset: 0, len: PAGE, touch: Touch::Shadow, file: Arc::new(file), at: 0 };
        let file = RegisterFile::new()?;
        Ok(Page { window, pages, hosted: false, file, wanted: false, clock: None })
    }

    /// A BAR of [`BAR`] bytes that offers them.
    pub(super) fn offered_by(&self, bar: Bar) -> Result<Bar, PageError> {
        bar.with_pages(self.pages.clone())?.with_pages(self.file.marker())
    }

    /// Whether some guest reads it now.
    pub(super) fn used(&self) -> bool {
        self.hosted || self.wanted
    }

    /// Looks after it by the clock, and by that interrupt of the hardware; or no longer.
    pub(super) fn follow(&mut self, interrupt: Option<&Arc<OwnedFd>>) -> Result<(), Errno> {
        self.clock = None;
        self.clock = interrupt.map(|interrupt| Clock::new(interrupt)).transpose()?;
        Ok(())
    }

    /// Readable when there is something to do for it, or an interrupt.
    pub(super) fn attention(&self) -> Option<&Arc<OwnedFd>> {
        self.clock.as_ref().map(|clock| &clock.both)
    }

    /// Something happens: what follows from it is to be seen soon.
    pub(super) fn stir(&mut self) {
        if let Some(clock) = &mut self.clock {
            if clock.lively == 0 {
                // A timer that cannot be set leaves the slower pace.
                let _ = clock.set(SOON);
            }
            clock.lively = LIVELY;
        }
    }

    /// Whether its time has come.
    fn due(&self) -> bool {
        self.clock.as_ref().is_some_and(|clock| rustix::io::read(&clock.timer, &mut [0; 8]).is_ok())
    }

    /// The next time.
    fn again(&mut self, waits: bool) {
        if let Some(clock) = &mut self.clock {
            clock.lively = if waits { LIVELY } else { clock.lively.saturating_sub(1) };
            let _ = clock.set(if clock.lively > 0 { SOON } else { LATER });
        }
    }

    /// The same everywhere.
    pub(super) fn fill(&self, byte: u8) {
        for window in self.windows() {
            for at in 0..window.len() {
                window.put_u8(at, byte);
            }
        }
    }

    /// Those that somebody maps.
    fn windows(&self) -> impl Iterator<Item = &Window> {
        let hosted = self.hosted.then_some(&self.window);
        hosted.into_iter().chain(self.wanted.then(|| self.file.registers()))
    }

    /// Puts a register's value there: at once where it is aligned, so that no half of it is seen.
    pub(super) fn put(&self, offset: u64, bytes: &[u8]) {
        let Ok(at) = usize::try_from(offset) else { return };
        if at.checked_add(bytes.len()).is_none_or(|end| end > PAGE as usize) {
            return;
        }
        for window in self.windows() {
            match *bytes {
                [a, b] if at.is_multiple_of(2) => window.put_u16(at, u16::from_le_bytes([a, b])),
                [a, b, c, d] if at.is_multiple_of(4) => {
                    window.put_u32(at, u32::from_le_bytes([a, b, c, d]));
                }
                _ => {
                    for (n, byte) in bytes.iter().enumerate() {
                        window.put_u8(at + n, *byte);
                    }
                }
            }
        }
    }
}

impl<H: Hardware> Monitor<H> {
    /// A fresh page in the place of the one that there is: a client that has left may keep that.
    pub(super) fn renew_page(&mut self) -> Result<(), MappingError> {
        if self.guest.page.is_none() {
            return Ok(());
        }
        let page = Page::new()?;
        let mut bars = BarMap::new();
        for ((index, bar), (_, before)) in self.guest.bars.trapped().iter().zip(self.guest.bars.iter()) {
            let shown = before.pages().iter().any(|pages| pages.touch == Touch::Shadow);
            let fresh = match page.offered_by(bar.clone()) {
                Ok(offers) if shown => offers,
                _ => bar.clone(),
            };
            bars = bars.with(index, fresh);
        }
        (self.guest.bars, self.guest.page) = (bars, Some(page));
        Ok(())
    }

    /// A client has left: who still maps its page finds a device that is gone.
    pub(super) fn retire_page(&mut self) {
        if let Some(page) = self.guest.page.as_mut().filter(|page| page.used()) {
            page.fill(0xff);
            (page.hosted, page.wanted, page.clock) = (false, false, None);
        }
    }

    /// The host maps the page, or no longer.
    pub(super) fn page_hosted(&mut self, yes: bool) {
        if let Some(page) = &mut self.guest.page {
            page.hosted = yes;
            self.page_use_changed();
        }
    }

    /// Before a trapped access: a library in the VMM's process may want the page. What it is granted is up to date.
    #[inline]
    pub(super) fn heed_page(&mut self) {
        if let Some(request) = self.guest.page.as_ref().and_then(|page| page.file.request()) {
            self.grant_page(request);
        }
    }

    #[cold]
    fn grant_page(&mut self, request: u64) {
        if self.card.parked.is_some() {
            // What it says then is not looked after.
            return;
        }
        let wanted = request != 0;
        if let Some(page) = &mut self.guest.page
            && page.wanted != wanted
        {
            page.wanted = wanted;
            self.page_use_changed();
        }
        if let Some(page) = &self.guest.page {
            page.file.grant(request);
        }
    }

    /// Looks after the page from now on, or no longer.
    fn page_use_changed(&mut self) {
        if let Some(page) = &mut self.guest.page {
            let interrupt = self.card.bus.interrupt().filter(|_| page.used());
            // Without a timer it is as old as the last write or interrupt.
            if let Err(error) = page.follow(interrupt) {
                self.card.bus.report(MonitorFault::hardware("page-timer", error.to_string()));
            }
        }
        if self.card.parked.is_none() {
            self.show_all();
        }
    }

    /// If it is time for that: what the guest would find if it asked the hardware.
    pub(super) fn refresh(&mut self) {
        if !self.guest.page.as_ref().is_some_and(Page::due) {
            return;
        }
        // QEMU takes the page away when it resets the VM, and the access that would tell of it may never come.
        if self.guest.page.as_ref().is_some_and(|page| page.file.request() == Some(0)) {
            self.grant_page(0);
        }
        if !self.guest.page.as_ref().is_some_and(Page::used) {
            return;
        }
        let runs = self.card.parked.is_none() && !self.guest.stopped && !self.card.dead();
        if runs {
            self.ask_hardware();
            self.collect();
            self.level();
            self.show_alive();
        }
        let waits = runs && !self.guest.machine.reusable();
        if let Some(page) = &mut self.guest.page {
            page.again(waits);
        }
    }

    /// The guest has written a register, or will be interrupted.
    pub(super) fn stir_page(&mut self) {
        if let Some(page) = &mut self.guest.page {
            page.stir();
        }
    }

    /// What answers with all ones does so in the page too.
    pub(super) fn show_dead(&self) {
        if let Some(page) = self.guest.page.as_ref().filter(|page| page.used()) {
            page.fill(0xff);
        }
    }

    /// Shows a register that was written in the shadow page.
    pub(super) fn show_written(&mut self, id: Option<RegisterId>) {
        let Some(id) = id.filter(|_| self.guest.page.as_ref().is_some_and(Page::used)) else { return };
        self.show(id);
    }

    /// Shows a register's present value in the shadow page.
    pub(super) fn show(&mut self, id: RegisterId) {
        let register = self.guest.machine.register(id);
        if matches!(register.reads, Reads::Never | Reads::Effect) || register.bank.is_some() {
            return;
        }
        let at = u64::from(register.offset);
        let width = usize::from(register.width).min(WIDEST);
        let mut bytes = [0; WIDEST];
        match self.card.plan.role(id) {
            Role::Plain if self.guest.recalled & bit(id) != 0 => {
                bytes[..4].copy_from_slice(&self.guest.machine.value(id).to_le_bytes());
            }
            Role::Plain => self.card.bus.read_at(self.card.model.bar, at, &mut bytes[..width]),
            Role::Port => return,
            role => {
                bytes[..4].copy_from_slice(&self.kept_word(role).to_le_bytes());
            }
        }
        if let Some(page) = &self.guest.page {
            page.put(at, &bytes[..width]);
        }
    }

    /// Shows what the device may have changed by itself.
    pub(super) fn show_alive(&mut self) {
        self.show_those(|reads| reads == Reads::Alive);
    }

    /// Shows everything.
    pub(super) fn show_all(&mut self) {
        if self.card.dead() {
            return self.show_dead();
        }
        self.show_those(|_| true);
    }

    fn show_those(&mut self, which: impl Fn(Reads) -> bool) {
        if !self.guest.page.as_ref().is_some_and(Page::used) {
            return;
        }
        for at in 0..self.card.plan.all.len() {
            let id = self.card.plan.all[at];
            if which(self.guest.machine.register(id).reads) {
                self.show(id);
            }
        }
    }
}
