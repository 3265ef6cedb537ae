//! libFuzzer's way into the target `vfio_user`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::vfio_user::run(data);
});
