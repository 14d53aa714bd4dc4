//! `latch run` at a terminal: the command reads it, Ctrl-C and Ctrl-Z reach it, `fg` and `bg` work,
//! and the shell has its terminal back afterwards.

use std::cell::Cell;
use std::fs;
use std::io::{Read, Write};
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::latch::{is_gone, is_held, number_in};
use crate::support::needs::{needs, Program};
use crate::support::silent::free_addr;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{children_of, eventually, program, stat_of, Daemon, Scheme, Signal, PATIENCE};
use rustix::fs::{Mode, OFlags};
use rustix::process::kill_process;
use rustix::termios::{tcflow, Action};

/// Shells with job control.
const SHELLS: [&[&str]; 2] = [
    &["bash", "--norc", "--noprofile", "--noediting", "-i"],
    &["dash", "-i"],
];

const PROMPT: &str = "ready> ";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const CTRL_Z: &str = "\x1a";

/// Says what it reads, and is told from the terminal's echo by that.
const SAY: &str = "sed -u s/^/got:/";

/// An interactive shell at a terminal of its own, which Python lends it; hung up when dropped.
struct Terminal {
    python: Child,
    keyboard: ChildStdin,
    screen: Arc<Mutex<String>>,
    /// The length of the output that the test has already matched.
    seen: Cell<usize>,
}

impl Terminal {
    /// Starts a shell, or another program that prints [`PROMPT`] when it is ready.
    fn start(python: &Program, daemon: &Daemon, command: &[&str]) -> Terminal {
        let mut python = python
            .command()
            .args(["-c", "import pty, sys; pty.spawn(sys.argv[1:])"])
            // Not by the environment of Python, which may be started by a shell that does not keep
            // this.
            .args(["env", &format!("PS1={PROMPT}")])
            .args(command)
            .env("LATCH_SERVER", daemon.addr().to_string())
            .env("TERM", "dumb")
            .env_remove("ENV")
            // Without this, bash writes what the test types into the user's history.
            .env("HISTFILE", "")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut output = python.stdout.take().expect("piped");
        let screen = Arc::new(Mutex::new(String::new()));
        let sink = Arc::clone(&screen);
        thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut chunk) {
                let text = String::from_utf8_lossy(&chunk[..count]).into_owned();
                sink.lock().unwrap().push_str(&text);
            }
        });
        let terminal = Terminal {
            keyboard: python.stdin.take().expect("piped"),
            python,
            screen,
            seen: Cell::new(0),
        };
        terminal.expect(PROMPT);
        terminal
    }

    fn press(&mut self, keys: &str) {
        self.keyboard
            .write_all(keys.as_bytes())
            .and_then(|()| self.keyboard.flush())
            .expect("the terminal is there");
    }

    fn enter(&mut self, line: &str) {
        self.press(&format!("{line}\n"));
    }

    /// Types a line for the shell. Bash can lose the first byte while it hears of a child that has
    /// stopped.
    fn command(&mut self, line: &str) {
        self.enter(&format!(" {line}"));
    }

    /// Waits until `text` appears after everything that was matched before.
    fn expect(&self, text: &str) {
        let position = Cell::new(None);
        let mut screen = String::new();
        for _ in 0..PATIENCE.as_millis() / 5 {
            screen = self.screen();
            position.set(screen[self.seen.get()..].find(text));
            if position.get().is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
        let found = position
            .get()
            .unwrap_or_else(|| panic!("no {text:?} at the end of:\n{screen}"));
        self.seen.set(self.seen.get() + found + text.len());
    }

    /// Has the shell print the last exit status, which shows that it reads its terminal.
    fn expect_status(&mut self, status: i32) {
        assert_eq!(self.say("$?"), status.to_string(), "{}", self.screen());
    }

    /// Has the shell print the expansion of `word`.
    fn say(&mut self, word: &str) -> String {
        // The terminal echoes this line as another text than the output.
        self.command(&format!("echo \"<{word}:$((40 + 2))>\""));
        self.expect(":42>");
        let screen = self.screen();
        let said = screen[..self.seen.get()].rsplit_once('<').expect("said").1;
        let said = said.strip_suffix(":42>").expect("just seen").to_owned();
        self.expect(PROMPT);
        said
    }

    /// Has the terminal stop its output, as Ctrl-S does, or go on with it.
    fn flow(&self, action: Action) {
        let shell = children_of(self.python.id())[0].as_raw_nonzero();
        let device = format!("/proc/{shell}/fd/0");
        let device = rustix::fs::open(device, OFlags::RDWR | OFlags::NOCTTY, Mode::empty());
        tcflow(device.expect("the shell reads it"), action).expect("a terminal");
    }

    fn screen(&self) -> String {
        self.screen.lock().unwrap().clone()
    }

    /// Waits until a job has the terminal, and runs. The shell says what it continues before that.
    fn wait_for_the_job(&self) {
        eventually(PATIENCE, "the job goes on", || {
            let shell = children_of(self.python.id()).into_iter().next();
            let fields =
                shell.and_then(|shell| stat_of(shell.as_raw_nonzero().get().unsigned_abs()));
            let Some((own, foreground)) =
                fields.map(|fields| (fields[2].clone(), fields[5].clone()))
            else {
                return false;
            };
            own != foreground && !has_a_stopped_process(&foreground)
        });
    }
}

