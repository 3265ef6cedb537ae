//! The diagram as SVG. Every event has a line of its own in the box of the state that it leads out of; from there a wire runs in a lane
//! beside the boxes to the state that it leads to. So labels never overlap, and nothing is left to a layout program.

use std::fmt::Write;

use super::{Chart, Group, Node, Row, Target, chart, wrapped};
use crate::StateModel;

/// Pixels: a box, the space between lanes, between boxes, around everything.
const BOX: i32 = 360;
const LANE: i32 = 11;
const GAP: i32 = 16;
const MARGIN: i32 = 18;
/// Height of a line, and of a small one; the space at the left in a box.
const LINE: i32 = 17;
const SMALL: i32 = 15;
const PAD: i32 = 12;
/// Characters that fit into a box: of an event, of a note or a check.
const EVENT: usize = 46;
const REMARK: usize = 53;
/// Space between wires that arrive at one box.
const ARRIVAL: i32 = 9;
/// Columns of regions.
const COLUMNS: usize = 3;

const GREEN: &str = "#2e7d32";
const RED: &str = "#b71c1c";
const GREY: &str = "#616161";
/// Wires, by the state that they lead to.
const WIRES: [&str; 7] = ["#1565c0", "#6a1b9a", "#00838f", "#ad1457", "#4e342e", "#283593", "#827717"];

/// A picture of a model: every region a column of boxes; where the device may change hands they are green with a doubled border.
pub fn svg(model: &StateModel) -> String {
    let chart = chart(model);
    let regions: Vec<Placed<'_>> = chart.regions.iter().map(Placed::new).collect();
    // Each region goes under the shortest column so far, the tallest first; then columns are as wide as their widest.
    let mut columns: Vec<Vec<usize>> = vec![Vec::new(); COLUMNS.min(regions.len()).max(1)];
    let height = |column: &Vec<usize>| column.iter().map(|at| regions[*at].height + GAP).sum::<i32>();
    let mut order: Vec<usize> = (0..regions.len()).collect();
    order.sort_by_key(|at| (-regions[*at].height, *at));
    for at in order {
        let shortest =
            (0..columns.len()).min_by_key(|column| (height(&columns[*column]), *column)).unwrap_or(0);
        columns[shortest].push(at);
    }
    for column in &mut columns {
        column.sort_unstable();
    }
    columns.sort();
    let top = MARGIN + 58;
    let widths: Vec<i32> =
        columns.iter().map(|column| column.iter().map(|at| regions[*at].width).max().unwrap_or(0)).collect();
    let wide = MARGIN * 2 + widths.iter().sum::<i32>() + GAP * (widths.len() as i32 - 1);
    let high = top + columns.iter().map(height).max().unwrap_or(0) + MARGIN - GAP;
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = frame(&mut out, &chart, wide, high);
    let mut left = MARGIN;
    for (column, width) in columns.iter().zip(&widths) {
        let mut at = top;
        for region in column {
            let region = &regions[*region];
            let _ = region.draw(&mut out, left, at, *width);
            at += region.height + GAP;
        }
        left += width + GAP;
    }
    out.push_str("</svg>\n");
    out
}

fn frame(out: &mut String, chart: &Chart, wide: i32, high: i32) -> std::fmt::Result {
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{wide}\" height=\"{high}\" viewBox=\"0 0 {wide} {high}\" \
         font-family=\"DejaVu Sans, Verdana, sans-serif\" font-size=\"12\">"
    )?;
    writeln!(out, "<title>State model {}</title>", escaped(chart.name))?;
    writeln!(out, "<rect width=\"{wide}\" height=\"{high}\" fill=\"white\"/>")?;
    let title = format!("{}: {}", chart.name, chart.title);
    writeln!(
        out,
        "<text x=\"{MARGIN}\" y=\"{}\" font-size=\"18\" font-weight=\"bold\">{}</text>",
        MARGIN + 14,
        escaped(&title)
    )?;
    let legend = "It may change hands when every region is in a green state. A region begins in its first state. What leads out of a \
         state is listed in it, with its condition (if) and what is checked before the hardware hears of it (\u{2713}).";
    for (at, line) in wrapped(legend, wide as usize / 7).iter().enumerate() {
        let y = MARGIN + 32 + at as i32 * SMALL;
        writeln!(
            out,
            "<text x=\"{MARGIN}\" y=\"{y}\" fill=\"{GREY}\" font-size=\"11\">{}</text>",
            escaped(line)
        )?;
    }
    Ok(())
}

