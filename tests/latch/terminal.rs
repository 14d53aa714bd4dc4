//! `latch` at a terminal: what it shows, and that the lock stays held while the job is stopped.
//! tests/supervise proves how a command and a shell share the terminal.

use std::path::Path;

use crate::support::latch::{is_gone, is_held, number_in};
use crate::support::silent::free_addr;
use crate::support::terminal::{self, Terminal, CTRL_C, CTRL_Z, PROMPT, SAY, SHELLS};
use crate::support::{eventually, Daemon, Scheme, Signal, PATIENCE};
use rustix::process::kill_process;
use rustix::termios::Action;

/// A program at a terminal, for which the daemon is the server.
fn start(daemon: &Daemon, command: &[&str]) -> Terminal {
    let server = daemon.addr().to_string();
    Terminal::start(&[("LATCH_SERVER", &server)], command)
}

fn at_each_shell(test: impl Fn(&Daemon, Terminal) + Sync) {
    at_each_shell_beside(|| Daemon::start(&[]), test);
}

fn at_each_shell_beside(
    new_daemon: impl Fn() -> Daemon + Sync,
    test: impl Fn(&Daemon, Terminal) + Sync,
) {
    terminal::at_each_shell(|shell| {
        let daemon = new_daemon();
        let terminal = start(&daemon, shell);
        test(&daemon, terminal);
    });
}

fn free(daemon: &Daemon) {
    eventually(PATIENCE, "the lock is free", || !is_held(daemon, "k"));
}

fn appears(file: &Path) {
    eventually(PATIENCE, "the command runs", || file.exists());
}

#[test]
fn ctrl_z_stops_the_job_and_fg_continues_it_at_the_terminal() {
    at_each_shell(|daemon, mut terminal| {
        terminal.enter(&format!("latch run k -- {SAY}"));
        for round in ["one", "two"] {
            terminal.enter(round);
            terminal.expect(&format!("got:{round}"));
            terminal.press(CTRL_Z);
            terminal.expect(PROMPT);
            assert!(is_held(daemon, "k"));
            terminal.enter("echo $((6 * 7)) is here; jobs");
            terminal.expect("42 is here");
            terminal.expect("Stopped");
            terminal.expect(PROMPT);
            terminal.command("fg");
        }
        terminal.enter("three");
        terminal.expect("got:three");
        terminal.press(CTRL_C);
        terminal.expect(PROMPT);
        terminal.expect_status(130);
        free(daemon);
    });
}

#[test]
fn a_line_on_the_terminal_says_what_it_waits_for() {
    let start = || Daemon::start_directly(Scheme::Plain, &[]);
    at_each_shell_beside(start, |daemon, mut terminal| {
        for (command, done) in [
            ("run k -- echo done", "done"),
            ("reserve k --for 1", "seconds: 1"),
        ] {
            let mut holder = daemon.connect();
            assert_eq!(holder.request("tag", "_", "the holder"), "ok");
            holder.acquire("k", 0);
            terminal.enter(&format!("latch {command}"));
            terminal
                .expect("\r\u{1b}[Klatch: waiting for k: next in line, held by the holder for ");
            drop(holder);
            // The grant removes it.
            terminal.expect(" s\r\u{1b}[K");
            terminal.expect(done);
            terminal.expect(PROMPT);
            terminal.expect_status(0);
        }
    });
}

#[test]
fn a_stopped_terminal_delays_neither_the_command_nor_a_signal() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let pid = directory.path().join("pid");
    let ran = directory.path().join("ran");
    let latch = format!("sh -c 'echo $$ > {}; exec latch run k -- ", pid.display());
    let mut terminal = start(&daemon, SHELLS[0]);
    for is_granted in [true, false] {
        let mut holder = daemon.connect();
        holder.acquire("k", 0);
        terminal.enter(&format!("{latch} touch {}'", ran.display()));
        terminal.expect("latch: waiting for k");
        terminal.flow(Action::OOff);
        if is_granted {
            drop(holder);
            appears(&ran);
        } else {
            let pid = number_in(&pid).expect("it has begun");
            kill_process(pid, Signal::TERM).expect("it runs");
            eventually(PATIENCE, "the signal ends it", || is_gone(pid));
        }
        terminal.flow(Action::OOn);
        terminal.expect(PROMPT);
        terminal.expect_status(if is_granted { 0 } else { 143 });
    }
}

