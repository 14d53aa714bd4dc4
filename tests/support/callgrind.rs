//! What a server spends on a request in instructions, because time itself is too coarse to show
//! what an attacker could average out of many tries.

use std::process::Command;

use super::limited::{behind, with_surroundings_of};
use super::needs::Program;
use super::Daemon;

/// A command that becomes `plain` under callgrind. Counting starts where a function begins whose
/// name matches this pattern, and stops where it ends.
pub fn counting(valgrind: &Program, function: &str, plain: &Command) -> Command {
    let valgrind = valgrind.path().to_string_lossy();
    let toggle = format!("--toggle-collect={function}");
    let wrapper = [
        &valgrind,
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        &toggle,
    ];
    with_surroundings_of(plain, behind(&wrapper, plain))
}

/// The instructions that a server has spent in the function, in `calls` calls, by the log that it
/// has written by its end. What one call took.
pub fn cost_of_call(daemon: &Daemon, calls: usize) -> f64 {
    let log = daemon.log();
    let total = log
        .lines()
        .find_map(|line| line.split_once("Collected : "))
        .and_then(|(_, total)| total.trim().parse::<f64>().ok());
    let total = total.unwrap_or_else(|| panic!("callgrind counts nothing:\n{log}"));
    let cost = total / calls as f64;
    assert!(cost > 1000.0, "nothing of the function was counted:\n{log}");
    cost
}

/// Asserts that no two of these costs, each with its name, differ by more than `at_most`.
pub fn assert_alike(costs: &[(&str, f64)], at_most: f64) {
    let of = |choice: fn(f64, f64) -> f64| costs.iter().map(|cost| cost.1).reduce(choice);
    let least = of(f64::min).expect("there are some");
    let most = of(f64::max).expect("there are some");
    assert!(most - least < at_most, "{costs:?}");
}
