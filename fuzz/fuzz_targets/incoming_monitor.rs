//! libFuzzer's way into the target `incoming_monitor`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::incoming_monitor::run(data);
});
