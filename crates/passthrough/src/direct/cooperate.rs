//! The steps of a function whose driver cooperates. Its guest may run meanwhile: its driver waits for the lock.

use std::time::Instant;

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_moving::{MovingError, PageSet, Surroundings};

use super::Passthrough;
use super::carry::{Carried, Carry, CarryError, Motion, Replayed};
use super::exchange::{ExchangeError, Exchanged, same_kind};
use crate::cooperating::{Cooperating, KIND};

/// Another function, which knows the guest's memory, and is like the one that the guest has.
pub struct Prepared<H: Hardware>(Box<Cooperating<H>>);

impl<H: Hardware> Passthrough<Cooperating<H>> {
    /// Whether it may take its place: nothing has happened to the guest's one.
    pub fn prepare(&mut self, other: H) -> Result<Prepared<H>, ExchangeError> {
        self.may_be_carried()?;
        if self.hardware.is_mapped() {
            return Err(CarryError::Mapped.into());
        }
        if self.motion() != Motion::Runs {
            return Err(CarryError::Still.into());
        }
        self.hardware.may_rest()?;
        let mut other = Cooperating::new(other, false).map_err(MovingError::from)?;
        same_kind(&mut *self.hardware, &mut other)?;
        for region in &self.mapped {
            other.map(region.gpa(), region).map_err(MovingError::from)?;
        }
        Ok(Prepared(Box::new(other)))
    }

    /// Puts `other` in the place of the hardware that the guest has, which stands still, and gives the former back. The driver brings it
    /// to where it was.
    ///
    /// # Errors
    ///
    /// The guest goes on with what it had, except after [`ExchangeError::Lost`]: then the function answers nothing until a reset.
    pub fn exchange_at_rest(&mut self, other: Prepared<H>) -> Result<(H, Exchanged), ExchangeError> {
        self.may_be_carried()?;
        if self.motion() != Motion::Still {
            return Err(CarryError::Runs.into());
        }
        let begun = Instant::now();
        let state_bytes = self.hardware.state()?.len();
        let mut other = *other.0;
        other.take_over(&self.hardware);
        let brought = self.hardware.hand_wires(&mut other).map_err(MovingError::from);
        if let Err(first) = brought.and_then(|()| other.bring()) {
            other.stand();
            let back = other.hand_wires(&mut self.hardware).map_err(MovingError::from);
            return Err(match back.and_then(|()| self.bring_it_back()) {
                Ok(()) => ExchangeError::BroughtBack(first),
                Err(second) => {
                    self.not_reset = Some(HardwareError::Lost { function: self.hardware.name().to_owned() });
                    ExchangeError::Lost { first, second }
                }
            });
        }
        let stop_accesses = 0;
        let replay_accesses = other.accesses();
        let mut former = std::mem::replace(&mut *self.hardware, other);
        self.bars = self.hardware.bars().clone();
        if let Err(error) = self.command() {
            self.not_reset = Some(error);
        }
        let took = begun.elapsed();
        self.hardware.go_on();
        // It reaches nothing any more; whoever takes it next resets it again.
        let _ = former.master(false);
        for region in &self.mapped {
            let _ = former.unmap(region.gpa(), region.len());
        }
        let _ = former.reset();
        let done = Exchanged { state_bytes, stop_accesses, replay_accesses, took };
        Ok((former.into_hardware(), done))
    }

    /// Resets it, and lets its driver bring it back.
    fn bring_it_back(&mut self) -> Result<(), MovingError> {
        let brought = self.hardware.bring().and_then(|()| Ok(self.command()?));
        match brought {
            Ok(()) => self.hardware.go_on(),
            Err(_) => self.hardware.stand(),
        }
        brought
    }
}

impl<H: Hardware> Carry for Passthrough<Cooperating<H>> {
    fn kind(&self) -> (&'static str, u32) {
        (KIND, ioplane_moving::VERSION.into())
    }

    fn accesses(&self) -> u64 {
        self.hardware.accesses()
    }

    fn motion(&self) -> Motion {
        self.hardware.motion()
    }

    /// The driver marks what the function has written by itself.
    fn begin_log(&mut self) -> Result<(), CarryError> {
        self.may_be_carried()?;
        if self.motion() != Motion::Runs {
            return Err(CarryError::Still);
        }
        self.hardware.may_rest()?;
        self.hardware.logs = true;
        Ok(())
    }

    fn logs(&self) -> bool {
        self.hardware.logs
    }

    fn end_log(&mut self) {
        self.hardware.logs = false;
    }

    fn written(&mut self) -> PageSet {
        match self.motion() {
            Motion::Still => self.hardware.pages(),
            Motion::Runs | Motion::Stopping => PageSet::new(),
        }
    }

    fn rest(&mut self) -> Result<bool, CarryError> {
        self.may_be_carried()?;
        self.hardware.rest()
    }

    fn give_up(&mut self) {
        self.hardware.give_up();
    }

    fn carried(&mut self) -> Result<Carried, CarryError> {
        self.may_be_carried()?;
        if self.motion() != Motion::Still {
            return Err(CarryError::Runs);
        }
        let state = self.hardware.state()?;
        let set_up = match self.hardware.expected() {
            Some(expected) => expected.clone(),
            None => {
                let vectors = self.hardware.wired();
                self.set_up(vectors).map_err(MovingError::from)?
            }
        };
        Ok(Carried { state, set_up })
    }

    fn may_load(&mut self) -> Result<(), CarryError> {
        self.may_be_carried()?;
        if self.motion() != Motion::Runs {
            return Err(CarryError::Still);
        }
        match self.hardware.cooperation() {
            Some(_) => Err(CarryError::Driven),
            None => Ok(()),
        }
    }

    fn load_carried(&mut self, carried: &Carried) -> Result<(), CarryError> {
        self.may_load()?;
        self.hardware.load(&carried.state, carried.set_up.clone())
    }

    fn replay(&mut self, around: &mut dyn Surroundings) -> Result<Replayed, CarryError> {
        self.may_be_carried()?;
        if self.motion() == Motion::Runs {
            return Err(CarryError::Runs);
        }
        while !self.hardware.rest()? {
            if !around.wait() {
                return Err(MovingError::Deadline { doing: "its queues end".to_owned() }.into());
            }
        }
        if let Some(expected) = self.hardware.expected().cloned() {
            let vectors = self.hardware.wired();
            self.is_set_up(&expected, vectors)?;
        }
        let (begun, before) = (Instant::now(), self.hardware.accesses());
        self.bring_it_back()?;
        self.hardware.logs = false;
        let accesses = self.hardware.accesses() - before;
        // The driver talks to the physical function, when it runs again.
        Ok(Replayed { accesses, messages: 0, ahead: 0, took: begun.elapsed() })
    }

    fn leave(&mut self) -> Result<(), CarryError> {
        self.may_be_carried()?;
        if self.motion() != Motion::Still {
            return Err(CarryError::Runs);
        }
        self.left().map_err(|error| MovingError::from(error).into())
    }
}
