//! `sema` with real processes and real files, as a shell sees it.

mod conversations;
mod mounts;
mod storm;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{symlink, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mounts::BUSY;
use rustix::fs::FlockOperation;
use rustix::pipe::pipe;
use rustix::process::{kill_process, Pid, Signal};
use support::latch::{fill, process_1, signal, state, text, wait_as_shell as wait};
use support::locks::flocked;
use support::needs::{has_inotify, needs, skipped, Program};
use support::{children_of, eventually, is_soon, no_input, program, rows_of, PATIENCE};

/// A number that no process has: it is above every process number.
const NO_PROCESS: &str = "99999999";

const TWO_HOURS: u64 = 7200;

/// A directory for lock files, and the program under both names beside it.
struct Place {
    directory: PathBuf,
    /// `None` if another place removes the directory.
    _own: Option<tempfile::TempDir>,
    bin: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        Place::within(&std::env::temp_dir())
    }

    /// In a new directory within another.
    fn within(directory: &Path) -> Place {
        let own = tempfile::tempdir_in(directory).expect("a directory");
        let place = Place::at(own.path());
        Place {
            _own: Some(own),
            ..place
        }
    }

    /// In a directory that is there.
    fn at(directory: &Path) -> Place {
        let bin = tempfile::tempdir().expect("a directory");
        for name in ["sema", "semats"] {
            symlink(program("sema"), bin.path().join(name)).expect("a link");
        }
        Place {
            directory: directory.to_owned(),
            _own: None,
            bin,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).expect("write");
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).expect("read")
    }

    /// Everything in the directory, with its content.
    fn content(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = fs::read_dir(&self.directory).expect("a directory");
        entries
            .map(|entry| entry.expect("an entry"))
            .map(|entry| {
                let content = fs::read(entry.path()).unwrap_or_default();
                (entry.file_name().to_string_lossy().into_owned(), content)
            })
            .collect()
    }

    fn names(&self) -> Vec<String> {
        self.content().into_keys().collect()
    }

    /// Completes a command, which runs here with its streams piped.
    fn here(&self, mut command: Command, arguments: &[&str]) -> Command {
        command
            .args(arguments)
            .current_dir(&self.directory)
            .stdin(no_input(arguments))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// The program by one of its names.
    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("sema"));
        command.arg0(name);
        self.here(command, arguments)
    }

    fn sema(&self, arguments: &[&str]) -> Output {
        finish(&mut self.command("sema", arguments))
    }

    fn status(&self, arguments: &[&str]) -> i32 {
        self.sema(arguments).status.code().expect("an exit status")
    }

    /// Runs a shell script that finds the programs by their names.
    fn script(&self, script: &str) -> Output {
        finish(&mut self.here(Command::new("sh"), &["-c", script]))
    }

    /// Starts `sema run f` with a script, and waits until the script runs.
    fn started(&self, options: &[&str], script: &str) -> (Child, Pid) {
        let script = format!("echo $$ > new; mv new started; {script}");
        let mut arguments = vec!["run", "f"];
        arguments.extend(options);
        arguments.extend(["--", "sh", "-c", &script]);
        let child = self
            .command("sema", &arguments)
            .spawn()
            .expect("sema starts");
        let mut pid = None;
        eventually(PATIENCE, "the command runs", || {
            let text = fs::read_to_string(self.path("started")).ok();
            pid = text.and_then(|text| text.trim().parse().ok());
            pid.is_some()
        });
        fs::remove_file(self.path("started")).expect("it was there");
        let pid = Pid::from_raw(pid.expect("just read")).expect("a process number");
        (child, pid)
    }

    /// Starts sema, and returns when it waits for a change of files.
    fn waiting(&self, arguments: &[&str]) -> Child {
        let mut child = self
            .command("sema", arguments)
            .spawn()
            .expect("sema starts");
        eventually(PATIENCE, "it waits", || {
            assert_eq!(child.try_wait().expect("a child"), None, "{arguments:?}");
            watches(child.id())
        });
        child
    }
}

