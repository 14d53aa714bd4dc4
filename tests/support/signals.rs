//! Default signal dispositions for what the tests start, whatever `cargo` was started with.
//!
//! `nohup`, a shell's `&` and several CI runners start programs with SIGHUP or SIGINT ignored, and
//! ignored signals are inherited. A caught signal is not: it has its default disposition in a
//! program that this process starts. So this process catches what it was told to ignore, and does
//! nothing about it. That happens before `main`, so that no test can forget it.

use std::ffi::c_int;
use std::fs;
use std::sync::Arc;

use signal_hook::consts::{FORBIDDEN, SIGCHLD, SIGPIPE};
use signal_hook::flag;

#[used]
#[link_section = ".init_array"]
static BEFORE_MAIN: extern "C" fn() = catch_what_is_ignored;

extern "C" fn catch_what_is_ignored() {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    let is_ignored = |signal: &c_int| ignored.unwrap_or(0) >> (signal - 1) & 1 == 1;
    for signal in (1..32).filter(is_ignored) {
        // Rust ignores SIGPIPE by itself, and resets it in what it starts. SIGCHLD comes often, and
        // a caught one would interrupt system calls.
        if ![SIGCHLD, SIGPIPE].contains(&signal) && !FORBIDDEN.contains(&signal) {
            flag::register(signal, Arc::default()).expect("the signal can be caught");
        }
    }
}
