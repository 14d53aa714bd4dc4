//! The server for the Lock File Protocol: see lfpd(8).
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    latchd::lfpd_main()
}