fn has_a_stopped_process(group: &str) -> bool {
    let processes = fs::read_dir("/proc").expect("it is Linux").flatten();
    let numbers = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    numbers
        .filter_map(stat_of)
        .any(|fields| fields[2] == group && fields[0] == "T")
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.python.kill();
        let _ = self.python.wait();
    }
}

fn at_each_shell(python: &Program, test: impl Fn(&Daemon, Terminal) + Sync) {
    at_each_shell_beside(python, || Daemon::start(&[]), test);
}

fn at_each_shell_beside(
    python: &Program,
    start: impl Fn() -> Daemon + Sync,
    test: impl Fn(&Daemon, Terminal) + Sync,
) {
    let (start, test) = (&start, &test);
    // Side by side: each has a server and a terminal of its own, and mostly waits.
    thread::scope(|scope| {
        let runs = SHELLS.map(|shell| {
            scope.spawn(move || {
                let daemon = start();
                let terminal = Terminal::start(python, &daemon, shell);
                test(&daemon, terminal);
            })
        });
        for run in runs {
            // With its own panic, by which `fair_test` knows what was late.
            run.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
}

fn free(daemon: &Daemon) {
    eventually(PATIENCE, "the lock is free", || !is_held(daemon, "k"));
}

/// A script that makes the pipe `file`, and then waits until it is told to go on. It starts no
/// process to wait: a shell that is stopped between vfork and exec does not count as stopped.
fn waits_for(file: &Path) -> String {
    format!("mkfifo {0}; read line < {0}", file.display())
}

/// Whether its terminal is that of the process's group.
fn is_in_the_foreground(pid: &str) -> bool {
    let fields = stat_of(pid.parse().expect("a number")).expect("it runs");
    fields[2] == fields[5]
}

fn all_below_have_stopped(pid: u32) -> bool {
    let session = |pid| stat_of(pid).map(|fields| fields[3].clone());
    children_of(pid).into_iter().all(|child| {
        let child = child.as_raw_pid().unsigned_abs();
        // The guard of a command has a session of its own, and does not stop with the job.
        session(child) != session(pid)
            || stat_of(child).is_some_and(|fields| fields[0] == "T")
                && all_below_have_stopped(child)
    })
}

fn appears(file: &Path) {
    eventually(PATIENCE, "the command runs", || file.exists());
}

fn let_go_on(file: &Path) {
    // Without a reader, this open fails.
    let flags = OFlags::WRONLY | OFlags::NONBLOCK;
    eventually(PATIENCE, "the command goes on", || {
        rustix::fs::open(file, flags, Mode::empty())
            .is_ok_and(|pipe| rustix::io::write(&pipe, b"go on\n").is_ok())
    });
}

#[test]
fn the_command_gets_the_terminal_with_ctrl_d_and_ctrl_c() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        terminal.enter(&format!("latch run k -- {SAY}"));
        terminal.enter("hello");
        terminal.expect("got:hello");
        terminal.press(CTRL_D);
        terminal.expect(PROMPT);
        terminal.expect_status(0);
        free(daemon);

        terminal.enter(&format!("latch run k -- {SAY}"));
        terminal.enter("again");
        terminal.expect("got:again");
        terminal.press(CTRL_C);
        terminal.expect(PROMPT);
        terminal.expect_status(130);
        free(daemon);
    });
}

