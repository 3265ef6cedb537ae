//! libFuzzer's way into the target `nbd_client`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::nbd::client::run(data);
});
