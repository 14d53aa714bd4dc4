#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| latchd::fuzzing::http_body(input));
