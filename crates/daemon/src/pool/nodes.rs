//! On which NUMA nodes the memory of guests is: the processes of their front ends are looked at every few seconds.
//!
//! Rejected: `move_pages(2)` over the guest's memory as this process has it mapped, which knows only pages that this process has touched; `get_mempolicy(2)`, which would
//! touch them and so allocate the guest's memory; `/proc/PID/numa_maps`, for which the kernel walks all page tables of the VM.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ioplane_scheduler::ProcessNodes;

use super::facts::DeviceRef;
use crate::Daemon;
use crate::served::blocking;

/// Between two looks at the processes of front ends.
const PERIOD: Duration = Duration::from_secs(5);

/// Where `/proc` is.
pub fn procfs() -> PathBuf {
    #[cfg(feature = "kill-points")]
    if let Some(tree) = std::env::var_os("IOPLANE_TEST_PROC") {
        return tree.into();
    }
    PathBuf::from("/proc")
}

/// On which nodes the memory of guests is, for the policy.
#[derive(Debug, Default)]
pub struct GuestNodes {
    /// The host has no other.
    pub only: Option<u32>,
    pub devices: BTreeMap<DeviceRef, u32>,
}

impl GuestNodes {
    pub fn of(&self, device: &DeviceRef) -> Option<u32> {
        self.only.or_else(|| self.devices.get(device).copied())
    }
}

impl Daemon {
    /// Looks at the processes of front ends for as long as the daemon lives, while there is a pool. On a host with one node there is nothing to find out.
    pub(crate) async fn watch_nodes(self: Arc<Self>) {
        let topology = self.pool.topology();
        if topology.nodes().len() < 2 {
            return;
        }
        let mut nodes = ProcessNodes::new(procfs());
        loop {
            tokio::time::sleep(PERIOD).await;
            if self.config().pool().is_none() {
                continue;
            }
            let (disks, nics) = (self.disks.front_ends().await, self.nics.front_ends().await);
            let disks = disks.into_iter().map(|(name, pid)| (DeviceRef::Disk(name), pid));
            let nics = nics.into_iter().map(|(name, pid)| (DeviceRef::Nic(name), pid));
            let devices: Vec<(DeviceRef, u32)> = disks.chain(nics).collect();
            let (pids, topology) = (devices.iter().map(|(_, pid)| *pid).collect(), topology.clone());
            let looked = blocking(move || {
                let found = nodes.look(&pids, &topology);
                Ok((nodes, found))
            });
            let Ok((looked, found)) = looked.await else { return };
            nodes = looked;
            let node = |(device, pid)| Some((device, *found.get(&pid)?));
            self.pool.guests_are_on(devices.into_iter().filter_map(node).collect());
        }
    }
}
