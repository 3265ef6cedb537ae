//! A guest whose exits are known exactly, for tests: `tiny-guest [TIMES]` makes a VM with one vCPU, says `ready` on standard error, and
//! for each line on standard input runs once and prints how many exits of each kind it has caused and its thread's time, as JSON.
//! `busy` has the VMM compute for some microseconds after each exit; `end`, or the end of the input, ends it.
//!
//! `tiny-guest still TURNS` runs once for each line as well, and takes no exit for a device but the one at its end: it counts, has KVM answer CPUID once in 1,000 turns, and is
//! interrupted by a signal a thousand times a second.
//!
//! `tiny-guest tick HZ idle|busy AFTER SECONDS` is another guest, which only ticks by KVM's PIT: it prints how many ticks and exits there were in so many
//! seconds, which begin AFTER seconds, and how often its loop has run. KVM's counters have to be readable in debugfs.
//!
//! Everything happens in real mode, that one in flat 32-bit mode, at addresses that are stated below. The VMM is as small as can be: what the guest writes is
//! dropped, what it reads is zero.

#![allow(unsafe_code)]
// UNSAFETY: guest memory is registered with KVM by address.

use std::time::{Duration, Instant};

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::mm::{MapFlags, ProtFlags};

/// Where the program begins; memory has 64 KiB.
const START: u64 = 0x1000;
const MEMORY: usize = 0x1_0000;
/// Turns between two exits that KVM answers.
const ROUND: u32 = 1000;
/// Nothing is mapped here.
const HOLE: u32 = 0xd_0000;

type Failure = Box<dyn std::error::Error>;

/// One loop of the program.
struct Site {
    name: &'static str,
    /// Of the instruction that exits.
    address: u64,
    exits: u64,
}

/// Real-mode code, a byte at a time.
struct Program {
    bytes: Vec<u8>,
    sites: Vec<Site>,
    times: u16,
}

impl Program {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Counts so often, in rounds of which each ends with an exit that KVM answers.
    fn still(turns: u32) -> Program {
        let mut program = Program { bytes: Vec::new(), sites: Vec::new(), times: 0 };
        program.put(&[0x66, 0xbe]); // mov esi, rounds
        program.put(&turns.div_ceil(ROUND).to_le_bytes());
        program.put(&[0x66, 0xbf]); // mov edi, ROUND
        program.put(&ROUND.to_le_bytes());
        program.put(&[0x66, 0x4f, 0x75, 0xfc]); // dec edi; jnz to it
        program.put(&[0x0f, 0xa2, 0x66, 0x4e, 0x75, 0xf0]); // cpuid; dec esi; jnz to mov edi
        program.put(&[0xe6, 0xf4]); // out 0xf4, al
        program
    }

    /// `before` once, then `instruction` in a loop: it is what exits. CX counts down in SI, which nothing else uses.
    fn repeat(&mut self, name: &'static str, before: &[u8], instruction: &[u8], times: u16) {
        self.put(before);
        let [low, high] = times.to_le_bytes();
        self.put(&[0xbe, low, high]); // mov si, times
        let top = self.bytes.len();
        self.sites.push(Site { name, address: START + top as u64, exits: times.into() });
        self.put(instruction);
        self.put(&[0x4e]); // dec si
        let back = top as i64 - (self.bytes.len() as i64 + 2);
        self.put(&[0x75, back as i8 as u8]); // jnz top
    }

