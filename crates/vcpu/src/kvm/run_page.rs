//! The memory that KVM, the VMM and the interposer share for each vCPU: `struct kvm_run` and the page with what ports
//! carry (Documentation/virt/kvm/api.rst, section 5).
#![allow(unsafe_code)]
// UNSAFETY: the page is shared with the kernel and with a VMM that has mapped it too; fields are read and written singly.

use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::{
    KVM_EXIT_IO, KVM_EXIT_IO_IN, KVM_EXIT_IO_OUT, KVM_EXIT_MMIO, KVM_SYNC_X86_EVENTS, KVM_SYNC_X86_REGS,
    KVM_SYNC_X86_SREGS, kvm_regs, kvm_run, kvm_segment, kvm_sregs, kvm_vcpu_events,
};

use crate::arithmetic::OperandSize;
use crate::memory::DeviceAccess;
use crate::registers::{GeneralRegisters, SystemRegisters, cr0, rflags};
use crate::segments::CachedSegment;

/// Where KVM puts the data of ports: the second page of the mapping.
const PORT_DATA: usize = 4096;
/// What KVM is asked to share at every exit.
const WANTED: u64 = (KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS | KVM_SYNC_X86_EVENTS) as u64;
/// What the interposer writes to `immediate_exit`. KVM takes anything but 0 for a wish to leave; a VMM writes 1. So the
/// interposer takes its own back without losing one that the VMM has written in between.
const OWN_EXIT: u8 = 2;

/// A mapped vCPU descriptor.
pub struct RunPage {
    page: *mut kvm_run,
}

// SAFETY: the mapping belongs to no thread; who calls is said at `RunPage::new`.
unsafe impl Send for RunPage {}

/// What KVM_RUN has returned with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KvmExit {
    Access(DeviceAccess),
    Other,
}

impl RunPage {
    /// # Safety
    /// `page` is what mapping a vCPU descriptor gave (KVM_GET_VCPU_MMAP_SIZE bytes, at least two pages), and stays mapped
    /// as long as the value. All methods are called on one thread at a time, and not during KVM_RUN.
    pub unsafe fn new(page: *mut kvm_run) -> Self {
        Self { page }
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: mapped (`new`); the VMM's signal handlers write it, so it is only used atomically.
        unsafe { AtomicU8::from_ptr(&raw mut (*self.page).immediate_exit) }
    }

    /// Whether the VMM wants the vCPU to leave KVM_RUN.
    pub(super) fn wanted_by_vmm(&self) -> bool {
        // SAFETY: mapped (`new`).
        let window = unsafe { (&raw const (*self.page).request_interrupt_window).read_volatile() };
        self.immediate_exit().load(Ordering::Acquire) != 0 || window != 0
    }

