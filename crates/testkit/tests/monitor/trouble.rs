//! Hardware that fails: gone, silent, broken, interrupting for ever. Counted, named; the host goes on.

use ioplane_hardware::HardwareError;
use ioplane_network::Mac;
use ioplane_passthrough::monitor::{Monitor, MonitorError, MonitorOptions, Policies};
use ioplane_passthrough::rtl8139::MODEL;
use ioplane_pci::Function;
use ioplane_testkit::nic::{Cp, Cut, Lan, frame, readable};
use ioplane_testkit::simulated::Trouble;

use crate::rig::*;

const BASE: u64 = 0x1_0000;
const EVE: Mac = [0x52, 0x54, 0, 0, 0, 2];

#[test]
fn a_card_that_is_pulled_out_reads_as_all_ones_and_the_guest_is_told_once() {
    for trouble in [Trouble::Gone, Trouble::Broken] {
        let (watched, map, mut lan) = rtl8139(Policies::default());
        let mut driver = Cp::new(watched, view(&map), BASE);
        driver.open(OWN).expect("opens");
        driver.reach.interrupts();
        driver.reach.bench.trouble(trouble);
        lan.neighbour.send(&frame(OWN, OTHER, &[1; 100]));
        for _ in 0..20 {
            assert_eq!(driver.get(0x00, 4), Ok(u32::MAX), "{trouble:?}");
            driver.put(0x3e, 2, 0xffff).expect("dropped");
        }
        driver.xmit(&frame(EVE, OWN, &[1; 100]), Cut::default()).expect("dropped");
        assert_eq!(driver.get(0x3e, 2), Ok(0xffff), "as a driver knows it");
        assert_eq!(driver.interrupt(), Ok(None));
        let reading = driver.reach.reading();
        assert_eq!((reading.gone, reading.faults_of("gone")), (true, 1), "{trouble:?}: {:?}", reading.faults);
        assert_eq!(driver.reach.error.count(), 1, "{trouble:?}");
        driver.reach.with(|monitor| assert!(monitor.attention().is_none(), "nothing to wait for"));
        driver.reach.hold().expect("nothing can happen any more");
        let error = driver.reach.front.save().expect_err("there is nothing to save");
        assert!(error.to_string().contains("gone"), "{error}");
        driver.reach.resume();
        assert_eq!(driver.get(0x00, 4), Ok(u32::MAX), "still gone");
        driver.reach.reset();
        assert_eq!(
            driver.get(0x00, 4),
            Ok(u32::MAX),
            "a reset does not bring it back, and nobody waits for it"
        );
        assert_eq!(driver.reach.faults("gone"), 1);
    }
}

#[test]
fn a_card_that_never_comes_out_of_its_reset_is_not_taken() {
    let lan = Lan::new(OWN, OTHER);
    let (hardware, bench) = rtl8139_card(&lan);
    bench.trouble(Trouble::Deaf);
    let error = Monitor::new(hardware, &MODEL, MonitorOptions::new("nic1")).expect_err("deaf");
    let stuck = matches!(error, MonitorError::Hardware(HardwareError::StuckInReset { .. }));
    assert!(stuck && error.to_string().contains("come out of its reset in 100 ms"), "{error}");
    let (hardware, bench) = rtl8139_card(&lan);
    bench.trouble(Trouble::Gone);
    let error = Monitor::new(hardware, &MODEL, MonitorOptions::new("nic1")).expect_err("gone");
    assert!(matches!(error, MonitorError::Hardware(HardwareError::Gone { .. })), "{error}");
    // All ones are what an NE2000 says at the end of its reset, too.
    let (hardware, bench) = ne2000_card(&lan);
    bench.trouble(Trouble::Gone);
    let model = &ioplane_passthrough::ne2000::MODEL;
    let error = Monitor::new(hardware, model, MonitorOptions::new("nic1")).expect_err("gone");
    assert!(matches!(error, MonitorError::Hardware(HardwareError::Gone { .. })), "{error}");
    let (hardware, bench) = rtl8139_card(&lan);
    bench.trouble(Trouble::Broken);
    assert!(matches!(
        Monitor::new(hardware, &MODEL, MonitorOptions::new("nic1")),
        Err(MonitorError::Hardware(_))
    ));
    let (hardware, _) = rtl8139_card(&lan);
    let other = Monitor::new(hardware, &ioplane_passthrough::ne2000::MODEL, MonitorOptions::new("nic1"));
    assert!(matches!(other, Err(MonitorError::Other { .. })));
}

#[test]
fn a_card_that_falls_silent_can_still_be_stopped() {
    let (watched, map, _lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.interrupts();
    driver.reach.bench.trouble(Trouble::Deaf);
    for n in 0..10 {
        driver.xmit(&frame(EVE, OWN, &[n; 100]), Cut::default()).expect("room");
    }
    assert_eq!(driver.reach.hold(), Err("TxRun".to_owned()));
    driver.reach.force();
    driver.reach.save();
    // The reset that the guest's watchdog would do is seen never to end, by the guest.
    driver.reach.resume();
    driver.put(0x37, 1, 0x10).expect("works");
    assert_eq!(driver.get(0x37, 1), Ok(0x10));
    assert_eq!(driver.reach.hold(), Err("Reset".to_owned()));
}

#[test]
fn an_interrupt_without_end_is_no_longer_listened_to() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.interrupts();
    driver.reach.bench.trouble(Trouble::Mad);
    let mut attended = 0;
    while driver.reach.with(|monitor| readable(monitor)) {
        driver.reach.with(Monitor::attend);
        attended += 1;
        assert!(attended < 1000, "the storm goes on");
    }
    assert_eq!(driver.reach.faults("storm"), 1);
    assert_eq!(driver.reach.line.count(), 0, "the guest hears nothing of it");
    // The guest's own work goes on: each look at its status is a look at the card.
    let sent = frame(OTHER, OWN, &[1; 100]);
    driver.xmit(&sent, Cut::default()).expect("room");
    assert_eq!(lan.neighbour.take(), Some(sent));
    assert_eq!(driver.interrupt(), Ok(Some(4)));
    assert_eq!(driver.reclaim().expect("works").len(), 1);
    // Once it is well again, so is everything.
    driver.reach.bench.trouble(Trouble::None);
    driver.put(0x3c, 2, 0x80ff).expect("works");
    lan.neighbour.send(&frame(OWN, OTHER, &[1; 100]));
    assert!(driver.reach.interrupts() > 0);
}
