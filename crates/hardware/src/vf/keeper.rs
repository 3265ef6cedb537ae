//! What a virtual function was set to at its physical function before a guest came that brought settings along: kept, and put back.
//!
//! ```text
//!   a VMM comes, or resets it: which address is fixed is seen
//!   a guest moves here:  what it may bring along is set --> its VMM goes, or the move is called off: put back
//!   a guest moves away:  carried --> left: put back; the address that it has taken along is nobody's here until the next VMM comes
//! ```

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ioplane_api::request::PhysicalForm;
use ioplane_api::spec::{AdoptSpec, MacAddress, PciAddress, SettingWord, VfLinkWord, VfSetting, VfSettings};
use serde::{Deserialize, Serialize};

use super::netlink::Said;
use super::{Named, Netlink, Place};
use crate::lease;
use crate::record;

/// Why settings are not set, or not put back.
#[derive(Debug, thiserror::Error)]
pub enum VfError {
    /// No administrator can have set this.
    #[error("its settings at the physical function make no sense: {0}")]
    Nonsense(String),
    /// They allow more than the administrator of this host does.
    #[error(
        "its guest has `{wanted}` at the physical function of its host, and `{own}` where it is to go allows less"
    )]
    Wider {
        /// What it has there.
        wanted: String,
        /// What it has here.
        own: String,
        /// Which it is.
        word: &'static str,
        /// What an administrator types to allow it.
        command: String,
    },
    /// The card's driver here does not offer it.
    #[error(
        "its guest has `{wanted}` at the physical function of its host, which the driver of {interface}, where it is to go, does not offer"
    )]
    NotOffered {
        /// What it has there.
        wanted: String,
        /// The physical function here.
        interface: String,
    },
    /// The kernel refuses it.
    #[error("`{command}` is refused: {source}{more}")]
    Refused {
        /// What was tried.
        command: String,
        /// What may explain it.
        more: String,
        /// What the kernel says.
        source: io::Error,
    },
    /// The settings cannot be read.
    #[error("what its physical function has for it cannot be read: {0}")]
    Unread(#[from] io::Error),
    /// What is to be put back cannot be written down, or taken from there.
    #[error("{path}: {source}")]
    Record {
        /// Where.
        path: PathBuf,
        /// What failed.
        source: io::Error,
    },
}

/// What the physical function has for a virtual one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VfShown {
    /// Interface of the physical function.
    pub interface: String,
    /// Which of its virtual functions.
    pub number: u32,
    /// The address that it has, whoever has set it.
    pub address: Option<MacAddress>,
    /// What the administrator has set, or was set for the guest.
    pub settings: VfSettings,
    /// What is put back when the guest is gone.
    pub own: Option<VfSettings>,
}

/// What is to be put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// What it was.
    own: VfSettings,
    /// What was made of it. What is something else by now was set by somebody else since, and stays.
    given: VfSettings,
}

impl Kept {
    /// What puts it back, of something that says this now, in the order in which it is done. The address is put back whatever it is now: a
    /// guest that is trusted may have changed it.
    fn due(&self, now: &Said) -> Vec<VfSetting> {
        let changed = self.given.differing(&self.own).into_iter().rev();
        let still = |setting: &VfSetting| {
            matches!(setting, VfSetting::Mac(_))
                || now.settings.get(setting.word()) == self.given.get(setting.word())
        };
        changed.filter(still).collect()
    }
}

#[derive(Debug, Default)]
struct Inner {
    address: PciAddress,
    /// The address that it had when it was reset last, and nobody had used it since: the administrator's.
    fixed: Option<MacAddress>,
    kept: Option<Kept>,
    /// What its guest has taken along: address, and what of it is the administrator's.
    along: Option<(Option<MacAddress>, Option<MacAddress>)>,
    /// The former address is nobody's here until the next VMM comes.
    withheld: bool,
    /// What it was set to when its guest's messages were said ahead.
    noted: Option<VfSettings>,
}

/// The settings of one virtual function at its physical function. Blocks while the kernel is asked.
#[derive(Debug)]
pub struct Keeper {
    root: PathBuf,
    folder: PathBuf,
    inner: Mutex<Inner>,
}

/// With the settings of the administrator alone: an address that is not fixed is the guest's.
fn administered(said: &Said, fixed: Option<MacAddress>) -> VfSettings {
    let trusted = said.settings.trust.unwrap_or(false);
    let mac = match (fixed, said.address) {
        // The guest could not have changed it: somebody else did.
        (Some(_), Some(now)) if !trusted => Some(now),
        (fixed, _) => fixed,
    };
    VfSettings { mac, ..said.settings }
}

