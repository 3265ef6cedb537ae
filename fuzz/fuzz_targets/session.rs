//! libFuzzer's way into the target `session`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::session::run(data);
});
