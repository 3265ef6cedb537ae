//! Another function in the place of one that a guest drives itself, while the guest's processors stand still.
//!
//! ```text
//!   map memory for the other --> stop this one --> save --> load, wire and replay the other --> this one is reset and given back
//!                                    \---- whatever fails after the stop: this one is wired and replayed again
//! ```

use std::time::{Duration, Instant};

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::GuestView;
use ioplane_moving::{MovingError, Surroundings};
use ioplane_pci::spec;

use super::Passthrough;
use super::carry::{Carry, CarryError, Motion};
use crate::migratable::Migratable;

/// What an exchange took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchanged {
    /// Bytes of the state.
    pub state_bytes: usize,
    /// Accesses to registers of the function that was left.
    pub stop_accesses: u64,
    /// Accesses to registers of the other one.
    pub replay_accesses: u64,
    /// From the first access to the last.
    pub took: Duration,
}

/// Why a function was not exchanged. Its guest still has the one that it had.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// It is not to be moved now, or this one did not stop.
    #[error(transparent)]
    Unready(#[from] CarryError),
    /// The other one is of another kind.
    #[error("{other} is another kind of function: {why}")]
    OtherKind {
        /// Its address.
        other: String,
        /// In what they differ.
        why: &'static str,
    },
    /// The other one, or its preparation, failed before anything was stopped, or this one did not stop.
    #[error(transparent)]
    Failed(#[from] MovingError),
    /// It failed after the stop, and this one was brought back.
    #[error("{0}; its guest has the one that it had, brought back")]
    BroughtBack(MovingError),
    /// Neither could be brought to where the guest was.
    #[error("{first}; and bringing back the one that the guest had: {second}")]
    Lost {
        /// Of the other one.
        first: MovingError,
        /// Of this one.
        second: MovingError,
    },
}

impl<H: Hardware> Passthrough<Migratable<H>> {
    /// Puts `other` in the place of the hardware that the guest has, with what the guest has done to it, and gives the former back. The
    /// guest's processors stand still from before this until after it. `there` is what happens around both until then, `back` around
    /// this one should it have to be brought back.
    ///
    /// # Errors
    ///
    /// The guest goes on with what it had, except after [`ExchangeError::Lost`]: then the function answers nothing until a reset.
    pub fn exchange(
        &mut self,
        other: H,
        there: &mut dyn Surroundings,
        back: &mut dyn Surroundings,
    ) -> Result<(H, Exchanged), ExchangeError> {
        self.may_be_stepped()?;
        if self.motion() != Motion::Runs {
            return Err(CarryError::Still.into());
        }
        let mut other = self.hardware.another(other)?;
        same_kind(&mut *self.hardware, &mut other)?;
        for region in &self.mapped {
            other.map(region.gpa(), region).map_err(MovingError::from)?;
        }
        let view = self.hardware.view()?;
        let (begun, before) = (Instant::now(), self.hardware.hardware().accesses());
        let state = self.stop(&view, there, back)?;
        let stop_accesses = self.hardware.hardware().accesses() - before;
        if let Err(first) = self.bring(&mut other, &state, &view, there) {
            return Err(self.bring_back(&mut other, &view, back, first));
        }
        let done = Exchanged {
            state_bytes: state.len(),
            stop_accesses,
            replay_accesses: other.hardware().accesses(),
            took: begun.elapsed(),
        };
        let mut former = std::mem::replace(&mut *self.hardware, other);
        self.bars = self.hardware.bars().clone();
        if let Err(error) = self.command() {
            self.not_reset = Some(error);
        }
        // It reaches nothing any more, and keeps nothing of the guest's; whoever takes it next resets it again.
        let _ = former.master(false);
        for region in &self.mapped {
            let _ = former.unmap(region.gpa(), region.len());
        }
        let _ = former.reset();
        Ok((former.into_hardware(), done))
    }

    /// Brings the function to rest and saves it. What was not sent by the deadline is waited for in vain: then it runs on. Where its queues were
    /// told to end by then it is brought back once they have.
    fn stop(
        &mut self,
        view: &GuestView,
        there: &mut dyn Surroundings,
        back: &mut dyn Surroundings,
    ) -> Result<Vec<u8>, ExchangeError> {
        let Err(first) = self.rest_by(there) else { return Ok(self.hardware.movable.save()?) };
        if !self.hardware.movable.is_stopping() {
            return Err(first.into());
        }
        let rested = self.rest_by(back);
        Err(self.goes_on(rested, view, back, first))
    }

    /// The one that the guest has is `ready` for it again, or not: brings it back.
    fn goes_on(
        &mut self,
        ready: Result<(), MovingError>,
        view: &GuestView,
        back: &mut dyn Surroundings,
        first: MovingError,
    ) -> ExchangeError {
        match ready.and_then(|()| self.bring_here(view, back)) {
            Ok(()) => ExchangeError::BroughtBack(first),
            Err(second) => {
                self.lose();
                ExchangeError::Lost { first, second }
            }
        }
    }

    /// Its guest reads all ones until it, or its VMM, resets it.
    fn lose(&mut self) {
        let function = self.hardware.name().to_owned();
        self.not_reset = Some(HardwareError::Lost { function });
        let _ = self.hardware.master(false);
    }

    fn bring(
        &mut self,
        other: &mut Migratable<H>,
        state: &[u8],
        view: &GuestView,
        there: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        other.movable.load(state, view)?;
        self.hardware.hand_wires(other)?;
        other.replay(view, there)
    }

    fn bring_back(
        &mut self,
        other: &mut Migratable<H>,
        view: &GuestView,
        back: &mut dyn Surroundings,
        first: MovingError,
    ) -> ExchangeError {
        let _ = other.master(false);
        let wired = other.hand_wires(&mut self.hardware).map_err(MovingError::from);
        self.goes_on(wired, view, back, first)
    }
}

/// Whether a guest that has learnt this one finds the same in the other.
pub(crate) fn same_kind<H: Hardware>(here: &mut H, other: &mut H) -> Result<(), ExchangeError> {
    let name = other.name().to_owned();
    let differs = |why| ExchangeError::OtherKind { other: name.clone(), why };
    if here.identity() != other.identity() {
        return Err(differs("device, revision, class or subsystem"));
    }
    let bars = |hardware: &H| -> Vec<_> {
        hardware.bars().iter().map(|(at, bar)| (at, bar.size, bar.space, bar.prefetchable)).collect()
    };
    if bars(here) != bars(other) {
        return Err(differs("its BARs"));
    }
    if here.irqs() != other.irqs() {
        return Err(differs("its interrupts"));
    }
    for id in [spec::CAP_MSI, spec::CAP_MSIX, spec::CAP_EXPRESS, spec::CAP_VENDOR] {
        let here = here.capability(id).map_err(MovingError::from)?;
        if here != other.capability(id).map_err(MovingError::from)? {
            return Err(differs("its capabilities"));
        }
    }
    Ok(())
}
