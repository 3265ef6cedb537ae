//! Ports to play with, and frames to send.

#![allow(dead_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_network::{
    DropReason, Mac, Offload, Port, PortOptions, PortRx, PortTx, Sent, Switch, SwitchSettings,
};

/// A port with both halves of its first pair.
pub struct Host {
    pub port: Port,
    pub port_tx: PortTx,
    pub port_rx: PortRx,
}

/// The address of host `n`.
pub fn mac(n: u8) -> Mac {
    [2, 0, 0, 0, 0, n]
}

pub const BROADCAST: Mac = [0xff; 6];

pub fn switch() -> Arc<Switch> {
    switch_with(|_| {})
}

pub fn switch_with(change: impl FnOnce(&mut SwitchSettings)) -> Arc<Switch> {
    let mut settings = SwitchSettings::default();
    change(&mut settings);
    Switch::new("lan", settings)
}

impl Host {
    /// A port called `name`, up.
    pub fn new(switch: &Arc<Switch>, name: &str) -> Host {
        Host::with(switch, name, |_| {})
    }

    pub fn with(switch: &Arc<Switch>, name: &str, change: impl FnOnce(&mut PortOptions)) -> Host {
        let mut options = PortOptions::new(name);
        change(&mut options);
        let port = switch.plug(options).unwrap();
        port.set_up(true);
        let (port_tx, port_rx) = (port.tx(0), port.rx(0));
        Host { port, port_tx, port_rx }
    }

    /// Sends a frame without offloads, as a batch of its own.
    pub fn send(&mut self, frame: &[u8]) -> Sent {
        let sent = self.add(frame, Offload::NONE);
        self.port_tx.flush();
        sent
    }

    /// Sends a frame, without ending the batch.
    pub fn add(&mut self, frame: &[u8], offload: Offload) -> Sent {
        send(&mut self.port_tx, frame, offload)
    }

    /// The next frame that has arrived.
    pub fn take(&mut self) -> Option<(Vec<u8>, Offload)> {
        take(&mut self.port_rx)
    }

    /// All frames that have arrived.
    pub fn take_all(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.take()).map(|(frame, _)| frame).collect()
    }

    /// How many frames of this port's were dropped for `cause`, sent ones.
    pub fn refused(&self, cause: DropReason) -> u64 {
        self.port.reading().sent.dropped(cause)
    }

    /// How many frames to this port were dropped for `cause`.
    pub fn missed(&self, cause: DropReason) -> u64 {
        self.port.reading().received.dropped(cause)
    }
}

pub fn send(port_tx: &mut PortTx, frame: &[u8], offload: Offload) -> Sent {
    port_tx.send(&frame[..frame.len().min(ioplane_network::HEAD)], frame.len(), offload, &mut |to| {
        to.copy_from_slice(frame);
        true
    })
}

pub fn take(port_rx: &mut PortRx) -> Option<(Vec<u8>, Offload)> {
    let frame = port_rx.front()?;
    let taken = (frame.bytes().to_vec(), frame.offload());
    port_rx.pop();
    Some(taken)
}

/// An Ethernet frame of a type that nobody knows.
pub fn frame(to: Mac, from: Mac, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from, &[0x88, 0xb5], payload].concat()
}

/// The same with a VLAN tag.
pub fn tagged(to: Mac, from: Mac, tag: u16, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from, &[0x81, 0], &tag.to_be_bytes(), &[0x88, 0xb5], payload].concat()
}

/// Panics when `what` has not come true in a minute.
pub fn eventually(what: &str, mut come: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !come() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}
