//! Lock files for the shell: see sema(1).
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    latchd::sema_main()
}
