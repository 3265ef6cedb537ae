//! A session and its device, packed and unpacked.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ioplane_device::{
    Change, Device, DeviceError, Interrupt, Lifecycle, Loaded, QueueSet, Quiescent, SavedState,
};
use ioplane_memory::{Account, DirtyLog, GuestMap, MapError, Mapping, MemoryRegion, RegionSpec, Window};
use ioplane_virtio::spec::feature::VHOST_F_LOG_ALL;
use ioplane_virtio::{QueueSetup, Vdev, VirtioDevice};
use serde::{Deserialize, Serialize};

use super::parcel::{FileV1, HandOverError, Inbox, Outbox};
use crate::eventfd::{self, PeerEventfd};
use crate::vhost_user::fault::PeerFault;
use crate::vhost_user::peer::{UserRing, Wiring};
use crate::vhost_user::session::Session;

/// How often a device whose disk does not answer is tried again: each try waits half a minute by itself.
const TRIES: u32 = 60;

/// A device and its session.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SessionV1 {
    state: SavedState,
    features: u64,
    protocol: u64,
    rings: Vec<RingV1>,
    regions: Vec<RegionV1>,
    log: Option<AreaV1>,
    /// Where the rings' journals are.
    journals: Vec<AreaV1>,
    back_channel: Option<FileV1>,
    pub(super) counts: Vec<Vec<(String, u64)>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct RingV1 {
    size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    started: bool,
    enabled: bool,
    kick: Option<FileV1>,
    call: Option<FileV1>,
    error: Option<FileV1>,
    journal: Option<JournalV1>,
}

/// Part of one of [`SessionV1::journals`].
#[derive(Debug, Serialize, Deserialize)]
struct JournalV1 {
    area: u32,
    start: u64,
    len: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct RegionV1 {
    gpa: u64,
    len: u64,
    user: u64,
    offset: u64,
    file: FileV1,
}

/// Part of a file that both map.
#[derive(Debug, Serialize, Deserialize)]
struct AreaV1 {
    offset: u64,
    len: u64,
    file: FileV1,
}

impl RingV1 {
    fn pack(
        wiring: &Wiring,
        setup: &QueueSetup,
        areas: &mut Vec<Arc<Mapping>>,
        outbox: &mut Outbox,
    ) -> Result<Self, HandOverError> {
        let Wiring { size, user: UserRing { desc, avail, used }, started, enabled } = *wiring;
        let mut interrupt = |of: &Option<Arc<dyn Interrupt>>| {
            of.as_ref().and_then(|it| it.file()).map(|file| outbox.put(file)).transpose()
        };
        let (call, error) = (interrupt(&setup.call)?, interrupt(&setup.error)?);
        let kick = setup.kick.as_ref().map(|kick| outbox.put(kick)).transpose()?;
        let journal = setup.journal.as_ref().map(|window| {
            let area =
                areas.iter().position(|area| Arc::ptr_eq(area, window.mapping())).unwrap_or_else(|| {
                    areas.push(window.mapping().clone());
                    areas.len() - 1
                });
            JournalV1 { area: area as u32, start: window.gpa(), len: window.len() as u64 }
        });
        // A ring that its guest has spoilt does not run again before it is set up anew: there it was never started.
        let started = started && setup.fault.is_none();
        Ok(RingV1 { size, desc, avail, used, started, enabled, kick, call, error, journal })
    }

