//! Each promise of latchd-security(7) has tests that fail if it is broken.

use std::collections::BTreeSet;
use std::fs;

use crate::manual::{page, section};
use crate::tidy::{all_code, expect_none, read, test_names};

/// The promises of tests/promises/PROMISES.md, each with its tests.
fn promises(text: &str) -> Vec<(&str, Vec<&str>)> {
    let entries = text.split("\n## ").skip(1);
    entries
        .map(|entry| {
            let (name, list) = entry.split_once('\n').unwrap_or((entry, ""));
            let tests = list.lines().filter_map(|line| line.strip_prefix("- "));
            (name, tests.map(|test| test.trim_matches('`')).collect())
        })
        .collect()
}

/// The texts of all transcripts, whose sections are tests, too.
fn transcripts() -> Vec<String> {
    let folders = [
        "tests/latch/conversations",
        "tests/latchd/wire",
        "tests/latchd/conversations",
        "tests/lfpd/conversations",
        "tests/sema/conversations",
    ];
    let folders = folders.map(|folder| crate::layering::root().join(folder));
    let files = folders.iter().flat_map(|folder| {
        let entries = fs::read_dir(folder).expect("it is part of the source");
        entries.map(|entry| read(&entry.expect("a directory entry").path()))
    });
    files.collect()
}

#[test]
fn each_promise_has_tests_that_exist() {
    let section = section(&page("latchd-security.7"), "PROMISES");
    let heads = section.lines().filter_map(|line| line.strip_prefix(".It "));
    let promised: Vec<&str> = heads.map(|head| head.trim_start_matches("\\&")).collect();
    let text = read(&crate::layering::root().join("tests/promises/PROMISES.md"));
    let promises = promises(&text);
    let names: Vec<&str> = promises.iter().map(|(name, _)| *name).collect();
    assert_eq!(
        promised, names,
        "left: latchd-security(7), right: PROMISES.md"
    );
    assert!(promises.len() > 10, "{} promises", promises.len());
    let texts: Vec<String> = all_code().iter().map(|file| read(file)).collect();
    let mut names: BTreeSet<&str> = texts.iter().flat_map(|text| test_names(text)).collect();
    let transcripts = transcripts();
    let lines = transcripts.iter().flat_map(|text| text.lines());
    names.extend(lines.filter_map(|line| line.strip_prefix("== ")));
    let mut found = Vec::new();
    for (promise, tests) in promises {
        if tests.is_empty() {
            found.push(format!("{promise}: no test"));
        }
        let missing = tests.iter().filter(|test| !names.contains(*test));
        found.extend(missing.map(|test| format!("{promise}: {test}")));
    }
    expect_none(&found, "promises without a test");
}

#[test]
fn a_promise_is_a_name_and_its_tests() {
    let text = "# Tests\n\n## Order\n\n- `a_test`\n\n## None\n";
    let expected = [("Order", vec!["a_test"]), ("None", vec![])];
    assert_eq!(promises(text), expected);
}

/// A lock server that goes on after a panic may have a table that is half changed.
#[test]
fn a_panic_ends_a_released_program() {
    let manifest = read(&crate::layering::root().join("Cargo.toml"));
    let release = manifest.split("[profile.release]").nth(1);
    let release = release.and_then(|rest| rest.split("\n[").next());
    assert!(release.is_some_and(|profile| profile.contains("\npanic = \"abort\"")));
}
