//! libFuzzer's way into the target `frames`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::frames::run(data);
});
