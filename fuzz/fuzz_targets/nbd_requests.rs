//! libFuzzer's way into the target `nbd_requests`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::nbd::requests::run(data);
});