/// Whether a process waits for a change of files, or sleeps until it looks again.
fn watches(process: impl std::fmt::Display) -> bool {
    if !has_inotify() {
        return sleeps(&process.to_string());
    }
    let links = fs::read_dir(format!("/proc/{process}/fd"));
    links
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|link| fs::read_link(link.path()).ok())
        .any(|target| target.to_string_lossy().contains("inotify"))
}

/// Whether all threads of a process sleep.
fn sleeps(process: &str) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task"));
    let mut threads = threads.into_iter().flatten().flatten().peekable();
    let is_there = threads.peek().is_some();
    let mut stats = threads.map(|thread| fs::read_to_string(thread.path().join("stat")));
    is_there && stats.all(|stat| stat.is_ok_and(|stat| stat.contains(") S ")))
}

/// Runs a command with the streams that the caller has chosen, in bounded time.
fn finish(command: &mut Command) -> Output {
    let mut child = command.spawn().expect("it starts");
    wait(&mut child);
    child.wait_with_output().expect("its output")
}

/// Whether a process has ended. A zombie has: another process must reap it.
fn is_gone(pid: Pid) -> bool {
    matches!(state(pid), None | Some('Z'))
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.expect("a clock").as_secs()
}

fn age(path: &Path, seconds: u64) {
    let then = SystemTime::now() - Duration::from_secs(seconds);
    let file = File::options().write(true).open(path).expect("a file");
    file.set_modified(then).expect("a time");
}

#[test]
fn bad_usage_gives_one_line_and_touches_nothing() {
    let place = Place::new();
    place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
    let before = place.content();
    for (words, reason) in rows_of(include_str!("bad_usage.txt")) {
        let arguments: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = place.sema(&arguments);
        let stderr = text(&output.stderr);
        let is_ours = arguments.iter().any(|word| ["run", "hold"].contains(word));
        let status = if is_ours { 64 } else { 2 };
        assert_eq!(
            output.status.code(),
            Some(status),
            "{arguments:?}: {stderr}"
        );
        let prefix = if status == 64 { "sema" } else { "Error" };
        let expected = format!("{prefix}: {reason}\n\nUsage: sema COMMAND PATH [OPTIONS]\n");
        assert!(stderr.starts_with(&expected), "{arguments:?}: {stderr}");
        assert!(stderr.lines().count() <= 5, "{arguments:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert_eq!(place.content(), before, "{arguments:?}");
    }
}

fn words(arguments: &str) -> Vec<&str> {
    arguments.split(' ').collect()
}

/// Checks what a command says of an error of its second word, a path.
fn assert_fails(output: &Output, arguments: &str, status: i32, reason: &str) {
    let words = words(arguments);
    let prefix = match words[0] {
        "run" | "hold" => "sema",
        _ => "Error: IO error",
    };
    let expected = format!("{prefix}: {}: {reason}\n", words[1]);
    assert_eq!(text(&output.stderr), expected, "{arguments}");
    assert_eq!(output.status.code(), Some(status), "{arguments}");
}

// ---------------------------------------------------------------------------------------------
// The contents of the files

/// The command line that runs `words` as process 1 of a new pid namespace. `None` if the system
/// allows none.
fn namespace(place: &Place, words: &[&str]) -> Option<Command> {
    Some(place.here(process_1(&[])?, words))
}

/// Runs a script as process 1 of a new pid namespace. `None` if the system allows none.
fn in_a_namespace(place: &Place, script: &str) -> Option<Output> {
    namespace(place, &["sh", "-c", script]).map(|mut command| finish(&mut command))
}

/// The kernel does not end process 1 by a signal that it does not catch.
#[test]
fn as_process_1_a_waiting_command_ends_by_a_signal() {
    let place = Place::new();
    let _holder = held(&place, &[]);
    for (name, command) in [("sema", "acquire"), ("sema", "wait"), ("semats", "acquire")] {
        for sent in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
            let program = place.bin.path().join(name);
            let words = [program.to_str().expect("text"), command, "f"];
            let Some(mut unshare) = namespace(&place, &words) else {
                return;
            };
            let mut unshare = unshare.spawn().expect("unshare");
            let number = unshare.id();
            let init = || children_of(number).first().copied();
            eventually(PATIENCE, "it ends by a signal that it catches", || {
                init().map(|init| kill_process(init, sent));
                unshare.try_wait().expect("a child").is_some()
            });
            assert_eq!(wait(&mut unshare), Some(128 + sent.as_raw()), "{words:?}");
        }
    }
}

