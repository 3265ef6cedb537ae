//! The picture of moves over time, as the paper's Figures 11 to 16 have it.

use crate::figures::Measured;
use crate::moves::Moved;
use crate::over_time::{OverTime, SHOWN};
use ioplane_figures::plot::{Panel, svg};

/// The move whose gap is the middle one.
fn typical(moves: &[Moved]) -> Option<&OverTime> {
    let mut sorted: Vec<&Moved> = moves.iter().collect();
    sorted.sort_by(|a, b| a.gap_ms.total_cmp(&b.gap_ms));
    sorted.get(sorted.len() / 2).map(|moved| &moved.over_time)
}

/// A line for each guest that has moved. Nothing if none has.
pub fn plot(measured: &Measured) -> Option<String> {
    let kinds = [
        ("virtual function", &measured.vf[..]),
        ("virtio-net", &measured.virtio[..]),
        ("QEMU's pair", &measured.failover[..]),
        ("a driver that cooperates", &measured.cooperating[..]),
    ];
    let guests: Vec<_> = kinds.iter().filter_map(|(name, moves)| Some((*name, typical(moves)?))).collect();
    let panel = |title, unit, of: fn(&OverTime) -> &Vec<(f64, f64)>| Panel {
        title,
        unit,
        across: "seconds since the guest was last heard of",
        from: -SHOWN.0,
        step: 5.0,
        width: 420.0,
        marks: vec![(0.0, "nothing comes")],
        lines: guests.iter().map(|(name, over_time)| (*name, of(over_time).clone())).collect(),
    };
    (!guests.is_empty()).then(|| {
        svg(&[
            panel("UDP while the VM moves", "datagrams of the guest per second", |all| &all.datagrams),
            panel("TCP while the VM moves", "bytes from the guest per second", |all| &all.tcp_bytes),
        ])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_guest_that_has_moved_has_a_line_of_its_middle_move() {
        let moved = |gap_ms, rate| Moved {
            gap_ms,
            over_time: OverTime { datagrams: vec![(-1.0, rate)], tcp_bytes: vec![(-1.0, rate)] },
            ..Moved::default()
        };
        assert!(plot(&Measured::default()).is_none());
        let moves = vec![moved(9.0, 1.0), moved(1.0, 2.0), moved(2.0, 777.0)];
        assert_eq!(typical(&moves).map(|middle| middle.datagrams[0].1), Some(777.0));
        let measured = Measured { vf: moves, ..Measured::default() };
        let picture = plot(&measured).expect("a guest has moved");
        assert!(picture.contains("virtual function") && !picture.contains("virtio-net"));
    }
}
