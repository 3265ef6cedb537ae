//! INTA#: a level, over something that can only signal.

use std::sync::Arc;

use ioplane_device::Interrupt;

/// The interrupt line of a function. Signalling masks it, as VFIO does: the host unmasks it when the guest has acknowledged the
/// interrupt, and if the level is still up it is signalled again.
#[derive(Debug, Default)]
pub struct Line {
    call: Option<Arc<dyn Interrupt>>,
    level: bool,
    masked: bool,
    /// By the command register.
    disabled: bool,
    signals: u64,
}

impl Line {
    /// Down, without a wire.
    pub fn new() -> Self {
        Line::default()
    }

    /// What it is signalled by. Another wire knows nothing of what the old one was told, so the line is no longer masked.
    pub fn connect(&mut self, call: Option<Arc<dyn Interrupt>>) {
        self.call = call;
        self.masked = false;
        self.look();
    }

    /// Whether it is connected.
    pub fn connected(&self) -> bool {
        self.call.is_some()
    }

    /// The level.
    #[inline]
    pub fn set(&mut self, up: bool) {
        self.level = up;
        self.look();
    }

    /// Whether the level is up: the interrupt bit of the status register.
    pub fn level(&self) -> bool {
        self.level
    }

    /// The interrupt disable bit of the command register.
    pub fn disable(&mut self, yes: bool) {
        self.disabled = yes;
        self.look();
    }

    /// The host wants no signals.
    pub fn mask(&mut self) {
        self.masked = true;
    }

    /// The host wants signals again; one at once if the level is up.
    pub fn unmask(&mut self) {
        self.masked = false;
        self.look();
    }

    /// Whether it waits to be unmasked.
    pub fn masked(&self) -> bool {
        self.masked
    }

    /// Signals whatever the level: the host asked for it.
    pub fn trigger(&mut self) {
        if let Some(call) = &self.call {
            call.signal();
            self.signals += 1;
        }
    }

    /// How often it was signalled.
    pub fn signals(&self) -> u64 {
        self.signals
    }

    #[inline]
    fn look(&mut self) {
        if self.level && !self.masked && !self.disabled && self.call.is_some() {
            self.masked = true;
            self.trigger();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[derive(Debug, Default)]
    struct CountedInterrupt(AtomicU64);
    impl Interrupt for CountedInterrupt {
        fn signal(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_level_that_stays_up_is_signalled_once_for_each_unmask() {
        let interrupt = Arc::new(CountedInterrupt::default());
        let count = || interrupt.0.load(Ordering::Relaxed);
        let mut line = Line::new();
        line.set(true);
        line.connect(Some(interrupt.clone()));
        assert_eq!(count(), 1, "it was up before the wire came");
        line.set(true);
        assert_eq!((count(), line.masked()), (1, true), "masked by its own signal");
        line.unmask();
        assert_eq!(count(), 2, "still up");
        line.set(false);
        line.unmask();
        assert_eq!(count(), 2, "down");
        line.disable(true);
        line.set(true);
        assert_eq!(count(), 2, "disabled by the command register");
        line.disable(false);
        assert_eq!(count(), 3);
        line.connect(None);
        line.unmask();
        assert_eq!((count(), line.signals()), (3, 3));
    }
}
