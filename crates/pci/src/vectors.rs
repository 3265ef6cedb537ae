//! Message-signalled interrupts: MSI and MSI-X alike.

use std::sync::Arc;

use ioplane_device::Interrupt;

/// Most vectors of a function (PCI 3.0, 6.8.2: the table size field has eleven bits).
const MOST: u16 = 2048;

#[derive(Debug, Default, Clone)]
struct Vector {
    call: Option<Arc<dyn Interrupt>>,
    masked: bool,
    pending: bool,
}

/// The vectors of one kind. The host has the addresses and data; here each is a wire, a mask and a pending bit.
#[derive(Debug)]
pub struct Vectors(Vec<Vector>);

impl Vectors {
    /// So many, without wires, unmasked.
    pub fn new(count: u16) -> Self {
        Vectors(vec![Vector::default(); usize::from(count.min(MOST))])
    }

    /// How many.
    pub fn len(&self) -> u16 {
        self.0.len() as u16
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn with(&mut self, vector: u16, act: impl FnOnce(&mut Vector)) -> bool {
        let Some(vector) = self.0.get_mut(usize::from(vector)) else { return false };
        act(vector);
        if vector.pending
            && !vector.masked
            && let Some(call) = &vector.call
        {
            vector.pending = false;
            call.signal();
        }
        true
    }

    /// What signals a vector. False if there is no such vector.
    pub fn connect(&mut self, vector: u16, call: Option<Arc<dyn Interrupt>>) -> bool {
        self.with(vector, |v| {
            if call.is_none() {
                v.pending = false;
            }
            v.call = call;
        })
    }

    /// Masks or unmasks one; what was pending is signalled then. False if there is no such vector.
    pub fn mask(&mut self, vector: u16, masked: bool) -> bool {
        self.with(vector, |v| v.masked = masked)
    }

    /// Signals one, or makes it pending while it is masked. Without a wire it is lost, as a message to nowhere is. False if there is
    /// no such vector.
    pub fn signal(&mut self, vector: u16) -> bool {
        self.with(vector, |v| v.pending = v.call.is_some())
    }

    /// Whether one is pending.
    pub fn pending(&self, vector: u16) -> bool {
        self.0.get(usize::from(vector)).is_some_and(|v| v.pending)
    }

    /// Whether any has a wire: this kind is enabled.
    pub fn connected(&self) -> bool {
        self.0.iter().any(|v| v.call.is_some())
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
    fn what_comes_while_masked_is_pending_once() {
        let interrupt = Arc::new(CountedInterrupt::default());
        let count = || interrupt.0.load(Ordering::Relaxed);
        let mut vectors = Vectors::new(2);
        assert!(vectors.signal(0) && !vectors.pending(0), "to nowhere");
        assert!(vectors.connect(0, Some(interrupt.clone())) && vectors.connected());
        vectors.signal(0);
        assert_eq!(count(), 1);
        vectors.mask(0, true);
        vectors.signal(0);
        vectors.signal(0);
        assert_eq!((count(), vectors.pending(0)), (1, true));
        vectors.mask(0, false);
        assert_eq!((count(), vectors.pending(0)), (2, false));
        assert!(!vectors.signal(2) && !vectors.mask(9, true) && !vectors.connect(2, None));
        assert_eq!(Vectors::new(u16::MAX).len(), MOST);
    }
}
