//! Lines over a number of guests, as SVG that needs nothing else to be looked at.

use std::fmt::Write;

/// One set of axes.
pub struct Panel {
    pub title: &'static str,
    /// Along its vertical axis.
    pub unit: &'static str,
    /// Name and points of each line, left to right.
    pub lines: Vec<(&'static str, Vec<(f64, f64)>)>,
}

const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 200.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 50.0;
const PITCH: f64 = WIDTH + LEFT + 30.0;
const COLOURS: [&str; 3] = ["#0b6e4f", "#c1440e", "#33539e"];

/// The panels side by side.
pub fn svg(panels: &[Panel]) -> String {
    let (width, height) = (PITCH * panels.len() as f64 + 20.0, TOP + HEIGHT + 80.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (index, panel) in panels.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate({},{TOP})\">", PITCH * index as f64 + LEFT);
        draw(&mut out, panel);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, panel: &Panel) {
    let points = || panel.lines.iter().flat_map(|(_, points)| points);
    let most = ceiling(points().map(|point| point.1).fold(0.0, f64::max));
    let last = points().map(|point| point.0).fold(1.0, f64::max);
    let x = |guests: f64| if last > 1.0 { (guests - 1.0) / (last - 1.0) * WIDTH } else { WIDTH / 2.0 };
    let y = |value: f64| HEIGHT - value / most * HEIGHT;
    let _ = writeln!(out, "<text x=\"0\" y=\"-28\" font-weight=\"bold\">{}</text>", panel.title);
    let _ = writeln!(out, "<text x=\"0\" y=\"-10\" fill=\"#555\">{}</text>", panel.unit);
    for step in 0..=4 {
        let value = most * f64::from(step) / 4.0;
        let at = y(value);
        let _ = writeln!(out, "<line x1=\"0\" x2=\"{WIDTH}\" y1=\"{at}\" y2=\"{at}\" stroke=\"#ddd\"/>");
        let _ =
            writeln!(out, "<text x=\"-8\" y=\"{}\" text-anchor=\"end\">{}</text>", at + 4.0, short(value));
    }
    for guests in 1..=last as u32 {
        let at = x(guests.into());
        let _ =
            writeln!(out, "<text x=\"{at}\" y=\"{}\" text-anchor=\"middle\">{guests}</text>", HEIGHT + 18.0);
    }
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">guests</text>",
        WIDTH / 2.0,
        HEIGHT + 36.0
    );
    for (index, (name, points)) in panel.lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let path: Vec<String> = points.iter().map(|(g, v)| format!("{:.1},{:.1}", x(*g), y(*v))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
        for (guests, value) in points {
            let _ = writeln!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                x(*guests),
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
