//! A command under a lock that is a pipe: what `latch run` and `sema run` have in common.
//!
//! This target has no test harness, because it is also the program that supervises: it starts
//! itself again as the exec shim and as the guard.

#[path = "../support/mod.rs"]
mod support;
mod tests;
mod wrapper;

use std::env;
use std::process::ExitCode;

fn main() -> ExitCode {
    latchd::supervise::second_instance(wrapper::PROGRAM);
    let words: Vec<String> = env::args().skip(1).collect();
    match words.first().map(String::as_str) {
        Some(wrapper::WRAPPER) => wrapper::run(&words[1..]),
        _ => tests::run(&words),
    }
}