    fn build(times: u16) -> Program {
        let mut program = Program { bytes: Vec::new(), sites: Vec::new(), times };
        let port = |number: u16| {
            let [low, high] = number.to_le_bytes();
            [0xba, low, high] // mov dx, number
        };
        let n = program.times;
        program.repeat("out8", &port(0x3f8), &[0xee], n);
        // mov ax, 5.
        program.repeat("out16", &[&port(0xeee0)[..], &[0xb8, 5, 0]].concat(), &[0xef], n + 1);
        program.repeat("out32", &port(0xcf8), &[0x66, 0xef], n + 2);
        program.repeat("in8", &port(0x3fd), &[0xec], n + 3);
        program.repeat("in16", &port(0xeee2), &[0xed], n + 4);
        program.repeat("in32", &port(0x608), &[0x66, 0xed], n + 5);
        // mov di, si; xor si, si; outsb; mov si, di: SI is the loop's.
        program.repeat("outs8", &port(0x3f8), &[0x89, 0xf7, 0x31, 0xf6, 0x6e, 0x89, 0xfe], n + 11);
        program.later("outs8", 4);
        // mov ax, 0xd000; mov ds, ax; then mov [0x10], al and so on.
        let hole = [0xb8, 0x00, 0xd0, 0x8e, 0xd8];
        program.repeat("write8", &hole, &[0xa2, 0x10, 0x00], n + 6);
        program.repeat("write16", &hole, &[0xa3, 0x12, 0x00], n + 12);
        program.repeat("write32", &hole, &[0x66, 0xa3, 0x14, 0x00], n + 13);
        program.repeat("read8", &hole, &[0xa0, 0x21, 0x00], n + 14);
        program.repeat("read16", &hole, &[0xa1, 0x22, 0x00], n + 15);
        program.repeat("read32", &hole, &[0x66, 0xa1, 0x20, 0x00], n + 7);
        // mov ecx, 0x1b (IA32_APIC_BASE); rdmsr. Then what was read is written.
        let apic_base = [0x66, 0xb9, 0x1b, 0, 0, 0];
        program.repeat("rdmsr", &apic_base, &[0x0f, 0x32], n + 8);
        program.repeat("wrmsr", &[], &[0x0f, 0x30], n + 16);
        // xor eax, eax; cpuid.
        program.repeat("cpuid", &[], &[0x66, 0x31, 0xc0, 0x0f, 0xa2], n + 9);
        program.later("cpuid", 3);
        if let Some(call) = hypercall() {
            // mov eax, 77, which means nothing to KVM.
            program.repeat("hypercall", &[], &[&[0x66, 0xb8, 77, 0, 0, 0], &call[..]].concat(), n + 17);
            program.later("hypercall", 6);
        }
        program.repeat("hlt", &[], &[0xf4], n + 10);
        // The last word: out 0xf4.
        program.put(&[0xb0, 1, 0xe6, 0xf4]);
        program.sites.push(Site { name: "end", address: START + program.bytes.len() as u64 - 2, exits: 1 });
        program
    }

    /// The instruction that exits is so many bytes into the loop.
    fn later(&mut self, name: &str, bytes: u64) {
        if let Some(site) = self.sites.iter_mut().find(|site| site.name == name) {
            site.address += bytes;
        }
    }
}

/// VMMCALL or VMCALL, by what this processor has. A software KVM may know neither.
fn hypercall() -> Option<[u8; 3]> {
    let processor = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let has = |flag: &str| processor.split_whitespace().any(|word| word == flag);
    if has("svm") { Some([0x0f, 0x01, 0xd9]) } else { has("vmx").then_some([0x0f, 0x01, 0xc1]) }
}

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == "tick") {
        let [_, hz, load, after, seconds] = &words[..] else {
            return Err("tick HZ idle|busy AFTER SECONDS".into());
        };
        let [after, seconds] = [after.parse()?, seconds.parse()?].map(Duration::from_secs);
        return tick(hz.parse()?, load == "busy", after, seconds);
    }
    let program = match &words[..] {
        [still, turns] if still == "still" => Program::still(turns.parse()?),
        words => Program::build(words.first().map_or(Ok(1000), |word| word.parse())?),
    };
    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    guest_memory(&vm, |bytes| {
        bytes[START as usize..START as usize + program.bytes.len()].copy_from_slice(&program.bytes);
    })?;
    let mut vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    let mut special = vcpu.get_sregs()?;
    special.cs.base = 0;
    special.cs.selector = 0;
    vcpu.set_sregs(&special)?;
    if program.sites.is_empty() {
        // Not before: making a VM does not take it.
        interrupt_often()?;
    }
    eprintln!("ready");
    for line in std::io::stdin().lines() {
        let line = line?;
        if line == "end" {
            break;
        }
        let mut registers = vcpu.get_regs()?;
        registers.rip = START;
        registers.rflags = 2;
        vcpu.set_regs(&registers)?;
        let ns = run(&mut vcpu, line == "busy")?;
        let sites = program
            .sites
            .iter()
            .map(|site| serde_json::json!({"name": site.name, "address": site.address, "exits": site.exits}));
        println!("{}", serde_json::json!({"hole": HOLE, "ns": ns, "sites": sites.collect::<Vec<_>>()}));
    }
    Ok(())
}

