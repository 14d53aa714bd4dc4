//! Each promise in latchd(8) names a test that fails when it is broken.

use std::collections::BTreeSet;

use crate::manual::{page, section};
use crate::tidy::{all_code, expect_none, read, test_names};

/// The promises of a section, each with the tests that it names.
fn promises(section: &str) -> Vec<(&str, Vec<&str>)> {
    let entries = section.split("\n.It ").skip(1);
    entries
        .map(|entry| {
            let (name, text) = entry.split_once('\n').unwrap_or((entry, ""));
            let tests = text.lines().filter_map(|line| line.strip_prefix(".Dl "));
            (name, tests.collect())
        })
        .collect()
}

#[test]
fn each_promise_names_tests_that_exist() {
    let page = page("latchd.8");
    let section = section(&page, "PROMISES");
    let promises = promises(&section);
    assert!(promises.len() > 10, "{} promises", promises.len());
    let texts: Vec<String> = all_code().iter().map(|file| read(file)).collect();
    let names: BTreeSet<&str> = texts.iter().flat_map(|text| test_names(text)).collect();
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
    let section = "text\n.Bl -tag\n.It Order\nIt holds.\n.Dl a_test\n.It None\n.El\n";
    let expected = [("Order", vec!["a_test"]), ("None", vec![])];
    assert_eq!(promises(section), expected);
}

/// A lock server that goes on after a panic may have a table that is half changed.
#[test]
fn a_panic_ends_a_released_program() {
    let manifest = read(&crate::layering::root().join("Cargo.toml"));
    let release = manifest.split("[profile.release]").nth(1);
    let release = release.and_then(|rest| rest.split("\n[").next());
    assert!(release.is_some_and(|profile| profile.contains("\npanic = \"abort\"")));
}
