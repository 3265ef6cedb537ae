//! The interrupts of a function through VFIO: each vector writes an eventfd, by preference the guest's own.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ioplane_device::Interrupt;
use ioplane_pci::{Irq, Irqs, Wire, WireError};
use rustix::event::{EventfdFlags, eventfd};
use vfio_bindings::bindings::vfio as v;

use super::ioctl::{self, Set};

/// VFIO's number of each kind.
const KINDS: [(Irq, u32); 4] = [
    (Irq::Intx, v::VFIO_PCI_INTX_IRQ_INDEX),
    (Irq::Msi, v::VFIO_PCI_MSI_IRQ_INDEX),
    (Irq::Msix, v::VFIO_PCI_MSIX_IRQ_INDEX),
    (Irq::Error, v::VFIO_PCI_ERR_IRQ_INDEX),
];

fn number(irq: Irq) -> (usize, u32) {
    match irq {
        Irq::Intx => (0, KINDS[0].1),
        Irq::Msi => (1, KINDS[1].1),
        Irq::Msix => (2, KINDS[2].1),
        Irq::Error => (3, KINDS[3].1),
    }
}

/// An eventfd of ours, which does not block.
pub(super) fn new_event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Takes what came; whether anything did.
pub(super) fn take_event(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]) == Ok(8)
}

#[derive(Debug, Default)]
struct Vector {
    call: Option<Arc<dyn Interrupt>>,
    /// While it is masked the hardware writes this. (VFIO masks INTA# only.)
    held: Option<OwnedFd>,
}

impl Vector {
    fn file(&self) -> Option<BorrowedFd<'_>> {
        let call = self.call.as_ref()?;
        self.held.as_ref().map(AsFd::as_fd).or_else(|| call.file())
    }
}

#[derive(Debug, Default)]
struct Kind {
    vectors: Vec<Vector>,
    /// How many VFIO has switched on.
    on: usize,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Interrupts {
    device: Arc<OwnedFd>,
    counts: Irqs,
    kinds: [Kind; 4],
    intx_masked: bool,
}

impl Interrupts {
    pub(super) fn new(device: Arc<OwnedFd>, kinds: u32) -> io::Result<Self> {
        let count = |irq: Irq| -> io::Result<u16> {
            let (_, index) = number(irq);
            let count = if index < kinds { ioctl::interrupts(device.as_fd(), index)? } else { 0 };
            Ok(count.min(2048) as u16)
        };
        let counts = Irqs {
            intx: count(Irq::Intx)?.min(1),
            msi: count(Irq::Msi)?.min(32),
            msix: count(Irq::Msix)?,
            error: count(Irq::Error).unwrap_or(0).min(1),
        };
        let kind = |irq| Kind { vectors: (0..counts.of(irq)).map(|_| Vector::default()).collect(), on: 0 };
        let kinds = [kind(Irq::Intx), kind(Irq::Msi), kind(Irq::Msix), kind(Irq::Error)];
        Ok(Interrupts { device, counts, kinds, intx_masked: false })
    }

    pub(super) fn counts(&self) -> Irqs {
        self.counts
    }

    /// Whether any wire goes past us.
    pub(super) fn wired(&self) -> bool {
        self.kinds.iter().any(|kind| kind.on > 0)
    }

    pub(super) fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        let (kind, _) = number(irq);
        let below = |error: io::Error| WireError::Below { irq, why: error.to_string() };
        let Some(slot) = self.kinds[kind].vectors.get_mut(usize::from(vector)) else {
            return Err(WireError::NoSuchVector { irq, vector });
        };
        match wire {
            Wire::Call(Some(call)) if call.file().is_none() => {
                let why = "hardware can be wired to an eventfd only".into();
                return Err(WireError::Below { irq, why });
            }
            Wire::Call(Some(call)) => {
                let before = slot.call.replace(call);
                if let Err(error) = self.apply(irq, vector) {
                    self.kinds[kind].vectors[usize::from(vector)].call = before;
                    return Err(below(error));
                }
            }
            Wire::Call(None) => {
                *slot = Vector::default();
                self.apply(irq, vector).map_err(below)?;
            }
            Wire::Mask if irq == Irq::Intx => {
                self.intx_masked = true;
                self.level(Set::Mask).map_err(below)?;
            }
            Wire::Unmask if irq == Irq::Intx => {
                self.intx_masked = false;
                self.level(Set::Unmask).map_err(below)?;
            }
            Wire::Mask => {
                if slot.held.is_none() {
                    slot.held = Some(new_event().map_err(below)?);
                    self.apply(irq, vector).map_err(below)?;
                }
            }
            Wire::Unmask => {
                if let Some(held) = slot.held.take() {
                    let call = slot.call.clone();
                    self.apply(irq, vector).map_err(below)?;
                    // After the change, so that none falls between.
                    if let Some(call) = call.filter(|_| take_event(&held)) {
                        call.signal();
                    }
                }
            }
            Wire::Trigger => match (&slot.held, &slot.call) {
                (Some(held), _) => drop(rustix::io::write(held, &1u64.to_ne_bytes())),
                (None, Some(call)) => call.signal(),
                (None, None) => {}
            },
        }
        Ok(())
    }

