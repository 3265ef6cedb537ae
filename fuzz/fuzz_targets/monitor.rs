//! libFuzzer's way into the target `monitor`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::monitor::run(data);
});
