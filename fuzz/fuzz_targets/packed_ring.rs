//! libFuzzer's way into the target `packed_ring`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::packed_ring::run(data);
});