/// The caller then does not know of the lock, and would not release it.
#[test]
fn a_lock_that_was_not_printed_ends_with_the_signal() {
    let place = Place::new();
    for (name, command) in [("sema", "acquire"), ("semats", "acquire")] {
        let (reader, writer) = pipe().expect("a pipe");
        fill(&reader);
        let mut command = place.command(name, &[command, "f"]);
        let mut child = command.stdout(writer).spawn().expect("it starts");
        eventually(PATIENCE, "it is taken", || place.path("f").exists());
        kill_process(Pid::from_child(&child), Signal::TERM).expect("it runs");
        assert_eq!(wait(&mut child), Some(143), "{name}");
        assert_eq!(place.names(), [""; 0], "{name}");
    }
}

/// The numbers of such a holder's namespace mean other processes elsewhere.
#[test]
fn a_holder_that_cannot_read_its_namespace_is_judged_by_age() {
    let place = Place::new();
    let script = "mount -t tmpfs none /proc; sema try f -q; sema release f; sema try f -q";
    let Some(output) = in_a_namespace(&place, script) else {
        return;
    };
    assert_eq!(text(&output.stdout), "Lock released: f\n", "{output:?}");
    let record = place.read("f");
    assert!(record.starts_with("pid=1\n"), "{record}");
    for (pid, age, is_released) in [(NO_PROCESS, 0, false), ("1", TWO_HOURS, true)] {
        let timestamp = format!("timestamp={:010}", now() - age);
        let mut lines: Vec<&str> = record.lines().skip(2).collect();
        let pid = format!("pid={pid}");
        lines.splice(0..0, [pid.as_str(), &timestamp]);
        place.write("f", &(lines.join("\n") + "\n"));
        let status = text(&place.sema(&["status", "f"]).stdout);
        assert!(status.contains("alive: unknown\n"), "{status}");
        let code = i32::from(!is_released);
        assert_eq!(place.status(&["release", "f", "-q"]), code, "{status}");
    }
}

/// Process 1 adopts orphans and starts the services of a host, which are in other sessions. It
/// counts as the caller only in its own.
#[test]
fn a_script_that_is_process_1_of_a_container_holds_its_lock() {
    let note = "Note: no process is known that f is held for; see --pid in sema(1)\n";
    for (script, said, complained) in [
        (
            "sema try f -q; sed -n 's/^pid=//p' f; sema status f | grep alive; \
             (set -m; sema acquire f -q -n); echo $?; sema release f",
            "1\nalive: yes\n1\nLock released: f\n",
            "",
        ),
        // Without the /proc of the namespace, that of the host is seen, with another process 1.
        (
            "sema acquire f -q --pid 1; umount -l /proc; sema status f | grep alive; \
             sed -i 's/^timestamp=.*/timestamp=0000000001/' f; \
             sh -c 'sema release f -q; echo $?; sema try f -q; echo $?'",
            "alive: yes\n1\n1\n",
            "",
        ),
        (
            "setsid sema try f; grep -c '^pid=1$' f; sema status f | grep alive; \
             sema release f -q; setsid sema try f -q",
            "Lock acquired: f\n0\nalive: no\n",
            note,
        ),
        // As process 1, the program has no caller in its namespace.
        ("exec sema acquire f", "Lock acquired: f\n", note),
    ] {
        let Some(output) = in_a_namespace(&Place::new(), script) else {
            return;
        };
        assert_eq!(text(&output.stdout), said, "{script}: {output:?}");
        assert_eq!(text(&output.stderr), complained, "{script}");
    }
}

#[test]
fn settle_always_waits_after_every_grant() {
    let place = Place::new();
    // The fastest of several: each of them can be slow for other reasons.
    let quickest = (0..10).map(|_| {
        let start = Instant::now();
        let options = ["--settle=always", "--no-sync", "-q"];
        let arguments = [&["try", "f"][..], &options].concat();
        assert_eq!(place.status(&arguments), 0);
        let took = start.elapsed();
        fs::remove_file(place.path("f")).expect("it is there");
        took
    });
    let quickest = quickest.min().expect("ten times");
    assert!(quickest >= Duration::from_millis(20), "{quickest:?}");
    for when in ["never", "takeover"] {
        place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
        assert_eq!(place.status(&["try", "f", "--settle", when]), 0, "{when}");
    }
}

