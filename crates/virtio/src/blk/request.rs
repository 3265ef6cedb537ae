//! One virtio-blk request, out of the buffers of its chain (5.2.6).

use ioplane_memory::{GuestRange, GuestView};

use super::spec::*;
use crate::buffers::Reader;
use crate::ring::{Chain, RingFault};

/// What a request asks for, with its data buffers left in the parser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlkRequest {
    /// Disk to guest.
    Read {
        /// Byte offset on the disk.
        offset: u64,
    },
    /// Guest to disk.
    Write {
        /// Byte offset on the disk.
        offset: u64,
    },
    /// Make durable.
    Flush,
    /// Tell the name.
    Id,
    /// Forget a range.
    Discard {
        /// Byte offset on the disk.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Zero a range.
    WriteZeroes {
        /// Byte offset on the disk.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The space may be freed.
        unmap: bool,
    },
    /// Well-formed, and wrong: answer with this status.
    Refuse(u8),
}

/// Parses requests; one for each poller, without allocation after [`Parser::new`].
#[derive(Debug)]
pub struct Parser {
    data: Vec<GuestRange>,
    data_bytes: u64,
    status: u64,
}

impl Default for Parser {
    fn default() -> Self {
        Self::new()
    }
}

impl Parser {
    /// An empty parser.
    pub fn new() -> Self {
        Parser { data: Vec::with_capacity(crate::ring::MAX_BUFFERS + 1), data_bytes: 0, status: 0 }
    }

    /// The data buffers of the request parsed last: those the device writes for a read, those it reads for the others.
    #[inline]
    pub fn data(&self) -> &[GuestRange] {
        &self.data
    }

    /// Bytes of [`Parser::data`].
    #[inline]
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Guest address of the status byte.
    #[inline]
    pub fn status(&self) -> u64 {
        self.status
    }

    /// Reads the request of `chain`, whose head is `head`. A fault means that it cannot even be answered.
    #[inline]
    pub fn parse(&mut self, view: &GuestView, chain: &Chain, head: u16) -> Result<BlkRequest, RingFault> {
        self.data.clear();
        self.data_bytes = 0;
        if chain.readable_bytes() < HEADER_BYTES || chain.writable_bytes() == 0 {
            return Err(RingFault::NoStatus(head));
        }
        // Drivers may split buffers as they like (2.7.4.1): the status is the last writable byte, the header the first 16
        // readable ones.
        let status = chain.writable().iter().rev().find(|r| r.len != 0);
        let status = status.ok_or(RingFault::NoStatus(head))?;
        self.status = status.gpa.checked_add(u64::from(status.len) - 1).ok_or(RingFault::NoStatus(head))?;
        // A status byte that cannot be written is found out before anything is done.
        view.iovec(GuestRange { gpa: self.status, len: 1 })?;
        // Written when the request is done; the line is the driver's processor's until then.
        view.prefetch_store(GuestRange { gpa: self.status, len: 1 });
        if chain.overlong() {
            return Ok(BlkRequest::Refuse(VIRTIO_BLK_S_IOERR));
        }
        let header = self.header(view, chain)?;
        let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let sector = u64::from_le_bytes([
            header[8], header[9], header[10], header[11], header[12], header[13], header[14], header[15],
        ]);
        Ok(match kind {
            VIRTIO_BLK_T_IN => {
                self.keep(chain.writable(), 0, chain.writable_bytes() - 1);
                self.at(sector)
                    .map_or(BlkRequest::Refuse(VIRTIO_BLK_S_IOERR), |offset| BlkRequest::Read { offset })
            }
            VIRTIO_BLK_T_OUT => {
                self.keep(chain.readable(), HEADER_BYTES, chain.readable_bytes() - HEADER_BYTES);
                self.at(sector)
                    .map_or(BlkRequest::Refuse(VIRTIO_BLK_S_IOERR), |offset| BlkRequest::Write { offset })
            }
            VIRTIO_BLK_T_FLUSH => BlkRequest::Flush,
            VIRTIO_BLK_T_GET_ID => {
                self.keep(chain.writable(), 0, chain.writable_bytes() - 1);
                if self.data_bytes < VIRTIO_BLK_ID_BYTES as u64 {
                    BlkRequest::Refuse(VIRTIO_BLK_S_IOERR)
                } else {
                    BlkRequest::Id
                }
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                self.keep(chain.readable(), HEADER_BYTES, chain.readable_bytes() - HEADER_BYTES);
                self.segment(view, kind)?
            }
            _ => BlkRequest::Refuse(VIRTIO_BLK_S_UNSUPP),
        })
    }