    /// Runs `enter` so that KVM only completes what is pending, and returns what it returned.
    pub(super) fn only_complete(&self, enter: impl FnOnce() -> i32) -> i32 {
        struct PutBack<'a>(&'a AtomicU8);
        impl Drop for PutBack<'_> {
            fn drop(&mut self) {
                let _ = self.0.compare_exchange(OWN_EXIT, 0, Ordering::AcqRel, Ordering::Acquire);
            }
        }
        // If the VMM has set it, KVM leaves at once as well, and the VMM's wish stays.
        let immediate_exit = self.immediate_exit();
        let _ = immediate_exit.compare_exchange(0, OWN_EXIT, Ordering::AcqRel, Ordering::Acquire);
        let _put_back = PutBack(immediate_exit);
        enter()
    }

    /// Whether the VMM uses the shared registers itself; then they are left to it.
    pub(super) fn registers_in_use(&self) -> bool {
        // SAFETY: mapped (`new`).
        let (valid, dirty) = unsafe {
            (
                (&raw const (*self.page).kvm_valid_regs).read_volatile(),
                (&raw const (*self.page).kvm_dirty_regs).read_volatile(),
            )
        };
        dirty != 0 || valid != 0 && valid != WANTED
    }

    /// Asks KVM to share the registers at the next exit.
    pub(super) fn share_registers(&self) {
        // SAFETY: mapped (`new`).
        unsafe { (&raw mut (*self.page).kvm_valid_regs).write_volatile(WANTED) }
    }

    /// The registers at the last exit.
    pub(super) fn general(&self) -> GeneralRegisters {
        // SAFETY: mapped (`new`); the union has only plain numbers.
        let regs: kvm_regs = unsafe { (&raw const (*self.page).s.regs.regs).read_volatile() };
        general_of(&regs)
    }

    /// Has KVM take these registers at the next entry.
    pub(super) fn put_general(&self, general: &GeneralRegisters) {
        // SAFETY: mapped (`new`).
        unsafe {
            (&raw mut (*self.page).s.regs.regs).write_volatile(regs_of(general));
            (&raw mut (*self.page).kvm_dirty_regs).write_volatile(u64::from(KVM_SYNC_X86_REGS));
        }
    }

    /// The system registers at the last exit.
    pub(super) fn system(&self) -> SystemRegisters {
        // SAFETY: mapped (`new`); the union has only plain numbers.
        let sregs: kvm_sregs = unsafe { (&raw const (*self.page).s.regs.sregs).read_volatile() };
        SystemRegisters {
            cr0: sregs.cr0,
            cr3: sregs.cr3,
            cr4: sregs.cr4,
            efer: sregs.efer,
            // In real mode the processor does not look at it.
            cpl: if sregs.cr0 & cr0::PE == 0 { 0 } else { sregs.ss.dpl },
            code_long: sregs.cs.l != 0,
            code_default_big: sregs.cs.db != 0,
            flat: is_flat(&sregs.cs, CODE_READABLE)
                && [&sregs.ds, &sregs.es, &sregs.ss].into_iter().all(|one| is_flat(one, DATA_WRITABLE)),
            segments: [sregs.es, sregs.cs, sregs.ss, sregs.ds, sregs.fs, sregs.gs].map(|one| cached(&one)),
            // `kvm_run` has none.
            pdptes: [0; 4],
        }
    }

    /// Where the local APIC's page is.
    pub(super) fn apic_page(&self) -> u64 {
        // SAFETY: mapped (`new`).
        let base = unsafe { (&raw const (*self.page).apic_base).read_volatile() };
        base & 0x000f_ffff_ffff_f000
    }

    /// Whether an exception, interrupt, NMI or SMI is on its way, or the last instruction holds interrupts back.
    pub(super) fn event_pending(&self) -> bool {
        // SAFETY: mapped (`new`); the union has only plain numbers.
        let events: kvm_vcpu_events = unsafe { (&raw const (*self.page).s.regs.events).read_volatile() };
        [
            events.exception.injected,
            events.exception.pending,
            events.interrupt.injected,
            events.interrupt.shadow,
            events.nmi.injected,
            events.nmi.pending,
            events.smi.smm,
            events.smi.pending,
            events.smi.latched_init,
            events.triple_fault.pending,
        ]
        .into_iter()
        .any(|event| event != 0)
    }

    /// What KVM_RUN has returned with, after it returned 0.
    pub(super) fn exit(&self) -> KvmExit {
        // SAFETY: mapped (`new`); exit_reason says which part of the union counts, and all have plain numbers.
        unsafe {
            match (&raw const (*self.page).exit_reason).read_volatile() {
                KVM_EXIT_IO => {
                    let io = (&raw const (*self.page).__bindgen_anon_1.io).read_volatile();
                    let size = match io.size {
                        1 => OperandSize::Byte,
                        2 => OperandSize::Word,
                        4 => OperandSize::Dword,
                        _ => return KvmExit::Other,
                    };
                    let (port, count) = (io.port, io.count);
                    if io.data_offset != PORT_DATA as u64 {
                        return KvmExit::Other;
                    }
                    KvmExit::Access(if u32::from(io.direction) == KVM_EXIT_IO_IN {
                        DeviceAccess::PortRead { port, size, count }
                    } else {
                        DeviceAccess::PortWrite { port, size, count }
                    })
                }
                KVM_EXIT_MMIO => {
                    let mmio = (&raw const (*self.page).__bindgen_anon_1.mmio).read_volatile();
                    let size = match mmio.len {
                        1 => OperandSize::Byte,
                        2 => OperandSize::Word,
                        4 => OperandSize::Dword,
                        8 => OperandSize::Qword,
                        _ => return KvmExit::Other,
                    };
                    let address = mmio.phys_addr;
                    KvmExit::Access(if mmio.is_write != 0 {
                        DeviceAccess::MemoryWrite { address, size, value: u64::from_le_bytes(mmio.data) }
                    } else {
                        DeviceAccess::MemoryRead { address, size }
                    })
                }
                _ => KvmExit::Other,
            }
        }
    }

    /// Makes it look as if KVM_RUN had returned with this access. The data of a port write is in [`RunPage::port_data`]
    /// already.
    /// `takes_interrupts`: the VMM may hand KVM an interrupt now.
    pub(super) fn put_exit(&self, access: &DeviceAccess, general: &GeneralRegisters, takes_interrupts: bool) {
        let bytes = |size: OperandSize| size.bytes().to_le_bytes()[0];
        let io = |direction: u32, port: u16, size: OperandSize, count: u32| {
            // SAFETY: mapped (`new`).
            unsafe {
                let io = &raw mut (*self.page).__bindgen_anon_1.io;
                (&raw mut (*io).direction).write_volatile(direction.to_le_bytes()[0]);
                (&raw mut (*io).size).write_volatile(bytes(size));
                (&raw mut (*io).port).write_volatile(port);
                (&raw mut (*io).count).write_volatile(count);
                (&raw mut (*io).data_offset).write_volatile(PORT_DATA as u64);
                (&raw mut (*self.page).exit_reason).write_volatile(KVM_EXIT_IO);
            }
        };
        let mmio = |write: u8, address: u64, size: OperandSize, value: u64| {
            // SAFETY: mapped (`new`).
            unsafe {
                let mmio = &raw mut (*self.page).__bindgen_anon_1.mmio;
                (&raw mut (*mmio).phys_addr).write_volatile(address);
                (&raw mut (*mmio).data).write_volatile(value.to_le_bytes());
                (&raw mut (*mmio).len).write_volatile(u32::from(bytes(size)));
                (&raw mut (*mmio).is_write).write_volatile(write);
                (&raw mut (*self.page).exit_reason).write_volatile(KVM_EXIT_MMIO);
            }
        };
        match *access {
            DeviceAccess::PortRead { port, size, count } => io(KVM_EXIT_IO_IN, port, size, count),
            DeviceAccess::PortWrite { port, size, count } => io(KVM_EXIT_IO_OUT, port, size, count),
            DeviceAccess::MemoryRead { address, size } => mmio(0, address, size, 0),
            DeviceAccess::MemoryWrite { address, size, value } => mmio(1, address, size, value),
        }
        let enabled = u8::from(general.rflags & rflags::IF != 0);
        // SAFETY: mapped (`new`).
        unsafe {
            (&raw mut (*self.page).if_flag).write_volatile(enabled);
            (&raw mut (*self.page).ready_for_interrupt_injection).write_volatile(u8::from(takes_interrupts));
        }
    }

    /// Whether KVM would have taken an interrupt from the VMM at the last exit.
    pub(super) fn takes_interrupts(&self) -> bool {
        // SAFETY: mapped (`new`).
        unsafe { (&raw const (*self.page).ready_for_interrupt_injection).read_volatile() != 0 }
    }

    /// IF of the guest at the last exit.
    pub(super) fn interrupts_enabled(&self) -> bool {
        // SAFETY: mapped (`new`).
        unsafe { (&raw const (*self.page).if_flag).read_volatile() != 0 }
    }

    /// What ports carry: the VMM has written it at a read, and will read it at a write.
    pub(super) fn port_data(&mut self) -> &mut [u8] {
        // SAFETY: mapped (`new`), and neither KVM nor the VMM's threads touch it while this thread is outside of both.
        unsafe { std::slice::from_raw_parts_mut(self.page.cast::<u8>().add(PORT_DATA), 4096) }
    }

    /// The same, for use together with the other fields.
    pub(super) fn with_port_data(&mut self) -> (&Self, &mut [u8]) {
        // SAFETY: as in `port_data`; no method here touches that page through `&self`.
        let data = unsafe { std::slice::from_raw_parts_mut(self.page.cast::<u8>().add(PORT_DATA), 4096) };
        (self, data)
    }

    /// What the VMM has answered to a read of memory.
    pub(super) fn memory_data(&self) -> u64 {
        // SAFETY: mapped (`new`).
        u64::from_le_bytes(unsafe { (&raw const (*self.page).__bindgen_anon_1.mmio.data).read_volatile() })
    }
}

