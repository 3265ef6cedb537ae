//! The RTL8139C+ in front of the driver of the testkit, in C+ mode.

use std::collections::BTreeSet;
use std::sync::Arc;

use ioplane_device::{Access, Change, Device, Quiescent, RegisterAddress, SavedState};
use ioplane_memory::{DirtyLog, GuestMap, GuestView};
use ioplane_network::{Mac, RxOffloads, Sent};
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options, spec};
use ioplane_pci::{Function, Irq, Touch, Wire, WireError};
use ioplane_testkit::nic::{Cp, Cut, Lan, LanPeer, Reach, Received, Unhosted, frame, readable};

const OWN: Mac = [2, 0, 0, 0, 0, 1];
const OTHER: Mac = [2, 0, 0, 0, 0, 2];
const BASE: u64 = 0x10_0000;
const MEMORY: u64 = 0x20_0000;

type Driver = Cp<Unhosted<Rtl8139>>;

struct Bench {
    driver: Driver,
    lan: LanPeer,
    memory: Arc<GuestMap>,
    port: Arc<ioplane_network::Port>,
}

fn make(memory: &Arc<GuestMap>, port: &Arc<ioplane_network::Port>) -> Rtl8139 {
    let options = Rtl8139Options { name: "nic".into(), mac: OWN };
    Rtl8139::new(options, memory.clone(), port.clone()).expect("a NIC")
}

fn bench_with(features: u32) -> Bench {
    let memory = Arc::new(GuestMap::anonymous(MEMORY).expect("memory"));
    let Lan { port, neighbour } = Lan::new(OWN, OTHER);
    let card = Unhosted::new(make(&memory, &port));
    let mut driver = Cp::new(card, GuestView::new(memory.clone()), BASE).with_features(features);
    driver.open(OWN).expect("a card that opens");
    driver.reach.attend();
    Bench { driver, lan: neighbour, memory, port }
}

fn bench() -> Bench {
    bench_with(0)
}

impl Bench {
    fn card(&mut self) -> &mut Rtl8139 {
        &mut self.driver.reach.function
    }

    /// What the driver does in its interrupt handler, and what it received.
    fn interrupt(&mut self) -> (u32, Vec<Received>) {
        let status = self.driver.interrupt().expect("sound").unwrap_or(0);
        let received = if status & 0x53 != 0 { self.driver.poll().expect("sound") } else { Vec::new() };
        self.driver.reach.unmask();
        (status, received)
    }
}

fn numbered(to: Mac, from: Mac, number: usize) -> Vec<u8> {
    let payload: Vec<u8> = (0..46 + number * 37 % 1455).map(|at| (at * number) as u8).collect();
    frame(to, from, &payload)
}

#[test]
fn it_is_what_drivers_look_for() {
    let mut bench = bench();
    let mut id = [0; 16];
    bench.card().access(RegisterAddress::Config(0), Access::Read(&mut id));
    assert_eq!(
        (id[..4].to_vec(), id[8], id[9..12].to_vec()),
        (vec![0xec, 0x10, 0x39, 0x81], 0x20, vec![0, 0, 2])
    );
    assert_eq!(bench.card().irqs().intx, 1);
    let pages = bench.card().bars().bar(spec::BAR_MEMORY).expect("memory").pages().to_vec();
    assert_eq!((pages.len(), pages[0].len, pages[0].touch), (1, 4096, Touch::Shadow));
    assert_eq!(
        bench.card().wire(Irq::Msi, 0, Wire::Mask),
        Err(WireError::NoSuchVector { irq: Irq::Msi, vector: 0 })
    );
    let version = bench.driver.get(spec::TCR, 4).expect("read") & spec::TCR_HWVERID;
    assert_eq!(version, spec::TCR_HWVERID_8139CP);
}

