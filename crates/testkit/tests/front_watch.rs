//! What a front offers to owners that must not wait in it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use ioplane_device::{Access, CoreEnded, CoreId, CoreMessage, CoreSender, Placement, RegisterAddress};
use ioplane_embed::{Presence, SharedDevice, SharedDeviceError};
use ioplane_testkit::toy::ToyCard;
use ioplane_testkit::toy::card::registers::*;

/// The card has no pollers: nobody is ever placed.
#[derive(Debug)]
struct Nowhere;

impl Placement for Nowhere {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        Arc::new(Nowhere)
    }
}

impl CoreSender for Nowhere {
    fn send(&self, order: CoreMessage) -> Result<(), CoreEnded> {
        Err(CoreEnded(order))
    }

    fn core(&self) -> CoreId {
        CoreId(0)
    }
}

fn write(front: &SharedDevice<ToyCard>, register: u64, value: u64) -> Result<bool, SharedDeviceError> {
    front.try_access(RegisterAddress::Bar(0, register), Access::Write(&value.to_le_bytes()))
}

fn read(front: &SharedDevice<ToyCard>, register: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    let there =
        front.try_access(RegisterAddress::Bar(0, register), Access::Read(&mut bytes)).expect("it is open");
    there.then(|| u64::from_le_bytes(bytes))
}

/// Whether the watch was written since it was last read.
fn told(watch: &OwnedFd) -> bool {
    rustix::io::read(watch, &mut [0u8; 8]).is_ok()
}

#[test]
fn who_tries_hears_when_to_try_again() {
    let front = SharedDevice::new(ToyCard::default(), Arc::new(Nowhere)).unwrap();
    let watch = front.watch().unwrap();
    assert!(write(&front, SCRATCH, 1).unwrap() && !told(&watch), "an access changes no stage");
    front.quiesce(Instant::now()).unwrap().unwrap();
    assert!(told(&watch) && front.presence() == Presence::Held);
    assert!(!write(&front, SCRATCH, 2).unwrap());
    assert_eq!((read(&front, SCRATCH), told(&watch)), (None, false));
    front.resume().unwrap();
    assert!(told(&watch));
    assert_eq!(read(&front, SCRATCH), Some(1), "what was refused has not happened");
    // Settled on its way, and taken back.
    front.begin_quiesce().unwrap();
    assert!(!write(&front, SCRATCH, 2).unwrap());
    told(&watch);
    front.undrain().unwrap();
    assert!(told(&watch) && write(&front, SCRATCH, 2).unwrap());
    // Busy on its way: served.
    write(&front, BUSY, 1).unwrap();
    front.begin_quiesce().unwrap();
    assert_eq!((read(&front, SCRATCH), front.presence()), (Some(2), Presence::Quiescing));
    front.undrain().unwrap();
    write(&front, BUSY, 0).unwrap();
    // Out, in, and gone.
    front.quiesce(Instant::now()).unwrap().unwrap();
    let device = front.take().unwrap();
    assert!(told(&watch) && front.presence() == Presence::Away && read(&front, SCRATCH).is_none());
    front.hold(device).unwrap();
    assert!(told(&watch));
    front.close();
    assert!(told(&watch) && front.presence() == Presence::Closed);
    assert!(matches!(write(&front, SCRATCH, 1), Err(SharedDeviceError::Closed)));
}

#[test]
fn changes_are_made_wherever_the_device_is_here() {
    let front = SharedDevice::new(ToyCard::default(), Arc::new(Nowhere)).unwrap();
    let looked = || front.with(|card| card.seen().suspends.load(SeqCst));
    assert!(looked().is_ok() && front.while_held(|_| ()).is_err());
    write(&front, BUSY, 1).unwrap();
    front.begin_quiesce().unwrap();
    assert!(looked().is_ok() && front.while_held(|_| ()).is_err());
    assert!(matches!(front.reset(), Err(SharedDeviceError::Not { .. })), "it is on its way to somebody");
    front.suspend(Instant::now()).unwrap();
    assert!(looked().is_ok() && front.while_held(|_| ()).is_ok());
    let device = front.take().unwrap();
    assert!(looked().is_err() && front.while_held(|_| ()).is_err() && front.reset().is_err());
    drop(device);
    front.close();
    assert!(matches!(looked(), Err(SharedDeviceError::Closed)));
}

#[test]
fn a_reset_goes_on_where_the_device_ran_and_not_where_it_was_held() {
    let card = ToyCard::default();
    let seen = card.seen();
    let front = SharedDevice::new(card, Arc::new(Nowhere)).unwrap();
    write(&front, SCRATCH, 1).unwrap();
    write(&front, BUSY, 1).unwrap();
    front.reset().unwrap();
    assert_eq!(
        (read(&front, SCRATCH), seen.resets.load(SeqCst), seen.suspends.load(SeqCst)),
        (Some(0), 1, 1)
    );
    write(&front, SCRATCH, 1).unwrap();
    front.quiesce(Instant::now()).unwrap().unwrap();
    front.reset().unwrap();
    assert_eq!((front.presence(), seen.resets.load(SeqCst)), (Presence::Held, 2));
    front.resume().unwrap();
    assert_eq!(read(&front, SCRATCH), Some(0));
    seen.stubborn.store(true, SeqCst);
    write(&front, BUSY, 1).unwrap();
    assert!(front.reset().is_err(), "not by force either");
    assert_eq!((read(&front, BUSY), seen.resets.load(SeqCst)), (Some(1), 2), "it runs as it was");
}
