//! A guest that programs KVM's PIT and then does nothing that would exit, and a VMM that is told what the guest has set.
#![allow(unsafe_code)]
// UNSAFETY: KVM's calls take addresses, and `kvm_run` and the guest's memory are shared.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ioplane_vcpu::kvm::{ClampReport, ClampState};
use kvm_bindings::{kvm_pit_config, kvm_pit_state, kvm_pit_state2};

use super::*;

const KVM_GET_PIT: u64 = 0xc048_ae65;
const KVM_CREATE_PIT2: u64 = 0x4040_ae77;
const KVM_GET_PIT2: u64 = 0x8070_ae9f;
const KVM_SET_PIT2: u64 = 0x4070_aea0;
/// The least count for 100 Hz.
const CLAMPED: u32 = 0x2e9c;
const PATIENCE: Duration = Duration::from_secs(180);
/// The guest's port.
const SAYS: u8 = 0xf4;
const LAST: u8 = 4;

/// Rate generator of channel 0.
fn program_timer(count: u16) -> Vec<u8> {
    let [low, high] = count.to_le_bytes();
    [[0xb0, 0x34, 0xe6, 0x43], [0xb0, low, 0xe6, 0x40], [0xb0, high, 0xe6, 0x40]].concat()
}

/// Does one thing after the other: says its number, and waits in memory until it may go on.
fn guest_code() -> Vec<u8> {
    let latch = vec![0xb0, 0, 0xe6, 0x43];
    let mut code = vec![0xbf];
    code.extend(u32::try_from(BUFFER).unwrap().to_le_bytes()); // mov edi, BUFFER
    for (number, work) in (1..).zip([program_timer(1193), latch, program_timer(596), program_timer(0)]) {
        code.extend(work);
        code.extend([0xb0, number, 0xe6, SAYS]); // mov al, number; out SAYS, al
        code.extend([0x80, 0x3f, number, 0x75, 0xfb]); // again: cmp byte [rdi], number; jne again
    }
    code
}

/// What KVM itself says, past the library.
fn in_kvm(vm: c_int) -> u32 {
    let mut pit = kvm_pit_state2::default();
    // SAFETY: room for what the call writes.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, vm, KVM_GET_PIT2, &raw mut pit) };
    assert_eq!(result, 0);
    pit.channels[0].count
}

/// What a VMM is told, by both calls.
fn told(vm: c_int) -> kvm_pit_state2 {
    let (mut pit, mut old) = (kvm_pit_state2::default(), kvm_pit_state::default());
    call(vm, KVM_GET_PIT2, ptr::from_mut(&mut pit).expose_provenance()).unwrap();
    call(vm, KVM_GET_PIT, ptr::from_mut(&mut old).expose_provenance()).unwrap();
    assert_eq!(old.channels[0].count, pit.channels[0].count);
    pit
}

