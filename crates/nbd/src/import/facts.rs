//! What the handshake has told of the export.

use crate::spec::{
    NBD_FLAG_CAN_MULTI_CONN, NBD_FLAG_READ_ONLY, NBD_FLAG_SEND_FLUSH, NBD_FLAG_SEND_TRIM,
    NBD_FLAG_SEND_WRITE_ZEROES,
};

/// Most bytes of one read or write: the kernel copies them while a poll waits (docs/decisions/0017-work-per-poll.md).
const SLICE: u32 = 256 << 10;
/// Most bytes of one trim or write-zeroes, so that none takes as long as a server that is silent.
const FREED: u32 = 128 << 20;

/// What is known of an export, fixed while it is imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    /// Size when it was looked at, a multiple of [`Facts::logical_block`]: what is beyond cannot be addressed. An import's own is
    /// [`super::size::ExportSize`].
    pub bytes: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Offsets and lengths are multiples of it (a power of two).
    pub minimum_block: u32,
    /// Unit in which writes are cheap (a power of two).
    pub preferred_block: u32,
    /// Most bytes of one read or write.
    pub maximum_payload: u32,
}

impl Facts {
    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    pub fn read_only(&self) -> bool {
        self.has(NBD_FLAG_READ_ONLY)
    }

    pub fn can_flush(&self) -> bool {
        self.has(NBD_FLAG_SEND_FLUSH)
    }

    pub fn can_trim(&self) -> bool {
        self.has(NBD_FLAG_SEND_TRIM)
    }

    pub fn can_write_zeroes(&self) -> bool {
        self.has(NBD_FLAG_SEND_WRITE_ZEROES)
    }

    pub fn can_multi_conn(&self) -> bool {
        self.has(NBD_FLAG_CAN_MULTI_CONN)
    }

    pub fn logical_block(&self) -> u32 {
        self.minimum_block.max(512)
    }

    /// Most bytes of one read or write request.
    pub fn slice(&self) -> u32 {
        let block = self.logical_block();
        (self.maximum_payload.min(SLICE) / block * block).max(block)
    }

    /// Most bytes of one request that carries no data.
    pub fn freed(&self) -> u32 {
        FREED
    }

    /// What is wrong with an export in place of this one, which has `bytes` by now, after a reconnection. `grows`: it is known to be the same, which may have grown.
    pub fn misfit(&self, now: &Facts, bytes: u64, grows: bool) -> Option<String> {
        // What requests in flight and the guest's driver count on.
        let used =
            NBD_FLAG_SEND_FLUSH | NBD_FLAG_SEND_TRIM | NBD_FLAG_SEND_WRITE_ZEROES | NBD_FLAG_CAN_MULTI_CONN;
        let gone = self.flags & !now.flags & used;
        if now.bytes < bytes || (now.bytes > bytes && !grows) {
            Some(format!("the export has {} bytes now, and had {bytes}", now.bytes))
        } else if now.read_only() && !self.read_only() {
            Some("the export is read-only now".into())
        } else if gone != 0 {
            Some(format!("the server lacks transmission flags {gone:#x} that it had"))
        } else if now.minimum_block > self.minimum_block || now.maximum_payload < self.slice() {
            Some("the server takes smaller or less aligned requests only than before".into())
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: Facts = Facts {
        bytes: 1 << 20,
        flags: 0xffff,
        minimum_block: 1,
        preferred_block: 4096,
        maximum_payload: 1 << 25,
    };

    #[test]
    fn what_a_server_may_change_and_what_not() {
        let writable = Facts { flags: FACTS.flags & !NBD_FLAG_READ_ONLY, ..FACTS };
        let misfit = |had: &Facts, now: &Facts| had.misfit(now, had.bytes, false);
        assert_eq!(misfit(&FACTS, &FACTS), None);
        assert_eq!(
            misfit(&writable, &Facts { preferred_block: 512, maximum_payload: 1 << 20, ..writable }),
            None
        );
        for (now, word) in [
            (Facts { bytes: 512, ..writable }, "bytes now"),
            (Facts { bytes: 2 << 20, ..writable }, "bytes now"),
            (FACTS, "read-only"),
            (Facts { flags: writable.flags & !NBD_FLAG_SEND_TRIM, ..writable }, "0x20"),
            (Facts { minimum_block: 4096, ..writable }, "aligned"),
            (Facts { maximum_payload: 4096, ..writable }, "smaller"),
        ] {
            let misfit = misfit(&writable, &now).unwrap();
            assert!(misfit.contains(word), "{misfit}");
        }
        // The same export may have grown, and is never smaller than it has been.
        let grown = Facts { bytes: 2 << 20, ..writable };
        assert_eq!(writable.misfit(&grown, 1 << 20, true), None);
        assert!(writable.misfit(&grown, 4 << 20, true).is_some());
    }

    #[test]
    fn requests_are_cut_to_blocks_of_the_server() {
        let slice =
            |minimum_block, maximum_payload| Facts { minimum_block, maximum_payload, ..FACTS }.slice();
        assert_eq!(slice(1, 1 << 25), SLICE);
        assert_eq!(slice(1, 70_000), 69_632);
        assert_eq!(slice(4096, 70_000), 69_632);
        assert_eq!(slice(4096, 4096), 4096);
    }
}
