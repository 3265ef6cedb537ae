//! Records without sockets: cut anywhere, changed anywhere.

use proptest::prelude::*;

use super::*;

fn seed() -> StreamSum {
    let mut sum = StreamSum::default();
    sum.add(b"a handshake");
    sum
}

/// A record of each part.
fn sealed(parts: &[&[u8]]) -> Vec<u8> {
    let mut writer = RecordWriter::new(seed());
    let mut stream = Vec::new();
    for part in parts {
        let gather = &mut |into: &mut [u8]| {
            into.copy_from_slice(part);
            true
        };
        assert_eq!(writer.seal(part.len(), gather), Ok(true));
        stream.extend_from_slice(writer.unsent());
        writer.sent(writer.unsent().len());
    }
    stream
}

/// What comes of a stream in pieces, and how it ends.
fn opened<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<u8>, Result<bool, Violation>) {
    let mut reader = RecordReader::new(seed());
    let mut plain = Vec::new();
    for mut piece in pieces {
        while !piece.is_empty() {
            let room = reader.room();
            let take = room.len().min(piece.len());
            room[..take].copy_from_slice(&piece[..take]);
            reader.received(take);
            piece = &piece[take..];
            loop {
                let next = reader.has_next();
                match reader.open() {
                    Ok(Some(bytes)) => assert!(next && bytes > HEADER),
                    Ok(None) => {
                        assert!(!next);
                        break;
                    }
                    Err(violation) => {
                        assert!(next);
                        return (plain, Err(violation));
                    }
                }
                let mut some = [0; 1000];
                while reader.ready() > 0 {
                    let bytes = reader.read(&mut some);
                    plain.extend_from_slice(&some[..bytes]);
                }
            }
        }
    }
    let between = reader.is_between();
    (plain, Ok(between))
}

fn counting(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect()
}

#[test]
fn it_is_the_sum_that_others_call_crc32c() {
    // The check value of CRC-32/ISCSI in the catalogue of parametrised CRC algorithms, and RFC 3720, B.4.
    let sum = |parts: &[&[u8]]| {
        let mut sum = StreamSum::default();
        parts.iter().for_each(|part| sum.add(part));
        sum.0
    };
    assert_eq!(sum(&[b"123456789"]), 0xe306_9283);
    assert_eq!(sum(&[b"1234", b"", b"56789"]), 0xe306_9283);
    assert_eq!(sum(&[&[0; 32]]), 0x8a91_36aa);
    assert_eq!(sum(&[&[0xff; 32]]), 0x62a8_ab43);
}

#[test]
fn records_may_be_cut_anywhere() {
    let parts = [counting(28), counting(1), counting(600), counting(16)];
    let stream = sealed(&parts.each_ref().map(|part| &part[..]));
    for at in 0..=stream.len() {
        assert_eq!(opened([&stream[..at], &stream[at..]]), (parts.concat(), Ok(true)), "cut at {at}");
    }
    assert_eq!(opened(stream.chunks(1)), (parts.concat(), Ok(true)));
    for missing in 1..24 {
        let (plain, ended) = opened([&stream[..stream.len() - missing]]);
        assert_eq!(
            (plain.len(), ended),
            (629, Ok(false)),
            "the last record without its last {missing} bytes"
        );
    }
}

#[test]
fn the_longest_records_fill_what_is_received_ahead() {
    let parts: Vec<_> = (0..20).map(|_| counting(RECORD)).collect();
    let stream = sealed(&parts.iter().map(|part| &part[..]).collect::<Vec<_>>());
    assert_eq!(stream.len(), 20 * (HEADER + RECORD));
    for size in [stream.len(), 100_000, 64 << 10, 5000] {
        assert!(opened(stream.chunks(size)) == (parts.concat(), Ok(true)), "pieces of {size} bytes");
    }
}

/// Nothing of a changed record is given out, and a change is never taken for a record that has not come yet.
#[test]
fn each_bit_counts() {
    let parts = [counting(28), counting(40)];
    let stream = sealed(&[&parts[0], &parts[1]]);
    for bit in 0..stream.len() * 8 {
        let mut changed = stream.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let before = if bit / 8 < HEADER + 28 { 0 } else { 28 };
        let (plain, ended) = opened([&changed[..]]);
        let violation = ended.expect_err("it is not noticed");
        assert!(violation.is_of_sums());
        assert_eq!(plain, parts[0][..before], "bit {bit}");
    }
}

#[test]
fn records_that_are_lost_doubled_or_exchanged_are_noticed() {
    let part = counting(100);
    let stream = sealed(&[&part, &part, &part]);
    let [a, b, c]: [&[u8]; 3] = stream.chunks(HEADER + 100).collect::<Vec<_>>().try_into().unwrap();
    for (order, right) in
        [(vec![a, c], 1), (vec![b, c], 0), (vec![a, a, b], 1), (vec![a, c, b], 1), (vec![a, b, b], 2)]
    {
        let (plain, ended) = opened(order);
        assert!(matches!(ended, Err(Violation::Sum { .. })), "{ended:?}");
        assert_eq!(plain.len(), right * 100);
    }
}

