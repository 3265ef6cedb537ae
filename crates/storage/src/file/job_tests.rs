//! Jobs against a disk that does what kernels may do: moves less than it was asked to, is interrupted, says no.
// UNSAFETY: plays the kernel: copies between the addresses of a step and a vector.

use std::sync::Arc;

use ioplane_memory::{GuestMap, GuestRange, GuestView};

use super::super::arena::Arena;
use super::super::image::Image;
use super::*;
use crate::FileOptions;

const DISK: usize = 1 << 20;

/// A kernel of bad character.
struct Kernel {
    disk: Vec<u8>,
    state: u64,
    /// The transfers that are not multiples of this are refused.
    strict: bool,
    steps: usize,
}

impl Kernel {
    fn random(&mut self, below: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % below as u64) as usize
    }

    fn carry_out(&mut self, step: Step) -> i32 {
        self.steps += 1;
        match self.random(8) {
            0 => return -libc::EINTR,
            1 => return -libc::EAGAIN,
            _ => {}
        }
        let (spans, offset, write): (Vec<(*mut u8, usize)>, u64, bool) = match step {
            Step::Read { at, len, offset, source: Source::Image } => {
                (vec![(at, len as usize)], offset, false)
            }
            Step::Write { at, len, offset } => (vec![(at.cast_mut(), len as usize)], offset, true),
            Step::ReadV { table, count, offset, source: Source::Image }
            | Step::WriteV { table, count, offset } => {
                // SAFETY: a step's table has that many entries.
                let table = unsafe { std::slice::from_raw_parts(table, count as usize) };
                let spans = table.iter().map(|span| (span.iov_base.cast(), span.iov_len)).collect();
                (spans, offset, matches!(step, Step::WriteV { .. }))
            }
            other => panic!("{other:?}"),
        };
        if self.strict && spans.iter().any(|(at, len)| !(*at as usize | len).is_multiple_of(512)) {
            return -libc::EINVAL;
        }
        let total: usize = spans.iter().map(|(_, len)| len).sum();
        let unit = if self.strict { 512 } else { 1 };
        let most = (self.random(total / unit) + 1) * unit;
        let (mut left, mut place) = (most, offset as usize);
        for (at, len) in spans {
            let n = len.min(left);
            // SAFETY: the span is guest memory or a bounce buffer, mapped and at least n long.
            unsafe {
                if write {
                    std::ptr::copy(at, self.disk[place..place + n].as_mut_ptr(), n);
                } else {
                    std::ptr::copy(self.disk[place..place + n].as_ptr(), at, n);
                }
            }
            (left, place) = (left - n, place + n);
        }
        most as i32
    }
}

fn run(kernel: &mut Kernel, job: &mut Job, image: &Image, view: &GuestView, op: &Op<'_>) -> Outcome {
    if let Err(outcome) = job.begin(view, op, image) {
        return outcome;
    }
    loop {
        let step = job.step(Some(view.map()));
        let result = kernel.carry_out(step);
        if let Some(outcome) = job.took(result, image, Some(view.map())) {
            return outcome;
        }
    }
}

fn image(direct: bool) -> Image {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(DISK as u64).unwrap();
    let direct = if direct { crate::Direct::On } else { crate::Direct::Off };
    let mut image = Image::open(&FileOptions { direct, ..FileOptions::new(file.path()) }).unwrap();
    if image.direct {
        // As if statx had told nothing: what the kernel really wants comes out when it says EINVAL.
        (image.memory_mask, image.length_mask) = (0, 0);
    }
    image
}

