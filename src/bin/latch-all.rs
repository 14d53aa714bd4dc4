//! The four programs in one file. The name under which the file is run, or else its first argument,
//! selects the program.
#![forbid(unsafe_code)]

use std::env;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The exit status for a wrong command line, the same as in latch(1).
const USAGE: u8 = 64;

fn main() -> ExitCode {
    let mut arguments = env::args_os();
    let called = arguments.next().unwrap_or_default();
    if let Some(main) = program(&called) {
        return main();
    }
    let word = arguments.next().unwrap_or_default();
    if program(&word).is_none() || word.as_encoded_bytes().contains(&b'/') {
        eprintln!("latch-all: name a program first: latchd, latch, sema or lfpd");
        return ExitCode::from(USAGE);
    }
    // The file is run again under the program's name, so that the program sees its usual arguments
    // and can start itself again.
    let error = Command::new("/proc/self/exe")
        .arg0(&word)
        .args(arguments)
        .exec();
    eprintln!(
        "latch-all: cannot start as {}: {error}",
        word.to_string_lossy()
    );
    ExitCode::FAILURE
}

fn program(called: &OsStr) -> Option<fn() -> ExitCode> {
    match Path::new(called).file_name()?.to_str()? {
        "latchd" => Some(latchd::latchd_main),
        // The guard of a command is a second instance of the program.
        "latch" | "latch-guard" => Some(latchd::latch_main),
        "sema" | "sema-guard" | "file-semaphore" | "semats" | "file-semaphore-ts" => {
            Some(latchd::sema_main)
        }
        "lfpd" => Some(latchd::lfpd_main),
        _ => None,
    }
}
