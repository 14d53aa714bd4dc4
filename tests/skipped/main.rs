//! Says which tests the others have skipped, and how to get what they need. Cargo runs the targets
//! in the order of their names, so this one comes last.

// The tests use the rest.
#[allow(dead_code, unused_macros, unused_imports, unreachable_pub)]
#[path = "../support/needs.rs"]
mod needs;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

fn main() {
    let notes = fs::read_to_string(needs::notes()).unwrap_or_default();
    remove_notes();
    print!("{}", report(&notes));
}

/// One line for each test crate, and one with the command that brings the missing programs.
fn report(notes: &str) -> String {
    let mut crates: BTreeMap<&str, (usize, BTreeSet<&str>)> = BTreeMap::new();
    for note in notes.lines() {
        let mut words = note.split('\t');
        let (count, missing) = crates.entry(words.next().unwrap_or_default()).or_default();
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
    report
}

/// Removes these notes and those of runs that did not come this far.
fn remove_notes() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("skipped-") {
            let _ = fs::remove_file(entry.path());
        }
    }
}
