//! libFuzzer's way into the target `ring_walk`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::ring_walk::run(data);
});
