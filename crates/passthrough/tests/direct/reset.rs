//! The reset of a card that has none of its own, by its registers.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use ioplane_device::Quiescent;
use ioplane_hardware::HardwareError;
use ioplane_model::{Register, StateModel, Writes};
use ioplane_passthrough::{Passthrough, ne2000, rtl8139};

use crate::card::{Card, Chip, Log};

/// Resets a card that the test has made ready; what it saw, why that failed if it did, and how often it did.
fn reset(model: Option<&'static StateModel>, ready: impl FnOnce(&mut Card, &mut Log)) -> Outcome {
    let (mut card, log, _) = Card::new(false);
    ready(&mut card, &mut log.lock().expect("no panic"));
    let mut held = Quiescent::new(Passthrough::new("nic1", card, model).expect("passed through"));
    log.lock().expect("no panic").touched.clear();
    held.reset();
    again(&mut held, &log)
}

struct Outcome {
    touched: Vec<(bool, u64, u8)>,
    failed: Option<String>,
    resets: u64,
}

fn again(held: &mut Quiescent<Passthrough<Card>>, log: &Mutex<Log>) -> Outcome {
    Outcome {
        touched: std::mem::take(&mut log.lock().expect("no panic").touched),
        failed: held.device().not_reset().map(ToString::to_string),
        resets: held.device().faults().resets,
    }
}

#[test]
fn registers_reset_what_has_no_other_way() {
    let outcome = reset(Some(&rtl8139::MODEL), |_, log| log.chip = Chip::Rtl8139);
    assert_eq!((outcome.failed, outcome.resets), (None, 0));
    assert_eq!(outcome.touched, [(true, 0x37, 0x10), (false, 0x37, 0)]);
}

#[test]
fn its_own_reset_comes_first() {
    let (card, log, _) = Card::new(true);
    let mut held =
        Quiescent::new(Passthrough::new("nic1", card, Some(&rtl8139::MODEL)).expect("passed through"));
    held.reset();
    let outcome = again(&mut held, &log);
    assert_eq!((outcome.failed, outcome.resets, outcome.touched), (None, 0, Vec::new()));
    assert_eq!(log.lock().expect("no panic").resets, 1);
}

#[test]
fn what_nobody_can_reset_says_so() {
    let outcome = reset(None, |_, _| {});
    assert_eq!((outcome.touched, outcome.resets), (Vec::new(), 1));
    assert!(outcome.failed.expect("no way").contains("no reset of its own"));
}

#[test]
fn a_card_that_never_comes_out_of_its_reset_is_not_waited_for_for_ever() {
    for (chip, model) in [(Chip::Rtl8139, &rtl8139::MODEL), (Chip::Ne2000, &ne2000::MODEL)] {
        let begun = Instant::now();
        let outcome = reset(Some(model), |_, log| (log.chip, log.stuck) = (chip, true));
        assert!(begun.elapsed() >= Duration::from_millis(100), "{chip:?}: given up too early");
        assert_eq!(outcome.resets, 1);
        let failed = outcome.failed.expect("stuck");
        assert!(
            failed.contains("0000:00:05.0 has not come out of its reset in 100 ms"),
            "{chip:?}: {failed}"
        );
    }
}

/// All ones are what an RTL8139 in its reset and an NE2000 at the end of it have in common with an empty slot.
#[test]
fn a_card_that_is_gone_is_neither_reset_nor_waited_for() {
    for (chip, model) in [(Chip::Rtl8139, &rtl8139::MODEL), (Chip::Ne2000, &ne2000::MODEL)] {
        let (card, log, _) = Card::new(false);
        log.lock().expect("no panic").chip = chip;
        let mut held = Quiescent::new(Passthrough::new("nic1", card, Some(model)).expect("passed through"));
        log.lock().expect("no panic").gone = true;
        held.reset();
        let failed = held.device().not_reset();
        assert!(matches!(failed, Some(HardwareError::Gone { .. })), "{chip:?}: {failed:?}");
        let looks = again(&mut held, &log).touched.iter().filter(|(wrote, ..)| !wrote).count();
        assert!(looks <= 3, "{chip:?}: asked {looks} times");
        // It is plugged in again.
        log.lock().expect("no panic").gone = false;
        held.reset();
        let outcome = again(&mut held, &log);
        assert_eq!((outcome.failed, outcome.resets), (None, 1), "{chip:?}: of before");
    }
}

#[test]
fn an_ne2000_is_reset_from_any_bank() {
    // Started, with each page chosen by whoever had it; ISR is on the first page only.
    for page in 0..4u8 {
        let outcome = reset(Some(&ne2000::MODEL), |card, log| {
            log.chip = Chip::Ne2000;
            card.registers[0] = page << 6 | 0x02;
            card.registers[0x1f] = 0x5a;
        });
        assert_eq!((outcome.failed, outcome.resets), (None, 0), "page {page}");
        let first = [(false, 0, page << 6 | 0x02), (true, 0, 0x22)];
        let then = [(false, 0x1f, 0x5a), (true, 0x1f, 0x5a), (false, 0x07, 0x80)];
        assert_eq!(
            outcome.touched,
            [&first[..], &then].concat(),
            "page {page}: no transfer begins, nor ends"
        );
    }
}

#[test]
fn what_nobody_may_write_is_only_read() {
    let fixed = |register: &Register| match register.name {
        "RESET" => Register { writes: Writes::Never, ..*register },
        _ => *register,
    };
    let registers: Vec<_> = ne2000::MODEL.registers.iter().map(fixed).collect();
    let model = StateModel { registers: Box::leak(registers.into()), ..ne2000::MODEL.clone() };
    let outcome =
        reset(Some(Box::leak(Box::new(model))), |_, log| (log.chip, log.stuck) = (Chip::Ne2000, true));
    let touched = outcome.touched.iter().filter(|(_, at, _)| *at == 0x1f);
    assert_eq!(touched.collect::<Vec<_>>(), [&(false, 0x1f, 0)]);
}