#[test]
fn the_eeprom_has_the_address() {
    let mut bench = bench();
    let driver = &mut bench.driver;
    assert_ne!(driver.eeprom(0, 8).expect("read"), 0x8129, "it has six bits of address, not eight");
    let words: Vec<u16> =
        [0, 1, 2, 7, 8, 9].iter().map(|word| driver.eeprom(*word, 6).expect("read")).collect();
    assert_eq!(words, [0x8129, 0x10ec, 0x8139, 0x0002, 0x0000, 0x0100]);
}

#[test]
fn frames_go_both_ways_many_times_around_the_ring() {
    let mut bench = bench();
    for number in 0..300 {
        let out = numbered(OTHER, OWN, number);
        let cuts: &[usize] = match number % 3 {
            0 => &[],
            1 => &[14],
            _ => &[1, 20, 59],
        };
        bench.driver.xmit(&out, Cut { at: cuts, ..Cut::default() }).expect("room");
        assert_eq!(bench.lan.take(), Some(out), "frame {number}, synchronously");
        assert_eq!(bench.driver.reach.line.count(), 2 * number as u64 + 1);
        let (status, received) = bench.interrupt();
        assert_eq!((status, received.len()), (spec::INT_TOK.into(), 0));
        let done = bench.driver.reclaim().expect("sound");
        assert_eq!(done.len(), 1);
        assert_eq!(done[0] & 0x0fff_0000, 0, "no error, no collision");

        let back = numbered(OWN, OTHER, number);
        assert_eq!(bench.lan.send(&back), Sent::Delivered(1));
        assert!(readable(&bench.driver.reach.function));
        assert_eq!(bench.driver.reach.attend(), 1);
        assert_eq!(bench.driver.reach.line.count(), 2 * number as u64 + 2);
        let (status, received) = bench.interrupt();
        assert_eq!((status, received.len()), (spec::INT_ROK.into(), 1));
        assert_eq!(received[0].bytes, back);
        assert_eq!(received[0].fcs, crc32fast::hash(&back).to_le_bytes());
        assert_eq!(received[0].opts1 & (spec::RX_PAM | spec::RX_PID | spec::RX_RES), spec::RX_PAM);
    }
    let counts = bench.card().counts();
    assert_eq!((counts.sent, counts.received, counts.faults, counts.resets), (300, 300, 0, 1));
    assert_eq!((counts.drops, counts.interrupts), (Default::default(), 600));
}

#[test]
fn frames_without_descriptors_wait_and_none_is_lost() {
    let mut bench = bench();
    let frames: Vec<_> = (0..200).map(|number| numbered(OWN, OTHER, number)).collect();
    assert_eq!(bench.lan.send_all(&frames), 200);
    bench.driver.reach.attend();
    assert_eq!(bench.driver.reach.line.count(), 1, "it masks itself");
    assert!(!readable(&bench.driver.reach.function), "it does not ask for what only the guest can do");
    let mut all = Vec::new();
    while all.len() < 200 {
        let before = all.len();
        all.extend(bench.interrupt().1);
        // A batch is bounded; what is left of it asks for another.
        bench.driver.reach.attend();
        assert!(all.len() > before, "stuck at {before}");
    }
    for (number, received) in all.iter().enumerate() {
        assert_eq!(received.bytes, numbered(OWN, OTHER, number), "{number}");
    }
    let status = bench.driver.get(spec::ISR, 2).expect("read");
    assert_eq!(status & u32::from(spec::INT_RXOVW), 0, "nothing waits any more");
}