#[test]
fn what_no_record_can_have_is_refused_by_its_header() {
    for length in [RECORD as u16 + 1, u16::MAX] {
        let mut stream = [0; HEADER];
        stream[..2].copy_from_slice(&length.to_be_bytes());
        stream[2..4].copy_from_slice(&(!length).to_be_bytes());
        assert_eq!(opened([&stream[..]]).1, Err(Violation::RecordLength(length)));
    }
    // Something else that speaks on this port.
    assert!(matches!(opened([&b"GET / HTTP/1.1\r\n"[..]]).1, Err(Violation::RecordLength(_))));
}

/// Both sides count all that was said before: one that has heard something else is noticed with the first record.
#[test]
fn the_handshake_counts() {
    let mut server = seed();
    let opening = server.opening();
    let mut client = seed();
    client.check_opening(opening).unwrap();
    assert_eq!(client, server);
    let mut other = StreamSum::default();
    other.add(b"a handshakE");
    assert!(matches!(other.check_opening(opening), Err(Violation::Sum { .. })));
    let record = sealed(&[b"x"]);
    let head = *record.first_chunk().unwrap();
    assert_eq!(seed().check_opening(head), Err(Violation::RecordLength(1)));
}

#[test]
fn queries_come_as_they_were_asked_or_not_at_all() {
    let asked = |others: &[&str]| query("disk", others.iter().copied());
    let check = |export: &str, queries: &[&str]| check_queries(export, queries.iter().copied());
    let sum = asked(&["a", "bc"]);
    assert_eq!(check("disk", &["a", "bc", &sum]), Ok(()));
    assert_eq!(check("disk", &[&sum, "a", "bc"]), Ok(()), "wherever it is among them");
    for (export, queries) in
        [("disc", ["a", "bc"]), ("disk", ["a", "bd"]), ("disk", ["ab", "c"]), ("disk", ["bc", "a"])]
    {
        let queries = [queries[0], queries[1], &sum];
        assert!(matches!(check(export, &queries), Err(Violation::Sum { .. })), "{export} {queries:?}");
    }
    for bad in ["ioplane:crc32c=", "ioplane:crc32c=0123456z", "ioplane:crc32c=0000000000000001"] {
        assert!(matches!(check("disk", &["a", bad]), Err(Violation::Sum { .. })), "{bad}");
    }
    // Clients of others, and those that only ask whether there are sums.
    assert_eq!(check("disk", &["base:allocation"]), Ok(()));
    assert_eq!(check("disk", &["a", CRC32C]), Ok(()));
    assert!(is_asked_by(CRC32C) && is_asked_by(&sum) && !is_asked_by("ioplane:crc32cx"));
}

#[test]
fn a_record_of_no_bytes_says_that_the_peer_has_got_a_wrong_one() {
    let mut writer = RecordWriter::new(seed());
    writer
        .seal(3, &mut |into| {
            into.copy_from_slice(b"end");
            true
        })
        .unwrap();
    writer.seal_end().unwrap();
    assert_eq!(opened([writer.unsent()]), (b"end".to_vec(), Err(Violation::ChangedThere)));
}

#[test]
fn what_cannot_be_gathered_is_not_sealed() {
    let mut writer = RecordWriter::new(seed());
    assert_eq!(
        writer.seal(5, &mut |into| {
            into.fill(9);
            false
        }),
        Ok(false)
    );
    assert!(writer.unsent().is_empty());
    for bytes in [0, RECORD + 1] {
        assert_eq!(writer.seal(bytes, &mut |_| panic!("it is not asked for")), Err(NoRoom));
    }
    for _ in 0..RECORDS {
        assert_eq!(writer.seal(RECORD, &mut |_| true), Ok(true));
    }
    writer.sent(1);
    assert_eq!(writer.seal(1, &mut |_| panic!("it is not asked for")), Err(NoRoom));
    assert_eq!(writer.seal_end(), Err(NoRoom));
    writer.sent(writer.unsent().len());
    assert_eq!(writer.seal(RECORD, &mut |_| true), Ok(true));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_sealed_is_opened_in_any_pieces(
        lengths in prop::collection::vec(1..=RECORD, 1..12),
        pieces in prop::collection::vec(1..70_000_usize, 1..12),
    ) {
        let parts: Vec<_> = lengths.iter().map(|length| counting(*length)).collect();
        let stream = sealed(&parts.iter().map(|part| &part[..]).collect::<Vec<_>>());
        let mut rest = &stream[..];
        let cut = pieces.iter().cycle().map_while(|size| {
            let (piece, after) = rest.split_at(rest.len().min(*size));
            rest = after;
            (!piece.is_empty()).then_some(piece)
        });
        prop_assert!(opened(cut) == (parts.concat(), Ok(true)));
    }
}
