//! What counts as named: the shares that a report states.

use super::{SiteRow, in_kernel};
use crate::devices::DevicePlace;
use crate::event::Detail;
use crate::profile::SiteCounts;
use crate::reason::Kind;

/// The shares of exits that have names, in percent.
pub(super) struct Named {
    /// A function, of those that an instruction of the guest's kernel caused.
    pub functions: f64,
    /// A register, of those about a port, an address or an MSR.
    pub devices: f64,
    /// A function, and a register if it is about one, of all exits that happened but interrupts, which no function has caused.
    pub attributed: f64,
}

impl Named {
    /// Of sites and how often they were recorded; `exits` were counted while that went on.
    pub(super) fn of(sites: &[(SiteRow, SiteCounts)], kernel: u64, exits: u64) -> Named {
        let has_function = |site: &SiteRow| site.function.is_some();
        let has_register = |site: &SiteRow| site.place.as_ref().is_some_and(DevicePlace::is_named);
        let in_kernel = |site: &SiteRow| site.rip.is_some_and(|rip| in_kernel(rip, kernel));
        let count = |of: &dyn Fn(&SiteRow) -> bool| {
            sites.iter().filter(|(site, _)| of(site)).map(|(_, tally)| tally.count).sum::<u64>()
        };
        let caused = |site: &SiteRow| at_instruction(site.kind);
        Named {
            functions: percent(
                count(&|site| in_kernel(site) && caused(site) && has_function(site)),
                count(&|site| in_kernel(site) && caused(site)),
            ),
            devices: percent(
                count(&|site| about_device(site) && has_register(site)),
                count(&|site| about_device(site)),
            ),
            attributed: percent(
                count(&|site| {
                    caused(site) && has_function(site) && (!about_device(site) || has_register(site))
                }),
                exits.saturating_sub(count(&|site| !caused(site))),
            ),
        }
    }
}

fn percent(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 * 100.0 / all as f64 }
}

/// Exits that an instruction causes; host interrupts and the like come anywhere.
pub(super) fn at_instruction(kind: Kind) -> bool {
    !matches!(kind, Kind::HostInterrupt | Kind::InterruptWindow | Kind::Timer)
}

/// Whether a register is to be named: also where the kernel did not say which. Memory that was missing is no device's.
fn about_device(site: &SiteRow) -> bool {
    matches!(site.kind, Kind::Port | Kind::Memory | Kind::Msr) && !matches!(site.detail, Detail::Fault(_))
}