/// Has this thread interrupted by SIGALRM every millisecond, so that KVM_RUN returns as often, as it does for a VMM that has timers.
fn interrupt_often() -> Result<(), Failure> {
    extern "C" fn nothing(_: libc::c_int) {}
    let every = libc::timeval { tv_sec: 0, tv_usec: 1000 };
    // SAFETY: a handler that does nothing, and structures of integers that live as long as the calls.
    let set = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        let timer = libc::itimerval { it_interval: every, it_value: every };
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()) == 0
            && libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) == 0
    };
    if set { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

/// What a profile finds the VMM in.
// SAFETY: nothing else has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn tiny_vmm_computes(mut number: u64) -> u64 {
    // Without calls, optimised or not: the samples are this function's.
    let mut step = 0;
    while step < 100_000 {
        number = (number << 7) ^ (number >> 9) ^ step;
        step += 1;
    }
    number
}

/// Memory from address 0, which `fill` fills; where it is here.
fn guest_memory(vm: &VmFd, fill: impl FnOnce(&mut [u8])) -> Result<*mut u8, Failure> {
    // SAFETY: a new private mapping at an address of the kernel's choice; it is never unmapped.
    let memory = unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), MEMORY, protection, MapFlags::PRIVATE)?
    }
    .cast::<u8>();
    // SAFETY: the mapping has MEMORY bytes and nobody else refers to it yet.
    fill(unsafe { std::slice::from_raw_parts_mut(memory, MEMORY) });
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: MEMORY as u64,
        userspace_addr: memory as u64,
    };
    // SAFETY: the memory stays mapped until the process ends, and only the guest uses it from now on, but for words that are read volatile.
    unsafe { vm.set_user_memory_region(region)? };
    Ok(memory)
}

/// Where the guest that ticks has its tables, its counts and its stack.
const GDT: u64 = 0x800;
const IDT: u64 = 0x4000;
const TICKS: usize = 0x5000;
const TURNS: usize = 0x5004;
const STACK: u64 = 0x7000;
/// Where the PIC's first interrupt, the PIT's, is.
const VECTOR: u64 = 0x20;
const PIT_HZ: u32 = 1_193_182;

/// Flat 32-bit code: sets the PIC and the PIT, then halts or counts for ever.
fn ticking(hz: u32, busy: bool) -> (Vec<u8>, u64) {
    let mut code = Vec::new();
    let [low, high, ..] = (PIT_HZ / hz).to_le_bytes();
    // Initialization words of both PICs, masks; mode 2 and the count of the PIT's channel 0.
    for (port, value) in [
        (0x20, 0x11),
        (0x21, VECTOR as u8),
        (0x21, 4),
        (0x21, 1),
        (0xa0, 0x11),
        (0xa1, VECTOR as u8 + 8),
        (0xa1, 2),
        (0xa1, 1),
        (0x21, 0xfe),
        (0xa1, 0xff),
        (0x43, 0x34),
        (0x40, low),
        (0x40, high),
    ] {
        code.extend([0xb0, value, 0xe6, port]); // mov al, value; out port, al
    }
    code.push(0xfb); // sti
    if busy {
        code.extend([0xff, 0x05, 0x04, 0x50, 0, 0, 0xeb, 0xf8]); // inc dword [TURNS]; jmp to it
    } else {
        code.extend([0xf4, 0xeb, 0xfd]); // hlt; jmp to it
    }
    let handler = START + code.len() as u64;
    // push eax; inc dword [TICKS]; mov al, 0x20; out 0x20, al; pop eax; iret
    code.extend([0x50, 0xff, 0x05, 0x00, 0x50, 0, 0, 0xb0, 0x20, 0xe6, 0x20, 0x58, 0xcf]);
    (code, handler)
}

