//! What a user of the library pays who leaves out the programs.

use std::collections::BTreeSet;
use std::process::Command;

use crate::layering::root;

/// The most crates that a user of `client` and `lockfile` compiles, this one among them.
const MAX_CRATES: usize = 14;

/// The crates that a build with these arguments compiles into the library.
fn crates(arguments: &[&str]) -> BTreeSet<String> {
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--offline", "--edges", "normal", "--prefix", "none"])
        .args(arguments)
        .current_dir(root());
    let output = tree.output().expect("cargo runs");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let names = text.lines().filter_map(|line| line.split(' ').next());
    let names = names.filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

#[test]
fn the_library_alone_compiles_few_crates() {
    let alone = crates(&["--no-default-features"]);
    assert!(alone.contains("latchd"), "{alone:?}");
    assert!(alone.len() <= MAX_CRATES, "{alone:?}");
}

#[test]
fn the_programs_are_built_by_default() {
    let default = crates(&[]);
    assert!(default.contains("argh"), "{default:?}");
    assert_eq!(default, crates(&["--features", "programs"]));
}
