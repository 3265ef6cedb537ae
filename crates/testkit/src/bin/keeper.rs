//! A vfio-user client that keeps what it was given, for e2e/tests/passthrough.rs and for people:
//!
//! ```text
//! keeper keep SOCKET [fd|map]     is given the mapped pages of a BAR, leaves, and keeps descriptor or mapping until killed: says `kept`
//! keeper knock SOCKET             comes as the next client: says `admitted`, or why not
//! ```

#![allow(unsafe_code)]
// UNSAFETY: one page of a card is mapped.

use std::error::Error;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;

use ioplane_host::vfio_user::spec::{Area, CapHeader, RegionInfo, Sparse};
use ioplane_testkit::vfio_user::VfioUserClient;
use rustix::mm::{MapFlags, ProtFlags};
use zerocopy::FromBytes;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("keeper: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["keep", socket] | ["keep", socket, "fd"] => {
            let (file, _) = given(Path::new(socket))?;
            park(&file)
        }
        ["keep", socket, "map"] => {
            let (file, at) = given(Path::new(socket))?;
            // SAFETY: a new mapping at an address of the kernel's choice; it is never touched or unmapped.
            let page = unsafe {
                rustix::mm::mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, &file, at)?
            };
            // The mapping alone is kept.
            drop(file);
            park(&page)
        }
        ["knock", socket] => {
            // QEMU's two questions: what it is, what it has.
            let mut client = VfioUserClient::greet(Path::new(socket))?;
            client.info()?;
            println!("admitted");
            Ok(())
        }
        _ => Err("usage: keeper keep SOCKET [fd|map] | keeper knock SOCKET".into()),
    }
}

fn park<T>(_kept: &T) -> ! {
    println!("kept");
    loop {
        std::thread::park();
    }
}

/// Comes, takes the first mapped pages that are offered and where they are in their file, and leaves.
fn given(socket: &Path) -> Outcome<(OwnedFd, u64)> {
    let mut client = VfioUserClient::greet(socket)?;
    for index in 0..6 {
        let mut answer = client.region(index, 4096)?;
        let Some(file) = answer.files.pop() else { continue };
        let (info, _) = answer.prefix::<RegionInfo>()?;
        let bytes = answer.body.get(info.cap_offset as usize..).ok_or("no capability")?;
        let cut = "a capability that is cut off";
        let (_, bytes) = CapHeader::read_from_prefix(bytes).map_err(|_| cut)?;
        let (_, bytes) = Sparse::read_from_prefix(bytes).map_err(|_| cut)?;
        let (area, _) = Area::read_from_prefix(bytes).map_err(|_| cut)?;
        return Ok((file, info.offset + area.offset));
    }
    Err("no BAR of it can be mapped".into())
}
