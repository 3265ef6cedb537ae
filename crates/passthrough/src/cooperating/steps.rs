//! A function whose driver cooperates comes to rest, and goes on: by the driver's list, without a word of what it is.

use std::time::{Duration, Instant};

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_moving::{DirectStateError, MovingError, PAGE, PageSet, open, seal};
use ioplane_pci::spec;

use super::page::{PageFlaw, SharedEntry, SharedPage};
use super::{Cooperating, Phase, Shared};
use crate::direct::{CarryError, Motion};
use crate::set_up::SetUp;

/// What its states are called.
pub(crate) const KIND: &str = "cooperating";
/// How long two registers may differ that should become the same: frames that are not sent by then, without a link, are the driver's to
/// send again.
const SENT: Duration = Duration::from_millis(100);
/// How long a function at rest waits for its driver, which a guest that runs needs some milliseconds for: looks, and time.
const MARKING: (u32, Duration) = (100, Duration::from_secs(1));
/// Of the PCI Express capability: device status, and its bit for transactions that were not answered (7.5.3.5).
const STATUS: u64 = 10;
const PENDING: u16 = 1 << 5;

impl<H: Hardware> Cooperating<H> {
    pub(crate) fn motion(&self) -> Motion {
        match self.phase {
            Phase::Running | Phase::Locking | Phase::Draining => Motion::Runs,
            Phase::Stopping(..) | Phase::Marking(..) => Motion::Stopping,
            Phase::Still => Motion::Still,
        }
    }

    /// What the driver shares with us, or why that is not there.
    fn announced(&self) -> Result<(&Shared, SharedPage), CarryError> {
        match (&self.shared, &self.flaw) {
            (Some(shared), _) => Ok((shared, self.page(shared)?)),
            (None, Some(flaw)) => Err(flaw.clone().into()),
            (None, None) => Err(CarryError::NoDriver),
        }
    }

    /// Whether its driver cooperates.
    pub(crate) fn may_rest(&self) -> Result<(), CarryError> {
        self.announced().map(drop)
    }

    /// One look on its way to rest.
    pub(crate) fn rest(&mut self) -> Result<bool, CarryError> {
        let page = match self.announced() {
            Ok((_, page)) => page,
            Err(error) => {
                // Whoever takes the page away while it is used has no function to go on with.
                self.phase = Phase::Running;
                return Err(error);
            }
        };
        if matches!(self.phase, Phase::Running | Phase::Locking) {
            self.phase = Phase::Locking;
            if page.lock() {
                self.phase = Phase::Draining;
            }
            return Ok(false);
        }
        if self.phase == Phase::Draining {
            self.phase = Phase::Stopping(0, Instant::now());
        }
        while let Phase::Stopping(number, since) = self.phase {
            let Some(entry) = self.shared.as_ref().and_then(|shared| shared.entries.get(number)).copied()
            else {
                self.quiet(&page)?;
                if self.pending()? {
                    return Ok(false);
                }
                page.still();
                self.phase = Phase::Still;
                // Where memory stays what it is nothing has to be marked.
                if self.logs {
                    self.phase = Phase::Marking(0, Instant::now());
                    self.signal();
                }
                break;
            };
            if !self.stopped(entry, since)? {
                return Ok(false);
            }
            self.phase = Phase::Stopping(number + 1, Instant::now());
        }
        if let Phase::Marking(looks, since) = self.phase {
            if looks < MARKING.0 && since.elapsed() < MARKING.1 && !page.is_marked() {
                self.phase = Phase::Marking(looks + 1, since);
                return Ok(false);
            }
            self.phase = Phase::Still;
        }
        Ok(true)
    }

    /// One look at what an entry asks for.
    fn stopped(&mut self, entry: SharedEntry, since: Instant) -> Result<bool, MovingError> {
        match entry {
            SharedEntry::Clear { offset, bits } => {
                let now = self.get(offset)?;
                if now & bits == 0 {
                    return Ok(true);
                }
                self.put(offset, now & !bits)?;
                Ok(self.get(offset)? & bits == 0)
            }
            SharedEntry::Equal { offset, other } => {
                Ok(self.get(offset)? == self.get(other)? || since.elapsed() >= SENT)
            }
            SharedEntry::Keep { .. } | SharedEntry::Area { .. } | SharedEntry::Counter { .. } => Ok(true),
        }
    }

    /// Reads what the driver wants to have kept, and takes bus mastering away.
    fn quiet(&mut self, page: &SharedPage) -> Result<(), MovingError> {
        self.count()?;
        for number in 0..self.shared.as_ref().map_or(0, |shared| shared.entries.len()) {
            let entry = self.shared.as_ref().map(|shared| shared.entries[number]);
            if let Some(SharedEntry::Keep { offset }) = entry {
                page.put_value(number, self.get(offset)?);
            }
        }
        Ok(self.hardware.master(false)?)
    }

