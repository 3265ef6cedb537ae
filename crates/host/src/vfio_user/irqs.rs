//! Interrupts: the client's eventfds on the function's wires.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ioplane_device::Interrupt;
use ioplane_pci::{Function, Irq, Wire};
use vfio_bindings::bindings::vfio;

use super::connection::{Connection, Message, Reply};
use super::fault::ClientFault;
use super::session::Session;
use super::spec::{IrqInfo, IrqSet};
use crate::eventfd::{self, PeerEventfd};

/// A client's eventfd, counted.
#[derive(Debug)]
struct Signal {
    call: PeerEventfd,
    count: Arc<AtomicU64>,
}

impl Interrupt for Signal {
    fn signal(&self) {
        self.count.fetch_add(1, Relaxed);
        self.call.signal();
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.call.file()
    }
}

fn kind(index: u32) -> Option<Irq> {
    match index {
        vfio::VFIO_PCI_INTX_IRQ_INDEX => Some(Irq::Intx),
        vfio::VFIO_PCI_MSI_IRQ_INDEX => Some(Irq::Msi),
        vfio::VFIO_PCI_MSIX_IRQ_INDEX => Some(Irq::Msix),
        vfio::VFIO_PCI_ERR_IRQ_INDEX => Some(Irq::Error),
        _ => None,
    }
}

impl<F: Function> Session<F> {
    fn irq_count(&self, index: u32) -> u32 {
        let irqs = self.facts.as_ref().map(|facts| facts.irqs).unwrap_or_default();
        kind(index).map_or(0, |irq| irqs.of(irq).into())
    }

    pub(super) fn irq_info(&self, message: &Message) -> Result<Reply, ClientFault> {
        let asked: IrqInfo = message.body()?;
        if asked.index >= vfio::VFIO_PCI_NUM_IRQS || (asked.argsz as usize) < size_of::<IrqInfo>() {
            return Err(ClientFault::BadValue(
                "DEVICE_GET_IRQ_INFO of no index, or with an argsz that holds no reply",
            ));
        }
        let count = self.irq_count(asked.index);
        let flags = match kind(asked.index) {
            Some(_) if count == 0 => 0,
            None => 0,
            Some(Irq::Intx) => {
                vfio::VFIO_IRQ_INFO_EVENTFD | vfio::VFIO_IRQ_INFO_MASKABLE | vfio::VFIO_IRQ_INFO_AUTOMASKED
            }
            // A guest sets the number of MSI vectors when it enables them.
            Some(Irq::Msi) => vfio::VFIO_IRQ_INFO_EVENTFD | vfio::VFIO_IRQ_INFO_NORESIZE,
            Some(Irq::Msix | Irq::Error) => vfio::VFIO_IRQ_INFO_EVENTFD,
        };
        let argsz = size_of::<IrqInfo>() as u32;
        Ok(Reply::of(&IrqInfo { argsz, flags, index: asked.index, count }))
    }

