//! 32-bit code with paging through KVM_RUN: the same accesses with and without clustering, and what KVM is asked for.

use ioplane_vcpu::kvm::{ClusterEnd, InterruptController, VcpuCounters, VmState};
use ioplane_vcpu::registers::{cr0, cr4, efer};
use ioplane_vcpu::{CachedSegment, StopReason, SystemRegisters, segments};

use crate::fake::{DEVICE, FakeKvm};
use crate::real::run_on;

/// Where physical memory begins once more for the guest, with the device at its end.
const WINDOW: u32 = 0xf840_0000;
/// What FS takes addresses down by, as Linux's data of a processor.
const DOWN: u32 = 0xff80_0000;
const DATA: u32 = 0x9000;
const PDPTES: [u64; 4] = [0x2001, 0, 0, 0x3001];
const CR3: u64 = 0x1020;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    Narrow,
    Pae,
}

/// Linux's segments: all of 4 GiB but FS, which has a base.
pub fn kvm(tables: Tables, code: &[u8]) -> FakeKvm {
    const GOOD: u64 = 0x63;
    const LARGE: u64 = 0x80;
    let mut kvm = FakeKvm::new(code, VmState::default());
    kvm.vm.interrupt_controller(InterruptController::Kernel);
    let flat =
        CachedSegment { selector: 0x7b, base: 0, limit: u32::MAX, readable: true, writable: true, big: true };
    let mut all = [flat; 6];
    all[segments::CS].writable = false;
    all[segments::FS].base = DOWN.into();
    kvm.system = SystemRegisters {
        cr0: cr0::PE | cr0::PG | cr0::WP,
        cr3: CR3,
        cr4: if tables == Tables::Pae { cr4::PAE } else { cr4::PSE },
        efer: if tables == Tables::Pae { efer::NXE } else { 0 },
        code_long: false,
        code_default_big: true,
        flat: true,
        segments: all,
        ..kvm.system
    };
    let window = u64::from(WINDOW);
    match tables {
        Tables::Narrow => {
            let all = u32::try_from(GOOD | LARGE).unwrap();
            kvm.memory.write(0x1000, &all.to_le_bytes());
            kvm.memory.write(0x1000 + 4 * (window >> 22), &all.to_le_bytes());
        }
        Tables::Pae => {
            kvm.system.pdptes = PDPTES;
            kvm.pdptes.0 = Some(PDPTES);
            for (number, pdpte) in PDPTES.iter().enumerate() {
                kvm.memory.write(CR3 + 8 * number as u64, &pdpte.to_le_bytes());
            }
            kvm.memory.write(0x2000, &(GOOD | LARGE).to_le_bytes());
            let at = 0x3000 + 8 * (window >> 21 & 0x1ff);
            kvm.memory.write(at, &(GOOD | LARGE).to_le_bytes());
            kvm.memory.write(at + 8, &(DEVICE | GOOD | LARGE).to_le_bytes());
        }
    }
    kvm
}

/// Three rounds: a port, memory by a segment with a base, and a device's memory.
fn program() -> Vec<u8> {
    let mut code = vec![0xb9, 3, 0, 0, 0, 0xbb];
    code.extend((WINDOW + u32::try_from(DEVICE).unwrap()).to_le_bytes());
    let top = code.len();
    // MOV EDX, 0x3d4; MOV EAX, ECX; OUT DX, AL; IN AL, DX
    code.extend([0xba, 0xd4, 0x03, 0, 0, 0x89, 0xc8, 0xee, 0xec]);
    // ADD FS:[DATA + DOWN's opposite], EAX
    code.extend([0x64, 0x01, 0x05]);
    code.extend(DATA.wrapping_sub(DOWN).to_le_bytes());
    // MOV [EBX+8], EAX; MOVZX ESI, BYTE [EBX+0x20]; PUSH ESI; POP EDI; DEC ECX; JNZ
    code.extend([0x89, 0x43, 0x08, 0x0f, 0xb6, 0x73, 0x20, 0x56, 0x5f, 0x49, 0x75]);
    code.push(u8::try_from(top).unwrap().wrapping_sub(u8::try_from(code.len() + 1).unwrap()));
    code.push(0xf4);
    code
}

#[test]
fn a_cluster_of_paged_32_bit_code_takes_one_exit() {
    for tables in [Tables::Narrow, Tables::Pae] {
        let (plain, kvm) = run_on(self::kvm(tables, &program()), None);
        assert_eq!((plain.len(), kvm.entries, kvm.pdptes.1), (12, 13, 0), "{tables:?}");
        let counters: &'static VcpuCounters = Box::leak(Box::default());
        let (with, clustered) = run_on(self::kvm(tables, &program()), Some(counters));
        assert_eq!((with, clustered.general), (plain, kvm.general), "{tables:?}");
        assert_eq!(clustered.memory.read(DATA.into(), 4), kvm.memory.read(DATA.into(), 4));
        let counts = counters.counts();
        assert_eq!((counts.real_accesses, counts.made_up_accesses, clustered.entries), (1, 11, 2));
        assert_eq!(clustered.pdptes.1, u64::from(tables == Tables::Pae), "asked once in a cluster");
    }
}

fn refused(kvm: FakeKvm) -> (&'static VcpuCounters, FakeKvm) {
    let counters: &'static VcpuCounters = Box::leak(Box::default());
    let (did, kvm) = run_on(kvm, Some(counters));
    assert_eq!(did.len(), 12);
    (counters, kvm)
}

/// Where the processor's PDPTEs are not what is in memory, VMX goes by the former and SVM by the latter.
#[test]
fn pdptes_that_have_changed_since_are_the_processors() {
    for number in 0..4 {
        let mut changed = kvm(Tables::Pae, &program());
        let at = CR3 + 8 * number;
        changed.memory.write(at, &0x5001_u64.to_le_bytes());
        let (counters, kvm) = refused(changed);
        assert_eq!((counters.counts().made_up_accesses, kvm.entries), (0, 13), "PDPTE {number}");
        let mode = ClusterEnd::Stopped(StopReason::Mode).index();
        assert_eq!(counters.not_begun()[mode], 12);
        assert_eq!(kvm.pdptes.1, 12, "it may be other ones the next time");
    }
}

#[test]
fn a_kvm_that_does_not_say_is_asked_once() {
    let mut silent = kvm(Tables::Pae, &program());
    silent.pdptes.0 = None;
    let (counters, kvm) = refused(silent);
    assert_eq!((counters.counts().made_up_accesses, kvm.pdptes.1), (0, 1));
    assert_eq!(counters.not_begun()[ClusterEnd::Stopped(StopReason::Mode).index()], 12);
}