/// Runs the guest that ticks, and prints what has happened in that time.
fn tick(hz: u32, busy: bool, after: Duration, time: Duration) -> Result<(), Failure> {
    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    vm.set_tss_address(0xfffb_d000)?;
    vm.create_irq_chip()?;
    vm.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() })?;
    let memory = guest_memory(&vm, |bytes| {
        let mut put =
            |at: u64, what: &[u8]| bytes[at as usize..at as usize + what.len()].copy_from_slice(what);
        let (code, handler) = ticking(hz, busy);
        put(START, &code);
        // Flat code and data, at selectors 8 and 16.
        put(GDT + 8, &0x00cf_9b00_0000_ffff_u64.to_le_bytes());
        put(GDT + 16, &0x00cf_9300_0000_ffff_u64.to_le_bytes());
        // An interrupt gate to a handler below 64 KiB.
        put(IDT + VECTOR * 8, &(handler | 8 << 16 | 0x8e00 << 32).to_le_bytes());
    })?;
    let mut vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    let mut special = vcpu.get_sregs()?;
    let data = kvm_segment {
        limit: u32::MAX,
        selector: 16,
        type_: 3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    special.cs = kvm_segment { selector: 8, type_: 11, ..data };
    (special.ds, special.es, special.ss) = (data, data, data);
    (special.gdt.base, special.gdt.limit) = (GDT, 23);
    (special.idt.base, special.idt.limit) = (IDT, 0x7ff);
    special.cr0 |= 1;
    vcpu.set_sregs(&special)?;
    let mut registers = vcpu.get_regs()?;
    (registers.rip, registers.rsp, registers.rflags) = (START, STACK, 2);
    vcpu.set_regs(&registers)?;
    std::thread::spawn(move || {
        loop {
            match vcpu.run() {
                Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => {}
                // Whoever counts sees that nothing happens any more.
                other => return eprintln!("unexpected: {other:?}"),
            }
        }
    });
    let look = || -> Result<(Instant, [u64; 3]), Failure> {
        // SAFETY: a word of the guest's memory, aligned, which stays mapped.
        let word = |at: usize| unsafe { memory.add(at).cast::<u32>().read_volatile() };
        Ok((Instant::now(), [word(TICKS).into(), word(TURNS).into(), exits()?]))
    };
    std::thread::sleep(after);
    let (begun, before) = look()?;
    std::thread::sleep(time);
    let (end, now) = look()?;
    let [ticks, work] = [0, 1].map(|at| (now[at] as u32).wrapping_sub(before[at] as u32));
    let seconds = (end - begun).as_secs_f64();
    println!(
        "{}",
        serde_json::json!({"seconds": seconds, "ticks": ticks, "work": work, "exits": now[2] - before[2]})
    );
    // The vCPU's thread goes with the process.
    Ok(())
}

/// Exits of this process's guest by now.
fn exits() -> Result<u64, Failure> {
    let own = format!("{}-", std::process::id());
    for entry in std::fs::read_dir("/sys/kernel/debug/kvm")? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&own) {
            return Ok(std::fs::read_to_string(entry.path().join("exits"))?.trim().parse()?);
        }
    }
    Err("KVM has no counters of this guest in /sys/kernel/debug/kvm".into())
}

/// To the last word. The thread's own time: a guest that does nothing but exit never waits, and others may want the processor.
fn run(vcpu: &mut VcpuFd, busy: bool) -> Result<i64, Failure> {
    let begun = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    loop {
        let exit = match vcpu.run() {
            // A signal came, or the kernel wanted the thread for a moment: the guest has not left by itself.
            Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => continue,
            exit => exit?,
        };
        if busy {
            std::hint::black_box(tiny_vmm_computes(1));
        }
        match exit {
            VcpuExit::IoOut(0xf4, _) => break,
            VcpuExit::IoIn(_, data) => data.fill(0),
            VcpuExit::MmioRead(_, data) => data.fill(0),
            VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) | VcpuExit::Hlt => {}
            other => return Err(format!("unexpected: {other:?}").into()),
        }
    }
    let end = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Ok((end.tv_sec - begun.tv_sec) * 1_000_000_000 + (end.tv_nsec - begun.tv_nsec))
}
