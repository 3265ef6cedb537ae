//! What to do about a VM whose disks have lost their servers, as a function of what is seen.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::state_file::{PauseRecord, PauseStage};

/// How a disk stands that may have its VM paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkSeen {
    /// Its server serves it, or could.
    Back {
        /// No request is under way: what was sent again has been answered.
        idle: bool,
    },
    /// There is no connection, for so long.
    Lost(Duration),
    /// Neither: it is not served yet, its server has failed or refuses it, or nobody has asked yet.
    Unknown,
}

/// One disk whose policy is to pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSeen {
    /// When.
    pub timeout: Duration,
    pub link: LinkSeen,
}

/// What is next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    Wait,
    /// Stop the VM, for these disks.
    Pause(BTreeSet<String>),
    /// Ask how the VM is.
    Look,
    /// Note that these disks hold the VM.
    Hold(BTreeSet<String>),
    /// Continue the VM.
    GoOn,
    /// Forget that there was a pause.
    Forget,
}

/// `gone`: disks of the record that are no more, or have another policy. They hold nothing.
pub fn next(
    record: Option<&PauseRecord>,
    seen: &BTreeMap<String, DiskSeen>,
    gone: &BTreeSet<String>,
) -> Next {
    let lost = |seen: &DiskSeen| matches!(seen.link, LinkSeen::Lost(_));
    let due = |seen: &DiskSeen| matches!(seen.link, LinkSeen::Lost(time) if time >= seen.timeout);
    let named = |is: &dyn Fn(&DiskSeen) -> bool| -> BTreeSet<String> {
        seen.iter().filter(|(_, one)| is(one)).map(|(name, _)| name.clone()).collect()
    };
    let any_due = seen.values().any(due);
    let Some(record) = record else {
        // Those that are lost for less time hold it too: they would have it paused again in a moment.
        return if any_due { Next::Pause(named(&lost)) } else { Next::Wait };
    };
    let holders: BTreeSet<String> = record.disks.difference(gone).cloned().collect();
    let back = |idle: bool| {
        holders.iter().all(|name| match seen.get(name).map(|one| one.link) {
            Some(LinkSeen::Back { idle: is }) => is || !idle,
            _ => false,
        })
    };
    match record.stage {
        PauseStage::Left if back(false) => Next::Forget,
        PauseStage::Left => Next::Wait,
        PauseStage::Pausing if any_due => Next::Pause(holders.union(&named(&lost)).cloned().collect()),
        PauseStage::Pausing => Next::Look,
        PauseStage::Paused => {
            let more: BTreeSet<String> = holders.union(&named(&due)).cloned().collect();
            match () {
                () if more.difference(&holders).next().is_some() => Next::Hold(more),
                () if back(true) => Next::GoOn,
                () => Next::Wait,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(5);

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn seen(disks: &[(&str, LinkSeen)]) -> BTreeMap<String, DiskSeen> {
        disks
            .iter()
            .map(|(name, link)| ((*name).to_owned(), DiskSeen { timeout: TIMEOUT, link: *link }))
            .collect()
    }

    fn record(stage: PauseStage, disks: &[&str]) -> PauseRecord {
        PauseRecord { stage, disks: names(disks), monitor: None, since_ms: 0 }
    }

    const IDLE: LinkSeen = LinkSeen::Back { idle: true };
    const BUSY: LinkSeen = LinkSeen::Back { idle: false };
    const SHORT: LinkSeen = LinkSeen::Lost(Duration::from_secs(1));
    const LONG: LinkSeen = LinkSeen::Lost(TIMEOUT);

    #[test]
    fn a_vm_is_paused_after_the_time_and_not_before() {
        let next = |disks: &[(&str, LinkSeen)]| next(None, &seen(disks), &names(&[]));
        assert_eq!(next(&[("a", SHORT), ("b", IDLE)]), Next::Wait);
        assert_eq!(next(&[("a", LinkSeen::Unknown)]), Next::Wait);
        assert_eq!(next(&[("a", LONG), ("b", IDLE)]), Next::Pause(names(&["a"])));
        assert_eq!(next(&[("a", LONG), ("b", SHORT)]), Next::Pause(names(&["a", "b"])));
    }

    #[test]
    fn a_vm_goes_on_when_all_disks_that_hold_it_are_back_and_still() {
        let paused = record(PauseStage::Paused, &["a", "b"]);
        let next =
            |disks: &[(&str, LinkSeen)], gone: &[&str]| next(Some(&paused), &seen(disks), &names(gone));
        assert_eq!(next(&[("a", IDLE), ("b", LONG)], &[]), Next::Wait);
        assert_eq!(next(&[("a", IDLE), ("b", SHORT)], &[]), Next::Wait);
        assert_eq!(next(&[("a", IDLE), ("b", LinkSeen::Unknown)], &[]), Next::Wait, "nobody knows yet");
        assert_eq!(next(&[("a", IDLE), ("b", BUSY)], &[]), Next::Wait, "sent again, not answered yet");
        assert_eq!(next(&[("a", IDLE), ("b", IDLE)], &[]), Next::GoOn);
        assert_eq!(next(&[("a", IDLE)], &[]), Next::Wait, "not read yet");
        assert_eq!(next(&[("a", IDLE)], &["b"]), Next::GoOn, "a disk that is removed holds nothing");
        assert_eq!(next(&[], &["a", "b"]), Next::GoOn);
        // One that is lost meanwhile holds it as well.
        assert_eq!(next(&[("a", IDLE), ("b", IDLE), ("c", LONG)], &[]), Next::Hold(names(&["a", "b", "c"])));
        assert_eq!(next(&[("a", IDLE), ("b", IDLE), ("c", SHORT)], &[]), Next::GoOn);
    }

    #[test]
    fn a_vm_that_somebody_has_resumed_is_left_alone_until_the_connection_was_back() {
        let left = record(PauseStage::Left, &["a"]);
        assert_eq!(next(Some(&left), &seen(&[("a", LONG)]), &names(&[])), Next::Wait);
        assert_eq!(next(Some(&left), &seen(&[("a", BUSY)]), &names(&[])), Next::Forget);
        assert_eq!(next(Some(&left), &seen(&[]), &names(&["a"])), Next::Forget);
    }

    /// A daemon that died in the middle of `stop` does not know whether it came to that.
    #[test]
    fn a_pause_that_was_begun_is_looked_at() {
        let begun = record(PauseStage::Pausing, &["a"]);
        assert_eq!(next(Some(&begun), &seen(&[("a", SHORT)]), &names(&[])), Next::Look);
        assert_eq!(next(Some(&begun), &seen(&[("a", IDLE)]), &names(&[])), Next::Look);
        assert_eq!(next(Some(&begun), &seen(&[("a", LONG)]), &names(&[])), Next::Pause(names(&["a"])));
    }
}