    fn wiring(&self) -> Wiring {
        let RingV1 { size, desc, avail, used, started, enabled, .. } = *self;
        Wiring { size, user: UserRing { desc, avail, used }, started, enabled }
    }
}

impl JournalV1 {
    fn window(&self, areas: &[Arc<Mapping>]) -> Result<Window, HandOverError> {
        let area = areas.get(self.area as usize);
        let (start, len) = (usize::try_from(self.start).ok(), usize::try_from(self.len).ok());
        let window =
            area.zip(start.zip(len)).and_then(|(area, (start, len))| Window::of_mapping(area, start, len));
        window.ok_or_else(|| HandOverError::Damaged("a journal outside its region".to_owned()))
    }
}

impl AreaV1 {
    fn open(self, account: &Account, inbox: &mut Inbox) -> Result<Mapping, HandOverError> {
        let file = inbox.take(self.file)?;
        let mapping = account.mapping(file, self.offset, self.len).map_err(MapError::from);
        Ok(mapping.map_err(PeerFault::from)?)
    }
}

impl RegionV1 {
    fn open(self, account: &Account, inbox: &mut Inbox) -> Result<MemoryRegion, HandOverError> {
        let RegionV1 { gpa, len, user, offset, file } = self;
        let file = inbox.take(file)?;
        let region = account.region(RegionSpec { gpa, len, user, offset, file }, true);
        Ok(region.map_err(PeerFault::from)?)
    }
}

/// The descriptors and the journal of one ring.
struct RingFiles {
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<dyn Interrupt>>,
    error: Option<Arc<dyn Interrupt>>,
    journal: Option<Window>,
}

impl RingFiles {
    fn open(ring: &RingV1, areas: &[Arc<Mapping>], inbox: &mut Inbox) -> Result<Self, HandOverError> {
        let mut eventfd = |file: Option<FileV1>, what| {
            let Some(file) = file.map(|file| inbox.take(file)).transpose()? else { return Ok(None) };
            if eventfd::check(&file) { Ok(Some(file)) } else { Err(PeerFault::NotAnEventfd(what)) }
                .map_err(HandOverError::from)
        };
        let call = |file: Option<OwnedFd>| {
            let call = file.map(PeerEventfd::new).transpose().map_err(PeerFault::NoInterrupts)?;
            Ok::<_, HandOverError>(call.map(|call| Arc::new(call) as Arc<dyn Interrupt>))
        };
        Ok(RingFiles {
            kick: eventfd(ring.kick, "kicks")?.map(Arc::new),
            call: call(eventfd(ring.call, "interrupts")?)?,
            error: call(eventfd(ring.error, "errors")?)?,
            journal: ring.journal.as_ref().map(|journal| journal.window(areas)).transpose()?,
        })
    }
}

impl<V: VirtioDevice> Session<V> {
    /// All of it at the quiescent point where it is; the descriptors go into `outbox`, as duplicates.
    pub(super) fn pack(
        &self,
        quiescent: &Quiescent<Vdev<V>>,
        outbox: &mut Outbox,
    ) -> Result<SessionV1, HandOverError> {
        let (vdev, peer) = (quiescent.device(), &self.peer);
        let mut areas = Vec::new();
        let rings = (0..).zip(&peer.rings).filter_map(|(index, wiring)| {
            vdev.queue(index).map(|setup| RingV1::pack(wiring, setup, &mut areas, outbox))
        });
        let rings = rings.collect::<Result<_, _>>()?;
        let mut regions = Vec::new();
        for region in vdev.view().map().regions() {
            let RegionSpec { gpa, len, user, offset, file } = region.spec().map_err(HandOverError::Os)?;
            regions.push(RegionV1 { gpa, len, user, offset, file: outbox.put(file)? });
        }
        let mut area = |(file, offset, len): (BorrowedFd<'_>, u64, u64)| {
            outbox.put(file).map(|file| AreaV1 { offset, len, file })
        };
        let log = peer.log.as_ref().map(|log| area(log.place())).transpose()?;
        let journals = areas.iter().map(|it| area((it.file(), it.offset(), it.len() as u64)));
        let journals = journals.collect::<Result<_, _>>()?;
        let counts = vdev.meters().iter().map(|meter| {
            meter
                .read()
                .each()
                .filter(|(_, count)| *count > 0)
                .map(|(name, count)| (name.to_owned(), count))
                .collect()
        });
        Ok(SessionV1 {
            state: quiescent.save()?,
            features: peer.features,
            protocol: peer.protocol.bits(),
            rings,
            regions,
            log,
            journals,
            back_channel: peer.back_channel.as_ref().map(|channel| outbox.put(channel)).transpose()?,
            counts: counts.collect(),
        })
    }

