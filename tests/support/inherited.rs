//! What the tests start has default signal dispositions and no descriptor of strangers, whatever
//! `cargo` was started with.
//!
//! `nohup`, a shell's `&` and several CI runners start programs with SIGHUP or SIGINT ignored, and
//! ignored signals are inherited. A caught signal is not: it has its default disposition in a
//! program that this process starts. So this process catches what it was told to ignore, and does
//! nothing about it.
//!
//! Descriptors that were left open by a shell, a job of make or a CI runner are inherited, too, and
//! a server that may have 32 of them would serve hardly anybody. So they are closed on exec.
//!
//! The variables that our programs hear, such as `LATCH_AUTH_TOKEN_FILE`, are meant for those that
//! are installed on this host. They are dropped, so that no script or terminal passes them on.
//! The servers make no sockets in the directories of this host, unless a test means it.
//!
//! All this happens before `main`, so that no test can forget it.

use std::ffi::c_int;
use std::fs;
use std::sync::Arc;

use signal_hook::consts::{FORBIDDEN, SIGCHLD, SIGPIPE};
use signal_hook::flag;

/// What the names of variables for the tests and benchmarks begin with.
const OF_TESTS: &[&str] = &[
    "LATCHD_BLESS",
    "LATCHD_HISTORY_",
    "LATCHD_STORM_",
    "LATCHD_TEST_",
    "LATCHD_WIRE_",
];

#[used]
#[link_section = ".init_array"]
static BEFORE_MAIN: extern "C" fn() = disinherit;

extern "C" fn disinherit() {
    close_fds::set_fds_cloexec(3, &[]);
    catch_what_is_ignored();
    drop_our_variables();
}

fn drop_our_variables() {
    for (name, _) in std::env::vars_os() {
        if is_heard(&name.to_string_lossy()) {
            std::env::remove_var(name);
        }
    }
    std::env::set_var("LATCHD_OPERATOR_SOCKET", "no");
}

/// Whether one of our programs hears this variable. Those of the tests themselves are kept.
fn is_heard(name: &str) -> bool {
    let prefixes = ["LATCH_", "LATCHD_", "DFLOCKD_", "LFPD_", "LISTEN_", "SEMA_"];
    let names = ["RUST_LOG", "JOURNAL_STREAM", "NOTIFY_SOCKET"];
    let is_ours = prefixes.iter().any(|prefix| name.starts_with(prefix)) || names.contains(&name);
    is_ours && !is_of_tests(name)
}

/// Whether this variable is one of the tests themselves.
pub fn is_of_tests(name: &str) -> bool {
    OF_TESTS.iter().any(|prefix| name.starts_with(prefix))
}

fn catch_what_is_ignored() {
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