#[test]
fn ctrl_c_ends_a_loop_or_a_script_around_latch() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        let rounds =
            format!("for i in 1 2 3; do latch run k -- {SAY}; echo after:$((i * 7)); done");
        for job in [
            rounds.clone(),
            format!("bash -c '{rounds}; echo after:$((7 * 7))'"),
            format!("dash -c '{rounds}; echo after:$((7 * 7))'"),
            format!("bash -c '{rounds}; echo after:$((7 * 7))' | cat"),
        ] {
            terminal.enter(&job);
            terminal.enter("one");
            terminal.expect("got:one");
            terminal.press(CTRL_D);
            terminal.expect("after:7");
            terminal.enter("two");
            terminal.expect("got:two");
            let before = terminal.screen().len();
            terminal.press(CTRL_C);
            terminal.expect(PROMPT);
            free(daemon);
            terminal.say("$?");
            let screen = terminal.screen();
            assert!(!screen[before..].contains("after:"), "{job}: {screen}");
        }
    });
}

#[test]
fn a_signal_that_was_not_typed_ends_no_script() {
    let python = needs!("python3");
    at_each_shell(&python, |_, mut terminal| {
        let script = "latch run k -- sh -c \"read line; kill -INT \\$PPID; exec sleep 60\"; \
                      echo after:$((6 * 7))";
        terminal.enter(&format!("bash -c '{script}'"));
        terminal.enter("go on");
        terminal.expect("after:42");
        terminal.expect(PROMPT);
    });
}

#[test]
fn ctrl_c_after_fg_works_with_a_silent_server() {
    fair_test(ctrl_c_after_fg_works_with_a_silent_server_once);
}

fn ctrl_c_after_fg_works_with_a_silent_server_once() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        terminal.enter(&format!("latch run k -- {SAY}"));
        terminal.enter("one");
        terminal.expect("got:one");
        terminal.press(CTRL_Z);
        terminal.expect(PROMPT);
        daemon.signal(Signal::STOP);
        terminal.command("fg");
        terminal.expect("run k");
        terminal.wait_for_the_job();
        let pressed_at = Instant::now();
        terminal.press(CTRL_C);
        terminal.expect(PROMPT);
        let heard_after = pressed_at.elapsed();
        daemon.signal(Signal::CONT);
        println!("heard after {heard_after:?}");
        in_time!(heard_after < Duration::from_secs(6), "{heard_after:?}");
        // A command that takes more than a second to die of it has lost its lock.
        let status = terminal.say("$?");
        assert!(["130", "70"].contains(&status.as_str()), "{status}");
        in_time!(status == "130", "{}", terminal.screen());
        free(daemon);
    });
}

#[test]
fn a_script_dies_of_ctrl_c_at_fg_although_the_server_is_silent() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        // Bash waits for its child to die of Ctrl-C, and so is there for a later signal, too.
        let script = format!("{SAY}; true");
        terminal.enter(&format!("latch run k --lease 30 -- bash -c '{script}'"));
        terminal.enter("one");
        terminal.expect("got:one");
        terminal.press(CTRL_Z);
        terminal.expect(PROMPT);
        daemon.signal(Signal::STOP);
        terminal.command("fg");
        terminal.expect("run k");
        terminal.wait_for_the_job();
        terminal.press(CTRL_C);
        terminal.expect(PROMPT);
        daemon.signal(Signal::CONT);
        terminal.expect_status(130);
        free(daemon);
    });
}

