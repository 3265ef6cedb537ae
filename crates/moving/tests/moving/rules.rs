//! The hardware of these tests does notice: each rule, broken.

use ioplane_nic::silicon::{SiliconViolation, VirtualFunction};
use ioplane_nic::vf82576::Vf82576;
use ioplane_nic::vf82576::spec::*;
use ioplane_nic::vf82599::{self, Vf82599};

use crate::once::vf;

#[test]
fn the_silicon_s_rules_are_enforced() {
    let put = |vf: &mut Vf82576, offset: u64, value: u32| vf.write(offset, &value.to_le_bytes());
    let broken = |breaks: &dyn Fn(&mut Vf82576)| {
        let mut vf = vf();
        breaks(&mut vf);
        assert_eq!(vf.violations().len(), 1, "{:?}", vf.violations());
        vf.violations()[0]
    };
    let on = |vf: &mut Vf82576| {
        put(vf, RX + BAL, 0x1000);
        put(vf, RX + LEN, 256);
        put(vf, RX + DCTL, ENABLE);
    };
    assert_eq!(broken(&|vf| put(vf, RX + HEAD, 3)), SiliconViolation::Head { offset: RX + HEAD, value: 3 });
    let late = SiliconViolation::TailWhileOff { offset: TX + TAIL, value: 2 };
    assert_eq!(broken(&|vf| put(vf, TX + TAIL, 2)), late);
    assert_eq!(
        broken(&|vf| put(vf, TX + DCTL, ENABLE)),
        SiliconViolation::NotInitialised { offset: TX + DCTL }
    );
    assert_eq!(broken(&|vf| put(vf, VFGPRC, 0)), SiliconViolation::ReadOnly { offset: VFGPRC });
    assert_eq!(broken(&|vf| put(vf, VMBMEM, 1)), SiliconViolation::MailboxNotHeld { offset: VMBMEM });
    assert_eq!(broken(&|vf| vf.write(CTRL, &[0; 2])), SiliconViolation::Access { offset: CTRL, bytes: 2 });
    let outside = SiliconViolation::TailOutside { offset: RX + TAIL, value: 16 };
    assert_eq!(
        broken(&|vf| {
            on(vf);
            put(vf, RX + TAIL, 16);
        }),
        outside
    );
    let mut ended = vf();
    on(&mut ended);
    put(&mut ended, RX + DCTL, 0);
    put(&mut ended, RX + TAIL, 5);
    assert_eq!(ended.violations(), [], "a queue that was told to end ignores what is posted late");
    ended.step();
    let mut tail = [0; 4];
    ended.read(RX + TAIL, &mut tail);
    assert_eq!(tail, [0; 4]);
    assert_eq!(
        broken(&|vf| {
            on(vf);
            put(vf, RX + BAL, 0x2000);
        }),
        SiliconViolation::QueueOn { offset: RX + BAL }
    );
    assert_eq!(
        broken(&|vf| {
            vf.set_master(true);
            on(vf);
            put(vf, RX + TAIL, 5);
            vf.receive(&[0xff; 60]);
        }),
        SiliconViolation::Dma { iova: 0x1000 }
    );
    assert_eq!(
        broken(&|vf| {
            put(vf, V2PMAILBOX, VFU);
            put(vf, V2PMAILBOX, REQ);
            put(vf, V2PMAILBOX, VFU);
            put(vf, V2PMAILBOX, REQ);
        }),
        SiliconViolation::RequestOnRequest
    );
    assert_eq!(
        broken(&|vf| {
            put(vf, CTRL, CTRL_RST);
            put(vf, EIMS, 1);
        }),
        SiliconViolation::DuringReset { offset: EIMS }
    );
}

