//! libFuzzer's way into the target `net_control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::net_control::run(data);
});
