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
//! New files have the modes that a test gives them, less those that the usual umask takes away.
//!
//! Scripts find the programs to test by their names, first in the PATH: a path in the text of a
//! script would be split at blanks.
//!
//! All this happens before `main`, so that no test can forget it.

use std::env;
use std::ffi::{c_int, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{access, statvfs, Access, Mode, StatVfsMountFlags};
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

/// The longest directory for temporary files, in bytes. The path of a socket in it may have 107.
const MAX_TEMPORARY_LEN: usize = 60;

#[used]
#[link_section = ".init_array"]
static BEFORE_MAIN: extern "C" fn() = disinherit;

/// Set for a program of the tests that is started as a user would start it: it inherits all.
pub const INHERITS: &str = "LATCHD_TEST_INHERITS";

extern "C" fn disinherit() {
    if env::var_os(INHERITS).is_some() {
        return;
    }
    close_fds::set_fds_cloexec(3, &[]);
    catch_what_is_ignored();
    drop_our_variables();
    rustix::process::umask(Mode::from_raw_mode(0o022));
    find_programs();
    choose_temporary_directory();
}

fn find_programs() {
    let given = env::var_os("LATCHD_TEST_PROGRAMS").and_then(|it| fs::canonicalize(it).ok());
    let built = option_env!("CARGO_BIN_EXE_latch").and_then(|it| Path::new(it).parent());
    // A benchmark is told which programs it starts.
    let Some(programs) = given.or(built.map(Path::to_owned)) else {
        return;
    };
    let mut path = OsString::from(programs);
    if let Some(rest) = env::var_os("PATH") {
        path.push(":");
        path.push(rest);
    }
    env::set_var("PATH", path);
}

/// The tests make sockets and programs among the temporary files, and name them in scripts. If that
/// is not possible in the directory of the environment, takes another one.
fn choose_temporary_directory() {
    let usual = ["/tmp", "/var/tmp"].map(PathBuf::from);
    let built = option_env!("CARGO_TARGET_TMPDIR").map(PathBuf::from);
    let mut places = [env::temp_dir()].into_iter().chain(usual).chain(built);
    if let Some(place) = places.find(|place| is_fit_for_temporary_files(place)) {
        env::set_var("TMPDIR", place);
    }
}

fn is_fit_for_temporary_files(place: &Path) -> bool {
    let name = place.as_os_str().as_bytes();
    let is_plain = name.len() <= MAX_TEMPORARY_LEN && !name.iter().any(u8::is_ascii_whitespace);
    let runs_programs =
        statvfs(place).is_ok_and(|it| !it.f_flag.contains(StatVfsMountFlags::NOEXEC));
    is_plain && runs_programs && access(place, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

fn drop_our_variables() {
    for (name, _) in env::vars_os() {
        if is_heard(&name.to_string_lossy()) {
            env::remove_var(name);
        }
    }
    env::set_var("LATCHD_OPERATOR_SOCKET", "no");
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
