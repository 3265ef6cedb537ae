//! A device with one hostile queue, polled, napped, drained, suspended, saved and loaded as the input says.
//!
//! Oracles: no store outside buffers that the driver made writable and the used ring; every page that changed is marked
//! while the dirty log is on (invariant 6); a poller told to stop parks; what is saved at a quiescent point loads again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use arbitrary::{Result, Unstructured};
use ioplane_device::{Change, Device, QueueSet, Quiescent, Running};
use ioplane_memory::DirtyLog;
use ioplane_virtio::spec::feature::VHOST_USER_F_PROTOCOL_FEATURES;
use ioplane_virtio::spec::split::*;
use ioplane_virtio::{RingLayout, Vdev, VirtioDevice};

use crate::Signature;
use crate::guest::{self, Guest, MEMORY, Span, TABLES, descriptor};
use crate::stage::{PATIENCE, Stage};

/// One buffer of a chain: address, length, flags.
pub type Buffer = (u64, u32, u16);

/// How a driver makes one request available.
pub type Offer<'a> = &'a mut dyn FnMut(&mut Serve, &mut Unstructured<'_>) -> Result<()>;

/// The driver of one queue, and what it allowed.
pub struct Serve {
    /// Its memory.
    pub guest: Guest,
    /// Where its ring is.
    pub layout: RingLayout,
    /// The available index.
    pub avail: u16,
    queue: u16,
    stage: Arc<Stage>,
    log: Option<Arc<DirtyLog>>,
    /// Everything that the driver has ever made writable.
    spans: BTreeSet<Span>,
    /// The device could at no time change descriptors by itself.
    steady: bool,
}

/// Serves queue `queue` of `model` for as long as there is input; `offer` makes its requests.
pub fn serve<V: VirtioDevice>(
    input: &mut Unstructured<'_>,
    signature: &mut Signature,
    model: V,
    queue: u16,
    offer: Offer<'_>,
) -> Result<()> {
    let mut guest = Guest::zeroed();
    let layout = guest::layout(input)?;
    let start: u16 = if input.ratio(1, 4)? { input.arbitrary()? } else { 0 };
    guest.poke(layout.used.saturating_add(2), &start.to_le_bytes());
    guest.poke(layout.avail.saturating_add(2), &start.to_le_bytes());
    let mut features = model.features();
    if input.ratio(1, 4)? {
        features &= input.arbitrary::<u64>()?;
    }
    let mut vdev = Vdev::new(model, guest.map.clone());
    assert!(vdev.accept(features, VHOST_USER_F_PROTOCOL_FEATURES));
    if let Some(setup) = vdev.queue_mut(queue) {
        setup.layout = layout;
        setup.base = Some(u16::into(start));
        setup.enabled = true;
    }
    guest.settle(None);
    let stage = Stage::patient();
    let mut running = match Quiescent::new(vdev).resume(&*stage.placement()) {
        Ok(running) => running,
        Err(refused) => {
            signature.saw(&refused.error.to_string()[..20]);
            return Ok(());
        }
    };
    let spans = BTreeSet::new();
    let mut serve = Serve { guest, layout, avail: start, queue, stage, log: None, spans, steady: true };
    let mut outcome = Ok(());
    for _ in 0..64 {
        (running, outcome) = serve.step(input, running, offer);
        if outcome.is_err() {
            break;
        }
    }
    for (name, count) in running.device().meters()[usize::from(queue)].read().each() {
        signature.saw(name);
        signature.count(count);
    }
    let quiescent = serve.stop(running);
    if let Some(fault) = quiescent.device().queue(queue).and_then(|setup| setup.fault) {
        signature.saw(fault.name());
    }
    outcome
}

impl Serve {
    /// One step; the device comes back whatever the input said.
    fn step<V: VirtioDevice>(
        &mut self,
        input: &mut Unstructured<'_>,
        mut running: Running<Vdev<V>>,
        offer: Offer<'_>,
    ) -> (Running<Vdev<V>>, Result<()>) {
        let choice = match input.int_in_range(0..=23u8) {
            Ok(choice) if !input.is_empty() => choice,
            _ => return (running, Err(arbitrary::Error::NotEnoughData)),
        };
        let all = QueueSet::from([self.queue]);
        let done = match choice {
            0..=8 => offer(self, input),
            9..=15 => input.int_in_range(1..=16u32).map(|budget| self.poll(budget)),
            16 => {
                self.stage.nap(input.arbitrary().unwrap_or_default());
                Ok(())
            }
            17 => {
                running.drain(&all);
                self.poll(1);
                let again = running.device().active();
                let placement = self.stage.placement();
                // A queue that had stopped with a fault meanwhile does not start again: as it should be.
                let _ = running.undrain(&again, &*placement);
                Ok(())
            }
            18 => {
                // What was stored before is nobody's to mark.
                self.poll(1);
                let log = DirtyLog::new(MEMORY).expect("a log");
                self.log = Some(Arc::new(log));
                drop(running.apply(&all, &Change::Log(self.log.clone())));
                Ok(())
            }
            19..=20 => {
                let quiescent = self.stop(running);
                running = self.go_on(quiescent);
                Ok(())
            }
            21 => {
                running.suspend(&all);
                self.poll(1);
                assert!(running.wait_stopped(&all, Instant::now()), "a suspended poller did not park");
                // What was in flight is replayed by the next poller, unless the queue has stopped for good.
                let active = running.device().active();
                let _ = running.start(&active, &*self.stage.placement());
                Ok(())
            }
            _ => self.meddle(input),
        };
        (running, done)
    }

    fn poll(&mut self, budget: u32) {
        self.look();
        self.stage.turn(budget);
        self.look();
        let spans: Vec<Span> = self.spans.iter().copied().collect();
        let pages = self.guest.settle(self.steady.then_some(&spans));
        if let Some(log) = &self.log {
            for page in pages {
                assert!(log.is_marked(page), "page {page:#x} was stored to and not marked (invariant 6)");
            }
        }
    }

    /// Notes what the descriptors allow. Nothing is taken out again: a request in flight may have been described by what
    /// has been overwritten since.
    fn look(&mut self) {
        let (spans, steady) = self.guest.writable(&self.layout);
        self.spans.extend(spans);
        self.steady &= steady;
    }

    /// Brings the device to a quiescent point: within a bounded number of turns, whatever the guest did.
    fn stop<V: VirtioDevice>(&mut self, running: Running<Vdev<V>>) -> Quiescent<Vdev<V>> {
        let mut quiescing = running.begin_quiesce();
        for _ in 0..PATIENCE {
            if quiescing.is_settled() {
                break;
            }
            self.poll(8);
        }
        quiescing.finish().unwrap_or_else(|missed| panic!("it does not become quiescent: {}", missed.reason))
    }

    /// Saves, loads what was saved, and goes on from there; a queue with a fault stays where it is.
    fn go_on<V: VirtioDevice>(&mut self, quiescent: Quiescent<Vdev<V>>) -> Running<Vdev<V>> {
        let placement = self.stage.placement();
        let state = quiescent.save().expect("saving at a quiescent point");
        let faulty = quiescent.device().queue(self.queue).is_some_and(|setup| setup.fault.is_some());
        let quiescent = match quiescent.load(&state) {
            Ok(loaded) => loaded.into_quiescent(),
            Err(refused) => {
                // A guest that spoils its ring while nobody looks makes its state impossible: no bug of ours.
                assert!(
                    faulty
                        || !guest::is_usual(&self.layout)
                        || refused.error.to_string().contains(&format!("queue {}", self.queue)),
                    "a state saved just now is refused: {}",
                    refused.error
                );
                refused.kept
            }
        };
        let mut quiescent = quiescent;
        for _ in 0..3 {
            match quiescent.resume(&*placement) {
                Ok(running) => return running,
                Err(refused) => quiescent = refused.kept,
            }
        }
        panic!("neither with its queue nor without it would the device resume");
    }

    /// Puts the buffers into the table, or into one of their own, and the head into the available ring.
    pub fn describe(&mut self, input: &mut Unstructured<'_>, buffers: &[Buffer], size: u16) -> Result<()> {
        let head = input.int_in_range(0..=size - 1)?;
        let indirect = input.arbitrary()?;
        let table = if indirect { TABLES + 512 * u64::from(head & 7) } else { self.layout.desc };
        let mut index = if indirect { 0 } else { head };
        for (at, (addr, len, flags)) in buffers.iter().enumerate() {
            let last = at + 1 == buffers.len();
            let mut next = if indirect { index + 1 } else { (index + 1) & (size - 1) };
            if input.ratio(1, 48)? {
                next = input.arbitrary()?;
            }
            let flags = flags | if last { 0 } else { VIRTQ_DESC_F_NEXT };
            let place = table.saturating_add(16 * u64::from(index));
            self.guest.poke(place, &descriptor(*addr, *len, flags, next));
            index = if indirect { index + 1 } else { (index + 1) & (size - 1) };
        }
        if indirect {
            let entries = if input.ratio(1, 24)? { input.arbitrary()? } else { 16 * buffers.len() as u32 };
            let place = self.layout.desc.saturating_add(16 * u64::from(head));
            self.guest.poke(place, &descriptor(table, entries, VIRTQ_DESC_F_INDIRECT, 0));
        }
        let slot = u64::from(self.avail) & u64::from(size - 1);
        self.guest.poke(self.layout.avail.saturating_add(4 + 2 * slot), &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(if input.ratio(1, 64)? { 200 } else { 1 });
        Ok(())
    }

    /// The guest writes anywhere.
    fn meddle(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let at = if input.arbitrary()? {
            guest::address(input)?
        } else {
            input.int_in_range(0..=guest::BUFFERS)?
        };
        self.guest.poke(at, &input.arbitrary::<[u8; 8]>()?);
        Ok(())
    }
}

/// One buffer, now and then in two parts.
pub fn split(
    input: &mut Unstructured<'_>,
    buffers: &mut Vec<Buffer>,
    addr: u64,
    len: u32,
    flags: u16,
) -> Result<()> {
    let cut = if input.ratio(1, 6)? { input.int_in_range(0..=len)? } else { 0 };
    if cut > 0 {
        buffers.push((addr, cut, flags));
    }
    buffers.push((addr.wrapping_add(cut.into()), len - cut, flags));
    Ok(())
}