#[test]
fn a_signal_that_is_ignored_at_fg_is_followed_by_sigterm() {
    let python = needs!("python3");
    let daemon = Daemon::start(&[]);
    let mut terminal = Terminal::start(&python, &daemon, SHELLS[0]);
    terminal.enter(&format!(
        "latch run k --lease 600 -- sh -c 'trap \"\" INT; {SAY}'"
    ));
    terminal.enter("one");
    terminal.expect("got:one");
    terminal.press(CTRL_Z);
    terminal.expect(PROMPT);
    daemon.signal(Signal::STOP);
    terminal.command("fg");
    terminal.expect("run k");
    // On a busy machine the shell may not have given the terminal away yet: then it swallows the
    // key.
    let seen = terminal.seen.get();
    eventually(PATIENCE, "the shell asks again", || {
        thread::sleep(Duration::from_millis(300));
        terminal.press(CTRL_C);
        thread::sleep(Duration::from_millis(1700));
        terminal.screen()[seen..].contains(PROMPT)
    });
    terminal.expect(PROMPT);
    daemon.signal(Signal::CONT);
    terminal.expect_status(143);
    free(&daemon);
}

#[test]
fn the_rest_of_a_pipeline_can_read_the_terminal() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        // Reads the terminal after the command has started, as a pager does.
        let reader = "sleep 0.5; read line < /dev/tty; echo got:$line";
        for pipeline in [
            format!("latch run k -- sh -c 'echo x; sleep 2' | sh -c '{reader}'"),
            format!("sh -c '{reader}' | latch run k -- cat"),
        ] {
            terminal.enter(&pipeline);
            eventually(PATIENCE, "it is held", || is_held(daemon, "k"));
            terminal.enter("hello");
            terminal.expect("got:hello");
            terminal.expect(PROMPT);
            terminal.expect_status(0);
            free(daemon);
        }
        terminal.enter("latch run k -- sleep 60 | cat");
        eventually(PATIENCE, "it is held", || is_held(daemon, "k"));
        terminal.press(CTRL_C);
        terminal.expect(PROMPT);
        free(daemon);
    });
}

#[test]
fn a_pager_gets_the_terminal_after_the_command_has_read_it() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        let directory = tempfile::tempdir().expect("a directory");
        let flag = directory.path().join("flag");
        let pager = "read x; echo first:$x; read y < /dev/tty; echo second:$y";
        let pager = format!("{pager}; : > {}", flag.display());
        for (prompt, mode) in [
            ("read x < /dev/tty", "-tostop"),
            (
                "stty -echo < /dev/tty; read x < /dev/tty; stty echo < /dev/tty",
                "-tostop",
            ),
            ("read x < /dev/tty", "tostop"),
        ] {
            let wait = format!("until [ -e {} ]; do sleep 0.1; done", flag.display());
            let command = format!("{prompt}; echo $x; {wait}; read z < /dev/tty");
            terminal.enter(&format!(
                "stty {mode}; latch run k -- sh -c '{command}' | sh -c '{pager}'"
            ));
            eventually(PATIENCE, "it is held", || is_held(daemon, "k"));
            terminal.enter("one");
            terminal.expect("first:one");
            terminal.enter("two");
            terminal.expect("second:two");
            // The command asks for the terminal once more.
            terminal.enter("three");
            terminal.expect(PROMPT);
            terminal.expect_status(0);
            free(daemon);
            fs::remove_file(&flag).expect("the reader made it");
        }
    });
}

#[test]
fn ctrl_z_stops_the_job_and_fg_continues_it_at_the_terminal() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
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
fn bg_continues_the_command_without_the_terminal() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("file");
        let done = directory.path().join("done");
        let script = format!("{}; echo done > {}", waits_for(&file), done.display());
        terminal.enter(&format!("latch run k -- sh -c '{script}'"));
        appears(&file);
        terminal.press(CTRL_Z);
        terminal.expect(PROMPT);
        terminal.enter("bg");
        terminal.expect(PROMPT);
        terminal.enter("echo $((6 * 7)) is here");
        terminal.expect("42 is here");
        terminal.expect(PROMPT);
        let_go_on(&file);
        eventually(PATIENCE, "the command went on", || done.exists());
        free(daemon);
        terminal.enter("wait; true");
        terminal.expect(PROMPT);
        terminal.expect_status(0);
        terminal.enter(&format!("latch run k -- {SAY}"));
        terminal.enter("mine again");
        terminal.expect("got:mine again");
        terminal.press(CTRL_D);
        terminal.expect(PROMPT);
        terminal.expect_status(0);
    });
}