#[test]
fn the_filter_is_that_of_the_registers() {
    let mut bench = bench();
    let (group, stranger) = ([0x33, 0x33, 0, 0, 0, 9], [2, 0, 0, 0, 0, 9]);
    let heard = |bench: &mut Bench, to: Mac| {
        bench.lan.send(&numbered(to, OTHER, 7));
        bench.driver.reach.attend();
        bench.driver.poll().expect("sound").len() == 1
    };
    assert!(heard(&mut bench, OWN) && heard(&mut bench, [0xff; 6]));
    assert!(!heard(&mut bench, group) && !heard(&mut bench, stranger));
    let rcr = bench.driver.get(spec::RCR, 4).expect("read");
    let set = |bench: &mut Bench, bits: u32| bench.driver.put(spec::RCR, 4, bits).expect("written");
    set(&mut bench, rcr | spec::RCR_AM);
    assert!(!heard(&mut bench, group), "not in the hash");
    bench.driver.put(spec::MAR0, 4, !0).expect("written");
    bench.driver.put(spec::MAR0 + 4, 4, !0).expect("written");
    assert!(heard(&mut bench, group) && !heard(&mut bench, stranger));
    set(&mut bench, rcr | spec::RCR_AAP);
    assert!(heard(&mut bench, stranger) && heard(&mut bench, OWN));
    let matched = |bench: &mut Bench, to: Mac| {
        bench.lan.send(&numbered(to, OTHER, 7));
        bench.driver.reach.attend();
        bench.driver.poll().expect("sound")[0].opts1 & spec::RX_PAM != 0
    };
    assert!(matched(&mut bench, OWN) && !matched(&mut bench, stranger), "data sheet 6.1.4, PAM");
    set(&mut bench, 0);
    assert!(!heard(&mut bench, OWN) && !heard(&mut bench, [0xff; 6]));
    assert_eq!(bench.card().counts().drops.filtered, 6);
    bench.driver.put(spec::CR, 1, 0).expect("written");
    assert!(!heard(&mut bench, OWN));
    assert_eq!(bench.card().counts().drops.disabled, 1);
}

#[test]
fn statistics_are_dumped() {
    let mut bench = bench();
    for number in 0..3 {
        bench.driver.xmit(&numbered(OTHER, OWN, number), Cut::default()).expect("room");
    }
    bench.lan.send(&numbered(OWN, OTHER, 1));
    bench.lan.send(&numbered([0xff; 6], OTHER, 1));
    bench.driver.reach.attend();
    let stats = bench.driver.stats().expect("a dump");
    let long = |at: usize| u64::from_le_bytes(*stats[at..].first_chunk().expect("eight bytes"));
    assert_eq!((long(0), long(8), long(16), long(40), long(48)), (3, 2, 0, 1, 1));
    bench.driver.close().expect("closed");
    assert_eq!(bench.driver.stats().expect("a dump"), stats, "closed, too");
}

#[test]
fn tags_are_added_and_taken_off() {
    let mut bench = bench_with(u32::from(spec::CPCR_RXVLAN));
    let plain = numbered(OTHER, OWN, 20);
    let tag: u16 = 0x6123;
    let opts2 = spec::TX_TAGC | u32::from(tag.swap_bytes());
    bench.driver.xmit(&plain, Cut { at: &[30], opts2, ..Cut::default() }).expect("room");
    let tagged = [&plain[..12], &[0x81, 0, 0x61, 0x23], &plain[12..]].concat();
    assert_eq!(bench.lan.take(), Some(tagged));

    let plain = numbered(OWN, OTHER, 30);
    bench.lan.send(&[&plain[..12], &[0x81, 0, 0x61, 0x23], &plain[12..]].concat());
    bench.driver.reach.attend();
    let received = bench.interrupt().1;
    assert_eq!((received.len(), &received[0].bytes), (1, &plain));
    assert_eq!(received[0].opts2, spec::RX_TAVA | u32::from(tag.swap_bytes()));
    bench.lan.send(&plain);
    bench.driver.reach.attend();
    assert_eq!(bench.interrupt().1[0].opts2, 0, "nothing is left of the tag before");
}

fn packet(
    build: impl FnOnce(etherparse::PacketBuilderStep<etherparse::IpHeaders>) -> Vec<u8>,
    to: Mac,
    from: Mac,
) -> Vec<u8> {
    build(etherparse::PacketBuilder::ethernet2(from, to).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64))
}

fn udp(to: Mac, from: Mac, payload: &[u8]) -> Vec<u8> {
    packet(
        |ip| {
            let mut out = Vec::new();
            ip.udp(5000, 7).write(&mut out, payload).expect("a packet");
            out
        },
        to,
        from,
    )
}

