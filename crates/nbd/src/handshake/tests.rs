//! Both sides of the handshake against each other, and each against what it should not be sent.

use proptest::prelude::*;

use super::client::{ClientHandshake, ClientOptions, ClientStep, ClientTls, Connected};
use super::server::{ExportRefusal, Negotiated, ServerHandshake, ServerStep, TlsPolicy};
use super::*;
use crate::error::NbdError;
use crate::spec::*;

fn disk() -> ExportInfo {
    ExportInfo {
        name: "disk".into(),
        description: "a disk of the tests".into(),
        bytes: 1 << 30,
        flags: NBD_FLAG_HAS_FLAGS | NBD_FLAG_SEND_FLUSH,
        blocks: Some(BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 20 }),
    }
}

fn wants(tls: ClientTls) -> ClientOptions {
    let contexts = vec![BASE_ALLOCATION.into(), "ioplane:generation=3".into(), "qemu:dirty".into()];
    ClientOptions { export: "disk".into(), tls, structured: true, contexts }
}

/// A server with one export, `disk`, that grants every `ioplane:` query.
struct Server {
    handshake: ServerHandshake,
    /// Input in pieces of this size.
    piece: usize,
    output: Vec<u8>,
    started_tls: u32,
    end: Option<Result<Option<Negotiated>, Violation>>,
}

impl Server {
    fn new(policy: TlsPolicy, piece: usize) -> Server {
        Server {
            handshake: ServerHandshake::new(policy),
            piece,
            output: Vec::new(),
            started_tls: 0,
            end: None,
        }
    }

    fn take(&mut self, input: &[u8]) {
        for mut input in std::iter::once(&[][..]).chain(input.chunks(self.piece)) {
            while self.end.is_none() {
                match self.handshake.next(&mut input, &mut self.output) {
                    Ok(ServerStep::Read) => break,
                    Ok(ServerStep::Send) => {}
                    Ok(ServerStep::Find { name, .. }) => {
                        let found = if name == "disk" { Ok(disk()) } else { Err(ExportRefusal::Unknown) };
                        self.handshake.answer(found, &mut self.output);
                    }
                    Ok(ServerStep::List) => {
                        self.handshake.list([("disk", "one"), ("öther", "")].into_iter(), &mut self.output);
                    }
                    Ok(ServerStep::Query { query, .. }) => {
                        self.handshake.context(Some(&format!("{query},granted")));
                    }
                    Ok(ServerStep::StartTls) => {
                        self.started_tls += 1;
                        self.handshake.tls_started();
                    }
                    Ok(ServerStep::Transmission(negotiated)) => self.end = Some(Ok(Some(negotiated))),
                    Ok(ServerStep::End) => self.end = Some(Ok(None)),
                    Err(violation) => self.end = Some(Err(violation)),
                }
            }
        }
    }
}

/// What a client comes to with `server`, both getting their input in pieces.
fn connect(mut server: Server, wants: ClientOptions, piece: usize) -> (Server, Result<Connected, NbdError>) {
    let mut client = ClientHandshake::new(wants).unwrap();
    let mut to_server = Vec::new();
    loop {
        server.take(&std::mem::take(&mut to_server));
        let said = std::mem::take(&mut server.output);
        assert!(!said.is_empty(), "both sides wait");
        for mut input in said.chunks(piece) {
            loop {
                match client.next(&mut input, &mut to_server) {
                    Ok(ClientStep::Read) => break,
                    Ok(ClientStep::StartTls) => client.tls_started(&mut to_server),
                    Ok(ClientStep::Transmission(connected)) => return (server, Ok(connected)),
                    Err(error) => return (server, Err(error)),
                }
            }
        }
    }
}