    /// A session that nobody has spoken to becomes that of another process, whose model was made as this one. Nothing is
    /// started.
    pub(super) fn unpack(
        mut self,
        packed: SessionV1,
        inbox: &mut Inbox,
    ) -> Result<(Self, Loaded<Vdev<V>>), HandOverError> {
        let SessionV1 { state, features, protocol, rings, regions, log, journals, back_channel, counts } =
            packed;
        let session = &mut self;
        if rings.len() != session.peer.rings.len() {
            let (came, here) = (rings.len(), session.peer.rings.len());
            return Err(HandOverError::Damaged(format!("{came} rings, and the device has {here}")));
        }
        if features & !session.offered_features()? != 0 {
            return Err(PeerFault::BadFeatures(features).into());
        }
        session.set_protocol_features(protocol)?;
        session.peer.features = features;
        session.peer.rings = rings.iter().map(RingV1::wiring).collect();
        session.peer.back_channel = back_channel.map(|file| inbox.take_stream(file)).transpose()?;
        let account = session.account.clone();
        if let Some(log) = log {
            session.peer.log = Some(Arc::new(DirtyLog::of_mapping(log.open(&account, inbox)?)));
        }
        let regions =
            regions.into_iter().map(|region| region.open(&account, inbox)).collect::<Result<_, _>>()?;
        let map = Arc::new(GuestMap::new(regions).map_err(PeerFault::from)?);
        let areas: Vec<_> = journals
            .into_iter()
            .map(|area| area.open(&account, inbox).map(Arc::new))
            .collect::<Result<_, _>>()?;
        let wires: Vec<_> =
            rings.iter().map(|ring| RingFiles::open(ring, &areas, inbox)).collect::<Result<_, _>>()?;
        let log = session.peer.log.clone().filter(|_| features & VHOST_F_LOG_ALL != 0);
        let mut quiescent = session.idle()?;
        quiescent.with(|vdev, proof| {
            vdev.replace_memory(proof, map);
            vdev.apply(&QueueSet::new(), &Change::Log(log));
            for (index, RingFiles { kick, call, error, journal }) in (0..).zip(wires) {
                if let Some(setup) = vdev.queue_mut(index) {
                    (setup.kick, setup.call, setup.error, setup.journal) = (kick, call, error, journal);
                }
            }
            for (meter, counts) in vdev.meters().iter().zip(&counts) {
                meter.restore(counts.iter().map(|(name, count)| (name.as_str(), *count)));
            }
        });
        let loaded = quiescent.load(&state).map_err(|refused| refused.error)?;
        Ok((self, loaded))
    }

    /// The device, before any queue has started: as quiescent as when it was made.
    fn idle(&mut self) -> Result<Quiescent<Vdev<V>>, HandOverError> {
        let still = |error: &dyn std::fmt::Display| PeerFault::NotQuiescent(error.to_string());
        self.device.begin_quiesce().map_err(|error| still(&error))?;
        self.device.finish().map_err(|reason| still(&reason))?;
        Ok(self.device.take().map_err(|error| still(&error))?)
    }

    /// Starts what was unpacked: every queue is looked at again and signalled once. Waits for a disk on which I/O of the other
    /// process is still under way.
    pub(super) fn begin(&mut self, mut loaded: Loaded<Vdev<V>>) -> Result<(), PeerFault> {
        if self.wants_rings() {
            self.lease_claim.claim();
        }
        let placement = self.placement.clone();
        for _ in 0..TRIES {
            match tokio::task::block_in_place(|| loaded.start(&placement)) {
                Ok(running) => {
                    self.device = running.into();
                    return Ok(());
                }
                Err(refused) => {
                    loaded = refused.kept;
                    tracing::warn!(error = %refused.error, "a device that was handed over does not start yet");
                    if !matches!(refused.error, DeviceError::Below(_)) {
                        break;
                    }
                }
            }
        }
        self.device = Lifecycle::Quiescent(loaded.into_quiescent());
        self.resume()
    }
}