#[test]
fn fg_gives_the_terminal_to_a_command_in_any_case() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("file");
        let number = directory.path().join("number");
        let script = format!("echo $$ > {}; {}", number.display(), waits_for(&file));
        terminal.enter(&format!("latch run k -- sh -c '{script}'"));
        appears(&file);
        let number = fs::read_to_string(&number).expect("it was written before");
        let number = number.trim();
        assert!(is_in_the_foreground(number));
        terminal.press(CTRL_Z);
        terminal.expect(PROMPT);
        assert!(!is_in_the_foreground(number));
        terminal.command("fg");
        eventually(PATIENCE, "the command has the terminal", || {
            is_in_the_foreground(number)
        });
        let_go_on(&file);
        terminal.expect(PROMPT);
        terminal.expect_status(0);
        free(daemon);
    });
}

#[test]
fn fg_brings_a_background_job_to_the_terminal() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("file");
        // One command stops because it needs the terminal; the other does not need it.
        terminal.enter(&format!("latch run k -- {SAY} &"));
        eventually(PATIENCE, "the job has stopped", || {
            terminal.enter("jobs");
            terminal.expect(PROMPT);
            terminal.screen().contains("Stopped")
        });
        terminal.command("fg");
        terminal.enter("late");
        terminal.expect("got:late");
        terminal.press(CTRL_C);
        terminal.expect(PROMPT);
        terminal.expect_status(130);
        free(daemon);

        terminal.enter(&format!(
            "latch run k -- sh -c '{}; {SAY}' &",
            waits_for(&file)
        ));
        terminal.expect(PROMPT);
        let shell = terminal.say("$$");
        appears(&file);
        terminal.command("fg");
        eventually(PATIENCE, "the shell has let go of its terminal", || {
            !is_in_the_foreground(&shell)
        });
        let_go_on(&file);
        terminal.enter("later");
        terminal.expect("got:later");
        terminal.press(CTRL_Z);
        terminal.expect(PROMPT);
        // One that waits for input and has yet to stop would take the first key.
        eventually(PATIENCE, "the whole job has stopped", || {
            all_below_have_stopped(shell.parse().expect("a number"))
        });
        terminal.command("fg");
        terminal.enter("latest");
        terminal.expect("got:latest");
        terminal.press(CTRL_D);
        terminal.expect(PROMPT);
        terminal.expect_status(0);
        free(daemon);
    });
}

#[test]
fn fg_continues_all_of_a_job_that_needs_the_terminal() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        for job in [
            format!("sh -c 'latch run k -- {SAY}; true' &"),
            format!("sh -c 'latch run a -- latch run k -- {SAY}; true' &"),
            format!("latch run k -- {SAY} | cat &"),
        ] {
            // The shell has started the whole job before the command needs the terminal.
            let mut holder = daemon.connect();
            holder.acquire("k", 0);
            terminal.enter(&job);
            daemon.wait_for_waiters("k", 1);
            terminal.expect(PROMPT);
            drop(holder);
            let before = terminal.screen().len();
            eventually(PATIENCE, "the job has stopped", || {
                terminal.command("jobs");
                terminal.expect(PROMPT);
                terminal.screen()[before..].contains("Stopped")
            });
            terminal.command("fg");
            terminal.enter("late");
            terminal.expect("got:late");
            terminal.press(CTRL_D);
            terminal.expect(PROMPT);
            terminal.expect_status(0);
            free(daemon);
        }
    });
}

#[test]
fn a_command_stops_with_a_job_that_needs_the_terminal() {
    let python = needs!("python3");
    at_each_shell(&python, |_, mut terminal| {
        let directory = tempfile::tempdir().expect("there is room");
        let [script, pid] = ["script", "pid"].map(|name| directory.path().join(name));
        let text = format!(
            "latch run a -- sh -c 'echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60' &\n\
             until test -e {pid}; do sleep 0.1; done\n\
             latch run k -- {SAY}\n\
             kill $!; wait\n",
            pid = pid.display()
        );
        fs::write(&script, text).expect("there is room");
        terminal.enter(&format!("sh {} &", script.display()));
        terminal.expect(PROMPT);
        appears(&pid);
        let other = fs::read_to_string(&pid).expect("it is there");
        let other = other.trim().parse().expect("a process number");
        eventually(PATIENCE, "the command under the other lock stops", || {
            stat_of(other).is_some_and(|fields| fields[0] == "T")
        });
    });
}

