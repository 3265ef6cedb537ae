//! A vfio-user client for tests: it says what it is told to say, right or wrong, and hears what comes back.

use std::io::{Error, IoSlice, IoSliceMut, Result};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ioplane_host::vfio_user::spec::{
    self, DeviceInfo, DmaAccess, DmaMap, DmaUnmap, Header, IrqInfo, IrqSet, RegionAccess, RegionInfo, Version,
};
use ioplane_memory::GuestView;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use vfio_bindings::bindings::vfio;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Longer than a server may take for anything.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A message from the server.
#[derive(Debug)]
pub struct Answer {
    pub header: Header,
    pub body: Vec<u8>,
    /// What came beside it.
    pub files: Vec<OwnedFd>,
}

impl Answer {
    /// The error number, if it is one.
    pub fn errno(&self) -> Option<i32> {
        (self.header.flags & spec::FLAG_ERROR != 0).then_some(self.header.error as i32)
    }

    /// The body, which must be a success, begins with a `T`.
    pub fn prefix<T: FromBytes + Immutable + KnownLayout>(&self) -> Result<(T, &[u8])> {
        if let Some(errno) = self.errno() {
            return Err(Error::from_raw_os_error(errno));
        }
        T::read_from_prefix(&self.body).map_err(|_| Error::other("a reply that is too short"))
    }
}

/// The client. Its ids count from zero.
#[derive(Debug)]
pub struct VfioUserClient {
    stream: UnixStream,
    next: u16,
}

impl VfioUserClient {
    /// Connects; says nothing yet.
    pub fn connect(path: &Path) -> Result<Self> {
        Self::over(UnixStream::connect(path)?)
    }

    /// On a connected socket.
    pub fn over(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(VfioUserClient { stream, next: 0 })
    }

