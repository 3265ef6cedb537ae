//! libFuzzer's way into the target `moved_state`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::moved_state::run(data);
});