/// Bits of a segment's type (Intel SDM volume 3, 3.4.5.1), and what they must be: code that can be read, data that can be written
/// and grows upwards.
const CODE_READABLE: (u8, u8) = (0b1010, 0b1010);
const DATA_WRITABLE: (u8, u8) = (0b1110, 0b0010);

const CODE: u8 = 0b1000;
const CODE_MAY_BE_READ: u8 = 0b0010;
const DATA_MAY_BE_WRITTEN: u8 = 0b0010;
const DATA_GROWS_DOWNWARDS: u8 = 0b0100;

/// What the interpreter uses of a segment. The base counts for all, the rest for segments of memory.
fn cached(segment: &kvm_segment) -> CachedSegment {
    let has = |bit: u8| segment.type_ & bit != 0;
    let memory = segment.present == 1 && segment.unusable == 0 && segment.s == 1;
    let upwards = has(CODE) || !has(DATA_GROWS_DOWNWARDS);
    CachedSegment {
        selector: segment.selector,
        base: segment.base,
        limit: segment.limit,
        readable: memory && upwards && (!has(CODE) || has(CODE_MAY_BE_READ)),
        writable: memory && upwards && !has(CODE) && has(DATA_MAY_BE_WRITTEN),
        big: segment.db != 0,
    }
}

