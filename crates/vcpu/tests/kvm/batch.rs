//! Batches: what the VMM sees of them, and what the guest finds in its array.
#![allow(unsafe_code)]
// UNSAFETY: a VMM reads and writes `kvm_run`.

use ioplane_vcpu::MemorySlot;
use ioplane_vcpu::batch::{
    BatchEntry, BatchHeader, BatchStatus, DOORBELL, EntryStatus, MAGIC, READ_MEMORY, READ_PORT, VERSION,
    WRITE_MEMORY, WRITE_PORT,
};
use ioplane_vcpu::kvm::{
    BatchCounts, ClusterLimits, ClusterSwitch, ClusteredVcpu, InterruptController, SharedVm, VcpuCounters,
    VcpuDescriptor, VmState,
};
use ioplane_vcpu::registers::{RAX, RBX, RCX, RDX, rflags};
use kvm_bindings::{KVM_EXIT_HLT, KVM_EXIT_IO, KVM_EXIT_MMIO, kvm_regs};

use crate::fake::{CODE, DEVICE, FakeKvm, MEMORY};
use crate::program::Random;
use crate::same::{LIMITS, clustered};

/// Where the array is.
const ARRAY: u64 = 0x9000;
/// Where a program without batches puts what it reads.
const READS: u64 = 0xa000;
const NOBODY: u64 = 0xffff_ffff;

/// What KVM_RUN has returned with.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Exit {
    Port {
        write: bool,
        port: u16,
        value: Vec<u8>,
    },
    Memory {
        write: bool,
        address: u64,
        value: Vec<u8>,
    },
    Halt,
    /// EINTR.
    Kicked,
}

fn out(port: u16, value: &[u8]) -> Exit {
    Exit::Port { write: true, port, value: value.to_vec() }
}

/// The doorbell, as a VMM without a device there answers it.
fn doorbell() -> Exit {
    Exit::Port { write: false, port: DOORBELL, value: vec![0xff; 4] }
}

struct Vmm {
    kvm: FakeKvm,
    state: SharedVm,
    vcpu: ClusteredVcpu,
    counters: &'static VcpuCounters,
    answered: u8,
}

impl Vmm {
    fn new(code: &[u8]) -> Self {
        Self::limited(code, LIMITS)
    }

    fn limited(code: &[u8], limits: ClusterLimits) -> Self {
        let mut kvm = FakeKvm::new(code, VmState::default());
        kvm.vm.interrupt_controller(InterruptController::Kernel);
        let state = kvm.shared_vm();
        let counters: &'static VcpuCounters = Box::leak(Box::default());
        let mut vcpu = clustered(&kvm, limits, counters);
        vcpu.offer_batches(true);
        Self { kvm, state, vcpu, counters, answered: 0 }
    }

    fn array(&mut self, entries: &[BatchEntry]) {
        let count = u16::try_from(entries.len()).unwrap();
        self.header(BatchHeader { magic: MAGIC, version: VERSION, count, ..Default::default() });
        for (entry, at) in entries.iter().zip((ARRAY + 16..).step_by(24)) {
            let head = [[entry.kind, entry.width].as_slice(), &entry.status.to_le_bytes()].concat();
            let bytes = [head.as_slice(), &entry.reserved.to_le_bytes(), &entry.address.to_le_bytes()];
            self.kvm.memory.write(at, &[bytes.concat().as_slice(), &entry.value.to_le_bytes()].concat());
        }
    }

    fn header(&mut self, header: BatchHeader) {
        let words = [header.version, header.count, header.done, header.status].map(u16::to_le_bytes).concat();
        let reserved = header.reserved.to_le_bytes();
        self.kvm.memory.write(ARRAY, &[header.magic.to_le_bytes().as_slice(), &words, &reserved].concat());
    }

