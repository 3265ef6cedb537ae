//! The table is sound, and the guide shows it.

use ioplane_model::draw;
use ioplane_model::verify::verify_direct;
use ioplane_model::{
    Counter, DirectModel, FurtherAddresses, KeepRule, PageRule, Replay, Restore, StateModel,
};

use ioplane_moving::vf82576::{DIRECT, MODEL};
use ioplane_moving::{catalog, vf82599};

fn all(direct: &DirectModel) -> String {
    verify_direct(direct).iter().map(|finding| format!("{finding}\n")).collect()
}

#[track_caller]
fn says(finding: &str, parts: &[&str]) {
    for part in parts {
        assert!(finding.contains(part), "{finding:?} does not say {part:?}");
    }
}

#[test]
fn the_tables_are_sound() {
    for direct in catalog::movable() {
        assert_eq!(all(direct), "", "{}", direct.model.name);
    }
}

#[test]
fn each_card_is_found_by_its_identity() {
    let name = |device| catalog::find(0x8086, device, 1).map(|direct| direct.model.name);
    assert_eq!((name(0x10ca), name(0x10ed), name(0x1515)), (Some("vf82576"), Some("vf82599"), None));
}

fn with_model(change: impl FnOnce(&mut StateModel)) -> String {
    let mut model = MODEL.clone();
    change(&mut model);
    all(&DirectModel { model: Box::leak(Box::new(model)), ..DIRECT.clone() })
}

/// A bit of a set says whether a register is hooked, and a set has 128.
#[test]
fn only_the_first_registers_can_be_hooked() {
    let mut model = vf82599::MODEL.clone();
    let mut registers = model.registers.to_vec();
    registers.reverse();
    model.registers = registers.leak();
    let found = all(&DirectModel { model: Box::leak(Box::new(model)), ..vf82599::DIRECT.clone() });
    says(&found, &["VFCTRL is hooked and none of the first 128"]);
    let many = with_model(|model| model.registers = model.registers.repeat(6).leak());
    says(&many, &["registers", "have 1 to 250"]);
}

#[test]
fn what_the_guest_maps_is_not_to_be_seen() {
    let pages = DirectModel { pages: &[PageRule::Mapped; 4], ..DIRECT.clone() };
    says(
        &all(&pages),
        &[
            "VFGPRC lies on a page that the guest maps",
            "V2PMAILBOX is hooked on a page that the guest maps",
            "writes of RDT0 are never seen",
        ],
    );
    says(&all(&DirectModel { pages: &DIRECT.pages[..3], ..DIRECT.clone() }), &["3 rules for 4 pages"]);
}

#[test]
fn heads_tails_and_enable_bits_are_left_to_the_rings() {
    let found = with_model(|model| {
        let more = [Restore::Saved("RDT0", !0), Restore::Saved("TXDCTL0", !0)];
        model.restore = [model.restore, &more].concat().leak();
        model.halt = &[];
    });
    says(
        &found,
        &[
            "RDT0 is written back while the ring is off",
            "ring transmit 0: it is switched on while registers",
            "nothing switches it off: RXDCTL1",
        ],
    );
}

#[test]
fn the_order_of_bringing_it_back_is_checked() {
    let order = |from: usize, to: usize| {
        let mut steps = DIRECT.replay.to_vec();
        let step = steps.remove(from);
        steps.insert(to, step);
        all(&DirectModel { replay: steps.leak(), ..DIRECT.clone() })
    };
    let counters = DIRECT.replay.iter().position(|step| *step == Replay::Counters).expect("listed");
    says(&order(counters, 0), &["dummies of ring receive 0 would be counted as frames"]);
    says(
        &order(counters, DIRECT.replay.len() - 1),
        &["frames of ring receive 0 would be counted as dummies"],
    );
    says(&order(0, counters), &["receive 1 waits for frames to an address that is not yet its own"]);
    says(&order(1, counters), &["transmit 0 is switched on before it has a base"]);
    says(&all(&DirectModel { replay: &DIRECT.replay[1..], ..DIRECT.clone() }), &["Messages is done 0 times"]);
    let late = [DIRECT.replay, &[Replay::Off]].concat().leak();
    says(
        &all(&DirectModel { replay: late, ..DIRECT.clone() }),
        &["switched off after registers are written"],
    );
    let mut rings = DIRECT.rings.to_vec();
    rings[0].in_hand = 0;
    says(&all(&DirectModel { rings: rings.leak(), ..DIRECT.clone() }), &["has 0 descriptors in hand"]);
}

#[test]
fn a_message_of_no_kind_and_a_counter_that_is_none_are_found() {
    let mut direct = DIRECT.clone();
    let mut messages = direct.mailbox.messages.to_vec();
    messages[3].words = 1;
    messages[5].kind = messages[4].kind;
    direct.counters = const {
        &[
            Counter::word("STATUS"),
            Counter::word("CTRL"),
            Counter::word("RQDPC0"),
            Counter::wide("VFGPRC", "VFGORC", 6),
        ]
    };
    direct.mailbox.refused = 0x8000_0000;
    let further = FurtherAddresses { clear: 3 << 16, add: 1 << 16, most: 2 };
    messages[1].keep = KeepRule::Address { word: 1, further: Some(further) };
    messages[2].keep = KeepRule::List { number: 0xff, most: 2 };
    direct.mailbox.messages = messages[1..].to_vec().leak();
    says(
        &all(&direct),
        &[
            "0 messages begin anew",
            "SET_VLAN has words",
            "SET_PROMISC is of the kind of another",
            "CTRL is not 32 bits that only the hardware writes",
            "RQDPC0 lies on a page",
            "VFGORC has no low bits",
            "further addresses of SET_MAC_ADDR cannot be told from its own",
            "an answer that refuses looks like another",
            "the number of SET_MULTICAST is not beside its kind",
        ],
    );
}

#[test]
fn the_guide_shows_what_runs() {
    for direct in catalog::movable() {
        let name = direct.model.name;
        let path = format!("{}/../../docs/guide/model-{name}.svg", env!("CARGO_MANIFEST_DIR"));
        let guide = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(
            guide == draw::svg(direct.model),
            "{path} is not what the table says: run `cargo run -p ioplane-moving --example draw_movable -- docs/guide`, look at it, and \
             commit it"
        );
    }
}
