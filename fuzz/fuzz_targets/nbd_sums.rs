//! libFuzzer's way into the target `nbd_sums`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::nbd::sums::run(data);
});
