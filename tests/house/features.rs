//! What the help says in builds with other features. The manual describes the options of TLS in
//! sections of their own, and the completions are those of the default build, which has none.

use std::process::Command;

use crate::manual::page;

/// The options that only a build with TLS has: of the server, and of each command of `latch` that
/// talks to one.
const OF_LATCHD: [&str; 6] = [
    "--etcd-cacert",
    "--etcd-cert",
    "--etcd-key",
    "--tls-cert",
    "--tls-key",
    "--tls-self-signed",
];
const OF_LATCH: [&str; 3] = ["--tls", "--tls-ca", "--tls-name"];

/// The help of a program, as a build without TLS has it.
pub fn help(program: &str, arguments: &[&str]) -> String {
    without_tls(&help_of_this_build(program, arguments))
}

fn help_of_this_build(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    let output = command.args(arguments).arg("--help").output();
    let output = output.expect("it was built beside this test");
    assert!(output.status.success(), "{program} {arguments:?} --help");
    String::from_utf8(output.stdout).expect("the help is UTF-8")
}

fn is_of_tls(option: &str) -> bool {
    OF_LATCHD.iter().chain(&OF_LATCH).any(|it| *it == option)
}

fn without_tls(help: &str) -> String {
    let (usage, rest) = help.split_once('\n').expect("a usage");
    let is_end = |c| ['[', ' ', ']'].contains(&c);
    let mut parts = usage.split(" [");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if !is_of_tls(part.split(is_end).next().unwrap_or_default()) {
            kept += &format!(" [{part}");
        } else if let Some((_, operands)) = part.split_once("] ") {
            kept += &format!(" {operands}");
        }
    }
    kept.push('\n');
    let mut is_kept = true;
    for line in rest.lines() {
        // A text that is broken into lines goes on further to the right.
        if !line.starts_with("   ") {
            let head = line.split_whitespace().next();
            is_kept = !head.is_some_and(is_of_tls);
        }
        if is_kept {
            kept += &format!("{line}\n");
        }
    }
    kept
}

#[test]
fn a_build_with_tls_has_the_options_that_the_manual_names() {
    let server = help_of_this_build(env!("CARGO_BIN_EXE_latchd"), &[]);
    let client = help_of_this_build(env!("CARGO_BIN_EXE_latch"), &["run"]);
    for (help, name, options) in [
        (&server, "latchd.8", &OF_LATCHD[..]),
        (&client, "latch.1", &OF_LATCH),
    ] {
        for option in options {
            let heads = help
                .lines()
                .filter_map(|line| line.split_whitespace().next());
            let is_there = heads.filter(|head| head == option).count() == 1;
            assert_eq!(is_there, cfg!(feature = "tls"), "{option}");
            let page = page(name);
            let entries = page
                .lines()
                .filter_map(|line| line.strip_prefix(".It Fl -"));
            let names = entries.filter_map(|entry| entry.split(' ').next());
            let count = names.filter(|name| *name == &option[2..]).count();
            assert_eq!(count, 1, "{option} in {name}");
        }
    }
}
