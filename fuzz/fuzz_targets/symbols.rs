//! libFuzzer's way into the target `symbols`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::symbols::run(data);
});
