//! Segments as the processor has cached them: what an address is checked against and added to, in 16-bit code and, by FS and GS, in
//! 32-bit mode.

/// One segment register, without what only loading it looks at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedSegment {
    /// What the register holds.
    pub selector: u16,
    /// Linear address of offset 0. 32 bits, except for FS and GS in 64-bit mode.
    pub base: u64,
    /// The last offset.
    pub limit: u32,
    /// It is a segment of memory whose valid offsets begin at 0, and it may be read.
    pub readable: bool,
    /// The same, and it may be written to.
    pub writable: bool,
    /// D or B: code or stack of 32 bits.
    pub big: bool,
}

/// Index of ES in [`crate::SystemRegisters::segments`]: the processor's numbering.
pub const ES: usize = 0;
/// Index of CS.
pub const CS: usize = 1;
/// Index of SS.
pub const SS: usize = 2;
/// Index of DS.
pub const DS: usize = 3;
/// Index of FS.
pub const FS: usize = 4;
/// Index of GS.
pub const GS: usize = 5;

impl CachedSegment {
    /// Not to be used, as a segment register of which nothing is known.
    pub const UNUSABLE: Self =
        Self { selector: 0, base: 0, limit: 0, readable: false, writable: false, big: false };

    /// The linear address of `bytes` bytes at an offset. Outside of 64-bit mode the sum of base and offset is taken modulo 4 GiB
    /// (Intel SDM volume 3, 3.3). `None` if the limit forbids it, or if the bytes lie around the end of 4 GiB.
    pub fn linear(&self, offset: u64, bytes: u64) -> Option<u64> {
        const LAST: u64 = u32::MAX as u64;
        let further = bytes.checked_sub(1)?;
        let last = offset.checked_add(further)?;
        let linear = self.base.wrapping_add(offset) & LAST;
        (last <= u64::from(self.limit) && linear + further <= LAST).then_some(linear)
    }

    /// How many elements of this size lie in the segment from an offset upwards.
    pub(crate) fn elements(&self, offset: u64, bytes: u64) -> u64 {
        (u64::from(self.limit) + 1).saturating_sub(offset) / bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operand_ends_at_the_limit() {
        let real = CachedSegment { base: 0xf_0000, limit: 0xffff, ..CachedSegment::default() };
        assert_eq!(real.linear(0, 1), Some(0xf_0000));
        assert_eq!(real.linear(0xffff, 1), Some(0xf_ffff));
        assert_eq!(real.linear(0xffff, 2), None);
        assert_eq!(real.linear(0x1_0000, 1), None);
        assert_eq!(
            (real.elements(0xfffc, 2), real.elements(0xffff, 2), real.elements(0x1_0000, 1)),
            (2, 0, 0)
        );
        let unreal = CachedSegment { limit: u32::MAX, base: 16, ..real };
        assert_eq!(unreal.linear(0xfee0_0000, 4), Some(0xfee0_0010));
        assert_eq!(unreal.linear(0xffff_ffee, 2), Some(0xffff_fffe));
        assert_eq!(unreal.linear(0xffff_ffef, 2), None, "around the end of 4 GiB");
        assert_eq!(unreal.linear(0xffff_fff0, 2), Some(0), "the sum begins at 0 again");
        // As Linux has its data of each processor: a base that takes addresses down.
        let down = CachedSegment { base: 0xff80_0000, ..unreal };
        assert_eq!(down.linear(0xc170_1000, 4), Some(0xc0f0_1000));
        assert_eq!(unreal.linear(u64::MAX, 2), None);
    }
}
