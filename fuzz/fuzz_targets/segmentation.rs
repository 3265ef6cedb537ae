//! libFuzzer's way into the target `segmentation`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::segmentation::run(data);
});