fn tcp(to: Mac, from: Mac, payload: &[u8]) -> Vec<u8> {
    packet(
        |ip| {
            let mut out = Vec::new();
            ip.tcp(5000, 80, 0x1234_5678, 1024).psh().fin().write(&mut out, payload).expect("a packet");
            out
        },
        to,
        from,
    )
}

/// Where the sums are in these packets.
const IP_SUM: usize = 24;
const UDP_SUM: usize = 40;
const TCP_SUM: usize = 50;

#[test]
fn sums_are_those_of_etherparse() {
    let mut bench = bench();
    for len in [0, 1, 17, 100, 1400] {
        let payload: Vec<u8> = (0..len).map(|at| at as u8).collect();
        for (right, at, bit) in [
            (udp(OTHER, OWN, &payload), UDP_SUM, spec::TX_UDPCS),
            (tcp(OTHER, OWN, &payload), TCP_SUM, spec::TX_TCPCS),
        ] {
            let mut blank = right.clone();
            blank[IP_SUM..IP_SUM + 2].fill(0xee);
            blank[at..at + 2].fill(0xdd);
            bench.driver.xmit(&blank, Cut { at: &[34], opts1: spec::TX_IPCS | bit, opts2: 0 }).expect("room");
            let came = bench.lan.take().expect("a frame");
            assert_eq!(came[..right.len()], right, "{len} bytes");
            assert!(came[right.len()..].iter().all(|byte| *byte == 0) && came.len() == right.len().max(60));
            bench.driver.xmit(&blank, Cut::default()).expect("room");
            assert_eq!(bench.lan.take().expect("a frame")[..blank.len()], blank, "not asked for");
        }
    }
    // What is no IPv4 is left alone.
    let other = numbered(OTHER, OWN, 40);
    bench.driver.xmit(&other, Cut { opts1: spec::TX_IPCS | spec::TX_TCPCS, ..Cut::default() }).expect("room");
    assert_eq!(bench.lan.take(), Some(other));
}

#[test]
fn sums_are_checked() {
    let mut bench = bench_with(u32::from(spec::CPCR_RXCHKSUM));
    let mut verdict = |sent: &[u8]| {
        bench.lan.send(sent);
        bench.driver.reach.attend();
        let received = bench.driver.poll().expect("sound");
        assert_eq!(received[0].bytes[..sent.len()], *sent);
        received[0].opts1 & (spec::RX_PID | spec::RX_IPF | spec::RX_UDPF | spec::RX_TCPF)
    };
    for payload in [&[][..], &[1, 2, 3], &[7; 900]] {
        let (udp, tcp) = (udp(OWN, OTHER, payload), tcp(OWN, OTHER, payload));
        assert_eq!(verdict(&udp), spec::RX_PID_UDP);
        assert_eq!(verdict(&tcp), spec::RX_PID_TCP);
        for (mut wrong, at, bits) in [
            (udp.clone(), UDP_SUM, spec::RX_PID_UDP | spec::RX_UDPF),
            (tcp.clone(), TCP_SUM, spec::RX_PID_TCP | spec::RX_TCPF),
            (tcp, IP_SUM, spec::RX_PID_TCP | spec::RX_IPF),
        ] {
            wrong[at] ^= 0x10;
            assert_eq!(verdict(&wrong), bits);
        }
        let mut none = udp;
        none[UDP_SUM..UDP_SUM + 2].fill(0);
        assert_eq!(verdict(&none), spec::RX_PID_UDP, "UDP without a sum");
        none[14] = 0x44;
        assert_eq!(verdict(&none), 0, "no sound IPv4 header");
    }
    assert_eq!(verdict(&numbered(OWN, OTHER, 4)), 0);
}