/// Whether a segment is the first 4 GiB, with addresses of 32 bits.
fn is_flat(segment: &kvm_segment, (mask, kind): (u8, u8)) -> bool {
    segment.present == 1
        && segment.unusable == 0
        && segment.s == 1
        && segment.db == 1
        && segment.base == 0
        && segment.limit == u32::MAX
        && segment.type_ & mask == kind
}

/// In the processor's numbering.
pub(super) fn general_of(regs: &kvm_regs) -> GeneralRegisters {
    GeneralRegisters {
        gpr: [
            regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8, regs.r9,
            regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
        ],
        rip: regs.rip,
        rflags: regs.rflags,
    }
}

/// As KVM has them.
pub(super) fn regs_of(general: &GeneralRegisters) -> kvm_regs {
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15] = general.gpr;
    kvm_regs {
        rax,
        rbx,
        rcx,
        rdx,
        rsi,
        rdi,
        rsp,
        rbp,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rip: general.rip,
        rflags: general.rflags,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_segments_allow() {
        let of = |type_| kvm_segment {
            limit: 0xffff,
            selector: 0x40,
            base: 0x400,
            type_,
            present: 1,
            s: 1,
            ..Default::default()
        };
        let allows = |segment: &kvm_segment| (cached(segment).readable, cached(segment).writable);
        // Data: read-only, written to, each upwards and downwards. Code: executed only, read.
        let kinds = [(0x1, (true, false)), (0x3, (true, true)), (0x5, (false, false)), (0x7, (false, false))];
        for (kind, wanted) in
            kinds.into_iter().chain([(0x9, (false, false)), (0xb, (true, false)), (0xf, (true, false))])
        {
            assert_eq!(allows(&of(kind)), wanted, "type {kind:x}");
        }
        for other in [
            kvm_segment { present: 0, ..of(3) },
            kvm_segment { unusable: 1, ..of(3) },
            kvm_segment { s: 0, ..of(3) },
        ] {
            assert_eq!(allows(&other), (false, false), "{other:?}");
        }
        let all = cached(&kvm_segment { db: 1, ..of(3) });
        assert_eq!((all.selector, all.base, all.limit, all.big), (0x40, 0x400, 0xffff, true));
    }

    #[test]
    fn flat_segments_and_others() {
        let flat = |type_| kvm_segment {
            limit: u32::MAX,
            selector: 8,
            type_,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        assert!(is_flat(&flat(0b1011), CODE_READABLE) && is_flat(&flat(0b0011), DATA_WRITABLE));
        assert!(!is_flat(&flat(0b1001), CODE_READABLE), "code that cannot be read");
        for kind in [0b0001, 0b0111, 0b1011] {
            assert!(!is_flat(&flat(kind), DATA_WRITABLE), "read-only, growing downwards, code");
        }
        for other in [
            kvm_segment { base: 16, ..flat(0b0011) },
            kvm_segment { limit: 0xffff, ..flat(0b0011) },
            kvm_segment { db: 0, ..flat(0b0011) },
            kvm_segment { present: 0, ..flat(0b0011) },
            kvm_segment { unusable: 1, ..flat(0b0011) },
            kvm_segment { s: 0, ..flat(0b0011) },
        ] {
            assert!(!is_flat(&other, DATA_WRITABLE), "{other:?}");
        }
    }
}