fn until(file: &File, what: impl Fn(&ClampReport) -> bool) -> ClampReport {
    let begun = Instant::now();
    loop {
        let report = ClusterPage::read_clamp(file).unwrap();
        if what(&report) {
            return report;
        }
        assert!(begun.elapsed() < PATIENCE, "{report:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What both threads see.
struct Shared {
    said: AtomicU8,
    interrupted: AtomicU32,
}

/// The guest until its last word.
fn run_guest(vcpu: c_int, page: *mut kvm_run, shared: &Shared) {
    while shared.said.load(Ordering::SeqCst) != LAST {
        // SAFETY: the argument is none.
        if unsafe { libc::ioctl(vcpu, KVM_RUN, 0) } != 0 {
            let error = std::io::Error::last_os_error();
            assert_eq!(error.kind(), std::io::ErrorKind::Interrupted, "{error}");
            shared.interrupted.fetch_add(1, Ordering::SeqCst);
            continue;
        }
        // SAFETY: the mapping has two pages and more; the kernel does not use it now.
        let said = unsafe {
            assert_eq!((*page).exit_reason, KVM_EXIT_IO);
            let io = (*page).__bindgen_anon_1.io;
            assert_eq!(io.port, u16::from(SAYS));
            *page.cast::<u8>().add(usize::try_from(io.data_offset).unwrap())
        };
        shared.said.store(said, Ordering::SeqCst);
    }
}

/// One step of the guest after the other, and what the clamp makes of it.
fn check(vm: c_int, go_on: &AtomicU8, shared: &Shared) {
    let file = super::super::page().expect("the switch can be found");
    let step = |number: u8| {
        go_on.store(number - 1, Ordering::SeqCst);
        let begun = Instant::now();
        while shared.said.load(Ordering::SeqCst) != number {
            assert!(begun.elapsed() < PATIENCE, "the guest has not come to {number}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let count = || told(vm).channels[0].count;
    step(1);
    assert_eq!(until(&file, |report| report.state == ClampState::Off).hz, None, "before it is switched on");
    assert_eq!((count(), in_kvm(vm)), (1193, 1193));
    ClusterPage::set_clamp(&file, Some(100)).unwrap();
    let report = until(&file, |report| report.state == ClampState::Clamped);
    assert_eq!((report.guest_count, report.count, report.changes), (1193, CLAMPED, 1));
    assert_eq!((count(), in_kvm(vm)), (1193, CLAMPED));
    // The guest was stopped for it, and its thread says so when it comes to it.
    let begun = Instant::now();
    while shared.interrupted.load(Ordering::SeqCst) == 0 {
        assert!(begun.elapsed() < PATIENCE, "the guest was not stopped");
        std::thread::sleep(Duration::from_millis(1));
    }

    step(2);
    until(&file, |report| report.state == ClampState::ReadsCounter && report.count == 1193);
    assert_eq!((count(), in_kvm(vm)), (1193, 1193), "a guest that reads the counter has its own again");

    step(3);
    let report = until(&file, |report| report.state == ClampState::Clamped);
    assert_eq!((report.guest_count, count(), in_kvm(vm)), (596, 596, CLAMPED), "another rate");
    ClusterPage::set_clamp(&file, None).unwrap();
    until(&file, |report| report.state == ClampState::Off);
    assert_eq!((count(), in_kvm(vm)), (596, 596), "undone");

    // What the VMM sets is what it gets, and what KVM has.
    ClusterPage::set_clamp(&file, Some(50)).unwrap();
    until(&file, |report| report.state == ClampState::Settling);
    let mut pit = told(vm);
    pit.channels[0].count = 700;
    call(vm, KVM_SET_PIT2, at(&pit)).unwrap();
    assert_eq!((count(), in_kvm(vm)), (700, 700));
    step(4);
    until(&file, |report| report.state == ClampState::Nothing);
    assert_eq!((count(), in_kvm(vm)), (0x1_0000, 0x1_0000));
}

/// One thread would wait for the other for ever.
struct EndWithPanic;

impl Drop for EndWithPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::exit(1);
        }
    }
}

/// Prints why if there is no KVM.
pub fn run() {
    if let Err(why) = begin() {
        println!("\nno KVM: {why}");
    }
}

fn begin() -> Result<(), String> {
    let system =
        File::options().read(true).write(true).open("/dev/kvm").map_err(|error| error.to_string())?;
    let vm = call(system.as_raw_fd(), KVM_CREATE_VM, 0)?;
    call(vm, KVM_SET_TSS_ADDR, 0xfffb_d000)?;
    call(vm, KVM_CREATE_IRQCHIP, 0)?;
    call(vm, KVM_CREATE_PIT2, at(&kvm_pit_config::default()))?;
    let memory = guest_memory(vm, &guest_code())?;
    let vcpu = vcpu(system.as_raw_fd(), vm)?;
    let bytes = usize::try_from(call(system.as_raw_fd(), KVM_GET_VCPU_MMAP_SIZE, 0)?).unwrap();
    let page: *mut kvm_run = map(bytes, libc::MAP_SHARED, vcpu).cast();
    let page = page.expose_provenance();
    // SAFETY: inside the guest's memory, which stays mapped; the guest reads it, and this process only uses it atomically.
    let go_on = unsafe { AtomicU8::from_ptr(memory.add(usize::try_from(BUFFER).unwrap())) };
    let shared = Shared { said: AtomicU8::new(0), interrupted: AtomicU32::new(0) };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _end = EndWithPanic;
            run_guest(vcpu, ptr::with_exposed_provenance_mut(page), &shared);
        });
        let _end = EndWithPanic;
        check(vm, go_on, &shared);
    });
    println!("\nclamped");
    // SAFETY: descriptors of this function's own.
    drop(unsafe { [File::from_raw_fd(vcpu), File::from_raw_fd(vm)] });
    Ok(())
}
