//! The uplink: a TAP device of the host, as one more port of a switch.
//!
//! ```text
//!   host's network <--> tap0 <--readv, writev with vnet headers--> TapPoller <--PortTx, PortRx--> switch
//! ```
//!
//! Large frames and partial checksums go through whole, both ways: the kernel's header is virtio's own. What the kernel does
//! not take is segmented by the switch, as for any receiver.

mod file;
mod poller;
mod readiness;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ioplane_device::{
    Access, Activation, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet, QuiescenceProof,
    RegisterAddress, SavedState, StateError,
};

use crate::error::NetworkError;
use crate::offload::RxOffloads;
use crate::switch::{Port, PortOptions, PortReading, Switch};
pub use file::{interface, tap_of_frames};
use poller::TapPoller;
use readiness::TapReadiness;

/// A TAP device that is plugged into a switch: a device without a guest, with one queue. It is run as any other
/// (`Quiescent::new(tap).resume(&placement)`), and unplugged when it is dropped. When somebody deletes the device its link goes
/// down for good: [`Port::is_up`].
#[derive(Debug)]
pub struct Tap {
    info: DeviceInfo,
    file: Arc<OwnedFd>,
    made: bool,
    readiness: Arc<TapReadiness>,
    port: Arc<Port>,
}

impl Tap {
    /// Opens the TAP device called `name`, or makes it (then it is gone with this one, see [`Tap::persist`]; the daemon needs `CAP_NET_ADMIN` for
    /// either, unless the device is the daemon's user's), and plugs it into `switch` as an uplink. Its own network, and
    /// bringing the host's side up, is the administrator's. `options.pairs` is taken as 1, `options.uplink` as true.
    pub fn open(name: &str, switch: &Arc<Switch>, options: PortOptions) -> Result<Tap, NetworkError> {
        let (file, takes, made) = file::open(name)?;
        Ok(Tap { made, ..Tap::plug(name, file, takes, switch, options)? })
    }

    /// Takes a TAP device away that is there for good, and that nobody has open. It must have that number: another one is left alone.
    pub fn remove(name: &str, number: u32) -> Result<(), NetworkError> {
        if interface(name) != Some(number) {
            return Ok(());
        }
        let (file, ..) = file::open(name)?;
        // It may have been exchanged meanwhile.
        if interface(name) == Some(number) {
            set_persist(name, &file, false)?;
        }
        Ok(())
    }

    /// Whether opening it has made the device.
    pub fn made(&self) -> bool {
        self.made
    }

    /// The device stays when this one has gone, however that went: with its bridge, its addresses, and up as it is.
    pub fn persist(&self) -> Result<(), NetworkError> {
        set_persist(&self.info.name, &self.file, true)
    }

    /// Goes on with a TAP device that another process has opened ([`Tap::file`]), as [`Tap::open`].
    pub fn adopt(
        name: &str,
        file: OwnedFd,
        switch: &Arc<Switch>,
        options: PortOptions,
    ) -> Result<Tap, NetworkError> {
        let takes = file::check(name, &file)?;
        Tap::plug(name, file, takes, switch, options)
    }

    fn plug(
        name: &str,
        file: OwnedFd,
        takes: RxOffloads,
        switch: &Arc<Switch>,
        options: PortOptions,
    ) -> Result<Tap, NetworkError> {
        let readiness = TapReadiness::open(&file).map_err(|source| {
            let what = format!("tap {name}");
            NetworkError::Os { what, doing: "making what waits for it", source }
        })?;
        let port = switch.plug(PortOptions { pairs: 1, uplink: true, ..options })?;
        port.takes(takes);
        port.set_up(true);
        let info = DeviceInfo { name: name.to_owned(), kind: "tap", queues: 1 };
        Ok(Tap {
            info,
            file: Arc::new(file),
            made: false,
            readiness: Arc::new(readiness),
            port: Arc::new(port),
        })
    }

    /// The open device. Whoever has it beside this one takes frames away from it.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Its port.
    pub fn port(&self) -> &Arc<Port> {
        &self.port
    }

    /// Its counts: received is what the host got.
    pub fn reading(&self) -> PortReading {
        self.port.reading()
    }
}

fn set_persist(name: &str, file: &OwnedFd, lasting: bool) -> Result<(), NetworkError> {
    file::persist(file, lasting).map_err(|source| {
        let what = format!("tap {name}");
        NetworkError::Os { what, doing: "saying how long it stays", source }
    })
}

impl Device for Tap {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn access(&mut self, _at: RegisterAddress, op: Access<'_>) -> Effect {
        if let Access::Read(bytes) = op {
            bytes.fill(0xff);
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        QueueSet::from([0])
    }

    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
        if activation.queues().contains(&0) {
            let poller = TapPoller::new(self.file.clone(), self.readiness.clone(), self.port.clone());
            activation.add(0, Box::new(poller));
        }
        Ok(())
    }

    /// Nothing is in flight, and what waits in the port RX waits for the next one.
    fn deactivate(&mut self, parked: Parked) {
        drop(parked);
    }

    /// A TAP device has no state of its own.
    fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        Ok(SavedState { kind: self.info.kind.to_owned(), version: 1, body: Vec::new() })
    }

    fn load(&mut self, _proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        match state.expect(self.info.kind, 1)? {
            [] => Ok(()),
            body => Err(StateError::Damaged(format!("{} bytes where there are none", body.len())).into()),
        }
    }

    fn reset(&mut self, _proof: &QuiescenceProof) {}
}
