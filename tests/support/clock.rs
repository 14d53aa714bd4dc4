//! Servers with a wall clock of their own, by libfaketime. Time itself runs on as ever for them.

use std::fs;
use std::process::Command;

use super::needs::Program;

/// Gives `command` a clock that [`clear_up_after`] has to clear up after. The variables of
/// libfaketime that say which time it shows are the caller's.
pub fn with_a_clock_of_its_own<'a>(
    command: &'a mut Command,
    libfaketime: &Program,
) -> &'a mut Command {
    command
        .env("LD_PRELOAD", libfaketime)
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("DONT_FAKE_MONOTONIC", "1")
}

/// Removes what libfaketime cannot when its process is killed.
pub fn clear_up_after(pid: u32) {
    for name in ["faketime_shm_", "sem.faketime_sem_"] {
        let _ = fs::remove_file(format!("/dev/shm/{name}{pid}"));
    }
}
