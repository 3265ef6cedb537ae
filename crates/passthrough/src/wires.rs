//! Who is signalled by the vectors of a function: kept, so that another function in its place signals the same.

use std::collections::BTreeMap;
use std::sync::Arc;

use ioplane_device::Interrupt;
use ioplane_hardware::Hardware;
use ioplane_pci::{Irq, Wire, WireError};

/// Who is signalled by a vector.
#[derive(Debug, Clone, Default)]
struct Wiring {
    call: Option<Arc<dyn Interrupt>>,
    masked: bool,
}

/// All of a function.
#[derive(Debug, Default)]
pub(crate) struct Wires(BTreeMap<(Irq, u16), Wiring>);

impl Wires {
    /// The vectors of MSI-X that signal somebody, ascending.
    pub(crate) fn msix(&self) -> Vec<u16> {
        let msix = |((irq, vector), wiring): (&(Irq, u16), &Wiring)| {
            (*irq == Irq::Msix && wiring.call.is_some()).then_some(*vector)
        };
        self.0.iter().filter_map(msix).collect()
    }

    /// The function was wired so.
    pub(crate) fn note(&mut self, irq: Irq, vector: u16, wire: Wire) {
        match wire {
            Wire::Call(None) => drop(self.0.remove(&(irq, vector))),
            Wire::Call(call) => self.0.entry((irq, vector)).or_default().call = call,
            Wire::Mask => self.0.entry((irq, vector)).or_default().masked = true,
            Wire::Unmask => {
                if let Some(wiring) = self.0.get_mut(&(irq, vector)) {
                    wiring.masked = false;
                }
            }
            Wire::Trigger => {}
        }
    }

    /// Nobody is signalled.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Takes those of `former` off it and puts them on `hardware`, whose these are. After an error it may be called the other way round.
    pub(crate) fn take_over<H: Hardware>(
        &mut self,
        hardware: &mut H,
        from: &mut Wires,
        former: &mut H,
    ) -> Result<(), WireError> {
        for ((irq, vector), wiring) in std::mem::take(&mut from.0) {
            // One that cannot be taken off goes with the function.
            let _ = former.wire(irq, vector, Wire::Call(None));
            self.0.insert((irq, vector), wiring);
        }
        for ((irq, vector), Wiring { call, masked }) in &self.0 {
            hardware.wire(*irq, *vector, Wire::Call(call.clone()))?;
            if *masked {
                hardware.wire(*irq, *vector, Wire::Mask)?;
            }
        }
        Ok(())
    }
}