/// Whether a guest may do more with one value of a setting than with another, or takes more from others.
fn allows_more(one: VfSetting, other: VfSetting) -> bool {
    let rate = |max: u32| if max == 0 { u32::MAX } else { max };
    match (one, other) {
        (VfSetting::Mac(new), VfSetting::Mac(old)) => old.is_some() && new != old,
        (VfSetting::Vlan(new), VfSetting::Vlan(old)) => old.is_some() && new != old,
        (VfSetting::Spoofchk(new), VfSetting::Spoofchk(old)) => old && !new,
        (VfSetting::Trust(new), VfSetting::Trust(old))
        | (VfSetting::QueryRss(new), VfSetting::QueryRss(old)) => new && !old,
        (VfSetting::Rate { min, max }, VfSetting::Rate { min: own_min, max: own_max }) => {
            min > own_min || rate(max) > rate(own_max)
        }
        (VfSetting::State(new), VfSetting::State(old)) => old == VfLinkWord::Disable && new != old,
        _ => true,
    }
}

/// What has to be set so that a guest has here what it had there, if it may.
fn plan(
    own: &VfSettings,
    form: &PhysicalForm,
    adopt: &AdoptSpec,
    named: &Named,
) -> Result<Vec<VfSetting>, VfError> {
    if let Some(flaw) = form.settings.flaw() {
        return Err(VfError::Nonsense(flaw));
    }
    let mut changes = Vec::new();
    for wanted in own.differing(&form.settings) {
        let Some(now) = own.get(wanted.word()) else {
            // Off, where there is nothing to switch on.
            if let VfSetting::Spoofchk(false) | VfSetting::Trust(false) | VfSetting::QueryRss(false) = wanted
            {
                continue;
            }
            let interface = named.interface.clone();
            return Err(VfError::NotOffered { wanted: wanted.to_string(), interface });
        };
        // The guest chose the address that is fixed here.
        if wanted == VfSetting::Mac(None) && own.mac == form.address {
            continue;
        }
        let word = wanted.word();
        if allows_more(wanted, now) && !adopt.has(word) {
            let (own, command) = (now.to_string(), named.command(wanted));
            return Err(VfError::Wider { wanted: wanted.to_string(), own, word: word.word(), command });
        }
        changes.push(wanted);
    }
    Ok(changes)
}

fn set(place: &dyn Place, setting: VfSetting) -> Result<(), VfError> {
    place.set(setting).map_err(|source| {
        let named = place.named();
        let more = match (setting, named.speed) {
            (VfSetting::Rate { .. }, Some(speed)) => format!(" ({} has {speed} Mbit/s)", named.interface),
            (VfSetting::Rate { .. }, None) => format!(" ({} has no link)", named.interface),
            _ => String::new(),
        };
        VfError::Refused { command: named.command(setting), more, source }
    })
}

/// Each of them, also after one that fails; the first error.
fn set_all(place: &dyn Place, settings: Vec<VfSetting>) -> Result<(), VfError> {
    settings.into_iter().map(|setting| set(place, setting)).fold(Ok(()), Result::and)
}

/// These settings with others in their places.
fn with(settings: &VfSettings, changes: &[VfSetting]) -> VfSettings {
    let mut settings = *settings;
    for change in changes {
        match *change {
            VfSetting::Mac(mac) => settings.mac = mac,
            VfSetting::Vlan(vlan) => settings.vlan = vlan,
            VfSetting::Spoofchk(yes) => settings.spoofchk = Some(yes),
            VfSetting::Trust(yes) => settings.trust = Some(yes),
            VfSetting::Rate { min, max } => (settings.min_tx_rate, settings.max_tx_rate) = (min, max),
            VfSetting::State(word) => settings.state = word,
            VfSetting::QueryRss(yes) => settings.query_rss = Some(yes),
        }
    }
    settings
}

