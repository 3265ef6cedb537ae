//! What of a disk changes while a guest uses it and its backing stays: its limits, its group, what an exporter keeps for it, and what happens when that
//! cannot be reached.
//!
//! The exporter is asked first, which may take as long as the network does. Meanwhile nothing is held that other commands need, so that what they
//! have changed is looked at again afterwards, and only what this command changes is written.

use ioplane_api::spec::{BackingSpec, LimitsSpec, ServedSpec, TimeoutSpec, set_group};
use ioplane_virtio::blk::Blk;

use super::Disk;
use super::reserve::Granted;
use crate::groups::Membership;
use crate::lower::limit;
use crate::refusal::Refusal;
use crate::served::ServedKind;
use crate::state_file::DiskRecord;

/// Who changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Command,
    /// It may leave a burst that a command has set without the limit that it belonged to.
    Configuration,
}

impl Disk {
    /// Changes the limits of its guest, what an exporter keeps for it, its group, and what happens when that exporter cannot be reached: what is left out stays. They are written down first.
    pub async fn set(
        &self,
        limits: LimitsSpec,
        reserved: LimitsSpec,
        group: Option<String>,
        on_timeout: TimeoutSpec,
    ) -> Result<(), Refusal> {
        if on_timeout != TimeoutSpec::default() && self.import().is_none() {
            let reason = "it is no disk of another machine: no server can be unreachable";
            return Err(Refusal::conflict(reason, "leave out timeout_s, on_timeout and qmp"));
        }
        let change = move |record: &mut DiskRecord| {
            let now = &mut record.now;
            now.set_limits(now.limits().changed(limits));
            now.backing.set_reserved(now.backing.reserved().changed(reserved));
            now.backing.set_on_timeout(&on_timeout);
            set_group(&mut now.group, group.clone());
        };
        self.change_settings(&change, Source::Command, reserved != LimitsSpec::default()).await
    }

    /// Becomes what the configuration says, where that differs in nothing else.
    pub(super) async fn follow_configuration(&self, next: DiskRecord) -> Result<(), Refusal> {
        let before = self.note().read().now;
        let (limits, group) = (next.now.limits(), next.now.group.clone());
        let (limited, grouped) = (limits != before.limits(), group != before.group);
        let reserved = next.now.backing.reserved();
        // It may have been swapped since somebody found that nothing but limits changes.
        let same = next.now.backing.same_content(&before.backing);
        let on_timeout = next.now.backing.timeout_fields();
        let waits = on_timeout != before.backing.timeout_fields();
        let reserves = same && reserved != before.backing.reserved();
        let change = move |record: &mut DiskRecord| {
            record.configured.clone_from(&next.configured);
            record.now.at_start = next.now.at_start;
            if limited {
                record.now.set_limits(limits);
            }
            if grouped {
                record.now.group.clone_from(&group);
            }
            if next.now.backing.same_content(&record.now.backing) {
                if let (BackingSpec::File { format, .. }, BackingSpec::File { format: said, .. }) =
                    (&mut record.now.backing, &next.now.backing)
                {
                    *format = *said;
                }
                if waits {
                    record.now.backing.set_on_timeout(&on_timeout);
                }
                if reserves {
                    record.now.backing.set_reserved(reserved);
                }
            }
        };
        self.change_settings(&change, Source::Configuration, reserves).await
    }

    /// Makes that change, which assigns what it is about and nothing else. `reserves`: first the exporter is asked to keep what it says.
    async fn change_settings(
        &self,
        change: &(impl Fn(&mut DiskRecord) + Send + Sync),
        source: Source,
        reserves: bool,
    ) -> Result<(), Refusal> {
        let _settings = self.settings.lock().await;
        let next = self.changed(change, source)?;
        let granted = if reserves { Some(self.reserve(next.now.backing.reserved()).await?) } else { None };
        let changing = self.served.changing.lock().await;
        match self.write_settings(change, source, granted.as_ref()) {
            Ok(next) => self.follow(&next).await,
            Err(refused) => {
                drop(changing);
                if let Some(granted) = granted {
                    granted.undo(self).await;
                }
                Err(refused)
            }
        }
    }

    /// Its record as it is now, with that change, if it is a good one.
    fn changed(&self, change: &impl Fn(&mut DiskRecord), source: Source) -> Result<DiskRecord, Refusal> {
        let mut next = self.note().read();
        change(&mut next);
        next.now.group().map_or(Ok(()), |group| self.served.groups.check(group))?;
        let flaws = match source {
            Source::Command => [next.now.flaws(), next.now.limit_flaws()].concat(),
            Source::Configuration => next.now.flaws(),
        };
        if flaws.is_empty() { Ok(next) } else { Err(Refusal::flaws(&flaws)) }
    }

    /// Writes it down, if the disk is still there and the exporter that has granted a rate still has it.
    fn write_settings(
        &self,
        change: &impl Fn(&mut DiskRecord),
        source: Source,
        granted: Option<&Granted>,
    ) -> Result<DiskRecord, Refusal> {
        // Held until it is written: it would bring back the record of a disk that is removed.
        let left = self.left();
        if left.is_some() {
            let name = self.note().read().now.name;
            return Err(Refusal::missing(
                format!("disk {name} has been removed meanwhile"),
                "see `ioplane disk list`",
            ));
        }
        if let Some(granted) = granted {
            granted.still_holds(self)?;
        }
        let next = self.changed(change, source)?;
        self.note().change(change)?;
        Ok(next)
    }

    /// Has its guest limited and its queues in a group as the record says. The caller sees to it that nobody else changes the device.
    pub(super) async fn follow(&self, record: &DiskRecord) -> Result<(), Refusal> {
        if let Some(import) = self.import() {
            import.set_give_up_after(record.now.backing.on_timeout().error_after());
            // It is of the policy before.
            self.hide_vm_pause();
        }
        let spec = record.now.limits();
        let Membership { share, limits: [shared, ..] } = self.served.groups.membership(&record.now);
        let mut limits = self.served.handle.change(|model| (model.limits().clone(), false)).await?;
        limit(&mut limits, &spec);
        limits.join(shared);
        for handle in self.served.handles() {
            let limits = limits.clone();
            let change = move |model: &mut Blk| {
                model.set_limits(limits);
                model.set_share(share);
            };
            handle.change_limits(change).await?;
        }
        Ok(())
    }
}
