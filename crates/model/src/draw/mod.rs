//! Models to look at: the same table as a diagram (SVG, DOT), as text, and as values for others to draw.
//!
//! ```text
//!   StateModel --chart()--> Chart --+--> svg()   docs/guide, `ioplane model show --svg`
//!                                   +--> dot()   for Graphviz
//!                                   +--> text()  `ioplane model show`
//!                                   '--> serde   `--json`
//! ```

mod dot;
mod svg;
mod text;

use serde::Serialize;

use crate::{ANY, Check, Hook, On, RESET, STAY, State, StateModel, Transition, Way, words};

pub use dot::dot;
pub use svg::svg;
pub use text::text;

/// A model in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Chart {
    /// [`StateModel::name`].
    pub name: &'static str,
    /// [`StateModel::title`].
    pub title: &'static str,
    /// Registers whose accesses are always hooked, with the way.
    pub hooked: Vec<(&'static str, &'static str)>,
    /// The regions, side by side.
    pub regions: Vec<Group>,
    /// What is written to bring a saved device back.
    pub restore: Vec<String>,
}

/// A region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Its name.
    pub name: &'static str,
    /// What leads out of any of its states.
    pub any: Vec<Row>,
    /// Its states; the first is where it begins.
    pub states: Vec<Node>,
}

/// A state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its name.
    pub name: &'static str,
    /// Whether the device may change hands here, as far as this region goes.
    pub reusable: bool,
    /// What the device does here.
    pub note: &'static str,
    /// What is hooked here, beyond what always is.
    pub hooked: Vec<String>,
    /// What leads out of it.
    pub rows: Vec<Row>,
}

/// An edge, or several that differ in the register only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The event.
    pub on: String,
    /// The condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub given: Option<String>,
    /// What is checked before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<String>,
    /// Where it leads.
    pub to: Target,
}

/// Where an edge leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// To this state.
    State(&'static str),
    /// It stays.
    Stays,
    /// The device resets: every region begins again.
    Resets,
    /// It is not allowed.
    Denied,
    /// The hardware does not hear of it.
    Ignored,
}

/// Puts a model into words.
pub fn chart(model: &StateModel) -> Chart {
    let mut hooked = Vec::new();
    for register in model.registers {
        match register.hook {
            Hook::ByState => {}
            Hook::Writes => hooked.push((register.name, "write")),
            Hook::Both => hooked.extend([(register.name, "read"), (register.name, "write")]),
        }
    }
    let group = |region: &crate::Region| Group {
        name: region.name,
        any: rows(model, region.transitions, ANY),
        states: region.states.iter().map(|state| node(model, region, state)).collect(),
    };
    Chart {
        name: model.name,
        title: model.title,
        hooked,
        regions: model.regions.iter().map(group).collect(),
        restore: model.restore.iter().map(words::restore).collect(),
    }
}

fn node(model: &StateModel, region: &crate::Region, state: &State) -> Node {
    let both = |register: &str| {
        [Way::Read, Way::Write]
            .iter()
            .all(|way| state.hooks.iter().any(|hook| hook.0 == register && hook.1 == *way))
    };
    let mut hooked: Vec<String> = Vec::new();
    for (register, way) in state.hooks {
        let words = match both(register) {
            true => format!("{register} (read, write)"),
            false => format!("{register} ({})", words::way(*way)),
        };
        if !hooked.contains(&words) {
            hooked.push(words);
        }
    }
    Node {
        name: state.name,
        reusable: state.reusable,
        note: state.note,
        hooked,
        rows: rows(model, region.transitions, state.name),
    }
}

/// The edges out of one state, those put together that only differ in the register that is written.
fn rows(model: &StateModel, transitions: &[Transition], from: &str) -> Vec<Row> {
    let mut rows: Vec<(Row, Vec<&'static str>)> = Vec::new();
    for edge in transitions.iter().filter(|edge| edge.from == from) {
        let written = match edge.on {
            On::Write { register, mask: 0, .. } => Some(register),
            _ => None,
        };
        let row = row(model, edge);
        let same = |own: &Row| own.given == row.given && own.checks == row.checks && own.to == row.to;
        match (written, rows.last_mut()) {
            (Some(register), Some((last, names))) if !names.is_empty() && same(last) => names.push(register),
            _ => rows.push((row, written.into_iter().collect())),
        }
    }
    let joined = |(mut row, names): (Row, Vec<&'static str>)| {
        if names.len() > 1 {
            row.on = format!("write {}", names.join(", "));
        }
        row
    };
    rows.into_iter().map(joined).collect()
}

fn row(model: &StateModel, edge: &Transition) -> Row {
    let refuses = edge.checks.iter().find(|check| check.refuses());
    let to = match (refuses, edge.to) {
        (Some(Check::Ignore(_)), _) => Target::Ignored,
        (Some(_), _) => Target::Denied,
        (None, STAY) => Target::Stays,
        (None, RESET) => Target::Resets,
        (None, name) if name == edge.from => Target::Stays,
        (None, name) => Target::State(name),
    };
    Row {
        on: words::event(model, &edge.on),
        given: edge.given.as_ref().map(|given| words::given(model, given)),
        checks: edge.checks.iter().map(words::check).collect(),
        to,
    }
}

/// Breaks a text into lines of up to `width` characters, at spaces.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
