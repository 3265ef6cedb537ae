//! libFuzzer's way into the target `vhost_user`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::vhost_user::run(data);
});