#[test]
fn a_killed_command_leaves_the_terminal_modes_as_they_were() {
    let python = needs!("python3");
    for (options, end) in [
        ("", r"kill -KILL \$\$"),
        (
            "--lease 2 --kill-after 1",
            r"echo runs:\$((6 * 7)); exec sleep 60",
        ),
    ] {
        let mut daemon = Some(Daemon::start(&[]));
        let mut terminal = Terminal::start(&python, daemon.as_ref().expect("started"), SHELLS[0]);
        // A shell that is not interactive leaves the modes alone.
        terminal.enter(&format!(
            "sh -c 'a=$(stty -g); latch run k {options} -- sh -c \"stty -echo -icanon; {end}\"; \
             b=$(stty -g); stty $a; [ $a = $b ]'"
        ));
        if !options.is_empty() {
            terminal.expect("runs:42");
            drop(daemon.take());
            terminal.expect("the lock was lost");
        }
        terminal.expect(PROMPT);
        terminal.expect_status(0);
    }
}

#[test]
fn ctrl_z_stops_all_of_a_pipeline_and_all_of_a_script() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        for job in [
            format!("latch run k -- {SAY} | cat"),
            format!("sh -c 'latch run k -- {SAY}; echo over'"),
            format!("sh -c 'latch run a -- latch run k -- {SAY}; echo over'"),
            format!("latch run a -- sh -c 'latch run k -- {SAY}; echo over' | cat"),
        ] {
            terminal.enter(&job);
            terminal.enter("one");
            terminal.expect("got:one");
            terminal.press(CTRL_Z);
            terminal.expect(PROMPT);
            terminal.command("fg");
            terminal.enter("two");
            terminal.expect("got:two");
            terminal.press(CTRL_D);
            terminal.expect(PROMPT);
            terminal.expect_status(0);
            free(daemon);
        }
    });
}

#[test]
fn a_script_reads_on_from_the_terminal_after_its_command() {
    let python = needs!("python3");
    at_each_shell(&python, |_, mut terminal| {
        terminal.enter("sh -c 'latch run k -- true; read x; echo got:$x'");
        terminal.enter("the rest");
        terminal.expect("got:the rest");
        terminal.expect(PROMPT);
        terminal.expect_status(0);
    });
}

#[test]
fn a_shell_under_the_lock_has_job_control_of_its_own() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        terminal.enter("PS1='inner> ' latch run k -- bash --norc --noprofile --noediting -i");
        terminal.expect("inner> ");
        terminal.enter(SAY);
        terminal.enter("one");
        terminal.expect("got:one");
        terminal.press(CTRL_Z);
        terminal.expect("inner> ");
        terminal.command("fg");
        terminal.enter("two");
        terminal.expect("got:two");
        terminal.press(CTRL_C);
        terminal.expect("inner> ");
        terminal.enter("exit 3");
        terminal.expect(PROMPT);
        terminal.expect_status(3);
        free(daemon);
    });
}

#[test]
fn ctrl_z_and_ctrl_c_work_while_it_waits_for_the_lock() {
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
        let mut holder = daemon.connect();
        holder.acquire("k", 0);
        terminal.enter(&format!("latch run k -- {SAY}"));
        daemon.wait_for_waiters("k", 1);
        terminal.press(CTRL_Z);
        terminal.expect(PROMPT);
        terminal.enter("jobs");
        terminal.expect("Stopped");
        terminal.expect(PROMPT);
        terminal.command("fg");
        terminal.expect("run k");
        terminal.wait_for_the_job();
        terminal.press(CTRL_C);
        terminal.expect(PROMPT);
        terminal.expect_status(130);
        daemon.wait_for_waiters("k", 0);
    });
}

