//! A disk looks at several requests before it takes the first: a hint, which changes nothing, whatever is found.

mod rig;

use ioplane_storage::MemoryBacking;
use ioplane_testkit::driver::{DiskOp, DiskPlan, Shape};
use ioplane_testkit::hand::HandCore;
use rig::{PACKED, Rig, SPLIT, options};

/// Requests, more than are looked at together.
const REQUESTS: u16 = 12;
const BYTES: u32 = 4096;

fn rig(features: u64, shape: Shape) -> Rig {
    let plan = DiskPlan { slots: REQUESTS, max_bytes: BYTES, segments: 1, shape };
    let backing = MemoryBacking::new(1 << 20).unwrap();
    Rig::planned(options("disk"), backing, plan, features, &HandCore::polling())
}

/// Each ring with each shape of request.
fn each(test: impl Fn(&dyn Fn() -> Rig)) {
    for features in [SPLIT, PACKED] {
        for shape in [Shape::Direct, Shape::Indirect] {
            test(&|| rig(features, shape));
        }
    }
}

#[test]
fn many_at_once_move_their_own_bytes() {
    each(|rig| {
        let mut rig = rig();
        for round in 0..20u8 {
            let pattern = |request: u16| round.wrapping_mul(16).wrapping_add(request as u8) | 1;
            for op in [DiskOp::Write, DiskOp::Read] {
                let mut requests = Vec::new();
                for request in 0..REQUESTS {
                    let fill = if op == DiskOp::Write { pattern(request) } else { 0 };
                    let token = rig.disk.next().unwrap();
                    rig.disk.write_data(token, &[fill; BYTES as usize]).unwrap();
                    assert_eq!(rig.disk.submit(op, u64::from(request) * 8, BYTES), Some(token));
                    requests.push((token, request));
                }
                for _ in 0..REQUESTS {
                    assert_eq!(rig.finish(), Some(0));
                }
                for (token, request) in requests {
                    let mut bytes = vec![0; BYTES as usize];
                    rig.disk.read_data(token, &mut bytes).unwrap();
                    assert_eq!(bytes, [pattern(request); BYTES as usize], "{op:?} {request}");
                }
            }
        }
    });
}

/// One in the middle of a group cannot be answered: those before it are, it stops the queue, and those behind it are not touched.
#[test]
fn a_fault_in_the_middle_of_a_group_leaves_what_was_before_it() {
    for features in [SPLIT, PACKED] {
        for bad in 0..REQUESTS {
            let mut rig = rig(features, Shape::Indirect);
            for request in 0..REQUESTS {
                let token = rig.disk.stage(DiskOp::Read, 0, BYTES).unwrap();
                if request == bad {
                    // The header is in no memory.
                    rig.disk.table(token).unwrap().put_u64(0, 0x66_0000_0000);
                }
                rig.disk.push(token);
            }
            rig.core.turn_until_idle(100);
            let mut answered = 0;
            while rig.disk.reap().unwrap().is_some() {
                answered += 1;
            }
            assert_eq!((answered, rig.fault()), (bad, Some("outside_memory")));
        }
    }
}

/// Wild tables, headers and sectors are looked at, too. Each is refused for itself.
#[test]
fn what_is_looked_at_may_be_wild() {
    for features in [SPLIT, PACKED] {
        let mut rig = rig(features, Shape::Indirect);
        for request in 0..REQUESTS {
            let sector = [0, u64::MAX, 1 << 55, (1 << 20) / 512, 1][usize::from(request % 5)];
            let token = rig.disk.stage(DiskOp::Read, sector, BYTES).unwrap();
            if sector == 1 {
                // The data is in no memory.
                rig.disk.table(token).unwrap().put_u64(16, u64::MAX - 8);
            }
            rig.disk.push(token);
        }
        let statuses: Vec<_> = (0..REQUESTS).map(|_| rig.finish().unwrap()).collect();
        let wanted: Vec<_> = (0..REQUESTS).map(|request| u8::from(request % 5 != 0)).collect();
        assert_eq!(statuses, wanted);
        // A driver that has set up nothing else is served as before.
        assert_eq!(rig.request(DiskOp::Flush, 0, 0), 0);
        assert_eq!(rig.fault(), None);
    }
}
