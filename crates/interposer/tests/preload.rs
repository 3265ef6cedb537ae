//! The library in processes of its own: this test, started again with it preloaded.
#![allow(unsafe_code)]
// UNSAFETY: calls libc's functions with structures of its own, and faults on purpose.

use std::ffi::{CStr, c_int, c_void};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use ioplane_vcpu::kvm::{CLUSTER_PAGE_NAME, ClusterPage, ClusterSwitch};

mod vmm;

const CASE: &str = "IOPLANE_TEST_CASE";
/// KVM_GET_API_VERSION, which any descriptor may be asked; most say ENOTTY.
const KVM_CALL: u64 = 0xae00;

fn library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    // Cargo puts what it has built beside the test, and only sometimes a folder higher.
    let places = own.ancestors().skip(1).take(2).map(|place| place.join("libioplane_interposer.so"));
    let built = |path: &PathBuf| fs::metadata(path).and_then(|found| found.modified()).ok();
    let newest = places.filter(|path| path.is_file()).max_by_key(built);
    newest.expect("cargo builds the library before its tests")
}

fn child(case: &str, preload: bool, environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "what_runs_in_the_child", "--nocapture"]).env(CASE, case);
    command.env_remove("LD_PRELOAD").env("IOPLANE_EXITS_CLUSTER", "on").envs(environment.iter().copied());
    if preload {
        command.env("LD_PRELOAD", library());
    }
    command.output().unwrap()
}

fn succeeds(case: &str, environment: &[(&str, &str)]) -> String {
    let output = child(case, true, environment);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{case}: {}\n{said}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

/// Does nothing unless it is the child.
#[test]
fn what_runs_in_the_child() {
    match std::env::var(CASE).as_deref() {
        Ok("ioctl") => ioctl_is_ours_and_as_before(),
        Ok("off") => off(),
        Ok("signals") => signals(),
        Ok("reset") => reset(),
        Ok("default") => {
            // Rust's own handlers are there already.
            set(libc::SIGSEGV, libc::SIG_DFL, 0, None);
            wake();
            fault();
        }
        Ok("raised") => {
            set(libc::SIGBUS, libc::SIG_DFL, 0, None);
            wake();
            // SAFETY: the default action ends this process.
            unsafe { libc::raise(libc::SIGBUS) };
        }
        Ok("other") => {
            let nothing: c_int = -1;
            // SAFETY: no argument.
            assert_eq!(unsafe { libc::ioctl(nothing, 0x1234) }, 77);
        }
        Ok("vmm") => vmm::run(),
        Ok("timer") => vmm::timer::run(),
        Ok("pages") => vmm::pages::run(),
        _ => {}
    }
}

/// The first of KVM's calls has the library begin.
fn wake() {
    let null = File::open("/dev/null").unwrap();
    // SAFETY: no argument.
    let result = unsafe { libc::ioctl(null.as_raw_fd(), KVM_CALL) };
    assert_eq!(result, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOTTY));
}

fn page() -> Option<File> {
    let name = format!("/memfd:{CLUSTER_PAGE_NAME} (deleted)");
    let mut paths = fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| entry.path());
    let found = paths.find(|path| fs::read_link(path).is_ok_and(|link| link.as_os_str() == name.as_str()))?;
    Some(File::options().read(true).write(true).open(found).unwrap())
}

fn ioctl_is_ours_and_as_before() {
    let ours = Some("libioplane_interposer.so");
    assert_eq!(holder(libc::ioctl as *const () as usize).as_deref(), ours);
    let mut ends = [0; 2];
    let mut waiting: c_int = -1;
    // SAFETY: places for what the calls write.
    unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        assert_eq!(libc::write(ends[1], c"abc".as_ptr().cast(), 3), 3);
        assert_eq!(libc::ioctl(ends[0], libc::FIONREAD, &raw mut waiting), 0);
        assert_eq!(waiting, 3);
        assert_eq!(libc::ioctl(-1, libc::FIONREAD, &raw mut waiting), -1);
    }
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
    assert!(page().is_none(), "a process that is no VMM is left as it is");
    wake();
    assert_eq!(holder(kernel_handler(libc::SIGBUS)).as_deref(), ours);
    let file = page().expect("the counters can be found");
    let report = ClusterPage::read(&file).unwrap();
    assert!(report.switch == ClusterSwitch::On && !report.failed && report.vcpus.is_empty(), "{report:?}");
    assert!(report.cycles_per_microsecond > 10, "{report:?}");
    for switch in [ClusterSwitch::BatchOnly, ClusterSwitch::Off] {
        ClusterPage::switch(&file, switch).unwrap();
        assert_eq!(ClusterPage::read(&file).unwrap().switch, switch);
    }
    assert!(file.set_len(0).is_err(), "nobody can take the memory away");
}

fn off() {
    wake();
    assert!(page().is_none());
    assert_ne!(holder(kernel_handler(libc::SIGBUS)).as_deref(), Some("libioplane_interposer.so"));
}

