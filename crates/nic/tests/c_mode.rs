//! C mode of the RTL8139: four transmit descriptors in registers, one receive buffer; as 8139too drives it.

use std::sync::Arc;

use ioplane_device::RegisterAddress;
use ioplane_memory::{GuestMap, GuestView};
use ioplane_network::Mac;
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options, spec};
use ioplane_testkit::nic::{Lan, LanPeer, Reach, Unhosted, frame};

const OWN: Mac = [2, 0, 0, 0, 0, 1];
const OTHER: Mac = [2, 0, 0, 0, 0, 2];
const TX: u64 = 0x1_0000;
const RX: u64 = 0x2_0000;

struct Bench {
    card: Unhosted<Rtl8139>,
    lan: LanPeer,
    memory: GuestView,
    size: u32,
    current: u32,
}

impl Bench {
    /// With a receive buffer of `8 << length` KiB, which wraps or runs over.
    fn new(length: u32, run_over: bool) -> Self {
        let map = Arc::new(GuestMap::anonymous(0x10_0000).expect("memory"));
        let Lan { port, neighbour } = Lan::new(OWN, OTHER);
        let options = Rtl8139Options { name: "nic".into(), mac: OWN };
        let card = Rtl8139::new(options, map.clone(), port).expect("a NIC");
        let mut bench = Bench {
            card: Unhosted::new(card),
            lan: neighbour,
            memory: GuestView::new(map),
            size: 8192 << length,
            current: 0,
        };
        bench.card.enable(true).expect("written");
        bench.put(spec::CR, 1, spec::CR_RST.into());
        bench.put(spec::RBSTART, 4, RX as u32);
        bench.put(spec::CR, 1, (spec::CR_RE | spec::CR_TE).into());
        let wrap = if run_over { spec::RCR_WRAP } else { 0 };
        bench.put(spec::RCR, 4, wrap | length << spec::RCR_RBLEN_SHIFT | spec::RCR_APM | spec::RCR_AB);
        bench.put(spec::IMR, 2, 0xe07f);
        bench
    }

    fn put(&mut self, register: u64, width: usize, value: u32) {
        self.card.write(RegisterAddress::Bar(0, register), width, value).expect("written");
    }

    fn get(&mut self, register: u64, width: usize) -> u32 {
        self.card.read(RegisterAddress::Bar(0, register), width).expect("read")
    }

    fn empty(&mut self) -> bool {
        self.get(spec::CR, 1) & u32::from(spec::CR_BUFE) != 0
    }

    /// The bytes at an offset of the receive buffer.
    fn bytes(&self, at: u32, len: u32, run_over: bool) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        for (n, byte) in (0..).zip(&mut bytes) {
            let at = if run_over { at + n } else { (at + n) % self.size };
            *byte = self.memory.bytes::<1>(RX + u64::from(at)).expect("memory")[0];
        }
        bytes
    }

    /// The next received frame.
    fn receive(&mut self, run_over: bool) -> Option<Vec<u8>> {
        if self.empty() {
            return None;
        }
        let head = self.bytes(self.current, 4, run_over);
        let (status, len) = (u16::from_le_bytes([head[0], head[1]]), u16::from_le_bytes([head[2], head[3]]));
        assert_eq!(u32::from(status) & spec::HEAD_ROK, 1, "{head:x?}");
        let frame = self.bytes(self.current + 4, u32::from(len) - 4, run_over);
        let fcs = self.bytes(self.current + u32::from(len), 4, run_over);
        assert_eq!(fcs, crc32fast::hash(&frame).to_le_bytes());
        self.current = (self.current + u32::from(len) + 4).next_multiple_of(4) % self.size;
        let pointer = (self.current as u16).wrapping_sub(16);
        self.put(spec::CAPR, 2, pointer.into());
        self.put(spec::ISR, 2, 0x51);
        Some(frame)
    }
}

fn numbered(to: Mac, from: Mac, number: usize) -> Vec<u8> {
    let payload: Vec<u8> = (0..46 + number * 61 % 1455).map(|at| (at * number) as u8).collect();
    frame(to, from, &payload)
}

#[test]
fn four_descriptors_in_turn() {
    let mut bench = Bench::new(0, true);
    for number in 0..40u64 {
        let descriptor = number % 4;
        let out = numbered(OTHER, OWN, number as usize);
        bench.memory.write(TX + descriptor * 2048, &out).expect("memory");
        bench.put(spec::TSAD0 + 4 * descriptor, 4, (TX + descriptor * 2048) as u32);
        bench.put(spec::TSD0 + 4 * descriptor, 4, 8 << 16 | out.len() as u32);
        assert_eq!(bench.lan.take(), Some(out));
        let status = bench.get(spec::TSD0 + 4 * descriptor, 4);
        assert_eq!(status & (spec::TSD_OWN | spec::TSD_TOK), spec::TSD_OWN | spec::TSD_TOK);
        assert_eq!(bench.get(spec::ISR, 2), u32::from(spec::INT_TOK));
        bench.put(spec::ISR, 2, spec::INT_TOK.into());
    }
    assert_eq!(bench.get(spec::TSAD, 2), 0xf00f, "all sent, all the driver's");
    // Out of turn: the third waits for its predecessors.
    let out = numbered(OTHER, OWN, 3);
    for descriptor in [2, 1, 0] {
        assert_eq!(bench.lan.take(), None);
        bench.memory.write(TX + descriptor * 2048, &out).expect("memory");
        bench.put(spec::TSAD0 + 4 * descriptor, 4, (TX + descriptor * 2048) as u32);
        bench.put(spec::TSD0 + 4 * descriptor, 4, out.len() as u32);
    }
    assert_eq!(std::iter::from_fn(|| bench.lan.take()).count(), 3);
    bench.put(spec::TSAD0 + 12, 4, 0xffff_0000);
    bench.put(spec::TSD0 + 12, 4, 100);
    let status = bench.get(spec::TSD0 + 12, 4);
    assert_eq!(status & (spec::TSD_TABT | spec::TSD_TOK | spec::TSD_OWN), spec::TSD_TABT | spec::TSD_OWN);
    assert_eq!(bench.get(spec::ISR, 2) & u32::from(spec::INT_SERR | spec::INT_TER), 0x8008);
}

#[test]
fn the_buffer_wraps_or_runs_over() {
    for (length, run_over) in [(0, false), (0, true), (2, true), (3, true)] {
        let mut bench = Bench::new(length, run_over);
        // The largest one always wraps.
        let run_over = run_over && length < 3;
        assert!(bench.empty());
        for number in 0..200 {
            let sent = numbered(OWN, OTHER, number);
            bench.lan.send(&sent);
            bench.card.attend();
            assert!(!bench.empty());
            assert_eq!(bench.receive(run_over), Some(sent), "frame {number}");
            assert!(bench.empty());
            assert_eq!(bench.get(spec::CBR, 2), bench.current);
        }
    }
}

#[test]
fn frames_wait_until_the_pointer_moves() {
    let mut bench = Bench::new(0, false);
    let frames: Vec<_> = (0..40).map(|number| numbered(OWN, OTHER, 22 + number % 2)).collect();
    assert_eq!(bench.lan.send_all(&frames), 40);
    bench.card.attend();
    assert_eq!(bench.get(spec::ISR, 2), u32::from(spec::INT_ROK | spec::INT_RXOVW));
    for (number, sent) in frames.iter().enumerate() {
        assert_eq!(bench.receive(false).as_ref(), Some(sent), "frame {number}");
    }
    assert_eq!(bench.receive(false), None);
}
