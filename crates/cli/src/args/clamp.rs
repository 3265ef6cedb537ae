//! `exits clamp`.

use clap::Args;

/// A slower timer for a VM, or for all of this host.
#[derive(Debug, Args)]
pub struct ClampArgs {
    /// The most ticks per second (19 to 1000), off (the guest's own rate again), or status
    #[arg(value_name = "HZ|off|status", default_value = "status", value_parser = action)]
    pub action: ClampAction,
    /// The VM, by its VMM's name for it or by process number; digits alone are a number, name:7 and pid:7 say which [default: the
    /// only one]
    #[arg(long, value_name = "NAME|PID", conflicts_with = "host")]
    pub vm: Option<String>,
    /// What the guest tells the time by: Linux says it in /sys/devices/system/clocksource/clocksource0/current_clocksource. Needed to
    /// switch on. A clock that counts ticks (pit, jiffies) is refused: it would go slow
    #[arg(long, value_name = "CLOCK")]
    pub clock: Option<String>,
    /// All VMs of this host, by KVM's parameter min_timer_period_us: periodic timers of the PIT and of local APICs
    #[arg(long)]
    pub host: bool,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClampAction {
    /// At most so many ticks per second.
    Hz(u32),
    /// The guest's own rate again.
    Off,
    /// Say how it stands.
    Status,
}

fn action(word: &str) -> Result<ClampAction, String> {
    match word {
        "off" => Ok(ClampAction::Off),
        "status" => Ok(ClampAction::Status),
        _ => hz(word).map(ClampAction::Hz),
    }
}

/// Ticks per second that a PIT can be clamped to.
pub(super) fn hz(word: &str) -> Result<u32, String> {
    let hz = word.parse().ok().filter(|hz| (19..=1000).contains(hz));
    hz.ok_or_else(|| "it must be 19 to 1000, the most ticks per second".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!(action("100"), Ok(ClampAction::Hz(100)));
        assert_eq!(action("off"), Ok(ClampAction::Off));
        assert_eq!(action("status"), Ok(ClampAction::Status));
        for word in ["18", "1001", "-1", "on", "100Hz", "", "4294967396"] {
            assert!(action(word).is_err(), "{word}");
        }
    }
}
