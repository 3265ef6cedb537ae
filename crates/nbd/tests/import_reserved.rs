//! A reservation that is changed while the import is used: granted, refused, and with an answer that is lost.

mod scripted;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ioplane_nbd::NbdError;
use ioplane_nbd::import::{Import, ImportOptions, ReserveOptions};
use ioplane_nbd::reserve::ReservedRates;
use scripted::{Reservations, Server, Terms, import, runtime};

fn rates(requests: u64) -> ReservedRates {
    ReservedRates { requests, bytes: 0 }
}

/// An import that reserves so many requests per second, its server, and what that keeps.
fn reserving(requests: u64) -> (Reservations, Server, Arc<Import>) {
    let reservations = Reservations::default();
    let terms = Terms { reservations: Some(reservations.clone()), ..Terms::default() };
    let (server, _) = Server::obedient(terms);
    let reserve = Some(ReserveOptions { rates: rates(requests), name: "disk data of host-b".into() });
    let import = import(ImportOptions { reserve, ..server.options() });
    (reservations, server, import)
}

#[test]
fn a_change_that_is_refused_or_not_answered_leaves_what_was_kept() {
    let (reservations, server, import) = reserving(100);
    let asks = |requests| runtime().block_on(import.reserve(rates(requests)));
    let kept = || u64::from(reservations.kept.load(Ordering::Acquire));
    let until_kept = |requests| {
        let end = Instant::now() + Duration::from_secs(60);
        while kept() != requests {
            assert!(Instant::now() < end, "{} are kept, {:?} were asked for", kept(), reservations.asked);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    assert_eq!((import.status().reserved, kept()), (rates(100), 100));
    asks(200).unwrap();
    assert_eq!((import.status().reserved, kept()), (rates(200), 200));
    let refused = asks(1001);
    assert!(matches!(&refused, Err(NbdError::Reservation(why)) if why == "1000 are free"), "{refused:?}");
    assert_eq!((import.status().reserved, kept()), (rates(200), 200));
    // Carried out, and nobody is told.
    reservations.silent.store(true, Ordering::Release);
    let lost = asks(300);
    assert!(lost.is_err() && !matches!(lost, Err(NbdError::Reservation(_))), "{lost:?}");
    assert_eq!(import.status().reserved, rates(200));
    assert!(reservations.asked.lock().unwrap().contains(&300));
    reservations.silent.store(false, Ordering::Release);
    until_kept(200);
    // A later change is not undone by what an earlier one has left to do.
    reservations.silent.store(true, Ordering::Release);
    assert!(asks(300).is_err());
    reservations.silent.store(false, Ordering::Release);
    asks(400).unwrap();
    asks(500).unwrap();
    let asked = reservations.asked.lock().unwrap().len();
    std::thread::sleep(server.options().retry.1 * 5);
    assert_eq!((reservations.asked.lock().unwrap().len(), kept()), (asked, 500));
    runtime().block_on(import.give_back_reservation());
    assert_eq!((import.status().reserved, kept()), (rates(0), 0));
}

/// Older servers do not know the query, so an import that reserves nothing sends none.
#[test]
fn an_import_without_a_reservation_asks_for_none_and_gives_none_back() {
    let (reservations, _server, import) = reserving(0);
    runtime().block_on(import.give_back_reservation());
    assert!(reservations.asked.lock().unwrap().is_empty());
    runtime().block_on(import.reserve(rates(7))).unwrap();
    runtime().block_on(import.give_back_reservation());
    assert_eq!(*reservations.asked.lock().unwrap(), [7, 0]);
}
