//! The bytes of a chain's buffers, in order, whatever pieces the driver has cut them into (virtio 1.3, 2.7.4.1).

use ioplane_memory::{GuestFault, GuestRange, GuestView, Span};

/// Where one is in a list of buffers.
#[derive(Debug, Clone)]
struct Cursor<'a> {
    ranges: &'a [GuestRange],
    /// Bytes of the first of `ranges` that are behind.
    behind: u32,
}

impl Cursor<'_> {
    /// The next at most `bytes` in one piece; `None` at the end.
    #[inline]
    fn next(&mut self, bytes: usize) -> Option<GuestRange> {
        loop {
            let first = self.ranges.first()?;
            let left = first.len - self.behind;
            if left == 0 {
                (self.ranges, self.behind) = (&self.ranges[1..], 0);
                continue;
            }
            let len = left.min(u32::try_from(bytes).unwrap_or(u32::MAX));
            // The address may wrap; then no region holds it, or it is the guest's own all the same.
            let gpa = first.gpa.wrapping_add(self.behind.into());
            self.behind += len;
            return Some(GuestRange { gpa, len });
        }
    }
}

/// Reads buffers from the first byte on.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    view: &'a GuestView,
    cursor: Cursor<'a>,
}

impl<'a> Reader<'a> {
    /// At the first byte of `ranges`.
    #[inline]
    pub fn new(view: &'a GuestView, ranges: &'a [GuestRange]) -> Self {
        Reader { view, cursor: Cursor { ranges, behind: 0 } }
    }

    /// Leaves `bytes` out.
    #[inline]
    pub fn skip(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let Some(range) = self.cursor.next(bytes) else { return };
            bytes -= range.len as usize;
        }
    }

    /// What has not been read, buffer by buffer.
    #[inline]
    pub fn rest(mut self) -> impl Iterator<Item = GuestRange> {
        std::iter::from_fn(move || self.cursor.next(usize::MAX))
    }

    /// Fills `out`, or its beginning if the buffers end before; says how many bytes.
    #[inline]
    pub fn read(&mut self, out: &mut [u8]) -> Result<usize, GuestFault> {
        let mut filled = 0;
        while filled < out.len() {
            let Some(range) = self.cursor.next(out.len() - filled) else { break };
            self.view.read(range.gpa, &mut out[filled..filled + range.len as usize])?;
            filled += range.len as usize;
        }
        Ok(filled)
    }
}

/// Writes buffers from the first byte on; every store is marked in the dirty log.
#[derive(Debug)]
pub struct Writer<'a> {
    view: &'a GuestView,
    cursor: Cursor<'a>,
}

impl<'a> Writer<'a> {
    /// At the first byte of `ranges`.
    #[inline]
    pub fn new(view: &'a GuestView, ranges: &'a [GuestRange]) -> Self {
        Writer { view, cursor: Cursor { ranges, behind: 0 } }
    }

    /// Writes `bytes`, or as many as fit; says how many.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, GuestFault> {
        let mut written = 0;
        while written < bytes.len() {
            let Some(range) = self.cursor.next(bytes.len() - written) else { break };
            self.view.prefetch_store_after(range, self.cursor.ranges.get(1));
            self.view.write(range.gpa, &bytes[written..written + range.len as usize])?;
            written += range.len as usize;
        }
        Ok(written)
    }

    /// Writes bytes of another guest's memory, or as many as fit; says how many.
    #[inline]
    pub fn write_span(&mut self, from: &Span<'_>) -> Result<usize, GuestFault> {
        let mut written = 0;
        while written < from.len() {
            let Some(range) = self.cursor.next(from.len() - written) else { break };
            self.view.prefetch_store_after(range, self.cursor.ranges.get(1));
            self.view.copy_from_span(range.gpa, from, written, range.len as usize)?;
            written += range.len as usize;
        }
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ioplane_memory::GuestMap;
    use std::sync::Arc;

    #[test]
    fn pieces_are_one_stream() {
        let view = GuestView::new(Arc::new(GuestMap::anonymous(4096).unwrap()));
        let range = |gpa, len| GuestRange { gpa, len };
        let ranges = [range(100, 3), range(300, 0), range(200, 4), range(400, 1)];
        let mut writer = Writer::new(&view, &ranges);
        assert_eq!(writer.write(&[1, 2]).unwrap(), 2);
        assert_eq!(writer.write(&[3, 4, 5, 6, 7, 8, 9]).unwrap(), 6, "the ninth byte has no room");
        let mut all = [0; 16];
        assert_eq!(Reader::new(&view, &ranges).read(&mut all).unwrap(), 8);
        assert_eq!(all[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
        let mut reader = Reader::new(&view, &ranges);
        reader.skip(2);
        assert_eq!(reader.clone().rest().collect::<Vec<_>>(), [range(102, 1), range(200, 4), range(400, 1)]);
        let other = GuestView::new(Arc::new(GuestMap::anonymous(4096).unwrap()));
        let into = [range(7, 2), range(20, 4)];
        let mut writer = Writer::new(&other, &into);
        assert_eq!(writer.write_span(&view.span(100, 3).unwrap()).unwrap(), 3);
        assert_eq!(
            writer.write_span(&view.span(200, 4).unwrap()).unwrap(),
            3,
            "the seventh byte has no room"
        );
        assert_eq!((other.bytes::<2>(7), other.bytes::<4>(20)), (Ok([1, 2]), Ok([3, 4, 5, 6])));
        let mut two = [0; 2];
        assert_eq!((reader.read(&mut two).unwrap(), two), (2, [3, 4]));
        reader.skip(100);
        assert_eq!(reader.read(&mut two).unwrap(), 0);
        let outside = [range(0, 1), range(1 << 40, 1)];
        assert!(Reader::new(&view, &outside).read(&mut two).is_err());
        assert!(Writer::new(&view, &outside).write(&two).is_err());
    }
}
