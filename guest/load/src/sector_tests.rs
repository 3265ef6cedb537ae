use super::*;

const SECTORS: u64 = 8;

fn block(sector: u64, sequence: u32) -> Vec<u8> {
    let mut bytes = vec![0; SECTORS as usize * SECTOR];
    Stamp::new("disk0", 7).fill(&mut bytes, sector, sequence);
    bytes
}

fn check(bytes: &[u8], sector: u64, expect: Expect) -> Result<(), Mismatch> {
    Stamp::new("disk0", 7).check(bytes, sector, expect)
}

#[test]
fn accepts_what_was_written() {
    assert_eq!(check(&block(64, 3), 64, Expect::Content(3)), Ok(()));
    assert_eq!(check(&[0; 4096], 64, Expect::Zero), Ok(()));
    assert_eq!(check(&[9; 4096], 64, Expect::Anything), Ok(()));
}

#[test]
fn sees_a_stale_block() {
    let found = check(&block(64, 2), 64, Expect::Content(3));
    assert_eq!(found, Err(Mismatch::Stale { sector: 64, expected: 3, found: 2 }));
    assert_eq!(check(&[0; 4096], 64, Expect::Content(3)), Err(Mismatch::Lost { sector: 64, expected: 3 }));
    let found = check(&block(64, 4), 64, Expect::Content(3));
    assert_eq!(found, Err(Mismatch::Newer { sector: 64, expected: 3, found: 4 }));
}

#[test]
fn sees_a_torn_block_wherever_it_is_torn() {
    for cut in 1..SECTORS as usize {
        for (head, tail) in [(3, 2), (2, 3)] {
            let mut bytes = block(64, head);
            bytes[cut * SECTOR..].copy_from_slice(&block(64, tail)[cut * SECTOR..]);
            let found = check(&bytes, 64, Expect::Content(3));
            let torn = Mismatch::Torn { sector: 64 + cut as u64, before: head, after: tail };
            assert_eq!(found, Err(torn));
        }
        let mut bytes = block(64, 3);
        bytes[cut * SECTOR..].fill(0);
        assert!(matches!(check(&bytes, 64, Expect::Content(3)), Err(Mismatch::Torn { .. })));
    }
}

#[test]
fn sees_a_misplaced_block() {
    let found = check(&block(72, 3), 64, Expect::Content(3));
    assert_eq!(found, Err(Mismatch::Misplaced { sector: 64, belongs: 72 }));
    // Shifted by one sector within the block.
    let mut bytes = block(64, 3);
    bytes.rotate_left(SECTOR);
    assert!(matches!(check(&bytes, 64, Expect::Content(3)), Err(Mismatch::Misplaced { .. })));
}

#[test]
fn sees_a_block_of_another_disk_or_load() {
    let mut bytes = vec![0; 4096];
    for other in [Stamp::new("disk1", 7), Stamp::new("disk0", 8)] {
        other.fill(&mut bytes, 64, 3);
        assert!(matches!(check(&bytes, 64, Expect::Content(3)), Err(Mismatch::Foreign { .. })));
    }
}

#[test]
fn sees_any_flipped_bit() {
    let whole = block(64, 3);
    for at in (0..whole.len()).step_by(37) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        assert!(check(&bytes, 64, Expect::Content(3)).is_err(), "byte {at}");
    }
}

#[test]
fn after_a_discard_old_data_or_zeroes_are_right_and_nothing_else() {
    assert_eq!(check(&[0; 4096], 64, Expect::Discarded(3)), Ok(()));
    assert_eq!(check(&block(64, 2), 64, Expect::Discarded(3)), Ok(()));
    let mut half = block(64, 3);
    half[2048..].fill(0);
    assert_eq!(check(&half, 64, Expect::Discarded(3)), Ok(()));
    assert!(matches!(check(&block(64, 4), 64, Expect::Discarded(3)), Err(Mismatch::Newer { .. })));
    assert!(matches!(check(&block(72, 2), 64, Expect::Discarded(3)), Err(Mismatch::Misplaced { .. })));
    assert_eq!(check(&block(64, 2), 64, Expect::Zero), Err(Mismatch::NotZero { sector: 64 }));
}
