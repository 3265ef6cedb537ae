//! libFuzzer's way into the target `tracepoints`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::tracepoints::run(data);
});
