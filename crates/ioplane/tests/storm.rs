//! Many guests that start at once.

mod daemon;

use std::fmt::Write;
use std::sync::Barrier;
use std::time::Instant;

use daemon::TestDaemon;
use daemon::reader::Reader;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const GUESTS: usize = 200;

/// 200 front ends connect at once: every one of them reads, beside one that is at work already. How long that took is said and not asserted, since
/// other tests run beside this one: `boot_storm_s` of `script/bench core` measures it.
#[test]
fn every_guest_of_a_boot_storm_has_its_first_read() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let mut config = "[[core]]\n[[core]]\nid = 1\n".to_owned();
    for disk in 0..=GUESTS {
        writeln!(config, "[[disk]]\nname = \"d{disk}\"\nmemory = \"1M\"").unwrap();
    }
    let daemon = TestDaemon::open(&config);
    daemon.until(|| (0..=GUESTS).all(|disk| daemon.path(&format!("d{disk}.sock")).exists()));
    let mut at_work = Reader::connect(&daemon, &format!("d{GUESTS}"));
    let together = Barrier::new(GUESTS);
    let mut reads = 0;
    let (mut took, mut guests): (Vec<_>, Vec<_>) = std::thread::scope(|scope| {
        let guests: Vec<_> = (0..GUESTS)
            .map(|disk| {
                let (daemon, together) = (&daemon, &together);
                scope.spawn(move || {
                    together.wait();
                    let began = Instant::now();
                    let mut guest = Reader::connect(daemon, &format!("d{disk}"));
                    guest.submit(1);
                    guest.wait(1);
                    (began.elapsed(), guest)
                })
            })
            .collect();
        while !guests.iter().all(|guest| guest.is_finished()) {
            at_work.submit(16);
            at_work.wait(16);
            reads += 16;
        }
        guests.into_iter().map(|guest| guest.join().unwrap()).unzip()
    });
    for guest in &mut guests {
        guest.submit(8);
        guest.wait(8);
    }
    took.sort_unstable();
    println!(
        "first read of {GUESTS} guests: median {:?}, slowest {:?} (goal 5 s); {reads} reads of the one at work",
        took[GUESTS / 2],
        took[GUESTS - 1]
    );
    let disks = daemon.json(&["disk", "list"]);
    let disks = disks.as_array().unwrap();
    assert_eq!(disks.len(), GUESTS + 1);
    assert!(disks.iter().all(|disk| disk["error"].is_null()), "one of them cannot be served");
}