#[test]
fn all_is_agreed_in_pieces_of_any_size() {
    for piece in [1, 2, 3, 7, 16, 20, 1000] {
        for (policy, tls) in [
            (TlsPolicy::Unsupported, ClientTls::Never),
            (TlsPolicy::Offered, ClientTls::Never),
            (TlsPolicy::Required, ClientTls::Required),
            (TlsPolicy::Offered, ClientTls::Required),
        ] {
            let (server, connected) = connect(Server::new(policy, piece), wants(tls), piece);
            let connected = connected.unwrap();
            let flags = disk().flags | NBD_FLAG_SEND_DF;
            assert_eq!(connected.info, ExportInfo { flags, ..disk() });
            let names: Vec<_> = connected.contexts.iter().map(|context| &context.name[..]).collect();
            assert_eq!(names, [BASE_ALLOCATION, "ioplane:generation=3,granted"]);
            assert_ne!(connected.contexts[0].id, connected.contexts[1].id);
            let Some(Ok(Some(negotiated))) = server.end else { panic!("{:?}", server.end) };
            assert_eq!((negotiated.contexts, negotiated.info), (connected.contexts, connected.info));
            assert!(negotiated.structured && connected.structured && negotiated.keeps_blocks);
            assert_eq!(server.started_tls, u32::from(tls == ClientTls::Required));
        }
    }
}

#[test]
fn tls_is_never_given_up() {
    let refused = |policy, tls| connect(Server::new(policy, 99), wants(tls), 99).1.unwrap_err();
    let error = refused(TlsPolicy::Unsupported, ClientTls::Required);
    assert!(matches!(error, NbdError::TlsRefused(_)), "{error}");
    let error = refused(TlsPolicy::Required, ClientTls::Never);
    assert!(matches!(error, NbdError::TlsRequired), "{error}");
}

/// What a client with `wants` makes of a server's bytes, which are all there at once.
fn client_of(wants: ClientOptions, mut input: &[u8]) -> (Result<ClientStep, NbdError>, Vec<u8>) {
    let (mut client, mut output) = (ClientHandshake::new(wants).unwrap(), Vec::new());
    (client.next(&mut input, &mut output), output)
}

fn greeting(flags: u16) -> Vec<u8> {
    [&NBDMAGIC.to_be_bytes()[..], &IHAVEOPT.to_be_bytes(), &flags.to_be_bytes()].concat()
}

fn reply_of(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    reply::write(&mut bytes, option, kind, &[data]);
    bytes
}

#[test]
fn a_client_that_requires_tls_says_nothing_in_plain_text() {
    let secret = ClientOptions { export: "secret".into(), ..wants(ClientTls::Required) };
    // An attacker takes fixed newstyle out of the greeting.
    let (end, said) = client_of(secret.clone(), &greeting(0));
    assert!(matches!(end, Err(NbdError::TlsRefused(_))) && said.is_empty(), "{said:?}");
    for code in [NBD_REP_ERR_UNSUP, NBD_REP_ERR_POLICY, NBD_REP_ERR_INVALID, NBD_REP_ERR_SHUTDOWN] {
        let all = [greeting(3), reply_of(NBD_OPT_STARTTLS, code, b"")].concat();
        let (end, said) = client_of(secret.clone(), &all);
        assert!(matches!(end, Err(NbdError::TlsRefused(_))), "{end:?}");
        assert!(!said.windows(6).any(|window| window == b"secret"));
    }
    // Something behind the reply, to be taken for what came over TLS.
    let behind = reply_of(NBD_OPT_STRUCTURED_REPLY, NBD_REP_ACK, b"");
    let all = [greeting(3), reply_of(NBD_OPT_STARTTLS, NBD_REP_ACK, b""), behind].concat();
    let (end, _) = client_of(secret, &all);
    assert!(matches!(end, Err(NbdError::Violation(Violation::PlainTextBeforeTls))), "{end:?}");
}

#[test]
fn a_server_forgets_what_was_said_before_tls_and_trusts_nothing_behind_it() {
    let flags = 3_u32.to_be_bytes().to_vec();
    let mut options = flags.clone();
    option::write(&mut options, NBD_OPT_STRUCTURED_REPLY, &[]);
    option::write(&mut options, NBD_OPT_STARTTLS, &[]);
    let mut server = Server::new(TlsPolicy::Offered, 999);
    server.take(&options);
    assert_eq!(server.started_tls, 1);
    let mut go = Vec::new();
    option::write(&mut go, NBD_OPT_GO, b"\0\0\0\x04disk\0\0");
    server.take(&go);
    let Some(Ok(Some(negotiated))) = &server.end else { panic!("{:?}", server.end) };
    assert!(!negotiated.structured && !negotiated.info.has(NBD_FLAG_SEND_DF));
    options.push(b'I');
    let mut server = Server::new(TlsPolicy::Offered, 999);
    server.take(&options);
    assert_eq!(server.end, Some(Err(Violation::PlainTextBeforeTls)));
}