/// A region with its boxes one below another.
struct Placed<'a> {
    group: &'a Group,
    boxes: Vec<Shape<'a>>,
    wires: Vec<Wire>,
    width: i32,
    height: i32,
}

/// The box of a state, or of what leads out of any.
struct Shape<'a> {
    node: Option<&'a Node>,
    lines: Vec<Text>,
    /// Where it begins, counted in the region; its height.
    top: i32,
    height: i32,
}

/// A line of text in a box.
struct Text {
    text: String,
    /// Baseline, counted in the box.
    y: i32,
    small: bool,
    colour: &'static str,
    bold: bool,
    indent: i32,
}

/// From a line to a box.
struct Wire {
    from: i32,
    to: i32,
    lane: i32,
    colour: &'static str,
    dashed: bool,
}

impl<'a> Placed<'a> {
    fn new(group: &'a Group) -> Self {
        let names: Vec<&str> = group.states.iter().map(|state| state.name).collect();
        let number = |target: Target| match target {
            Target::State(name) => names.iter().position(|own| *own == name),
            Target::Resets => Some(0),
            Target::Stays | Target::Denied | Target::Ignored => None,
        };
        let all = group.any.iter().chain(group.states.iter().flat_map(|state| &state.rows));
        let mut arrivals = vec![0; names.len()];
        for state in all.filter_map(|row| number(row.to)) {
            arrivals[state] += 1;
        }
        let mut boxes = Vec::new();
        let mut starts = Vec::new();
        let mut top = 34;
        if !group.any.is_empty() {
            let (shape, from) = Shape::new(None, &group.any, 0, top);
            top += shape.height + GAP;
            starts.extend(from);
            boxes.push(shape);
        }
        for (state, arrive) in group.states.iter().zip(&arrivals) {
            let (shape, from) = Shape::new(Some(state), &state.rows, *arrive, top);
            top += shape.height + GAP;
            starts.extend(from);
            boxes.push(shape);
        }
        let first = boxes.len() - group.states.len();
        let mut wires: Vec<Wire> = Vec::new();
        let mut arrived = vec![0; names.len()];
        for (from, target) in starts {
            let Some(state) = number(target) else { continue };
            let to = boxes[first + state].top + 12 + arrived[state] * ARRIVAL;
            arrived[state] += 1;
            let colour = if group.states[state].reusable { GREEN } else { WIRES[state % WIRES.len()] };
            wires.push(Wire { from, to, lane: 0, colour, dashed: target == Target::Resets });
        }
        let lanes = lanes(&mut wires);
        Self { group, boxes, wires, width: PAD * 2 + BOX + (lanes + 1) * LANE, height: top - GAP + PAD }
    }

    fn draw(&self, out: &mut String, x: i32, y: i32, width: i32) -> std::fmt::Result {
        writeln!(out, "<g transform=\"translate({x} {y})\">")?;
        let height = self.height;
        writeln!(
            out,
            "<rect width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"#fafafa\" stroke=\"#bdbdbd\"/>"
        )?;
        let name = escaped(self.group.name);
        writeln!(out, "<text x=\"{PAD}\" y=\"22\" font-size=\"14\" font-weight=\"bold\">{name}</text>")?;
        for wire in &self.wires {
            wire.draw(out)?;
        }
        for shape in &self.boxes {
            shape.draw(out)?;
        }
        writeln!(out, "</g>")
    }
}

impl<'a> Shape<'a> {
    /// The box, and from where in the region each row's wire begins.
    fn new(node: Option<&'a Node>, rows: &[Row], arrivals: i32, top: i32) -> (Self, Vec<(i32, Target)>) {
        let mut shape = Self { node, lines: Vec::new(), top, height: 6 };
        let mut starts = Vec::new();
        match node {
            Some(node) => {
                shape.line(node.name, false, "black", true, 0);
                for line in wrapped(node.note, REMARK) {
                    shape.line(&line, true, GREY, false, 0);
                }
                if !node.hooked.is_empty() {
                    for line in wrapped(&format!("hooked here: {}", node.hooked.join(", ")), REMARK) {
                        shape.line(&line, true, GREY, false, 0);
                    }
                }
            }
            None => shape.line("in any state", true, GREY, true, 0),
        }
        shape.height = shape.height.max(8 + arrivals * ARRIVAL + 6);
        for row in rows {
            let colour = match row.to {
                Target::Denied => RED,
                Target::Ignored => GREY,
                _ => "black",
            };
            let suffix = match row.to {
                Target::Stays => " \u{21bb}",
                Target::Denied => " \u{2717}",
                Target::Resets => "  (all regions begin again)",
                Target::State(_) | Target::Ignored => "",
            };
            shape.height += 3;
            starts.push((top + shape.height + LINE / 2 + 1, row.to));
            for (at, line) in wrapped(&format!("{}{suffix}", row.on), EVENT).iter().enumerate() {
                shape.line(line, false, colour, false, if at == 0 { 8 } else { 20 });
            }
            for line in row.given.iter().flat_map(|given| wrapped(&format!("if {given}"), REMARK - 6)) {
                shape.line(&line, true, GREY, false, 20);
            }
            let refused = [Target::Denied, Target::Ignored].contains(&row.to);
            for check in &row.checks {
                let check = if refused { check.clone() } else { format!("\u{2713} {check}") };
                for line in wrapped(&check, REMARK - 6) {
                    shape.line(&line, true, if refused { colour } else { GREY }, false, 20);
                }
            }
        }
        shape.height += 7;
        (shape, starts)
    }

