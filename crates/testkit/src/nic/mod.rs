//! Guests' drivers for commodity NICs, over any function that has their registers: [`Cp`] is what Linux's 8139cp does to an
//! RTL8139C+, [`Ne2k`] what ne2k-pci and 8390 do to an NE2000.
//!
//! Written from what those drivers do, on purpose without the code of the device side: the two check each other. A driver blocks in
//! register accesses only, and gives what it finds wrong as a message.

mod cp;
mod e1000e;
mod ne2k;

use std::sync::Arc;

use ioplane_device::{Access, Device, RegisterAddress};
use ioplane_network::{HEAD, Mac, Offload, Port, PortOptions, PortRx, PortTx, Sent, Switch, SwitchSettings};
use ioplane_pci::{Function, Irq, Wire, spec};

use crate::conformance::Bus;
use crate::toy::ring::Counted;

pub use cp::{Cp, Cut, Received};
pub use e1000e::{E1000e, Sending};
pub use ne2k::Ne2k;

/// Where a driver's accesses go.
pub trait Reach {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String>;

    /// Reads so many bytes, at most four, little-endian.
    fn read(&mut self, at: RegisterAddress, width: usize) -> Result<u32, String> {
        let mut bytes = [0; 4];
        self.access(at, Access::Read(&mut bytes[..width]))?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Writes so many bytes, at most four, little-endian.
    fn write(&mut self, at: RegisterAddress, width: usize, value: u32) -> Result<(), String> {
        self.access(at, Access::Write(&value.to_le_bytes()[..width]))
    }

    /// What a PCI driver does first: decoding on, bus master on, interrupts as `intx`.
    fn enable(&mut self, intx: bool) -> Result<(), String> {
        let command = spec::COMMAND_IO | spec::COMMAND_MEMORY | spec::COMMAND_MASTER;
        let command = if intx { command } else { command | spec::COMMAND_INTX_DISABLE };
        self.write(RegisterAddress::Config(spec::COMMAND as u64), 2, command.into())
    }
}

impl<R: Reach + ?Sized> Reach for &mut R {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        (**self).access(at, op)
    }
}

impl Reach for Arc<Bus> {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        Bus::access(self, at, op)
    }
}

/// A function by itself, without a host: its owner is the test.
#[derive(Debug)]
pub struct Unhosted<F> {
    pub function: F,
    pub line: Arc<Counted>,
}

impl<F: Function> Unhosted<F> {
    /// Wires its INTA#.
    pub fn new(mut function: F) -> Self {
        let line = Arc::new(Counted::default());
        function.wire(Irq::Intx, 0, Wire::Call(Some(line.clone()))).expect("a NIC has INTA#");
        Unhosted { function, line }
    }

    /// What a host does when [`Function::attention`] is readable, for as long as it is. Says how often that was.
    pub fn attend(&mut self) -> u32 {
        let mut times = 0;
        while readable(&self.function) {
            assert!(times < 10_000, "attention() stays readable for ever");
            self.function.attend();
            times += 1;
        }
        times
    }

    /// Unmasks INTA#, as the host does when the guest has acknowledged it.
    pub fn unmask(&mut self) {
        self.function.wire(Irq::Intx, 0, Wire::Unmask).expect("a NIC has INTA#");
    }
}

impl<F: Device> Reach for Unhosted<F> {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        self.function.access(at, op);
        Ok(())
    }
}

/// Whether a function wants to be attended to.
pub fn readable(function: &impl Function) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Some(fd) = function.attention() else { return false };
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// A switch with a port for a NIC and a neighbour at another.
pub struct Lan {
    /// The NIC's port. Shared by all instances of the NIC.
    pub port: Arc<Port>,
    pub neighbour: LanPeer,
}

impl Lan {
    /// A NIC of that address, and a neighbour of another.
    pub fn new(own: Mac, other: Mac) -> Self {
        Self::plugged(|name, mac| PortOptions { mac: Some(mac), ..PortOptions::new(name) }, own, other)
    }

    /// As a cable to a neighbour of that address: every frame that it sends reaches the NIC, whoever it is for.
    pub fn cable(other: Mac) -> Self {
        let options = |name: &str, mac| match name {
            "nic" => PortOptions { uplink: true, ..PortOptions::new(name) },
            _ => PortOptions { mac: Some(mac), ..PortOptions::new(name) },
        };
        Self::plugged(options, other, other)
    }

    fn plugged(options: impl Fn(&str, Mac) -> PortOptions, own: Mac, other: Mac) -> Self {
        let switch = Switch::new("lan", SwitchSettings::default());
        let plug = |name: &str, mac| switch.plug(options(name, mac)).expect("room for a port");
        let (port, other_port) = (Arc::new(plug("nic", own)), plug("neighbour", other));
        other_port.set_up(true);
        let (port_tx, port_rx) = (other_port.tx(0), other_port.rx(0));
        Lan { port, neighbour: LanPeer { port: other_port, port_tx, port_rx } }
    }
}

/// Who is at the other end.
pub struct LanPeer {
    pub port: Port,
    port_tx: PortTx,
    port_rx: PortRx,
}

impl LanPeer {
    pub fn send(&mut self, frame: &[u8]) -> Sent {
        let sent = self.add(frame);
        self.port_tx.flush();
        sent
    }

    /// Sends frames, in one batch. Says how many of them were delivered.
    pub fn send_all<'a>(&mut self, frames: impl IntoIterator<Item = &'a Vec<u8>>) -> usize {
        let delivered = frames.into_iter().filter(|frame| self.add(frame) == Sent::Delivered(1)).count();
        self.port_tx.flush();
        delivered
    }

    fn add(&mut self, frame: &[u8]) -> Sent {
        self.port_tx.send(&frame[..frame.len().min(HEAD)], frame.len(), Offload::NONE, &mut |to| {
            to.copy_from_slice(frame);
            true
        })
    }

    /// The next frame that has arrived.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let frame = self.port_rx.front()?.bytes().to_vec();
        self.port_rx.pop();
        Some(frame)
    }
}

/// A frame of a type that nobody knows.
pub fn frame(to: Mac, from: Mac, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from, &[0x88, 0xb5], payload].concat()
}