    /// Whether something that it has asked for is still to be answered.
    fn pending(&mut self) -> Result<bool, MovingError> {
        let Some(at) = self.hardware.capability(spec::CAP_EXPRESS)? else { return Ok(false) };
        let mut status = [0; 2];
        self.hardware.read_config(at + STATUS, &mut status)?;
        Ok(u16::from_le_bytes(status) & PENDING != 0)
    }

    /// Nobody waits for it any more: its driver goes on, if it has not come to rest.
    pub(crate) fn give_up(&mut self) {
        if !matches!(self.phase, Phase::Locking | Phase::Draining) {
            return;
        }
        self.phase = Phase::Running;
        if let Ok((_, page)) = self.announced() {
            page.unlock();
        }
        self.signal();
    }

    /// Pages that were written and that nobody but us knows of: our own, and the ranges of the list.
    pub(crate) fn pages(&self) -> PageSet {
        let (Some(shared), Ok(view)) = (&self.shared, self.view()) else { return PageSet::new() };
        let mut pages = PageSet::from([shared.gpa / PAGE]);
        for entry in &shared.entries {
            if let SharedEntry::Area { gpa, len } = *entry {
                pages.extend(gpa / PAGE..=(gpa + len - 1) / PAGE);
            }
        }
        pages.retain(|page| page.checked_mul(PAGE).is_some_and(|gpa| view.window(gpa, PAGE, 1).is_ok()));
        pages
    }

    /// What another host needs to find all else in the guest's memory.
    pub(crate) fn state(&self) -> Result<Vec<u8>, CarryError> {
        let (shared, _) = self.announced()?;
        let body = postcard::to_stdvec(&(KIND, shared.gpa))
            .map_err(|error| MovingError::from(DirectStateError::Damaged(error.to_string())))?;
        Ok(seal(&body))
    }

    /// Takes such a state, a stranger's, for the guest whose memory this function has now.
    pub(crate) fn load(&mut self, state: &[u8], set_up: SetUp) -> Result<(), CarryError> {
        if self.shared.is_some() {
            return Err(CarryError::Driven);
        }
        let body = open(state).map_err(MovingError::from)?;
        let (kind, gpa): (String, u64) = match postcard::take_from_bytes(body) {
            Ok((state, [])) => state,
            Ok((_, rest)) => return Err(damaged(format!("{} bytes too many", rest.len()))),
            Err(error) => return Err(damaged(error.to_string())),
        };
        if kind != KIND {
            let kind = kind.chars().take(40).collect();
            return Err(MovingError::from(DirectStateError::OtherModel(kind)).into());
        }
        let shared = self.believe(gpa)?;
        if !self.page(&shared)?.is_locked() {
            return Err(PageFlaw::Unlocked.into());
        }
        self.capability.announced(gpa);
        (self.shared, self.expected) = (Some(shared), Some(set_up));
        (self.phase, self.copied) = (Phase::Still, true);
        Ok(())
    }

    /// Takes over what `from`, which stands still, has of its driver: the guest's memory is the same.
    pub(crate) fn take_over(&mut self, from: &Cooperating<H>) {
        self.shared.clone_from(&from.shared);
        if let Some(shared) = &self.shared {
            self.capability.announced(shared.gpa);
        }
        (self.phase, self.copied) = (Phase::Still, from.copied);
    }

    /// Resets the function and writes what was kept. Its driver does not have it yet, and it reaches no memory.
    pub(crate) fn bring(&mut self) -> Result<(), MovingError> {
        let page = match self.announced() {
            Ok((_, page)) => page,
            Err(error) => return Err(self.broken(&error.to_string()).into()),
        };
        self.hardware.master(false)?;
        if !self.hardware.reset()? {
            return Err(HardwareError::Unresettable { function: self.name().to_owned() }.into());
        }
        for number in 0..self.shared.as_ref().map_or(0, |shared| shared.entries.len()) {
            let entry = self.shared.as_ref().map(|shared| shared.entries[number]);
            if let Some(SharedEntry::Keep { offset }) = entry {
                self.put(offset, page.value(number))?;
            }
        }
        self.count_from_here()?;
        self.publish();
        self.phase = Phase::Running;
        Ok(())
    }

    /// Its driver has it again, and is told so.
    pub(crate) fn go_on(&mut self) {
        if let Ok((_, page)) = self.announced() {
            page.moved(std::mem::take(&mut self.copied));
            page.unlock();
        }
        self.expected = None;
        self.stale = true;
        self.signal();
    }

    /// It could not be brought back: it reaches no memory, and stands still.
    pub(crate) fn stand(&mut self) {
        let _ = self.hardware.master(false);
        self.phase = Phase::Still;
    }
}

fn damaged(why: String) -> CarryError {
    MovingError::from(DirectStateError::Damaged(why)).into()
}