    fn word(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.kvm.memory.read(at, 2).try_into().unwrap())
    }

    /// `done` and `status` of the header.
    fn said(&self) -> (u16, u16) {
        (self.word(ARRAY + 8), self.word(ARRAY + 10))
    }

    /// Status and value of an entry.
    fn entry(&self, index: u64) -> (u16, u64) {
        let at = ARRAY + 16 + 24 * index;
        (self.word(at + 2), u64::from_le_bytes(self.kvm.memory.read(at + 16, 8).try_into().unwrap()))
    }

    /// KVM_RUN, and what the VMM does then: the nth answer consists of bytes n, but for the doorbell, where no device is.
    fn run(&mut self) -> Exit {
        let result = self.vcpu.run(&self.state, &mut self.kvm);
        if result == -libc::EINTR {
            return Exit::Kicked;
        }
        assert_eq!(result, 0);
        let page = self.kvm.run_page();
        self.answered = self.answered.wrapping_add(1);
        // SAFETY: the page lives as long as `kvm`; all parts of the union are plain numbers.
        unsafe {
            match (*page).exit_reason {
                KVM_EXIT_HLT => Exit::Halt,
                KVM_EXIT_IO => {
                    let io = (*page).__bindgen_anon_1.io;
                    assert_eq!(io.count, 1);
                    let data = std::slice::from_raw_parts_mut(page.cast::<u8>().add(4096), io.size.into());
                    if io.direction == 0 {
                        data.fill(if io.port == DOORBELL { 0xff } else { self.answered });
                    }
                    Exit::Port { write: io.direction != 0, port: io.port, value: data.to_vec() }
                }
                KVM_EXIT_MMIO => {
                    let mmio = &mut (*page).__bindgen_anon_1.mmio;
                    let bytes = usize::try_from(mmio.len).unwrap();
                    if mmio.is_write == 0 {
                        mmio.data = [self.answered; 8];
                    }
                    let value = mmio.data[..bytes].to_vec();
                    Exit::Memory { write: mmio.is_write != 0, address: mmio.phys_addr, value }
                }
                other => panic!("exit {other}"),
            }
        }
    }

    /// All that the VMM sees until HLT.
    fn until_halt(&mut self) -> Vec<Exit> {
        let mut seen = Vec::new();
        loop {
            match self.run() {
                Exit::Halt => return seen,
                other => seen.push(other),
            }
            assert!(seen.len() < 10_000, "the program does not end");
        }
    }

    fn kick(&mut self, wish: u8) {
        let page = self.kvm.run_page();
        // SAFETY: the page lives as long as `kvm`.
        unsafe { (*page).immediate_exit = wish };
    }

    fn slot(&mut self, read_only: bool, logged: bool) {
        let host = self.kvm.memory.address();
        let slot = MemorySlot { number: 0, address: 0, size: MEMORY as u64, host, read_only, logged };
        // SAFETY: the memory lives as long as the slots.
        unsafe { self.state.change().slots.set(slot).unwrap() };
    }

    fn registers(&mut self) -> [u64; 16] {
        self.vcpu.before_other_call(&mut self.kvm);
        self.kvm.general.gpr
    }

    fn counts(&self) -> BatchCounts {
        self.counters.batches()
    }
}

fn entry(kind: u8, width: u8, address: u64, value: u64) -> BatchEntry {
    BatchEntry { kind, width, address, value, ..Default::default() }
}

/// MOV RAX, array; MOV EDX, DOORBELL; IN EAX, DX
fn ring() -> Vec<u8> {
    let doorbell = u32::from(DOORBELL).to_le_bytes();
    [&[0x48, 0xb8][..], &ARRAY.to_le_bytes(), &[0xba], &doorbell, &[0xed]].concat()
}

/// Rings once; RBX is the answer. HLT
fn once() -> Vec<u8> {
    [&ring()[..], &[0x89, 0xc3, 0xf4]].concat()
}

/// Rings until so many entries are done or nobody is there, and counts in ECX. INC ECX; CMP AX, count; JB; HLT
fn until_done(count: u16) -> Vec<u8> {
    let code = [&ring()[..], &[0xff, 0xc1, 0x66, 0x3d], &count.to_le_bytes(), &[0x72]].concat();
    let back = u8::try_from(256 - (code.len() + 1)).unwrap();
    [&code[..], &[back, 0xf4]].concat()
}

/// Writes to so many ports from 1F0h on, the nth of n.
fn writes(count: u16) -> Vec<BatchEntry> {
    (0..count).map(|n| entry(WRITE_PORT, 1, u64::from(0x1f0 + n), n.into())).collect()
}