#[test]
fn a_quiet_wait_and_one_in_the_background_show_no_line() {
    at_each_shell(|daemon, mut terminal| {
        let mut holder = daemon.connect();
        holder.acquire("k", 0);
        terminal.enter("latch run k -- true & latch run k -q --timeout 4 -- true");
        daemon.wait_for_waiters("k", 2);
        terminal.expect(": not granted within 4 s: held by ");
        terminal.expect(PROMPT);
        assert!(!terminal.screen().contains("waiting for"));
        drop(holder);
    });
}

#[test]
fn hold_in_the_background_holds_until_it_is_ended() {
    at_each_shell(|daemon, mut terminal| {
        terminal.enter("latch hold k >/dev/null & true");
        eventually(PATIENCE, "the lock is held", || is_held(daemon, "k"));
        // What is typed meanwhile is the shell's.
        terminal.expect_status(0);
        terminal.command("fg");
        terminal.wait_for_the_job();
        terminal.press(CTRL_Z);
        terminal.expect(PROMPT);
        terminal.enter("bg; true");
        terminal.expect_status(0);
        assert!(is_held(daemon, "k"));
        terminal.enter("kill %1; wait; true");
        free(daemon);
        terminal.expect_status(0);
    });
}

#[test]
fn replies_of_a_server_cannot_move_the_cursor() {
    let daemon = Daemon::start(&[]);
    daemon.connect().acquire("free", 0);
    let mut holder = daemon.connect();
    holder.acquire("a\u{9b}2Jb", 0);
    let mut terminal = start(&daemon, SHELLS[0]);
    terminal.enter("latch stats --json");
    terminal.expect("a\\u009b2Jb");
    terminal.expect(PROMPT);
    terminal.enter("latch stats --json | cat");
    terminal.expect("a\\u009b2Jb");
}

#[test]
fn a_person_is_told_that_a_key_with_commas_is_one_key() {
    let daemon = Daemon::start(&[]);
    let note = "latch: a,b is one key; latch run takes others with --and";
    let mut terminal = start(&daemon, SHELLS[0]);
    for command in [
        "run a,b -- true",
        "acquire a,b --lease 1",
        "run a=1,b=2 -- true",
    ] {
        terminal.enter(&format!("latch {command}"));
        if command.contains('=') {
            terminal.expect(PROMPT);
        } else {
            terminal.expect(note);
            terminal.expect(PROMPT);
        }
    }
    terminal.enter("latch run a,b -- true 2>&1 | cat; latch run a,b -q -- true");
    terminal.expect(PROMPT);
    assert_eq!(terminal.screen().matches(note).count(), 2);
}

#[test]
fn a_watch_fits_its_window_and_outlives_its_server() {
    let addr = free_addr();
    let new_daemon = || {
        let mut command = Daemon::command();
        command.args(["--print-port", "--port", &addr.port().to_string()]);
        Daemon::from_command(command)
    };
    let daemon = new_daemon();
    let mut terminal = start(&daemon, SHELLS[0]);
    let mut holder = daemon.connect();
    assert_eq!(holder.request("tag", "_", &"x".repeat(100)), "ok");
    for key in 0..10 {
        holder.acquire_for(&format!("key-{key}"), 0, 600);
    }
    terminal.enter("stty rows 8 cols 40");
    terminal.expect(PROMPT);
    terminal.enter("latch stats --watch");
    terminal.expect(&format!("Z  {addr}"));
    for expected in [
        "KEY",
        "WAITERS",
        "TAG",
        "key-0",
        "xxx...",
        "key-2",
        "... and 7 more lines",
        "10 in use",
    ] {
        terminal.expect(expected);
    }
    terminal.expect(" grants a second");
    // The next round is in the place of this one.
    terminal.expect("\x1b[H");
    let screen = terminal.screen()[..terminal.seen.get()].to_owned();
    let round = screen.split("\x1b[H").nth(1).expect("a round").to_owned();
    let lines: Vec<&str> = round.split_terminator("\r\n").collect();
    let (end, lines) = lines.split_last().expect("lines");
    assert_eq!((lines.len(), *end), (7, "\x1b[J"), "{round:?}");
    for line in lines {
        let line = line.strip_prefix("\x1b[2K").expect("it is erased first");
        assert!(line.len() <= 40, "{line:?}");
    }
    drop((holder, daemon));
    terminal.expect("no statistics: connection refused");
    let _daemon = new_daemon();
    terminal.expect("0 in use");
    terminal.press(CTRL_C);
    terminal.expect(PROMPT);
    terminal.expect_status(130);
    assert!(
        !terminal.screen().contains("latch: "),
        "{}",
        terminal.screen()
    );
}
