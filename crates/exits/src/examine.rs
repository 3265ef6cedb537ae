//! From a profile to a report that says what to do as well: above both the data and the rules.

use ioplane_kvmstat::Totals;

use crate::advice::advise;
use crate::profile::Profile;
use crate::report::{Names, Report, SITES, Subject};

impl Report {
    /// Puts a profile into words, with findings. `kernel` is KVM's own count over the same time.
    pub fn new(subject: Subject<'_>, profile: &Profile, kernel: Option<Totals>, names: &Names<'_>) -> Report {
        let mut report = Report::of(subject, profile, kernel, names);
        report.findings = advise(&report);
        // Only now: rare sites of one device add up.
        report.sites.truncate(SITES);
        report
    }
}
