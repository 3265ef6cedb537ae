//! libFuzzer's way into the target `blk_request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ioplane_fuzz::blk_request::run(data);
});
