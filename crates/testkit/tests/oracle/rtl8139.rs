//! QEMU's `rtl8139` and ours.