    pub(super) fn set_irqs(
        &mut self,
        message: &mut Message,
        connection: &Connection,
    ) -> Result<Reply, ClientFault> {
        let (asked, data) = message.split::<IrqSet>()?;
        let IrqSet { flags, index, start, count, .. } = asked;
        let what = flags & vfio::VFIO_IRQ_SET_DATA_TYPE_MASK;
        let action = flags & vfio::VFIO_IRQ_SET_ACTION_TYPE_MASK;
        let known = what | action == flags;
        if !known || !what.is_power_of_two() || !action.is_power_of_two() {
            return Err(ClientFault::BadValue("DEVICE_SET_IRQS wants one kind of data and one action"));
        }
        let no_such = ClientFault::NoSuchIrq { index, start, count };
        let end = start.checked_add(count).filter(|end| *end <= self.irq_count(index));
        let (Some(irq), Some(end)) = (kind(index), end) else { return Err(no_such) };
        // There are at most 2048 of any kind.
        let (Ok(first), Ok(end)) = (u16::try_from(start), u16::try_from(end)) else { return Err(no_such) };
        let booleans = if what == vfio::VFIO_IRQ_SET_DATA_BOOL { count as usize } else { 0 };
        if data.len() != booleans {
            return Err(message.bad_size(size_of::<IrqSet>() + booleans));
        }
        if what != vfio::VFIO_IRQ_SET_DATA_EVENTFD {
            message.check_files(0)?;
        }
        let wire = match action {
            vfio::VFIO_IRQ_SET_ACTION_MASK => Wire::Mask,
            vfio::VFIO_IRQ_SET_ACTION_UNMASK => Wire::Unmask,
            _ => Wire::Trigger,
        };
        let wires: Vec<(u16, Wire)> = match what {
            vfio::VFIO_IRQ_SET_DATA_NONE if count == 0 => return self.disable(irq, wire, connection),
            vfio::VFIO_IRQ_SET_DATA_NONE => (first..end).map(|vector| (vector, wire.clone())).collect(),
            vfio::VFIO_IRQ_SET_DATA_BOOL => (first..end)
                .zip(data)
                .filter(|(_, yes)| **yes != 0)
                .map(|(vector, _)| (vector, wire.clone()))
                .collect(),
            _ => {
                let wanted = if message.files.is_empty() { 0 } else { count as usize };
                if count == 0 || message.files.len() != wanted {
                    return Err(message.bad_files(count as usize));
                }
                if !message.files.iter().all(eventfd::check) {
                    return Err(ClientFault::NotAnEventfd);
                }
                let mut files = std::mem::take(&mut message.files).into_iter();
                match (wire, irq) {
                    (Wire::Trigger, _) => (first..end)
                        .map(|vector| {
                            let call = files.next().map(PeerEventfd::new).transpose()?;
                            let call = call.map(|call| -> Arc<dyn Interrupt> {
                                Arc::new(Signal { call, count: self.board.irqs.clone() })
                            });
                            Ok((vector, Wire::Call(call)))
                        })
                        .collect::<std::io::Result<_>>()
                        .map_err(ClientFault::NoInterrupts)?,
                    (Wire::Unmask, Irq::Intx) => {
                        self.wires.resume = files.next().map(Arc::new);
                        return Ok(Reply::default());
                    }
                    _ => {
                        return Err(ClientFault::NotSupported(
                            "masking or unmasking by an eventfd, but of INTx",
                        ));
                    }
                }
            }
        };
        self.wire(irq, &wires, connection)
    }

    /// All of a kind go.
    fn disable(&mut self, irq: Irq, wire: Wire, connection: &Connection) -> Result<Reply, ClientFault> {
        if !matches!(wire, Wire::Trigger) {
            return Err(ClientFault::BadValue(
                "DEVICE_SET_IRQS of no vectors disables a kind, and does nothing else",
            ));
        }
        if irq == Irq::Intx {
            self.wires.resume = None;
            self.wires.owed_unmask = false;
        }
        let of_kind = self.wires.wired.range((irq, 0)..=(irq, u16::MAX));
        let wires: Vec<_> = of_kind.map(|(_, vector)| (*vector, Wire::Call(None))).collect();
        self.wire(irq, &wires, connection)
    }

    /// Those before an error stay done.
    fn wire(
        &mut self,
        irq: Irq,
        wires: &[(u16, Wire)],
        connection: &Connection,
    ) -> Result<Reply, ClientFault> {
        for (vector, wire) in wires {
            if let Wire::Call(Some(_)) = wire {
                self.wires.wired.insert((irq, *vector));
            }
        }
        self.with(Some(connection), |function| {
            wires.iter().try_for_each(|(vector, wire)| function.wire(irq, *vector, wire.clone()))
        })??;
        for (vector, wire) in wires {
            if let Wire::Call(None) = wire {
                self.wires.wired.remove(&(irq, *vector));
            }
        }
        Ok(Reply::default())
    }
}
