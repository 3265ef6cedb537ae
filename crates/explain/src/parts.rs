//! Where the time of one request or frame goes, in one sentence for each direction of a device: means, since only these add up.

use crate::interval::{BackingActivity, DeviceActivity, QueueActivity};
use crate::limits;
use crate::side::Side;

/// Interrupts for each unit from which what they take is worth a word.
const SOME_INTERRUPTS: f64 = 0.05;

/// One part of the time of a unit: how long, us, and what happens then.
struct Part {
    us: f64,
    /// It is an upper bound.
    at_most: bool,
    what: String,
}

/// The sentences of a device.
pub fn sentences(device: &DeviceActivity, seconds: f64) -> String {
    let of = |side| sentence(device, side, seconds);
    match device.units() {
        0 => none(device),
        _ => Side::ALL.into_iter().filter_map(of).collect::<Vec<_>>().join(" "),
    }
}

/// It has answered nothing.
fn none(device: &DeviceActivity) -> String {
    let taken = device.waited().count();
    let units = device.units_word();
    if taken == 0 {
        format!("{} had no {units} in this time.", device.name)
    } else {
        format!("{taken} {units} of {} were taken in this time, and none was answered.", device.name)
    }
}

fn sentence(device: &DeviceActivity, side: Side, seconds: f64) -> Option<String> {
    if device.passed(side).units == 0 {
        return None;
    }
    let parts = parts(device, side, seconds);
    let whole = parts.iter().map(|part| part.us).sum();
    let bound = parts.iter().any(|part| part.at_most);
    let what = match side {
        Side::Disk => format!("A request of {}", device.name),
        Side::Sends => format!("A frame that {} sends", device.name),
        Side::Receives => format!("A frame for {}", device.name),
    };
    let whole = time(whole, bound);
    let text = match &parts[..] {
        [only] => format!("{what} takes {whole} on average {}.", only.what),
        _ => {
            let each = |part: &Part| format!("{} {}", time(part.us, part.at_most), part.what);
            let parts: Vec<_> = parts.iter().map(each).collect();
            format!("{what} takes {whole} on average: {}.", parts.join(", "))
        }
    };
    Some(text)
}

/// What a unit goes through, in this order.
fn parts(device: &DeviceActivity, side: Side, seconds: f64) -> Vec<Part> {
    let mean = |sum: &dyn Fn(&QueueActivity) -> f64| {
        let all: f64 = device.side(side).map(sum).sum();
        all * 1e6 / device.passed(side).units as f64
    };
    let waits = Part {
        us: mean(&|queue| queue.waited_s(seconds)),
        at_most: true,
        what: match limits::biting(device, seconds).iter().any(|(limit, _)| limit.side == side) {
            true => "in the ring, since a limit holds it back".into(),
            false => "until the core takes it".into(),
        },
    };
    let takes = Part {
        us: mean(&|queue| queue.took.sum_s()),
        at_most: false,
        what: match (side, &device.backing) {
            (Side::Disk, None) => "in the device (memory)".into(),
            (Side::Disk, Some(BackingActivity::Image(path))) => format!("in the device ({path})"),
            (Side::Disk, Some(BackingActivity::Remote(uri))) => {
                format!("in the device ({uri} and the network)")
            }
            (Side::Sends, _) => "to forward the batch that it is in".into(),
            (Side::Receives, _) => {
                "to copy the batch that it is in (how long it was in the switch is not known)".into()
            }
        },
    };
    let mut parts = match side {
        // The core takes frames from the switch whenever it looks.
        Side::Receives => vec![takes],
        Side::Disk | Side::Sends => vec![waits, takes],
    };
    // All units that an interrupt announces wait for it.
    let (interrupts, took_s) = device
        .side(side)
        .map(|queue| &queue.to_interrupt)
        .fold((0, 0.0), |sum, times| (sum.0 + times.count(), sum.1 + times.sum_s()));
    if interrupts as f64 >= SOME_INTERRUPTS * device.passed(side).units as f64 {
        let what = "until the interrupt is sent".into();
        parts.push(Part { us: took_s * 1e6 / interrupts as f64, at_most: false, what });
    }
    parts
}

/// A time with its unit, in three digits or so.
fn time(us: f64, at_most: bool) -> String {
    let bound = if at_most { "at most " } else { "" };
    match us {
        ..10.0 => format!("{bound}{us:.1} us"),
        ..10_000.0 => format!("{bound}{us:.0} us"),
        ..10_000_000.0 => format!("{bound}{:.0} ms", us / 1e3),
        _ => format!("{bound}{:.0} s", us / 1e6),
    }
}
