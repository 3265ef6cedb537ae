//! Registers of the configuration space, as the PCI Local Bus Specification 3.0 (sections 6.1, 6.2, 6.8) and the PCI Express Base
//! Specification (7.5) name them. Offsets and sizes in bytes.
#![allow(missing_docs, reason = "names and values of the specification")]

/// Bytes of a conventional function's configuration space.
pub const CONFIG_SIZE: usize = 256;

pub const VENDOR_ID: usize = 0x00;
pub const DEVICE_ID: usize = 0x02;
pub const COMMAND: usize = 0x04;
pub const STATUS: usize = 0x06;
pub const REVISION_ID: usize = 0x08;
pub const CLASS_CODE: usize = 0x09;
pub const CACHE_LINE_SIZE: usize = 0x0c;
pub const LATENCY_TIMER: usize = 0x0d;
pub const HEADER_TYPE: usize = 0x0e;
pub const BAR0: usize = 0x10;
pub const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
pub const SUBSYSTEM_ID: usize = 0x2e;
pub const ROM: usize = 0x30;
pub const CAPABILITIES: usize = 0x34;
pub const INTERRUPT_LINE: usize = 0x3c;
pub const INTERRUPT_PIN: usize = 0x3d;
/// Where capabilities may begin.
pub const HEADER_END: usize = 0x40;

pub const COMMAND_IO: u16 = 1 << 0;
pub const COMMAND_MEMORY: u16 = 1 << 1;
pub const COMMAND_MASTER: u16 = 1 << 2;
pub const COMMAND_PARITY: u16 = 1 << 6;
pub const COMMAND_SERR: u16 = 1 << 8;
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;

pub const STATUS_INTERRUPT: u16 = 1 << 3;
pub const STATUS_CAPABILITIES: u16 = 1 << 4;

pub const BAR_IO: u32 = 1;
pub const BAR_MEMORY_64: u32 = 2 << 1;
pub const BAR_PREFETCHABLE: u32 = 1 << 3;

pub const CAP_MSI: u8 = 0x05;
pub const CAP_VENDOR: u8 = 0x09;
pub const CAP_EXPRESS: u8 = 0x10;
pub const CAP_MSIX: u8 = 0x11;

/// Of the MSI capability: message control, and its bits.
pub const MSI_CONTROL: usize = 2;
pub const MSI_ENABLE: u16 = 1;
pub const MSI_64: u16 = 1 << 7;
pub const MSI_MASKING: u16 = 1 << 8;
/// Of the MSI-X capability: message control, and its bits.
pub const MSIX_CONTROL: usize = 2;
/// One less than the entries of its table.
pub const MSIX_TABLE_SIZE: u16 = 0x7ff;
pub const MSIX_FUNCTION_MASK: u16 = 1 << 14;
pub const MSIX_ENABLE: u16 = 1 << 15;
/// Where the table is: the number of a BAR, and an offset in it.
pub const MSIX_TABLE: usize = 4;
pub const MSIX_TABLE_BAR: u32 = 7;
/// Bytes of an entry of the MSI-X table; its vector control word and mask bit.
pub const MSIX_ENTRY: usize = 16;
pub const MSIX_VECTOR_CONTROL: usize = 12;
pub const MSIX_MASKED: u32 = 1;
/// Of the PCI Express capability: device capabilities and device control, with function-level reset.
pub const EXPRESS_DEVICE_CAPABILITIES: usize = 4;
pub const EXPRESS_FLR: u32 = 1 << 28;
pub const EXPRESS_DEVICE_CONTROL: usize = 8;
pub const EXPRESS_INITIATE_FLR: u16 = 1 << 15;
/// Version 2, kind of a root complex integrated endpoint.
pub const EXPRESS_INTEGRATED: u16 = 2 | 9 << 4;
