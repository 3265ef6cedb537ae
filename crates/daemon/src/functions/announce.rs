//! The network is told where a guest's addresses are once its function goes on: by its physical function, since the guest may be silent.

use std::sync::Arc;
use std::time::Duration;

use ioplane_device::Lifecycle;
use ioplane_hardware::PhysicalFunction;
use ioplane_host::vfio_user::Handle;
use ioplane_moving::GuestAddress;

use super::body::Body;

/// How often, and how long after each other, ms: one may be lost, and a switch may be about to learn the former place from a late frame.
const TIMES: [u64; 4] = [0, 50, 150, 300];

/// Sends the frames of one round. `false`: there is nothing to say any more.
fn round(addresses: &[GuestAddress], physical: &PhysicalFunction) -> std::io::Result<bool> {
    addresses.iter().try_for_each(|GuestAddress { address, vlan }| physical.announce(*address, *vlan))?;
    Ok(!addresses.is_empty())
}

/// Announces the addresses of a function's guest several times, as long as it goes on there: another function may have the guest by the next.
/// Whoever asked does not wait.
pub(super) fn begin(handle: &Handle<Body>, name: &str, physical: Option<PhysicalFunction>) {
    let Some(physical) = physical else { return };
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
                    round(&addresses, &physical)
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
