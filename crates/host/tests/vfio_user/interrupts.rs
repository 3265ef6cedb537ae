//! Interrupts of every kind, on, off, masked, by eventfds.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::SeqCst;

use ioplane_testkit::toy::card::registers::*;
use ioplane_testkit::vfio_user::VfioUserClient;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_MASK as MASK, VFIO_IRQ_SET_ACTION_TRIGGER as TRIGGER,
    VFIO_IRQ_SET_ACTION_UNMASK as UNMASK, VFIO_IRQ_SET_DATA_BOOL as BOOL,
    VFIO_IRQ_SET_DATA_EVENTFD as EVENTFD, VFIO_IRQ_SET_DATA_NONE as NONE,
};

use super::{count, errno, eventfd, eventually, served};

const INTX: u32 = 0;
const MSI_INDEX: u32 = 1;
const MSIX_INDEX: u32 = 2;
const ERROR_INDEX: u32 = 3;

#[test]
fn vectors_are_wired_masked_triggered_and_taken_off() {
    let card = served();
    let mut client = card.client();
    for (index, register) in [(MSI_INDEX, MSI), (MSIX_INDEX, MSIX)] {
        let calls = [eventfd(), eventfd(), eventfd()];
        client.set_irqs(EVENTFD | TRIGGER, index, 1..4, &[], &calls.each_ref()).unwrap();
        let rung = || calls.each_ref().map(count);
        client.write64(0, register, 0).unwrap();
        client.write64(0, register, 3).unwrap();
        assert_eq!(rung(), [0, 0, 1], "vector 0 has no wire");
        client.set_irqs(NONE | MASK, index, 1..3, &[], &[]).unwrap();
        (1..4).for_each(|vector| client.write64(0, register, vector).unwrap());
        assert_eq!(rung(), [0, 0, 1]);
        client.set_irqs(BOOL | UNMASK, index, 1..3, &[0, 1], &[]).unwrap();
        assert_eq!(rung(), [0, 1, 0], "what was pending");
        client.set_irqs(NONE | TRIGGER, index, 2..4, &[], &[]).unwrap();
        client.set_irqs(BOOL | TRIGGER, index, 2..4, &[1, 0], &[]).unwrap();
        assert_eq!(rung(), [0, 2, 1]);
        // One wire off, another in its place, then all off.
        client.set_irqs(EVENTFD | TRIGGER, index, 3..4, &[], &[]).unwrap();
        client.write64(0, register, 3).unwrap();
        let other = eventfd();
        client.set_irqs(EVENTFD | TRIGGER, index, 2..3, &[], &[&other]).unwrap();
        client.write64(0, register, 2).unwrap();
        assert_eq!((rung(), count(&other)), ([0, 0, 0], 1));
        client.set_irqs(NONE | TRIGGER, index, 0..0, &[], &[]).unwrap();
        client.write64(0, register, 2).unwrap();
        assert_eq!((rung(), count(&other)), ([0, 0, 0], 0));
    }
    let error = eventfd();
    client.set_irqs(EVENTFD | TRIGGER, ERROR_INDEX, 0..1, &[], &[&error]).unwrap();
    client.write64(0, ERROR, 0).unwrap();
    assert_eq!(count(&error), 1);
    assert_eq!(card.handle.status().irqs, 15);
}

