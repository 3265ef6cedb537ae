//! What a request asks of this export, or why it may not.

use ioplane_storage::Fault;

use crate::spec::*;
use crate::transmission::Request;

/// What an export allows, fixed when a connection begins, but for its size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    /// Size of the disk, as it is when a request is looked at.
    pub bytes: u64,
    /// Unit of offsets and lengths.
    pub block: u32,
    /// Most data of one request.
    pub largest: u32,
    pub read_only: bool,
    /// Structured replies were negotiated.
    pub structured: bool,
    /// Metadata contexts were selected.
    pub contexts: bool,
}

/// What is to be done for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    Read,
    Write,
    Flush,
    Trim,
    WriteZeroes,
    BlockStatus,
}

/// Why a request is refused: error value, and a word for people.
pub(super) type Refused = (u32, &'static str);

impl Terms {
    /// What `request` asks, unless it is `NBD_CMD_DISC`.
    pub fn check(&self, request: &Request) -> Result<Ask, Refused> {
        let (ask, flags) = match request.command {
            NBD_CMD_READ if self.structured => (Ask::Read, NBD_CMD_FLAG_DF),
            NBD_CMD_READ => (Ask::Read, 0),
            NBD_CMD_WRITE => (Ask::Write, 0),
            NBD_CMD_FLUSH => (Ask::Flush, 0),
            NBD_CMD_TRIM => (Ask::Trim, 0),
            NBD_CMD_WRITE_ZEROES => (Ask::WriteZeroes, NBD_CMD_FLAG_NO_HOLE),
            NBD_CMD_BLOCK_STATUS if self.contexts => (Ask::BlockStatus, NBD_CMD_FLAG_REQ_ONE),
            _ => return Err((NBD_EINVAL, "unknown command")),
        };
        // FUA may come with any command.
        if request.flags & !(flags | NBD_CMD_FLAG_FUA) != 0 {
            return Err((NBD_EINVAL, "unknown command flag"));
        }
        match ask {
            Ask::Flush if request.offset != 0 || request.length != 0 => {
                return Err((NBD_EINVAL, "a flush of a range"));
            }
            Ask::Flush => return Ok(ask),
            Ask::Write | Ask::Trim | Ask::WriteZeroes if self.read_only => {
                return Err((NBD_EPERM, "the export is read-only"));
            }
            // An extent of no bytes cannot be said.
            Ask::BlockStatus if request.length == 0 => return Err((NBD_EINVAL, "the status of no bytes")),
            _ => {}
        }
        let block = u64::from(self.block);
        if !request.offset.is_multiple_of(block) || !u64::from(request.length).is_multiple_of(block) {
            return Err((NBD_EINVAL, "not a multiple of the minimum block"));
        }
        let end = request.offset.checked_add(request.length.into());
        if end.is_none_or(|end| end > self.bytes) {
            return Err((beyond_end(ask), "beyond the end of the export"));
        }
        match ask {
            Ask::Read if request.length > self.largest => {
                Err((NBD_EOVERFLOW, "longer than the largest payload"))
            }
            Ask::Write if request.length > self.largest => {
                Err((NBD_EINVAL, "longer than the largest payload"))
            }
            _ => Ok(ask),
        }
    }
}

fn beyond_end(ask: Ask) -> u32 {
    if matches!(ask, Ask::Write | Ask::WriteZeroes) { NBD_ENOSPC } else { NBD_EINVAL }
}

/// The answer to a request that the backing could not do.
pub(super) fn error_of(ask: Ask, fault: Fault) -> Refused {
    match fault {
        Fault::Io(_) => (NBD_EIO, "input or output error of the disk"),
        Fault::NoSpace => (NBD_ENOSPC, "no space left below the disk"),
        Fault::BeyondEnd => (beyond_end(ask), "beyond the end of the disk"),
        Fault::ReadOnly => (NBD_EPERM, "the disk is read-only"),
        Fault::Guest(_) => (NBD_EIO, "no memory for the data"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms {
        bytes: 1 << 20,
        block: 512,
        largest: 64 << 10,
        read_only: false,
        structured: true,
        contexts: true,
    };

    fn error(terms: Terms, command: u16, flags: u16, offset: u64, length: u32) -> u32 {
        let request = Request { flags, command, cookie: 0, offset, length };
        terms.check(&request).map_or_else(|(error, _)| error, |_| 0)
    }

    #[test]
    fn errors_are_those_that_the_specification_names() {
        let check = |command, flags, offset, length| error(TERMS, command, flags, offset, length);
        let end = TERMS.bytes;
        assert_eq!(check(NBD_CMD_READ, NBD_CMD_FLAG_DF, end - 512, 512), 0);
        assert_eq!(check(NBD_CMD_READ, 0, end - 512, 1024), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_READ, 0, u64::MAX - 511, 1024), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_READ, 0, 0, 128 << 10), NBD_EOVERFLOW);
        assert_eq!(check(NBD_CMD_READ, 0, 1, 512), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_READ, 0, 0, 513), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_READ, 0, 0, 0), 0);
        assert_eq!(check(NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 0, 512), 0);
        assert_eq!(check(NBD_CMD_WRITE, 0, end, 512), NBD_ENOSPC);
        assert_eq!(check(NBD_CMD_WRITE, 0, 0, 128 << 10), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_WRITE, NBD_CMD_FLAG_DF, 0, 512), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_TRIM, 0, end, 512), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_TRIM, 0, 0, 1 << 20), 0);
        assert_eq!(check(NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_NO_HOLE, 0, 1 << 20), 0);
        assert_eq!(check(NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FAST_ZERO, 0, 512), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_WRITE_ZEROES, 0, end, 512), NBD_ENOSPC);
        assert_eq!(check(NBD_CMD_FLUSH, 0, 0, 0), 0);
        assert_eq!(check(NBD_CMD_FLUSH, 0, 512, 0), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_BLOCK_STATUS, NBD_CMD_FLAG_REQ_ONE, 0, 1 << 20), 0);
        assert_eq!(check(NBD_CMD_BLOCK_STATUS, 0, 0, 0), NBD_EINVAL);
        assert_eq!(check(NBD_CMD_CACHE, 0, 0, 512), NBD_EINVAL);
        assert_eq!(check(0xffff, 0, 0, 512), NBD_EINVAL);
        let none = Terms { structured: false, contexts: false, ..TERMS };
        assert_eq!(error(none, NBD_CMD_READ, NBD_CMD_FLAG_DF, 0, 512), NBD_EINVAL);
        assert_eq!(error(none, NBD_CMD_BLOCK_STATUS, 0, 0, 512), NBD_EINVAL);
        let read_only = Terms { read_only: true, ..TERMS };
        for command in [NBD_CMD_WRITE, NBD_CMD_TRIM, NBD_CMD_WRITE_ZEROES] {
            assert_eq!(error(read_only, command, 0, end, 513), NBD_EPERM);
        }
        assert_eq!(error(read_only, NBD_CMD_FLUSH, 0, 0, 0), 0);
    }
}
