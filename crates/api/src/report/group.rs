//! What the daemon says of its groups.

use serde::{Deserialize, Serialize};

use crate::spec::{GroupSpec, LimitsSpec, limited, limits_of, with_limits};

macro_rules! report {
    ($(#[$about:meta])* $name:ident { $($(#[$meta:meta])+ $field:ident: $kind:ty,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct $name {
            $($(#[$meta])+ pub $field: $kind,)*
        }
    };
}

limited! { report! spec [disk_limits tx_limits rx_limits]
    {
        /// One group.
        GroupReport
    } {
        /// Its name.
        name: String,
        /// `config`, or `added` at run time.
        origin: String,
        /// Its weight against other groups.
        weight: u32,
        /// The disks that are in it.
        disks: Vec<String>,
        /// The NICs that are in it.
        nics: Vec<String>,
        /// What its disks have in flight, from each core that serves some whose backing is a file or a device.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        in_flight: Vec<InFlightReport>,
        /// What its queues have used of the I/O cores, all cores together.
        #[serde(default)]
        used: GroupUseReport,
        /// The same of each core that has served it. A core that the pool has started may have the number of one that has ended.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        used_per_core: Vec<GroupCoreReport>,
    }
}

/// What the queues of one group have used of I/O cores since the daemon was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GroupUseReport {
    /// Time spent on their work, microseconds. Where several groups had work at once, the time is divided by what each one's work costs.
    pub busy_us: u64,
    /// Their part of the time in which cores polled and found nothing, microseconds: that time is divided by `empty_polls`.
    pub empty_us: u64,
    /// Polls of their queues that found nothing.
    pub empty_polls: u64,
}

impl std::ops::AddAssign for GroupUseReport {
    fn add_assign(&mut self, other: GroupUseReport) {
        self.busy_us += other.busy_us;
        self.empty_us += other.empty_us;
        self.empty_polls += other.empty_polls;
    }
}

/// What the queues of one group have used of one I/O core.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GroupCoreReport {
    /// Number of the core.
    pub core: u32,
    /// What they have used of it.
    #[serde(flatten)]
    pub used: GroupUseReport,
}

/// What the disks of one group have in flight from one core on what their backings lie on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct InFlightReport {
    /// Number of the core.
    pub core: u32,
    /// Names of the host's disks that the backings lie on. Empty if the host does not tell: then the groups of one core share what is in flight.
    pub host_disks: Vec<String>,
    /// The most that they had in flight of late.
    pub bytes: u64,
    /// The most that they may have in flight. Nothing if no other group uses these disks, or if they are not known.
    pub bound_bytes: Option<u64>,
}

impl GroupReport {
    /// Of a group as it is, and what is in it.
    pub fn new(
        spec: &GroupSpec,
        origin: &str,
        disks: Vec<String>,
        nics: Vec<String>,
        in_flight: Vec<InFlightReport>,
        used_per_core: Vec<GroupCoreReport>,
    ) -> Self {
        let [disk, tx, rx] = spec.limits();
        let mut used = GroupUseReport::default();
        used_per_core.iter().for_each(|one| used += one.used);
        with_limits!(
            GroupReport {
                name: spec.name.clone(),
                origin: origin.to_owned(),
                weight: spec.weight,
                disks,
                nics,
                in_flight,
                used,
                used_per_core
            },
            disk_limits = disk,
            tx_limits = tx,
            rx_limits = rx
        )
    }

    /// The limits of its disks, of what its NICs send, and of what they receive.
    pub fn limits(&self) -> [LimitsSpec; 3] {
        [limits_of!(disk_limits of self), limits_of!(tx_limits of self), limits_of!(rx_limits of self)]
    }
}
