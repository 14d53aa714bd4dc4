//! What a reader may count on in every file: short lines, short files, short functions and one name
//! for one type.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::layering::{root, sources};

/// The longest line, in columns.
const MAX_COLUMNS: usize = 100;

/// The longest file below `src/`, in lines, without the tests at its end.
const MAX_FILE_LINES: usize = 700;

/// The most lines below `src/`, without tests. What is added replaces something, so this number
/// only falls: lower it after a change that takes out more than it adds.
const MAX_SOURCE_LINES: usize = 47_500;

/// How many lines fewer there may be before the number must be lowered.
const SLACK: usize = 100;

/// The longest function below `src/`, in lines, without those of tests.
const MAX_FUNCTION_LINES: usize = 80;

/// The clock of the arbiter's tests takes the place of the real one, and each server has options of
/// its own.
const SHARED_NAMES: [&str; 2] = ["Clock", "Options"];

pub(crate) fn all_code() -> Vec<PathBuf> {
    ["src", "tests", "examples"]
        .iter()
        .flat_map(|place| sources(&root().join(place)))
        .collect()
}

pub(crate) fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

pub(crate) fn shown(file: &Path) -> String {
    let path = file.strip_prefix(root()).unwrap_or(file);
    path.display().to_string()
}

/// A file's own text: without the tests at its end.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or(text)
}

fn is_test_code(file: &Path) -> bool {
    let path = shown(file);
    !path.starts_with("src/") || path.contains("/tests")
}

/// Fails with all that was found.
pub(crate) fn expect_none(found: &[String], rule: &str) {
    assert!(found.is_empty(), "{rule}:\n{}", found.join("\n"));
}

/// The functions of a formatted text: name, and number of lines from `fn` to the closing brace.
fn functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let Some(name) = function_name(line) else {
            continue;
        };
        // A function without a body, as in a trait, ends before a brace opens.
        let has_body = |line: &&&str| line.ends_with('{') || line.ends_with('}');
        let is_end = |line: &&&str| line.ends_with(';') || has_body(line);
        if !lines[start..]
            .iter()
            .find(is_end)
            .is_some_and(|line| has_body(&line))
        {
            continue;
        }
        let closing = format!("{}}}", " ".repeat(indent));
        let end = lines[start..].iter().position(|line| *line == closing);
        if let Some(len) = end {
            found.push((name.to_owned(), len + 1));
        }
    }
    found
}

/// The name of the function that begins in this line.
fn function_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let is_item = before
        .split_whitespace()
        .all(|word| word.starts_with("pub") || word == "const" || word == "in");
    let end = after.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
    (is_item && end > 0).then(|| &after[..end])
}

/// All types, with their files.
fn types() -> BTreeMap<String, Vec<String>> {
    let mut types: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in sources(&root().join("src")) {
        // What stands in for a module in a build without its feature has the same names.
        if is_test_code(&file) || file.ends_with("absent.rs") {
            continue;
        }
        for line in without_tests(&read(&file)).lines() {
            if let Some(name) = type_name(line) {
                types.entry(name.to_owned()).or_default().push(shown(&file));
            }
        }
    }
    types
}

/// The name of the type that this line declares, unless it is one of a trait or of an `impl`.
fn type_name(line: &str) -> Option<&str> {
    if line.starts_with("    type ") {
        return None;
    }
    let line = line.trim_start();
    let after = match line.strip_prefix("pub(") {
        Some(restricted) => restricted.split_once(") ")?.1,
        None => line.strip_prefix("pub ").unwrap_or(line),
    };
    let name = ["struct ", "enum ", "trait ", "type "]
        .iter()
        .find_map(|word| after.strip_prefix(word))?;
    let end = name.find(|c: char| !c.is_alphanumeric());
    Some(&name[..end.unwrap_or(name.len())])
}

pub(crate) fn test_names(text: &str) -> Vec<&str> {
    let mut is_next = false;
    let mut names = Vec::new();
    for line in text.lines().map(str::trim) {
        if line == "#[test]" {
            is_next = true;
        } else if let Some(name) = function_name(line).filter(|_| is_next) {
            names.push(name);
            is_next = false;
        }
    }
    names
}