#[test]
fn the_line_masks_itself_and_is_unmasked_by_command_or_eventfd() {
    let card = served();
    let mut client = card.client();
    let (call, resume) = (eventfd(), eventfd());
    // As QEMU with KVM does: wire, mask, give the resample descriptor, unmask.
    client.set_irqs(EVENTFD | TRIGGER, INTX, 0..1, &[], &[&call]).unwrap();
    client.set_irqs(NONE | MASK, INTX, 0..1, &[], &[]).unwrap();
    client.set_irqs(EVENTFD | UNMASK, INTX, 0..1, &[], &[&resume]).unwrap();
    client.write64(0, LINE, 1).unwrap();
    assert_eq!(count(&call), 0, "masked");
    client.set_irqs(NONE | UNMASK, INTX, 0..1, &[], &[]).unwrap();
    assert_eq!(count(&call), 1);
    client.write64(0, LINE, 1).unwrap();
    assert_eq!(count(&call), 0, "masked by its own signal");
    let again = |client: &mut VfioUserClient| {
        rustix::io::write(&resume, &1u64.to_ne_bytes()).unwrap();
        // Not read here: the service is to do that.
        let left =
            || rustix::event::poll(&mut [PollFd::new(&resume, PollFlags::IN)], Some(&Timespec::default()));
        eventually("the service", || left() == Ok(0));
        // The service has read it; when it answers it has acted on it too.
        client.info().unwrap();
    };
    again(&mut client);
    eventually("the next signal", || count(&call) == 1);
    client.write64(0, LINE, 0).unwrap();
    again(&mut client);
    assert_eq!(count(&call), 0, "the level is down");
    client.set_irqs(BOOL | UNMASK, INTX, 0..1, &[1], &[]).unwrap();
    client.write64(0, LINE, 1).unwrap();
    assert_eq!(count(&call), 1);
    // INTx disable in the command register, then all off.
    client.write(7, 4, &0x400u16.to_le_bytes()).unwrap();
    client.set_irqs(NONE | UNMASK, INTX, 0..1, &[], &[]).unwrap();
    assert_eq!(count(&call), 0);
    client.set_irqs(NONE | TRIGGER, INTX, 0..0, &[], &[]).unwrap();
    client.write(7, 4, &[0, 0]).unwrap();
    assert_eq!(count(&call), 0);
    rustix::io::write(&resume, &1u64.to_ne_bytes()).unwrap();
    client.info().unwrap();
    assert_eq!(count(&resume), 1, "nobody listens to it any more");
}

#[test]
fn what_the_hardware_says_arrives_without_the_guest() {
    let card = served();
    let mut client = card.client();
    let call = eventfd();
    client.set_irqs(EVENTFD | TRIGGER, INTX, 0..1, &[], &[&call]).unwrap();
    client.write64(0, BUSY, 1).unwrap();
    card.ring();
    eventually("the interrupt", || count(&call) == 1);
    assert_eq!((client.read64(0, BUSY).unwrap(), client.read64(0, LINE).unwrap()), (0, 1));
    assert_eq!(card.seen.attended.load(SeqCst), 1);
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let card = served();
    let mut client = card.client();
    let one = eventfd();
    let refused = |client: &mut VfioUserClient,
                   flags,
                   index,
                   vectors: std::ops::Range<u32>,
                   data: &[u8],
                   files: usize| {
        let files = vec![&one; files];
        errno(client.set_irqs(flags, index, vectors, data, &files))
    };
    let wrong = [
        (0, INTX, 0..1, &[][..], 0),
        (NONE, INTX, 0..1, &[], 0),
        (TRIGGER, INTX, 0..1, &[], 0),
        (NONE | BOOL | TRIGGER, INTX, 0..1, &[], 0),
        (NONE | MASK | UNMASK, INTX, 0..1, &[], 0),
        (NONE | TRIGGER | 0x40, INTX, 0..1, &[], 0),
        (NONE | MASK, INTX, 0..0, &[], 0),
        (NONE | TRIGGER, 5, 0..1, &[], 0),
        (NONE | TRIGGER, 4, 0..1, &[], 0),
        (NONE | TRIGGER, INTX, 1..2, &[], 0),
        (NONE | TRIGGER, MSIX_INDEX, 3..5, &[], 0),
        (NONE | TRIGGER, MSIX_INDEX, 0..u32::MAX, &[], 0),
        (NONE | TRIGGER, MSIX_INDEX, u32::MAX..u32::MAX, &[], 0),
        (NONE | TRIGGER, MSIX_INDEX, 0..1, &[1], 0),
        (NONE | TRIGGER, MSIX_INDEX, 0..1, &[], 1),
        (BOOL | TRIGGER, MSIX_INDEX, 0..2, &[1], 0),
        (BOOL | TRIGGER, MSIX_INDEX, 0..2, &[1, 1, 1], 0),
        (EVENTFD | TRIGGER, MSIX_INDEX, 0..2, &[], 1),
        (EVENTFD | TRIGGER, MSIX_INDEX, 0..2, &[], 3),
        (EVENTFD | TRIGGER, MSIX_INDEX, 0..2, &[], 17),
        (EVENTFD | TRIGGER, MSIX_INDEX, 0..0, &[], 0),
        (EVENTFD | TRIGGER, MSIX_INDEX, 0..1, &[9, 9, 9, 9], 1),
    ];
    for (flags, index, vectors, data, files) in wrong {
        let text = format!("{flags:#x} {index} {vectors:?} {data:?} {files}");
        assert_eq!(refused(&mut client, flags, index, vectors, data, files), Errno::INVAL, "{text}");
    }
    for flags in [EVENTFD | MASK, EVENTFD | UNMASK] {
        assert_eq!(refused(&mut client, flags, MSIX_INDEX, 0..1, &[], 1), Errno::NOTSUP);
    }
    let pipe = rustix::pipe::pipe().unwrap().0;
    assert_eq!(
        errno(client.set_irqs(EVENTFD | TRIGGER, MSIX_INDEX, 0..2, &[], &[&one, &pipe])),
        Errno::INVAL,
        "an eventfd and a pipe"
    );
    client.write64(0, MSIX, 0).unwrap();
    assert_eq!(count(one.as_fd()), 0, "nothing was wired");
    assert_eq!(card.handle.status().faults["not_an_eventfd"], 1);
}

