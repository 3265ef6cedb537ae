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
    }
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
    ) -> Self {
        let [disk, tx, rx] = spec.limits();
        with_limits!(
            GroupReport {
                name: spec.name.clone(),
                origin: origin.to_owned(),
                weight: spec.weight,
                disks,
                nics,
                in_flight
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
