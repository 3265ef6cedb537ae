//! Commodity NICs, emulated whole: an RTL8139C+ and an NE2000, each a [`ioplane_pci::Function`] on a port of the switch.
//!
//! ```text
//!   guest's stock driver --registers--> Rtl8139 | Ne2000 --PortTx--> Switch
//!                 ^------ INTA# ------------|   ^--------PortRx------'
//!                                           |   attention() readable, attend(): a batch of frames
//!                                           '-- a frame without room waits at the port until a register is written
//! ```
//!
//! A frame is sent within the register access that asks for it; frames are received when the host calls
//! [`ioplane_pci::Function::attend`]. So nothing is ever under way between two calls: an emulated NIC is always quiescent, may be
//! saved anywhere, and needs no poller. What a chip keeps in a FIFO while the guest has no room waits at the port.
//!
//! Everything that a guest writes to registers, descriptors and card memory is hostile, and so is a saved state. A wrong DMA is a fault
//! that is counted and told to the guest as its chip would. Work for one call is bounded: a ring of 64 descriptors, a batch of 64
//! frames.
//!
//! Each is also the hardware of tests: what stands on `ioplane_hardware::Hardware` runs on them without VFIO.
//!
//! Must not know: VFIO, who mediates or serves it.
#![forbid(unsafe_code)]

mod batch;
mod counts;
mod frame;
pub mod i82574;
pub mod ne2000;
pub mod rtl8139;
pub mod silicon;
pub mod vf82576;
pub mod vf82599;
mod wake;

pub use counts::{ChipCounts, Drops};

use ioplane_device::{DeviceError, SavedState, StateError};
use ioplane_pci::{Irq, Line, Wire, WireError};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most frames that one [`ioplane_pci::Function::attend`] takes.
pub const BATCH: usize = 64;

/// Why a NIC could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// The system gave no descriptor.
    #[error("NIC {name}: {doing}: {source} (is the limit of open files reached?)")]
    Os {
        /// The NIC.
        name: String,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The page of its registers could not be made.
    #[error("NIC {name}: making the page of its registers: {source}")]
    Memory {
        /// The NIC.
        name: String,
        /// Why.
        source: ioplane_memory::MappingError,
    },
}

/// What a host does to the only interrupt of a NIC.
fn wire(line: &mut Line, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
    if (irq, vector) != (Irq::Intx, 0) {
        return Err(WireError::NoSuchVector { irq, vector });
    }
    match wire {
        Wire::Call(call) => line.connect(call),
        Wire::Mask => line.mask(),
        Wire::Unmask => line.unmask(),
        Wire::Trigger => line.trigger(),
    }
    Ok(())
}

fn encode<T: Serialize>(kind: &str, version: u32, saved: &T) -> Result<SavedState, DeviceError> {
    let body = postcard::to_stdvec(saved).map_err(|error| DeviceError::Below(Box::new(error)))?;
    Ok(SavedState { kind: kind.into(), version, body })
}

fn decode<T: DeserializeOwned>(state: &SavedState, kind: &str, version: u32) -> Result<T, DeviceError> {
    let body = state.expect(kind, version)?;
    match postcard::take_from_bytes(body) {
        Ok((saved, [])) => Ok(saved),
        Ok((_, rest)) => Err(StateError::Damaged(format!("{} bytes too many", rest.len())).into()),
        Err(error) => Err(StateError::Damaged(error.to_string()).into()),
    }
}
