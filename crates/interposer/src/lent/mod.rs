//! Registers that a guest uses without an exit until they are taken back, of devices that lend their pages ([`ioplane_pci::lent_pages`]).
//!
//! ```text
//!   VMM --KVM_SET_USER_MEMORY_REGION--> of a page: the marker page of such a device? ---> followed; a thread connects to the device's socket
//!   device --Lend--> the thread: maps the pages, adds slots over them            --Take--> the thread: slots removed, pages unmapped
//!   VMM --KVM_SET_USER_MEMORY_REGION--> the marker goes: the same first
//! ```
//!
//! In the VMM's own view the pages stay trapped: without our slots each access exits, and the VMM sends it to the device. KVM refuses a slot where
//! another one is, so ours never hide anything of the VMM's. The interpreter of clusters leaves these pages to KVM: an access of another width, or
//! one that is made twice, is another access to a device.
//!
//! `IOPLANE_EXITS_SHADOW=off`: none of this.
#![allow(unsafe_code)]
// UNSAFETY: sets the signals of a thread that is about to be made.

mod follower;
mod found;

use std::ffi::c_int;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{mem, ptr};

use ioplane_pci::PageMessage;
use kvm_bindings::{KVM_CAP_NR_MEMSLOTS, kvm_userspace_memory_region};

use crate::kernel;
use crate::marker::PAGE;
use follower::{Follower, Host, Link, Run};
use found::{DevicePages, FoundDevice};

const KVM_CHECK_EXTENSION: u64 = 0xae03;
const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
/// Bytes of the stack of a thread that listens to a device.
const STACK: usize = 256 << 10;

static OFF: AtomicBool = AtomicBool::new(false);
static FOLLOWER: Mutex<Follower<Arc<Line>, DevicePages>> = Mutex::new(Follower::new());

/// The connection to a device. It is ended from either side.
#[derive(Debug, Default)]
struct Line(Mutex<Ends>);

#[derive(Debug, Default)]
enum Ends {
    /// Not connected yet.
    #[default]
    Not,
    Connected(UnixStream),
    Ended,
}

impl Line {
    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, message: PageMessage) {
        if let Ends::Connected(stream) = &*self.ends() {
            found::send(stream.as_raw_fd(), &message.bytes());
        }
    }
}

impl Link for Arc<Line> {
    fn taken(&self, number: u64) {
        self.say(PageMessage::Taken { number });
    }