#[test]
fn short_and_interrupted_transfers_are_carried_to_their_end() {
    let view = GuestView::new(Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
    let (_arena, mut jobs) = Arena::new(1).unwrap();
    let job = &mut jobs[0];
    for strict in [false, true] {
        let image = image(strict);
        let mut kernel = Kernel { disk: vec![0; DISK], state: 88_172_645_463_325_252, strict, steps: 0 };
        for round in 0..400u64 {
            let ranges: Vec<GuestRange> = (0..1 + kernel.random(9) as u64)
                .map(|n| {
                    let crooked = if round % 2 == 0 { 0 } else { kernel.random(512) as u64 };
                    let len = if round % 4 == 3 {
                        1 + kernel.random(30_000)
                    } else {
                        512 * (1 + kernel.random(60))
                    };
                    GuestRange { gpa: n * 40_960 + crooked, len: len as u32 }
                })
                .collect();
            let mut ranges = ranges;
            let total: u64 = ranges.iter().map(|range| u64::from(range.len)).sum();
            let rest = total.next_multiple_of(512) - total;
            ranges.push(GuestRange { gpa: 900_000, len: rest as u32 });
            let total = (total + rest) as usize;
            let offset = kernel.random((DISK - total) / 512) as u64 * 512;
            let wanted: Vec<u8> = (0..total).map(|n| (n as u64 * 7 + round) as u8).collect();
            let mut at = 0;
            for range in &ranges {
                view.write(range.gpa, &wanted[at..at + range.len as usize]).unwrap();
                at += range.len as usize;
            }
            assert_eq!(run(&mut kernel, job, &image, &view, &Op::Write { offset, from: &ranges }), Ok(()));
            assert!(kernel.disk[offset as usize..offset as usize + total] == wanted, "write, round {round}");
            for range in &ranges {
                view.write(range.gpa, &vec![0; range.len as usize]).unwrap();
            }
            assert_eq!(run(&mut kernel, job, &image, &view, &Op::Read { offset, into: &ranges }), Ok(()));
            let mut at = 0;
            for range in &ranges {
                let mut is = vec![0; range.len as usize];
                view.read(range.gpa, &mut is).unwrap();
                assert!(is == wanted[at..at + is.len()], "read, round {round}");
                at += is.len();
            }
        }
        assert!(kernel.steps > 2000);
    }
}

#[test]
fn again_for_ever_is_an_error_in_the_end() {
    let view = GuestView::new(Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
    let (_arena, mut jobs) = Arena::new(1).unwrap();
    let (job, image) = (&mut jobs[0], image(false));
    let op = Op::Read { offset: 0, into: &[GuestRange { gpa: 0, len: 512 }] };
    job.begin(&view, &op, &image).unwrap();
    let mut tries = 0;
    let outcome = loop {
        tries += 1;
        if let Some(outcome) = job.took(-libc::EAGAIN, &image, None) {
            break outcome;
        }
    };
    assert_eq!((outcome, tries), (Err(Fault::Io(libc::EAGAIN)), usize::from(MAX_RETRIES) + 1));
}

#[test]
fn zeroing_finds_a_way() {
    let view = GuestView::new(Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
    let (_arena, mut jobs) = Arena::new(1).unwrap();
    let job = &mut jobs[0];
    for (unmap, refusals) in [(false, 1), (true, 2)] {
        let image = image(false);
        let len = BOUNCE as u64 + 512;
        job.begin(&view, &Op::WriteZeroes { offset: 512, len, unmap }, &image).unwrap();
        for _ in 0..refusals {
            assert!(matches!(job.step(None), Step::Allocate { offset: 512, .. }));
            assert_eq!(job.took(-libc::EOPNOTSUPP, &image, None), None);
        }
        assert!(matches!(job.step(None), Step::Write { offset: 512, len, .. } if len as usize == BOUNCE));
        assert_eq!(job.took(BOUNCE as i32, &image, None), None);
        assert!(matches!(job.step(None), Step::Write { len: 512, .. }));
        assert_eq!(job.took(512, &image, None), Some(Ok(())));
        // Asked once, known from then on; and a discard that cannot be is none.
        assert_eq!(image.can_punch(), !unmap);
        let discard = job.begin(&view, &Op::Discard { offset: 0, len: 512 }, &image);
        assert_eq!(discard, if unmap { Err(Ok(())) } else { Ok(()) });
    }
}

/// A power cut must not take the time of a write back whose data are durable.
#[test]
fn the_first_flush_behind_a_write_makes_its_time_durable() {
    let view = GuestView::new(Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
    let (_arena, mut jobs) = Arena::new(2).unwrap();
    let [job, other] = &mut jobs[..] else { panic!("two jobs") };
    let image = image(false);
    let flush = |job: &mut Job, result: i32| {
        job.begin(&view, &Op::Flush, &image).unwrap();
        let Step::Sync { full } = job.step(None) else { panic!("it is a flush") };
        (full, job.took(result, &image, None).unwrap())
    };
    assert_eq!(flush(job, 0), (true, Ok(())), "whoever had it before may have written");
    assert_eq!(flush(job, 0), (false, Ok(())), "nothing was written");
    let write = Op::Write { offset: 0, from: &[GuestRange { gpa: 0, len: 512 }] };
    other.begin(&view, &write, &image).unwrap();
    assert_eq!(flush(job, 0), (false, Ok(())), "a write is under way");
    other.step(None);
    assert_eq!(other.took(512, &image, None), Some(Ok(())));
    assert_eq!(flush(job, -libc::ENOSPC), (true, Err(Fault::of_errno(libc::ENOSPC))));
    // Through the page cache no flush is good any more after that.
    let image = self::image(false);
    for op in [write, Op::Discard { offset: 0, len: 512 }] {
        other.begin(&view, &op, &image).unwrap();
        other.step(None);
        assert_eq!(other.took(512, &image, None), Some(Ok(())));
    }
    let mut full = Vec::new();
    for _ in 0..2 {
        job.begin(&view, &Op::Flush, &image).unwrap();
        full.push(matches!(job.step(None), Step::Sync { full: true }));
        assert_eq!(job.took(0, &image, None), Some(Ok(())));
    }
    assert_eq!(full, [true, false]);
}

/// The kernel tells a failed write-back once for each open file (`file_check_and_advance_wb_err`).
#[test]
fn of_two_flushes_at_once_both_fail() {
    let view = GuestView::new(Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
    let (_arena, mut jobs) = Arena::new(2).unwrap();
    let image = image(false);
    for job in &mut *jobs {
        job.begin(&view, &Op::Flush, &image).unwrap();
        job.step(None);
    }
    let wrong = Some(Err(Fault::of_errno(libc::EIO)));
    assert_eq!([jobs[0].took(-libc::EIO, &image, None), jobs[1].took(0, &image, None)], [wrong; 2]);
}