/// What the server says to one option after the greeting: kinds of its replies.
fn replies(policy: TlsPolicy, options: &[(u32, &[u8])]) -> (Vec<u32>, Server) {
    let mut server = Server::new(policy, 999);
    let mut input = 3_u32.to_be_bytes().to_vec();
    options.iter().for_each(|(option, data)| option::write(&mut input, *option, data));
    server.take(&input);
    let mut left = &server.output[18..];
    let mut kinds = Vec::new();
    while let Some((header, rest)) = left.split_first_chunk::<20>() {
        kinds.push(u32::from_be_bytes(header[12..16].try_into().unwrap()));
        left = &rest[u32::from_be_bytes(header[16..].try_into().unwrap()) as usize..];
    }
    (kinds, server)
}

#[test]
fn options_are_answered_as_specified() {
    let plain = |options: &[(u32, &[u8])]| replies(TlsPolicy::Unsupported, options).0;
    assert_eq!(
        plain(&[(77, b"data that are skipped"), (NBD_OPT_LIST, b"")])[..],
        [NBD_REP_ERR_UNSUP, NBD_REP_SERVER, NBD_REP_SERVER, NBD_REP_ACK]
    );
    assert_eq!(plain(&[(NBD_OPT_LIST, b"x")]), [NBD_REP_ERR_INVALID]);
    assert_eq!(plain(&[(NBD_OPT_STARTTLS, b"")]), [NBD_REP_ERR_UNSUP]);
    assert_eq!(plain(&[(NBD_OPT_STRUCTURED_REPLY, b"x")]), [NBD_REP_ERR_INVALID]);
    assert_eq!(plain(&[(NBD_OPT_INFO, b"\0\0\0\x04nope\0\0")]), [NBD_REP_ERR_UNKNOWN]);
    assert_eq!(plain(&[(NBD_OPT_INFO, b"\0\0\0\x05disk\0\0")]), [NBD_REP_ERR_INVALID]);
    assert_eq!(plain(&[(NBD_OPT_GO, b"\0\0\0\x02\xff\xff\0\0")]), [NBD_REP_ERR_INVALID]);
    assert_eq!(plain(&[(NBD_OPT_GO, b"\0\0\0\x04disk\0\x02\0\x01")]), [NBD_REP_ERR_INVALID]);
    let all = b"\0\0\0\x04disk\0\x03\0\x01\0\x02\xff\xff";
    assert_eq!(plain(&[(NBD_OPT_INFO, all)]), [[NBD_REP_INFO; 4].as_slice(), &[NBD_REP_ACK]].concat());
    let huge = vec![0; 40 << 10];
    assert_eq!(plain(&[(NBD_OPT_GO, &huge), (77, b"")]), [NBD_REP_ERR_TOO_BIG, NBD_REP_ERR_UNSUP]);
    let list = b"\0\0\0\x04disk\0\0\0\0";
    assert_eq!(plain(&[(NBD_OPT_LIST_META_CONTEXT, list)]), [NBD_REP_ERR_INVALID]);
    let contexts = |queries: &[u8]| {
        let all = replies(
            TlsPolicy::Unsupported,
            &[
                (NBD_OPT_STRUCTURED_REPLY, b""),
                (NBD_OPT_LIST_META_CONTEXT, &[&b"\0\0\0\x04disk"[..], queries].concat()),
            ],
        );
        all.0[1..].to_vec()
    };
    assert_eq!(contexts(b"\0\0\0\0"), [NBD_REP_META_CONTEXT, NBD_REP_META_CONTEXT, NBD_REP_ACK]);
    assert_eq!(contexts(b"\0\0\0\x01\0\0\0\x05base:"), [NBD_REP_META_CONTEXT, NBD_REP_ACK]);
    assert_eq!(contexts(b"\0\0\0\x01\0\0\0\x06base:x"), [NBD_REP_ACK]);
    assert_eq!(contexts(b"\0\0\0\x01\0\0\0\x07base:"), [NBD_REP_ERR_INVALID]);
    assert_eq!(contexts(b"\xff\xff\xff\xff"), [NBD_REP_ERR_INVALID]);
}

