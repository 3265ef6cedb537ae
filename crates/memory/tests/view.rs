//! Which region an address is in: the search against a look at each.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_memory::{GuestFault, GuestMap, GuestRange, GuestView, MemoryRegion, PAGE, RegionSpec};
use proptest::prelude::*;
use rustix::fs::MemfdFlags;

/// Pages of guest addresses that regions lie in.
const PAGES: u64 = 24;

/// Regions of whole pages, in any order; those that overlap one before them are left out. Each byte of a region is the region's number.
fn map(wanted: &[(u64, u64)]) -> GuestMap {
    let mut map = GuestMap::default();
    for (number, (first, pages)) in wanted.iter().enumerate() {
        let file: OwnedFd = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, &vec![number as u8; (pages * PAGE) as usize]).unwrap();
        let spec = RegionSpec { gpa: first * PAGE, len: pages * PAGE, user: first * PAGE, offset: 0, file };
        if let Ok(more) = map.with(MemoryRegion::map(spec).unwrap()) {
            map = more;
        }
    }
    map
}

/// The region that holds all of it, by a look at each.
fn linear(map: &GuestMap, gpa: u64, len: u64) -> Option<&MemoryRegion> {
    map.regions().iter().find(|region| {
        gpa >= region.gpa() && u128::from(gpa) + u128::from(len) <= u128::from(region.gpa() + region.len())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_region_found_is_the_one_that_holds_it(
        regions in prop::collection::vec((0..PAGES, 1..4u64), 0..12),
        asked in prop::collection::vec((0..(PAGES + 4) * 8, -1..=1i64, 1..3 * PAGE as u32), 64),
    ) {
        let map = Arc::new(map(&regions));
        let view = GuestView::new(map.clone());
        for (eighth, beside, len) in asked {
            // Often beside the border of a page.
            let gpa = (eighth * PAGE / 8).saturating_add_signed(beside);
            let found = view.iovec(GuestRange { gpa, len });
            match linear(&map, gpa, len.into()) {
                Some(region) => {
                    let at = region.host_address() + (gpa - region.gpa());
                    prop_assert_eq!(found.map(|found| found.base() as u64), Ok(at));
                    let number = view.bytes::<1>(gpa).unwrap()[0];
                    prop_assert_eq!(regions[usize::from(number)].0 * PAGE, region.gpa());
                }
                None => prop_assert_eq!(
                    found.err(),
                    Some(GuestFault::OutsideMemory { gpa, len: len.into() })
                ),
            }
        }
    }
}

#[test]
fn a_hole_and_the_ends_of_the_address_space() {
    let map = Arc::new(map(&[(2, 1), (4, 2), (8, 1)]));
    let view = GuestView::new(map);
    for (page, inside) in
        [(0, false), (1, false), (2, true), (3, false), (4, true), (5, true), (6, false), (8, true)]
    {
        assert_eq!(view.bytes::<8>(page * PAGE).is_ok(), inside, "page {page}");
    }
    assert!(view.bytes::<8>(9 * PAGE - 4).is_err() && view.bytes::<1>(u64::MAX).is_err());
    assert!(view.bytes::<0>(2 * PAGE).is_ok() && view.bytes::<0>(3 * PAGE).is_err());
}
