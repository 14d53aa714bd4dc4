//! A test that lacks a program is skipped and noted, or fails where all tests are wanted.

use std::path::Path;
use std::process::{Command, Output};
use std::{env, fs, process};

use crate::layering::root;

const TEST: &str = "manual::mandoc_finds_nothing_wrong_with_the_manual";

/// Runs [`TEST`] again where no program can be found.
fn run_without_programs() -> Command {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command
        .args(["--exact", TEST])
        .env("PATH", "")
        .env_remove("LATCHD_TEST_ALL");
    command
}

fn output(mut command: Command) -> Output {
    command.output().expect("this program can run")
}

#[test]
fn a_test_that_lacks_a_program_is_skipped_and_noted() {
    let output = output(run_without_programs());
    assert!(output.status.success(), "{output:?}");
    let notes = format!("notes-{}", process::id());
    let notes = Path::new(env!("CARGO_TARGET_TMPDIR")).join(notes);
    let noted = fs::read_to_string(&notes).expect("there are notes");
    assert_eq!(noted, "skipped\thouse\tmandoc\n");
    fs::remove_file(notes).expect("it was just there");
}

#[test]
fn with_latchd_test_all_a_skip_is_a_failure() {
    let mut command = run_without_programs();
    command.env("LATCHD_TEST_ALL", "1");
    let output = output(command);
    assert!(!output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    let why = "LATCHD_TEST_ALL is set, and there is no mandoc";
    assert!(said.contains(why), "{said}");
}

/// Cargo runs the targets in the order of their names. Notes of a later one would be left behind.
#[test]
fn the_summary_of_the_skips_comes_after_all_tests() {
    let tests = root().join("tests");
    for entry in fs::read_dir(&tests).expect("a directory") {
        let name = entry.expect("an entry").file_name();
        assert!(*name < *"zz_summary", "{name:?} is after the summary");
    }
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("a file");
    assert!(manifest.contains("name = \"zz_summary\""));
}