#[test]
fn only_tls_is_answered_where_it_is_required() {
    let (kinds, server) = replies(
        TlsPolicy::Required,
        &[
            (NBD_OPT_LIST, b""),
            (77, b"x"),
            (NBD_OPT_GO, b"\0\0\0\x04disk\0\0"),
            (NBD_OPT_STRUCTURED_REPLY, b""),
            (NBD_OPT_STARTTLS, b"x"),
            (NBD_OPT_ABORT, b"ignored"),
        ],
    );
    let required = NBD_REP_ERR_TLS_REQD;
    assert_eq!(kinds, [required, required, required, required, NBD_REP_ERR_INVALID, NBD_REP_ACK]);
    assert_eq!(server.end, Some(Ok(None)));
    let (kinds, server) = replies(TlsPolicy::Required, &[(NBD_OPT_EXPORT_NAME, b"disk")]);
    assert_eq!((kinds.len(), server.end), (0, Some(Ok(None))));
}

#[test]
fn contexts_hold_for_the_export_that_they_were_selected_for() {
    let set = b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation";
    let selected = |options: &[(u32, &[u8])]| {
        let all =
            [&[(NBD_OPT_STRUCTURED_REPLY, &b""[..])], options, &[(NBD_OPT_EXPORT_NAME, b"disk")]].concat();
        let mut server = Server::new(TlsPolicy::Unsupported, 999);
        let mut input = 3_u32.to_be_bytes().to_vec();
        all.iter().for_each(|(option, data)| option::write(&mut input, *option, data));
        server.take(&input);
        let Some(Ok(Some(negotiated))) = server.end else { panic!("{:?}", server.end) };
        negotiated.contexts.len()
    };
    let set_to = |data: &'static [u8]| (NBD_OPT_SET_META_CONTEXT, data);
    assert_eq!(selected(&[set_to(set)]), 1);
    assert_eq!(selected(&[set_to(set), set_to(b"\0\0\0\x04nope\0\0\0\0")]), 0);
    assert_eq!(selected(&[set_to(set), set_to(b"malformed")]), 0);
}

#[test]
fn an_export_name_is_answered_with_and_without_zeros() {
    for (flags, zeroes) in [(1_u32, EXPORT_NAME_ZEROES), (3, 0), (0, EXPORT_NAME_ZEROES)] {
        let mut server = Server::new(TlsPolicy::Offered, 5);
        let mut input = flags.to_be_bytes().to_vec();
        option::write(&mut input, NBD_OPT_EXPORT_NAME, b"disk");
        server.take(&input);
        assert_eq!(server.output.len(), 18 + 10 + zeroes);
        let Some(Ok(Some(negotiated))) = server.end else { panic!("{:?}", server.end) };
        assert!(negotiated.by_name && !negotiated.keeps_blocks);
    }
    let mut server = Server::new(TlsPolicy::Offered, 5);
    let mut input = 3_u32.to_be_bytes().to_vec();
    option::write(&mut input, NBD_OPT_EXPORT_NAME, b"nope");
    server.take(&input);
    assert_eq!(server.end, Some(Ok(None)));
}

#[test]
fn servers_without_go_or_structured_replies_do() {
    let unsupported = |option| reply_of(option, NBD_REP_ERR_UNSUP, b"no");
    let mut all = greeting(1);
    all.extend(unsupported(NBD_OPT_STRUCTURED_REPLY));
    all.extend(unsupported(NBD_OPT_GO));
    all.extend((7_u64 << 20).to_be_bytes());
    all.extend(5_u16.to_be_bytes());
    all.extend([0; EXPORT_NAME_ZEROES]);
    let (end, said) = client_of(wants(ClientTls::Never), &all);
    let Ok(ClientStep::Transmission(connected)) = end else { panic!("{end:?}") };
    assert_eq!((connected.info.bytes, connected.info.flags, connected.info.blocks), (7 << 20, 5, None));
    assert!(!connected.structured && said.ends_with(b"\0\0\0\x01\0\0\0\x04disk"));
    // Plain newstyle has nothing but the name.
    let mut all = greeting(0);
    all.extend(1024_u64.to_be_bytes());
    all.extend(1_u16.to_be_bytes());
    all.extend([0; EXPORT_NAME_ZEROES]);
    let (end, said) = client_of(wants(ClientTls::Never), &all);
    assert!(matches!(end, Ok(ClientStep::Transmission(_))));
    assert_eq!(said.len(), 4 + 16 + 4);
}

