//! A reservation that is changed while the import is used: granted, refused, and with an answer that is lost.

mod scripted;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ioplane_nbd::NbdError;
use ioplane_nbd::import::{
    ClaimKeeper, ClaimOptions, ClaimTime, ClaimWish, Import, ImportOptions, RememberedClaim, ReserveOptions,
};
use ioplane_nbd::reserve::ReservedRates;
use scripted::{Reservations, Server, Terms, import, runtime};

fn rates(requests: u64) -> ReservedRates {
    ReservedRates { requests, bytes: 0 }
}

/// A server that keeps rates for its client.
fn keeping() -> (Reservations, Server) {
    let reservations = Reservations::default();
    let terms = Terms { reservations: Some(reservations.clone()), ..Terms::default() };
    (reservations, Server::obedient(terms).0)
}

/// How an import reserves so many requests per second of `server`.
fn options(server: &Server, requests: u64) -> ImportOptions {
    let reserve = Some(ReserveOptions { rates: rates(requests), name: "disk data of host-b".into() });
    ImportOptions { reserve, ..server.options() }
}

/// The keeper of a claim that the server does not keep.
#[derive(Debug)]
struct NoClaim;

impl ClaimKeeper for NoClaim {
    fn holder(&self) -> Result<String, String> {
        Ok("holder".to_owned())
    }
    fn remembered(&self) -> RememberedClaim {
        RememberedClaim::None
    }
    fn read_again(&self) -> Result<(), String> {
        Ok(())
    }
    fn remember(&self, _: u64) -> Result<(), String> {
        Ok(())
    }
    fn set_down(&self) -> Result<(), String> {
        Ok(())
    }
    fn released(&self) {}
    fn forget(&self) {}
}

/// The same of a disk that comes with this wish.
fn coming(options: ImportOptions, wish: ClaimWish) -> ImportOptions {
    let (keeper, name, patience) = (Arc::new(NoClaim), "disk data of host-b".to_owned(), Duration::ZERO);
    let claim = ClaimOptions { keeper, name, wish, time: ClaimTime::FirstChannel, patience };
    ImportOptions { claim: Some(claim), ..options }
}

impl Reservations {
    fn kept_now(&self) -> u64 {
        u64::from(self.kept.load(Ordering::Acquire))
    }

    fn questions(&self) -> Vec<u64> {
        self.asked.lock().unwrap().clone()
    }

    /// From now on it carries out what it is asked, and tells nobody.
    fn be_silent(&self, silent: bool) {
        self.silent.store(silent, Ordering::Release);
    }
}