#[test]
fn large_packets_are_segmented_or_taken_whole() {
    let mut bench = bench();
    let payload: Vec<u8> = (0..4000).map(|at| (at / 7) as u8).collect();
    let large = tcp(OTHER, OWN, &payload);
    let cut = Cut { at: &[54, 1500, 3000], opts1: spec::TX_LGSEN | 1400 << spec::TX_MSS_SHIFT, opts2: 0 };
    bench.driver.xmit(&large, cut).expect("room");
    let segments: Vec<_> = std::iter::from_fn(|| bench.lan.take()).collect();
    let mut whole = Vec::new();
    for (n, segment) in segments.iter().enumerate() {
        let headers = etherparse::PacketHeaders::from_ethernet_slice(segment).expect("a packet");
        let Some(etherparse::TransportHeader::Tcp(header)) = &headers.transport else { panic!("no TCP") };
        let Some(etherparse::NetHeaders::Ipv4(ip, _)) = &headers.net else { panic!("no IPv4") };
        let piece = headers.payload.slice();
        assert_eq!(header.checksum, header.calc_checksum_ipv4(ip, piece).expect("a sum"), "segment {n}");
        assert_eq!(ip.header_checksum, ip.calc_header_checksum());
        assert_eq!(header.sequence_number, 0x1234_5678 + whole.len() as u32);
        assert_eq!((header.fin, header.psh), (n == 2, n == 2));
        whole.extend_from_slice(piece);
    }
    assert_eq!((segments.len(), whole), (3, payload));
    bench.lan.port.takes(RxOffloads::ALL);
    let tagged = Cut { opts2: spec::TX_TAGC | 0x0100, ..cut };
    bench.driver.xmit(&large, tagged).expect("room");
    let whole = bench.lan.take().expect("a frame");
    assert_eq!((whole.len(), bench.lan.take()), (large.len() + 4, None));
    assert_eq!(bench.card().counts().drops, Default::default());
}

#[test]
fn loop_back_is_received() {
    let mut bench = bench();
    let tcr = bench.driver.get(spec::TCR, 4).expect("read");
    bench.driver.put(spec::TCR, 4, tcr | spec::TCR_LBK).expect("written");
    let own = numbered(OWN, OTHER, 3);
    for _ in 0..3 {
        bench.driver.queue(&own, Cut::default()).expect("room");
    }
    bench.driver.kick().expect("written");
    assert_eq!(bench.lan.take(), None);
    let (status, received) = bench.interrupt();
    assert_eq!(status, u32::from(spec::INT_TOK | spec::INT_ROK));
    assert_eq!(received.iter().filter(|received| received.bytes == own).count(), 3);
}

#[test]
fn the_timer_interrupts() {
    let mut bench = bench();
    bench.driver.put(spec::IMR, 2, spec::INT_TIMEOUT.into()).expect("written");
    bench.driver.put(spec::TCTR, 4, 0).expect("written");
    bench.driver.put(spec::TIMER_INT, 4, 33_000).expect("written");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !readable(&bench.driver.reach.function) {
        assert!(std::time::Instant::now() < deadline, "no timer");
        std::thread::yield_now();
    }
    bench.driver.reach.attend();
    assert_eq!(bench.driver.reach.line.count(), 1);
    assert!(bench.driver.get(spec::TCTR, 4).expect("read") >= 33_000);
    assert_eq!(bench.driver.get(spec::ISR, 2).expect("read"), u32::from(spec::INT_TIMEOUT));
    let first = bench.driver.get(spec::TCTR, 2).expect("read");
    assert!(bench.driver.get(spec::TCTR, 4).expect("read") > first, "it counts");
    bench.driver.put(spec::ISR, 2, spec::INT_TIMEOUT.into()).expect("written");
    bench.driver.reach.unmask();
    assert_eq!(bench.driver.reach.line.count(), 1);
}