#[test]
fn a_new_size_of_the_window_is_told_once() {
    let python = needs!("python3");
    at_each_shell(&python, |_, mut terminal| {
        let counts = "n=0; trap 'n=$((n + 1))' WINCH; stty rows 31; sleep 0.2; stty rows 32";
        terminal.enter(
            &format!(
                "latch run k -- bash -c \"{}; sleep 0.3; echo told $((n + 40))\"",
                counts.replace('$', "\\$")
            )
            .replace("$((n + 40))\"", "\\$((n + 40))\""),
        );
        terminal.expect("told 42");
    });
}

#[test]
fn a_line_on_the_terminal_says_what_it_waits_for() {
    let python = needs!("python3");
    let start = || Daemon::start_directly(Scheme::Plain, &[]);
    at_each_shell_beside(&python, start, |daemon, mut terminal| {
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
    let python = needs!("python3");
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let pid = directory.path().join("pid");
    let ran = directory.path().join("ran");
    let latch = format!("sh -c 'echo $$ > {}; exec latch run k -- ", pid.display());
    let mut terminal = Terminal::start(&python, &daemon, SHELLS[0]);
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
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
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
    let python = needs!("python3");
    at_each_shell(&python, |daemon, mut terminal| {
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
fn a_lock_that_is_lost_while_the_job_is_stopped_ends_it_at_fg() {
    let python = needs!("python3");
    let start = || Daemon::start_alone(&[]);
    at_each_shell_beside(&python, start, |daemon, mut terminal| {
        terminal.enter(&format!("latch run k -- {SAY}"));
        terminal.enter("one");
        terminal.expect("got:one");
        terminal.press(CTRL_Z);
        terminal.expect(PROMPT);
        daemon.signal(Signal::KILL);
        terminal.command("fg");
        terminal.expect("the lock was lost");
        terminal.expect(PROMPT);
        terminal.expect_status(70);
    });
}

#[test]
fn without_a_shell_ctrl_z_does_not_hang_the_terminal() {
    let python = needs!("python3");
    let daemon = Daemon::start(&[]);
    // As with `ssh -t host latch run ...`: no shell is there to continue it.
    let script = format!("printf '{PROMPT}'; exec {SAY}");
    let command = [program("latch"), "run", "k", "--", "sh", "-c", &script];
    let nested = [&[program("latch"), "run", "a", "--"], &command[..]].concat();
    for command in [&command[..], &nested] {
        let mut terminal = Terminal::start(&python, &daemon, command);
        terminal.enter("one");
        terminal.expect("got:one");
        terminal.press(CTRL_Z);
        terminal.expect("^Z"); // it discards what is typed at the same time
        terminal.enter("two");
        terminal.expect("got:two");
        terminal.press(CTRL_D);
        eventually(PATIENCE, "it ends", || {
            terminal.python.try_wait().expect("our child").is_some()
        });
        free(&daemon);
    }
}

#[test]
fn replies_of_a_server_cannot_move_the_cursor() {
    let python = needs!("python3");
    let daemon = Daemon::start(&[]);
    daemon.connect().acquire("free", 0);
    let mut holder = daemon.connect();
    holder.acquire("a\u{9b}2Jb", 0);
    let mut terminal = Terminal::start(&python, &daemon, SHELLS[0]);
    terminal.enter("latch stats --json");
    terminal.expect("a\\u009b2Jb");
    terminal.expect(PROMPT);
    terminal.enter("latch stats --json | cat");
    terminal.expect("a\\u009b2Jb");
}

#[test]
fn a_person_is_told_that_a_key_with_commas_is_one_key() {
    let python = needs!("python3");
    let daemon = Daemon::start(&[]);
    let note = "latch: a,b is one key; latch run takes others with --and";
    let mut terminal = Terminal::start(&python, &daemon, SHELLS[0]);
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
    let python = needs!("python3");
    let addr = free_addr();
    let start = || {
        let mut command = Daemon::command();
        command.args(["--print-port", "--port", &addr.port().to_string()]);
        Daemon::from_command(command)
    };
    let daemon = start();
    let mut terminal = Terminal::start(&python, &daemon, SHELLS[0]);
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
    let _daemon = start();
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
