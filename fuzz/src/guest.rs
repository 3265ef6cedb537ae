//! A guest's memory with a copy beside it, to find stores that nobody allowed.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use ioplane_memory::{GuestMap, GuestView};
use ioplane_virtio::spec::split::*;
use ioplane_virtio::{Batch, BufferAccess, MOST_PLAIN, Ring, RingLayout};

/// Bytes of the guest's memory.
pub const MEMORY: u64 = 128 << 10;
/// Buffers are taken from here on, as a rule.
pub const BUFFERS: u64 = 0x8000;
/// Indirect tables are put here, as a rule.
pub const TABLES: u64 = 0x6000;

thread_local! {
    static MAP: Arc<GuestMap> = Arc::new(GuestMap::anonymous(MEMORY).expect("guest memory"));
}

/// Memory and what it should hold.
pub struct Guest {
    /// The map, the same for every run on a thread.
    pub map: Arc<GuestMap>,
    view: GuestView,
    shadow: Vec<u8>,
}

/// First byte and one past the last.
pub type Span = (u64, u64);

impl Guest {
    /// All zeros.
    pub fn zeroed() -> Self {
        let map = MAP.with(Clone::clone);
        let view = GuestView::new(map.clone());
        let shadow = vec![0; MEMORY as usize];
        view.write(0, &shadow).expect("all of it");
        Guest { map, view, shadow }
    }

    /// A view of it.
    pub fn view(&self) -> GuestView {
        GuestView::new(self.map.clone())
    }

    /// The guest writes; what lies outside memory is dropped.
    pub fn poke(&mut self, gpa: u64, bytes: &[u8]) {
        let len = MEMORY.saturating_sub(gpa).min(bytes.len() as u64) as usize;
        if len > 0 && self.view.write(gpa, &bytes[..len]).is_ok() {
            self.shadow[gpa as usize..gpa as usize + len].copy_from_slice(&bytes[..len]);
        }
    }

    /// The guest reads; zeros outside memory.
    pub fn peek<const N: usize>(&self, gpa: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let _ = self.view.read(gpa, &mut bytes);
        bytes
    }

    /// Two bytes.
    pub fn peek_u16(&self, gpa: u64) -> u16 {
        u16::from_le_bytes(self.peek(gpa))
    }

    /// Takes over what the device stored since the last time, and gives the first byte of each page that changed.
    /// With `allowed`, a store outside of those spans is a finding.
    pub fn settle(&mut self, allowed: Option<&[Span]>) -> Vec<u64> {
        let mut now = vec![0; MEMORY as usize];
        self.view.read(0, &mut now).expect("all of it");
        let mut pages = Vec::new();
        for (page, (new, old)) in now.chunks(4096).zip(self.shadow.chunks(4096)).enumerate() {
            if new == old {
                continue;
            }
            let base = page as u64 * 4096;
            pages.push(base);
            let Some(allowed) = allowed else { continue };
            for at in (0..4096).filter(|at| new[*at] != old[*at]).map(|at| base + at as u64) {
                let fine = allowed.iter().any(|(from, to)| (*from..*to).contains(&at));
                assert!(fine, "a store to {at:#x}, outside of what the driver offered: {allowed:x?}");
            }
        }
        self.shadow = now;
        pages
    }

    /// Every span that descriptors of the ring at `layout` let the device write, whatever chains they are in; `false`
    /// beside it if the device can change the descriptors themselves, so that the answer does not hold for long.
    pub fn writable(&self, layout: &RingLayout) -> (Vec<Span>, bool) {
        let size = u64::from(layout.size);
        let mut tables = vec![(layout.desc, layout.desc + DESC_SIZE * size)];
        let mut spans = vec![(layout.used, layout.used + used_bytes(layout.size))];
        for index in 0..size {
            let (addr, len, flags) = self.descriptor(layout.desc + DESC_SIZE * index);
            if flags & VIRTQ_DESC_F_INDIRECT != 0 {
                if addr >= MEMORY {
                    continue;
                }
                tables.push((addr, addr + u64::from(len)));
                for entry in 0..(u64::from(len) / DESC_SIZE).min(1024) {
                    let (addr, len, flags) = self.descriptor(addr + DESC_SIZE * entry);
                    if flags & VIRTQ_DESC_F_WRITE != 0 {
                        spans.push((addr, addr.saturating_add(u64::from(len))));
                    }
                }
            } else if flags & VIRTQ_DESC_F_WRITE != 0 {
                spans.push((addr, addr.saturating_add(u64::from(len))));
            }
        }
        let steady = !spans.iter().any(|(from, to)| tables.iter().any(|(low, high)| from < high && low < to));
        (spans, steady)
    }

    fn descriptor(&self, gpa: u64) -> (u64, u32, u16) {
        let word = u128::from_le_bytes(self.peek(gpa));
        (word as u64, (word >> 64) as u32, (word >> 96) as u16)
    }
}

/// One descriptor's bytes.
pub fn descriptor(addr: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    (u128::from(addr) | u128::from(len) << 64 | u128::from(flags) << 96 | u128::from(next) << 112)
        .to_le_bytes()
}

/// Where a ring may be: as a rule where drivers put it, now and then anywhere.
pub fn layout(input: &mut Unstructured<'_>) -> Result<RingLayout> {
    let mut layout =
        RingLayout { size: 1 << input.int_in_range(0..=6)?, desc: 0x1000, avail: 0x3000, used: 0x4000 };
    if input.ratio(1, 16)? {
        layout.size = input.arbitrary()?;
    }
    for part in [&mut layout.desc, &mut layout.avail, &mut layout.used] {
        if input.ratio(1, 24)? {
            *part = address(input)?;
        }
    }
    Ok(layout)
}

/// Whether nothing of the ring overlaps with another part of it, and all of it is in memory.
pub fn is_usual(layout: &RingLayout) -> bool {
    let usual = RingLayout { size: layout.size, desc: 0x1000, avail: 0x3000, used: 0x4000 };
    *layout == usual && layout.size <= 64
}

/// An address: mostly of a buffer, now and then near an edge, or anything.
pub fn address(input: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match input.int_in_range(0..=11u8)? {
        0..=7 => BUFFERS + u64::from(input.arbitrary::<u16>()?),
        8 => u64::from(input.arbitrary::<u16>()?) & !15,
        9 => MEMORY - u64::from(input.arbitrary::<u8>()?),
        10 => u64::MAX - u64::from(input.arbitrary::<u16>()?),
        _ => input.arbitrary()?,
    })
}

/// Takes plain requests ahead and gives them all back, which is as if nothing had happened: the heads that are to be taken
/// next, one by one.
pub fn taken_ahead(ring: &mut Ring, input: &mut Unstructured<'_>) -> Result<Vec<u16>> {
    let (touch, most) =
        (*input.choose(&[BufferAccess::Load, BufferAccess::Store])?, input.int_in_range(0..=MOST_PLAIN + 1)?);
    let (base, before) = (ring.base(), ring.in_flight_heads());
    let mut batch = Batch::default();
    ring.take_plain(touch, most, &mut batch);
    let count = batch.buffers().len();
    assert!(count <= most.min(MOST_PLAIN), "more than was asked for");
    let mut heads = ring.in_flight_heads();
    batch.settle(ring, std::iter::empty());
    assert!(batch.is_empty() && ring.base() == base && ring.in_flight_heads() == before, "a trace was left");
    heads.drain(..heads.len() - count);
    Ok(heads)
}
