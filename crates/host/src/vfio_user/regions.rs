//! Regions: what they are, what of them can be mapped, and the accesses to the rest.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ioplane_device::{Access, RegisterAddress};
use ioplane_pci::{Bar, Function, Touch};
use rustix::fs::{Mode, OFlags};
use vfio_bindings::bindings::vfio;
use zerocopy::IntoBytes;

use super::connection::{Connection, Message, Reply};
use super::fault::ClientFault;
use super::session::Session;
use super::spec::{Area, CapHeader, RegionAccess, RegionInfo, Shadows, Sparse};

/// Pages of one kind in one file: a client takes one descriptor for all mapped pages of a region, at one distance.
struct Offer {
    file: Arc<OwnedFd>,
    base: u64,
    areas: Vec<Area>,
}

/// The first pages of that kind and all that lie in the same file as they do in the BAR. Others stay trapped.
fn offer(bar: &Bar, touch: Touch) -> Option<Offer> {
    let usable = || bar.pages().iter().filter(|p| p.touch == touch && p.at >= p.offset);
    let first = usable().next()?;
    let base = first.at - first.offset;
    let areas = usable()
        .filter(|p| Arc::ptr_eq(&p.file, &first.file) && p.at - p.offset == base)
        .map(|p| Area { offset: p.offset, size: p.len })
        .collect();
    Some(Offer { file: first.file.clone(), base, areas })
}