    fn line(&mut self, text: &str, small: bool, colour: &'static str, bold: bool, indent: i32) {
        let step = if small { SMALL } else { LINE };
        self.lines.push(Text {
            text: text.to_owned(),
            y: self.height + step - 4,
            small,
            colour,
            bold,
            indent,
        });
        self.height += step;
    }

    fn draw(&self, out: &mut String) -> std::fmt::Result {
        let Self { top, height, .. } = *self;
        let (stroke, fill, dash) = match self.node {
            None => ("#9e9e9e", "white", " stroke-dasharray=\"5 4\""),
            Some(node) if node.reusable => (GREEN, "#f1f8e9", ""),
            Some(_) => ("#424242", "white", ""),
        };
        writeln!(
            out,
            "<rect x=\"{PAD}\" y=\"{top}\" width=\"{BOX}\" height=\"{height}\" rx=\"9\" fill=\"{fill}\" stroke=\"{stroke}\" \
             stroke-width=\"1.4\"{dash}/>"
        )?;
        if self.node.is_some_and(|node| node.reusable) {
            writeln!(
                out,
                "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"7\" fill=\"none\" stroke=\"{GREEN}\"/>",
                PAD + 3,
                top + 3,
                BOX - 6,
                height - 6
            )?;
        }
        for line in &self.lines {
            let (x, y) = (PAD * 2 + line.indent, top + line.y);
            let size = if line.small { " font-size=\"11\"" } else { "" };
            let bold = if line.bold { " font-weight=\"bold\"" } else { "" };
            writeln!(
                out,
                "<text x=\"{x}\" y=\"{y}\" fill=\"{}\"{size}{bold}>{}</text>",
                line.colour,
                escaped(&line.text)
            )?;
        }
        Ok(())
    }
}

impl Wire {
    fn draw(&self, out: &mut String) -> std::fmt::Result {
        let right = PAD + BOX;
        let lane = right + (self.lane + 1) * LANE;
        let Self { from, to, colour, .. } = *self;
        let dash = if self.dashed { " stroke-dasharray=\"4 3\"" } else { "" };
        writeln!(
            out,
            "<path d=\"M{right} {from}H{lane}V{to}H{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.3\"{dash}/>",
            right + 6
        )?;
        writeln!(
            out,
            "<path d=\"M{} {to}l7 -3.5v7z\" fill=\"{colour}\"/><circle cx=\"{right}\" cy=\"{from}\" r=\"2.2\" fill=\"{colour}\"/>",
            right + 1
        )
    }
}

/// Gives each wire a lane that no other uses at that height, short ones inside; how many there are.
fn lanes(wires: &mut [Wire]) -> i32 {
    let mut order: Vec<usize> = (0..wires.len()).collect();
    order.sort_by_key(|at| ((wires[*at].from - wires[*at].to).abs(), *at));
    let mut taken: Vec<Vec<(i32, i32)>> = Vec::new();
    for at in order {
        let span = (wires[at].from.min(wires[at].to) - 3, wires[at].from.max(wires[at].to) + 3);
        let free = |lane: &Vec<(i32, i32)>| lane.iter().all(|(low, high)| span.1 < *low || *high < span.0);
        let lane = taken.iter().position(free).unwrap_or(taken.len());
        if lane == taken.len() {
            taken.push(Vec::new());
        }
        taken[lane].push(span);
        wires[at].lane = lane as i32;
    }
    taken.len() as i32
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
