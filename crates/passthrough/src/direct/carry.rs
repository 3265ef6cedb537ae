//! The steps by which a function that a guest drives itself goes to another one, each by itself: the other one may be another daemon's.
//!
//! ```text
//!   here:   begin_log, while memory is copied --> rest --> written, carried ------------> leave   | whatever fails before that: replay
//!   there:                                                       \--> load_carried --> the VMM sets it up as it was --> replay
//! ```
//!
//! The guest's processors stand still from before the first step until after the last one. An access to its registers in between is
//! that of a guest which does not: it is counted, writes nothing and reads as all ones.

use std::time::{Duration, Instant};

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::GuestView;
use ioplane_moving::{GuestAddress, MovingError, PageSet, Surroundings, Unsent};
use ioplane_pci::spec;

use super::Passthrough;
use crate::cooperating::page::PageFlaw;
use crate::migratable::{Lent, Migratable};
use crate::set_up::SetUp;

/// A function that stands still, as it goes to another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carried {
    /// What is brought back into hardware, at most [`ioplane_moving::MOST`] bytes.
    pub state: Vec<u8>,
    /// What its VMM has to have set up by then.
    pub set_up: SetUp,
}

/// What bringing a function back took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replayed {
    /// Accesses to its registers.
    pub accesses: u64,
    /// Messages by its mailbox.
    pub messages: u64,
    /// Messages that were said ahead, and stood; 0: all were said now.
    pub ahead: u64,
    /// From the first to the last.
    pub took: Duration,
}

/// Whether a function goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Motion {
    /// Its guest drives it.
    Runs,
    /// Its queues were told to end, and have not.
    Stopping,
    /// It stands still, with a state: its own, or one that was loaded.
    Still,
}

