//! Servers with a wall clock of their own, by libfaketime. Time itself runs on as ever for them.

use std::fs;
use std::process::Command;

/// Gives `command` a clock that [`clear_up_after`] has to clear up after. The variables of
/// libfaketime that say which time it shows are the caller's.
pub fn with_a_clock_of_its_own(command: &mut Command) -> &mut Command {
    command
        .env("LD_PRELOAD", library())
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("DONT_FAKE_MONOTONIC", "1")
}

/// Removes what libfaketime cannot when its process is killed.
pub fn clear_up_after(pid: u32) {
    for name in ["faketime_shm_", "sem.faketime_sem_"] {
        let _ = fs::remove_file(format!("/dev/shm/{name}{pid}"));
    }
}

fn library() -> String {
    let directories = fs::read_dir("/usr/lib").expect("every host has it");
    let mut candidates = directories.filter_map(|entry| {
        let library = entry.ok()?.path().join("faketime/libfaketimeMT.so.1");
        library.exists().then_some(library)
    });
    let library = candidates.next();
    let library = library.expect("libfaketime is missing: install the Debian package faketime");
    library.display().to_string()
}