// ---------------------------------------------------------------------------------------------
// Waiting

/// The script waits for its own lock in the background, as it does so that a trap of the shell can
/// run.
#[test]
fn a_waiter_gives_up_when_its_script_is_killed() {
    for program in ["sema", "semats"] {
        let place = Place::new();
        place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
        let script = format!("{program} acquire f & echo $! > new; mv new waiting; wait");
        let path = std::env::var("PATH").unwrap_or_default();
        let mut shell = Command::new("sh")
            .args(["-c", &script])
            .env("PATH", format!("{}:{path}", place.bin.path().display()))
            .current_dir(&place.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh");
        let mut waiter = None;
        eventually(PATIENCE, "it waits", || {
            let text = fs::read_to_string(place.path("waiting")).unwrap_or_default();
            waiter = text.trim().parse().ok().and_then(Pid::from_raw);
            waiter.is_some_and(|waiter| watches(waiter.as_raw_nonzero().get()))
        });
        let waiter = waiter.expect("just read");
        shell.kill().expect("it runs");
        shell.wait().expect("its status");
        // If it did not give up, it would take the lock below and end.
        let has_given_up = is_soon(PATIENCE, || is_gone(waiter));
        fs::remove_file(place.path("f")).expect("it is there");
        eventually(PATIENCE, "it ends", || is_gone(waiter));
        assert!(has_given_up, "{program}");
        assert_eq!(place.names(), ["waiting"], "{program}");
    }
}

/// Even root may not remove such a file.
#[test]
fn a_stale_lock_that_is_immutable_is_not_free() {
    let (_root, chattr) = (needs!(root), needs!("chattr"));
    let place = Place::new();
    place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
    let chattr = |flag: &str| {
        let mut command = chattr.command();
        command.args([flag, "f"]).current_dir(&place.directory);
        command.stderr(Stdio::null()).status().expect("chattr runs")
    };
    if !chattr("+i").success() {
        return skipped(&["file system with immutable files"]);
    }
    let statuses = [
        ("try f", 3, "stale, but "),
        ("acquire f", 74, "stale, but "),
        ("wait f", 74, "stale, but "),
        ("clean f", 3, ""),
        ("release f", 3, ""),
    ];
    let outputs = statuses.map(|row| (row, place.sema(&words(row.0))));
    let repeat = place.script("until sema try f; do sema wait f || exit; done");
    assert!(chattr("-i").success());
    for ((arguments, code, is_stale), output) in outputs {
        let why = format!("{is_stale}this user may not remove the file");
        assert_fails(&output, arguments, code, &why);
    }
    assert_eq!(repeat.status.code(), Some(74), "{repeat:?}");
}

#[test]
fn a_wait_for_a_lock_that_stays_held_does_not_spin() {
    let place = Place::new();
    // The record is stale, but a process has the file locked.
    place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
    let file = flocked(&place.path("f"), FlockOperation::LockShared);
    let began = Instant::now();
    let mut child = place.waiting(&["acquire", "f"]);
    thread::sleep(Duration::from_millis(1500));
    let switches = fs::read_to_string(format!("/proc/{}/status", child.id())).expect("it runs");
    let switches: u64 = switches
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
        .and_then(|count| count.trim().parse().ok())
        .expect("a number");
    let waited = began.elapsed();
    let most = 100.0 * waited.as_secs_f64();
    assert!(
        (switches as f64) < most,
        "it slept {switches} times in {waited:?}"
    );
    drop(file);
    assert_eq!(wait(&mut child), Some(0));
}

#[test]
fn a_flock_of_anybody_is_a_holder_for_every_command() {
    let place = Place::new();
    let zeros = "\0".repeat(100);
    let old = format!("pid={NO_PROCESS}\ntimestamp=1\n");
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("it has a name");
    let of_an_earlier_boot = format!("{old}x-boot=b\nx-host={host}");
    let older_guard = format!("{old}x-boot=b\nx-fcntl=read\nx-live=flock\n");
    let ours = dead_guard(&place);
    let young = format!("pid={NO_PROCESS}\ntimestamp={}\n", now());
    let operations = [FlockOperation::LockShared, FlockOperation::LockExclusive];
    for ((content, seconds, is_left), operation) in [
        ("", TWO_HOURS, false),
        ("", 0, true),
        (&zeros, TWO_HOURS, false),
        ("pid=47", TWO_HOURS, false),
        (&old, 0, false),
        (&young, 0, true),
        (&of_an_earlier_boot, 0, false),
        (&older_guard, 0, false),
        (&ours, 0, false),
    ]
    .into_iter()
    .flat_map(|row| operations.map(|operation| (row, operation)))
    {
        place.write("f", content);
        age(&place.path("f"), seconds);
        let why = format!("pid {} has the file locked\n", std::process::id());
        let job = flocked(&place.path("f"), operation);
        for (arguments, status) in [
            ("try f", 1),
            ("acquire f -w 0", 1),
            ("run f -n -- true", BUSY),
            ("hold f -n", BUSY),
            ("wait f -w 20ms", 1),
            ("release f", 1),
            ("status f", 1),
            ("clean f", 0),
        ] {
            let words = words(arguments);
            let (input, _open) = pipe().expect("descriptors are left");
            let output = finish(place.command("sema", &words).stdin(input));
            let what = format!("{arguments}: {content:?} {seconds} {output:?}");
            assert_eq!(output.status.code(), Some(status), "{what}");
            let said = text(&output.stdout) + &text(&output.stderr);
            assert!(!said.contains("stale: yes"), "{what}");
            assert!(said.contains(&why) || words[0] == "clean", "{what}");
            assert_eq!(place.read("f"), content, "{what}");
        }
        assert_eq!(place.status(&["clean", "f", "--force"]), 0);
        assert_eq!(place.path("f").exists(), is_left, "{content:?}");
        drop(job);
    }
}

/// A record that a killed `sema run` has left.
fn dead_guard(place: &Place) -> String {
    let (mut child, command) = place.started(&["--token", "t"], "exec sleep 60");
    signal(&child, Signal::KILL);
    wait(&mut child);
    kill_process(command, Signal::KILL).expect("it runs");
    place.read("f")
}

// ---------------------------------------------------------------------------------------------
// A command under a lock

/// The kernel takes 5 to 20 ms to end a watch, longer than such a command runs. So the watch begins
/// only after 50 ms: on a busy machine, a short command may take longer, too.
#[test]
fn a_short_command_sets_up_no_inotify_watch() {
    let strace = needs!("strace");
    let place = Place::new();
    let watched_after = |command: &str| {
        let output = finish(
            strace
                .command()
                .args(["-f", "--seccomp-bpf", "-qq", "-ttt", "-e"])
                .arg("trace=execve,inotify_init1")
                .args(["-e", "signal=none"])
                .arg(program("sema"))
                .args(["run", "f", "--no-sync", "--", "sh", "-c", command])
                .current_dir(&place.directory)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
        );
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let said = text(&output.stderr);
        let time_of = |call: &str| {
            let line = said.lines().find(|line| line.contains(call))?;
            let mut words = line.split_whitespace();
            words.find_map(|word| word.split_once('.').and(word.parse::<f64>().ok()))
        };
        let started = time_of("execve(").expect("it was started");
        time_of("inotify_init1(").map(|watched| watched - started)
    };
    for _ in 0..20 {
        let after = watched_after(":");
        assert!(after.is_none_or(|after| after >= 0.05), "{after:?} s");
    }
    assert!(watched_after("sleep 1").is_some());
}

/// Starts `sema hold f` and waits for its line. Returns it with its input and its line.
fn held(place: &Place, options: &[&str]) -> (Child, ChildStdin, String) {
    let mut command = place.command("sema", &["hold", "f"]);
    let mut hold = command
        .args(options)
        .stdin(Stdio::piped())
        .spawn()
        .expect("sema starts");
    let mut line = String::new();
    BufReader::new(hold.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("text");
    let stdin = hold.stdin.take().expect("piped");
    (hold, stdin, line)
}

#[test]
fn a_wait_on_a_terminal_shows_one_line_until_the_grant() {
    let python3 = needs!("python3");
    let place = Place::new();
    place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
    // The lock is released when the line has been shown.
    let python = "import os, pty, sys\n\
                  def read(fd):\n\
                  \x20   data = os.read(fd, 1024)\n\
                  \x20   if b'waiting for' in data: os.remove('f')\n\
                  \x20   return data\n\
                  pty.spawn(sys.argv[1:], read)";
    let mut command = python3.command();
    command
        .args(["-c", python, program("sema")])
        .args(["run", "f", "--", "echo", "done"])
        .current_dir(&place.directory)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let screen = text(&finish(&mut command).stdout);
    let line = "\r\u{1b}[Ksema: waiting for f: held by pid 1 for ";
    assert!(screen.contains(line), "{screen:?}");
    assert!(screen.ends_with(" s\r\u{1b}[Kdone\r\n"), "{screen:?}");
}

#[test]
fn a_signal_ends_a_wait_and_leaves_nothing_behind() {
    for sent in [Signal::INT, Signal::TERM, Signal::QUIT, Signal::HUP] {
        let place = Place::new();
        place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
        for arguments in [&["run", "f", "--", "touch", "ran"][..], &["acquire", "f"]] {
            let mut child = place.waiting(arguments);
            signal(&child, sent);
            wait(&mut child);
            let status = child.wait().expect("it has ended");
            assert_eq!(status.signal(), Some(sent.as_raw()), "{arguments:?}");
        }
        assert_eq!(place.names(), ["f"]);
    }
}

#[test]
fn a_lock_granted_at_the_moment_of_a_signal_is_released() {
    let place = Place::new();
    for round in 0..40 {
        place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
        let mut child = place.waiting(&["run", "f", "--no-sync", "--", "sleep", "60"]);
        fs::remove_file(place.path("f")).expect("it is there");
        thread::sleep(Duration::from_micros(100 * round));
        signal(&child, Signal::TERM);
        assert_eq!(wait(&mut child), Some(143));
        assert_eq!(place.names(), [""; 0]);
    }
}

// ---------------------------------------------------------------------------------------------
// Other programs

#[test]
fn the_script_in_the_manual_takes_the_lock_once() {
    let page = include_str!("../../man/sema-lockfile.5");
    let (_, examples) = page.split_once(".Sh EXAMPLES\n").expect("a section");
    let (_, script) = examples
        .split_once(".Bd -literal -offset indent\n")
        .expect("a script");
    let (script, _) = script.split_once(".Ed\n").expect("its end");
    let script = script.replace("\\e", "\\");
    let place = Place::new();
    let output = place.script(&format!(
        "{script}\nsema status job.lock | grep -e pid -e alive\n({script})"
    ));
    let said = text(&output.stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 4, "{output:?}");
    assert_eq!(lines[0], "the lock is ours");
    assert!(lines[1].starts_with("pid: "), "{said}");
    assert_eq!(lines[2..], ["alive: yes", "the lock is held"]);
    assert_eq!(text(&place.script("ls").stdout), "", "it has cleared up");
}

/// The script that runs itself under a lock, from the manual page.
#[test]
fn the_whole_script_in_the_manual_runs_under_its_lock() {
    let page = include_str!("../../man/sema.1");
    let start = page.find("#!/bin/sh\n").expect("a script");
    let (script, _) = page[start..].split_once(".Ed\n").expect("its end");
    assert!(script.contains("SEMA_PATH"), "{script}");
    let place = Place::new();
    let script = script.replace("/run/lock/nightly.lock", "nightly.lock");
    place.write(
        "job",
        &format!("{script}sema status nightly.lock | grep alive\necho \"$@\"\n"),
    );
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(place.path("job"), mode).expect("it is ours");
    // Called under another lock, it still takes its own.
    let output = place.script("./job a 'b c'; sema run other -- ./job d");
    assert_eq!(
        text(&output.stdout),
        "alive: yes\na b c\nalive: yes\nd\n",
        "{output:?}"
    );
    assert_eq!(place.names(), ["job"]);
}
