//! libFuzzer's way into the target `nbd_replies`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::nbd::replies::run(data);
});