/// The paper's figure, by one doorbell.
#[test]
fn eleven_writes_take_one_exit() {
    let mut vmm = Vmm::new(&once());
    vmm.array(&writes(11));
    let seen = vmm.until_halt();
    let wanted: Vec<Exit> = (0..11_u8).map(|n| out(0x1f0 + u16::from(n), &[n])).collect();
    assert_eq!(seen, wanted);
    assert_eq!(vmm.kvm.entries, 2, "and one for HLT");
    assert_eq!((vmm.said(), vmm.registers()[RBX]), ((11, 0), 11));
    assert!((0..11).all(|index| vmm.entry(index) == (EntryStatus::Done as u16, index)));
    assert_eq!(vmm.counts(), BatchCounts { answered: 1, accesses: 11, ..Default::default() });
    assert_eq!(vmm.registers()[RDX], u64::from(DOORBELL));
}

fn random_batch(random: &mut Random) -> Vec<BatchEntry> {
    (0..random.below(40) + 1)
        .map(|_| {
            let (width, value) = (1 << random.below(3), random.next());
            match random.below(4) {
                0 => entry(READ_PORT, width, 0x300 + random.below(256), value),
                1 => entry(WRITE_PORT, width, 0x300 + random.below(256), value),
                2 => entry(READ_MEMORY, width * 2, DEVICE + 8 * random.below(512), value),
                _ => entry(WRITE_MEMORY, width * 2, DEVICE + 8 * random.below(512), value),
            }
        })
        .collect()
}

/// The same accesses, an instruction for each; what is read goes to memory.
fn singly(entries: &[BatchEntry]) -> Vec<u8> {
    let mut code = Vec::new();
    for (entry, to) in entries.iter().zip((READS..).step_by(8)) {
        let address = u32::try_from(entry.address).unwrap().to_le_bytes();
        let choose =
            |forms: [&[u8]; 4]| forms[usize::try_from(entry.width.trailing_zeros()).unwrap()].to_vec();
        if matches!(entry.kind, READ_PORT | WRITE_PORT) {
            code.extend([[0xba].as_slice(), &address].concat());
        } else {
            code.extend([[0xbf].as_slice(), &address].concat());
        }
        match entry.kind {
            READ_PORT => {
                code.extend([&[0x31, 0xc0][..], &choose([&[0xec], &[0x66, 0xed], &[0xed], &[]])].concat())
            }
            READ_MEMORY => {
                code.extend(choose([&[0x0f, 0xb6, 7], &[0x0f, 0xb7, 7], &[0x8b, 7], &[0x48, 0x8b, 7]]))
            }
            kind => {
                code.extend([[0x48, 0xb8].as_slice(), &entry.value.to_le_bytes()].concat());
                code.extend(match kind {
                    WRITE_PORT => choose([&[0xee], &[0x66, 0xef], &[0xef], &[]]),
                    _ => choose([&[0x88, 7], &[0x66, 0x89, 7], &[0x89, 7], &[0x48, 0x89, 7]]),
                });
            }
        }
        if matches!(entry.kind, READ_PORT | READ_MEMORY) {
            code.extend([&[0x48, 0x89, 0x04, 0x25][..], &u32::try_from(to).unwrap().to_le_bytes()].concat());
        }
    }
    [code, vec![0xf4]].concat()
}

