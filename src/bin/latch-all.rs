//! The four programs in one file: the name it is called by, or its first word, picks the program.
#![forbid(unsafe_code)]

use std::env;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The exit status of a wrong command line, as latch(1) has it.
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
    // Under its own name, so that its arguments, and what it starts, are those of the program.
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
        "latch" => Some(latchd::latch_main),
        "sema" | "file-semaphore" | "semats" | "file-semaphore-ts" => Some(latchd::sema_main),
        "lfpd" => Some(latchd::lfpd_main),
        _ => None,
    }
}
