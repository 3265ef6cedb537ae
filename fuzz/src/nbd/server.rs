//! `nbd_server`: a client that says anything before the transmission phase.
//!
//! Oracles: no panic; the same in any pieces; where TLS is required nothing but errors is said, and no transmission phase begins, before it
//! has started; what is said in one step is bounded; a claim moves the generation by one at most, and belongs to whoever asked.

use arbitrary::{Result, Unstructured};
use ioplane_nbd::claim::{CLAIM, ClaimBook, ClaimQuery, ClaimRecord, ClaimReply, ClaimStore};
use ioplane_nbd::handshake::server::{ExportRefusal, NAMESPACE, ServerHandshake, ServerStep, TlsPolicy};
use ioplane_nbd::handshake::{BlockSizes, ExportInfo};
use ioplane_nbd::import::EPOCH;
use ioplane_nbd::reserve::{RESERVE, ReserveQuery, ReserveReply};
use ioplane_nbd::spec::*;

use super::{damage, name, pieces};
use crate::Signature;

/// Most that one step says: what is sent before more is made, and the longest answer to one option.
const LONGEST: usize = 128 << 10;

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = talk(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

fn talk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let policy = *input.choose(&[TlsPolicy::Unsupported, TlsPolicy::Offered, TlsPolicy::Required])?;
    let said = options(input)?;
    let (output, end) = serve(policy, std::iter::once(&said[..]));
    let cut = pieces(input, &said)?;
    let again = serve(policy, cut.into_iter());
    // What comes in one piece behind STARTTLS was sent too early; in pieces it looks like what came over TLS.
    if !end.contains("PlainTextBeforeTls") {
        assert_eq!(again, (output.clone(), end.clone()), "other pieces, other answers");
    }
    for (output, end) in [(output, end), again] {
        kinds(&output, signature);
        signature.saw(&end);
    }
    Ok(())
}

/// What a server answered, option by option.
fn kinds(output: &[u8], signature: &mut Signature) {
    let mut left = output.get(18..).unwrap_or_default();
    while let Some((header, rest)) = left.split_first_chunk::<20>() {
        let word =
            |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        signature.saw(&format!("{} {:x}", word(8), word(12)));
        left = rest.get(word(16) as usize..).unwrap_or_default();
    }
}

fn options(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let flags = if input.ratio(15, 16)? { 3 } else { u32::from(input.int_in_range(0..=7u8)?) };
    let mut said = flags.to_be_bytes().to_vec();
    for _ in 0..input.int_in_range(0..=12u8)? {
        let option = *input.choose(&[8, 8, 10, 10, 9, 9, 6, 6, 3, 3, 7, 5, 11, 0, 1, 2])?;
        let mut data = Vec::new();
        match option {
            NBD_OPT_EXPORT_NAME => data = name(input)?,
            NBD_OPT_INFO | NBD_OPT_GO => {
                let name = name(input)?;
                data.extend((name.len() as u32).to_be_bytes());
                data.extend(name);
                let items = input.int_in_range(0..=4u16)?;
                data.extend(items.to_be_bytes());
                (0..items).for_each(|item| data.extend(item.to_be_bytes()));
            }
            NBD_OPT_LIST_META_CONTEXT | NBD_OPT_SET_META_CONTEXT => {
                let name = name(input)?;
                data.extend((name.len() as u32).to_be_bytes());
                data.extend(name);
                let queries = input.int_in_range(0..=3u32)?;
                data.extend(queries.to_be_bytes());
                for _ in 0..queries {
                    let query =
                        input.choose(&["base:", BASE_ALLOCATION, "ioplane:x", "ioplane:", "q", ""])?;
                    let query = if input.ratio(1, 2)? { ours(input)? } else { (*query).to_owned() };
                    data.extend((query.len() as u32).to_be_bytes());
                    data.extend(query.as_bytes());
                }
            }
            _ if !input.ratio(3, 4)? => data = input.arbitrary()?,
            _ => {}
        }
        damage(input, &mut data)?;
        let mut length = data.len() as u32;
        if !input.ratio(31, 32)? {
            length = input.arbitrary()?;
        }
        let mut header = [&IHAVEOPT.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes()].concat();
        if !input.ratio(31, 32)? {
            damage(input, &mut header)?;
        }
        said.extend(header);
        said.extend(data);
    }
    Ok(said)
}

/// A query of ours, or nearly one.
fn ours(input: &mut Unstructured<'_>) -> Result<String> {
    let context = *input.choose(&[CLAIM, CLAIM, CLAIM, EPOCH, RESERVE])?;
    let mut query = format!("{context}=");
    let holders = ["holder-a", "holder-b", "a b", ""];
    let verbs = ["ask", "own", "takeover", "release", "take", "6000"];
    let numbers = ["0", "1", "2", "3", "18446744073709551615", "18446744073709551616", "-1"];
    for part in [&holders[..], &verbs, &numbers, &["a name", "a/b", ""]] {
        query.push_str(if input.ratio(31, 32)? { input.choose(part)? } else { input.arbitrary()? });
        query.push_str(if input.ratio(31, 32)? { "/" } else { "" });
    }
    Ok(query)
}