    /// Masks or unmasks INTA#, if it is switched on.
    fn level(&self, set: Set<'_>) -> io::Result<()> {
        if self.kinds[0].on == 0 {
            return Ok(());
        }
        ioctl::set_interrupts(self.device.as_fd(), v::VFIO_PCI_INTX_IRQ_INDEX, 0, &set)
    }

    /// Tells VFIO what the vector has become.
    fn apply(&mut self, irq: Irq, vector: u16) -> io::Result<()> {
        let (number, index) = number(irq);
        let vector = usize::from(vector);
        let device = self.device.as_fd();
        let kind = &mut self.kinds[number];
        let set = |start: usize, set: Set<'_>| ioctl::set_interrupts(device, index, start as u32, &set);
        if kind.vectors.iter().all(|v| v.call.is_none()) {
            let was = std::mem::take(&mut kind.on);
            return if was > 0 { set(0, Set::Off) } else { Ok(()) };
        }
        if vector < kind.on {
            // INTA# that is wired anew is no longer masked, as in `Line`.
            if irq == Irq::Intx {
                set(0, Set::Off)?;
                kind.on = 0;
            } else {
                return set(vector, Set::Signal(&[kind.vectors[vector].file()]));
            }
        }
        if kind.vectors[vector].call.is_none() {
            return Ok(());
        }
        // VFIO can add vectors on some kernels only: all anew, and twice as many, so that this is rare.
        let was = kind.on;
        if was > 0 {
            set(0, Set::Off)?;
            kind.on = 0;
        }
        let files: Vec<_> = kind.vectors.iter().map(Vector::file).collect();
        let generous = (vector + 1).next_power_of_two().min(files.len());
        let mut outcome = set(0, Set::Signal(&files[..generous]));
        let mut on = generous;
        if outcome.is_err() && generous > vector + 1 {
            on = vector + 1;
            outcome = set(0, Set::Signal(&files[..on]));
        }
        if outcome.is_err() && was > 0 {
            on = was;
            let again = set(0, Set::Signal(&files[..was]));
            kind.on = if again.is_ok() { was } else { 0 };
        }
        outcome?;
        kind.on = on;
        // What came while it was off is lost: one too many is better than one too few.
        for vector in kind.vectors[..was].iter() {
            if let (None, Some(call)) = (&vector.held, &vector.call) {
                call.signal();
            }
        }
        if irq == Irq::Intx {
            self.intx_masked = false;
        }
        Ok(())
    }

    /// One interrupt of ours, of the best kind there is, writes `event`.
    pub(super) fn listen(&mut self, event: &OwnedFd) -> io::Result<Irq> {
        let irq = [Irq::Intx, Irq::Msi, Irq::Msix].into_iter().find(|irq| self.counts.of(*irq) > 0);
        let irq = irq.ok_or_else(|| io::Error::other("it has no interrupt"))?;
        let (number, index) = number(irq);
        ioctl::set_interrupts(self.device.as_fd(), index, 0, &Set::Signal(&[Some(event.as_fd())]))?;
        self.kinds[number].on = 1;
        Ok(irq)
    }

    /// INTA# may come again.
    pub(super) fn unmask(&mut self) -> io::Result<()> {
        self.level(Set::Unmask)
    }

    /// None any more.
    pub(super) fn clear(&mut self) {
        for (irq, index) in KINDS {
            let kind = &mut self.kinds[number(irq).0];
            if kind.on > 0 {
                let _ = ioctl::set_interrupts(self.device.as_fd(), index, 0, &Set::Off);
            }
            kind.on = 0;
            kind.vectors.fill_with(Vector::default);
        }
    }
}