/// What a hostile client does to an eventfd: raises it by `count`, and clears its `O_NONBLOCK`.
fn spoil(file: &std::os::fd::OwnedFd, count: u64) {
    rustix::io::write(file, &count.to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(file, rustix::fs::OFlags::empty()).unwrap();
}

#[test]
fn hole_01_a_client_that_fills_its_interrupts_stops_nobody() {
    let card = served();
    let mut client = card.client();
    let (line, vector, error) = (eventfd(), eventfd(), eventfd());
    client.set_irqs(EVENTFD | TRIGGER, INTX, 0..1, &[], &[&line]).unwrap();
    client.set_irqs(EVENTFD | TRIGGER, MSIX_INDEX, 1..2, &[], &[&vector]).unwrap();
    client.set_irqs(EVENTFD | TRIGGER, ERROR_INDEX, 0..1, &[], &[&error]).unwrap();
    for call in [&line, &vector, &error] {
        spoil(call, u64::MAX - 1);
    }
    for _ in 0..1000 {
        client.write64(0, MSIX, 1).unwrap();
    }
    client.write64(0, ERROR, 0).unwrap();
    client.set_irqs(NONE | TRIGGER, MSIX_INDEX, 1..2, &[], &[]).unwrap();
    // What the hardware says of its own accord, with the device locked.
    client.write64(0, BUSY, 1).unwrap();
    card.ring();
    eventually("the attention", || card.seen.attended.load(SeqCst) == 1);
    client.info().unwrap();
    for call in [&line, &vector, &error] {
        assert_eq!(count(call), u64::MAX, "signalled, and full");
    }
    assert_eq!(card.handle.status().irqs, 1003);
    // The daemon's side, too: stopping takes the wires off.
    card.handle.stop(true).unwrap();
}

/// The client empties its resample descriptor between the moment at which the service has seen it and the one at which it reads it,
/// which is long while the service does something else.
#[test]
fn hole_01_a_resample_descriptor_that_the_client_empties_stops_nobody() {
    let card = served();
    let mut client = card.client();
    let resume = eventfd();
    client.set_irqs(EVENTFD | UNMASK, INTX, 0..1, &[], &[&resume]).unwrap();
    for _ in 0..20 {
        let attended = card.seen.attended.load(SeqCst);
        rustix::io::write(&resume, &1u64.to_ne_bytes()).unwrap();
        card.ring();
        // The service sees all three at once, if it is not too quick, and does this before it looks at the descriptor.
        let theirs = resume.try_clone().unwrap();
        let busy = card.handle.with(move |_| {
            count(&theirs);
            rustix::fs::fcntl_setfl(&theirs, rustix::fs::OFlags::empty()).unwrap();
        });
        busy.wait().unwrap();
        client.info().unwrap();
        eventually("the attention", || card.seen.attended.load(SeqCst) > attended);
        rustix::fs::fcntl_setfl(&resume, rustix::fs::OFlags::NONBLOCK).unwrap();
    }
    card.handle.stop(true).unwrap();
}
