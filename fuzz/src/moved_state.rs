//! `moved_state`: the saved state of a function that was moved, or what its guest has said and goes ahead of it, which may say anything.
//!
//! Oracles: no panic; what is taken is within the limit and of this version; the answer is the same twice; and each refusal is one of a
//! state, with its name.

use arbitrary::{Result, Unstructured};
use ioplane_memory::GuestMap;
use ioplane_model::DirectModel;
use ioplane_moving::{
    DirectStateError, MOST, MovingError, VERSION, check, check_said, seal, seal_said, vf82576, vf82599,
};
use serde::Serialize;

use crate::Signature;

/// The encoding of `DirectStateV2`, to write what no device would.
#[derive(Serialize)]
struct State {
    model: String,
    registers: Vec<u32>,
    rings: Vec<(bool, u32, u32)>,
    counters: Vec<u64>,
    half: Option<(u8, u32)>,
    mailbox: ([u32; 16], u32, bool),
    kept: Kept,
}

/// The mailbox's messages: by kind, by kind and key, and lists.
type Kept = (bool, [u32; 2], Vec<(u8, Vec<u32>)>, Vec<(u8, u32, Vec<u32>)>, Vec<(u8, Vec<Vec<u32>>)>);

/// A table, and what states of it look like.
struct Shape {
    table: &'static DirectModel,
    registers: usize,
    /// Places of base and length of a receive and a transmit ring.
    bases: [usize; 2],
    rings: usize,
    counters: usize,
    /// Kinds of messages that are kept by value, and as a list.
    each: u8,
    list: u8,
}

static SHAPES: [Shape; 2] = [
    Shape { table: &vf82576::DIRECT, registers: 34, bases: [9, 23], rings: 4, counters: 9, each: 3, list: 1 },
    Shape {
        table: &vf82599::DIRECT,
        registers: 116,
        bases: [11, 18],
        rings: 16,
        counters: 5,
        each: 4,
        list: 6,
    },
];

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = load(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

/// Mostly small.
fn word(input: &mut Unstructured<'_>) -> Result<u32> {
    Ok(if input.ratio(3, 4)? { input.int_in_range(0..=300)? } else { input.arbitrary()? })
}

fn words(input: &mut Unstructured<'_>, usual: usize) -> Result<Vec<u32>> {
    let len = if input.ratio(7, 8)? { usual } else { input.int_in_range(0..=40)? };
    (0..len).map(|_| word(input)).collect()
}

fn state(input: &mut Unstructured<'_>, shape: &Shape) -> Result<State> {
    let model = if input.ratio(15, 16)? { shape.table.model.name.to_owned() } else { input.arbitrary()? };
    let mut registers = words(input, shape.registers)?;
    // Bases and lengths of the first rings, so that some of them lie in memory.
    if input.ratio(3, 4)? {
        for (base, at) in shape.bases.into_iter().zip([0x1000, 0x2000]) {
            for (register, value) in registers.iter_mut().skip(base).zip([at, 0, 256]) {
                *register = value;
            }
        }
    }
    let mut rings = Vec::new();
    for _ in 0..if input.ratio(7, 8)? { shape.rings } else { input.int_in_range(0..=20)? } {
        let on = input.arbitrary()?;
        let index = |input: &mut Unstructured<'_>| if on { input.int_in_range(0..=20) } else { Ok(0) };
        rings.push((on, index(input)?, index(input)?));
    }
    let mut mailbox = [0; 16];
    for place in &mut mailbox {
        *place = word(input)?;
    }
    let mut last = Vec::new();
    for _ in 0..input.int_in_range(0..=3u8)? {
        let kind = input.int_in_range(0..=7u8)?;
        let message = shape.table.mailbox.messages.get(usize::from(kind));
        let len = message.map_or(4, |message| usize::from(message.words));
        let mut said = words(input, len)?;
        if let Some(first) = said.first_mut().filter(|_| input.ratio(7, 8).unwrap_or(false)) {
            *first = message.map_or(9, |message| message.kind);
        }
        last.push((kind, said));
    }
    let mut each = Vec::new();
    for _ in 0..input.int_in_range(0..=2u8)? {
        each.push((
            input.int_in_range(shape.each - 1..=shape.each + 1)?,
            if input.ratio(3, 4)? { 1 << 16 } else { word(input)? },
            words(input, 5)?,
        ));
    }
    let mut lists = Vec::new();
    if input.ratio(1, 4)? {
        let kind = input.int_in_range(shape.list - 1..=shape.list + 1)?;
        let len = input.int_in_range(0..=12usize)?;
        lists.push((kind, (0..len).map(|_| words(input, 2)).collect::<Result<_>>()?));
    }
    let half = if input.ratio(1, 4)? { Some((input.int_in_range(0..=9)?, word(input)?)) } else { None };
    let address = [word(input)?, word(input)?];
    Ok(State {
        model,
        registers,
        rings,
        counters: words(input, shape.counters)?.into_iter().map(u64::from).collect(),
        half,
        mailbox: (mailbox, [0, 4, 0x90, word(input)?][input.int_in_range(0..=3usize)?], input.arbitrary()?),
        kept: (input.ratio(7, 8)?, address, last, each, lists),
    })
}

fn load(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let shape = &SHAPES[input.choose_index(SHAPES.len())?];
    let ahead = input.ratio(1, 4)?;
    let mut body = if input.ratio(7, 8)? {
        let state = state(input, shape)?;
        if ahead { postcard::to_stdvec(&(state.model, state.kept)) } else { postcard::to_stdvec(&state) }
            .expect("it can be encoded")
    } else {
        input.arbitrary()?
    };
    if !body.is_empty() && input.ratio(1, 4)? {
        let at = input.choose_index(body.len())?;
        body[at] = input.arbitrary()?;
    }
    let mut bytes = if ahead { seal_said(&body) } else { seal(&body) };
    if input.ratio(1, 8)? {
        let at = input.choose_index(bytes.len())?;
        bytes[at] ^= input.int_in_range(1..=255u8)?;
    }
    let map = GuestMap::anonymous(1 << 16).expect("memory");
    let check = || if ahead { check_said(shape.table, &bytes) } else { check(shape.table, &map, &bytes) };
    let answer = check();
    assert_eq!(format!("{answer:?}"), format!("{:?}", check()), "the same twice");
    let seen = match answer {
        Ok(()) => {
            assert!(bytes.len() <= MOST && bytes[4..6] == VERSION.to_le_bytes(), "{} bytes", bytes.len());
            if ahead { "said" } else { "taken" }
        }
        Err(MovingError::State(error)) => match error {
            DirectStateError::NotAState => "no state",
            DirectStateError::Version(_) => "version",
            DirectStateError::Length { .. } => "length",
            DirectStateError::TooLarge(len) => {
                assert_eq!((len, len > MOST), (bytes.len(), true));
                "too large"
            }
            DirectStateError::Checksum => "checksum",
            DirectStateError::Damaged(_) => "damaged",
            DirectStateError::OtherModel(_) => "model",
            DirectStateError::Impossible(_) => "impossible",
        },
        Err(other) => panic!("{other}: not what a state can do"),
    };
    signature.saw(seen);
    Ok(())
}
