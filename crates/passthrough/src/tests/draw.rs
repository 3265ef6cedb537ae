//! Pictures of the tables.

use std::path::Path;

use ioplane_model::draw;

use crate::catalog;

fn guide(name: &str) -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide").join(format!("model-{name}.svg"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn the_guide_shows_what_runs() {
    for model in catalog::models() {
        assert!(
            guide(model.name) == draw::svg(model),
            "docs/guide/model-{}.svg is not what the table says: run `cargo run -p ioplane-passthrough --example draw -- docs/guide`, \
             look at it, and commit it",
            model.name
        );
    }
}

/// The number after `name="`.
fn number(line: &str, name: &str) -> Option<i32> {
    let from = line.find(&format!(" {name}=\""))? + name.len() + 3;
    line[from..].split('"').next()?.parse().ok()
}

#[test]
fn every_state_is_drawn_and_no_line_of_text_lies_on_another() {
    for model in catalog::models() {
        let svg = draw::svg(model);
        let mut regions = 0;
        let mut last = 0;
        for line in svg.lines() {
            if line.starts_with("<g ") {
                (regions, last) = (regions + 1, 0);
            }
            if line.starts_with("<text") && regions > 0 {
                let y = number(line, "y").unwrap();
                assert!(y >= last + 13, "{line}");
                last = y;
                // What fits into a box of 360 pixels, at up to 6.9 pixels a character of this font.
                let text =
                    line.split(['>', '<']).nth(2).unwrap().replace("&quot;", "\"").replace("&amp;", "&");
                let left = number(line, "x").unwrap() - 24;
                assert!(text.chars().count() as f64 * 6.4 + f64::from(left) < 360.0, "{text:?} is too long");
            }
        }
        assert_eq!(regions, model.regions.len());
        let dot = draw::dot(model);
        let text = draw::text(model);
        assert_eq!(dot.matches('{').count(), dot.matches('}').count());
        for region in model.regions {
            for state in region.states {
                assert!(
                    svg.contains(&format!("font-weight=\"bold\">{}</text>", state.name)),
                    "{}",
                    state.name
                );
                assert!(dot.contains(&format!("\"{}.{}\" [label=", region.name, state.name)));
                assert!(text.contains(&format!("  {} [", state.name)));
            }
        }
    }
}

#[test]
fn the_text_says_what_leads_where_and_what_is_checked() {
    let text = draw::text(&crate::ne2000::MODEL);
    for line in [
        "region dma",
        "  Quiet [reusable, begins here]",
        "    hooked here: DATA (read, write)",
        "    write CR, RD=1 -> DmaRd",
        "        if RSAR1:RSAR0 + RBCR1:RBCR0 may be read on the card",
        "        ignored: no transfer was begun: the data port has nothing to move",
        "    write TPSR, if CR has STP=1 -> Idle",
        "    read RESET -> all begin again",
        "PSTART        01h     1    0  -          plain      writes",
    ] {
        assert!(text.lines().any(|own| own == line), "{line:?} is not in\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 100));
}

#[test]
fn others_can_draw_it_from_json() {
    let json = serde_json::to_value(draw::chart(&crate::rtl8139::MODEL)).unwrap();
    assert_eq!(json["name"], "rtl8139");
    assert_eq!(json["regions"][1]["name"], "transmit");
    assert_eq!(json["regions"][1]["any"][0]["to"]["state"], "TxRun");
    assert_eq!(json["regions"][0]["any"][0]["to"], "resets");
    assert_eq!(json["regions"][0]["states"][1]["reusable"], true);
}