/// Whatever the batch, the limits, and whether it is rung for in a cluster: devices see what they would see of single instructions.
#[test]
fn a_batch_is_its_accesses() {
    let mut cut_short = 0;
    for seed in 0..1500 {
        let entries = random_batch(&mut Random(seed));
        let count = u16::try_from(entries.len()).unwrap();
        let mut plain = Vmm::new(&singly(&entries));
        plain.kvm.switched = ClusterSwitch::Off;
        let wanted = plain.until_halt();
        assert_eq!(wanted.len(), entries.len());
        for limits in [LIMITS, ClusterLimits { accesses: 1, ..LIMITS }, ClusterLimits { cycles: 0, ..LIMITS }]
        {
            for in_cluster in [false, true] {
                // OUT 0x80, AL before it, or NOP twice.
                let before = if in_cluster { [0xe6, 0x80] } else { [0x90; 2] };
                let mut vmm = Vmm::limited(&[&before[..], &until_done(count)].concat(), limits);
                vmm.array(&entries);
                if in_cluster {
                    assert_eq!(vmm.run(), out(0x80, &[0]));
                    vmm.answered = 0;
                }
                let seen = vmm.until_halt();
                assert_eq!(seen, wanted, "seed {seed}, {limits:?}, {in_cluster}, {entries:x?}");
                for (index, entry) in entries.iter().enumerate() {
                    let index = index as u64;
                    let value = match entry.kind {
                        READ_PORT | READ_MEMORY => {
                            let read = plain.kvm.memory.read(READS + 8 * index, 8);
                            u64::from_le_bytes(read.try_into().unwrap())
                        }
                        _ => entry.value,
                    };
                    assert_eq!(vmm.entry(index), (1, value), "seed {seed}, entry {index}, {entry:x?}");
                }
                assert_eq!(vmm.said(), (count, 0));
                cut_short += vmm.counts().cut_short;
            }
        }
    }
    assert!(cut_short > 10_000, "{cut_short} batches cut short");
}

/// In a cluster the doorbell itself takes no exit either, and the cluster goes on behind it.
#[test]
fn a_cluster_goes_on_over_a_batch() {
    // OUT 0x80, AL; the batch; OUT 0x80, AL, whose value is the answer; HLT
    let mut vmm = Vmm::new(&[&[0xe6, 0x80][..], &ring(), &[0xe6, 0x80, 0xf4]].concat());
    vmm.array(&writes(2));
    let wanted = [out(0x80, &[0]), out(0x1f0, &[0]), out(0x1f1, &[1]), out(0x80, &[2])];
    assert_eq!(vmm.until_halt(), wanted);
    assert_eq!(vmm.kvm.entries, 2);
}

/// What the guest does if nobody is there is its own business; the VMM answers the doorbell.
#[test]
fn where_nobody_is_the_vmm_has_the_doorbell() {
    let left = |prepare: &dyn Fn(&mut Vmm)| {
        let mut vmm = Vmm::new(&once());
        vmm.array(&writes(2));
        prepare(&mut vmm);
        let seen = vmm.until_halt();
        assert_eq!(seen, [doorbell()]);
        assert_eq!((vmm.registers()[RBX], vmm.said()), (NOBODY, (0, 0)));
        vmm.counts()
    };
    let all_left = BatchCounts { left: 1, ..Default::default() };
    assert_eq!(left(&|vmm| vmm.vcpu.offer_batches(false)), BatchCounts::default(), "not offered");
    // Switched off before the guest is entered: registers are not shared then.
    assert_eq!(left(&|vmm| vmm.kvm.switched = ClusterSwitch::Off), BatchCounts::default());
    assert_eq!(left(&|vmm| vmm.slot(false, true)), all_left, "logged");
}

/// A program that may use ports may not use a device's memory, nor all ports by way of one.
#[test]
fn level_3_has_no_batches() {
    for in_cluster in [false, true] {
        let before = if in_cluster { [0xe6, 0x80] } else { [0x90; 2] };
        let mut vmm = Vmm::new(&[&before[..], &once()[..once().len() - 1], &[0xe6, 0x81, 0xf4]].concat());
        vmm.array(&writes(2));
        // User pages, and ports for level 3.
        for table in [0x1000, 0x2000, 0x3000] {
            let entry = vmm.kvm.memory.read(table, 1)[0];
            vmm.kvm.memory.write(table, &[entry | 4]);
        }
        vmm.kvm.system.cpl = 3;
        vmm.kvm.general.rflags |= rflags::IOPL;
        if in_cluster {
            assert_eq!(vmm.run(), out(0x80, &[0]));
        }
        assert_eq!(vmm.run(), doorbell(), "{in_cluster}");
        assert_eq!(vmm.run(), out(0x81, &[0xff]));
        assert_eq!((vmm.said(), vmm.counts().left), ((0, 0), 1));
    }
}

