//! What groups are to be: a group is a VM, with all its disks and NICs.

use std::ops::RangeInclusive;

use super::checks::name_flaw;
use super::{
    Flaw, LimitFields, LimitsSpec, form, limit_names, limited, limits_of, set_limits, spec, with_limits,
};

/// Weights of groups.
const WEIGHTS: RangeInclusive<u32> = 1..=1000;
/// What a group weighs if nobody says, and what all devices weigh together that are in none.
pub const GROUP_WEIGHT: u32 = 1;

limited! { spec! spec [disk_limits tx_limits rx_limits]
    {
        /// A group, complete and checked.
        GroupSpec
    } {
        /// Unique among the daemon's groups.
        name: String,
        /// The part of a core that it has against other groups, where several have work.
        weight: u32,
    }
}

limited! { form! form [disk_limits tx_limits rx_limits]
    {
        /// A group as somebody asks for it. Its limits are those of all its disks together, and of all its NICs together.
        GroupForm
    } {
        /// Its weight: where several groups have work for a core, each has a part in proportion to its weight, 1 to 1000 [default: 1]
        [long, value_name = "N"]
        weight: u32,
    }
}

limited! { form! change [disk_limits tx_limits rx_limits]
    {
        /// A change of a group: its weight, its limits. What is left out stays as it is.
        GroupChangeForm
    } {
        /// Its weight, 1 to 1000
        [long, value_name = "N"]
        weight: u32,
    }
}

/// What is wrong with the name of a group that is named in a field of a device, if anything.
pub(super) fn group_flaw(name: Option<&str>) -> Option<Flaw> {
    name.and_then(name_flaw).map(|flaw| Flaw { field: "group", ..flaw })
}

/// The group that a form names. An empty name is none.
pub(super) fn named(group: Option<String>) -> Option<String> {
    group.filter(|name| !name.is_empty())
}

/// Puts a device into the group that a change names, if it names one; an empty name is none.
pub fn set_group(of: &mut Option<String>, asked: Option<String>) {
    if asked.is_some() {
        *of = named(asked);
    }
}

impl GroupForm {
    /// The complete group. Left out: a weight of 1, and no limits.
    pub fn spec(self, name: &str) -> Result<GroupSpec, Vec<Flaw>> {
        let (disk, tx, rx) = (
            limits_of!(disk_limits of self).asked(),
            limits_of!(tx_limits of self).asked(),
            limits_of!(rx_limits of self).asked(),
        );
        let spec = with_limits!(
            GroupSpec { name: name.to_owned(), weight: self.weight.unwrap_or(GROUP_WEIGHT) },
            disk_limits = disk,
            tx_limits = tx,
            rx_limits = rx
        );
        spec.asked()
    }
}

impl GroupSpec {
    /// The fields of the limits of its disks, of what its NICs send, and of what they receive.
    pub const LIMITS: [LimitFields; 3] =
        [limit_names!(disk_limits), limit_names!(tx_limits), limit_names!(rx_limits)];

    /// The limits of its disks, of what its NICs send, and of what they receive, in the order of [`GroupSpec::LIMITS`].
    pub fn limits(&self) -> [LimitsSpec; 3] {
        [limits_of!(disk_limits of self), limits_of!(tx_limits of self), limits_of!(rx_limits of self)]
    }

    /// With what a change says: what it leaves out stays.
    pub fn changed(&self, change: &GroupChangeForm) -> Result<GroupSpec, Vec<Flaw>> {
        let [disk, tx, rx] = self.limits();
        let disk = disk.changed(limits_of!(disk_limits of change));
        let tx = tx.changed(limits_of!(tx_limits of change));
        let rx = rx.changed(limits_of!(rx_limits of change));
        let mut next = GroupSpec { weight: change.weight.unwrap_or(self.weight), ..self.clone() };
        set_limits!(disk_limits of next = disk);
        set_limits!(tx_limits of next = tx);
        set_limits!(rx_limits of next = rx);
        next.asked()
    }

    /// Everything that is wrong with it in itself. The state file is checked by this too.
    pub fn flaws(&self) -> Vec<Flaw> {
        let mut flaws: Vec<Flaw> = name_flaw(&self.name).into_iter().collect();
        if !WEIGHTS.contains(&self.weight) {
            let remedy = format!("give {} to {}", WEIGHTS.start(), WEIGHTS.end());
            flaws.push(Flaw::new("weight", format!("weight = {}", self.weight), remedy));
        }
        let limits = self.limits().into_iter().zip(Self::LIMITS);
        flaws.extend(limits.flat_map(|(limits, fields)| limits.flaws(fields)));
        flaws
    }

    /// The same as somebody asks for it, unless something is wrong with it.
    fn asked(self) -> Result<GroupSpec, Vec<Flaw>> {
        let mut flaws = self.flaws();
        let limits = self.limits().into_iter().zip(Self::LIMITS);
        flaws.extend(limits.flat_map(|(limits, fields)| limits.lonely(fields)));
        if flaws.is_empty() { Ok(self) } else { Err(flaws) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::Size;

    fn fields(flaws: Result<GroupSpec, Vec<Flaw>>) -> Vec<&'static str> {
        flaws.unwrap_err().into_iter().map(|flaw| flaw.field).collect()
    }

    #[test]
    fn a_group_has_a_weight_and_limits_of_three_kinds() {
        let group = GroupForm::default().spec("web").unwrap();
        assert_eq!((group.weight, group.limits()), (1, [LimitsSpec::default(); 3]));
        let form = GroupForm {
            weight: Some(7),
            iops_limit: Some(10),
            tx_frame_limit: Some(20),
            rx_bandwidth_limit: Some(Size(1 << 20)),
            ..GroupForm::default()
        };
        let group = form.spec("web").unwrap();
        let [disk, tx, rx] = group.limits();
        assert_eq!(
            (group.weight, disk.rate, tx.rate, rx.bandwidth),
            (7, Some(10), Some(20), Some(Size(1 << 20)))
        );
        let change = GroupChangeForm { weight: Some(2), iops_limit: Some(0), ..GroupChangeForm::default() };
        let changed = group.changed(&change).unwrap();
        assert_eq!(changed, GroupSpec { weight: 2, iops_limit: None, ..group });
    }

    #[test]
    fn flaws_name_their_field() {
        for weight in [0, 1001] {
            let form = GroupForm { weight: Some(weight), ..GroupForm::default() };
            assert_eq!(fields(form.spec("web")), ["weight"]);
            let change = GroupChangeForm { weight: Some(weight), ..GroupChangeForm::default() };
            assert_eq!(fields(GroupForm::default().spec("web").unwrap().changed(&change)), ["weight"]);
        }
        assert_eq!(fields(GroupForm::default().spec("a b")), ["name"]);
        let form = GroupForm { rx_frame_burst: Some(5), ..GroupForm::default() };
        assert_eq!(fields(form.spec("web")), ["rx_frame_burst"]);
        assert_eq!(group_flaw(Some("a/b")).unwrap().field, "group");
        assert_eq!((group_flaw(Some("web")), named(Some(String::new()))), (None, None));
    }

    #[test]
    fn a_change_that_names_no_group_leaves_a_device_where_it_is() {
        let mut group = Some("web".to_owned());
        set_group(&mut group, None);
        assert_eq!(group.as_deref(), Some("web"));
        set_group(&mut group, Some("db".into()));
        assert_eq!(group.as_deref(), Some("db"));
        set_group(&mut group, Some(String::new()));
        assert_eq!(group, None);
    }
}
