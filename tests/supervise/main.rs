//! A command under a lock that is a pipe: what `latch run` and `sema run` have in common. Each
//! promise about the command is proved here, once; the tests of the two programs prove that the
//! lock is held, released and lost, and that their options arrive here.
//!
//! This target has no test harness, because it is also the program that supervises: it starts
//! itself again as the exec shim and as the guard.

mod conversations;
mod fixture;
mod others;
mod shells;
#[path = "../support/mod.rs"]
mod support;
mod wrapper;

use std::env;
use std::ffi::OsString;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// A test and its name.
type Test = (String, Box<dyn Fn() + Send + Sync>);

macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        pub fn tests() -> Vec<crate::Test> {
            vec![$((stringify!($name).to_owned(), Box::new($name))),*]
        }
    };
}
pub(crate) use tests;

/// How many tests run at a time. Most of them wait.
const TEST_THREADS: usize = 8;

fn main() -> ExitCode {
    latchd::supervise::second_instance(wrapper::PROGRAM);
    let words: Vec<OsString> = env::args_os().collect();
    let name = Path::new(&words[0]).file_name();
    if name.is_some_and(|name| name == wrapper::WRAPPER) {
        return wrapper::run(&words[1..]);
    }
    run(&words[1..])
}

/// Runs the tests that the arguments name, all without arguments. Prints the lines of libtest.
fn run(words: &[OsString]) -> ExitCode {
    let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
    let filters: Vec<&&str> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_wanted = |name: &str| filters.is_empty() || filters.iter().any(|it| name.contains(**it));
    let all = [conversations::tests(), others::tests(), shells::tests()];
    let mut wanted: Vec<Test> = all.into_iter().flatten().collect();
    wanted.retain(|(name, _)| is_wanted(name) && !words.contains(&"--ignored"));
    if words.contains(&"--list") {
        wanted.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", wanted.len());
    let (next, failed_count) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..TEST_THREADS {
            scope.spawn(|| {
                while let Some((name, test)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let is_ok = catch_unwind(AssertUnwindSafe(test)).is_ok();
                    failed_count.fetch_add(usize::from(!is_ok), Ordering::Relaxed);
                    println!("test {name} ... {}", if is_ok { "ok" } else { "FAILED" });
                }
            });
        }
    });
    let failed = failed_count.into_inner();
    let result = if failed == 0 { "ok" } else { "FAILED" };
    let passed = wanted.len() - failed;
    println!("\ntest result: {result}. {passed} passed; {failed} failed; 0 ignored\n");
    ExitCode::from(u8::from(failed > 0))
}
