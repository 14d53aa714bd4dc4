//! Locks and semaphores for the shell: see latch(1).
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    latchd::latch_main()
}
