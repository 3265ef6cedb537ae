//! What the VMM of the tests answers, which depends on nothing but the access and how many there were.
#![allow(unsafe_code)]
// UNSAFETY: a VMM reads and writes `kvm_run`.

use kvm_bindings::{KVM_EXIT_HLT, KVM_EXIT_IO, KVM_EXIT_MMIO, kvm_run};

use crate::program::STATUS;

/// Answers the access that KVM_RUN has returned with, the `asked`th: what it was, and whether it is a single one of a port. `None` at
/// HLT.
pub fn answer(page: *mut kvm_run, asked: usize) -> Option<(String, bool)> {
    // SAFETY: the caller's page, which nobody else uses now; all parts of the union are plain numbers.
    unsafe {
        match (*page).exit_reason {
            KVM_EXIT_HLT => None,
            KVM_EXIT_IO => {
                let io = (*page).__bindgen_anon_1.io;
                let bytes = usize::from(io.size) * usize::try_from(io.count).unwrap();
                let data = std::slice::from_raw_parts_mut(page.cast::<u8>().add(4096), bytes);
                if io.direction == 0 {
                    for (place, byte) in data.iter_mut().enumerate() {
                        *byte = u8::try_from((asked * 7 + place) % 251).unwrap();
                    }
                    if io.port == STATUS {
                        data[0] = u8::from(asked.is_multiple_of(3));
                    }
                }
                let (direction, port, size, count) = (io.direction, io.port, io.size, io.count);
                Some((format!("{direction} {port:x} size {size} count {count} {data:x?}"), count == 1))
            }
            KVM_EXIT_MMIO => {
                let mmio = &mut (*page).__bindgen_anon_1.mmio;
                if mmio.is_write == 0 {
                    mmio.data = (asked as u64 * 0x0101_0101).to_le_bytes();
                }
                let data = &mmio.data[..usize::try_from(mmio.len).unwrap()];
                Some((format!("mmio {} {:x} {data:x?}", mmio.is_write, mmio.phys_addr), false))
            }
            other => panic!("exit {other}"),
        }
    }
}