/// The same file, for reading only: the client must not be able to map it for writing.
fn read_only(file: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Capabilities of a region, one after another behind its [`RegionInfo`].
#[derive(Default)]
struct Capabilities(Vec<u8>);

impl Capabilities {
    const START: usize = size_of::<RegionInfo>();

    fn push(&mut self, id: u16, head: &[u8], areas: &[Area], last: bool) {
        let size = size_of::<CapHeader>() + head.len() + size_of_val(areas);
        let next = if last { 0 } else { (Self::START + self.0.len() + size) as u32 };
        self.0.extend(CapHeader { id, version: 1, next }.as_bytes());
        self.0.extend(head);
        self.0.extend(areas.as_bytes());
    }
}

impl<F: Function> Session<F> {
    /// Bytes of a region; zero if the device does not have it.
    fn region_size(&self, index: u32) -> u64 {
        let Some(facts) = &self.facts else { return 0 };
        match index {
            vfio::VFIO_PCI_CONFIG_REGION_INDEX => facts.config_size,
            _ => u8::try_from(index).ok().and_then(|index| facts.bars.bar(index)).map_or(0, |bar| bar.size),
        }
    }

    pub(super) fn region_info(&self, message: &Message) -> Result<Reply, ClientFault> {
        let asked: RegionInfo = message.body()?;
        if asked.index >= vfio::VFIO_PCI_NUM_REGIONS || (asked.argsz as usize) < size_of::<RegionInfo>() {
            return Err(ClientFault::BadValue(
                "DEVICE_GET_REGION_INFO of no region, or with an argsz that holds no reply",
            ));
        }
        let size = self.region_size(asked.index);
        let mut info = RegionInfo { index: asked.index, size, ..RegionInfo::default() };
        if size > 0 {
            info.flags = vfio::VFIO_REGION_INFO_FLAG_READ | vfio::VFIO_REGION_INFO_FLAG_WRITE;
        }
        let bar = u8::try_from(asked.index).ok().and_then(|i| self.facts.as_ref()?.bars.bar(i));
        let room = self.agreed.map_or(0, |agreed| agreed.files);
        let mut files = Vec::new();
        let mut capabilities = Capabilities::default();
        let mapped = bar.and_then(|bar| offer(bar, Touch::Mapped)).filter(|_| room > 0);
        let shadows = bar.and_then(|bar| offer(bar, Touch::Shadow)).filter(|_| {
            self.agreed.is_some_and(|agreed| agreed.shadows) && room > usize::from(mapped.is_some())
        });
        let shadows = shadows.and_then(|offer| Some((read_only(&offer.file).ok()?, offer)));
        if let Some(Offer { file, base, areas }) = mapped {
            info.flags |= vfio::VFIO_REGION_INFO_FLAG_MMAP;
            info.offset = base;
            let head = Sparse { nr_areas: areas.len() as u32, reserved: 0 };
            let id = vfio::VFIO_REGION_INFO_CAP_SPARSE_MMAP as u16;
            capabilities.push(id, head.as_bytes(), &areas, shadows.is_none());
            files.push(file.try_clone().map_err(ClientFault::Broken)?);
        }
        if let Some((file, Offer { base, areas, .. })) = shadows {
            let head = Shadows { nr_areas: areas.len() as u32, descriptor: files.len() as u32, base };
            capabilities.push(super::spec::REGION_CAP_SHADOW, head.as_bytes(), &areas, true);
            files.push(file);
        }
        let whole = size_of::<RegionInfo>() + capabilities.0.len();
        if !capabilities.0.is_empty() {
            info.flags |= vfio::VFIO_REGION_INFO_FLAG_CAPS;
            // Also where they do not fit: QEMU looks at it before it asks again with more room.
            info.cap_offset = Capabilities::START as u32;
        }
        info.argsz = whole as u32;
        let mut body = info.as_bytes().to_vec();
        if asked.argsz as usize >= whole {
            body.extend(&capabilities.0);
        } else {
            files.clear();
        }
        Ok(Reply { body, files })
    }

    /// Checks that `access` lies in a region; tells where that begins, and the widest piece that an access is cut into.
    fn place(
        &self,
        access: &RegionAccess,
    ) -> Result<(impl Fn(u64) -> RegisterAddress + use<F>, usize), ClientFault> {
        let RegionAccess { offset, region, count } = *access;
        let size = self.region_size(region);
        let inside = offset.checked_add(count.into()).is_some_and(|end| end <= size);
        if size == 0 || !inside || count > super::spec::MAX_TRANSFER {
            return Err(ClientFault::NoSuchBytes { region, offset, count });
        }
        let config = region == vfio::VFIO_PCI_CONFIG_REGION_INDEX;
        let at = move |at| {
            if config { RegisterAddress::Config(at) } else { RegisterAddress::Bar(region as u8, at) }
        };
        Ok((at, if config { 4 } else { 8 }))
    }

    pub(super) fn region_read(
        &mut self,
        message: &Message,
        connection: &Connection,
    ) -> Result<Reply, ClientFault> {
        let asked: RegionAccess = message.body()?;
        let (at, widest) = self.place(&asked)?;
        self.board.region_reads.fetch_add(1, Relaxed);
        let mut body = asked.as_bytes().to_vec();
        let data = body.len();
        body.resize(data + asked.count as usize, 0);
        for (offset, piece) in pieces(asked.offset, asked.count as usize, widest) {
            let start = data + (offset - asked.offset) as usize;
            self.access(connection, at(offset), Access::Read(&mut body[start..start + piece]))?;
        }
        Ok(Reply { body, files: Vec::new() })
    }

    pub(super) fn region_write(
        &mut self,
        message: &Message,
        connection: &Connection,
    ) -> Result<Reply, ClientFault> {
        let (asked, data) = message.split::<RegionAccess>()?;
        if data.len() != asked.count as usize {
            return Err(message.bad_size(size_of::<RegionAccess>().saturating_add(asked.count as usize)));
        }
        let (at, widest) = self.place(&asked)?;
        self.board.region_writes.fetch_add(1, Relaxed);
        for (offset, piece) in pieces(asked.offset, data.len(), widest) {
            let start = (offset - asked.offset) as usize;
            self.access(connection, at(offset), Access::Write(&data[start..start + piece]))?;
        }
        Ok(Reply::of(&asked))
    }
}

/// The accesses that `count` bytes at `offset` are made of: one if a guest's instruction can have made it, else the widest that
/// are aligned.
fn pieces(offset: u64, count: usize, widest: usize) -> impl Iterator<Item = (u64, usize)> {
    let end = offset + count as u64;
    let whole = count <= 8;
    let mut at = offset;
    std::iter::from_fn(move || {
        let left = (end - at) as usize;
        if left == 0 {
            return None;
        }
        let piece = if whole {
            left
        } else {
            let aligned = 1 << at.trailing_zeros().min(widest.trailing_zeros());
            // The largest power of two that is left.
            aligned.min(1 << left.ilog2())
        };
        let piece_at = at;
        at += piece as u64;
        Some((piece_at, piece))
    })
}

#[cfg(test)]
mod tests {
    use super::pieces;

    #[test]
    fn wide_accesses_are_cut_where_they_are_aligned() {
        let cut = |offset, count, widest| pieces(offset, count, widest).collect::<Vec<_>>();
        assert_eq!(cut(3, 0, 8), []);
        assert_eq!(cut(3, 7, 4), [(3, 7)], "as the guest made it");
        assert_eq!(cut(0, 12, 4), [(0, 4), (4, 4), (8, 4)]);
        assert_eq!(cut(3, 14, 8), [(3, 1), (4, 4), (8, 8), (16, 1)]);
        assert_eq!(cut(0, 256, 4).len(), 64);
    }
}