/// The 82599's own.
#[test]
fn what_the_82599_does_otherwise() {
    use vf82599::spec::*;
    let put = |vf: &mut Vf82599, offset: u64, value: u32| vf.write(offset, &value.to_le_bytes());
    let get = |vf: &mut Vf82599, offset: u64| {
        let mut bytes = [0; 4];
        vf.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    };
    let mut vf = VirtualFunction::with_queues([2, 0, 0, 0, 0, 1], 0xffff_ffff, 2);
    vf.set_master(true);
    for (offset, value) in [(RX + BAL, 0x1000), (RX + LEN, 256), (RX + DCTL, ENABLE), (RX + TAIL, 5)] {
        put(&mut vf, offset, value);
    }
    assert!(!vf.receive(&[0xff; 60]), "nothing is received before RESET was answered");
    vf.reset();
    (0..4).for_each(|_| vf.step());
    assert_eq!(
        [RX + BAL, RX + LEN, RX + TAIL].map(|offset| get(&mut vf, offset)),
        [0, 0, 5],
        "what a reset leaves"
    );
    assert_ne!(get(&mut vf, RX + DCTL) & ENABLE, 0, "also a queue that is on");
    // The PF reads what was asked, also from a driver that goes on holding the mailbox, and answers once that lets go.
    put(&mut vf, VFMAILBOX, VFU);
    put(&mut vf, VFMBMEM, MESSAGE_RESET);
    put(&mut vf, VFMAILBOX, VFU | REQ);
    (0..4).for_each(|_| vf.step());
    assert_eq!(get(&mut vf, VFMAILBOX) & (PFACK | PFSTS), PFACK);
    put(&mut vf, VFMAILBOX, 0);
    vf.step();
    assert_eq!(get(&mut vf, VFMAILBOX) & (PFACK | PFSTS), PFSTS);
    assert_eq!(get(&mut vf, VFMBMEM), MESSAGE_RESET | MESSAGE_NACK);
    assert_eq!((get(&mut vf, VFGORC_LSB), get(&mut vf, VFGORC_MSB)), (0xffff_ffff, 0xf), "36 bits");
    put(&mut vf, RX + QUEUE_STRIDE * 2 + HEAD, 9);
    assert_eq!(vf.violations(), [], "registers of queues that it does not have take nothing");
    put(&mut vf, RX + TAIL, 3);
    put(&mut vf, VFGORC_MSB, 0);
    let broken = [
        SiliconViolation::TailOutside { offset: RX + TAIL, value: 3 },
        SiliconViolation::ReadOnly { offset: VFGORC_MSB },
    ];
    assert_eq!(vf.violations(), broken);
}

/// Frames come between the physical function's answer and the end of a queue that a reset has left on, with its head far on and no length.
#[test]
fn a_queue_without_a_length_takes_nothing() {
    use vf82599::spec::*;
    let put = |vf: &mut Vf82599, offset: u64, value: u32| vf.write(offset, &value.to_le_bytes());
    let begin = |vf: &mut Vf82599| {
        (0..4).for_each(|_| vf.step());
        for (offset, value) in [(VFMAILBOX, VFU), (VFMBMEM, MESSAGE_RESET), (VFMAILBOX, REQ)] {
            put(vf, offset, value);
        }
        (0..4).for_each(|_| vf.step());
    };
    let mut vf: Vf82599 = VirtualFunction::new([2, 0, 0, 0, 0, 1], 0);
    vf.set_jumbo(false);
    vf.set_master(true);
    let memory = ioplane_memory::GuestMap::anonymous(1 << 20).expect("memory");
    vf.map(0, &memory.regions()[0]).expect("mapped");
    begin(&mut vf);
    for (offset, value) in [(RX + BAL, 0x1000), (RX + LEN, 256), (RX + DCTL, ENABLE), (RX + TAIL, 12)] {
        put(&mut vf, offset, value);
    }
    assert_eq!((0..16).filter(|_| vf.receive(&[0xff; 60])).count(), 12);
    vf.reset();
    begin(&mut vf);
    assert!(!vf.receive(&[0xff; 60]), "it has no room");
    vf.step();
    assert_eq!(vf.violations(), []);
}
