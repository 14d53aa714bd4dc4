//! The start of the command, and what it is given.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use crate::fixture::{as_nobody, Lock, Wrapper};
use crate::support::latch::{shell_status, text};
use crate::support::limited::copy_program;
use crate::wrapper::NOT_STARTED;

crate::tests![
    a_command_ends_and_speaks_as_it_would_without_a_lock,
    a_command_that_cannot_run_is_told_apart_with_one_line,
    an_unreadable_directory_in_path_hides_no_error,
    the_command_has_the_same_descriptors_as_without_a_lock,
    the_sockets_and_the_watchdog_of_a_service_are_the_commands,
    a_command_does_not_start_after_the_wrapper_was_killed,
    an_upgrade_does_not_disturb_a_running_wait,
];

fn a_command_ends_and_speaks_as_it_would_without_a_lock() {
    for (script, code, stdout, stderr) in [
        ("under sh -c 'cat; echo err >&2; exit 7'", 7, "in", "err\n"),
        ("under sh -c 'kill -KILL $$'", 137, "", ""),
        ("under sh -c nosuch 2>&-", 127, "", ""),
        (
            "REMOVED=1 under sh -c 'echo $REMOVED $ADDED'",
            0,
            "a value\n",
            "",
        ),
        ("under sh -c 'cat; exit 7' <&-", 7, "", ""),
        ("under sh -c 'exit 7' >&-", 7, "", ""),
        ("under sh -c 'cat; exit 7' 2>&-", 7, "in", ""),
        ("under sh -c 'exit 7' <&- >&- 2>&-", 7, "", ""),
        (
            "bash -c 'under yes | head -n 1; echo ${PIPESTATUS[@]}'",
            0,
            "y\n141 0\n",
            "",
        ),
        // As cron starts it: without a terminal, and with few variables.
        (
            "setsid -w env -i \"DIR=$DIR\" \"PATH=$PATH\" under sh -c '(: </dev/tty) || exit 6' 2>&-",
            6,
            "",
            "",
        ),
    ] {
        let output = Lock::new().output(script);
        let said = (text(&output.stdout), text(&output.stderr));
        assert_eq!(said, (stdout.into(), stderr.into()), "{script}");
        assert_eq!(shell_status(output.status), Some(code), "{script}");
    }
}

fn a_command_that_cannot_run_is_told_apart_with_one_line() {
    let lock = Lock::new();
    lock.touch("plain");
    for (command, status, reason) in [
        ("$DIR/nowhere", 127, "no such file or directory"),
        ("no-such-command-at-all", 127, "no such file or directory"),
        ("''", 127, "no such file or directory"),
        (
            "\"$(printf 'no\\n\\033[31mne')\"",
            127,
            "no such file or directory",
        ),
        ("$DIR/plain", 126, "permission denied"),
        ("$DIR/", 126, "permission denied"),
        ("$DIR/plain/x", 126, "not a directory"),
    ] {
        let expected = Some(status - i32::from(NOT_STARTED));
        let output = lock.output(&format!("under {command}"));
        assert_eq!(output.status.code(), expected, "{command}");
        let said = text(&output.stderr);
        assert_eq!(said.lines().count(), 1, "{command}: {said}");
        assert!(said.starts_with("latch: "), "{command}: {said}");
        assert!(
            said.ends_with(&format!(": {reason}\n")),
            "{command}: {said}"
        );
        let unheard = lock.output(&format!("under {command} 2>/dev/full"));
        assert_eq!(unheard.status.code(), expected, "{command}");
    }
    let said = |script: &str| text(&lock.output(script).stderr);
    assert!(said("under ''").starts_with("latch: \"\": "));
    assert!(
        said("under \"$(printf 'no\\n\\033[31mne')\"").starts_with("latch: no\\x0a\\x1b[31mne: ")
    );
}

/// The situation of a user whose PATH is that of root.
fn an_unreadable_directory_in_path_hides_no_error() {
    let lock = Lock::for_all();
    lock.touch("plain");
    fs::create_dir(lock.file("closed")).expect("there is room");
    // Who may not even read it could not remove it with the folder.
    fs::set_permissions(lock.file("closed"), Permissions::from_mode(0o400)).expect("it is ours");
    for (command, expected) in [("no-such-command-at-all", 27), ("plain", 26), ("true", 0)] {
        let output = lock.output(&format!(
            "PATH=$DIR/closed:$DIR:/usr/bin:/bin exec {} $DIR/bin/under {command}",
            as_nobody()
        ));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(expected), "{command}: {said}");
        assert_eq!(said.contains("no such file"), expected == 27, "{said}");
    }
}

/// So that streams pass through unchanged, however much they carry.
fn the_command_has_the_same_descriptors_as_without_a_lock() {
    let script = "ls -l /proc/self/fd 7</dev/null; exec under ls -l /proc/self/fd 7</dev/null";
    let said = text(&Lock::new().output(script).stdout);
    let links = said.lines().filter_map(|line| line.split_once(" -> "));
    // The listing has the folder of its own process open.
    let targets = links.map(|(_, target)| target);
    let targets: Vec<&str> = targets.filter(|target| !target.ends_with("/fd")).collect();
    let (without, with) = targets.split_at(targets.len() / 2);
    assert!(without.len() >= 4, "{said}");
    assert_eq!(with, without, "{said}");
}

fn the_sockets_and_the_watchdog_of_a_service_are_the_commands() {
    let tell = "echo $$ $LISTEN_PID $WATCHDOG_PID";
    for inherits in ["", "INHERIT=1"] {
        // The wrapper takes the place of the first shell, and has its number.
        let script =
            format!("LISTEN_PID=$$ WATCHDOG_PID=$$ {inherits} exec under under sh -c '{tell}'");
        let said = text(&Lock::new().output(&script).stdout);
        let numbers: Vec<&str> = said.split_whitespace().collect();
        assert!(numbers.len() == 3, "{said}");
        assert!(numbers.iter().all(|number| *number == numbers[0]), "{said}");
    }
    let others = format!("LISTEN_PID=1 under sh -c '{tell}' | cut -d ' ' -f 2-");
    assert_eq!(text(&Lock::new().output(&others).stdout), "1\n");
}

fn a_command_does_not_start_after_the_wrapper_was_killed() {
    // The exec shim of a wrapper that was killed at once finds another parent.
    let lock = Lock::new();
    let output = lock.output("under --exec-shim 0 - - touch $DIR/ran");
    assert_eq!(output.status.code(), Some(143));
    assert!(!lock.file("ran").exists());
}

fn an_upgrade_does_not_disturb_a_running_wait() {
    let lock = Lock::new().held();
    let copy = lock.file("under");
    copy_program(lock.file("bin/under"), &copy);
    let mut wrapper = Wrapper::shell(lock, "exec ./under sh -c 'exit 4'");
    wrapper.wait_for_waiter();
    fs::remove_file(copy).expect("the old version");
    let _granted = wrapper.grant();
    assert_eq!(wrapper.status(), 4);
}