    /// Connects and agrees on a version as QEMU does.
    pub fn greet(path: &Path) -> Result<Self> {
        let mut client = Self::connect(path)?;
        client.version(Some(r#"{"capabilities":{"max_msg_fds":8,"max_data_xfer_size":1048576}}"#))?;
        Ok(client)
    }

    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends bytes as they are, with descriptors.
    pub fn send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(files));
        }
        let sent =
            rustix::net::sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
        if sent < bytes.len() {
            rustix::net::send(&self.stream, &bytes[sent..], SendFlags::NOSIGNAL)?;
        }
        Ok(())
    }

    /// The bytes of a command, and its id.
    pub fn frame(&mut self, command: u16, body: &[u8]) -> (u16, Vec<u8>) {
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        let size = (size_of::<Header>() + body.len()) as u32;
        let mut bytes = Header { id, command, size, ..Header::default() }.as_bytes().to_vec();
        bytes.extend(body);
        (id, bytes)
    }

    /// Waits for a message.
    pub fn receive(&self) -> Result<Answer> {
        let (mut bytes, mut files) = (Vec::new(), Vec::new());
        self.fill(&mut bytes, size_of::<Header>(), &mut files)?;
        let header = Header::read_from_bytes(&bytes).map_err(|_| Error::other("no header"))?;
        let mut body = Vec::new();
        let len = (header.size as usize).checked_sub(size_of::<Header>());
        self.fill(&mut body, len.ok_or_else(|| Error::other("a size that is too small"))?, &mut files)?;
        Ok(Answer { header, body, files })
    }

    fn fill(&self, bytes: &mut Vec<u8>, wanted: usize, files: &mut Vec<OwnedFd>) -> Result<()> {
        while bytes.len() < wanted {
            let mut part = vec![0; wanted - bytes.len()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let slices = &mut [IoSliceMut::new(&mut part)];
            let got =
                match rustix::net::recvmsg(&self.stream, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                    // A receive with a time limit is not taken up again by the kernel when a child of the test ends.
                    Err(rustix::io::Errno::INTR) => continue,
                    got => got?,
                };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    files.extend(rights);
                }
            }
            if got.bytes == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            bytes.extend(&part[..got.bytes]);
        }
        Ok(())
    }

    /// Answers one command of the server as the specification has it: a read with what this memory has, a write as done or, if the client
    /// `refuses`, as QEMU does with bus mastering off. Says what was written, and where.
    pub fn obey(&self, memory: &GuestView, refuses: bool) -> Result<Option<(u64, Vec<u8>)>> {
        let Answer { header, body, .. } = self.receive()?;
        let (head, data) =
            DmaAccess::read_from_prefix(&body).map_err(|_| Error::other("a command that is too short"))?;
        let mut reply = Vec::new();
        if header.command == spec::DMA_READ {
            let mut bytes = vec![0; head.count as usize];
            memory.read(head.address, &mut bytes).map_err(Error::other)?;
            reply = [head.as_bytes(), &bytes].concat();
        }
        let refused = refuses && header.command == spec::DMA_WRITE;
        let flags = spec::TYPE_REPLY | if refused { spec::FLAG_ERROR } else { 0 };
        let error = if refused { Errno::NODEV.raw_os_error() as u32 } else { 0 };
        let size = (size_of::<Header>() + reply.len()) as u32;
        self.send(&[Header { size, flags, error, ..header }.as_bytes(), &reply].concat(), &[])?;
        let written = header.command == spec::DMA_WRITE && !refused;
        Ok(written.then(|| (head.address, data.to_vec())))
    }

    /// Sends a command and waits for the reply, which must be to it.
    pub fn ask(&mut self, command: u16, body: &[u8], files: &[BorrowedFd<'_>]) -> Result<Answer> {
        let (id, bytes) = self.frame(command, body);
        self.send(&bytes, files)?;
        self.expect(id, command)
    }

    /// Waits for the reply to that command.
    pub fn expect(&self, id: u16, command: u16) -> Result<Answer> {
        let answer = self.receive()?;
        let Header { id: to, command: of, flags, .. } = answer.header;
        if (to, of, flags & spec::FLAG_TYPE) != (id, command, spec::TYPE_REPLY) {
            return Err(Error::other(format!("a reply to another command: {:?}", answer.header)));
        }
        match answer.errno() {
            Some(_) if !answer.body.is_empty() => Err(Error::other("an error with a body")),
            _ => Ok(answer),
        }
    }

    /// As [`VfioUserClient::ask`]; an error that the server answers is one here.
    pub fn must(&mut self, command: u16, body: &[u8], files: &[BorrowedFd<'_>]) -> Result<Answer> {
        let answer = self.ask(command, body, files)?;
        match answer.errno() {
            Some(errno) => Err(Error::from_raw_os_error(errno)),
            None => Ok(answer),
        }
    }

    /// VERSION 0.0 with these capabilities; gives the server's.
    pub fn version(&mut self, json: Option<&str>) -> Result<String> {
        let mut body = Version { major: 0, minor: 0 }.as_bytes().to_vec();
        if let Some(json) = json {
            body.extend(json.as_bytes());
            body.push(0);
        }
        let answer = self.must(spec::VERSION, &body, &[])?;
        let (_, text) = answer.prefix::<Version>()?;
        Ok(String::from_utf8_lossy(text.strip_suffix(&[0]).unwrap_or(text)).into_owned())
    }

    /// DMA_MAP for reading and writing.
    pub fn map(&mut self, address: u64, size: u64, offset: u64, file: Option<BorrowedFd<'_>>) -> Result<()> {
        let body = DmaMap { argsz: 32, flags: 3, offset, address, size };
        let files: Vec<_> = file.into_iter().collect();
        self.must(spec::DMA_MAP, body.as_bytes(), &files).map(drop)
    }

    /// DMA_UNMAP.
    pub fn unmap(&mut self, address: u64, size: u64) -> Result<()> {
        let body = DmaUnmap { argsz: 24, flags: 0, address, size };
        let answer = self.must(spec::DMA_UNMAP, body.as_bytes(), &[])?;
        if answer.prefix::<DmaUnmap>()?.0 == body { Ok(()) } else { Err(Error::other("another range")) }
    }

    /// DMA_UNMAP of everything.
    pub fn unmap_all(&mut self) -> Result<()> {
        let body = DmaUnmap { argsz: 24, flags: vfio::VFIO_DMA_UNMAP_FLAG_ALL, ..DmaUnmap::default() };
        self.must(spec::DMA_UNMAP, body.as_bytes(), &[]).map(drop)
    }

    /// DEVICE_GET_INFO.
    pub fn info(&mut self) -> Result<DeviceInfo> {
        let body = DeviceInfo { argsz: 16, ..DeviceInfo::default() };
        Ok(self.must(spec::DEVICE_GET_INFO, body.as_bytes(), &[])?.prefix::<DeviceInfo>()?.0)
    }

    /// DEVICE_GET_REGION_INFO with room for `argsz` bytes.
    pub fn region(&mut self, index: u32, argsz: u32) -> Result<Answer> {
        let body = RegionInfo { argsz, index, ..RegionInfo::default() };
        self.must(spec::DEVICE_GET_REGION_INFO, body.as_bytes(), &[])
    }

    /// DEVICE_GET_IRQ_INFO.
    pub fn irq(&mut self, index: u32) -> Result<IrqInfo> {
        let body = IrqInfo { argsz: 16, index, ..IrqInfo::default() };
        Ok(self.must(spec::DEVICE_GET_IRQ_INFO, body.as_bytes(), &[])?.prefix::<IrqInfo>()?.0)
    }

    /// DEVICE_SET_IRQS.
    pub fn set_irqs(
        &mut self,
        flags: u32,
        index: u32,
        vectors: std::ops::Range<u32>,
        data: &[u8],
        files: &[&OwnedFd],
    ) -> Result<()> {
        let count = vectors.len() as u32;
        let argsz = (size_of::<IrqSet>() + data.len()) as u32;
        let mut body = IrqSet { argsz, flags, index, start: vectors.start, count }.as_bytes().to_vec();
        body.extend(data);
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        self.must(spec::DEVICE_SET_IRQS, &body, &files).map(drop)
    }

    /// REGION_READ.
    pub fn read(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>> {
        let body = RegionAccess { offset, region, count };
        let answer = self.must(spec::REGION_READ, body.as_bytes(), &[])?;
        let (head, data) = answer.prefix::<RegionAccess>()?;
        if head != body || data.len() != count as usize {
            return Err(Error::other(format!("{} bytes of {head:?}", data.len())));
        }
        Ok(data.to_vec())
    }

    /// REGION_WRITE.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        let head = RegionAccess { offset, region, count: data.len() as u32 };
        let mut body = head.as_bytes().to_vec();
        body.extend(data);
        let answer = self.must(spec::REGION_WRITE, &body, &[])?;
        if answer.prefix::<RegionAccess>()?.0 == head { Ok(()) } else { Err(Error::other("another access")) }
    }

    /// A register of 64 bits.
    pub fn read64(&mut self, region: u32, offset: u64) -> Result<u64> {
        let bytes = self.read(region, offset, 8)?;
        Ok(u64::from_le_bytes(bytes.try_into().map_err(|_| Error::other("not eight bytes"))?))
    }

    /// A register of 64 bits.
    pub fn write64(&mut self, region: u32, offset: u64, value: u64) -> Result<()> {
        self.write(region, offset, &value.to_le_bytes())
    }
}