/// The guest is told in EAX and in the array, and nothing has been done.
#[test]
fn bad_batches() {
    let answer = |header: BatchHeader, entries: &[BatchEntry]| {
        let mut vmm = Vmm::new(&once());
        vmm.array(entries);
        vmm.header(header);
        let seen = vmm.until_halt();
        assert_eq!(vmm.counts().refused, 1);
        (vmm.registers()[RBX], seen.len(), vmm.said())
    };
    let good = BatchHeader { magic: MAGIC, version: VERSION, count: 2, ..Default::default() };
    let wrong = |status: BatchStatus, done: u64| u64::from(status as u16) << 16 | done;
    let two = writes(2);
    assert_eq!(answer(BatchHeader { magic: 0, ..good }, &two), (wrong(BatchStatus::Header, 0), 0, (0, 0)));
    let none = BatchHeader { count: 0, ..good };
    assert_eq!(answer(none, &two), (wrong(BatchStatus::Count, 0), 0, (0, 3)));
    // The second writes to the PIC, which is KVM's.
    let pic = [two[0], entry(WRITE_PORT, 1, 0x20, 0x20)];
    assert_eq!(answer(good, &pic), (wrong(BatchStatus::Entry, 1), 1, (1, 4)));
    for bad in [entry(WRITE_MEMORY, 4, 0x8000, 0), entry(9, 1, 0x1f0, 0), entry(READ_PORT, 3, 0x1f0, 0)] {
        assert_eq!(answer(good, &[two[0], bad]), (wrong(BatchStatus::Entry, 0), 0, (0, 4)), "{bad:?}");
        let resumed = BatchHeader { done: 1, ..good };
        assert_eq!(answer(resumed, &[two[0], bad]), (wrong(BatchStatus::Entry, 1), 0, (1, 4)), "{bad:?}");
    }
    // An array at the end of memory.
    let code = [&[0x48, 0xb8][..], &DEVICE.to_le_bytes(), &once()[10..]].concat();
    let mut vmm = Vmm::new(&code);
    assert_eq!(vmm.until_halt(), []);
    assert_eq!(vmm.registers()[RBX], wrong(BatchStatus::Address, 0));
}

/// Another vCPU makes an entry a bad one while the VMM answers the one before.
#[test]
fn an_entry_that_changes_after_it_was_looked_at() {
    for in_cluster in [false, true] {
        let before = if in_cluster { [0xe6, 0x80] } else { [0x90; 2] };
        let mut vmm = Vmm::new(&[&before[..], &once()].concat());
        vmm.array(&writes(3));
        if in_cluster {
            vmm.run();
        }
        assert_eq!(vmm.run(), out(0x1f0, &[0]));
        vmm.kvm.memory.write(ARRAY + 16 + 24, &[WRITE_MEMORY, 4]);
        vmm.kvm.memory.write(ARRAY + 16 + 24 + 8, &0x8000_u64.to_le_bytes());
        let memory = vmm.kvm.memory.read(0x8000, 8);
        assert_eq!(vmm.until_halt(), []);
        assert_eq!(vmm.registers()[RBX], u64::from(BatchStatus::Entry as u16) << 16 | 1);
        assert_eq!((vmm.entry(1).0, vmm.said()), (EntryStatus::Memory as u16, (1, 4)));
        assert_eq!(vmm.kvm.memory.read(0x8000, 8), memory);
    }
}

/// A guest that rings again and again for what is refused: the VMM still gets the vCPU, and no stack grows.
#[test]
fn a_guest_that_rings_for_ever_is_stopped_by_the_vmm() {
    // OUT 0x80, AL; rings; JMP to the ring
    let ring = ring();
    let back = u8::try_from(256 - (ring.len() + 2)).unwrap();
    let code = [&[0xe6, 0x80][..], &ring, &[0xeb, back]].concat();
    for limits in [LIMITS, ClusterLimits { instructions: 1_000_000, accesses: 1_000_000, ..LIMITS }] {
        let mut vmm = Vmm::limited(&code, limits);
        vmm.header(BatchHeader::default());
        assert_eq!(vmm.run(), out(0x80, &[0]));
        vmm.kvm.leaves_after = Some(vmm.kvm.entries + 1000);
        assert_eq!(vmm.run(), Exit::Kicked);
        assert!(vmm.counts().refused > 900, "{:?}", vmm.counts());
        vmm.registers();
        assert!((CODE..CODE + code.len() as u64).contains(&vmm.kvm.general.rip));
    }
}

