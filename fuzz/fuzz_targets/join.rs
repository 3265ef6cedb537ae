//! libFuzzer's way into the target `join`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::join::run(data);
});
