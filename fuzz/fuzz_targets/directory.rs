//! libFuzzer's way into the target `directory`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::directory::run(data);
});
