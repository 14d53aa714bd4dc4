//! Says which tests the others have skipped, how to get what they need, and which were late and ran
//! again, how often. Cargo runs the targets in the order of their names, so this one comes last.

// The tests use the rest.
#[allow(dead_code, unused_macros, unused_imports, unreachable_pub)]
#[path = "../support/needs.rs"]
mod needs;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::ExitCode;

/// More retries than this in one run are no accident: with `LATCHD_TEST_ALL` set, they fail it.
const MAX_RETRIES: usize = 10;

fn main() -> ExitCode {
    let notes = fs::read_to_string(needs::notes()).unwrap_or_default();
    remove_notes();
    let retry_count = notes_of("retried", &notes).count();
    print!("{}", report(&notes));
    if std::env::var_os("LATCHD_TEST_ALL").is_some() && retry_count > MAX_RETRIES {
        println!("{retry_count} retries, and {MAX_RETRIES} are the most");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// The notes with this verb: the test crate of each, and what it says.
fn notes_of<'a>(verb: &'a str, notes: &'a str) -> impl Iterator<Item = (&'a str, Vec<&'a str>)> {
    notes.lines().filter_map(move |note| {
        let mut words = note.strip_prefix(verb)?.strip_prefix('\t')?.split('\t');
        Some((words.next()?, words.collect()))
    })
}

/// One line for each test crate, one with the command that brings the missing programs, and one for
/// each retry.
fn report(notes: &str) -> String {
    let mut crates: BTreeMap<&str, (usize, BTreeSet<&str>)> = BTreeMap::new();
    for (name, words) in notes_of("skipped", notes) {
        let (count, missing) = crates.entry(name).or_default();
        *count += 1;
        missing.extend(words);
    }
    let packages: BTreeSet<&str> = crates
        .values()
        .flat_map(|(_, missing)| missing.iter().filter_map(|need| needs::package_of(need)))
        .collect();
    let mut report = String::new();
    for (name, (count, missing)) in &crates {
        let missing: Vec<&str> = missing.iter().copied().collect();
        report += &format!(
            "skipped in {name}: {count}, for want of {}\n",
            missing.join(", ")
        );
    }
    if !packages.is_empty() {
        let packages: Vec<&str> = packages.into_iter().collect();
        report += &format!("what is missing: apt-get install {}\n", packages.join(" "));
    }
    let mut retries: BTreeMap<String, usize> = BTreeMap::new();
    for (name, words) in notes_of("retried", notes) {
        *retries
            .entry(format!("{name}: {}", words.join(" ")))
            .or_default() += 1;
    }
    for (test, count) in &retries {
        report += &format!("retried in {test}, {count} times\n");
    }
    if !retries.is_empty() {
        let count: usize = retries.values().sum();
        report += &format!("retries: {count} of {} tests\n", retries.len());
    }
    report
}

/// Removes these notes and those of runs that did not come this far.
fn remove_notes() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("notes-") {
            let _ = fs::remove_file(entry.path());
        }
    }
}