    #[inline]
    fn header(&self, view: &GuestView, chain: &Chain) -> Result<[u8; 16], RingFault> {
        let mut header = [0u8; 16];
        Reader::new(view, chain.readable()).read(&mut header)?;
        Ok(header)
    }

    /// Keeps `bytes` of `ranges` from `skip` on as the data.
    #[inline]
    fn keep(&mut self, ranges: &[GuestRange], skip: u64, bytes: u64) {
        self.data_bytes = cut(ranges, skip, bytes, &mut self.data);
    }

    /// Whether the driver kept to the `seg_max` it was told.
    #[inline]
    fn within_seg_max(&self) -> bool {
        self.data.len() <= SEG_MAX as usize
    }

    /// The byte offset of `sector` if data may be transferred there at all.
    #[inline]
    fn at(&self, sector: u64) -> Option<u64> {
        if !self.data_bytes.is_multiple_of(SECTOR) || !self.within_seg_max() {
            return None;
        }
        sector.checked_mul(SECTOR)
    }

    /// The one segment of a discard or write-zeroes request (we offer one).
    fn segment(&self, view: &GuestView, kind: u32) -> Result<BlkRequest, RingFault> {
        if self.data_bytes != SEGMENT_BYTES {
            return Ok(BlkRequest::Refuse(VIRTIO_BLK_S_IOERR));
        }
        let mut bytes = [0u8; SEGMENT_BYTES as usize];
        Reader::new(view, &self.data).read(&mut bytes)?;
        let word = u128::from_le_bytes(bytes);
        let (sector, sectors, flags) = (word as u64, (word >> 64) as u32, (word >> 96) as u32);
        let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
        if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || (kind == VIRTIO_BLK_T_DISCARD && unmap) {
            return Ok(BlkRequest::Refuse(VIRTIO_BLK_S_UNSUPP));
        }
        let Some(offset) = sector.checked_mul(SECTOR).filter(|_| sectors <= MAX_DISCARD_SECTORS) else {
            return Ok(BlkRequest::Refuse(VIRTIO_BLK_S_IOERR));
        };
        let len = u64::from(sectors) * SECTOR;
        Ok(if kind == VIRTIO_BLK_T_DISCARD {
            BlkRequest::Discard { offset, len }
        } else {
            BlkRequest::WriteZeroes { offset, len, unmap }
        })
    }
}

/// What a header seems to ask for before its request is taken, if it is a transfer: whether to read, and from which byte of the disk on.
#[inline]
pub(super) fn expected_transfer(header: &[u8; HEADER_BYTES as usize]) -> Option<(bool, u64)> {
    let word = u128::from_le_bytes(*header);
    let (kind, sector) = (word as u32, (word >> 64) as u64);
    matches!(kind, VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT)
        .then(|| sector.checked_mul(SECTOR).map(|offset| (kind == VIRTIO_BLK_T_IN, offset)))
        .flatten()
}

/// Adds to `out` what `ranges` have from byte `skip` on, at most `bytes`; says how many bytes those are.
#[inline]
pub(super) fn cut(ranges: &[GuestRange], mut skip: u64, bytes: u64, out: &mut Vec<GuestRange>) -> u64 {
    let mut left = bytes;
    for range in ranges {
        let len = u64::from(range.len);
        if skip >= len {
            skip -= len;
            continue;
        }
        let take = (len - skip).min(left);
        if take == 0 {
            break;
        }
        // The address may wrap; then no region holds it, and the channel says so.
        out.push(GuestRange { gpa: range.gpa.wrapping_add(skip), len: take as u32 });
        left -= take;
        skip = 0;
    }
    bytes - left
}
