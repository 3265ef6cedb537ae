//! The network is told where a guest's addresses are once its function goes on: by its physical function, since the guest may be silent.

use std::sync::Arc;
use std::time::Duration;

use ioplane_api::spec::{TagWord, VfVlan};
use ioplane_device::Lifecycle;
use ioplane_hardware::PhysicalFunction;
use ioplane_host::vfio_user::Handle;
use ioplane_moving::GuestAddress;

use super::body::Body;

/// How often, and how long after each other, ms: one may be lost, and a switch may be about to learn the former place from a late frame.
const TIMES: [u64; 4] = [0, 50, 150, 300];

/// Sends the frames of one round. `false`: there is nothing to say any more.
fn round(
    addresses: &[GuestAddress],
    administered: Option<VfVlan>,
    physical: &PhysicalFunction,
) -> std::io::Result<bool> {
    for GuestAddress { address, vlan } in addresses {
        physical.announce(*address, tag(*vlan, administered))?;
    }
    Ok(!addresses.is_empty())
}

/// With what tag a guest's frames leave the card, which puts them into the VLAN of its administrator, if there is one.
fn tag(of_the_guest: Option<u16>, administered: Option<VfVlan>) -> Option<VfVlan> {
    administered.or(of_the_guest.map(|id| VfVlan { id, qos: 0, proto: TagWord::Dot1q }))
}

/// Announces the addresses of a function's guest several times, as long as it goes on there: another function may have the guest by the next.
/// Whoever asked does not wait.
pub(super) fn begin(
    handle: &Handle<Body>,
    name: &str,
    physical: Option<PhysicalFunction>,
    administered: Option<VfVlan>,
) {
    // A switch would look for the guest behind an interface that only stands in for the physical function's.
    let Some(physical) = physical.filter(PhysicalFunction::is_at_the_function) else { return };
    let (handle, name) = (handle.clone(), name.to_owned());
    let connections = handle.status().connections;
    tokio::spawn(async move {
        let physical = Arc::new(physical);
        for after in TIMES {
            tokio::time::sleep(Duration::from_millis(after)).await;
            if handle.status().connections != connections {
                return;
            }
            let physical = physical.clone();
            // On the function's thread: from when it is told to stand still on, nothing is sent in its guest's name.
            let said = move |device: &mut Lifecycle<Body>| {
                device.with(|body| {
                    let addresses = body.carry().map(|carry| carry.addresses()).unwrap_or_default();
                    round(&addresses, administered, &physical)
                })
            };
            match handle.with(said).await {
                // One that has no time is asked again.
                Ok(Ok(Ok(true)) | Err(_)) => {}
                Ok(Ok(Err(error))) => {
                    tracing::warn!(function = name, %error, "its guest's addresses are not announced");
                }
                Ok(Ok(Ok(false))) | Err(_) => return,
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_in_the_vlan_of_the_administrator() {
        let of = |id| Some(VfVlan { id, qos: 0, proto: TagWord::Dot1q });
        assert_eq!((tag(None, None), tag(Some(5), None)), (None, of(5)));
        assert_eq!((tag(None, of(7)), tag(Some(5), of(7))), (of(7), of(7)));
    }
}