#[test]
fn servers_that_make_no_sense_are_named() {
    let error = |bytes: &[u8]| client_of(wants(ClientTls::Never), bytes).0.unwrap_err();
    assert!(matches!(error(b"SSH-2.0-OpenSSH_9.2p1 Debian"), NbdError::Violation(Violation::Greeting(_))));
    let old = [NBDMAGIC.to_be_bytes(), CLISERV_MAGIC.to_be_bytes()].concat();
    assert!(matches!(error(&old), NbdError::Oldstyle));
    let after = |reply: Vec<u8>| error(&[greeting(3), reply].concat());
    let code = |error| if let NbdError::Violation(violation) = error { violation } else { panic!("{error}") };
    let structured = NBD_OPT_STRUCTURED_REPLY;
    assert!(matches!(code(after(reply_of(9, 1, b""))), Violation::OptionReplyTo { got: 9, sent: 8 }));
    assert!(matches!(code(after(reply_of(structured, 3, b""))), Violation::OptionReply { .. }));
    assert!(matches!(code(after(reply_of(structured, 1, b"x"))), Violation::OptionReply { .. }));
    let long = vec![0; MAX_STRING * 3];
    assert!(matches!(code(after(reply_of(structured, 1, &long))), Violation::OptionReplyLength(_)));
    assert!(matches!(code(after(vec![0; 20])), Violation::OptionReplyMagic(0)));
    let direct = ClientOptions { structured: false, ..wants(ClientTls::Never) };
    let go = |replies: &[Vec<u8>]| {
        client_of(direct.clone(), &[greeting(3), replies.concat()].concat()).0.unwrap_err()
    };
    // An acknowledgement before the size is known.
    assert!(matches!(code(go(&[reply_of(NBD_OPT_GO, NBD_REP_ACK, b"")])), Violation::OptionReply { .. }));
    let info = |data: &[u8]| reply_of(NBD_OPT_GO, NBD_REP_INFO, data);
    assert!(matches!(code(go(&[info(b"\0")])), Violation::OptionReply { .. }));
    assert!(matches!(code(go(&[info(b"\0\0\0\0")])), Violation::OptionReply { .. }));
    let blocks = |sizes: [u32; 3]| {
        info(&[&NBD_INFO_BLOCK_SIZE.to_be_bytes()[..], &sizes.map(u32::to_be_bytes).concat()].concat())
    };
    for sizes in [[3, 4096, 1 << 20], [512, 256, 1 << 20], [512, 4096, 512], [1 << 17, 1 << 17, 1 << 20]] {
        assert!(matches!(code(go(&[blocks(sizes)])), Violation::BlockSizes { .. }), "{sizes:?}");
    }
    let many = vec![info(b"\0\x09"); 65];
    assert!(matches!(code(go(&many)), Violation::TooManyReplies(64)));
    let refusal = go(&[reply_of(NBD_OPT_GO, NBD_REP_ERR_POLICY, b"in use by host-b")]);
    assert!(refusal.to_string().contains("in use by host-b"), "{refusal}");
    assert!(matches!(go(&[reply_of(NBD_OPT_GO, NBD_REP_ERR_UNKNOWN, b"")]), NbdError::NoSuchExport(_)));
}

#[test]
fn clients_that_make_no_sense_are_named() {
    let end = |input: &[u8]| {
        let mut server = Server::new(TlsPolicy::Offered, 99);
        server.take(input);
        server.end
    };
    assert_eq!(end(&4_u32.to_be_bytes()), Some(Err(Violation::ClientFlags(4))));
    let after = |flags: u32, option: &[u8]| end(&[&flags.to_be_bytes()[..], option].concat());
    assert!(matches!(after(3, &[0; 16]), Some(Err(Violation::OptionMagic(0)))));
    let header = |option: u32, length: u32| {
        [&IHAVEOPT.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes()].concat()
    };
    assert_eq!(after(0, &header(NBD_OPT_GO, 0)), Some(Err(Violation::NotFixedNewstyle(NBD_OPT_GO))));
    assert_eq!(after(3, &header(99, u32::MAX)), Some(Err(Violation::OptionLength(u32::MAX))));
    assert_eq!(after(3, &header(NBD_OPT_EXPORT_NAME, 4097)), Some(Ok(None)));
    assert_eq!(after(3, &header(99, 0).repeat(257)), Some(Err(Violation::TooManyOptions(256))));
}

