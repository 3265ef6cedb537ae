//! A server that can be reached at two addresses, each behind a cable of its own.

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;
mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
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

/// Passes bytes between a client and the server. Pulled out, it passes none, and ends nothing: as a cable.
#[derive(Clone)]
struct Cable {
    port: u16,
    pulled: Arc<AtomicBool>,
    clients: Arc<AtomicUsize>,
}

impl Cable {
    fn to(server: u16) -> Cable {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let cable = Cable { port, pulled: Arc::default(), clients: Arc::default() };
        let own = cable.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                own.clients.fetch_add(1, Ordering::Relaxed);
                let server = TcpStream::connect(("127.0.0.1", server)).unwrap();
                let both = [(&client, &server), (&server, &client)];
                for (from, to) in both.map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
                {
                    let cable = own.clone();
                    std::thread::spawn(move || cable.pass(from, to));
                }
            }
        });
        cable
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = [0; 16 << 10];
        while let Ok(bytes @ 1..) = from.read(&mut buffer) {
            if self.pulled.load(Ordering::SeqCst) {
                // Whoever asks is not answered, and not told of it either: both stay open until the test ends.
                std::mem::forget((from, to));
                return;
            }
            if to.write_all(&buffer[..bytes]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
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