/// What the kernel has, whatever libc says: the handler is the first word of its structure.
fn kernel_handler(signal: c_int) -> usize {
    let mut action = [0_usize; 8];
    // SAFETY: room for the kernel's structure, with 8 bytes of signals.
    let result =
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, ptr::null::<u8>(), action.as_mut_ptr(), 8) };
    assert_eq!(result, 0);
    action[0]
}

/// The file that a function is in.
fn holder(function: usize) -> Option<String> {
    // SAFETY: a structure of plain numbers, and a name with its end if the call says so.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(ptr::with_exposed_provenance(function), &raw mut info) == 0 {
            return None;
        }
        let path = PathBuf::from(CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned());
        Some(path.file_name()?.to_string_lossy().into_owned())
    }
}

static FIRST: AtomicUsize = AtomicUsize::new(0);
static SECOND: AtomicUsize = AtomicUsize::new(0);
static MASKED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn first(_: c_int) {
    FIRST.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn second(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    SECOND.fetch_add(1, Ordering::SeqCst);
    assert!(!context.is_null());
    // SAFETY: valid while the handler runs.
    unsafe {
        assert_eq!((*info).si_signo, signal);
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigprocmask(libc::SIG_BLOCK, ptr::null(), &raw mut mask);
        MASKED.store(
            usize::try_from(libc::sigismember(&raw const mask, libc::SIGUSR2)).unwrap(),
            Ordering::SeqCst,
        );
    }
}

extern "C" fn leaves(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: valid while the handler runs; the process ends here.
    unsafe {
        let address = (*info).si_addr().addr();
        libc::_exit(if address == 16 { 42 } else { 43 });
    }
}

fn action_of(signal: c_int) -> libc::sigaction {
    // SAFETY: a structure of plain numbers, filled by the call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, ptr::null(), &raw mut action), 0);
        action
    }
}

fn set(signal: c_int, handler: usize, flags: c_int, masked: Option<c_int>) -> libc::sigaction {
    // SAFETY: structures of plain numbers; the handlers are functions of the type that the flags say.
    unsafe {
        let (mut action, mut old): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        if let Some(masked) = masked {
            libc::sigaddset(&raw mut action.sa_mask, masked);
        }
        assert_eq!(libc::sigaction(signal, &raw const action, &raw mut old), 0);
        old
    }
}

fn raise(signal: c_int) {
    // SAFETY: there is a handler.
    assert_eq!(unsafe { libc::raise(signal) }, 0);
}

fn fault() {
    // SAFETY: there is no such page; the process ends, or a handler does not return.
    unsafe { ptr::with_exposed_provenance::<u8>(16).read_volatile() };
}

/// A VMM's handlers work as before, whether they are installed before the library's or after.
fn signals() {
    let ours = first as *const () as usize;
    set(libc::SIGBUS, ours, libc::SA_RESTART, Some(libc::SIGUSR1));
    wake();
    raise(libc::SIGBUS);
    assert_eq!(FIRST.load(Ordering::SeqCst), 1, "installed before");
    let seen = action_of(libc::SIGBUS);
    assert_eq!(seen.sa_sigaction, ours);
    assert_eq!(seen.sa_flags & (libc::SA_SIGINFO | libc::SA_RESTART), libc::SA_RESTART);
    // SAFETY: a set that the call has filled.
    assert_eq!(unsafe { libc::sigismember(&raw const seen.sa_mask, libc::SIGUSR1) }, 1);

    let theirs = second as *const () as usize;
    let old = set(libc::SIGBUS, theirs, libc::SA_SIGINFO, Some(libc::SIGUSR2));
    assert_eq!(old.sa_sigaction, ours);
    raise(libc::SIGBUS);
    assert_eq!((FIRST.load(Ordering::SeqCst), SECOND.load(Ordering::SeqCst)), (1, 1), "installed later");
    assert_eq!(MASKED.load(Ordering::SeqCst), 1, "the mask that was asked for");

    // SAFETY: `first` takes one argument, as `signal` has it.
    let old = unsafe { libc::signal(libc::SIGBUS, ours) };
    assert_eq!(old, theirs);
    raise(libc::SIGBUS);
    assert_eq!(FIRST.load(Ordering::SeqCst), 2);
    // SAFETY: no handler.
    let old = unsafe { libc::signal(libc::SIGBUS, libc::SIG_IGN) };
    assert_eq!(old, ours);
    raise(libc::SIGBUS);
    assert_eq!(action_of(libc::SIGBUS).sa_sigaction, libc::SIG_IGN);

    // Other signals are nobody's business.
    set(libc::SIGUSR1, ours, 0, None);
    raise(libc::SIGUSR1);
    assert_eq!(FIRST.load(Ordering::SeqCst), 3);

    set(libc::SIGSEGV, leaves as *const () as usize, libc::SA_SIGINFO, None);
    fault();
}

