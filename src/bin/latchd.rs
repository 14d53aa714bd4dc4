//! The network lock server: see latchd(8).
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    latchd::latchd_main()
}