#[test]
fn interrupts_can_be_disabled_and_the_status_bit_tells() {
    let mut bench = bench();
    bench.driver.reach.enable(false).expect("written");
    bench.driver.put(spec::TPPOLL, 1, spec::TPPOLL_FSWINT.into()).expect("written");
    bench.driver.put(spec::IMR, 2, spec::INT_SW.into()).expect("written");
    let status =
        |bench: &mut Bench| bench.driver.reach.read(RegisterAddress::Config(6), 2).expect("read") & 8;
    assert_eq!((bench.driver.reach.line.count(), status(&mut bench)), (0, 8));
    bench.driver.reach.enable(true).expect("written");
    assert_eq!(bench.driver.reach.line.count(), 1);
    bench.driver.put(spec::ISR, 2, spec::INT_SW.into()).expect("written");
    assert_eq!(status(&mut bench), 0);
}

#[test]
fn without_bus_master_it_touches_no_memory() {
    let mut bench = bench();
    bench.driver.reach.write(RegisterAddress::Config(4), 2, 3).expect("written");
    let log = Arc::new(DirtyLog::new(MEMORY).expect("a log"));
    bench.card().apply(&BTreeSet::new(), &Change::Log(Some(log.clone())));
    bench.driver.xmit(&numbered(OTHER, OWN, 1), Cut::default()).expect("room");
    bench.lan.send(&numbered(OWN, OTHER, 1));
    bench.driver.reach.attend();
    bench.driver.stats().expect("it ends");
    assert_eq!((bench.lan.take(), bench.driver.reclaim().expect("sound").len()), (None, 0));
    assert!((0..MEMORY).step_by(4096).all(|page| !log.is_marked(page)));
    bench.driver.reach.enable(true).expect("written");
    bench.driver.kick().expect("written");
    assert!(bench.lan.take().is_some(), "now it goes");
    assert!(log.is_marked(BASE), "the descriptors were given back");
}

#[test]
fn the_shadow_page_is_never_older_than_an_interrupt() {
    let mut bench = bench();
    let pages = bench.card().bars().bar(spec::BAR_MEMORY).expect("memory").pages()[0].clone();
    let file = pages.file.try_clone().expect("a descriptor");
    // As a host maps it into a guest.
    let mapping = Arc::new(ioplane_memory::Mapping::of_file(file, pages.at, pages.len).expect("a page"));
    let page = ioplane_memory::Window::of_mapping(&mapping, 0, 4096).expect("a page");
    assert_eq!(page.load_u16(spec::IMR as usize), 0, "it is not used, and costs nothing");
    bench.card().use_shadows(true);

    /// Looks at the page when the interrupt comes.
    #[derive(Debug)]
    struct Eye(ioplane_memory::Window, std::sync::Mutex<Vec<u16>>);
    impl ioplane_device::Interrupt for Eye {
        fn signal(&self) {
            let status = self.0.load_u16(spec::ISR as usize) & self.0.load_u16(spec::IMR as usize);
            self.1.lock().expect("alone").push(status);
        }
    }
    let eye = Arc::new(Eye(page.clone(), Default::default()));
    bench.card().wire(Irq::Intx, 0, Wire::Call(Some(eye.clone()))).expect("wired");
    let same = |bench: &mut Bench| {
        for register in (0..256u64).step_by(4).filter(|register| *register != spec::TCTR) {
            let shown = page.load_u32(register as usize);
            assert_eq!(shown, bench.driver.get(register, 4).expect("read"), "register {register:#x}");
        }
    };
    same(&mut bench);
    for number in 0..100 {
        bench.driver.xmit(&numbered(OTHER, OWN, number), Cut::default()).expect("room");
        same(&mut bench);
        bench.interrupt();
        assert_eq!(
            page.load_u16(spec::ISR as usize),
            0,
            "what was acknowledged is gone when the access is answered"
        );
        bench.lan.send(&numbered(OWN, OTHER, number));
        bench.driver.reach.attend();
        assert_eq!(page.load_u16(spec::ISR as usize), spec::INT_ROK);
        bench.interrupt();
        bench.driver.reclaim().expect("sound");
        same(&mut bench);
    }
    let seen = eye.1.lock().expect("alone").clone();
    assert_eq!(seen.len(), 200);
    assert!(seen.iter().all(|status| [spec::INT_TOK, spec::INT_ROK].contains(status)), "{seen:x?}");
    bench.driver.put(spec::CR, 1, spec::CR_RST.into()).expect("written");
    same(&mut bench);
}

