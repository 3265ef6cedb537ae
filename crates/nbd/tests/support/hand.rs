//! A core without a thread: the test polls.

#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::disallowed_types, reason = "the side that steps the slots, off any core")]

use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use ioplane_device::{
    Budget, CoreContext, CoreEnded, CoreId, CoreMessage, CoreSender, PollOutcome, PollerSlot, QueueSet,
    Quiescent, Running,
};
use ioplane_nbd::export::{Export, ExportOptions};
use ioplane_nbd::handshake::MetaContext;
use ioplane_nbd::handshake::server::Negotiated;
use ioplane_nbd::spec::BASE_ALLOCATION;
use ioplane_storage::Backing;

/// Keeps the slots that are attached to it.
#[derive(Default)]
struct Slots(Mutex<Vec<PollerSlot>>);

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slots")
    }
}

impl CoreSender for Slots {
    fn core(&self) -> CoreId {
        CoreId(0)
    }

    fn send(&self, message: CoreMessage) -> Result<(), CoreEnded> {
        if let CoreMessage::Attach(slot) = message {
            self.0.lock().unwrap().push(slot);
        }
        Ok(())
    }
}

/// One connection of an export, polled by hand.
pub struct ByHand {
    pub client: UnixStream,
    pub slot: PollerSlot,
    pub context: CoreContext,
    // Dropped last: its pollers are not on any core.
    _running: Running<Export>,
}

impl ByHand {
    pub fn new(backing: Arc<dyn Backing>, structured: bool) -> ByHand {
        let (ours, client) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&client, 8 << 20).unwrap();
        let export = Export::new("disk", backing, ExportOptions::default()).unwrap();
        let contexts = vec![MetaContext { id: 1, name: BASE_ALLOCATION.into() }];
        let negotiated = Negotiated {
            name: "disk".into(),
            info: export.published().info(),
            structured,
            contexts: if structured { contexts } else { Vec::new() },
            keeps_blocks: true,
            by_name: false,
        };
        let slots = Arc::new(Slots::default());
        let core: Arc<dyn CoreSender> = slots.clone();
        let mut running = Quiescent::new(export).resume(&core).unwrap();
        let queue = running.device_mut().connect(OwnedFd::from(ours), &negotiated, &[]).unwrap();
        running.start(&QueueSet::from([queue]), &core).unwrap();
        let slot = slots.0.lock().unwrap().pop().unwrap();
        ByHand { client, slot, context: CoreContext::default(), _running: running }
    }

    pub fn poll(&mut self) -> PollOutcome {
        self.context.look();
        self.slot.step(&mut self.context, Budget::of(64))
    }
}