/// Waits for it, for as long as a machine that stops for seconds may take.
fn until(what: &str, wanted: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !wanted() {
        assert!(Instant::now() < end, "not {what} within 60 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Until it is certain what the import has.
fn settled(import: &Import, requests: u64) {
    let settled = || {
        let status = import.status();
        status.reserved == rates(requests)
            && !status
                .reserved_why
                .is_some_and(|why| why.contains("not answered") || why.contains("given up"))
    };
    until("certain", settled);
}

#[test]
fn a_change_that_is_refused_or_not_answered_leaves_what_was_kept() {
    let (reservations, server) = keeping();
    let import = import(options(&server, 100));
    let asks = |requests| runtime().block_on(import.reserve(rates(requests)));
    let kept = || reservations.kept_now();
    assert_eq!((import.status().reserved, kept()), (rates(100), 100));
    assert_eq!(asks(200).unwrap(), rates(100), "what it had before");
    assert_eq!((import.status().reserved, kept()), (rates(200), 200));
    let refused = asks(1001);
    assert!(matches!(&refused, Err(NbdError::Reservation(why)) if why == "1000 are free"), "{refused:?}");
    assert_eq!((import.status().reserved, kept()), (rates(200), 200));
    // Carried out, and nobody is told.
    reservations.be_silent(true);
    let lost = asks(300);
    assert!(lost.is_err() && !matches!(lost, Err(NbdError::Reservation(_))), "{lost:?}");
    let status = import.status();
    assert_eq!(status.reserved, rates(200));
    assert!(status.reserved_why.unwrap().contains("not answered"));
    assert!(reservations.questions().contains(&300));
    // Refused: it is still in doubt what is kept.
    assert!(asks(1001).is_err());
    reservations.be_silent(false);
    until("as before", || kept() == 200);
    settled(&import, 200);
    // A later change is not undone by what an earlier one has left to do.
    reservations.be_silent(true);
    assert!(asks(300).is_err());
    reservations.be_silent(false);
    asks(400).unwrap();
    asks(500).unwrap();
    let asked = reservations.questions().len();
    std::thread::sleep(server.options().retry.1 * 5);
    assert_eq!((reservations.questions().len(), kept()), (asked, 500));
    assert_eq!(import.status().reserved_why, None);
    runtime().block_on(import.give_back_reservation());
    assert_eq!((import.status().reserved, kept()), (rates(0), 0));
}

/// The exporter has carried the decrease out, and another client has what was given back with it.
#[test]
fn a_rate_that_others_have_taken_meanwhile_is_not_reported() {
    let (reservations, server) = keeping();
    let import = import(options(&server, 600));
    reservations.be_silent(true);
    assert!(runtime().block_on(import.reserve(rates(200))).is_err());
    assert_eq!(import.status().reserved, rates(200), "for certain it has no more");
    reservations.free.store(500, Ordering::Release);
    until("asked for what it had", || {
        reservations.questions().iter().filter(|asked| **asked == 600).count() >= 2
    });
    reservations.be_silent(false);
    settled(&import, 200);
    let status = import.status();
    assert_eq!((status.reserved, reservations.kept_now()), (rates(200), 200));
    assert_eq!(status.reserved_why.as_deref(), Some("500 are free"));
    // Nothing more is asked, and the next change makes it good.
    let asked = reservations.questions().len();
    std::thread::sleep(server.options().retry.1 * 5);
    assert_eq!(reservations.questions().len(), asked);
    runtime().block_on(import.reserve(rates(400))).unwrap();
    assert_eq!((import.status().reserved, import.status().reserved_why), (rates(400), None));
}

/// An importer that is killed before it has written down what it was granted does not know of it.
#[test]
fn what_a_killed_importer_was_granted_is_given_back_when_it_starts() {
    let (reservations, server) = keeping();
    for wish in [ClaimWish::Own, ClaimWish::Inherit] {
        reservations.kept.store(300, Ordering::Release);
        let import = import(coming(options(&server, 0), wish));
        assert_eq!((import.status().reserved, reservations.kept_now()), (rates(0), 0), "{wish:?}");
    }
    // One that is new may be there beside the one that has it, of the same holder: until it is removed.
    reservations.kept.store(300, Ordering::Release);
    for wish in [ClaimWish::New, ClaimWish::TakeOver] {
        let import = import(coming(options(&server, 0), wish));
        assert_eq!(reservations.kept_now(), 300, "{wish:?}");
        drop(import);
    }
    let import = scripted::import(coming(options(&server, 0), ClaimWish::New));
    runtime().block_on(import.give_back_reservation());
    assert_eq!(reservations.kept_now(), 0);
    // What does not fit any more is not reported, and whatever there is, is given back.
    reservations.kept.store(300, Ordering::Release);
    let import = scripted::import(coming(options(&server, 2000), ClaimWish::Own));
    assert_eq!(import.status().reserved, rates(0));
    assert_eq!(import.status().reserved_why.as_deref(), Some("1000 are free"));
    runtime().block_on(import.give_back_reservation());
    assert_eq!(reservations.kept_now(), 0);
}

/// The server has the question, and is slow: whoever does not use the disk any more does not wait, and the server can tell which question is the later one.
#[test]
fn a_question_ends_with_its_disk() {
    let (reservations, server) = keeping();
    let patient =
        |requests| ImportOptions { connect_timeout: Duration::from_secs(100), ..options(&server, requests) };
    let is_slow = |slow| reservations.slow.store(slow, Ordering::Release);
    let begun = Instant::now();
    // A command waits; and the same in the background.
    for background in [false, true] {
        let import = import(patient(100));
        if background {
            reservations.be_silent(true);
            assert!(runtime().block_on(import.reserve(rates(300))).is_err());
            reservations.be_silent(false);
        }
        let asked = reservations.questions().len();
        is_slow(true);
        let waiting = import.clone();
        let command = std::thread::spawn(move || match background {
            false => runtime().block_on(waiting.reserve(rates(700))).map(drop),
            true => Ok(()),
        });
        until("asked", || reservations.questions().len() > asked);
        runtime().block_on(import.end_reservation());
        let outcome = command.join().unwrap();
        assert!(background || matches!(outcome, Err(NbdError::GivenUp)), "{outcome:?}");
        is_slow(false);
    }
    // What may have been granted is given back, although nothing is asked for any more.
    let import = import(patient(100));
    is_slow(true);
    let asked = reservations.questions().len();
    let waiting = import.clone();
    let command = std::thread::spawn(move || runtime().block_on(waiting.reserve(rates(700))));
    until("asked", || reservations.questions().len() > asked);
    import.stop_reserving();
    assert!(matches!(command.join().unwrap(), Err(NbdError::GivenUp)));
    is_slow(false);
    runtime().block_on(import.give_back_reservation());
    assert_eq!(reservations.questions().last(), Some(&0));
    assert!(
        begun.elapsed() < Duration::from_secs(60),
        "nobody has waited for the server: {:?}",
        begun.elapsed()
    );
    let orders = reservations.orders.lock().unwrap().clone();
    assert!(orders.is_sorted_by(|a, b| a < b), "{orders:?}");
}

#[test]
fn a_server_that_knows_no_reservations_is_asked_for_none() {
    let (server, _) = Server::obedient(Terms::default());
    for wish in [ClaimWish::New, ClaimWish::Own] {
        let import = import(coming(options(&server, 0), wish));
        let connections = server.connections();
        let refused = runtime().block_on(import.reserve(rates(7)));
        assert!(
            matches!(&refused, Err(NbdError::Reservation(why)) if why.contains("keeps nothing")),
            "{refused:?}"
        );
        runtime().block_on(import.reserve(rates(0))).unwrap();
        runtime().block_on(import.give_back_reservation());
        assert_eq!(server.connections(), connections, "{wish:?}");
    }
    // One that has a rate noted from another server.
    let import = scripted::import(coming(options(&server, 5), ClaimWish::Own));
    let connections = server.connections();
    assert!(import.status().reserved_why.unwrap().contains("keeps nothing"));
    runtime().block_on(import.give_back_reservation());
    assert_eq!(server.connections(), connections);
}

#[test]
fn a_server_that_is_not_there_has_certainly_granted_nothing() {
    let (reservations, server) = keeping();
    let import = import(options(&server, 600));
    let moved = server.path().with_extension("moved");
    std::fs::rename(server.path(), &moved).unwrap();
    let lost = runtime().block_on(import.reserve(rates(200)));
    assert!(lost.is_err() && !matches!(lost, Err(NbdError::Reservation(_))), "{lost:?}");
    std::fs::rename(&moved, server.path()).unwrap();
    let status = import.status();
    assert_eq!((status.reserved, status.reserved_why), (rates(600), None));
    assert_eq!(reservations.questions(), [600]);
}

#[test]
fn another_import_of_the_holder_takes_the_reservation_over_or_leaves_it_as_it_was() {
    let (reservations, server) = keeping();
    let old = import(options(&server, 600));
    let lend = |requests| runtime().block_on(old.lend_reservation(rates(requests)));
    // Its connection is lost after the grant.
    let lent = lend(200);
    reservations.be_silent(true);
    assert!(runtime().block_on(Import::open(options(&server, 200))).is_err());
    assert_eq!(reservations.kept_now(), 200);
    reservations.be_silent(false);
    drop(lent);
    until("as before", || reservations.kept_now() == 600);
    settled(&old, 600);
    // What the old one asks in the background does not end in what the new one has.
    reservations.be_silent(true);
    assert!(runtime().block_on(old.reserve(rates(700))).is_err());
    let lent = lend(200);
    reservations.be_silent(false);
    let fresh = import(options(&server, 200));
    lent.pass_on();
    let asked = reservations.questions().len();
    std::thread::sleep(server.options().retry.1 * 5);
    assert_eq!((reservations.questions().len(), reservations.kept_now()), (asked, 200));
    assert_eq!(fresh.status().reserved, rates(200));
    let ended = runtime().block_on(old.reserve(rates(900)));
    assert!(matches!(ended, Err(NbdError::Reservation(_))), "{ended:?}");
    assert_eq!(reservations.kept_now(), 200);
}
