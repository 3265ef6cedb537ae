//! `moved_state`: the saved state of a function that was moved, which may say anything.
//!
//! Oracles: no panic; what is taken is within the limit and of this version; the answer is the same twice; and each refusal is one of a
//! state, with its name.

use arbitrary::{Result, Unstructured};
use ioplane_memory::GuestMap;
use ioplane_moving::vf82576::DIRECT;
use ioplane_moving::{DirectStateError, MOST, MovingError, VERSION, check};
use serde::Serialize;

use crate::Signature;

/// The encoding of `DirectStateV1`, to write what no device would.
#[derive(Serialize)]
struct State {
    model: String,
    registers: Vec<u32>,
    rings: Vec<(bool, u32, u32)>,
    counters: Vec<u32>,
    mailbox: ([u32; 16], u32, bool),
    kept: Kept,
}

/// The mailbox's messages: by kind, and by kind and key.
type Kept = (bool, [u32; 2], Vec<(u8, Vec<u32>)>, Vec<(u8, u32, Vec<u32>)>);

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

fn state(input: &mut Unstructured<'_>) -> Result<State> {
    let model = if input.ratio(15, 16)? { "vf82576".to_owned() } else { input.arbitrary()? };
    let mut registers = words(input, 34)?;
    // Bases and lengths of the first rings, so that some of them lie in memory.
    if input.ratio(3, 4)? {
        for (at, value) in [(9, 0x1000), (10, 0), (11, 256), (23, 0x2000), (24, 0), (25, 256)] {
            if let Some(register) = registers.get_mut(at) {
                *register = value;
            }
        }
    }
    let mut rings = Vec::new();
    for _ in 0..if input.ratio(7, 8)? { 4 } else { input.int_in_range(0..=6)? } {
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
        let len = [3, 3, 16, 2, 2, 1].get(usize::from(kind)).copied().unwrap_or(4);
        let mut said = words(input, len)?;
        if let Some(first) = said.first_mut().filter(|_| input.ratio(7, 8).unwrap_or(false)) {
            *first = u32::from(kind) + 1;
        }
        last.push((kind, said));
    }
    let mut each = Vec::new();
    for _ in 0..input.int_in_range(0..=2u8)? {
        each.push((
            input.int_in_range(2..=4u8)?,
            if input.ratio(3, 4)? { 1 << 16 } else { word(input)? },
            words(input, 5)?,
        ));
    }
    let address = [word(input)?, word(input)?];
    Ok(State {
        model,
        registers,
        rings,
        counters: words(input, 9)?,
        mailbox: (mailbox, [0, 4, 0x90, word(input)?][input.int_in_range(0..=3usize)?], input.arbitrary()?),
        kept: (input.ratio(7, 8)?, address, last, each),
    })
}

fn load(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let mut body = if input.ratio(7, 8)? {
        postcard::to_stdvec(&state(input)?).expect("it can be encoded")
    } else {
        input.arbitrary()?
    };
    if !body.is_empty() && input.ratio(1, 4)? {
        let at = input.choose_index(body.len())?;
        body[at] = input.arbitrary()?;
    }
    let mut bytes = ioplane_moving::seal(&body);
    if input.ratio(1, 8)? {
        let at = input.choose_index(bytes.len())?;
        bytes[at] ^= input.int_in_range(1..=255u8)?;
    }
    let map = GuestMap::anonymous(1 << 16).expect("memory");
    let answer = check(&DIRECT, &map, &bytes);
    assert_eq!(format!("{answer:?}"), format!("{:?}", check(&DIRECT, &map, &bytes)), "the same twice");
    let seen = match answer {
        Ok(()) => {
            assert!(bytes.len() <= MOST && bytes[4..6] == VERSION.to_le_bytes(), "{} bytes", bytes.len());
            "taken"
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
