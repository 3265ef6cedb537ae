//! Packet captures as pcapng (draft-ietf-opsawg-pcapng). The command line follows them: `pcapng.rs` there.
//!
//! ```text
//!   section header | interface description | enhanced packet ... | interface statistics (each second, and at the end)
//! ```
//! Blocks are little-endian. The statistics carry the drops, so that a capture that was cut off says so too.

use ioplane_api::pcapng::{
    END_OF_OPTIONS, ENHANCED_PACKET, INTERFACE_DESCRIPTION, INTERFACE_STATISTICS, ISB_IFDROP, SECTION_HEADER,
};

/// Section header: tells the byte order.
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const LINKTYPE_ETHERNET: u16 = 1;

/// Options.
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const EPB_FLAGS: u16 = 2;
const ISB_IFRECV: u16 = 4;
/// `if_tsresol`: nanoseconds.
const NANOSECONDS: u8 = 9;
/// `epb_flags`: the two lowest bits.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let padded = body.len().next_multiple_of(4);
    let total = (12 + padded) as u32;
    let mut bytes = Vec::with_capacity(total as usize);
    bytes.extend_from_slice(&kind.to_le_bytes());
    bytes.extend_from_slice(&total.to_le_bytes());
    bytes.extend_from_slice(body);
    bytes.resize(8 + padded, 0);
    bytes.extend_from_slice(&total.to_le_bytes());
    bytes
}

fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    body.extend_from_slice(&code.to_le_bytes());
    body.extend_from_slice(&(value.len() as u16).to_le_bytes());
    body.extend_from_slice(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn timestamp(body: &mut Vec<u8>, ns: u64) {
    body.extend_from_slice(&((ns >> 32) as u32).to_le_bytes());
    body.extend_from_slice(&(ns as u32).to_le_bytes());
}

/// The beginning of a capture of the port `name`, of `snaplen` bytes a frame.
pub fn head(name: &str, snaplen: u32) -> Vec<u8> {
    let mut body = BYTE_ORDER_MAGIC.to_le_bytes().to_vec();
    // Version 1.0, and a section whose length nobody knows yet.
    body.extend_from_slice(&[1, 0, 0, 0]);
    body.extend_from_slice(&u64::MAX.to_le_bytes());
    option(&mut body, SHB_USERAPPL, concat!("ioplane ", env!("CARGO_PKG_VERSION")).as_bytes());
    option(&mut body, END_OF_OPTIONS, &[]);
    let mut bytes = block(SECTION_HEADER, &body);
    let mut body = LINKTYPE_ETHERNET.to_le_bytes().to_vec();
    body.extend_from_slice(&[0, 0]);
    body.extend_from_slice(&snaplen.to_le_bytes());
    option(&mut body, IF_NAME, name.as_bytes());
    option(&mut body, IF_TSRESOL, &[NANOSECONDS]);
    option(&mut body, END_OF_OPTIONS, &[]);
    bytes.extend(block(INTERFACE_DESCRIPTION, &body));
    bytes
}

/// One frame of `len` bytes, of which these are the first, at `ns` since 1970; `inbound` is towards the port's owner.
pub fn packet(ns: u64, inbound: bool, len: u32, bytes: &[u8]) -> Vec<u8> {
    let mut body = 0u32.to_le_bytes().to_vec();
    timestamp(&mut body, ns);
    body.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    body.extend_from_slice(&len.to_le_bytes());
    body.extend_from_slice(bytes);
    body.resize(body.len().next_multiple_of(4), 0);
    option(&mut body, EPB_FLAGS, &if inbound { INBOUND } else { OUTBOUND }.to_le_bytes());
    option(&mut body, END_OF_OPTIONS, &[]);
    block(ENHANCED_PACKET, &body)
}

/// So far `seen` frames, of which `lost` could not be kept.
pub fn statistics(ns: u64, seen: u64, lost: u64) -> Vec<u8> {
    let mut body = 0u32.to_le_bytes().to_vec();
    timestamp(&mut body, ns);
    option(&mut body, ISB_IFRECV, &seen.to_le_bytes());
    option(&mut body, ISB_IFDROP, &lost.to_le_bytes());
    option(&mut body, END_OF_OPTIONS, &[]);
    block(INTERFACE_STATISTICS, &body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capture() -> Vec<u8> {
        let mut all = head("web", 262);
        all.extend(packet(1_700_000_000_000_000_001, true, 60, &[7; 60]));
        all.extend(statistics(1, 1, 0));
        all.extend(packet(1_700_000_000_000_000_002, false, 65_000, &[8; 261]));
        all.extend(statistics(2, 5, 3));
        all
    }

    #[test]
    fn what_was_lost_is_an_option_of_the_statistics() {
        let statistics = statistics(2, 5, 3);
        let lost =
            [&ISB_IFDROP.to_le_bytes()[..], &8u16.to_le_bytes(), &3u64.to_le_bytes(), &[0; 4]].concat();
        assert_eq!(statistics[..4], INTERFACE_STATISTICS.to_le_bytes());
        assert_eq!(statistics[statistics.len() - 4 - lost.len()..][..lost.len()], lost);
    }

    /// tcpdump is in script/bootstrap's checks.
    #[test]
    fn tcpdump_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.pcapng");
        std::fs::write(&file, capture()).unwrap();
        let read = std::process::Command::new("tcpdump").args(["-nettr"]).arg(&file).output();
        let read = read.expect("tcpdump: script/bootstrap --checks installs it");
        let text = String::from_utf8_lossy(&read.stdout).into_owned();
        assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
        // What it cannot interpret it dumps, on indented lines.
        let packets = text.lines().filter(|line| !line.starts_with(char::is_whitespace));
        assert_eq!(packets.count(), 2, "{text}");
        assert!(text.contains("07:07:07:07:07:07") && text.contains("length 65000"), "{text}");
    }
}
