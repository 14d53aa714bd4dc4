//! `make install` puts everything where shells and man(1) look for it, and `make uninstall` removes
//! it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::needs::{needs, Program};

const FILES: [&str; 34] = [
    "bin/latch",
    "bin/sema",
    "sbin/latchd",
    "sbin/lfpd",
    "share/bash-completion/completions/latch",
    "share/bash-completion/completions/latchd",
    "share/bash-completion/completions/lfpd",
    "share/bash-completion/completions/sema",
    "share/doc/latchd/LICENSE-APACHE",
    "share/doc/latchd/LICENSE-MIT",
    "share/doc/latchd/README.md",
    "share/fish/vendor_completions.d/latch.fish",
    "share/fish/vendor_completions.d/latchd.fish",
    "share/fish/vendor_completions.d/lfpd.fish",
    "share/fish/vendor_completions.d/sema.fish",
    "share/man/man1/latch.1",
    "share/man/man1/sema.1",
    "share/man/man5/sema-lockfile.5",
    "share/man/man7/latch-guide.7",
    "share/man/man7/latch-job.7",
    "share/man/man7/latch-protocol.7",
    "share/man/man7/latchd-cluster.7",
    "share/man/man7/latchd-migration.7",
    "share/man/man7/latchd-http.7",
    "share/man/man7/latchd-log.7",
    "share/man/man7/latchd-operations.7",
    "share/man/man7/latchd-security.7",
    "share/man/man7/lfp-protocol.7",
    "share/man/man8/latchd.8",
    "share/man/man8/lfpd.8",
    "share/zsh/site-functions/_latch",
    "share/zsh/site-functions/_latchd",
    "share/zsh/site-functions/_lfpd",
    "share/zsh/site-functions/_sema",
];

#[test]
fn make_install_honours_prefix_and_destdir() {
    let make = needs!("make");
    let root = tempfile::tempdir().expect("there is room");
    let destdir = format!("DESTDIR={}", root.path().display());
    let output = run(&make, "install", &["PREFIX=/opt/a b", &destdir]);
    assert!(output.status.success(), "{output:?}");
    let expected: BTreeSet<PathBuf> = FILES.iter().map(PathBuf::from).collect();
    let mut installed = BTreeSet::new();
    let prefix = root.path().join("opt/a b");
    collect(&prefix, &prefix, &mut installed);
    let examples = Path::new("share/doc/latchd/examples");
    let (examples, installed) = installed
        .into_iter()
        .partition::<BTreeSet<PathBuf>, _>(|path| path.starts_with(examples));
    assert_eq!(installed, expected);
    assert_eq!(examples, examples_without_rust());
    let unit = "share/doc/latchd/examples/latchd.service";
    let unit = fs::read_to_string(prefix.join(unit)).expect("it is installed");
    assert!(unit.contains("ExecStart=/opt/a b/sbin/latchd "), "{unit}");
    for file in FILES {
        let metadata = fs::metadata(prefix.join(file)).expect("it is there");
        let mode = if file.contains("bin/") { 0o755 } else { 0o644 };
        assert_eq!(metadata.permissions().mode() & 0o777, mode, "{file}");
    }
    let others = fs::read_dir(root.path()).expect("a directory").count();
    assert_eq!(others, 1, "something is outside of the prefix");
    let version = Command::new(prefix.join("bin/latch"))
        .arg("--version")
        .output();
    assert!(version.is_ok_and(|output| output.status.success()));
}

#[test]
fn make_install_fails_if_nothing_was_built() {
    let make = needs!("make");
    let root = tempfile::tempdir().expect("there is room");
    let prefix = format!("PREFIX={}", root.path().display());
    let output = run(&make, "install", &[&prefix, "BUILT=no-such-directory"]);
    assert!(!output.status.success(), "{output:?}");
}

#[test]
fn make_uninstall_removes_what_was_installed() {
    let make = needs!("make");
    let root = tempfile::tempdir().expect("there is room");
    // What a shell would make of a path with a blank in it.
    let beside = root.path().join("a");
    fs::write(&beside, "another user's").expect("it can be written");
    let to = root.path().join("a b");
    let prefix = format!("PREFIX={}", to.display());
    assert!(run(&make, "install", &[&prefix]).status.success());
    let other = to.join("share/man/man1/other.1");
    fs::write(&other, "another program's").expect("it can be written");
    for _ in 0..2 {
        let output = run(&make, "uninstall", &[&prefix]);
        assert!(output.status.success(), "{output:?}");
        let mut left = BTreeSet::new();
        collect(&to, &to, &mut left);
        assert_eq!(left, BTreeSet::from(["share/man/man1/other.1".into()]));
    }
    assert!(!to.join("share/doc/latchd").exists());
    assert!(beside.exists());
    let nothing = root.path().join("nothing");
    let prefix = format!("PREFIX={}", nothing.display());
    assert!(run(&make, "uninstall", &[&prefix]).status.success());
    assert!(!nothing.exists());
}

/// So the same bytes come out wherever that is, and they do not name who built them.
#[test]
fn a_build_by_make_leaves_the_home_of_cargo_out() {
    needs!("make");
    let mut make = Command::new("make");
    make.args(["-n", "all"])
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = make
        .env_remove("MAKEFLAGS")
        .output()
        .expect("make is installed");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        said.contains("--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"),
        "{said}"
    );
}

/// Makes a target with the programs of this build, unless `variables` name others.
fn run(make: &Program, target: &str, variables: &[&str]) -> Output {
    let built = Path::new(env!("CARGO_BIN_EXE_latch")).parent();
    let built = built.expect("a program is in a directory").display();
    make.command()
        .args([target, &format!("BUILT={built}")])
        .args(variables)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_remove("MAKEFLAGS")
        .output()
        .expect("make is installed")
}

/// Where the examples are installed that need no sources.
fn examples_without_rust() -> BTreeSet<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut examples = BTreeSet::new();
    collect(root, &root.join("examples"), &mut examples);
    examples
        .into_iter()
        .filter(|path| !path.starts_with("examples/bench"))
        .filter(|path| path.extension().is_none_or(|extension| extension != "rs"))
        .map(|path| Path::new("share/doc/latchd").join(path))
        .collect()
}

/// The files below `directory`, by their path from `prefix`.
fn collect(prefix: &Path, directory: &Path, files: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("the directory stays").path();
        if path.is_dir() {
            collect(prefix, &path, files);
        } else {
            let name = path.strip_prefix(prefix).expect("it is below the prefix");
            files.insert(name.to_owned());
        }
    }
}