/// A handler that is to be called once.
fn reset() {
    wake();
    set(libc::SIGBUS, first as *const () as usize, libc::SA_RESETHAND, None);
    raise(libc::SIGBUS);
    assert_eq!(FIRST.load(Ordering::SeqCst), 1);
    assert_eq!(action_of(libc::SIGBUS).sa_sigaction, libc::SIG_DFL);
    raise(libc::SIGBUS);
}

#[test]
fn calls_that_are_not_of_kvm_are_as_before() {
    succeeds("ioctl", &[]);
}

#[test]
fn the_environment_turns_all_of_it_off() {
    succeeds("off", &[("IOPLANE_EXITS_CLUSTER", "off")]);
}

#[test]
fn handlers_of_the_vmm_are_called_as_before() {
    let output = child("signals", true, &[]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(42), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn without_handlers_a_process_ends_as_before() {
    assert_eq!(child("default", true, &[]).status.signal(), Some(libc::SIGSEGV));
    assert_eq!(child("raised", true, &[]).status.signal(), Some(libc::SIGBUS));
    assert_eq!(child("reset", true, &[]).status.signal(), Some(libc::SIGBUS));
}

/// A VMM and a guest on this host's KVM, also on one that is made of software: all is the same, but for the exits.
#[test]
fn a_guest_on_this_host_does_the_same_with_fewer_exits() {
    let plain = child("vmm", false, &[]);
    let plain = String::from_utf8_lossy(&plain.stdout).into_owned();
    if let Some(why) = plain.lines().find_map(|line| line.strip_prefix("no KVM: ")) {
        return eprintln!("SKIPPED (cannot be had here): a guest on KVM: {why}");
    }
    let did = |said: &str| -> Vec<String> {
        said.lines().filter(|line| line.starts_with("did ")).map(str::to_owned).collect()
    };
    let saved = |said: &str| -> u64 {
        let saved = said.lines().find_map(|line| line.strip_prefix("saved "));
        saved.unwrap_or_else(|| panic!("{said}")).parse().unwrap()
    };
    assert!(!did(&plain).is_empty(), "{plain}");
    let with = succeeds("vmm", &[]);
    assert_eq!(did(&with), did(&plain));
    let off = succeeds("vmm", &[("IOPLANE_EXITS_CLUSTER", "off")]);
    assert_eq!(did(&off), did(&plain));
    // Offered to a guest that does not ask: nothing but CPUID differs, as KVM has it.
    let batches = succeeds("vmm", &[("IOPLANE_EXITS_BATCH", "on")]);
    assert_eq!(did(&batches), did(&plain));
    let offered = |said: &str| said.lines().any(|line| line == "batches true");
    assert_eq!([&plain, &off, &with, &batches].map(|said| offered(said)), [false, false, false, true]);
    // A KVM that is made of software forgets IOPL, so that ports end its clusters.
    assert!(saved(&with) > vmm::ACCESSES / 3, "{} of {} accesses\n{with}", saved(&with), vmm::ACCESSES);
    // The VMM forks in the middle of exits, and the children end. A fork takes longer than a cluster may by itself.
    let time = ("IOPLANE_EXITS_CLUSTER_MICROSECONDS", "60000000");
    let forks = succeeds("vmm", &[(vmm::FORKS, "1"), time]);
    assert_eq!(did(&forks), did(&plain));
    assert!(saved(&forks) > vmm::ACCESSES / 3, "{} of {} accesses\n{forks}", saved(&forks), vmm::ACCESSES);
}

/// A real PIT of KVM's, on this host. The guest leaves KVM_RUN for nothing but a kick.
#[test]
fn a_timer_is_clamped_and_comes_back_and_the_vmm_sees_the_guests() {
    let said = succeeds("timer", &[]);
    match said.lines().find_map(|line| line.strip_prefix("no KVM: ")) {
        Some(why) => eprintln!("SKIPPED (cannot be had here): a PIT of KVM: {why}"),
        None => assert!(said.lines().any(|line| line == "clamped"), "{said}"),
    }
}

/// A real KVM's slots, of this host.
#[test]
fn pages_that_a_device_lends_are_slots_of_kvm_until_they_are_taken() {
    let said = succeeds("pages", &[("IOPLANE_EXITS_SHADOW", "on")]);
    match said.lines().find_map(|line| line.strip_prefix("no KVM: ")) {
        Some(why) => eprintln!("SKIPPED (cannot be had here): slots of KVM: {why}"),
        None => assert!(said.lines().any(|line| line == "pages lent"), "{said}"),
    }
}

/// What is not KVM's goes where it would go without this library: here to another one that is preloaded.
#[test]
fn another_librarys_ioctl_is_called() {
    let folder = tempfile::tempdir().unwrap();
    let (source, other) = (folder.path().join("other.c"), folder.path().join("other.so"));
    fs::write(
        &source,
        "int ioctl(int d, unsigned long r, void *a) { (void)a; return r == 0x1234 && d == -1 ? 77 : -1; }",
    )
    .unwrap();
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&other, &source]).status().unwrap();
    assert!(made.success());
    let both = format!("{}:{}", library().display(), other.display());
    let output = child("other", false, &[("LD_PRELOAD", &both)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