fn save(card: Rtl8139) -> SavedState {
    Quiescent::new(card).save().expect("saved")
}

#[test]
fn a_saved_card_goes_on_in_another_instance() {
    let mut bench = bench_with(u32::from(spec::CPCR_RXCHKSUM));
    for number in 0..70 {
        bench.driver.xmit(&numbered(OTHER, OWN, number), Cut::default()).expect("room");
        assert!(bench.lan.take().is_some());
        bench.lan.send(&numbered(OWN, OTHER, number));
        bench.driver.reach.attend();
        bench.interrupt();
        bench.driver.reclaim().expect("sound");
    }
    // In the middle of reading the EEPROM, with an interrupt pending and frames waiting.
    for bits in [0x80, 0x88, 0x8a, 0x8e, 0x8a, 0x8e] {
        bench.driver.put(spec::CR9346, 1, bits).expect("written");
    }
    bench.lan.send(&numbered(OWN, OTHER, 1));
    bench.driver.reach.attend();
    bench.lan.send(&numbered(OWN, OTHER, 2));
    let registers = |driver: &mut Driver| -> Vec<u32> {
        let all = (0..256).step_by(4).filter(|register| *register != spec::TCTR);
        all.map(|register| driver.get(register, 4).expect("read")).collect()
    };
    let before = registers(&mut bench.driver);
    let fresh = Unhosted::new(make(&bench.memory, &bench.port));
    let old = std::mem::replace(&mut bench.driver.reach, fresh);
    let state = save(old.function);
    assert_eq!((state.kind.as_str(), state.version), ("rtl8139", 1));
    let Unhosted { function, line } =
        std::mem::replace(&mut bench.driver.reach, Unhosted::new(make(&bench.memory, &bench.port)));
    let mut quiescent = Quiescent::new(function);
    quiescent.with(|card, proof| card.load(proof, &state)).expect("a good state");
    bench.driver.reach = Unhosted { function: quiescent.into_device(), line };
    assert_eq!(bench.driver.reach.line.count(), 1, "signalled again: invariant 3");
    assert_eq!(registers(&mut bench.driver), before);
    bench.driver.reach.attend();
    let received = bench.interrupt().1;
    assert_eq!(received.len(), 2, "the one that waited, too");
    bench.driver.xmit(&numbered(OTHER, OWN, 5), Cut::default()).expect("room");
    let sent: Vec<_> = std::iter::from_fn(|| bench.lan.take()).collect();
    assert_eq!((sent.len(), &sent[0]), (1, &numbered(OTHER, OWN, 5)));
}

#[test]
fn reset_in_the_middle() {
    let mut bench = bench();
    for _ in 0..10 {
        bench.driver.queue(&numbered(OTHER, OWN, 9), Cut::default()).expect("room");
    }
    bench.driver.put(spec::CR, 1, spec::CR_RST.into()).expect("written");
    bench.driver.kick().expect("written");
    assert_eq!(bench.lan.take(), None, "off");
    bench.lan.send(&numbered(OWN, OTHER, 9));
    bench.driver.reach.attend();
    assert_eq!(bench.driver.get(spec::ISR, 2).expect("read"), 0);
    assert_eq!(bench.driver.get(spec::IDR0, 4).expect("read"), u32::from_le_bytes([2, 0, 0, 0]), "kept");
    bench.driver.open(OWN).expect("it opens again");
    bench.driver.xmit(&numbered(OTHER, OWN, 3), Cut::default()).expect("room");
    assert_eq!(bench.lan.take(), Some(numbered(OTHER, OWN, 3)));
    let mut quiescent = Quiescent::new(bench.driver.reach.function);
    quiescent.reset();
    assert_eq!(quiescent.device().counts().resets, 3, "two opens and one by hand");
}