/// All that a client of ours says in one handshake without TLS.
fn client_bytes() -> Vec<u8> {
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    option::write(&mut bytes, 1234, b"an unknown option");
    option::write(&mut bytes, NBD_OPT_LIST, b"");
    option::write(&mut bytes, NBD_OPT_STRUCTURED_REPLY, b"");
    option::write(&mut bytes, NBD_OPT_LIST_META_CONTEXT, b"\0\0\0\x04disk\0\0\0\0");
    let set = b"\0\0\0\x04disk\0\0\0\x02\0\0\0\x0fbase:allocation\0\0\0\x09ioplane:x";
    option::write(&mut bytes, NBD_OPT_SET_META_CONTEXT, set);
    option::write(&mut bytes, NBD_OPT_INFO, b"\0\0\0\x04disk\0\x01\0\x03");
    option::write(&mut bytes, NBD_OPT_GO, b"\0\0\0\x04disk\0\x01\0\x03");
    bytes
}

#[test]
fn truncated_and_corrupted_clients_do_no_harm() {
    let bytes = client_bytes();
    let outcome = |bytes: &[u8], piece| {
        let mut server = Server::new(TlsPolicy::Offered, piece);
        server.take(bytes);
        (server.output, server.end)
    };
    assert!(matches!(outcome(&bytes, 99).1, Some(Ok(Some(_)))));
    for end in 0..bytes.len() {
        assert_eq!(outcome(&bytes[..end], 99).1, None, "after {end} bytes");
    }
    for at in 0..bytes.len() {
        for flip in [1, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            assert_eq!(outcome(&damaged, 1), outcome(&damaged, 9999), "byte {at} with {flip:#x}");
        }
    }
}

#[test]
fn truncated_and_corrupted_servers_do_no_harm() {
    let direct = ClientOptions { structured: false, ..wants(ClientTls::Never) };
    let mut bytes = greeting(3);
    reply::write_info(&mut bytes, NBD_OPT_GO, &disk(), 1, &[NBD_INFO_NAME, NBD_INFO_DESCRIPTION]);
    bytes.extend(reply_of(NBD_OPT_GO, NBD_REP_ACK, b""));
    let whole = |bytes: &[u8]| client_of(direct.clone(), bytes).0.map_err(|error| error.to_string());
    let piecewise = |bytes: &[u8]| {
        let (mut client, mut output) = (ClientHandshake::new(direct.clone()).unwrap(), Vec::new());
        let mut last = Ok(ClientStep::Read);
        for mut input in bytes.chunks(1) {
            last = client.next(&mut input, &mut output).map_err(|error| error.to_string());
            if last != Ok(ClientStep::Read) {
                break;
            }
        }
        last
    };
    assert!(matches!(whole(&bytes), Ok(ClientStep::Transmission(_))));
    for end in 0..bytes.len() {
        assert_eq!(whole(&bytes[..end]), Ok(ClientStep::Read), "after {end} bytes");
    }
    for at in 0..bytes.len() {
        for flip in [1, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            assert_eq!(piecewise(&damaged), whole(&damaged), "byte {at} with {flip:#x}");
        }
    }
}

#[test]
fn names_that_cannot_be_sent_are_refused() {
    for export in ["a\0b".to_owned(), "x".repeat(MAX_STRING + 1)] {
        let wants = ClientOptions { export, ..wants(ClientTls::Never) };
        assert!(matches!(ClientHandshake::new(wants), Err(NbdError::Name(_))));
    }
}

proptest! {
    #[test]
    fn any_options_are_answered_alike_in_any_pieces(
        options in prop::collection::vec((0..12_u32, prop::collection::vec(0..8_u8, 0..40)), 0..8),
        piece in 1..40_usize,
    ) {
        let mut bytes = 3_u32.to_be_bytes().to_vec();
        options.iter().for_each(|(option, data)| option::write(&mut bytes, *option, data));
        let outcome = |piece| {
            let mut server = Server::new(TlsPolicy::Unsupported, piece);
            server.take(&bytes);
            (server.output, server.end)
        };
        prop_assert_eq!(outcome(piece), outcome(usize::MAX));
    }
}