/// The VMM wants the vCPU after the third entry: what is done is said, and the guest rings for the rest.
#[test]
fn a_kick_ends_a_batch_after_the_entry_at_hand() {
    let mut vmm = Vmm::new(&until_done(5));
    vmm.array(&writes(5));
    for n in 0..3_u8 {
        assert_eq!(vmm.run(), out(0x1f0 + u16::from(n), &[n]));
    }
    vmm.kick(1);
    assert_eq!(vmm.run(), Exit::Kicked);
    assert_eq!(vmm.said(), (3, 0));
    let registers = vmm.registers();
    assert_eq!((registers[RAX], registers[RCX]), (3, 0), "behind IN");
    assert_eq!(vmm.kvm.general.rip, CODE + ring().len() as u64);
    vmm.kick(0);
    assert_eq!(vmm.until_halt(), [out(0x1f3, &[3]), out(0x1f4, &[4])]);
    assert_eq!((vmm.registers()[RCX], vmm.said(), vmm.counts().cut_short), (2, (5, 0), 1));
}

/// Taken with the state that KVM has in the middle of a batch, the guest goes on elsewhere, where nobody is: each access is done once.
#[test]
fn a_vcpu_that_moves_in_the_middle_of_a_batch() {
    for in_cluster in [false, true] {
        let before = if in_cluster { [0xe6, 0x80] } else { [0x90; 2] };
        let code = [&before[..], &once()].concat();
        let mut vmm = Vmm::new(&code);
        vmm.array(&writes(3));
        if in_cluster {
            vmm.run();
        }
        assert_eq!(vmm.run(), out(0x1f0, &[0]));
        vmm.kick(1);
        assert_eq!(
            vmm.run(),
            Exit::Kicked,
            "a VMM completes the access that it has answered before it stops a vCPU"
        );
        vmm.registers();
        let mut there = Vmm::new(&code);
        there.vcpu.offer_batches(false);
        there.kvm.general = vmm.kvm.general;
        let memory = vmm.kvm.memory.read(0, MEMORY);
        there.kvm.memory.write(0, &memory);
        assert_eq!(there.until_halt(), []);
        assert_eq!((there.registers()[RBX], there.said()), (1, (1, 0)), "the driver knows where to go on");
        // Rung once more there: nobody.
        there.kvm.general.rip = CODE + 2;
        assert_eq!(there.until_halt(), [doorbell()]);
        assert_eq!((there.registers()[RBX], there.said()), (NOBODY, (1, 0)));
    }
}

/// The VMM looks at registers while it answers an entry: they are those before the doorbell's IN. Then the answer is complete.
#[test]
fn registers_in_the_middle_of_a_batch_are_those_before_it() {
    for in_cluster in [false, true] {
        let before = if in_cluster { [0xe6, 0x80] } else { [0x90; 2] };
        let mut vmm = Vmm::new(&[&before[..], &until_done(4)].concat());
        vmm.array(&writes(4));
        if in_cluster {
            vmm.run();
        }
        assert_eq!(vmm.run(), out(0x1f0, &[0]));
        assert_eq!(vmm.run(), out(0x1f1, &[1]));
        let registers = vmm.registers();
        assert_eq!((registers[RAX], registers[RDX]), (ARRAY, u64::from(DOORBELL)));
        assert_eq!(vmm.kvm.general.rip, CODE + 2 + ring().len() as u64 - 1);
        assert_eq!(vmm.said().0, 1);
        // Another register is changed.
        let mut changed = kvm_regs::default();
        vmm.kvm.registers(&mut changed);
        changed.rbx = 0x77;
        vmm.kvm.set_registers(&changed);
        let seen = vmm.until_halt();
        assert_eq!(seen, [out(0x1f2, &[2]), out(0x1f3, &[3])], "{in_cluster}");
        let registers = vmm.registers();
        assert_eq!((registers[RBX], registers[RCX], vmm.said()), (0x77, 2, (4, 0)));
    }
}

