//! The VMM and the guest of `tests/preload.rs`, to be run elsewhere: `small_vmm long|narrow|pae`. Prints a line for each access, and what was saved if the
//! library is preloaded.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../tests/vmm/mod.rs"]
mod vmm;

fn main() {
    vmm::run(&std::env::args().nth(1).unwrap_or_default());
}
