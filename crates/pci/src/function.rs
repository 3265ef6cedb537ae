//! What a host must know of a PCI function, whatever it does.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{Device, DeviceError, Interrupt, QuiescenceProof};
use ioplane_memory::GuestMap;

use crate::bars::BarMap;

/// The kinds of interrupt of a function, as VFIO counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Irq {
    /// INTA#: level-triggered, masked by whoever signalled it until it is unmasked.
    Intx,
    /// Message-signalled.
    Msi,
    /// Message-signalled, with a table.
    Msix,
    /// Something is wrong with the function: a VMM stops its guest.
    Error,
}

/// How many interrupts of each kind there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Irqs {
    /// 0 or 1.
    pub intx: u16,
    /// Vectors of MSI: a power of two, at most 32.
    pub msi: u16,
    /// Vectors of MSI-X, at most 2048.
    pub msix: u16,
    /// 0 or 1.
    pub error: u16,
}

impl Irqs {
    /// How many of `irq`.
    pub fn of(&self, irq: Irq) -> u16 {
        match irq {
            Irq::Intx => self.intx,
            Irq::Msi => self.msi,
            Irq::Msix => self.msix,
            Irq::Error => self.error,
        }
    }
}

/// What a host does to one interrupt.
#[derive(Debug, Clone)]
pub enum Wire {
    /// From now on it is signalled by that; `None` takes the wire off. A kind with no wire on any vector is disabled.
    Call(Option<Arc<dyn Interrupt>>),
    /// Not to be signalled until it is unmasked. What comes meanwhile is pending.
    Mask,
    /// To be signalled again; at once if it is pending.
    Unmask,
    /// Signal it once, for a test.
    Trigger,
}

/// Why a wire was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The function has fewer.
    #[error("the function has no {irq:?} vector {vector}")]
    NoSuchVector {
        /// Kind.
        irq: Irq,
        /// Number asked for.
        vector: u16,
    },
    /// The hardware below refused.
    #[error("wiring {irq:?}: {why}")]
    Below {
        /// Kind.
        irq: Irq,
        /// What it said.
        why: String,
    },
}

/// Why a function takes no client.
#[derive(Debug, thiserror::Error)]
pub enum NotReady {
    /// Somebody keeps what an earlier client was given. The files of a process that ends go one after the other: it is worth trying
    /// again a moment later.
    #[error("{0}")]
    Kept(String),
    /// Nobody knows what it would do: its last reset failed, or it is gone.
    #[error("{0}")]
    Unusable(String),
}

/// The control half of a PCI function. Its registers are those of [`ioplane_device::RegisterAddress::Config`] and [`ioplane_device::RegisterAddress::Bar`].
/// Accesses beyond the end of a BAR or of the configuration space, and of any width from 1 to 8 bytes and any alignment, come from
/// hostile guests: they read as all ones and write nothing, unless the function has something better.
///
/// All calls come from one thread at a time, the function's owner.
pub trait Function: Device {
    /// Its BARs. Sizes and kinds are fixed for its life; which file is behind a page is each client's own (see [`Function::admit`]).
    fn bars(&self) -> &BarMap;

    /// Bytes of its configuration space: 256, or 4096.
    fn config_size(&self) -> u64 {
        crate::spec::CONFIG_SIZE as u64
    }

    /// How many interrupts it has. Fixed for its life.
    fn irqs(&self) -> Irqs;

    /// The host wires, masks or unmasks an interrupt.
    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError>;

    /// Guest memory has grown: every range of the map before is in this one.
    fn grow_memory(&mut self, map: Arc<GuestMap>) -> Result<(), DeviceError>;

    /// Guest memory is another: ranges may be gone. When this returns the function touches none of them any more, in hardware either.
    /// An error leaves nothing mapped that is not in `map`.
    fn replace_memory(&mut self, proof: &QuiescenceProof, map: Arc<GuestMap>) -> Result<(), DeviceError>;

    /// A descriptor that is readable when [`Function::attend`] has something to do: an interrupt of the hardware below, frames. Asked
    /// again after every call of the function. Shared, so that the host can wait for it without the function, which may drop its own
    /// meanwhile.
    fn attention(&self) -> Option<&Arc<OwnedFd>> {
        None
    }

    /// Does what [`Function::attention`] announced, a bounded amount of it: what is left keeps the descriptor readable.
    fn attend(&mut self) {}

    /// A client comes: files and mappings that were given to another before it reach nothing of the function from here on, and the
    /// function is as after a reset. An error keeps the client out. Called again for the next one, or to try again.
    fn admit(&mut self, proof: &QuiescenceProof) -> Result<(), NotReady> {
        let _ = proof;
        Ok(())
    }

    /// The client has left. Its wires and its memory are off the function, which has been reset.
    fn dismiss(&mut self) {}

    /// Why nobody can use it, and what to do about that. [`Function::admit`] tries to mend it.
    fn unusable(&self) -> Option<String> {
        None
    }

    /// Whether the host backs pages with [`crate::Touch::Shadow`], so that the guest reads them without an exit; at first it does not.
    fn use_shadows(&mut self, yes: bool) {
        let _ = yes;
    }
}

/// Any function, for a host that serves several kinds by one type.
pub type AnyFunction = Box<dyn Function>;

impl<F: Function + ?Sized> Function for Box<F> {
    fn bars(&self) -> &BarMap {
        (**self).bars()
    }
    fn config_size(&self) -> u64 {
        (**self).config_size()
    }
    fn irqs(&self) -> Irqs {
        (**self).irqs()
    }
    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        (**self).wire(irq, vector, wire)
    }
    fn grow_memory(&mut self, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        (**self).grow_memory(map)
    }
    fn replace_memory(&mut self, proof: &QuiescenceProof, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        (**self).replace_memory(proof, map)
    }
    fn attention(&self) -> Option<&Arc<OwnedFd>> {
        (**self).attention()
    }
    fn attend(&mut self) {
        (**self).attend();
    }
    fn admit(&mut self, proof: &QuiescenceProof) -> Result<(), NotReady> {
        (**self).admit(proof)
    }
    fn dismiss(&mut self) {
        (**self).dismiss();
    }
    fn unusable(&self) -> Option<String> {
        (**self).unusable()
    }
    fn use_shadows(&mut self, yes: bool) {
        (**self).use_shadows(yes);
    }
}