struct Nowhere;

impl ClaimStore for Nowhere {
    fn save(&mut self, record: &ClaimRecord) -> std::result::Result<(), String> {
        let read = ClaimRecord::decode(record.encode().as_bytes());
        assert_eq!(read.as_ref(), Ok(record), "a record that is not read as it was written");
        Ok(())
    }
}

/// What the exporter's book answers to a query of ours.
fn answer(book: &mut ClaimBook, query: &str) -> Option<String> {
    if let Some(asked) = ReserveQuery::of(query) {
        assert_eq!(ReserveQuery::of(&asked.to_string()).as_ref(), Some(&asked));
        for reply in [ReserveReply::Granted(asked.rates), ReserveReply::Refused(asked.name.clone())] {
            let said = reply.to_string();
            assert_eq!(ReserveReply::of(&said), Some(reply));
        }
        return Some(ReserveReply::Refused(asked.name).to_string());
    }
    let asked = ClaimQuery::of(query)?;
    assert_eq!(ClaimQuery::of(&asked.to_string()).as_ref(), Some(&asked));
    let before = book.record().map_or(0, |record| record.generation);
    let reply = book.ask(&asked, 0, 0);
    let after = book.record().map_or(0, |record| record.generation);
    assert!(after == before || after == before + 1, "from {before} to {after}");
    if let ClaimReply::Granted(generation) = reply {
        assert_eq!(book.admits(Some((&asked.holder, generation))), Ok(()));
        assert!(book.is_held() && generation == after && book.admits(None).is_err());
    }
    let said = reply.to_string();
    assert_eq!(ClaimReply::of(&said), Some(reply));
    Some(said)
}

fn serve<'a>(policy: TlsPolicy, said: impl Iterator<Item = &'a [u8]>) -> (Vec<u8>, String) {
    let mut handshake = ServerHandshake::new(policy);
    let mut book = ClaimBook::new(None, Box::new(Nowhere));
    let mut all = Vec::new();
    for mut input in std::iter::once(&[][..]).chain(said) {
        loop {
            let mut output = Vec::new();
            let step = handshake.next(&mut input, &mut output);
            assert!(output.len() <= LONGEST, "{} bytes in one step", output.len());
            let plain = policy == TlsPolicy::Required && !handshake.has_tls();
            match step {
                Ok(ServerStep::Read) => {
                    all.extend(output);
                    break;
                }
                Ok(ServerStep::Send) => {}
                Ok(ServerStep::Find { name, .. }) => {
                    assert!(!plain, "something is told before TLS");
                    handshake.answer(found(&name), &mut output);
                }
                Ok(ServerStep::List) => {
                    assert!(!plain, "something is told before TLS");
                    handshake.list([("disk", "of the fuzzer")].into_iter(), &mut output);
                }
                Ok(ServerStep::Query { query, .. }) => {
                    assert!(query.starts_with(NAMESPACE));
                    let name = answer(&mut book, &query).unwrap_or_else(|| format!("{query}=1"));
                    let _ = (
                        ClaimReply::of(&query),
                        ClaimRecord::decode(query.as_bytes()),
                        ReserveReply::of(&query),
                    );
                    handshake.context((query.len() > NAMESPACE.len()).then_some(&name));
                }
                Ok(ServerStep::StartTls) => {
                    assert_ne!(policy, TlsPolicy::Unsupported, "TLS that is not there");
                    handshake.tls_started();
                }
                Ok(ServerStep::Transmission(negotiated)) => {
                    assert!(!plain, "plain text although TLS is required");
                    assert!(
                        negotiated.name == "disk"
                            && (negotiated.structured || negotiated.contexts.is_empty())
                    );
                    all.extend(output);
                    return (all, format!("{negotiated:?}"));
                }
                Ok(ServerStep::End) => {
                    all.extend(output);
                    return (all, "end".into());
                }
                Err(violation) => {
                    all.extend(output);
                    return (
                        all,
                        format!("{violation:?}").split(['(', '{']).next().unwrap_or_default().to_owned(),
                    );
                }
            }
            all.extend(output);
        }
    }
    (all, "waits".into())
}

fn found(name: &str) -> std::result::Result<ExportInfo, ExportRefusal> {
    match name {
        "disk" => Ok(ExportInfo {
            name: "disk".into(),
            description: "of the fuzzer".into(),
            bytes: 1 << 20,
            flags: 1,
            blocks: Some(BlockSizes::default()),
        }),
        "" => Err(ExportRefusal::Policy("no".into())),
        _ => Err(ExportRefusal::Unknown),
    }
}