#[test]
fn the_source_does_not_grow() {
    let files = sources(&root().join("src")).into_iter();
    let files = files.filter(|file| !is_test_code(file));
    let count: usize = files
        .map(|file| without_tests(&read(&file)).lines().count())
        .sum();
    assert!(
        (MAX_SOURCE_LINES - SLACK..=MAX_SOURCE_LINES).contains(&count),
        "{count} lines, not {MAX_SOURCE_LINES} or a few less"
    );
}

#[test]
fn lines_fit_into_a_hundred_columns() {
    let mut found = Vec::new();
    for file in all_code() {
        for (number, line) in read(&file).lines().enumerate() {
            // A literal is as long as its text.
            if line.chars().count() > MAX_COLUMNS && !line.contains('"') {
                found.push(format!("{}:{}", shown(&file), number + 1));
            }
        }
    }
    expect_none(&found, "lines that are too long");
}

/// Rust 1.85 drops what such a value borrows at the end of the statement.
#[test]
fn no_formatted_arguments_are_kept_in_a_variable() {
    let kept = concat!("= format", "_args!");
    let mut found = Vec::new();
    for file in all_code() {
        if read(&file).contains(kept) {
            found.push(shown(&file));
        }
    }
    expect_none(&found, "files that Rust 1.85 may not compile");
}

/// A user namespace shows strangers as the user of the process: `trusted::is_own` knows.
#[test]
fn no_user_is_compared_with_that_of_the_process() {
    let compared = concat!("== rustix::process::get", "euid()");
    let mut found = Vec::new();
    for file in sources(&root().join("src")) {
        let text = read(&file);
        let text = without_tests(&text);
        if text.contains(compared) || text.contains(&compared.replace("rustix::process::", "")) {
            found.push(shown(&file));
        }
    }
    expect_none(&found, "files that may take a stranger for us");
}

#[test]
fn files_can_be_read_in_one_sitting() {
    let mut found = Vec::new();
    for file in sources(&root().join("src")) {
        let len = without_tests(&read(&file)).lines().count();
        if !is_test_code(&file) && len > MAX_FILE_LINES {
            found.push(format!("{}: {len} lines", shown(&file)));
        }
    }
    expect_none(&found, "files that are too long");
}

#[test]
fn functions_fit_on_a_screen() {
    let mut found = Vec::new();
    for file in sources(&root().join("src")) {
        if is_test_code(&file) {
            continue;
        }
        for (name, len) in functions(without_tests(&read(&file))) {
            if len > MAX_FUNCTION_LINES {
                found.push(format!("{}: {name}: {len} lines", shown(&file)));
            }
        }
    }
    expect_none(&found, "functions that are too long");
}

#[test]
fn one_name_means_one_type() {
    let found: Vec<String> = types()
        .into_iter()
        .filter(|(name, files)| files.len() > 1 && !SHARED_NAMES.contains(&name.as_str()))
        .map(|(name, files)| format!("{name}: {}", files.join(", ")))
        .collect();
    expect_none(&found, "names with several meanings");
}

#[test]
fn the_checks_see_what_they_look_for() {
    let text = "impl A {\n    pub(crate) fn long(&self) {\n        a();\n    }\n}\n";
    assert_eq!(functions(text), [("long".to_owned(), 3)]);
    let text = "trait A {\n    fn none(\n        &self,\n    );\n    fn one(&self) {\n    }\n}\n";
    assert_eq!(functions(text), [("one".to_owned(), 2)]);
    assert_eq!(type_name("pub struct Key(u8);"), Some("Key"));
    assert_eq!(type_name("pub(in crate::table) enum Kind {"), Some("Kind"));
    assert_eq!(type_name("struct Inner;"), Some("Inner"));
    assert_eq!(type_name("    type Err = String;"), None);
    assert_eq!(test_names("#[test]\nfn a_claim() {"), ["a_claim"]);
}
