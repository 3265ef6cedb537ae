//! A server that can be reached at two addresses, each behind a cable of its own.

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ioplane_cores::Notify;
use ioplane_nbd::export::ExportOptions;
use ioplane_nbd::import::{ImportOptions, Unfenced};
use ioplane_storage::{Backing, MemoryBacking};
use rig::Rig;
use support::listener::Listening;
use support::pattern;
use support::relay::{Way, relay};

/// Passes bytes between a client and the server. Pulled out, it passes none, and ends nothing: as a cable.
#[derive(Clone)]
struct Cable {
    port: u16,
    pulled: Arc<AtomicBool>,
    clients: Arc<AtomicUsize>,
}

impl Cable {
    fn to(server: u16) -> Cable {
        let (pulled, clients) = <(Arc<AtomicBool>, Arc<AtomicUsize>)>::default();
        let (own, counted) = (pulled.clone(), clients.clone());
        let ways = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            [(); 2].map(|()| -> Way {
                let pulled = own.clone();
                Box::new(move |bytes| (!pulled.load(Ordering::SeqCst)).then_some(bytes.len()))
            })
        };
        Cable { port: relay(move || server, ways), pulled, clients }
    }

    fn pull(&self, pulled: bool) {
        self.pulled.store(pulled, Ordering::SeqCst);
    }

    fn clients(&self) -> usize {
        self.clients.load(Ordering::Relaxed)
    }
}

/// The cables are pulled in turn, with a write under way each time: it goes over the other one, and no byte is lost or written twice.
#[test]
fn the_other_address_is_taken_when_one_is_gone() {
    let backing: Arc<dyn Backing> = MemoryBacking::new(4 << 20).unwrap();
    let listening = Listening::new(backing, ExportOptions::default(), Notify::Notified);
    let cables = [(); 2].map(|()| Cable::to(listening.address.port()));
    let address = format!("nbd://127.0.0.1:{}/disk?also=127.0.0.1:{}", cables[0].port, cables[1].port);
    let import = scripted::import(ImportOptions {
        dead_after: Duration::from_millis(300),
        connect_timeout: Duration::from_millis(500),
        unfenced: Unfenced::Replay,
        retry: (Duration::from_millis(5), Duration::from_millis(50)),
        ..ImportOptions::new(address.parse().unwrap())
    });
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(
        [cables[0].clients() > 0, cables[1].clients() > 0],
        [true, false],
        "the first one is the first"
    );
    for round in 0..4_u64 {
        let bytes = pattern(round * 64, 64 << 10, round);
        rig.write(round * (64 << 10), &bytes).unwrap();
        let [pulled, other] = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        let before = cables[other].clients();
        cables[pulled].pull(true);
        let begun = Instant::now();
        let again = pattern(round * 64 + 7, 64 << 10, round);
        rig.write(round * (64 << 10), &again).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(60));
        assert!(cables[other].clients() > before, "round {round}");
        assert!(rig.read(round * (64 << 10), 64 << 10).unwrap() == again, "round {round}");
        cables[pulled].pull(false);
    }
    assert!(import.status().connections[0].losses >= 4);
}