/// The VMM moves RIP while it answers: the guest is elsewhere, and its memory is not touched.
#[test]
fn a_vcpu_that_the_vmm_moves_is_not_answered() {
    let mut vmm = Vmm::new(&once());
    vmm.array(&writes(2));
    assert_eq!(vmm.run(), out(0x1f0, &[0]));
    vmm.registers();
    let mut moved = kvm_regs::default();
    vmm.kvm.registers(&mut moved);
    moved.rip = CODE + once().len() as u64 - 1;
    vmm.kvm.set_registers(&moved);
    assert_eq!(vmm.until_halt(), []);
    assert_eq!((vmm.said(), vmm.registers()[RAX]), ((0, 0), ARRAY));
}

/// A migration begins while the VMM answers: what was read reaches the guest by a register, and it stores it itself.
#[test]
fn an_answer_that_would_be_missing_in_the_log_is_in_rdx() {
    for in_cluster in [false, true] {
        let before = if in_cluster { [0xe6, 0x80] } else { [0x90; 2] };
        let mut vmm = Vmm::new(&[&before[..], &once()].concat());
        vmm.array(&[
            entry(WRITE_PORT, 1, 0x70, 1),
            entry(READ_PORT, 2, 0x71, 0),
            entry(READ_PORT, 1, 0x71, 0),
        ]);
        if in_cluster {
            vmm.run();
        }
        assert_eq!(vmm.run(), out(0x70, &[1]));
        let Exit::Port { value, .. } = vmm.run() else { panic!("the second entry") };
        vmm.slot(false, true);
        let before = vmm.kvm.memory.read(ARRAY, 88);
        assert_eq!(vmm.until_halt(), []);
        assert_eq!(vmm.kvm.memory.read(ARRAY, 88), before, "as KVM has logged it");
        let registers = vmm.registers();
        assert_eq!(registers[RBX], u64::from(BatchStatus::NotStored as u16) << 16 | 2);
        assert_eq!(registers[RDX], u64::from(value[0]) << 8 | u64::from(value[0]));
        assert_eq!(vmm.counts().not_stored, 1);
    }
}

/// Memory that goes away, or becomes read-only, while the VMM answers.
#[test]
fn an_array_that_goes_away() {
    for gone in [true, false] {
        let mut vmm = Vmm::new(&once());
        vmm.array(&writes(3));
        assert_eq!(vmm.run(), out(0x1f0, &[0]));
        if gone {
            vmm.state.change().slots.remove(0);
        } else {
            vmm.slot(true, false);
        }
        assert_eq!(vmm.until_halt(), []);
        let registers = vmm.registers();
        assert_eq!(registers[RBX], u64::from(BatchStatus::NotStored as u16) << 16 | 1);
        assert_eq!((registers[RDX], vmm.said()), (0, (0, 0)), "of a write");
    }
}

/// A thread of the VMM that changes slots does not wait for the guest, nor the guest's answer for it.
#[test]
fn an_answer_does_not_wait_for_a_change_of_slots() {
    let (said, hears) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut vmm = Vmm::new(&once());
        vmm.array(&[entry(READ_PORT, 1, 0x71, 0)]);
        assert!(matches!(vmm.run(), Exit::Port { port: 0x71, .. }));
        let change = vmm.state.change();
        let result = vmm.vcpu.run(&vmm.state, &mut vmm.kvm);
        drop(change);
        let registers = vmm.registers();
        said.send((result, registers[RBX], registers[RDX])).unwrap();
    });
    let done = hears.recv_timeout(std::time::Duration::from_secs(20));
    assert_eq!(done, Ok((0, u64::from(BatchStatus::NotStored as u16) << 16 | 1, 1)));
}

/// An interrupt that a device raises in answer to an entry is delivered before the next one, to a guest that takes interrupts.
#[test]
fn an_interrupt_of_the_vmm_ends_a_batch() {
    for enabled in [true, false] {
        let mut vmm = Vmm::new(&until_done(3));
        vmm.array(&writes(3));
        if enabled {
            vmm.kvm.general.rflags |= rflags::IF;
        }
        assert_eq!(vmm.run(), out(0x1f0, &[0]));
        vmm.state.interrupt_raised();
        let entries = vmm.kvm.entries;
        assert_eq!(vmm.run(), out(0x1f1, &[1]));
        assert_eq!(vmm.kvm.entries - entries, u64::from(enabled));
        assert_eq!(vmm.until_halt(), [out(0x1f2, &[2])]);
        assert_eq!(vmm.counts().cut_short, u64::from(enabled));
    }
}

