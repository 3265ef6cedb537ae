//! What the crates below call the words of the control interface.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use ioplane_api::size::Size;
use ioplane_api::spec::{
    CoreSpec, DirectWord, EngineWord, FaultSpec, FaultWord, FunctionSpec, LimitsSpec, LinkWord, MemoryWord,
    NotifyWord, VlanSpec, YieldWord,
};
use ioplane_cores::{CoreSettings, Notify, YieldPolicy};
use ioplane_device::Budget;
use ioplane_memory::{Files, Limits};
use ioplane_network::Vlan;
use ioplane_passthrough::monitor::{Policies, Policy};
use ioplane_scheduler::{CoreObjective, RateLimit};
use ioplane_storage::{Direct, EngineChoice};
use ioplane_virtio::DeviceLimits;

/// How a core learns of requests, as the interface calls it.
pub fn notify_word(notify: Notify) -> NotifyWord {
    match notify {
        Notify::Polled => NotifyWord::Polled,
        Notify::Adaptive => NotifyWord::Adaptive,
        Notify::Notified => NotifyWord::Notified,
    }
}

/// A word of the interface for which a crate below has a type of its own.
pub trait Lower {
    type Type;

    /// As the crate below calls it.
    fn lower(self) -> Self::Type;
}

macro_rules! lower {
    ($($name:ident => $type:ty { $($variant:ident => $value:expr,)* })*) => {$(
        impl Lower for $name {
            type Type = $type;

            fn lower(self) -> $type {
                match self { $($name::$variant => $value,)* }
            }
        }
    )*};
}

lower! {
    NotifyWord => Notify {
        Polled => Notify::Polled,
        Adaptive => Notify::Adaptive,
        Notified => Notify::Notified,
    }
    YieldWord => YieldPolicy {
        Dedicated => YieldPolicy::Dedicated,
        Yields => YieldPolicy::Yields,
        Nice => YieldPolicy::Nice,
    }
    DirectWord => Direct {
        Auto => Direct::Auto,
        On => Direct::On,
        Off => Direct::Off,
    }
    EngineWord => EngineChoice {
        Auto => EngineChoice::Auto,
        IoUring => EngineChoice::IoUring,
        Threads => EngineChoice::Threads,
    }
    LinkWord => bool {
        Up => true,
        Down => false,
    }
    MemoryWord => Files {
        Ram => Files::Ram,
        Any => Files::Any,
    }
    FaultWord => Policy {
        Ignore => Policy::Ignore,
        Error => Policy::Error,
        Stop => Policy::Stop,
    }
}

impl Lower for FaultSpec {
    type Type = Policies;

    fn lower(self) -> Policies {
        Policies { dma: self.dma.lower(), register: self.register.lower() }
    }
}

/// What is asked of a core.
pub fn objective(spec: &CoreSpec) -> CoreObjective {
    CoreObjective {
        p99_ns: spec.p99_us.map(|us| us * 1000),
        cpu_permille: spec.cpu_percent.map(|percent| percent * 10),
    }
}

impl Lower for &CoreSpec {
    type Type = CoreSettings;

    fn lower(self) -> CoreSettings {
        CoreSettings {
            cpu: self.cpu.map(|cpu| cpu as usize),
            notify: self.notify.lower(),
            spin: Duration::from_micros(self.spin_us),
            budget: Budget::of(self.budget),
            objective: objective(self),
            yield_policy: self.yield_policy.lower(),
            ..CoreSettings::default()
        }
    }
}

impl Lower for &VlanSpec {
    type Type = Vlan;

    fn lower(self) -> Vlan {
        match self {
            VlanSpec::All => Vlan::All,
            VlanSpec::Access(one) => Vlan::Access(*one),
            VlanSpec::Trunk(list) => Vlan::Trunk(list.clone()),
        }
    }
}

/// Makes these the limits of a device in one direction.
pub fn limit(limits: &mut DeviceLimits, spec: &LimitsSpec) {
    let lower = |limit: Option<(u64, u64)>| {
        let (per_second, burst) = limit?;
        Some(RateLimit { per_second: NonZeroU64::new(per_second)?, burst })
    };
    limits.change(lower(spec.rate()), lower(spec.bandwidth()), Instant::now());
}

/// What the clients of a function may take of memory. Pinned for hardware without being told: three quarters of the host's memory.
pub fn limits(function: &FunctionSpec) -> Limits {
    let host = rustix::system::sysinfo();
    let total = u64::from(host.mem_unit).saturating_mul(host.totalram);
    let pinned = function.pinned_memory.map_or(total / 4 * 3, |Size(bytes)| bytes);
    Limits { files: function.guest_memory.lower(), pinned }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_of_which_nothing_is_said_has_the_defaults_of_cores() {
        let (spec, settings) = (CoreSpec::new(0).lower(), CoreSettings::default());
        assert_eq!(format!("{spec:?}"), format!("{settings:?}"));
    }
}
