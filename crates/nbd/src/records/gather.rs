//! Bytes that a system call would gather, copied for TLS in its place.

#![allow(unsafe_code)]
// UNSAFETY: reads memory by address, by the promise of whoever has put the list together for the kernel.

use ioplane_memory::Span;

/// The bytes of a list of parts, which are copied one after the other.
pub(crate) struct Gathering<'a> {
    parts: &'a [libc::iovec],
    /// Of the first part, what was copied.
    skip: usize,
}

impl<'a> Gathering<'a> {
    /// From the beginning.
    ///
    /// # Safety
    /// As long as it lives, every part is memory of ours that is not written to, or guest memory that is kept mapped.
    pub unsafe fn new(parts: &'a [libc::iovec]) -> Gathering<'a> {
        Gathering { parts, skip: 0 }
    }

    /// Copies the next bytes, as many as `into` has, or all that are left.
    pub fn copy(&mut self, mut into: &mut [u8]) {
        while let [part, rest @ ..] = self.parts
            && !into.is_empty()
        {
            // SAFETY: by the promise of `new`.
            let span = unsafe { Span::of_parts(part.iov_base.cast(), part.iov_len) };
            let (here, after) = into.split_at_mut(into.len().min(span.len() - self.skip));
            span.read(self.skip, here);
            self.skip += here.len();
            if self.skip == span.len() {
                (self.parts, self.skip) = (rest, 0);
            }
            into = after;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_copied_across_their_borders() {
        let bytes: Vec<u8> = (0..10).collect();
        let part = |at: usize, len: usize| libc::iovec {
            iov_base: bytes[at..].as_ptr().cast_mut().cast(),
            iov_len: len,
        };
        let parts = [part(0, 3), part(3, 0), part(3, 1), part(5, 5)];
        // SAFETY: memory of ours that nobody writes to.
        let mut gathering = unsafe { Gathering::new(&parts) };
        let mut all = Vec::new();
        for len in [2, 4, 0, 3] {
            let mut some = vec![0; len];
            gathering.copy(&mut some);
            all.extend(some);
        }
        assert_eq!(all, [0, 1, 2, 3, 5, 6, 7, 8, 9]);
    }
}
