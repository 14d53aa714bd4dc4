//! What MONITORING in latchd-operations(7) shows for Prometheus, and the metrics that it lists.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use super::manual::{page, section};
use super::readme::displays;
use crate::support::latch::text;
use crate::support::needs::{needs, Program};
use crate::support::transcript::door_of;
use crate::support::{Daemon, PATIENCE};

/// The summaries of alerts that have one, when they go off as in [`ALERTS`].
const SUMMARIES: [(&str, &str); 3] = [
    (
        "LatchJobDidNotRun",
        "nightly: no success for 11m 0s; latch history shows its last runs",
    ),
    (
        "LatchdWaitTooLong",
        "waiting for a lock for 11m 0s; latch stats shows its key",
    ),
    (
        "LatchdHeldTooLong",
        "semaphore held for 1h 10m 0s; latch stats shows its key (highest AGE)",
    ),
];

/// An alert of the manual: its name, a series that sets it off with the values of each minute, and
/// two minutes, in the first of which it is silent.
const ALERTS: [(&str, &str, &str, [u32; 2]); 11] = [
    ("LatchdGone", r#"latchd_up{server="a"}"#, "1x3 0x9", [3, 5]),
    ("LatchdGone", r#"up{job="latchd"}"#, "1x3 0x9", [3, 5]),
    (
        "LatchdGone",
        r#"node_textfile_mtime_seconds{file="/var/lib/latchd.prom"}"#,
        "0x20",
        [5, 7],
    ),
    (
        "LatchdWaitTooLong",
        r#"latchd_oldest_wait_seconds{kind="lock",server="a"}"#,
        "0+60x20",
        [10, 11],
    ),
    (
        "LatchdHeldTooLong",
        r#"latchd_oldest_hold_seconds{kind="semaphore"}"#,
        "0+600x20",
        [6, 7],
    ),
    (
        "LatchJobDidNotRun",
        r#"latchd_success_age_seconds{key="nightly",server="a"}"#,
        "0+60x20",
        [10, 11],
    ),
    (
        "LatchdHolderDiedOrHung",
        r#"latchd_expiries_total{server="a"}"#,
        "7x10 8x10",
        [10, 12],
    ),
    (
        "LatchdClaimsRefused",
        r#"latchd_refusals_total{reason="max_locks"}"#,
        "0x10 1x10",
        [10, 12],
    ),
    ("LatchdDrainsForLong", "latchd_draining", "1x20", [4, 6]),
    (
        "LatchdCannotReserveFences",
        r#"latchd_fences_left{server="a"}"#,
        "524288x3 524287x20",
        [8, 10],
    ),
    (
        "LatchdCannotWriteStateFile",
        "latchd_state_unwritten_seconds",
        "60x3 61x20",
        [3, 5],
    ),
];

/// What an alert compares its series with: another series with the same labels.
const COMPARED: [(&str, &str, &str); 1] = [(
    "LatchJobDidNotRun",
    r#"latchd_expected_seconds{key="nightly",server="a"}"#,
    "600x20",
)];

#[test]
fn the_alerts_of_the_manual_can_be_pasted_and_go_off() {
    let promtool = needs!("promtool");
    let dir = tempfile::tempdir().expect("a directory");
    write_display(dir.path(), "rules");
    check(&promtool, dir.path(), &["check", "rules", "rules.yml"]);
    let rules = fs::read_to_string(dir.path().join("rules.yml")).expect("just written");
    let named = rules.lines().filter_map(|line| line.split_once("alert: "));
    for (_, name) in named {
        let is_tried = ALERTS.iter().any(|(alert, ..)| *alert == name);
        assert!(is_tried, "{name} is not in ALERTS");
    }
    let mut tests = "rule_files: [rules.yml]\nevaluation_interval: 1m\ntests:\n".to_owned();
    for (alert, series, values, [silent_at, fires_at]) in ALERTS {
        let labels = series.split_once('{').map_or("", |(_, labels)| labels);
        let labels = labels.trim_end_matches('}').replace('=', ": ");
        let summary = SUMMARIES.iter().find(|(name, _)| *name == alert);
        let annotations = summary.map_or(String::new(), |(_, summary)| {
            format!(", exp_annotations: {{summary: '{summary}'}}")
        });
        let compared = COMPARED.iter().filter(|(name, ..)| *name == alert);
        let compared = compared.map(|(_, series, values)| (*series, *values));
        let input = [(series, values)].into_iter().chain(compared);
        let input =
            input.map(|(series, values)| format!("{{series: '{series}', values: '{values}'}}"));
        let input: Vec<String> = input.collect();
        let input = input.join(", ");
        tests += &format!(
            "- interval: 1m\n  \
               input_series: [{input}]\n  \
               alert_rule_test:\n  \
               - {{eval_time: {silent_at}m, alertname: {alert}}}\n  \
               - eval_time: {fires_at}m\n    \
                 alertname: {alert}\n    \
                 exp_alerts: [{{exp_labels: {{{labels}}}{annotations}}}]\n"
        );
    }
    fs::write(dir.path().join("tests.yml"), tests).expect("room");
    check(&promtool, dir.path(), &["test", "rules", "tests.yml"]);
}

#[test]
fn prometheus_takes_the_scrape_configuration_of_the_manual() {
    let promtool = needs!("promtool");
    let dir = tempfile::tempdir().expect("a directory");
    write_display(dir.path(), "scraped");
    check(&promtool, dir.path(), &["check", "config", "scraped.yml"]);
}

#[test]
fn the_manual_names_every_metric() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("fences");
    let file = file.to_str().expect("UTF-8");
    let door = ["--http", "127.0.0.1:0"];
    let options = ["--fence-state-file", file, "--expect", "k=1h"];
    let daemon = Daemon::start_alone(&[&door[..], &options].concat());
    let mut door = TcpStream::connect(door_of(&daemon)).expect("the door is open");
    door.set_read_timeout(Some(PATIENCE)).expect("a time");
    let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    door.write_all(request.as_bytes()).expect("it reads");
    let mut shown = String::new();
    door.read_to_string(&mut shown).expect("it closes in time");
    let types = shown.lines().filter_map(|it| it.strip_prefix("# TYPE "));
    let mut metrics: Vec<&str> = types.filter_map(|it| it.split(' ').next()).collect();
    let section = section(&page("latchd-operations.7"), "MONITORING");
    let (_, section) = section.split_once("\n.Ss Metrics\n").expect("a list");
    let is_space = |c: char| c.is_whitespace();
    let mut named: Vec<&str> = section.split(is_space).collect();
    named.retain(|word| word.starts_with("latchd_"));
    for list in [&mut metrics, &mut named] {
        list.sort_unstable();
        list.dedup();
    }
    assert_eq!(metrics, named, "left: what is shown, right: the manual");
}

/// Writes the display of latchd-operations(7) after the comment `kind` into a file of that name.
fn write_display(dir: &Path, kind: &str) {
    let shown = displays("man/latchd-operations.7", &[kind]);
    let [(_, display)] = &shown[..] else {
        panic!("one display of the kind {kind}: {shown:?}");
    };
    fs::write(dir.join(kind).with_extension("yml"), display).expect("room");
}

fn check(promtool: &Program, dir: &Path, arguments: &[&str]) {
    let checked = promtool.command().current_dir(dir).args(arguments).output();
    let checked = checked.expect("it starts");
    let said = text(&checked.stdout) + &text(&checked.stderr);
    assert!(checked.status.success(), "{arguments:?}: {said}");
}
