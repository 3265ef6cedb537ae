//! `nbd_client`: a server that says anything before the transmission phase.
//!
//! Oracles: no panic; the same in any pieces; a client that requires TLS says neither the export's name nor anything else but that before
//! TLS has started, and is never connected without.

use arbitrary::{Result, Unstructured};
use ioplane_nbd::handshake::client::{ClientHandshake, ClientOptions, ClientStep, ClientTls};
use ioplane_nbd::spec::*;

use super::{damage, pieces};
use crate::Signature;

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = talk(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

fn talk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let wants = ClientOptions {
        export: "secret".into(),
        tls: *input.choose(&[ClientTls::Never, ClientTls::Required])?,
        structured: input.ratio(3, 4)?,
        contexts: if input.ratio(1, 2)? { vec![BASE_ALLOCATION.into()] } else { Vec::new() },
    };
    let said = replies(input, &wants)?;
    let (output, end) = connect(wants.clone(), std::iter::once(&said[..]));
    let cut = pieces(input, &said)?;
    let again = connect(wants, cut.into_iter());
    if !end.contains("plain text") {
        assert_eq!(again, (output.clone(), end.clone()), "other pieces, other answers");
    }
    signature.count(output.len() as u64);
    signature.saw(end.split(|c: char| c.is_ascii_digit()).next().unwrap_or_default());
    Ok(())
}

/// A server that answers the options that such a client sends, as a rule.
fn replies(input: &mut Unstructured<'_>, wants: &ClientOptions) -> Result<Vec<u8>> {
    let mut said = [NBDMAGIC.to_be_bytes(), IHAVEOPT.to_be_bytes()].concat();
    said.extend((3 ^ u16::from(input.int_in_range(0..=7u8)? / 6)).to_be_bytes());
    let mut options = Vec::new();
    options.extend((wants.tls == ClientTls::Required).then_some(NBD_OPT_STARTTLS));
    options.extend(wants.structured.then_some(NBD_OPT_STRUCTURED_REPLY));
    options.extend((wants.structured && !wants.contexts.is_empty()).then_some(NBD_OPT_SET_META_CONTEXT));
    options.push(NBD_OPT_GO);
    for mut option in options {
        if !input.ratio(31, 32)? {
            option = u32::from(input.int_in_range(0..=12u8)?);
        }
        for _ in 0..input.int_in_range(0..=3u8)? {
            let mut data = Vec::new();
            let kind = if option == NBD_OPT_GO { NBD_REP_INFO } else { NBD_REP_META_CONTEXT };
            match (option, input.int_in_range(0..=4u16)?) {
                (NBD_OPT_GO, NBD_INFO_EXPORT) => {
                    data.extend([0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 1]);
                }
                (NBD_OPT_GO, NBD_INFO_BLOCK_SIZE) => {
                    data.extend(NBD_INFO_BLOCK_SIZE.to_be_bytes());
                    data.extend([0, 0, 2, 0, 0, 0, 16, 0, 0, 32, 0, 0]);
                }
                (NBD_OPT_GO, item) => {
                    data.extend(item.to_be_bytes());
                    data.extend(b"a name");
                }
                (_, id) => {
                    data.extend(u32::from(id).to_be_bytes());
                    data.extend(BASE_ALLOCATION.as_bytes());
                }
            }
            damage(input, &mut data)?;
            if option == NBD_OPT_GO || option == NBD_OPT_SET_META_CONTEXT {
                reply(input, &mut said, option, kind, &data)?;
            }
        }
        let last = match input.int_in_range(0..=15u8)? {
            0..=11 => NBD_REP_ACK,
            error => NBD_REP_FLAG_ERROR | u32::from(error - 11),
        };
        reply(input, &mut said, option, last, if last == NBD_REP_ACK { b"" } else { b"why" })?;
    }
    said.extend(input.bytes(input.len().min(20))?);
    Ok(said)
}

fn reply(
    input: &mut Unstructured<'_>,
    said: &mut Vec<u8>,
    option: u32,
    kind: u32,
    data: &[u8],
) -> Result<()> {
    let length = if !input.ratio(63, 64)? { input.arbitrary()? } else { data.len() as u32 };
    let mut header = NBD_REP_MAGIC.to_be_bytes().to_vec();
    [option, kind, length].iter().for_each(|word| header.extend(word.to_be_bytes()));
    if !input.ratio(31, 32)? {
        damage(input, &mut header)?;
    }
    said.extend(header);
    said.extend(data);
    Ok(())
}

fn connect<'a>(wants: ClientOptions, said: impl Iterator<Item = &'a [u8]>) -> (Vec<u8>, String) {
    let required = wants.tls == ClientTls::Required;
    let mut client = ClientHandshake::new(wants).expect("names that can be sent");
    let (mut all, mut tls) = (Vec::new(), false);
    for mut input in said {
        loop {
            let step = client.next(&mut input, &mut all);
            if required && !tls {
                assert!(all.len() <= 4 + 16, "{} bytes in plain text", all.len());
                assert!(!all.windows(6).any(|bytes| bytes == b"secret"));
            }
            match step {
                Ok(ClientStep::Read) => {
                    assert!(input.is_empty());
                    break;
                }
                Ok(ClientStep::StartTls) => {
                    assert!(required && !tls);
                    tls = true;
                    client.tls_started(&mut all);
                }
                Ok(ClientStep::Transmission(connected)) => {
                    assert!(!required || tls, "connected in plain text");
                    return (all, format!("{connected:?}"));
                }
                Err(error) => return (all, error.to_string()),
            }
        }
    }
    (all, "waits".into())
}