    fn end(&self) {
        // What was said before still arrives; the thread that listens finds the end.
        if let Ends::Connected(stream) = mem::replace(&mut *self.ends(), Ends::Ended) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// This process's KVM.
struct Kernel;

impl Kernel {
    fn set(vm: c_int, region: &kvm_userspace_memory_region) -> bool {
        kernel::ioctl(vm, KVM_SET_USER_MEMORY_REGION, ptr::from_ref(region).expose_provenance()) == 0
    }
}

impl Host for Kernel {
    type Link = Arc<Line>;
    type Run = DevicePages;

    fn find(&self, address: usize, id: u64) -> Option<(Arc<Line>, u64)> {
        let FoundDevice { registers, socket } = found::find(address).ok()?;
        let line = Arc::new(Line::default());
        listen(line.clone(), id, socket.as_path())?;
        Some((line, registers))
    }

    fn slots(&self, vm: c_int) -> u32 {
        let slots = kernel::ioctl(vm, KVM_CHECK_EXTENSION, KVM_CAP_NR_MEMSLOTS as usize);
        u32::try_from(slots).unwrap_or(0)
    }

    fn show(&self, vm: c_int, slot: u32, address: u64, run: &DevicePages) -> bool {
        let size = run.pages().1 * PAGE;
        crate::device_range(vm, address, size, false);
        let shown = Self::set(
            vm,
            &kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: address,
                memory_size: size,
                userspace_addr: run.address(),
            },
        );
        if !shown {
            crate::device_range(vm, address, size, true);
        }
        shown
    }

    fn hide(&self, vm: c_int, slot: u32, address: u64, run: &DevicePages) {
        // A size of 0 removes it; the rest is not looked at. When the call returns no vCPU uses it.
        Self::set(vm, &kvm_userspace_memory_region { slot, ..Default::default() });
        crate::device_range(vm, address, run.pages().1 * PAGE, true);
    }
}

fn lock() -> MutexGuard<'static, Follower<Arc<Line>, DevicePages>> {
    // A panic inside has ended all of it.
    FOLLOWER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `None` after a fault of ours: nothing is shown any more.
fn guarded<T>(work: impl FnOnce(&mut Follower<Arc<Line>, DevicePages>) -> T) -> Option<T> {
    if OFF.load(Ordering::Relaxed) {
        return None;
    }
    let mut follower = lock();
    let done = catch_unwind(AssertUnwindSafe(|| work(&mut follower)));
    settle(follower, done.is_ok());
    done.ok()
}

/// After a fault of ours nothing is shown any more: nobody would follow the VMM's slots.
fn settle(mut follower: MutexGuard<'_, Follower<Arc<Line>, DevicePages>>, well: bool) {
    if !well {
        end_of(&mut follower);
    }
}

fn end_of(follower: &mut Follower<Arc<Line>, DevicePages>) {
    if !OFF.swap(true, Ordering::Relaxed) {
        let _ = catch_unwind(AssertUnwindSafe(|| follower.end(&Kernel)));
    }
}

/// A call of the VMM that sets a slot, with what has to be done around it. Calls of others that change slots wait meanwhile: whoever calls has a lock for
/// those of vCPUs.
pub(crate) fn around(vm: c_int, region: &kvm_userspace_memory_region, made: impl FnOnce() -> c_int) -> c_int {
    if OFF.load(Ordering::Relaxed) {
        return made();
    }
    let mut follower = lock();
    let before = catch_unwind(AssertUnwindSafe(|| follower.before(&Kernel, vm, region)));
    let result = made();
    let followed = before.and_then(|()| {
        catch_unwind(AssertUnwindSafe(|| {
            if result == 0 {
                follower.after(&Kernel, vm, region);
            }
        }))
    });
    settle(follower, followed.is_ok());
    result
}

/// Nobody calls [`around`] any more: nothing is shown.
pub(crate) fn end() {
    end_of(&mut lock());
}

/// A descriptor is another VM's now.
pub(crate) fn forget(vm: c_int) {
    guarded(|follower| follower.forget(vm));
}

/// Has a thread connect to a device, and do what it says. `None`: there is none.
fn listen(line: Arc<Line>, id: u64, socket: &Path) -> Option<()> {
    let socket = socket.to_owned();
    let body = move || {
        let done = catch_unwind(AssertUnwindSafe(|| {
            if let Ok(stream) = UnixStream::connect(&socket) {
                serve(&line, id, stream);
            }
        }));
        guarded(|follower| {
            assert!(done.is_ok(), "a fault while a device was listened to");
            follower.lost(&Kernel, id);
        });
    };
    // A new thread has the mask of the one that makes it: the VMM's signals are for its own threads.
    // SAFETY: sets of signals, filled by the calls.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let made = std::thread::Builder::new().name("ioplane-pages".into()).stack_size(STACK).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        made.ok().map(drop)
    }
}

/// Does what the device says, until it is gone.
fn serve(line: &Arc<Line>, id: u64, stream: UnixStream) {
    let Ok(own) = stream.try_clone() else { return };
    match &mut *line.ends() {
        ends @ Ends::Not => *ends = Ends::Connected(stream),
        Ends::Connected(_) | Ends::Ended => return,
    }
    let mut bytes = [0; PageMessage::BYTES];
    while let Some(file) = found::receive(own.as_raw_fd(), &mut bytes) {
        match (PageMessage::read(&bytes), file) {
            (Some(PageMessage::Lend { number, pages, at }), Some(file)) => {
                let runs = DevicePages::map(&file, at, pages);
                // The mappings keep what they need.
                drop(file);
                let lent = runs.is_some_and(|runs| {
                    guarded(|follower| {
                        let lent = follower.lend(&Kernel, id, number, runs);
                        if lent {
                            line.say(PageMessage::Lent { number });
                        }
                        lent
                    })
                    .unwrap_or(false)
                });
                if !lent {
                    line.taken(number);
                }
            }
            (Some(PageMessage::Take { number }), _) => {
                guarded(|follower| follower.take(&Kernel, id, number));
            }
            _ => return,
        }
    }
}