impl Keeper {
    /// Of the virtual function at `address`, on the host whose sysfs is mounted at `root`. What is to be put back is written to a file in
    /// `folder` before it is changed.
    pub fn new(root: &Path, folder: &Path, address: PciAddress) -> Keeper {
        let inner = Inner { address, ..Inner::default() };
        Keeper { root: root.into(), folder: folder.into(), inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, inner: &Inner) -> io::Result<Netlink> {
        Netlink::of(&self.root, inner.address)
    }

    fn remember(&self, inner: &mut Inner, kept: Option<Kept>) -> Result<(), VfError> {
        inner.remember(&self.folder, kept)
    }

    /// It was reset, and nobody has used it since: the address that it has now is the administrator's. (Linux's igb forgets another one then.)
    pub fn was_reset(&self) {
        let mut inner = self.lock();
        inner.fixed = self.place(&inner).and_then(|place| place.said()).ok().and_then(|said| said.address);
    }

    /// A VMM has come to it, which was reset.
    pub fn begins(&self) -> Result<(), VfError> {
        let done = self.put_back();
        // A former guest that was to move, and did not.
        self.lock().along = None;
        self.was_reset();
        done
    }

    /// What it has now.
    pub fn show(&self) -> io::Result<VfShown> {
        let (address, fixed, kept) = {
            let inner = self.lock();
            (inner.address, inner.fixed, inner.kept)
        };
        let place = Netlink::of(&self.root, address)?;
        let said = place.said()?;
        let Named { interface, number, .. } = place.named();
        let settings = administered(&said, fixed);
        Ok(VfShown { interface, number, address: said.address, settings, own: kept.map(|kept| kept.own) })
    }

    /// What goes along with its guest; none where this host does not drive its physical function.
    pub fn carried(&self) -> Result<Option<PhysicalForm>, VfError> {
        let mut inner = self.lock();
        match self.place(&inner) {
            Ok(place) => inner.carried(&place).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether [`Keeper::adopt`] would do it. Nobody uses the function: all but its address is set for a moment, and put back, since only the
    /// kernel knows what it refuses.
    pub fn may_adopt(&self, form: &PhysicalForm, adopt: &AdoptSpec) -> Result<(), VfError> {
        let mut inner = self.lock();
        let place = self.place(&inner)?;
        inner.put_back(&place, &self.folder)?;
        let (own, mut changes) = inner.plan(&place, form, adopt)?;
        changes.retain(|change| change.word() != SettingWord::Mac);
        inner.change(&place, &self.folder, own, &changes)?;
        inner.put_back(&place, &self.folder)
    }

    /// Sets what a guest that moves here had at the physical function of its host: all of it, or nothing. Nobody uses the function.
    pub fn adopt(&self, form: &PhysicalForm, adopt: &AdoptSpec) -> Result<(), VfError> {
        let mut inner = self.lock();
        let place = self.place(&inner)?;
        inner.put_back(&place, &self.folder)?;
        let (own, changes) = inner.plan(&place, form, adopt)?;
        inner.change(&place, &self.folder, own, &changes)
    }

    /// What it is set to now is noted, for [`Keeper::since_noted`].
    pub fn note(&self) {
        let mut inner = self.lock();
        let said = self.place(&inner).and_then(|place| place.said());
        inner.noted = said.ok().map(|said| said.settings);
    }

    /// Its address, if nothing else was set since [`Keeper::note`] that the function's filters depend on; all zeros for none. The limits of its rate,
    /// `spoofchk`, `trust` and `query_rss` are not: a card's driver that has the function begin anew for one of them refuses its next message.
    pub fn since_noted(&self) -> Option<[u8; 6]> {
        let inner = self.lock();
        let said = self.place(&inner).and_then(|place| place.said());
        inner.since_noted(&said.ok()?)
    }

    /// Its guest is another host's, and it was reset.
    pub fn left(&self) -> Result<(), VfError> {
        let mut inner = self.lock();
        match self.place(&inner) {
            Ok(place) => inner.left(&place, &self.folder),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Its VMM is gone.
    pub fn ends(&self) -> Result<(), VfError> {
        if self.lock().withheld { Ok(()) } else { self.put_back() }
    }

    /// All is put back that is to be: the move was called off, or the function goes back to the host.
    pub fn put_back(&self) -> Result<(), VfError> {
        let mut inner = self.lock();
        if inner.kept.is_none() {
            return Ok(());
        }
        let place = self.place(&inner)?;
        inner.put_back(&place, &self.folder)
    }

    /// Another function of this host has its guest from now on, at this address.
    pub fn moved_to(&self, address: PciAddress) -> Result<(), VfError> {
        let done = self.put_back();
        let mut inner = self.lock();
        let forgotten = self.remember(&mut inner, None);
        *inner = Inner { address, ..Inner::default() };
        done.and(forgotten)
    }
}

impl Inner {
    fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}.json", self.address))
    }

    fn remember(&mut self, folder: &Path, kept: Option<Kept>) -> Result<(), VfError> {
        let path = self.path(folder);
        let done = match &kept {
            Some(kept) => record::write(kept, &path).map(drop),
            None if self.kept.is_none() => Ok(()),
            None => record::remove(&path),
        };
        done.map_err(|source| VfError::Record { path, source })?;
        self.kept = kept;
        Ok(())
    }

    fn since_noted(&self, now: &Said) -> Option<[u8; 6]> {
        let noted = self.noted?;
        let same = (noted.vlan, noted.state) == (now.settings.vlan, now.settings.state);
        same.then(|| now.address.map_or([0; 6], |address| address.0))
    }

    fn carried(&mut self, place: &dyn Place) -> Result<PhysicalForm, VfError> {
        let said = place.said()?;
        let settings = administered(&said, self.fixed);
        self.along = Some((said.address, settings.mac));
        Ok(PhysicalForm { address: said.address, settings })
    }

    /// What it has by itself, and what is to be changed for such a guest.
    fn plan(
        &self,
        place: &dyn Place,
        form: &PhysicalForm,
        adopt: &AdoptSpec,
    ) -> Result<(VfSettings, Vec<VfSetting>), VfError> {
        // Nobody has used it: the address that it has is the administrator's.
        let said = place.said()?;
        let own = VfSettings { mac: said.address, ..said.settings };
        let changes = plan(&own, form, adopt, &place.named())?;
        Ok((own, changes))
    }

    /// Makes these changes, or none.
    fn change(
        &mut self,
        place: &dyn Place,
        folder: &Path,
        own: VfSettings,
        changes: &[VfSetting],
    ) -> Result<(), VfError> {
        if changes.is_empty() {
            return Ok(());
        }
        self.remember(folder, Some(Kept { own, given: with(&own, changes) }))?;
        for change in changes {
            if let Err(error) = set(place, *change) {
                // What was set before it; of the others nothing is due.
                return Err(self.put_back(place, folder).err().unwrap_or(error));
            }
        }
        if let Some(VfSetting::Mac(mac)) = changes.iter().find(|change| change.word() == SettingWord::Mac) {
            self.fixed = *mac;
        }
        Ok(())
    }

    fn put_back(&mut self, place: &dyn Place, folder: &Path) -> Result<(), VfError> {
        let Some(kept) = self.kept else { return Ok(()) };
        let due = kept.due(&place.said()?);
        set_all(place, due)?;
        self.withheld = false;
        self.fixed = kept.own.mac;
        self.remember(folder, None)
    }

    fn left(&mut self, place: &dyn Place, folder: &Path) -> Result<(), VfError> {
        let said = place.said()?;
        let now = || (said.address, administered(&said, self.fixed).mac);
        let (along, administered) = self.along.take().unwrap_or_else(now);
        let mut due = self.kept.map(|kept| kept.due(&said)).unwrap_or_default();
        due.retain(|setting| setting.word() != SettingWord::Mac);
        let brought = self.kept.filter(|kept| kept.own.mac != kept.given.mac);
        let own = brought.map_or(administered, |kept| kept.own.mac);
        let done = set_all(place, due);
        // Frames of this host for the guest leave by the cable, once the card does not know its address.
        let withheld = done.is_ok() && own.is_some() && own == along;
        if withheld {
            let own = VfSettings { mac: own, ..said.settings };
            self.remember(folder, Some(Kept { own, given: VfSettings { mac: None, ..own } }))?;
            self.withheld = true;
        }
        let done = done.and(set(place, VfSetting::Mac(own.filter(|_| !withheld))));
        if done.is_ok() && !withheld {
            self.remember(folder, None)?;
        }
        done
    }
}

/// Puts back what daemons had not that are dead now: each function, and whether it is as it was.
pub fn recover_settings(root: &Path, folder: &Path) -> Vec<(PciAddress, Result<(), VfError>)> {
    let mut all = lease::records(folder);
    all.sort_by_key(|(address, _)| *address);
    let one = |(address, path): (PciAddress, PathBuf)| {
        let record = |source| VfError::Record { path: path.clone(), source };
        let read = || -> io::Result<Kept> { Ok(serde_json::from_slice(&fs::read(&path)?)?) };
        let mut inner = Inner { address, kept: Some(read().map_err(record)?), ..Inner::default() };
        match Netlink::of(root, address) {
            Ok(place) => inner.put_back(&place, folder),
            // Its card was taken out, or its virtual functions were made anew.
            Err(error) if error.kind() == io::ErrorKind::NotFound => inner.remember(folder, None),
            Err(error) => Err(error.into()),
        }
    };
    all.into_iter().map(|each| (each.0, one(each))).collect()
}

impl fmt::Display for VfShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} vf {}: {}", self.interface, self.number, self.settings.words().join(", "))
    }
}

#[cfg(test)]
#[path = "keeper_tests.rs"]
mod tests;
