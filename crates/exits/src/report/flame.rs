//! A picture of where exits come from: reason at the top, below it the device and register, below that the guest's function. As wide
//! as there are exits.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::escape::Escaped;
use super::{Report, SiteRow, access, address};

const WIDTH: f64 = 1200.0;
const ROW: f64 = 22.0;
const TOP: f64 = 40.0;
/// Narrower boxes are not drawn.
const LEAST: f64 = 0.4;
const LEVELS: usize = 4;

#[derive(Default)]
struct Frame {
    count: u64,
    host_ns: u64,
    /// How many of them were timed.
    timed: u64,
    below: BTreeMap<String, Frame>,
}

impl Frame {
    fn add(&mut self, path: &[String], count: u64, host_ns: u64, each: Option<u64>) {
        self.count += count;
        if let Some(timed) = each.and_then(|each| host_ns.checked_div(each)) {
            self.host_ns = self.host_ns.saturating_add(host_ns);
            self.timed += timed;
        }
        if let [first, rest @ ..] = path {
            self.below.entry(first.clone()).or_default().add(rest, count, host_ns, each);
        }
    }

    /// All exits: of the sites that are listed, of those that are not, and those that were lost.
    fn of(report: &Report) -> Frame {
        let mut root = Frame::default();
        for site in &report.sites {
            root.add(&path(site), site.row.count, site.row.host_ns, site.row.ns_each);
        }
        for reason in &report.reasons {
            let (count, host_ns) =
                root.below.get(&reason.name).map_or((0, 0), |frame| (frame.count, frame.host_ns));
            let left = reason.count.saturating_sub(count);
            // Of those that are all listed a sample's rounding is left.
            if left > 0 && report.sites.len() >= super::SITES {
                let path = [reason.name.clone(), UNLISTED.to_owned()];
                root.add(&path, left, reason.host_ns.saturating_sub(host_ns), reason.ns_each);
            }
        }
        if report.lost > 0 {
            root.add(&[LOST.to_owned()], report.lost, 0, None);
        }
        root
    }
}

/// Sites beyond those that a report lists.
const UNLISTED: &str = "(sites too rare to be listed)";
/// Exits that were counted and not recorded.
const LOST: &str = "(lost)";

/// What a site is, from the general to the particular.
fn path(site: &SiteRow) -> [String; 3] {
    let about = match (&site.place, address(site.detail)) {
        (Some(place), _) => format!("{}: {}{}", place.device, place.register, access(site.detail)),
        (None, Some(address)) => format!("{address}{}", access(site.detail)),
        (None, None) => site.reason_name.clone(),
    };
    // Of one function, wherever in it; without one the name is the address.
    let function = site.function.as_ref().map_or(&site.row.name, |function| &function.name);
    [site.reason_name.clone(), about, function.clone()]
}

impl Report {
    /// The picture, as an SVG document that needs nothing else. Hovering shows the numbers.
    pub fn svg(&self) -> String {
        let root = Frame::of(self);
        let height = TOP + ROW * LEVELS as f64 + 10.0;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             font-family=\"system-ui, sans-serif\" font-size=\"12\" role=\"img\">\n\
             <title>Exits of {vm}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text x=\"8\" y=\"24\" font-size=\"15\" fill=\"#222\">Exits of {vm}: {exits} in {seconds:.1} s</text>\n",
            vm = Escaped(&self.vm),
            exits = self.exits,
            seconds = self.seconds,
        );
        let scale = if root.count == 0 { 0.0 } else { WIDTH / root.count as f64 };
        draw(&mut out, "all exits", &root, (0.0, 0), scale, root.count);
        out.push_str("</svg>\n");
        out
    }
}

fn draw(out: &mut String, name: &str, frame: &Frame, (x, level): (f64, usize), scale: f64, all: u64) {
    let width = frame.count as f64 * scale;
    if width < LEAST || level >= LEVELS {
        return;
    }
    let y = TOP + ROW * level as f64;
    let percent = frame.count as f64 * 100.0 / all.max(1) as f64;
    // What was not timed has no time, not none.
    let each = frame.host_ns.checked_div(frame.timed);
    let each = each.map_or(String::new(), |ns| format!(", {:.1} us of host time each", ns as f64 / 1e3));
    // Written out first, cut by width: about seven units a letter.
    let letters = ((width - 6.0) / 6.6).max(0.0) as usize;
    let label: String = if letters < 3 { String::new() } else { name.chars().take(letters).collect() };
    let _ = writeln!(
        out,
        "<g><title>{full}: {count} exits ({percent:.2} %){each}</title>\
         <rect x=\"{x:.2}\" y=\"{y}\" width=\"{w:.2}\" height=\"{h}\" rx=\"2\" fill=\"{colour}\"/>\
         <text x=\"{tx:.2}\" y=\"{ty}\" fill=\"#222\">{label}</text></g>",
        full = Escaped(name),
        count = frame.count,
        w = (width - 0.5).max(0.2),
        h = ROW - 2.0,
        colour = colour(name, level),
        tx = x + 4.0,
        ty = y + 14.5,
        label = Escaped(&label),
    );
    let mut below: Vec<_> = frame.below.iter().collect();
    below.sort_by(|a, b| b.1.count.cmp(&a.1.count).then_with(|| a.0.cmp(b.0)));
    let mut left = x;
    for (name, part) in below {
        draw(out, name, part, (left, level + 1), scale, all);
        left += part.count as f64 * scale;
    }
}

/// The same name has the same colour; each level its own hue.
fn colour(name: &str, level: usize) -> String {
    let hue = [210, 32, 160, 265][level % 4];
    let sum = name.bytes().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    format!("hsl({}, 55%, {}%)", hue + sum % 18, 74 + sum / 18 % 12)
}
