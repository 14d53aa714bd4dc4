//! What is linked into the programs, under which licences, and how they are linked.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use crate::layering::root;

/// The most crates that the four programs link, beside this one.
const MAX_LINKED: usize = 31;

/// The licences that a crate may be used under.
const LICENCES: [&str; 7] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 AND ISC",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-3-Clause",
    "ISC",
    "Unlicense",
];

/// Those of this build that link crates: the crates of others may not have been fetched.
const FEATURES: &str = if cfg!(feature = "tls") {
    "programs,tls"
} else {
    "programs"
};

/// The crates that are linked with these features, each with its version and its licence.
fn linked(features: &str) -> Vec<(String, String, String)> {
    let edges = "normal,no-proc-macro";
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--edges", edges, "--prefix", "none"])
        .args(["--format", "{p}|{l}"])
        .args(["--no-default-features", "--features", features])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let lines = text.lines().filter(|line| !line.is_empty());
    // What has dependencies is marked where it comes again.
    let lines = lines.map(|line| line.trim_end_matches(" (*)"));
    let mut lines: Vec<&str> = lines.collect();
    lines.sort_unstable();
    lines.dedup();
    let described = lines.iter().filter_map(|line| {
        let (package, licence) = line.split_once('|')?;
        let (name, version) = package.split_once(' ')?;
        let version = version.split(' ').next()?;
        Some([name, version, licence].map(str::to_owned).into())
    });
    described.collect()
}

/// Whether an SPDX expression without brackets offers a licence of the list.
fn is_allowed(expression: &str) -> bool {
    let offers = expression.split(" OR ").flat_map(|offer| offer.split('/'));
    offers.map(str::trim).any(|offer| LICENCES.contains(&offer))
}

#[test]
fn every_linked_crate_has_a_licence_that_may_be_used() {
    for (name, version, licence) in linked(FEATURES) {
        assert!(is_allowed(&licence), "{name} {version}: {licence}");
    }
}

#[test]
fn few_crates_are_linked_and_none_twice() {
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, version, _) in linked("programs") {
        versions.entry(name).or_default().push(version);
    }
    assert!(versions.remove("latchd").is_some(), "{versions:?}");
    assert!(versions.len() > 10, "{versions:?}");
    assert!(versions.len() <= MAX_LINKED, "{}", versions.len());
    for (name, versions) in versions {
        assert_eq!(versions.len(), 1, "{name} {versions:?}");
    }
}

#[test]
fn the_check_sees_a_licence_that_may_not_be_used() {
    assert!(is_allowed("MIT OR GPL-3.0") && is_allowed("Apache-2.0/MIT"));
    assert!(!is_allowed("GPL-3.0") && !is_allowed("MIT AND GPL-3.0") && !is_allowed(""));
}

// ---- how they are linked ---------------------------------------------------------------------

const SHARED_OBJECT: u16 = 3; // e_type of a program that is loaded anywhere
const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
const STACK: u32 = 0x6474_e551;
const RELRO: u32 = 0x6474_e552;
const EXECUTE: u32 = 1;
const WRITE: u32 = 2;
const FLAGS: u64 = 30;
const FLAGS_1: u64 = 0x6fff_fffb;
const BIND_NOW: u64 = 8;
const NOW: u64 = 1;
const PIE: u64 = 0x0800_0000;

/// A program header.
struct Segment {
    kind: u32,
    flags: u32,
    offset: usize,
    len: usize,
}

/// What is wrong with how a 64-bit program is linked.
fn weaknesses(file: &[u8]) -> Vec<&'static str> {
    let segments = segments(file);
    let find = |kind| segments.iter().find(|segment| segment.kind == kind);
    let dynamic = find(DYNAMIC).map(|segment| dynamic(file, segment));
    let flag = |tag, flag| {
        let entries = dynamic.iter().flatten();
        let mut values = entries.filter(|(found, _)| *found == tag);
        values.any(|(_, value)| value & flag != 0)
    };
    let is_both = |segment: &Segment| segment.flags & (WRITE | EXECUTE) == (WRITE | EXECUTE);
    let checks = [
        (
            "no position-independent program",
            !(half(file, 16) == SHARED_OBJECT && flag(FLAGS_1, PIE)),
        ),
        ("no RELRO", find(RELRO).is_none()),
        (
            "symbols are bound late",
            !(flag(FLAGS, BIND_NOW) || flag(FLAGS_1, NOW)),
        ),
        (
            "an executable stack",
            find(STACK).is_none_or(|stack| stack.flags & EXECUTE != 0),
        ),
        (
            "code that can be written",
            segments
                .iter()
                .any(|segment| segment.kind == LOAD && is_both(segment)),
        ),
    ];
    let found = checks.into_iter().filter(|(_, is_weak)| *is_weak);
    found.map(|(weakness, _)| weakness).collect()
}

fn segments(file: &[u8]) -> Vec<Segment> {
    assert_eq!(file[..5], *b"\x7fELF\x02", "a 64-bit program");
    let (start, size, count) = (long(file, 32) as usize, half(file, 54), half(file, 56));
    let headers = (0..count).map(|at| start + usize::from(at) * usize::from(size));
    let read = |at| Segment {
        kind: word(file, at),
        flags: word(file, at + 4),
        offset: long(file, at + 8) as usize,
        len: long(file, at + 32) as usize,
    };
    headers.map(read).collect()
}

/// The tags and values of the dynamic section.
fn dynamic(file: &[u8], segment: &Segment) -> Vec<(u64, u64)> {
    let end = segment.offset + segment.len;
    let entries = (segment.offset..end).step_by(16);
    entries
        .map(|at| (long(file, at), long(file, at + 8)))
        .collect()
}

fn half(file: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(file[at..at + 2].try_into().expect("two bytes"))
}

fn word(file: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(file[at..at + 4].try_into().expect("four bytes"))
}

fn long(file: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(file[at..at + 8].try_into().expect("eight bytes"))
}

/// Those of the release build are linked with the same flags.
#[test]
#[cfg(all(target_pointer_width = "64", target_env = "gnu"))]
fn the_programs_are_linked_with_all_hardening() {
    let built = [
        env!("CARGO_BIN_EXE_latchd"),
        env!("CARGO_BIN_EXE_latch"),
        env!("CARGO_BIN_EXE_sema"),
        env!("CARGO_BIN_EXE_lfpd"),
    ];
    for program in built {
        let found = weaknesses(&fs::read(program).expect("it is built"));
        assert!(found.is_empty(), "{program}: {found:?}");
    }
}

#[test]
#[cfg(all(target_pointer_width = "64", target_env = "gnu"))]
fn the_check_sees_an_executable_stack() {
    let mut program = fs::read(env!("CARGO_BIN_EXE_sema")).expect("it is built");
    let start = long(&program, 32) as usize;
    let stack = segments(&program)
        .iter()
        .position(|segment| segment.kind == STACK);
    let header = start + stack.expect("it has one") * usize::from(half(&program, 54));
    program[header + 4] |= EXECUTE as u8;
    assert_eq!(weaknesses(&program), ["an executable stack"]);
}