/// Why a step was not done. The function is as it was before the step, but for what is said.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// There is no guest whose state could go along.
    #[error("no guest uses it")]
    NoGuest,
    /// It was suspended, and nobody knows what it was doing.
    #[error("it is held")]
    Held,
    /// It has failed before.
    #[error("it does not work: {0}")]
    Dead(String),
    /// It stands still, or is about to.
    #[error("it stands still, to be moved")]
    Still,
    /// It does not stand still.
    #[error("it runs")]
    Runs,
    /// It was given a state, and the guest had begun with it.
    #[error("a guest has driven it since its last reset")]
    Driven,
    /// Its guest's driver does not cooperate.
    #[error(
        "its guest's driver has not announced a page: it is not one that cooperates, or its interface was never set up"
    )]
    NoDriver,
    /// Its guest's driver announced something else, or it is no longer there.
    #[error(transparent)]
    Page(#[from] PageFlaw),
    /// What goes ahead is what a driver says by a mailbox that is trapped.
    #[error("nothing of it goes ahead: only what is said by the mailbox of a migratable function does")]
    SaysItself,
    /// Its VMM may have mapped it.
    #[error("its VMM has mapped registers of it, and would go on driving it")]
    Mapped,
    /// Its VMM has not been told what the guest relies on.
    #[error("its VMM has not set it up as it was: {0}")]
    NotSetUp(String),
    /// The function or the state. After a failed replay it stands still with its state, and takes another try.
    #[error(transparent)]
    Failed(#[from] MovingError),
}

/// What is done, step by step, to a function that its guest drives itself. An error leaves it as it was before the step, but for what is said
/// there. Of a thread that has the function; none blocks for longer than some accesses take, but [`Carry::replay`].
pub trait Carry {
    /// What its states are called, and their version.
    fn kind(&self) -> (&'static str, u32);

    /// Accesses to its registers so far.
    fn accesses(&self) -> u64;

    /// Whether it goes on.
    fn motion(&self) -> Motion;

    /// The guest's memory is copied from here on: the pages that the function writes are logged until a replay, or [`Carry::end_log`].
    fn begin_log(&mut self) -> Result<(), CarryError>;

    /// Whether they are.
    fn logs(&self) -> bool;

    /// They are no longer logged.
    fn end_log(&mut self);

    /// Pages that were written since this was called last; all of them once the function stands still.
    fn written(&mut self) -> PageSet;

    /// Brings it to rest, one look at the hardware at a time. `false`: not yet, call again. Until it is [`Motion::Stopping`] it goes on
    /// after [`Carry::give_up`]; from then on it needs [`Carry::replay`].
    fn rest(&mut self) -> Result<bool, CarryError>;

    /// Nobody calls [`Carry::rest`] again.
    fn give_up(&mut self);

    /// What another function needs to go on from here, of one that stands still. One that was loaded and has not run yet says the same
    /// again.
    fn carried(&mut self) -> Result<Carried, CarryError>;

    /// Whether it could take a state now: it has a guest, which has not run yet.
    fn may_load(&mut self) -> Result<(), CarryError>;

    /// What its guest's driver has said by the mailbox so far, for [`Carry::go_ahead`] on another function; the same as long as it says nothing more.
    fn said(&mut self) -> Result<Vec<u8>, CarryError> {
        Err(CarryError::SaysItself)
    }

    /// Says ahead what another function's guest has said, but for unicast addresses: a stranger's word, of a guest that is to have this one, which has
    /// not run yet. It is no bus master. Says how many messages stand; an error leaves it reset. [`Carry::replay`] says the difference.
    fn go_ahead(&mut self, _said: &[u8], _around: &mut dyn Surroundings) -> Result<u64, CarryError> {
        Err(CarryError::SaysItself)
    }

    /// How many messages were said ahead and stand, as far as is known.
    fn ahead(&self) -> u64 {
        0
    }

    /// What its physical function has for it was looked at since then: nothing but perhaps the address is another, which is this (zeros for none).
    /// `None`: all is to be said again.
    fn is_under(&mut self, _address: Option<[u8; 6]>) {}

    /// The move is broken off: a function that has said something ahead is reset. `false`: it has not.
    fn forget_ahead(&mut self) -> Result<bool, CarryError> {
        Ok(false)
    }

    /// Takes the state of another function, a stranger's: whole, or not at all. A guest must have it whose memory is that of the other
    /// one's guest, and that has not run yet. No register is touched; it stands still from here on until [`Carry::replay`].
    fn load_carried(&mut self, carried: &Carried) -> Result<(), CarryError>;

    /// Brings it to where its state says, and it goes on: here after a step that failed elsewhere, there after [`Carry::load_carried`],
    /// once the VMM has set it up.
    fn replay(&mut self, around: &mut dyn Surroundings) -> Result<Replayed, CarryError>;

    /// Its guest is another function's: this one is reset, reaches nothing any more, and answers nothing until the next reset.
    fn leave(&mut self) -> Result<(), CarryError>;

    /// Under which addresses its guest receives now, as far as that is known; none of one that stands still.
    fn addresses(&mut self) -> Vec<GuestAddress> {
        Vec::new()
    }
}

impl<H: Hardware> Passthrough<H> {
    /// Whether a step makes sense: a guest has it, and nothing is wrong with it.
    pub(crate) fn may_be_carried(&self) -> Result<(), CarryError> {
        if self.closed || !self.admitted {
            return Err(CarryError::NoGuest);
        }
        if let Some(why) = self.not_reset.as_ref().filter(|_| self.dead()) {
            return Err(CarryError::Dead(why.to_string()));
        }
        if self.suspended { Err(CarryError::Held) } else { Ok(()) }
    }

    /// How its VMM has set it up, which has wired these vectors.
    pub(crate) fn set_up(&mut self, vectors: Vec<u16>) -> Result<SetUp, HardwareError> {
        let mut msix = 0;
        if let Some(at) = self.hardware.capability(spec::CAP_MSIX)? {
            let mut control = [0; 2];
            self.read_config(at + spec::MSIX_CONTROL as u64, &mut control);
            msix = u16::from_le_bytes(control);
        }
        let mut bars = [0; 6];
        for (at, bar) in bars.iter_mut().enumerate() {
            let mut bytes = [0; 4];
            self.read_config((spec::BAR0 + 4 * at) as u64, &mut bytes);
            *bar = u32::from_le_bytes(bytes);
        }
        Ok(SetUp { command: self.header.command(), bars, msix, vectors })
    }

    /// It was set up as it has to be.
    pub(crate) fn is_set_up(&mut self, expected: &SetUp, vectors: Vec<u16>) -> Result<(), CarryError> {
        let now = self.set_up(vectors).map_err(MovingError::from)?;
        expected.lacks(&now).map_or(Ok(()), |lacks| Err(CarryError::NotSetUp(lacks)))
    }

    /// Its guest is another function's: this one is reset, reaches nothing any more, and answers nothing until the next reset.
    pub(crate) fn left(&mut self) -> Result<(), HardwareError> {
        // In this order: a reset that fails leaves it without memory, and still nobody's.
        let quiet = self.hardware.master(false);
        let reset = self.hardware.reset();
        let function = self.hardware.name().to_owned();
        self.not_reset = Some(HardwareError::Left { function });
        quiet.and(reset.map(drop))
    }
}

impl<H: Hardware> Passthrough<Migratable<H>> {
    /// Whether a step makes sense: as [`Passthrough::may_be_carried`], and no page of its registers is lent.
    pub(super) fn may_be_stepped(&self) -> Result<(), CarryError> {
        self.may_be_carried()?;
        if self.hardware.lent().is_some_and(|lent| lent != 0) { Err(CarryError::Mapped) } else { Ok(()) }
    }

    /// Lends its pages to its VMM, if it may; see [`Migratable::lend`].
    pub fn lend(&mut self) -> Option<Lent> {
        self.may_be_carried().ok()?;
        self.hardware.lend()
    }

    /// Whether more pages could be lent than are.
    pub fn could_lend_more(&self) -> bool {
        self.may_be_carried().is_ok() && self.hardware.could_lend_more()
    }

    /// Nothing that was lent is mapped any more.
    pub fn pages_are_back(&mut self) {
        self.hardware.pages_are_back();
    }

    /// Brings it to rest, with waiting in between.
    pub(super) fn rest_by(&mut self, around: &mut dyn Surroundings) -> Result<(), MovingError> {
        while !self.hardware.movable.stop(Unsent::Wait)? {
            if !around.wait() {
                let doing = "its frames are sent and its queues end".to_owned();
                return Err(MovingError::Deadline { doing });
            }
        }
        Ok(())
    }

    /// The replay itself, of this one.
    pub(super) fn bring_here(
        &mut self,
        view: &GuestView,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        self.hardware.replay(view, around)?;
        Ok(self.command()?)
    }
}

impl<H: Hardware> Carry for Passthrough<Migratable<H>> {
    fn kind(&self) -> (&'static str, u32) {
        (self.hardware.model().model.name, ioplane_moving::VERSION.into())
    }

    fn accesses(&self) -> u64 {
        self.hardware.hardware().accesses()
    }

    fn motion(&self) -> Motion {
        let movable = &self.hardware.movable;
        match (movable.is_stopping(), movable.is_stopped()) {
            (true, _) => Motion::Stopping,
            (_, true) => Motion::Still,
            _ => Motion::Runs,
        }
    }

    fn begin_log(&mut self) -> Result<(), CarryError> {
        self.may_be_stepped()?;
        if self.motion() != Motion::Runs {
            return Err(CarryError::Still);
        }
        let view = self.hardware.view()?;
        Ok(self.hardware.movable.begin_copy(view)?)
    }

    fn logs(&self) -> bool {
        self.hardware.movable.is_copying()
    }

    fn end_log(&mut self) {
        self.hardware.movable.end_copy();
    }

    fn written(&mut self) -> PageSet {
        self.hardware.movable.pages()
    }

    fn rest(&mut self) -> Result<bool, CarryError> {
        self.may_be_stepped()?;
        Ok(self.hardware.movable.stop(Unsent::Wait)?)
    }

    fn carried(&mut self) -> Result<Carried, CarryError> {
        self.may_be_stepped()?;
        if self.motion() != Motion::Still {
            return Err(CarryError::Runs);
        }
        let state = self.hardware.movable.save()?;
        let set_up = match &self.hardware.expected {
            Some(expected) => expected.clone(),
            None => {
                let vectors = self.hardware.wired();
                self.set_up(vectors).map_err(MovingError::from)?
            }
        };
        Ok(Carried { state, set_up })
    }

    fn may_load(&mut self) -> Result<(), CarryError> {
        self.may_be_stepped()?;
        if self.motion() != Motion::Runs {
            return Err(CarryError::Still);
        }
        match self.hardware.driven {
            true => Err(CarryError::Driven),
            false => Ok(()),
        }
    }

    fn said(&mut self) -> Result<Vec<u8>, CarryError> {
        self.may_be_carried()?;
        Ok(self.hardware.movable.said()?)
    }

    fn go_ahead(&mut self, said: &[u8], around: &mut dyn Surroundings) -> Result<u64, CarryError> {
        self.may_load()?;
        // Whoever has made it a bus master uses it.
        if self.header.bus_master() {
            return Err(CarryError::Driven);
        }
        Ok(self.hardware.movable.go_ahead(said, around)?)
    }

    fn ahead(&self) -> u64 {
        self.hardware.movable.ahead()
    }

    fn is_under(&mut self, address: Option<[u8; 6]>) {
        match address {
            Some(address) => self.hardware.movable.has_address(address),
            None => self.hardware.movable.doubt_ahead(),
        }
    }

    fn forget_ahead(&mut self) -> Result<bool, CarryError> {
        self.may_be_carried()?;
        Ok(self.hardware.movable.forget_ahead()?)
    }

    fn load_carried(&mut self, carried: &Carried) -> Result<(), CarryError> {
        self.may_load()?;
        let view = self.hardware.view()?;
        self.hardware.movable.load(&carried.state, &view)?;
        self.hardware.expected = Some(carried.set_up.clone());
        Ok(())
    }

    fn replay(&mut self, around: &mut dyn Surroundings) -> Result<Replayed, CarryError> {
        self.may_be_stepped()?;
        match self.motion() {
            Motion::Runs => return Err(CarryError::Runs),
            Motion::Stopping => self.rest_by(around)?,
            Motion::Still => {}
        }
        if let Some(expected) = self.hardware.expected.clone() {
            let vectors = self.hardware.wired();
            self.is_set_up(&expected, vectors)?;
        }
        let view = self.hardware.view()?;
        let (begun, before) = (Instant::now(), self.hardware.hardware().accesses());
        let said = self.hardware.messages();
        self.bring_here(&view, around)?;
        let accesses = self.hardware.hardware().accesses() - before;
        let messages = self.hardware.messages() - said;
        let ahead = self.hardware.movable.built_upon();
        Ok(Replayed { accesses, messages, ahead, took: begun.elapsed() })
    }

    fn give_up(&mut self) {}

    fn addresses(&mut self) -> Vec<GuestAddress> {
        // Hardware that does not say whether it receives does not.
        self.hardware.movable.addresses().unwrap_or_default()
    }

    fn leave(&mut self) -> Result<(), CarryError> {
        self.may_be_stepped()?;
        if self.motion() != Motion::Still {
            return Err(CarryError::Runs);
        }
        let left = self.left();
        self.hardware.begin_anew();
        left.map_err(|error| MovingError::from(error).into())
    }
}
