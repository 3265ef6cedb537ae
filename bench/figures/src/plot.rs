//! Lines over a number of guests, or over time, as SVG that needs nothing else to be looked at.

use std::fmt::Write;

/// One set of axes.
pub struct Panel {
    pub title: &'static str,
    /// Along its vertical axis.
    pub unit: &'static str,
    /// Along its horizontal axis.
    pub across: &'static str,
    /// Where that begins, and how far its numbers are apart.
    pub from: f64,
    pub step: f64,
    /// Of the axes, in pixels.
    pub width: f64,
    /// Moments on the horizontal axis, and what they are called.
    pub marks: Vec<(f64, &'static str)>,
    /// Name and points of each line, left to right.
    pub lines: Vec<(&'static str, Vec<(f64, f64)>)>,
}

const HEIGHT: f64 = 200.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 50.0;
/// To the next panel.
const RIGHT: f64 = 30.0;
const COLOURS: [&str; 4] = ["#0b6e4f", "#c1440e", "#33539e", "#8a2f7b"];

/// The panels side by side.
pub fn svg(panels: &[Panel]) -> String {
    let pitch = |panel: &Panel| panel.width + LEFT + RIGHT;
    let (width, height) = (panels.iter().map(pitch).sum::<f64>() + 20.0, TOP + HEIGHT + 80.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut left = LEFT;
    for panel in panels {
        let _ = writeln!(out, "<g transform=\"translate({left},{TOP})\">");
        draw(&mut out, panel);
        out.push_str("</g>\n");
        left += pitch(panel);
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, panel: &Panel) {
    let points = || panel.lines.iter().flat_map(|(_, points)| points);
    let most = ceiling(points().map(|point| point.1).fold(0.0, f64::max));
    let (from, width) = (panel.from, panel.width);
    let last = points().map(|point| point.0).fold(from, f64::max);
    let x = |at: f64| if last > from { (at - from) / (last - from) * width } else { width / 2.0 };
    let y = |value: f64| HEIGHT - value / most * HEIGHT;
    let _ = writeln!(out, "<text x=\"0\" y=\"-28\" font-weight=\"bold\">{}</text>", panel.title);
    let _ = writeln!(out, "<text x=\"0\" y=\"-10\" fill=\"#555\">{}</text>", panel.unit);
    for step in 0..=4 {
        let value = most * f64::from(step) / 4.0;
        let at = y(value);
        let _ = writeln!(out, "<line x1=\"0\" x2=\"{width}\" y1=\"{at}\" y2=\"{at}\" stroke=\"#ddd\"/>");
        let _ =
            writeln!(out, "<text x=\"-8\" y=\"{}\" text-anchor=\"end\">{}</text>", at + 4.0, short(value));
    }
    let numbers = (0..).map(|number| from + f64::from(number) * panel.step);
    for number in numbers.take_while(|number| *number <= last) {
        let at = x(number);
        let _ =
            writeln!(out, "<text x=\"{at}\" y=\"{}\" text-anchor=\"middle\">{number}</text>", HEIGHT + 18.0);
    }
    for (moment, name) in &panel.marks {
        let at = x(*moment);
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"0\" y2=\"{HEIGHT}\" stroke=\"#888\" stroke-dasharray=\"4 3\"/>"
        );
        let _ = writeln!(
            out,
            "<text transform=\"translate({:.1},{}) rotate(-90)\" fill=\"#555\">{name}</text>",
            at + 12.0,
            HEIGHT - 6.0
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">{}</text>",
        width / 2.0,
        HEIGHT + 36.0,
        panel.across
    );
    for (index, (name, points)) in panel.lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let path: Vec<String> = points.iter().map(|(g, v)| format!("{:.1},{:.1}", x(*g), y(*v))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
        for (along, value) in points {
            let _ = writeln!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                x(*along),
                y(*value)
            );
        }
        let at = 110.0 * index as f64;
        let _ =
            writeln!(out, "<circle cx=\"{}\" cy=\"{}\" r=\"4\" fill=\"{colour}\"/>", at + 4.0, HEIGHT + 52.0);
        let _ = writeln!(out, "<text x=\"{}\" y=\"{}\">{name}</text>", at + 14.0, HEIGHT + 56.0);
    }
}

/// The next round number: 1, 2, 4 or 8 times a power of ten, so that quarters of it are short.
fn ceiling(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 4.0, 8.0, 10.0]
        .into_iter()
        .map(|step| step * power)
        .find(|round| *round >= value)
        .unwrap_or(value)
}

fn short(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v if v >= 1e4 => format!("{}k", v / 1e3),
        v => format!("{v}"),
    }
}