/// The switch: the entry at hand is completed, and then nobody is there.
#[test]
fn switched_off_in_the_middle_of_a_batch() {
    let mut vmm = Vmm::new(&until_done(4));
    vmm.array(&writes(4));
    assert_eq!(vmm.run(), out(0x1f0, &[0]));
    vmm.kvm.switched = ClusterSwitch::Off;
    assert_eq!(vmm.until_halt(), [doorbell()]);
    assert_eq!(vmm.said(), (1, 0));
}

/// Batches without clusters: other accesses are KVM's, and a cluster that is under way ends with the batch in it.
#[test]
fn batches_without_clusters() {
    // OUT 0x80, AL; the doorbell; OUT 0x81, AL; OUT 0x82, AL; HLT
    let code = [&[0xe6, 0x80][..], &ring(), &[0xe6, 0x81, 0xe6, 0x82, 0xf4]].concat();
    let mut vmm = Vmm::new(&code);
    vmm.kvm.switched = ClusterSwitch::BatchOnly;
    vmm.array(&writes(11));
    let seen = vmm.until_halt();
    assert_eq!(seen.len(), 14);
    assert_eq!(vmm.kvm.entries, 5, "each OUT, the doorbell and HLT");
    assert_eq!(vmm.counts(), BatchCounts { answered: 1, accesses: 11, ..Default::default() });
    assert_eq!(vmm.counters.counts().made_up_accesses, 0);

    let mut vmm = Vmm::new(&code);
    vmm.array(&writes(11));
    assert_eq!(vmm.run(), out(0x80, &[0]));
    assert_eq!(vmm.run(), out(0x1f0, &[0]));
    assert_eq!(vmm.kvm.entries, 1, "in a cluster");
    vmm.kvm.switched = ClusterSwitch::BatchOnly;
    assert_eq!(vmm.until_halt().len(), 12);
    assert_eq!(vmm.kvm.entries, 4, "each OUT and HLT");
    assert_eq!(vmm.counts(), BatchCounts { answered: 1, accesses: 11, ..Default::default() });

    // A guest that was offered none has exits as without the library.
    let mut vmm = Vmm::new(&once());
    vmm.vcpu.offer_batches(false);
    vmm.kvm.switched = ClusterSwitch::BatchOnly;
    vmm.array(&writes(2));
    assert_eq!(vmm.until_halt(), [doorbell()]);
}

/// A fault of the interposer: the guest rings again, finds nobody, and the array says what is left.
#[test]
fn a_panic_in_the_middle_of_a_batch() {
    // How many exits the VMM has seen before, and how many questions of KVM_RUN pass until the fault. The first question of an entry is
    // asked before the guest runs.
    let alone = [(0, 1), (0, 2), (1, 0), (2, 0)];
    let in_cluster = [(1, 0), (1, 1), (1, 2), (2, 0), (3, 0)];
    let cases = alone.map(|case| (false, case)).into_iter().chain(in_cluster.map(|case| (true, case)));
    for (in_cluster, (exits, questions)) in cases {
        let before = if in_cluster { [0xe6, 0x80] } else { [0x90; 2] };
        let mut vmm = Vmm::new(&[&before[..], &until_done(3)].concat());
        vmm.array(&writes(3));
        let mut seen: Vec<Exit> = (0..exits).map(|_| vmm.run()).collect();
        vmm.kvm.panic_when_asked.set(Some(questions));
        seen.extend(vmm.until_halt());
        let name = (in_cluster, exits, questions);
        assert!(vmm.state.has_failed(), "{name:?}");
        assert_eq!(vmm.registers()[RAX], NOBODY, "{name:?}");
        let (done, _) = vmm.said();
        let all = [out(0x80, &[0]), out(0x1f0, &[0]), out(0x1f1, &[1]), out(0x1f2, &[2])];
        let first = usize::from(!in_cluster);
        let wanted = [&all[first..1 + usize::from(done)], &[doorbell()]].concat();
        assert_eq!(seen, wanted, "{name:?}");
    }
}
