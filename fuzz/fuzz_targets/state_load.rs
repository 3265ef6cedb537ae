//! libFuzzer's way into the target `state_load`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::state_load::run(data);
});
