//! `sema` with real processes and real files, as a shell sees it.

mod mounts;
mod storm;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mounts::BUSY;
use rustix::pipe::pipe;
use rustix::process::{kill_process, Pid, Signal};
use support::latch::{
    fed, fill, process_1, shell_status, signal, state, text, wait_as_shell as wait,
};
use support::limited::copy_program;
use support::locks::locked_in_every_way;
use support::needs::{has_inotify, needs};
use support::{children_of, eventually, is_soon, program, stat_of, wait_for_exit, PATIENCE};

/// A number that no process has: it is above every process number.
const NO_PROCESS: &str = "99999999";

const TWO_HOURS: u64 = 7200;

/// A directory for lock files, and the program in it.
struct Place {
    directory: Directory,
    bin: tempfile::TempDir,
}

/// A directory of this place, or one that another place removes.
enum Directory {
    Own(tempfile::TempDir),
    Of(PathBuf),
}

impl Directory {
    fn path(&self) -> &Path {
        match self {
            Directory::Own(directory) => directory.path(),
            Directory::Of(path) => path,
        }
    }
}

impl Place {
    fn new() -> Place {
        Place::with(Directory::Own(tempfile::tempdir().expect("a directory")))
    }

    /// In a new directory within another.
    fn within(directory: &Path) -> Place {
        let directory = tempfile::tempdir_in(directory).expect("a directory");
        Place::with(Directory::Own(directory))
    }

    /// In a directory that is there.
    fn at(directory: &Path) -> Place {
        Place::with(Directory::Of(directory.to_owned()))
    }

    fn with(directory: Directory) -> Place {
        let place = Place {
            directory,
            bin: tempfile::tempdir().expect("a directory"),
        };
        for name in ["sema", "file-semaphore", "semats", "file-semaphore-ts"] {
            let link = place.bin.path().join(name);
            symlink(program("sema"), link).expect("a link");
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).expect("write");
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).expect("read")
    }

    /// Everything in the directory, with its content.
    fn content(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = fs::read_dir(self.directory.path()).expect("a directory");
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

    /// A program by one of its names.
    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("sema"));
        command
            .arg0(name)
            .args(arguments)
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn sema(&self, arguments: &[&str]) -> Output {
        finish(&mut self.command("sema", arguments))
    }

    fn status(&self, arguments: &[&str]) -> i32 {
        self.sema(arguments).status.code().expect("an exit status")
    }

    /// The same, as a user who is not root and owns nothing here.
    fn as_nobody(&self, name: &str, arguments: &[&str]) -> Output {
        let bin = self.bin.path().join("for-all");
        if !bin.exists() {
            fs::create_dir(&bin).expect("a directory");
            copy_program(program("sema"), &bin.join("sema"));
            symlink("sema", bin.join("semats")).expect("a link");
            for directory in [self.bin.path(), &bin] {
                let mode = fs::Permissions::from_mode(0o755);
                fs::set_permissions(directory, mode).expect("it is ours");
            }
        }
        let mut command = if rustix::process::geteuid().is_root() {
            Command::new("setpriv")
        } else {
            Command::new("env")
        };
        if rustix::process::geteuid().is_root() {
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        }
        command
            .arg(bin.join(name))
            .args(arguments)
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish(&mut command)
    }

    /// Runs a shell script that finds the programs by their names.
    fn script(&self, script: &str) -> Output {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .env("PATH", format!("{}:{path}", self.bin.path().display()))
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish(&mut command)
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
        self.waiting_as("sema", arguments)
    }

    fn waiting_as(&self, program: &str, arguments: &[&str]) -> Child {
        let mut child = self
            .command(program, arguments)
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

/// The start of a process, in clock ticks. Without it, another program would not take the holder of
/// an old lock for alive if that holder started just now.
fn start_of(pid: u32) -> String {
    let fields = stat_of(pid).expect("it runs");
    fields[19].clone()
}

fn age(path: &Path, seconds: u64) {
    let then = SystemTime::now() - Duration::from_secs(seconds);
    let file = File::options().write(true).open(path).expect("a file");
    file.set_modified(then).expect("a time");
}

// ---------------------------------------------------------------------------------------------
// Tables

/// One run of a program over one lock file.
struct Row {
    /// The contents of `f` before the run. `None` for no file.
    file: Option<&'static str>,
    arguments: &'static str,
    code: i32,
    stdout: &'static str,
    stderr: &'static str,
    /// Whether `f` exists afterwards.
    is_left: bool,
}

const fn row(
    file: Option<&'static str>,
    arguments: &'static str,
    code: i32,
    stdout: &'static str,
    stderr: &'static str,
    is_left: bool,
) -> Row {
    Row {
        file,
        arguments,
        code,
        stdout,
        stderr,
        is_left,
    }
}

/// Locks of this process, of process 1 and of no process, young and old, and files that are no
/// locks.
const MINE: Option<&str> = Some("pid={me}\ntimestamp={now}\ntag=build 7\n");
const ANOTHERS: Option<&str> = Some("pid=1\ntimestamp={now}\n");
const DEAD: Option<&str> = Some("pid=99999999\ntimestamp={now}\n");
const STALE: Option<&str> = Some("pid=99999999\ntimestamp={old}\ntag=gone\n");
const OLD_AND_ALIVE: Option<&str> = Some("pid=1\ntimestamp={old}\nx-start={start}\n");
const EMPTY: Option<&str> = Some("");
const NOTHING: Option<&str> = None;

fn play(program: &str, rows: &[Row]) {
    for row in rows {
        let place = Place::new();
        let (now, old) = (now(), now() - TWO_HOURS);
        let filled = |text: &str| {
            text.replace("{me}", &std::process::id().to_string())
                .replace("{now}", &now.to_string())
                .replace("{old}", &old.to_string())
                .replace("{start}", &start_of(1))
        };
        if let Some(file) = row.file {
            place.write("f", &filled(file));
        }
        let arguments: Vec<String> = row.arguments.split(' ').map(filled).collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = finish(&mut place.command(program, &arguments));
        let what = format!("{program} {} with {:?}", row.arguments, row.file);
        let said = (text(&output.stdout), text(&output.stderr));
        let (stdout, stderr) = (timeless(&said.0, now), timeless(&said.1, now));
        assert_eq!(stdout, timeless(&filled(row.stdout), now), "{what}: stdout");
        assert_eq!(stderr, timeless(&filled(row.stderr), now), "{what}: stderr");
        assert_eq!(output.status.code(), Some(row.code), "{what}");
        assert_eq!(place.path("f").exists(), row.is_left, "{what}: f");
        let rest: Vec<String> = place
            .names()
            .into_iter()
            .filter(|name| name != "f")
            .collect();
        assert_eq!(rest, [""; 0], "{what}");
    }
}

/// The text without ages and times of grants, which depend on when a second begins.
fn timeless(text: &str, now: u64) -> String {
    let mut text = text.to_owned();
    for later in 0..20 {
        text = text.replace(&(now + later).to_string(), "NOW");
    }
    for key in ["age: ", "Age: ", "\"age\":"] {
        let mut parts = text.split(key);
        let mut without = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let rest = part.trim_start_matches(|c: char| c.is_ascii_digit());
            without.push_str(&format!("{key}N{rest}"));
        }
        text = without;
    }
    text
}

const HELD_BY_ME: &str =
    "Lock already held\n  Holder PID: {me}\n  Path: f\n  Tag: build 7\n  Age: 0s\n";
const TIMEOUT_BY_ME: &str =
    "Timeout waiting for lock\n  Holder PID: {me}\n  Path: f\n  Tag: build 7\n  Age: 0s\n";
const ACQUIRED_JSON: &str = "{\"acquired\":true,\"path\":\"f\",\"pid\":{me},\"since\":{now}}\n";
const HELD_JSON: &str = "{\"locked\":true,\"pid\":{me},\"since\":{now}}\n";

/// The note about a file that names neither a process nor a time.
macro_rules! names_no_holder {
    () => {
        "the file names no holder, like one that flock(1) leaves; remove it if no program uses it"
    };
}

#[test]
fn try_and_acquire_print_what_their_users_rely_on() {
    play(
        "sema",
        &[
            row(NOTHING, "try f", 0, "Lock acquired: f\n", "", true),
            row(NOTHING, "try f --json", 0, ACQUIRED_JSON, "", true),
            row(NOTHING, "acquire f -q --json", 0, ACQUIRED_JSON, "", true),
            row(NOTHING, "try f -q", 0, "", "", true),
            row(MINE, "try f -q --timeout 1h", 1, "", "", true),
            row(NOTHING, "--quiet try --tag=x f", 0, "", "", true),
            row(MINE, "try f", 1, "", HELD_BY_ME, true),
            row(MINE, "try f -q", 1, "", "", true),
            row(MINE, "try f --json", 1, HELD_JSON, "", true),
            row(MINE, "try -q --json f", 1, HELD_JSON, "", true),
            row(
                EMPTY,
                "try f",
                1,
                "",
                concat!(
                    "Lock already held\n  Path: f\n  Note: ",
                    names_no_holder!(),
                    "\n"
                ),
                true,
            ),
            row(
                EMPTY,
                "try f --json",
                1,
                "{\"locked\":true,\"pid\":0,\"since\":0,\"error\":\"contents unreadable\"}\n",
                "",
                true,
            ),
            row(NOTHING, "acquire f", 0, "Lock acquired: f\n", "", true),
            row(
                NOTHING,
                "acquire f --timeout 0",
                0,
                "Lock acquired: f\n",
                "",
                true,
            ),
            row(MINE, "acquire f --timeout 0", 1, "", TIMEOUT_BY_ME, true),
            row(MINE, "acquire f --timeout=20ms", 1, "", TIMEOUT_BY_ME, true),
            row(MINE, "acquire f --timeout 0.02 -q", 1, "", "", true),
            row(
                MINE,
                "acquire f --timeout 0 --json",
                1,
                HELD_JSON,
                TIMEOUT_BY_ME,
                true,
            ),
        ],
    );
}

#[test]
fn a_lock_is_stale_by_age_unless_its_holder_is_provably_alive() {
    const GRANTED: &str = "Lock acquired: f\n";
    const HELD: &str = "Lock already held\n  Holder PID: 1\n  Path: f\n  Age: 0s\n";
    const DEAD_HELD: &str = "Lock already held\n  Holder PID: 99999999\n  Path: f\n  Age: 0s\n";
    const STALE_HELD: &str =
        "Lock already held\n  Holder PID: 99999999\n  Path: f\n  Tag: gone\n  Age: 0s\n";
    play(
        "sema",
        &[
            row(STALE, "try f", 0, GRANTED, "", true),
            row(STALE, "acquire f", 0, GRANTED, "", true),
            row(STALE, "try f --stale 3h", 1, "", STALE_HELD, true),
            row(STALE, "try f --stale 0", 1, "", STALE_HELD, true),
            row(STALE, "try f --stale=90m", 0, GRANTED, "", true),
            row(DEAD, "try f", 1, "", DEAD_HELD, true),
            row(OLD_AND_ALIVE, "try f", 1, "", HELD, true),
            row(
                OLD_AND_ALIVE,
                "try f --stale-rule age-and-liveness",
                1,
                "",
                HELD,
                true,
            ),
            row(
                OLD_AND_ALIVE,
                "try f --stale-rule age",
                0,
                GRANTED,
                "",
                true,
            ),
            row(ANOTHERS, "try f --stale-rule age", 1, "", HELD, true),
        ],
    );
}

#[test]
fn release_refuses_a_lock_that_may_have_a_live_holder() {
    const RELEASED: &str = "Lock released: f\n";
    const REFUSED: &str = "Lock held by different process\n  Holder PID: 1\n  Path: f\n  Age: 0s\n";
    const UNREADABLE: &str = concat!(
        "Lock not released\n  Path: f\n  Note: ",
        names_no_holder!(),
        "\n"
    );
    const TOKEN: Option<&str> = Some("pid=1\ntimestamp={now}\nx-token=abc\n");
    // A lock of another host, whose holder has the same number as the process that asks.
    const REMOTE: Option<&str> =
        Some("pid={me}\ntimestamp={now}\nx-host=elsewhere\nx-boot=b\nx-token=abc\n");
    const REMOTE_STALE: Option<&str> =
        Some("pid={me}\ntimestamp={old}\nx-host=elsewhere\nx-boot=b\n");
    const REMOTE_REFUSED: &str =
        "Lock held by different process\n  Holder PID: {me}\n  Path: f\n  \
                                  Age: 0s\n  Note: it cannot be told from here whether the \
                                  holder is alive\n";
    const RELEASED_JSON: &str = "{\"released\":true,\"path\":\"f\"}\n";
    const NONE_JSON: &str = "{\"released\":false,\"path\":\"f\"}\n";
    play(
        "sema",
        &[
            row(NOTHING, "release f", 0, RELEASED, "", false),
            row(NOTHING, "release f -q", 0, "", "", false),
            row(MINE, "release f --timeout 10", 0, RELEASED, "", false),
            row(MINE, "release f", 0, RELEASED, "", false),
            row(DEAD, "release f", 0, RELEASED, "", false),
            row(STALE, "release f", 0, RELEASED, "", false),
            row(ANOTHERS, "release f", 1, "", REFUSED, true),
            row(ANOTHERS, "release f -q", 1, "", "", true),
            row(
                ANOTHERS,
                "release f --json",
                1,
                "{\"locked\":true,\"pid\":1,\"since\":{now}}\n",
                "",
                true,
            ),
            row(ANOTHERS, "release f --force", 0, RELEASED, "", false),
            row(ANOTHERS, "release f --pid 1", 0, RELEASED, "", false),
            row(ANOTHERS, "release f --pid 2", 1, "", REFUSED, true),
            row(DEAD, "release --pid={me} f -q", 1, "", "", true),
            row(MINE, "release f --json", 0, RELEASED_JSON, "", false),
            row(NOTHING, "release f --json -q", 0, NONE_JSON, "", false),
            row(REMOTE, "release f", 1, "", REMOTE_REFUSED, true),
            row(REMOTE, "release f --stale 0 -q", 1, "", "", true),
            row(REMOTE, "release f --force", 0, RELEASED, "", false),
            row(REMOTE, "release f --token abc", 0, RELEASED, "", false),
            row(REMOTE_STALE, "release f", 0, RELEASED, "", false),
            row(TOKEN, "release f --token abc", 0, RELEASED, "", false),
            row(TOKEN, "release f --token abd", 1, "", REFUSED, true),
            row(MINE, "release f --token abc -q", 1, "", "", true),
            row(EMPTY, "release f", 1, "", UNREADABLE, true),
            row(EMPTY, "release f --force", 0, RELEASED, "", false),
        ],
    );
}

#[test]
fn status_shows_a_line_for_each_known_value() {
    const FREE: &str = "locked: false\n";
    const MINE_TEXT: &str = "locked: true\npid: {me}\ntimestamp: {now}\ntag: build 7\nage: 0s\n\
                             alive: yes\nstale: no\n";
    play(
        "sema",
        &[
            row(NOTHING, "status f", 0, FREE, "", false),
            row(
                NOTHING,
                "status f --json",
                0,
                "{\"locked\":false}\n",
                "",
                false,
            ),
            row(MINE, "status f", 1, MINE_TEXT, "", true),
            row(MINE, "status f -q", 1, MINE_TEXT, "", true),
            row(
                MINE,
                "status f --json",
                1,
                "{\"locked\":true,\"pid\":{me},\"timestamp\":{now},\"tag\":\"build 7\",\"age\":0,\
                 \"alive\":\"yes\",\"stale\":false,\"token\":null}\n",
                "",
                true,
            ),
            row(
                STALE,
                "status f",
                1,
                "locked: true\npid: 99999999\ntimestamp: {old}\ntag: gone\nage: 0s\n\
                 alive: no\nstale: yes\n",
                "",
                true,
            ),
            row(
                Some("pid=99999999\ntimestamp={old}\nx-token=k\nx-host=elsewhere\nx-boot=b\n"),
                "status f --json --stale 0",
                1,
                "{\"locked\":true,\"pid\":99999999,\"timestamp\":{old},\"tag\":null,\"age\":0,\
                 \"alive\":\"unknown\",\"stale\":false,\"token\":\"k\"}\n",
                "",
                true,
            ),
            row(
                Some("pid=7\ntimest"),
                "status f",
                1,
                "locked: true\nerror: contents unreadable\npid: 7\nalive: unknown\nstale: no\n",
                "",
                true,
            ),
            row(
                EMPTY,
                "status f --json",
                1,
                "{\"locked\":true,\"error\":\"contents unreadable\",\"pid\":null,\
                 \"timestamp\":null,\
                 \"tag\":null,\"age\":null,\"alive\":\"unknown\",\"stale\":false,\"token\":null}\n",
                "",
                true,
            ),
        ],
    );
}

#[test]
fn wait_and_clean_see_staleness() {
    const FREE: &str = "Lock is free: f\n";
    const TIMEOUT: &str =
        "Timeout waiting for lock to be released\n  Holder PID: {me}\n  Path: f\n  \
                           Tag: build 7\n  Age: 0s\n";
    play(
        "sema",
        &[
            row(NOTHING, "wait f", 0, FREE, "", false),
            row(NOTHING, "wait f -q", 0, "", "", false),
            row(
                NOTHING,
                "wait f --json",
                0,
                "{\"free\":true,\"path\":\"f\"}\n",
                "",
                false,
            ),
            row(STALE, "wait f", 0, FREE, "", true),
            row(MINE, "wait f --timeout 20ms", 1, "", TIMEOUT, true),
            row(MINE, "wait f --timeout 0 -q", 1, "", "", true),
            row(MINE, "wait f --timeout 0 --json -q", 1, HELD_JSON, "", true),
            row(STALE, "clean f", 0, "Stale lock removed: f\n", "", false),
            row(STALE, "clean f -q", 0, "", "", false),
            row(
                STALE,
                "clean f --json",
                0,
                "{\"cleaned\":true,\"temporaries\":0}\n",
                "",
                false,
            ),
            row(
                STALE,
                "clean f --stale 0",
                0,
                "Nothing to clean: f\n",
                "",
                true,
            ),
            row(
                MINE,
                "clean f --force",
                0,
                "Nothing to clean: f\n",
                "",
                true,
            ),
            row(
                OLD_AND_ALIVE,
                "clean f --json",
                0,
                "{\"cleaned\":false,\"temporaries\":0}\n",
                "",
                true,
            ),
            row(EMPTY, "clean f", 0, "Nothing to clean: f\n", "", true),
            row(NOTHING, "clean f", 0, "Nothing to clean: f\n", "", false),
        ],
    );
}

#[test]
fn as_semats_it_prints_the_texts_of_semats() {
    const FAILED: &str = "status: failed\ntype: ALREADY_LOCKED\nmessage: Lock already held\n\
                          holderPid: {me}\nlockedSince: {now}\n";
    const TIMEOUT: &str =
        "status: failed\ntype: TIMEOUT\nmessage: Timeout waiting for lock after 20ms\n";
    const DENIED: &str = "status: failed\ntype: PERMISSION_DENIED\n\
                          message: Lock held by different process (PID 1)\nholderPid: 1\n";
    const NOT_LOCKED: &str = "status: failed\ntype: NOT_LOCKED\nmessage: Lock not held\n";
    const ACQUIRED: &str = "status: acquired\npid: {me}\ntimestamp: {now}\ntag: undefined\n";
    const FREE: &str =
        "locked: false\ninfo: null\nisStale: false\nisOwnedByCurrentProcess: false\n";
    let rows = [
        row(NOTHING, "try-acquire f", 0, ACQUIRED, "", true),
        row(NOTHING, "acquire f --nonsense -x", 0, ACQUIRED, "", true),
        row(
            NOTHING,
            "-t x acquire --timeout abc f and more",
            0,
            "status: acquired\npid: {me}\ntimestamp: {now}\ntag: x\n",
            "",
            true,
        ),
        row(NOTHING, "try-acquire f --tag", 0, ACQUIRED, "", true),
        row(
            NOTHING,
            "try-acquire f -j --tag=x",
            0,
            "{\n  \"status\": \"acquired\",\n  \"pid\": {me},\n  \"timestamp\": {now},\n  \
             \"tag\": \"x\"\n}\n",
            "",
            true,
        ),
        row(
            NOTHING,
            "-j acquire f",
            0,
            "{\n  \"status\": \"acquired\",\n  \"pid\": {me},\n  \"timestamp\": {now}\n}\n",
            "",
            true,
        ),
        row(MINE, "try-acquire f", 1, FAILED, "", true),
        row(
            EMPTY,
            "try-acquire f",
            1,
            "status: failed\ntype: ALREADY_LOCKED\nmessage: Lock already held\n\
             holderPid: undefined\n\
             lockedSince: undefined\n",
            "",
            true,
        ),
        row(
            EMPTY,
            "try-acquire f --json",
            1,
            "{\n  \"status\": \"failed\",\n  \"type\": \"ALREADY_LOCKED\",\n  \
             \"message\": \"Lock already held\"\n}\n",
            "",
            true,
        ),
        row(STALE, "try-acquire f", 0, ACQUIRED, "", true),
        row(
            OLD_AND_ALIVE,
            "try-acquire f",
            1,
            "status: failed\ntype: ALREADY_LOCKED\nmessage: Lock already held\nholderPid: 1\n\
             lockedSince: {old}\n",
            "",
            true,
        ),
        row(MINE, "acquire f --timeout 20", 1, "", TIMEOUT, true),
        row(
            MINE,
            "acquire f --timeout 20 -v",
            1,
            "",
            "[INFO] Acquiring lock: f\nstatus: failed\ntype: TIMEOUT\n\
             message: Timeout waiting for lock after 20ms\n",
            true,
        ),
        row(
            NOTHING,
            "try-acquire -v f",
            0,
            ACQUIRED,
            "[INFO] Trying to acquire lock: f\n",
            true,
        ),
        row(MINE, "release f", 0, "status: released\n", "", false),
        row(
            MINE,
            "release --verbose f -j",
            0,
            "{\n  \"status\": \"released\"\n}\n",
            "[INFO] Releasing lock: f\n",
            false,
        ),
        row(ANOTHERS, "release f", 1, "", DENIED, true),
        row(
            Some("pid={me}\ntimestamp={now}\nx-host=elsewhere\nx-boot=b\n"),
            "release f",
            1,
            "",
            "status: failed\ntype: PERMISSION_DENIED\n\
             message: Lock held by different process (PID {me})\nholderPid: {me}\n",
            true,
        ),
        row(ANOTHERS, "release f -f", 0, "status: released\n", "", false),
        row(NOTHING, "release f", 1, "", NOT_LOCKED, false),
        row(NOTHING, "release f --force", 1, "", NOT_LOCKED, false),
        row(
            EMPTY,
            "release f",
            1,
            "",
            "status: failed\ntype: PERMISSION_DENIED\n\
             message: Lock held by different process (PID undefined)\nholderPid: undefined\n",
            true,
        ),
        row(NOTHING, "status f", 0, FREE, "", false),
        row(
            MINE,
            "status f",
            0,
            "locked: true\ninfo: {\"pid\":{me},\"timestamp\":{now},\"tag\":\"build 7\"}\n\
             isStale: false\n\
             isOwnedByCurrentProcess: true\n",
            "",
            true,
        ),
        row(
            OLD_AND_ALIVE,
            "status f",
            0,
            "locked: true\ninfo: {\"pid\":1,\"timestamp\":{old}}\nisStale: true\n\
             isOwnedByCurrentProcess: false\n",
            "",
            true,
        ),
        row(
            EMPTY,
            "status f",
            0,
            "locked: true\ninfo: null\nisStale: false\nisOwnedByCurrentProcess: false\n",
            "",
            true,
        ),
        row(
            ANOTHERS,
            "status f -j",
            0,
            "{\n  \"locked\": true,\n  \"info\": {\n    \"pid\": 1,\n    \
             \"timestamp\": {now}\n  },\n  \
             \"isStale\": false,\n  \"isOwnedByCurrentProcess\": false\n}\n",
            "",
            true,
        ),
        row(STALE, "clean f", 0, "cleaned: true\n", "", false),
        row(
            MINE,
            "clean f -v",
            0,
            "cleaned: false\n",
            "[INFO] Cleaning stale locks: f\n",
            true,
        ),
        row(
            EMPTY,
            "clean f --json",
            0,
            "{\n  \"cleaned\": false\n}\n",
            "",
            true,
        ),
        row(
            NOTHING,
            "release",
            1,
            "",
            "Error: Lock path is required\n",
            false,
        ),
        row(
            NOTHING,
            "acquire nowhere/f",
            1,
            "",
            "Error: Parent directory does not exist: nowhere\n",
            false,
        ),
    ];
    play("semats", &rows);
    play("/usr/bin/file-semaphore-ts", &rows[..3]);

    let place = Place::new();
    let usage = "Usage: semats COMMAND PATH [OPTIONS]\n";
    for (arguments, code, stdout, stderr) in [
        (&[][..], 1, usage, ""),
        (&["-h"], 0, usage, ""),
        (&["acquire", "f", "--help"], 0, usage, ""),
        (&["lock", "f"], 1, "", "Unknown command: lock\n"),
        (&["acquire", " "], 1, "", "Error: Path cannot be empty\n"),
        (
            &["acquire", "a/../f"],
            1,
            "",
            "Error: It contains `..`: a/../f\n",
        ),
    ] {
        let output = finish(&mut place.command("semats", arguments));
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        let starts = |text: &[u8], start: &str| {
            self::text(text).starts_with(start) && text.is_empty() == start.is_empty()
        };
        assert!(starts(&output.stdout, stdout), "{arguments:?}: {output:?}");
        assert!(starts(&output.stderr, stderr), "{arguments:?}: {output:?}");
    }
    assert_eq!(place.names(), [""; 0]);
}

#[test]
fn bad_usage_gives_one_line_and_touches_nothing() {
    let place = Place::new();
    place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
    let before = place.content();
    for (arguments, reason) in [
        (&[][..], "missing command"),
        (&["--json"], "missing command"),
        (&["try"], "missing lock path"),
        (
            &["lock", "g"],
            "unknown command: lock; use sema run, hold or acquire",
        ),
        (&["TRY", "g"], "unknown command: TRY; did you mean try?"),
        (
            &["lock", "--help"],
            "unknown command: lock; use sema run, hold or acquire",
        ),
        (&["tyr", "g"], "unknown command: tyr; did you mean try?"),
        (
            &["/tmp/g", "sleep", "5"],
            "unknown command: /tmp/g; write sema run /tmp/g -- sleep 5",
        ),
        (
            &["-n", "/tmp/g", "sleep", "5"],
            "unknown command: /tmp/g; write sema run /tmp/g -- sleep 5",
        ),
        (
            &["g", "-w", "5", "--", "sleep", "5"],
            "unknown command: g; write sema run g [OPTIONS] -- COMMAND",
        ),
        (
            &["acquire", "g", "-j4"],
            "unknown option: -j4; use --of COUNT for so many at a time, or --json",
        ),
        (
            &["try", "g", "--slot=2"],
            "unknown option: --slot; did you mean --slots?",
        ),
        (&["try", "g", "--bogus"], "unknown option: --bogus"),
        (&["try", "g", "--bogus=1"], "unknown option: --bogus"),
        (
            &["try", "g", "-x"],
            "unknown option: -x; a lock file has one holder; leave the option out",
        ),
        (
            &["run", "g", "--nb", "--", "true"],
            "unknown option: --nb; use --nonblock",
        ),
        (
            &["run", "--lockfile", "g", "--", "true"],
            "unknown option: --lockfile; write the path right after the command; \
             --tag TEXT describes its holder",
        ),
        (
            &["run", "g", "-nE256", "--", "true"],
            "invalid value '256' for --busy-status: expected 0-255",
        ),
        (
            &["try", "g", "--ta\u{1b}g"],
            "unknown option: --ta\\x1bg; did you mean --tag?",
        ),
        (&["acquire", "g", "--timeout"], "--timeout requires a value"),
        (&["try", "g", "--stale"], "--stale requires a value"),
        (&["try", "g", "--tag"], "--tag requires a value"),
        (
            &["acquire", "g", "--timeout", "abc"],
            "invalid timeout value",
        ),
        (
            &["acquire", "g", "--timeout", "-1"],
            "invalid timeout value",
        ),
        (&["acquire", "g", "--timeout="], "invalid timeout value"),
        (
            &["acquire", "g", "--timeout", "1y"],
            "invalid timeout value",
        ),
        (
            &["try", "g", "--stale", "1 h"],
            "invalid stale timeout value",
        ),
        (
            &["try", "g", "--stale-rule", "young"],
            "invalid value 'young' for --stale-rule: expected age or age-and-liveness",
        ),
        (
            &["try", "g", "--mode", "8"],
            "invalid value '8' for --mode: expected an octal mode, 0-0777",
        ),
        (
            &["try", "g", "--mode", "1777"],
            "invalid value '1777' for --mode: expected an octal mode, 0-0777",
        ),
        (
            &["try", "g", "--mode", "+644"],
            "invalid value '+644' for --mode: expected an octal mode, 0-0777",
        ),
        (
            &["try", "g", "--pid", "0"],
            "invalid value '0' for --pid: expected 1-2147483647",
        ),
        (
            &["try", "g", "--pid", "4294967295"],
            "invalid value '4294967295' for --pid: expected 1-2147483647",
        ),
        (
            &["try", "g", "--token", "a b"],
            "invalid value 'a b' for --token: expected a word of 1-256 bytes without blanks",
        ),
        (
            &["try", "g", "--slots", "0"],
            "invalid value '0' for --slots: expected 1-1024",
        ),
        (
            &["try", "g", "--slots", "1025"],
            "invalid value '1025' for --slots: expected 1-1024",
        ),
        (&["try", "g", "--json=yes"], "--json takes no value"),
        (
            &["try", "g", "--settle", "now"],
            "invalid value 'now' for --settle: expected never, takeover or always",
        ),
        (&["try", "g", "--force"], "--force is not an option of try"),
        (
            &["clean", "g", "--slots", "2"],
            "--slots is not an option of clean",
        ),
        (
            &["wait", "g", "--nonblock"],
            "--nonblock is not an option of wait",
        ),
        (&["acquire", "g", "-w", "x"], "invalid timeout value"),
        (
            &["wait", "g", "-E", "2"],
            "--busy-status is not an option of wait",
        ),
        (&["try", "g", "h"], "unexpected argument: h"),
        (&["try", "g", "--", "h"], "unexpected argument: h"),
        (&["run", "g"], "missing command to run, after --"),
        (&["run", "g", "--"], "missing command to run, after --"),
        (
            &["run", "g", "-E", "256", "--", "true"],
            "invalid value '256' for --busy-status: expected 0-255",
        ),
        (
            &["run", "g", "--on-lost", "x", "--", "true"],
            "invalid value 'x' for --on-lost: expected term or ignore",
        ),
        (&["run", "--", "true"], "missing lock path"),
        (&["run", "g", "date"], "put -- before the command"),
        (&["run", "g", "date", "-u"], "put -- before the command"),
        (
            &["run", "-x", "g"],
            "unknown option: -x; a lock file has one holder; leave the option out",
        ),
        (
            &["--tag", "t", "run", "g"],
            "missing command to run, after --",
        ),
        (&["hold"], "missing lock path"),
        (&["hold", "g", "h"], "unexpected argument: h"),
        (&["hold", "g", "-w", "1m30"], "invalid timeout value"),
        (
            &["run", "g", "--kill-after", "1y", "--", "true"],
            "invalid value '1y' for --kill-after: expected a time, such as 90, 1m30s or 500ms \
             (units: ms, s, m, h, d, w)",
        ),
        (
            &["hold", "g", "--kill-after", "1"],
            "--kill-after is not an option of hold",
        ),
    ] {
        let output = place.sema(arguments);
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

#[test]
fn an_error_of_the_system_is_3_and_names_the_path() {
    let place = Place::new();
    fs::create_dir(place.path("directory")).expect("a directory");
    let long = "x".repeat(500);
    symlink("nowhere/f", place.path("link")).expect("a link");
    let not_a_file = "IO error: directory: not a regular file";
    let nowhere = place.path("nowhere");
    let dangling = format!(
        "Invalid path: the link leads into a directory that does not exist, {}: link",
        nowhere.display()
    );
    for (arguments, reason) in [
        (
            &["try", "nowhere/f"][..],
            "Invalid path: parent directory does not exist: nowhere",
        ),
        (&["try", "link"], &dangling),
        (&["try", ""], "Invalid path: it is empty"),
        (&["acquire", "  "], "Invalid path: it is empty"),
        (&["status", ""], "Invalid path: it is empty"),
        (&["run", "", "--", "true"], "Invalid path: it is empty"),
        (
            &["release", "f/../f"],
            "Invalid path: it contains `..`: f/../f",
        ),
        (&["release", "./"], "Invalid path: it names a directory: ./"),
        (
            &["try", "directory/", "--slots", "2"],
            "Invalid path: it names a directory: directory/",
        ),
        (
            &["release", "directory"],
            "IO error: directory: not a regular file",
        ),
        (
            &["release", "directory", "--force"],
            "IO error: directory: not a regular file",
        ),
        (&["try", "directory"], not_a_file),
        (&["acquire", "directory"], not_a_file),
        (&["wait", "directory", "--timeout", "1m"], not_a_file),
        (&["clean", "directory"], not_a_file),
        (&["status", "directory"], not_a_file),
        (&["run", "directory", "--", "true"], not_a_file),
        (&["run", "directory", "-n", "-q", "--", "true"], not_a_file),
        (&["try", &long], &format!("IO error: {long}: ")),
        (&["wait", "/proc/nothing"], ""),
    ] {
        let output = place.sema(arguments);
        let stderr = text(&output.stderr);
        if reason.is_empty() {
            assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
            continue;
        }
        let (status, prefix) = match arguments[0] {
            "run" => (74, "sema"),
            _ => (3, "Error"),
        };
        let reason = match arguments[0] {
            "run" => reason.trim_start_matches("IO error: "),
            _ => reason,
        };
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        assert!(
            stderr.starts_with(&format!("{prefix}: {reason}")),
            "{stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    for arguments in [
        &["release", "directory"][..],
        &["release", "directory", "-f"],
    ] {
        let output = finish(&mut place.command("semats", arguments));
        assert_eq!(output.status.code(), Some(1));
        let cause = "cause: not a regular file\n";
        let failed = "status: failed\ntype: IO_ERROR\nmessage: IO error\n";
        assert_eq!(text(&output.stderr), format!("{failed}{cause}"));
    }
    assert_eq!(place.names(), ["directory", "link"]);
}

#[test]
fn a_grant_that_cannot_be_printed_is_released() {
    let place = Place::new();
    for (name, command, code) in [
        ("sema", "try", 3),
        ("sema", "acquire", 3),
        ("semats", "try-acquire", 1),
        ("semats", "acquire", 1),
    ] {
        let full = File::options().write(true).open("/dev/full");
        let mut program = place.command(name, &[command, "f"]);
        let output = finish(program.stdout(full.expect("/dev/full")));
        assert_eq!(output.status.code(), Some(code), "{name} {command}");
        let stderr = text(&output.stderr);
        assert!(stderr.starts_with("Error: standard output: "), "{stderr}");
        assert_eq!(place.names(), [""; 0], "{name} {command}");
    }
}

/// A lock that may be released, in a directory where this user may remove nothing: the system, and
/// not a holder, prevents the release.
#[test]
fn an_error_of_the_system_names_no_holder() {
    let place = Place::new();
    place.write("f", &format!("pid={NO_PROCESS}\ntimestamp={}\n", now()));
    place.write("old", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
    let before = place.content();
    for (path, mode) in [
        (place.path("f"), 0o644),
        (place.path("old"), 0o644),
        (place.path("."), 0o555),
    ] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
    }
    for (name, arguments, code, expected) in [
        (
            "sema",
            &["release", "f"][..],
            3,
            "Error: IO error: f: this user may not remove the file\n",
        ),
        (
            "sema",
            &["release", "f", "--force", "--json"],
            3,
            "Error: IO error: f: this user may not remove the file\n",
        ),
        (
            "semats",
            &["release", "f", "-f"],
            1,
            "status: failed\ntype: IO_ERROR\nmessage: IO error\n\
             cause: this user may not remove the file\n",
        ),
        (
            "sema",
            &["try", "new"],
            3,
            "Error: IO error: new: permission denied\n",
        ),
        (
            "semats",
            &["acquire", "new"],
            1,
            "status: failed\ntype: IO_ERROR\nmessage: IO error\ncause: permission denied\n",
        ),
    ] {
        let output = place.as_nobody(name, arguments);
        assert_eq!(text(&output.stderr), expected, "{name} {arguments:?}");
        assert_eq!(text(&output.stdout), "", "{name} {arguments:?}");
        assert_eq!(output.status.code(), Some(code), "{name} {arguments:?}");
        assert_eq!(place.content(), before, "{name} {arguments:?}");
    }
    // No wait can end well. A live lock is no better: this user could make no other.
    let stale = "old: stale, but this user may not remove the file";
    let live = "f: this user may not create and remove files in the directory";
    for (arguments, status, reason) in [
        (&["try", "old"][..], 3, stale),
        (&["acquire", "old"], 74, stale),
        (&["acquire", "old", "-q", "--json"], 74, stale),
        (&["run", "old", "--", "true"], 74, stale),
        (&["run", "old", "-n", "--busy-ok", "--", "true"], 74, stale),
        (&["hold", "old"], 74, stale),
        (&["wait", "old"], 74, &live.replace("f:", "old:")),
        (&["try", "f"], 3, live),
        (&["acquire", "f"], 3, live),
        (&["run", "f", "--", "true"], 74, live),
    ] {
        let output = place.as_nobody("sema", arguments);
        let prefix = if matches!(arguments[0], "run" | "hold") {
            "sema"
        } else {
            "Error: IO error"
        };
        let expected = format!("{prefix}: {reason}\n");
        assert_eq!(text(&output.stderr), expected, "{arguments:?}");
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    }
    let output = place.as_nobody("sema", &["clean", "old"]);
    let refused = "Error: IO error: old: this user may not remove the file\n";
    assert_eq!(text(&output.stderr), refused);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(place.content(), before);
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o755)).expect("it is ours");
}

/// In a directory such as /tmp, where a user may remove no files of others.
#[test]
fn a_stale_lock_of_another_user_is_no_reason_to_wait() {
    needs!(root);
    let place = Place::new();
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o1777)).expect("it is ours");
    place.write("old", "pid=99999999\ntimestamp=1\n");
    for command in ["acquire", "wait"] {
        let output = place.as_nobody("sema", &[command, "old"]);
        let why = "Error: IO error: old: stale, but this user may not remove the file\n";
        assert_eq!(text(&output.stderr), why, "{command}");
        assert_eq!(output.status.code(), Some(74), "{command}");
    }
    // A live lock of another user is waited for.
    place.write(
        "live",
        &format!("pid={}\ntimestamp={}\n", std::process::id(), now()),
    );
    let output = place.as_nobody("sema", &["acquire", "live", "--timeout", "50ms"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn a_wait_for_an_unreadable_file_says_why() {
    needs!(root);
    let place = Place::new();
    place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
    for (path, mode) in [(place.path("f"), 0o600), (place.path("."), 0o1777)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
    }
    let note = "\n  Note: this user may not read the file\n";
    for command in ["wait", "acquire"] {
        let output = place.as_nobody("sema", &[command, "f", "--timeout", "50ms"]);
        assert_eq!(output.status.code(), Some(1), "{command}");
        assert!(text(&output.stderr).ends_with(note), "{output:?}");
    }
    let output = place.as_nobody("sema", &["clean", "f", "--json"]);
    let refused = "Error: IO error: f: this user may not read the file\n";
    assert_eq!(text(&output.stderr), refused);
    assert_eq!(
        text(&output.stdout),
        "{\"cleaned\":false,\"temporaries\":0}\n"
    );
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn help_and_version_work_at_any_place() {
    let place = Place::new();
    for arguments in [
        &["-h"][..],
        &["--help"],
        &["help"],
        &["help", "try"],
        &["try", "f", "-h"],
        &["try", "f", "--tag", "--help"],
    ] {
        let output = place.sema(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(text(&output.stdout).starts_with("Usage: sema COMMAND PATH"));
        assert!(output.stderr.is_empty());
    }
    for arguments in [
        &["-V"][..],
        &["version"],
        &["run", "f", "--version", "--", "true"],
    ] {
        let output = place.sema(arguments);
        let version = format!("file-semaphore {}\n", env!("CARGO_PKG_VERSION"));
        assert_eq!(text(&output.stdout), version);
        assert_eq!(output.status.code(), Some(0));
    }
    assert_eq!(place.names(), [""; 0]);
}

// ---------------------------------------------------------------------------------------------
// The contents of the files

#[test]
fn a_record_begins_with_the_common_lines() {
    let place = Place::new();
    let before = now();
    assert_eq!(place.status(&["try", "f", "--tag", "build 7"]), 0);
    let record = place.read("f");
    let lines: Vec<&str> = record.split('\n').collect();
    assert_eq!(lines[0], format!("pid={}", std::process::id()));
    let timestamp = lines[1].strip_prefix("timestamp=").expect("a timestamp");
    assert_eq!(timestamp.len(), 10);
    let timestamp: u64 = timestamp.parse().expect("a number");
    assert!((before..=now()).contains(&timestamp));
    assert_eq!(lines[2], "tag=build 7");
    let (last, ours) = lines[3..].split_last().expect("a last line");
    assert_eq!(*last, "", "it ends with a line break");
    assert!(ours.iter().all(|line| line.starts_with("x-")), "{record}");
    assert!(
        !record.contains("x-live"),
        "no process has it locked: {record}"
    );

    assert_eq!(place.status(&["try", "g"]), 0);
    assert!(!place.read("g").contains("tag="));
    assert_eq!(place.status(&["try", "h", "--tag", ""]), 0);
    assert!(place.read("h").contains("\ntag=\n"));
}

#[test]
fn a_tag_cannot_forge_lines_or_control_the_terminal() {
    let place = Place::new();
    assert_eq!(
        place.status(&["try", "f", "--tag", "a\npid=1\r\u{1b}[31m\u{9b}m"]),
        0
    );
    assert!(place.read("f").contains("tag=a pid=1  [31m m\n"));

    let evil = "\u{1b}]0;x\u{7}\u{9b}\"\\ж";
    place.write("g", &format!("pid=1\ntimestamp={}\ntag={evil}\n", now()));
    let shown = "tag: \\x1b]0;x\\x07\\xc2\\x9b\"\\ж\n";
    assert!(text(&place.sema(&["status", "g"]).stdout).contains(shown));
    assert!(text(&place.sema(&["try", "g"]).stderr).contains(&shown.replace("tag", "Tag")));
    let semats = finish(&mut place.command("semats", &["status", "g"]));
    assert!(!text(&semats.stdout).contains(['\u{1b}', '\u{7}', '\u{9b}']));
    let json = text(&place.sema(&["status", "g", "--json"]).stdout);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["tag"], evil);
}

#[test]
fn the_mode_of_a_lock_file_is_0644_or_what_was_asked_for() {
    let place = Place::new();
    let output = place.script(
        "umask 022; sema try a -q; sema try b --mode 0666 -q; sema try c --mode=600 -q; \
         umask 077; sema try d -q; umask 000; semats try-acquire e",
    );
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    for (name, mode) in [
        ("a", 0o644),
        ("b", 0o644),
        ("c", 0o600),
        ("d", 0o600),
        ("e", 0o600),
    ] {
        let found = fs::metadata(place.path(name))
            .expect("a file")
            .permissions();
        assert_eq!(found.mode() & 0o7777, mode, "{name}");
    }
}

#[test]
fn a_single_command_takes_the_lock_for_the_script_that_calls_it() {
    let place = Place::new();
    let output = place.script(
        "sema try f -q && grep -qx pid=$$ f && sema try f -q; echo $?\n\
         sema release f && sema try f -q --pid 1 && grep -qx pid=1 f; echo $?\n\
         sema release f -q; echo $?; sema release f -q --pid 1; echo $?\n\
         semats try-acquire f >/dev/null && grep -qx pid=$$ f && semats release f; echo $?\n\
         sema try f -q --token t; sh -c 'sema release f -q; echo $?; \
         sema release f -q --token t; echo $?'",
    );
    assert_eq!(
        text(&output.stdout),
        "1\nLock released: f\n0\n1\n0\nstatus: released\n0\n1\n0\n",
        "{output:?}"
    );
}

#[test]
fn a_script_that_becomes_sema_releases_its_lock() {
    let place = Place::new();
    for script in [
        "sema try f -q; exec sema release f -q",
        "sema try f -q --slots 2; exec sema release f -q --slots 2",
        "semats try-acquire f; exec semats release f",
    ] {
        let output = place.script(script);
        assert_eq!(output.status.code(), Some(0), "{script}: {output:?}");
        assert_eq!(place.names(), [""; 0], "{script}");
    }
}

/// Runs a script in a new pid namespace. `None` if the system allows none.
fn in_a_namespace(place: &Place, words: &[&str]) -> Option<Output> {
    namespace(place, words).map(|mut command| finish(&mut command))
}

/// The command line that runs `words` as process 1 of a new pid namespace. `None` if the system
/// allows none.
fn namespace(place: &Place, words: &[&str]) -> Option<Command> {
    let mut command = process_1(&[])?;
    command
        .args(words)
        .current_dir(place.directory.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Some(command)
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

/// Runs `inner` under the lock `f` and under `more`, in a directory below.
fn nested(place: &Place, more: &[&str], inner: &str) -> Output {
    let mut words = vec!["run", "f"];
    words.extend(more);
    let script = format!("mkdir -p below && cd below && {inner}");
    words.extend(["--", "sh", "-c", &script]);
    let mut command = place.command("sema", &words);
    finish(command.env("lock", place.path("f")))
}

const OWN_LOCK: &str = "This runs under the lock already, and would wait for itself\n";

#[test]
fn a_wait_for_the_lock_around_it_ends_at_once() {
    let place = Place::new();
    for (inner, code, prefix) in [
        ("exec sema run $lock -- true", BUSY, "sema: "),
        ("exec sema run $lock --busy-status 9 -- true", 9, "sema: "),
        ("exec sema run $lock --timeout 60 -- true", BUSY, "sema: "),
        (
            "sh -c 'sema run $lock -- true; exit $?'; exit $?",
            BUSY,
            "sema: ",
        ),
        ("exec sema hold $lock", BUSY, "sema: "),
        ("exec sema acquire $lock", 1, ""),
        ("exec sema wait $lock", 1, ""),
    ] {
        let output = nested(&place, &[], inner);
        let said = text(&output.stderr);
        assert!(
            said.starts_with(&format!("{prefix}{OWN_LOCK}")),
            "{inner}: {said}"
        );
        assert_eq!(output.status.code(), Some(code), "{inner}");
    }
    let output = nested(&place, &[], "exec sema run $lock --busy-ok -- true");
    assert_eq!(
        (output.status.code(), text(&output.stderr).as_str()),
        (Some(0), "")
    );
}

#[test]
fn a_pool_whose_slots_are_all_held_around_it_is_refused() {
    let place = Place::new();
    let pool = ["--slots", "2"];
    let one = nested(&place, &pool, "exec sema run $lock --slots 2 -- true");
    assert_eq!(one.status.code(), Some(0), "one slot is free: {one:?}");
    let inner = "exec sema run $lock --slots 2 -- sh -c 'exec sema run $lock --slots 2 -- true'";
    let both = nested(&place, &pool, inner);
    assert!(text(&both.stderr).contains(OWN_LOCK), "{both:?}");
    assert_eq!(both.status.code(), Some(BUSY), "{both:?}");
}

#[test]
fn a_wait_for_any_lock_around_it_ends_at_once() {
    let place = Place::new();
    let last = [
        ("run $lock -- true", BUSY),
        // By another name, a symbolic link.
        ("run f -- true", BUSY),
        ("hold $lock", BUSY),
        ("acquire $lock", 1),
        ("wait $lock", 1),
    ];
    for (command, code) in last {
        // The second lock is between both claims of the first one, and each has its own directory.
        let inner = format!("mkdir -p deep && cd deep && ln -sf ../../f f && exec sema {command}");
        let output = nested(&place, &[], &format!("exec sema run g -- sh -c '{inner}'"));
        assert!(text(&output.stderr).contains(OWN_LOCK), "{output:?}");
        assert_eq!(output.status.code(), Some(code), "{command}");
    }
    let free = "exec sema run g -- sema run h -- true";
    assert_eq!(nested(&place, &[], free).status.code(), Some(0));
}

#[test]
fn a_slot_held_further_out_counts_by_its_path() {
    let place = Place::new();
    let pool = ["--slots", "2"];
    let whole = "sema run $lock --slots 2 -- true";
    for (inner, code) in [
        (format!("exec sema run g -- {whole}"), 0),
        (
            format!("exec sema run g -- sema run $lock --slots 2 -- {whole}"),
            BUSY,
        ),
        (
            "exec sema run g -- sh -c 'exec sema run $lock.?.lock -- true'".to_owned(),
            BUSY,
        ),
    ] {
        let output = nested(&place, &pool, &inner);
        assert_eq!(output.status.code(), Some(code), "{inner}: {output:?}");
        assert_eq!(text(&output.stderr).contains(OWN_LOCK), code == BUSY);
    }
}

#[test]
fn the_list_of_the_locks_around_has_an_end() {
    let place = Place::new();
    let long: Vec<String> = (0..1000).map(|number| format!("/lock/{number}")).collect();
    let mut command = place.command("sema", &["run", "f", "--", "printenv", "SEMA_ALL_PATHS"]);
    let output = finish(command.env("SEMA_ALL_PATHS", long.join("\n")));
    let paths = text(&output.stdout);
    let own = place.path("f");
    assert_eq!(paths.lines().next(), own.to_str());
    assert_eq!(paths.lines().nth(1), Some("/lock/0"));
    assert!(paths.lines().count() <= 64, "{paths}");
    // As long as the kernel allows, so that not even one more path fits.
    let mut command = place.command("sema", &["run", "f", "--", "printenv", "SEMA_ALL_PATHS"]);
    let output = finish(command.env("SEMA_ALL_PATHS", "x".repeat(130_000)));
    assert_eq!(text(&output.stdout).trim_end(), own.to_str().expect("text"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[test]
fn a_pool_in_use_refuses_another_number_of_slots() {
    let place = Place::new();
    // A crash has left a slot of a larger pool, which counts for nothing.
    let stale = format!("pid={NO_PROCESS}\ntimestamp=1\nx-slots=9\n");
    place.write("f.8.lock", &stale);
    let holds: Vec<_> = (0..3).map(|_| held(&place, &["--slots", "3"])).collect();
    let other = ["--slots", "2"];
    let refuse = || {
        let said = "f: the lock is in use with --slots 3\n";
        for (command, code, prefix) in [
            ("run", 76, "sema: "),
            ("hold", 76, "sema: "),
            ("try", 3, "Error: "),
            ("acquire", 3, "Error: "),
            ("wait", 3, "Error: "),
        ] {
            let mut words = vec![command, "f", "--slots", "2"];
            if command == "run" {
                words.extend(["--", "touch", "ran"]);
            }
            let output = place.sema(&words);
            assert_eq!(text(&output.stderr), format!("{prefix}{said}"), "{command}");
            assert_eq!(output.status.code(), Some(code), "{command}");
        }
        assert!(!place.path("ran").exists());
    };
    refuse();
    // Only the slot that the smaller pool does not have is held.
    for (mut hold, stdin, line) in holds {
        if line != "f.2.lock\n" {
            drop(stdin);
            assert_eq!(wait(&mut hold), Some(0));
            continue;
        }
        if !place.path("f.0.lock").exists() && !place.path("f.1.lock").exists() {
            refuse();
        }
        assert_eq!(place.status(&["run", "f", "--slots", "3", "--", "true"]), 0);
        drop(stdin);
        assert_eq!(wait(&mut hold), Some(0));
    }
    let words = [&["run", "f"][..], &other, &["--", "true"]].concat();
    assert_eq!(place.status(&words), 0);
}

#[test]
fn status_shows_the_slots_of_a_pool_in_use() {
    let place = Place::new();
    let free = place.sema(&["status", "f"]);
    assert_eq!(
        (free.status.code(), text(&free.stdout).as_str()),
        (Some(0), "locked: false\n")
    );
    let (mut first, stdin, _) = held(&place, &["--slots", "2"]);
    let one = place.sema(&["status", "f"]);
    let same = place.sema(&["status", "f", "--slots", "2"]);
    let shown = |output: &Output| timeless(&text(&output.stdout), now());
    assert_eq!(shown(&one), shown(&same));
    assert_eq!(one.status.code(), Some(0), "{one:?}");
    let (mut second, other_stdin, _) = held(&place, &["--slots", "2"]);
    let full = place.sema(&["status", "f"]);
    assert_eq!(full.status.code(), Some(1), "{full:?}");
    assert_eq!(
        text(&full.stdout).matches("locked: true\n").count(),
        2,
        "{full:?}"
    );
    drop((stdin, other_stdin));
    assert_eq!((wait(&mut first), wait(&mut second)), (Some(0), Some(0)));
}

#[test]
fn status_shows_the_slots_of_scripts_too() {
    let place = Place::new();
    // A script does not say how many slots there are, and such a number is nobody's.
    for count in ["", "x-slots=4294967295\n", "x-slots=0\n"] {
        let record = format!("pid=1\ntimestamp={}\n{count}", now());
        place.write("f.1.lock", &record);
        let output = place.sema(&["status", "f"]);
        let shown = text(&output.stdout);
        let free = "path: f.0.lock\nlocked: false\n\n";
        let held = format!("{free}path: f.1.lock\nlocked: true\npid: 1\n");
        assert!(shown.starts_with(&held), "{count}: {shown}");
        assert!(!shown.contains("f.2.lock"), "{count}: {shown}");
    }
    // The number of a file may be too large for a slot, too.
    fs::remove_file(place.path("f.1.lock")).expect("it is there");
    place.write(
        "f.4294967295.lock",
        &format!("pid=1\ntimestamp={}\n", now()),
    );
    assert_eq!(
        text(&place.sema(&["status", "f"]).stdout),
        "locked: false\n"
    );
}

#[test]
fn no_two_sizes_of_a_pool_are_held_at_once() {
    let place = Place::new();
    let children: Vec<(usize, Child)> = (0..30)
        .map(|number| {
            let size = 2 + number % 2;
            let script = format!("echo in {size} >> log; sleep 0.02; echo out {size} >> log");
            let slots = size.to_string();
            let words = [
                "run",
                "f",
                "--no-sync",
                "--slots",
                &slots,
                "--",
                "sh",
                "-c",
                &script,
            ];
            (
                size,
                place.command("sema", &words).spawn().expect("sema starts"),
            )
        })
        .collect();
    let statuses: Vec<Option<i32>> = (children.into_iter())
        .map(|(_, mut child)| shell_status(wait_for_exit(&mut child, 4 * PATIENCE)))
        .collect();
    assert!(
        statuses.iter().all(|status| matches!(status, Some(0 | 76))),
        "{statuses:?}"
    );
    let (log, mut held) = (
        fs::read_to_string(place.path("log")).unwrap_or_default(),
        [0, 0],
    );
    for line in log.lines() {
        let (what, size) = line.split_once(' ').expect("two words");
        let size = usize::from(size == "3");
        held[size] += if what == "in" { 1 } else { -1 };
        assert!(held[0] == 0 || held[1] == 0, "{log}");
    }
    assert_eq!(place.status(&["run", "f", "--slots", "2", "--", "true"]), 0);
}

/// Of several slots, the longest holder counts; a wrong clock does not make one young.
#[test]
fn busy_is_fine_only_while_every_holder_of_a_pool_is_young() {
    let place = Place::new();
    let record = |since| format!("pid=1\ntimestamp={}\nx-since={since}\n", now());
    for (other, status) in [
        (now(), 0),
        (now() - TWO_HOURS, BUSY),
        (now() + TWO_HOURS, BUSY),
    ] {
        for at in [0, 1] {
            place.write(&format!("f.{at}.lock"), &record(now()));
            place.write(&format!("f.{}.lock", 1 - at), &record(other));
            let words = ["run", "f", "--slots", "2", "-n", "--busy-ok=1h"];
            let output = place.sema(&[&words[..], &["--", "false"]].concat());
            assert_eq!(output.status.code(), Some(status), "{output:?}");
        }
    }
}

/// A crash of a larger pool, and another program.
#[test]
fn files_that_hold_no_slot_do_not_count_for_a_pool() {
    let place = Place::new();
    let holds: Vec<_> = (0..2).map(|_| held(&place, &["--slots", "2"])).collect();
    let stale = format!("pid={NO_PROCESS}\ntimestamp=1\nx-slots=9\n");
    let foreign = format!("hello\npid=1\ntimestamp={}\nx-slots=9\n", now());
    for content in [stale, foreign] {
        place.write("f.6.lock", &content);
        let output = place.sema(&["status", "f"]);
        let shown = text(&output.stdout);
        assert_eq!(shown.matches("path: ").count(), 2, "{shown}");
        assert_eq!(output.status.code(), Some(1), "{content}");
        let words = ["run", "f", "-n", "--slots", "2", "--", "true"];
        assert_eq!(place.status(&words), BUSY, "{content}");
    }
    for (mut hold, stdin, _) in holds {
        drop(stdin);
        assert_eq!(wait(&mut hold), Some(0));
    }
}

/// The wait may end, so it must not be refused.
#[test]
fn a_wait_for_a_lock_that_others_hold_goes_on_under_another() {
    let place = Place::new();
    let (mut hold, stdin, _) = held(&place, &["--slots", "2"]);
    let mut words = vec!["run", "f", "--slots", "2", "--", "sh", "-c"];
    words.push("exec sema run f --slots 2 --verbose -- true");
    let mut waiting = place.command("sema", &words).spawn().expect("sema");
    let mut line = String::new();
    let stderr = waiting.stderr.as_mut().expect("piped");
    BufReader::new(stderr).read_line(&mut line).expect("text");
    assert!(line.starts_with("sema: waiting for f"), "{line}");
    drop(stdin);
    assert_eq!(wait(&mut waiting), Some(0));
    assert_eq!(wait(&mut hold), Some(0));
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

/// Without the /proc of the namespace, that of the host is seen, with another process 1.
#[test]
fn a_holder_is_not_judged_by_the_proc_of_another_namespace() {
    let place = Place::new();
    let script = "sema acquire f -q --pid 1; umount -l /proc; sema status f | grep alive; \
                  sed -i 's/^timestamp=.*/timestamp=0000000001/' f; \
                  sh -c 'sema release f -q; echo $?; sema try f -q; echo $?'";
    let Some(output) = in_a_namespace(&place, &["sh", "-c", script]) else {
        return;
    };
    assert_eq!(text(&output.stdout), "alive: yes\n1\n1\n", "{output:?}");
}

/// The numbers of such a holder's namespace mean other processes elsewhere.
#[test]
fn a_holder_that_cannot_read_its_namespace_is_judged_by_age() {
    let place = Place::new();
    let script = "mount -t tmpfs none /proc; sema try f -q; sema release f; sema try f -q";
    let Some(output) = in_a_namespace(&place, &["sh", "-c", script]) else {
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

const NO_CALLER: &str = "Note: no process is known that f is held for; see --pid in sema(1)\n";

#[test]
fn a_container_script_that_is_process_1_holds_its_lock() {
    let place = Place::new();
    let script = "sema try f -q; sed -n 's/^pid=//p' f; sema status f | grep alive; \
                  (set -m; sema acquire f -q -n); echo $?; sema release f";
    let Some(output) = in_a_namespace(&place, &["sh", "-c", script]) else {
        return;
    };
    let expected = "1\nalive: yes\n1\nLock released: f\n";
    assert_eq!(text(&output.stdout), expected, "{output:?}");
    assert_eq!(text(&output.stderr), "", "{output:?}");
}

/// Process 1 adopts orphans and starts the services of a host, so it does not count as the caller.
#[test]
fn a_lock_for_no_known_process_is_granted_with_a_note() {
    let place = Place::new();
    let of_a_session = "setsid sema try f; sed -n 's/^pid=//p' f; sema status f | grep alive; \
                        sema release f -q; setsid sema try f -q";
    let Some(output) = in_a_namespace(&place, &["sh", "-c", of_a_session]) else {
        return;
    };
    let said = text(&output.stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 3, "{output:?}");
    let pid: u32 = lines[1].parse().expect("a process number");
    assert!(pid > 1 && lines[2] == "alive: no", "{output:?}");
    assert_eq!(text(&output.stderr), NO_CALLER);
    assert_eq!(place.status(&["release", "f", "--force"]), 0);
    // As process 1, the program has no caller in its namespace.
    let words = [program("sema"), "acquire", "f"];
    let output = in_a_namespace(&place, &words).expect("just now it could");
    assert_eq!(text(&output.stdout), "Lock acquired: f\n");
    assert_eq!(text(&output.stderr), NO_CALLER);
}

#[test]
fn release_removes_the_lock_of_a_script_that_is_gone() {
    let place = Place::new();
    place.script("sema try f; true");
    assert_eq!(place.status(&["try", "f"]), 1, "it is not old");
    let status = text(&place.sema(&["status", "f"]).stdout);
    assert!(status.contains("alive: no\nstale: no\n"), "{status}");
    assert_eq!(place.status(&["release", "f"]), 0);
}

#[test]
fn clean_removes_left_overs_of_crashes_and_nothing_else() {
    let place = Place::new();
    let orphans = [".sema-0123456789abcdef~", "f.99999999.0123456789abcdef.tmp"];
    let mine = format!("f.{}.0123456789abcdef.tmp", std::process::id());
    let others = [
        ".sema-0123456789abcdeg~",
        "f.backup.tmp",
        "f.99999999.0123456789abcde.tmp",
        "g.99999999.0123456789abcdef.tmp",
        &mine,
    ];
    for name in orphans.iter().chain(&others) {
        place.write(name, "x");
        age(&place.path(name), TWO_HOURS);
    }
    let young = [".sema-fedcba9876543210~", "f.99999999.fedcba9876543210.tmp"];
    for name in young {
        place.write(name, "x");
    }
    place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
    let output = place.sema(&["clean", "f"]);
    assert_eq!(
        text(&output.stdout),
        "Stale lock removed: f\nTemporary files removed: 2\n"
    );
    let mut expected: Vec<&str> = others.iter().chain(&young).copied().collect();
    expected.sort_unstable();
    assert_eq!(place.names(), expected);
}

/// A power cut during a write leaves NUL bytes in place of what was to be there.
#[test]
fn nul_bytes_are_a_lock_while_young_and_stale_when_old() {
    let place = Place::new();
    for content in ["\0\0\0", "pid=7\ntimestamp=1\0\0", "pid=\0"] {
        place.write("f", content);
        assert_eq!(place.status(&["try", "f"]), 1, "{content:?}");
        assert_eq!(place.status(&["release", "f"]), 1, "{content:?}");
        let output = place.sema(&["status", "f"]);
        assert!(
            text(&output.stdout).contains("contents unreadable"),
            "{output:?}"
        );
        age(&place.path("f"), TWO_HOURS);
        let pid = std::process::id().to_string();
        assert_eq!(place.status(&["try", "f", "--pid", &pid]), 0, "{content:?}");
        assert_eq!(place.status(&["release", "f", "--force"]), 0, "{content:?}");
    }
}

/// As after a reset of the clock: the age of the file cannot be told, but a wait can.
#[test]
fn a_file_from_the_future_is_stale_once_it_was_watched() {
    let place = Place::new();
    for content in ["", "pid=99999999\ntimestamp=99999999999\n"] {
        place.write("f", content);
        let file = File::options().write(true).open(place.path("f"));
        let later = SystemTime::now() + Duration::from_secs(TWO_HOURS);
        file.expect("a file").set_modified(later).expect("a time");
        assert_eq!(
            place.status(&["try", "f", "--stale", "1"]),
            1,
            "{content:?}"
        );
        let run = ["run", "f", "--stale", "1", "--timeout", "20", "--", "true"];
        assert_eq!(place.status(&run), 0, "{content:?}");
    }
}

/// The steps of a process with a lock's name, with its record and with the locks on its file.
const STEPS: [&str; 8] = [
    "linkat",
    "unlinkat",
    "flock",
    "fcntl",
    "fchmod",
    "pwrite64",
    "fsync",
    "ftruncate",
];

/// A taker that is killed before the truncation leaves its record, with empty lines after it.
#[test]
fn a_kill_between_any_two_steps_leaves_a_lock_to_take() {
    let strace = needs!("strace");
    let tag = "x".repeat(500);
    let stale = format!("pid={NO_PROCESS}\ntimestamp=1\ntag={tag}\n");
    for before in [None, Some(&stale)] {
        let mut kill_count = 0;
        for call in STEPS {
            for nth in 1.. {
                let place = Place::new();
                before.inspect(|record| place.write("f", record));
                let kill = format!("inject={call}:signal=KILL:when={nth}");
                let mut command = strace.command();
                command
                    .args(["-f", "-qq", "-o", "/dev/null", "-e", &kill])
                    .arg(program("sema"))
                    .args(["run", "f", "-n", "--", "true"])
                    .current_dir(place.directory.path())
                    .stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
                let is_whole = finish(&mut command).status.code() == Some(0);
                let left = place.content();
                let status = place.status(&["run", "f", "-n", "--", "true"]);
                assert_eq!(status, 0, "{call} {nth}: {left:?}");
                assert!(place.names().is_empty(), "{call} {nth}: {left:?}");
                if is_whole {
                    break;
                }
                kill_count += 1;
                // The new record is whole, and nothing of the old one is behind it.
                if call == "ftruncate" {
                    let record = String::from_utf8_lossy(&left["f"]);
                    assert!(!record.contains("xxx"), "{record}");
                }
            }
        }
        println!("{kill_count} kills");
        assert!(kill_count > 5, "{kill_count} kills");
    }
}

#[test]
fn a_file_that_is_not_a_lock_file_is_never_touched() {
    let place = Place::new();
    for content in [
        "#!/bin/sh\nexec sema run \"$0\" -- true\n",
        "pid=/run/daemon.pid\ntimestamp=1\n",
        "pid=5\nuser=root\n",
        "12345\n",
        "p",
        "\n",
        "\0\0\0\n",
    ] {
        place.write("f", content);
        for is_old in [false, true] {
            if is_old {
                age(&place.path("f"), TWO_HOURS);
            }
            for arguments in [
                "try f",
                "try f --stale 1ms --stale-rule age",
                "acquire f",
                "wait f",
                "status f",
                "release f",
                "release f --force",
                "clean f",
                "clean f --force",
                "run f --timeout 0 -- true",
                "run f -- true",
            ] {
                let words: Vec<&str> = arguments.split(' ').collect();
                let output = place.sema(&words);
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                let expected = match words[0] {
                    "run" => (Some(74), "sema: f is not a lock file\n"),
                    _ => (Some(3), "Error: f is not a lock file\n"),
                };
                assert_eq!((output.status.code(), &*said), expected, "{arguments}");
                assert_eq!(place.read("f"), content, "{arguments}");
            }
            for arguments in [
                &["acquire", "f"][..],
                &["release", "f", "-f"],
                &["clean", "f"],
            ] {
                let output = finish(&mut place.command("semats", arguments));
                assert_eq!(output.status.code(), Some(1), "{arguments:?}");
                assert_eq!(place.read("f"), content, "{arguments:?}");
            }
        }
    }
}

#[test]
fn an_unreadable_lock_is_stale_by_the_age_of_its_file() {
    let place = Place::new();
    place.write("f", "pid=7\ntimest");
    assert_eq!(place.status(&["try", "f"]), 1);
    age(&place.path("f"), TWO_HOURS);
    assert_eq!(place.status(&["try", "f", "--stale", "3h"]), 1);
    assert_eq!(place.status(&["try", "f"]), 0);
    assert!(place.read("f").starts_with("pid="));
    for program in ["sema", "semats"] {
        place.write("g", "pid=7\n");
        let mut release = place.command(program, &["release", "g"]);
        assert_eq!(finish(&mut release).status.code(), Some(1), "{program}");
        age(&place.path("g"), TWO_HOURS);
        assert_eq!(finish(&mut release).status.code(), Some(0), "{program}");
        assert!(!place.path("g").exists(), "{program}");
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

#[test]
fn each_slot_is_a_lock() {
    let place = Place::new();
    for slot in 0..3 {
        let output = place.sema(&["try", "pool", "--slots", "3"]);
        assert_eq!(
            text(&output.stdout),
            format!("Lock acquired: pool.{slot}.lock\n")
        );
    }
    let output = place.sema(&["try", "--slots=3", "pool"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("\n  Path: pool.0.lock\n"));
    let mut waiting = place.waiting(&["acquire", "pool", "--slots", "3"]);
    assert_eq!(place.status(&["release", "pool.1.lock"]), 0);
    assert_eq!(wait(&mut waiting), Some(0));
    let output = waiting.wait_with_output().expect("its output");
    assert_eq!(text(&output.stdout), "Lock acquired: pool.1.lock\n");
    assert_eq!(
        place.status(&["acquire", "pool", "--slots", "3", "--timeout", "0"]),
        1
    );
    let more = place.sema(&["run", "pool", "--slots", "4", "--", "true"]);
    assert_eq!(more.status.code(), Some(76), "they agree on three slots");
    assert_eq!(place.status(&["release", "pool.2.lock"]), 0);
    let command = ["--", "sh", "-c", "echo $SEMA_PATH"];
    let output = place.sema(&[&["run", "pool", "--slots", "3"], &command[..]].concat());
    assert_eq!(text(&output.stdout), "pool.2.lock\n");
    assert_eq!(place.names(), ["pool.0.lock", "pool.1.lock"]);
}

#[test]
fn slots_are_shown_waited_for_and_released_together() {
    let place = Place::new();
    let slots = ["--slots", "2"];
    let all =
        |command: &str, more: &[&str]| place.sema(&[&[command, "p"], &slots[..], more].concat());
    let shown = all("status", &[]);
    assert_eq!(shown.status.code(), Some(0));
    let free = "path: p.0.lock\nlocked: false\n\npath: p.1.lock\nlocked: false\n";
    assert_eq!(text(&shown.stdout), free);

    assert_eq!(all("try", &["--tag", "a"]).status.code(), Some(0));
    place.write("p.1.lock", &format!("pid=1\ntimestamp={}\n", now()));
    let shown = all("status", &["--json"]);
    assert_eq!(shown.status.code(), Some(1), "none is free");
    let lines = text(&shown.stdout);
    let lines: Vec<serde_json::Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0]["path"], "p.0.lock");
    assert_eq!(lines[0]["pid"], std::process::id());
    assert_eq!(
        (&lines[1]["path"], &lines[1]["pid"]),
        (&"p.1.lock".into(), &1.into())
    );

    let waited = all("wait", &["--timeout", "20ms"]);
    assert_eq!(waited.status.code(), Some(1));
    assert!(text(&waited.stderr).contains("  Path: p.0.lock\n"));
    let mut waiting = place.waiting(&["wait", "p", "--slots", "2"]);
    fs::remove_file(place.path("p.1.lock")).expect("it is there");
    assert_eq!(wait(&mut waiting), Some(0));
    let output = waiting.wait_with_output().expect("its output");
    assert_eq!(text(&output.stdout), "Lock is free: p.1.lock\n");
    assert_eq!(all("status", &[]).status.code(), Some(0), "one is free");

    // `release` selects the slot of the script that asks, not that of process 1 or of an ended
    // process.
    fs::rename(place.path("p.0.lock"), place.path("p.1.lock")).expect("a slot");
    for other in ["1", NO_PROCESS] {
        place.write("p.0.lock", &format!("pid={other}\ntimestamp={}\n", now()));
        let mine = place.read("p.1.lock");
        assert_eq!(
            text(&all("release", &[]).stdout),
            "Lock released: p.1.lock\n"
        );
        assert_eq!(place.names(), ["p.0.lock"], "{other}");
        assert_eq!(all("release", &["-q"]).status.code(), Some(1), "{other}");
        place.write("p.1.lock", &mine);
    }
    let released = all("release", &["--pid", NO_PROCESS]);
    assert_eq!(text(&released.stdout), "Lock released: p.0.lock\n");
    place.write("p.0.lock", "pid=1\ntimestamp=1\nx-token=t\n");
    let released = all("release", &["--token", "t", "--json"]);
    assert_eq!(
        text(&released.stdout),
        "{\"released\":true,\"path\":\"p.0.lock\"}\n"
    );
    place.write("p.0.lock", "pid=1\ntimestamp=1\n");
    let released = all("release", &["--force"]);
    let both = "Lock released: p.0.lock\nLock released: p.1.lock\n";
    assert_eq!(text(&released.stdout), both);
    assert_eq!(text(&all("release", &[]).stdout), "Lock released: p\n");
}

/// In a directory that all may write to, any user can make such files.
#[test]
fn slots_that_can_be_no_locks_are_passed_over() {
    let place = Place::new();
    place.write("p.1.lock", "x");
    fs::create_dir(place.path("p.2.lock")).expect("a directory");
    symlink("p.3.lock", place.path("p.3.lock")).expect("a link");
    let all = |command: &str, count: &str, more: &[&str]| {
        place.sema(&[&[command, "p", "--slots", count], more].concat())
    };
    assert_eq!(all("try", "5", &["-q"]).status.code(), Some(0));
    let shown = all("status", "5", &[]);
    assert_eq!(shown.status.code(), Some(0), "{shown:?}");
    assert!(text(&shown.stdout).contains("path: p.4.lock\nlocked: false\n"));
    let granted = all("try", "5", &[]);
    assert_eq!(text(&granted.stdout), "Lock acquired: p.4.lock\n");
    let held = all("acquire", "5", &["--timeout", "20ms"]);
    assert_eq!(held.status.code(), Some(1), "{held:?}");
    assert_eq!(all("release", "5", &["-q"]).status.code(), Some(0));
    for more in ["--force", "-q"] {
        let released = all("release", "5", &[more]);
        assert_eq!(released.status.code(), Some(0), "{more}: {released:?}");
        assert_eq!(place.names(), ["p.1.lock", "p.2.lock", "p.3.lock"]);
    }
    for name in ["p.0.lock", "p.2.lock"] {
        let _ = fs::remove_dir(place.path(name));
        place.write(name, "x");
    }
    for command in ["try", "acquire", "wait", "status", "release"] {
        let refused = all(command, "4", &[]);
        assert_eq!(refused.status.code(), Some(3), "{command}: {refused:?}");
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
            .current_dir(place.directory.path())
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

#[test]
fn a_living_holder_is_not_stale_where_flock_is_refused() {
    let strace = needs!("strace");
    let place = Place::new();
    let (mut holder, pid) = place.started(&[], "exec sleep 60");
    // No locks at all; none for a file that is open for reading only, as over NFS.
    for error in ["ENOLCK", "EBADF"] {
        let sema = |arguments: &[&str]| {
            let inject = format!("inject=flock:error={error}");
            let output = strace
                .command()
                .args(["-f", "-e", &inject, "-o", "/dev/null"])
                .arg(program("sema"))
                .args(arguments)
                .current_dir(place.directory.path())
                .output()
                .expect("strace runs");
            (
                output.status.code(),
                text(&output.stdout) + &text(&output.stderr),
            )
        };
        let (_, status) = sema(&["status", "f"]);
        assert!(
            status.contains("alive: yes") && status.contains("stale: no"),
            "{status}"
        );
        let (taken, note) = sema(&["try", "f"]);
        assert!(taken == Some(1) && !note.contains("stale"), "{note}");
        assert_eq!(sema(&["wait", "f", "-w", "0", "-q"]).0, Some(1));
        let (_, cleaned) = sema(&["clean", "f", "--force"]);
        assert!(!cleaned.contains("removed"), "{cleaned}");
    }
    assert_eq!(holder.try_wait().expect("a child"), None);
    kill_process(pid, Signal::TERM).expect("the command lives");
    holder.wait().expect("a child");
}

/// A lock that a crash has left on a file system without flock: no process holds it, and none can
/// take it over.
#[test]
fn a_stale_lock_without_flock_is_an_error_and_no_holder() {
    let strace = needs!("strace");
    let place = Place::new();
    let why = "f: stale, but the file system does not support locks on files; sema clean --force \
               removes it\n";
    for error in ["ENOSYS", "ENOLCK", "EBADF", "EOPNOTSUPP"] {
        let sema = |arguments: &[&str]| {
            let inject = format!("inject=flock:error={error}");
            let mut command = strace.command();
            command
                .args(["-f", "-e", &inject, "-o", "/dev/null"])
                .arg(program("sema"))
                .args(arguments)
                .current_dir(place.directory.path())
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            finish(&mut command)
        };
        place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
        for (arguments, status) in [
            (&["run", "f", "-n", "--busy-ok", "--", "true"][..], 74),
            (&["run", "f", "--", "true"], 74),
            (&["hold", "f", "-n"], 74),
            (&["try", "f"], 3),
            (&["acquire", "f"], 74),
            (&["wait", "f"], 74),
            (&["clean", "f"], 3),
        ] {
            let output = sema(arguments);
            let prefix = if matches!(arguments[0], "run" | "hold") {
                "sema"
            } else {
                "Error: IO error"
            };
            let expected = format!("{prefix}: {why}");
            assert_eq!(text(&output.stderr), expected, "{error} {arguments:?}");
            assert_eq!(output.status.code(), Some(status), "{error} {arguments:?}");
            assert_eq!(place.names(), ["f"], "{error} {arguments:?}");
        }
        let forced = sema(&["clean", "f", "--force"]);
        assert_eq!(forced.status.code(), Some(0), "{error}: {forced:?}");
        assert_eq!(place.names(), [""; 0], "{error}");
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
        command
            .args([flag, "f"])
            .current_dir(place.directory.path());
        command.stderr(Stdio::null()).status().expect("chattr runs")
    };
    if !chattr("+i").success() {
        return eprintln!("skipped: the file system has no such attribute");
    }
    let statuses = [
        ("try", 3, "stale, but "),
        ("acquire", 74, "stale, but "),
        ("wait", 74, "stale, but "),
        ("clean", 3, ""),
        ("release", 3, ""),
    ];
    let outputs = statuses.map(|row| (row, place.sema(&[row.0, "f"])));
    let repeat = place.script("until sema try f; do sema wait f || exit; done");
    assert!(chattr("-i").success());
    for ((command, code, is_stale), output) in outputs {
        let why = format!("Error: IO error: f: {is_stale}this user may not remove the file\n");
        assert_eq!(text(&output.stderr), why, "{command}");
        assert_eq!(output.status.code(), Some(code), "{command}");
    }
    assert_eq!(repeat.status.code(), Some(74), "{repeat:?}");
}

#[test]
fn a_file_that_cannot_be_synced_names_the_option() {
    let strace = needs!("strace");
    let place = Place::new();
    let mut command = strace.command();
    command
        .args(["-f", "-e", "inject=fsync:error=EINVAL", "-o", "/dev/null"])
        .args([program("sema"), "run", "f", "--", "true"])
        .current_dir(place.directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = finish(&mut command);
    let why = "sema: f: the file system cannot sync a file (Invalid argument); see --no-sync in \
               sema(1)\n";
    assert_eq!(text(&output.stderr), why);
    assert_eq!(output.status.code(), Some(74));
    assert_eq!(place.names(), [""; 0]);
}

#[test]
fn an_error_that_passes_loses_no_lock() {
    let place = Place::new();
    let directory = place.directory.path();
    let may = |mode| fs::set_permissions(directory, fs::Permissions::from_mode(mode));
    may(0o777).expect("it is ours");
    let over = place.bin.path().join("over");
    let script = format!("until test -e {}; do sleep 0.1; done", over.display());
    thread::scope(|scope| {
        let run = scope.spawn(|| place.as_nobody("sema", &["run", "f", "--", "sh", "-c", &script]));
        eventually(PATIENCE, "it is held", || place.path("f").exists());
        // The holder looks at its lock each second.
        may(0).expect("it is ours");
        thread::sleep(Duration::from_millis(2500));
        may(0o777).expect("it is ours");
        fs::write(&over, "").expect("there is room");
        let output = run.join().expect("no panic");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    });
}

#[test]
fn no_lock_is_taken_for_a_process_that_is_gone() {
    let strace = needs!("strace");
    let place = Place::new();
    let refused =
        |pid: &str| format!("Error: process {pid}, which was to hold the lock, has ended\n");
    for command in ["try", "acquire"] {
        let output = place.sema(&[command, "f", "--pid", NO_PROCESS]);
        assert_eq!(output.status.code(), Some(3), "{command}");
        assert_eq!(text(&output.stderr), refused(NO_PROCESS), "{command}");
        assert_eq!(place.names(), [""; 0], "{command}");
    }
    // The second time, the kernel has no descriptors for processes.
    let old_kernel = [
        "-f",
        "-e",
        "inject=pidfd_open:error=ENOSYS",
        "-o",
        "/dev/null",
    ];
    for is_old in [false, true] {
        place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
        let mut holder = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = holder.id().to_string();
        let mut command = if is_old {
            strace.command()
        } else {
            Command::new(program("sema"))
        };
        if is_old {
            command.args(old_kernel).arg(program("sema"));
        }
        let mut waiter = command
            .args(["acquire", "f", "--pid", &pid])
            .current_dir(place.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("sema starts");
        // It is the child of strace, if there is strace.
        eventually(PATIENCE, "it waits", || {
            let children = children_of(waiter.id());
            let sema = children.first().map(|it| it.as_raw_pid().unsigned_abs());
            watches(sema.unwrap_or(waiter.id()))
        });
        assert_eq!(waiter.try_wait().expect("a child"), None);
        holder.kill().expect("it runs");
        // Until then the holder is a zombie, which holds nothing either.
        let code = wait(&mut waiter);
        holder.wait().expect("its status");
        let output = waiter.wait_with_output().expect("its output");
        assert_eq!(text(&output.stderr), refused(&pid));
        assert_eq!(code, Some(3));
    }
}

#[test]
fn a_wait_ends_when_the_lock_is_released() {
    for command in ["wait", "acquire"] {
        let place = Place::new();
        place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
        let mut child = place.waiting(&[command, "f"]);
        fs::remove_file(place.path("f")).expect("it is there");
        assert_eq!(wait(&mut child), Some(0), "{command}");
        assert_eq!(place.path("f").exists(), command == "acquire");
    }
}

#[test]
fn semats_waits_for_ever_unless_a_number_says_otherwise() {
    let place = Place::new();
    for timeout in [&[][..], &["--timeout", "abc"], &["--timeout"]] {
        place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
        let arguments = [&["acquire", "f"], timeout].concat();
        let mut child = place.waiting_as("semats", &arguments);
        assert_eq!(child.try_wait().expect("a child"), None, "{timeout:?}");
        fs::remove_file(place.path("f")).expect("it is there");
        assert_eq!(wait(&mut child), Some(0), "{timeout:?}");
    }
}

#[test]
fn a_wait_ends_when_the_holder_of_an_old_lock_dies() {
    for command in ["wait", "acquire"] {
        let place = Place::new();
        let mut holder = Command::new("sleep").arg("60").spawn().expect("sleep");
        let record = format!(
            "pid={}\ntimestamp={}\nx-start={}\n",
            holder.id(),
            now() - TWO_HOURS,
            start_of(holder.id())
        );
        place.write("f", &record);
        assert_eq!(place.status(&["try", "f"]), 1, "it is alive");
        let mut child = place.waiting(&[command, "f"]);
        holder.kill().expect("it runs");
        holder.wait().expect("its status");
        assert_eq!(wait(&mut child), Some(0), "{command}");
    }
}

#[test]
fn a_wait_ends_when_the_lock_becomes_stale() {
    for command in ["wait", "acquire"] {
        let place = Place::new();
        let start = Instant::now();
        place.write("f", &format!("pid={NO_PROCESS}\ntimestamp={}\n", now()));
        assert_eq!(
            place.status(&[command, "f", "--stale", "1s"]),
            0,
            "{command}"
        );
        assert!(start.elapsed() > Duration::from_secs(1), "{command}");
    }
}

#[test]
fn a_wait_for_a_lock_that_stays_held_does_not_spin() {
    let place = Place::new();
    // The record is stale, but a process has the file locked.
    place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
    let file = locked_in_every_way(&place.path("f"));
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
fn a_reader_that_keeps_a_stale_lock_is_told() {
    let place = Place::new();
    place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
    let reader = locked_in_every_way(&place.path("f"));
    for (arguments, status) in [
        ("try f", 1),
        ("run f -w 0 -- true", 75),
        ("release f", 1),
        ("wait f --timeout 20ms", 1),
        ("clean f", 3),
    ] {
        let output = place.sema(&arguments.split(' ').collect::<Vec<_>>());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments}: {said}");
        let reason = "another process keeps the file locked";
        assert!(said.contains(reason), "{arguments}: {said}");
    }
    drop(reader);
    assert_eq!(place.status(&["wait", "f", "--timeout", "0"]), 0);
    assert_eq!(place.status(&["clean", "f"]), 0);
}

/// A process of another user that has `f` locked by flock(1), until its input ends.
fn foreign_flock(place: &Place, mode: &str) -> Child {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    let script = format!("exec 9<f; flock {mode} 9; echo locked; exec cat");
    command
        .args(["sh", "-c", &script])
        .current_dir(place.directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().expect("a shell");
    let mut said = [0; 7];
    let output = child.stdout.as_mut().expect("a pipe");
    output.read_exact(&mut said).expect("a line");
    assert_eq!(&said, b"locked\n");
    child
}

#[test]
fn a_takeover_writes_no_secret_into_a_file_that_others_read() {
    let place = Place::new();
    let old = format!("pid={NO_PROCESS}\ntimestamp=1\n");
    for (mode, is_seen) in [("0600", false), ("0644", true)] {
        place.write("f", &old);
        let readable = fs::Permissions::from_mode(0o644);
        fs::set_permissions(place.path("f"), readable).expect("it is ours");
        let mut reader = fs::File::open(place.path("f")).expect("it is there");
        let taken = place.sema(&["try", "f", "--mode", mode, "--token", "secret"]);
        assert_eq!(taken.status.code(), Some(0), "{taken:?}");
        let mut seen = String::new();
        reader.read_to_string(&mut seen).expect("it is text");
        assert_eq!(seen.contains("secret"), is_seen, "{mode}: {seen}");
        assert!(place.read("f").contains("secret"));
        fs::remove_file(place.path("f")).expect("it is ours");
    }
}

#[test]
fn a_flock_of_another_user_keeps_no_stale_lock() {
    needs!(root);
    let place = Place::new();
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(place.path("."), mode).expect("it is ours");
    let old = format!("pid={NO_PROCESS}\ntimestamp=1\nx-token=t\n");
    // What `run` leaves behind if it is killed.
    let (mut child, command) = place.started(&["--token", "t"], "exec sleep 60");
    let left = place.read("f");
    signal(&child, Signal::KILL);
    wait(&mut child);
    kill_process(command, Signal::KILL).expect("it runs");
    let pid = child.id().to_string();
    for (record, pid) in [(&old, NO_PROCESS), (&left, &pid)] {
        for mode in ["-s", "-x"] {
            for arguments in [
                &["release", "f"][..],
                &["release", "f", "--pid", pid],
                &["release", "f", "--token", "t"],
                &["wait", "f", "--timeout", "0"],
                &["clean", "f"],
                &[
                    "run",
                    "f",
                    "--timeout",
                    "0",
                    "--",
                    "grep",
                    "-q",
                    "x-live=flock",
                    "f",
                ],
                &["try", "f"],
            ] {
                place.write("f", record);
                let mut reader = foreign_flock(&place, mode);
                let output = place.sema(arguments);
                assert_eq!(
                    output.status.code(),
                    Some(0),
                    "{mode} {arguments:?} {output:?}"
                );
                let is_left = ["wait", "try"].contains(&arguments[0]);
                assert_eq!(place.path("f").exists(), is_left, "{mode} {arguments:?}");
                drop(reader.stdin.take());
                wait(&mut reader);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// A command under a lock

#[test]
fn the_commands_exit_status_and_streams_pass_through() {
    let place = Place::new();
    let script = "cat; echo $SEMA_PATH >&2; grep -q x-live=flock f && exit 7";
    let mut command = place.command(
        "sema",
        &["run", "f", "--tag", "t", "--", "sh", "-c", script],
    );
    let output = fed(&mut command, b"in and out");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(
        (&*output.stdout, &*output.stderr),
        (&b"in and out"[..], &b"f\n"[..])
    );
    for (arguments, expected) in [
        (&["run", "f", "--", "true"][..], 0),
        (&["run", "--", "true"], 64),
        (&["run", "f", "--", "/nowhere/at/all"], 127),
        (&["run", "nowhere/f", "--", "true"], 74),
        (&["run", "f", "--", "-h"], 127),
    ] {
        assert_eq!(place.status(arguments), expected, "{arguments:?}");
        assert_eq!(place.names(), [""; 0], "{arguments:?}");
    }
}

#[test]
fn a_held_lock_is_75_for_run_or_the_busy_status() {
    let place = Place::new();
    place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
    for (arguments, code, line) in [
        (
            &["run", "f", "--timeout", "0", "--", "true"][..],
            75,
            "sema: Lock already held\n  Holder PID: 1\n",
        ),
        (
            &["run", "f", "--timeout", "50ms", "--", "true"],
            75,
            "sema: Timeout waiting for lock\n  Holder PID: 1\n",
        ),
        (
            &["run", "f", "-E", "9", "--timeout=0", "--", "true"],
            9,
            "sema: Lock already held\n",
        ),
        (
            &[
                "run",
                "f",
                "--busy-status=0",
                "-q",
                "--timeout=0",
                "--",
                "false",
            ],
            0,
            "",
        ),
        (&["run", "f", "-n", "--busy-ok", "--", "false"], 0, ""),
        (&["run", "f", "-n", "--busy-ok=2d", "--", "false"], 0, ""),
        (&["run", "f", "-n", "--busy-ok=true", "--", "false"], 0, ""),
        (
            &["run", "f", "-n", "--busy-ok=0", "--", "false"],
            75,
            "sema: Lock already held\n  Holder PID: 1\n",
        ),
        (
            &["run", "f", "-n", "--busy-ok=0", "-q", "--", "false"],
            75,
            "",
        ),
    ] {
        let output = place.sema(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        let stderr = text(&output.stderr);
        assert!(
            stderr.starts_with(line) && stderr.is_empty() == line.is_empty(),
            "{stderr}"
        );
        assert_eq!(place.names(), ["f"]);
    }
}

#[test]
fn n_and_w_mean_the_same_as_for_flock() {
    let place = Place::new();
    place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
    for (arguments, code, line) in [
        (
            &["run", "-n", "f", "--", "true"][..],
            75,
            "sema: Lock already held\n",
        ),
        (
            &["run", "--nonblock", "-E", "9", "f", "--", "true"],
            9,
            "sema: Lock already held\n",
        ),
        (
            &["run", "-w", "0.05", "f", "--", "true"],
            75,
            "sema: Timeout waiting for lock\n",
        ),
        (&["acquire", "-n", "f"], 1, "Timeout waiting for lock\n"),
        (
            &["acquire", "f", "-w", "50ms"],
            1,
            "Timeout waiting for lock\n",
        ),
    ] {
        let output = place.sema(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        assert!(text(&output.stderr).starts_with(line), "{output:?}");
    }
    assert_eq!(place.status(&["run", "g", "-n", "--", "true"]), 0);
    assert_eq!(place.status(&["run", "g", "-w", "5", "--", "true"]), 0);
}

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
                .current_dir(place.directory.path())
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

fn complaint(mut child: Child) -> String {
    let mut said = String::new();
    let stderr = child.stderr.as_mut().expect("piped");
    stderr.read_to_string(&mut said).expect("text");
    said
}

#[test]
fn hold_keeps_the_lock_until_its_input_is_closed() {
    let place = Place::new();
    let (mut hold, stdin, line) = held(&place, &["--tag", "release 7", "-q"]);
    assert_eq!(line, "f\n");
    assert!(place.read("f").contains("tag=release 7\n"));
    assert_eq!(place.status(&["try", "f"]), 1);
    assert_eq!(place.status(&["release", "f"]), 1);
    drop(stdin);
    assert_eq!(wait(&mut hold), Some(0));
    assert_eq!(place.names(), [""; 0]);
    assert_eq!(complaint(hold), "");
    let (mut hold, _, line) = held(&place, &["--slots", "2", "--json"]);
    assert!(line.starts_with(r#"{"acquired":true,"path":"f.0.lock","pid":"#));
    assert_eq!(wait(&mut hold), Some(0));
}

#[test]
fn a_signal_or_the_loss_of_the_lock_ends_hold() {
    let place = Place::new();
    let (mut hold, _stdin, _) = held(&place, &[]);
    signal(&hold, Signal::TERM);
    assert_eq!(shell_status(hold.wait().expect("a child")), Some(143));
    assert_eq!(place.names(), [""; 0]);
    let (mut hold, _stdin, _) = held(&place, &[]);
    fs::remove_file(place.path("f")).expect("it is there");
    assert_eq!(wait(&mut hold), Some(70));
    assert_eq!(complaint(hold), "sema: the lock was lost: f\n");
    // The lock of a holder that was killed is free at once.
    let (mut hold, _stdin, _) = held(&place, &[]);
    hold.kill().expect("it runs");
    hold.wait().expect("a child");
    assert_eq!(place.status(&["try", "f"]), 0);
}

#[test]
fn a_held_lock_is_75_for_hold_or_the_busy_status() {
    let place = Place::new();
    place.write("f", &format!("pid=1\ntimestamp={}\n", now()));
    let busy = "sema: Lock already held\n  Holder PID: 1\n";
    let abandoned = "sema: f: the standard input was closed before the grant\n";
    for (options, code, said) in [
        (&["-n"][..], 75, busy),
        (&["-n", "-E", "9"], 9, busy),
        // Its script has ended.
        (&[], 75, abandoned),
        (&["-E", "9"], 9, abandoned),
    ] {
        let output = place.sema(&[&["hold", "f"], options].concat());
        assert_eq!(output.status.code(), Some(code), "{options:?}");
        let stderr = text(&output.stderr);
        assert!(stderr.starts_with(said), "{options:?}: {stderr}");
        assert!(output.stdout.is_empty());
    }
    let full = File::options().write(true).open("/dev/full");
    let mut command = place.command("sema", &["hold", "g"]);
    let output = finish(command.stdout(full.expect("/dev/full")));
    assert_eq!(output.status.code(), Some(74));
    assert_eq!(place.names(), ["f"]);
}

#[test]
fn a_verbose_wait_says_who_holds_the_lock() {
    let place = Place::new();
    let since = now() - 180;
    let record = format!("pid=1\ntimestamp={since}\ntag=release 7\nx-host=elsewhere\n");
    place.write("f", &record);
    let commands: [&[&str]; 3] = [
        &["acquire", "f"],
        &["run", "f", "--", "true"],
        &["hold", "f"],
    ];
    let start = |arguments: &[&str], options: &[&str]| {
        let mut words = vec![arguments[0]];
        words.extend(options);
        words.extend(&arguments[1..]);
        let mut command = place.command("sema", &words);
        command.stdin(Stdio::piped()).spawn().expect("sema starts")
    };
    let quiet: Vec<Child> = [&[][..], &["-v", "-q"]]
        .iter()
        .flat_map(|options| commands.map(|command| start(command, options)))
        .collect();
    let talking = commands.map(|command| start(command, &["-v"]));
    for mut child in talking {
        let mut line = String::new();
        let stderr = child.stderr.as_mut().expect("piped");
        BufReader::new(stderr).read_line(&mut line).expect("text");
        let expected = "sema: waiting for f: held by pid 1 on elsewhere (release 7) for 3 m\n";
        assert_eq!(line, expected);
        child.kill().expect("it waits");
        child.wait().expect("a child");
    }
    for mut child in quiet {
        child.kill().expect("it waits");
        child.wait().expect("a child");
        assert_eq!(complaint(child), "");
    }
}

/// It is not a lock of flock(1), and names no holder that would release it.
#[test]
fn a_file_that_flock_left_is_said_to_name_no_holder() {
    let place = Place::new();
    place.write("f", "");
    let refused = place.sema(&["run", "f", "-n", "--", "true"]);
    assert_eq!(refused.status.code(), Some(BUSY));
    assert_eq!(
        text(&refused.stderr),
        concat!(
            "sema: Lock already held\n  Path: f\n  Note: ",
            names_no_holder!(),
            "\n"
        )
    );
    let mut command = place.command("sema", &["run", "f", "-v", "--", "true"]);
    let mut waiting = command.spawn().expect("sema starts");
    let mut line = String::new();
    let stderr = waiting.stderr.as_mut().expect("piped");
    BufReader::new(stderr).read_line(&mut line).expect("text");
    assert_eq!(
        line,
        concat!("sema: waiting for f: ", names_no_holder!(), "\n")
    );
    fs::remove_file(place.path("f")).expect("it is there");
    assert_eq!(wait(&mut waiting), Some(0));
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
        .current_dir(place.directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let screen = text(&finish(&mut command).stdout);
    let line = "\r\u{1b}[Ksema: waiting for f: held by pid 1 for ";
    assert!(screen.contains(line), "{screen:?}");
    assert!(screen.ends_with(" s\r\u{1b}[Kdone\r\n"), "{screen:?}");
}

#[test]
fn sema_dies_of_the_signal_that_ended_its_command() {
    let place = Place::new();
    let (mut child, command) = place.started(&[], "exec sleep 60");
    assert_eq!(place.status(&["try", "f"]), 1);
    signal(&child, Signal::USR1);
    assert_eq!(wait(&mut child), Some(138));
    let status = child.wait().expect("it has ended");
    assert_eq!(status.signal(), Some(Signal::USR1.as_raw()));
    assert!(is_gone(command));
    assert_eq!(place.names(), [""; 0]);
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

#[test]
fn after_kill_9_of_sema_the_command_keeps_the_lock() {
    let place = Place::new();
    // The guard tells the command to end, but this one takes its time.
    let script = "trap '' TERM; while ! [ -e go ]; do sleep 0.01; done";
    let (mut child, command) = place.started(&["--kill-after", "60"], script);
    signal(&child, Signal::KILL);
    wait(&mut child);
    // The age of the record does not matter.
    let record = place.read("f").replace(
        &format!("timestamp={}", &now().to_string()[..5]),
        "timestamp=10000",
    );
    place.write("f", &record);
    age(&place.path("f"), TWO_HOURS);
    assert!(!is_gone(command));
    for arguments in [
        &["try", "f", "--stale", "1"][..],
        &["try", "f", "--stale", "1", "--stale-rule", "age"],
        &["release", "f"],
        &["acquire", "f", "--timeout", "200ms"],
        &[
            "wait",
            "f",
            "--timeout",
            "0",
            "--stale",
            "1",
            "--stale-rule",
            "age",
        ],
    ] {
        assert_eq!(place.status(arguments), 1, "{arguments:?}");
    }
    let status = text(&place.sema(&["status", "f"]).stdout);
    assert!(status.contains("alive: yes\nstale: no\n"), "{status}");
    assert_eq!(place.status(&["clean", "f"]), 0);
    assert!(place.path("f").exists());
    let mut next = place.waiting(&["acquire", "f"]);
    place.write("go", "");
    eventually(PATIENCE, "the command has ended", || is_gone(command));
    // The record is young, but the kernel shows that no process holds the lock.
    assert_eq!(wait(&mut next), Some(0));
    assert!(!place.read("f").contains("x-live"));
}

#[test]
fn a_lost_lock_ends_the_command() {
    let place = Place::new();
    let options = ["--kill-after", "60", "--on-lost=term"];
    let (mut child, command) = place.started(&options, "exec sleep 60");
    fs::remove_file(place.path("f")).expect("it is there");
    assert_eq!(wait(&mut child), Some(70));
    assert!(is_gone(command));
    let output = child.wait_with_output().expect("its output");
    assert_eq!(text(&output.stderr), "sema: the lock was lost: f\n");
}

#[test]
fn a_replaced_lock_is_lost_and_its_new_file_stays() {
    let place = Place::new();
    let (mut child, command) = place.started(&[], "exec sleep 60");
    let theirs = format!("pid=1\ntimestamp={}\n", now());
    place.write("f.1.0123456789abcdef.tmp", &theirs);
    fs::rename(place.path("f.1.0123456789abcdef.tmp"), place.path("f")).expect("a rename");
    assert_eq!(wait(&mut child), Some(70));
    assert!(is_gone(command));
    assert_eq!(place.read("f"), theirs);
    assert_eq!(place.names(), ["f"]);
}

#[test]
fn the_lock_of_a_running_command_needs_force_to_release() {
    let place = Place::new();
    let (mut child, _) = place.started(&["--token", "t"], "exec sleep 60");
    let pid = child.id().to_string();
    for terms in [&["--quiet"][..], &["--pid", &pid], &["--token", "t"]] {
        let arguments = [&["release", "f"], terms].concat();
        assert_eq!(place.status(&arguments), 1, "{terms:?}");
    }
    assert_eq!(place.status(&["release", "f", "--force"]), 0);
    assert_eq!(wait(&mut child), Some(70));
    assert_eq!(place.names(), [""; 0]);
}

#[test]
fn the_longest_times_work() {
    let longest = u64::MAX.to_string();
    let place = Place::new();
    let options = [
        "--kill-after",
        &longest,
        "--stale",
        &longest,
        "--timeout",
        &longest,
    ];
    let (mut child, _) = place.started(&options, "exec sleep 60");
    fs::remove_file(place.path("f")).expect("it is there");
    assert_eq!(wait(&mut child), Some(70));
    assert_eq!(
        place.status(&["acquire", "f", "--timeout", &longest, "--stale", &longest]),
        0
    );
    assert_eq!(place.status(&["try", "f", "--stale", &longest]), 1);
}

#[test]
fn on_lost_ignore_lets_the_command_go_on() {
    let place = Place::new();
    let wait_for_go = "while ! [ -e go ]; do sleep 0.01; done; exit 5";
    let (mut child, command) = place.started(&["--on-lost", "ignore"], wait_for_go);
    fs::remove_file(place.path("f")).expect("it is there");
    // The new holder keeps the lock.
    assert_eq!(place.status(&["try", "f"]), 0);
    thread::sleep(Duration::from_millis(300));
    assert!(!is_gone(command));
    place.write("go", "");
    assert_eq!(wait(&mut child), Some(5));
    let output = child.wait_with_output().expect("its output");
    assert_eq!(text(&output.stderr), "sema: the lock was lost: f\n");
    assert!(place.path("f").exists());
}

#[test]
fn the_timestamp_is_refreshed_while_the_command_runs() {
    let place = Place::new();
    let (mut child, _) = place.started(&["--stale", "3"], "while ! [ -e go ]; do sleep 0.01; done");
    let timestamp = || {
        let record = place.read("f");
        let line = record.lines().nth(1).expect("a second line").to_owned();
        let since = record
            .lines()
            .find_map(|line| line.strip_prefix("x-since="));
        (line, since.expect("a time of grant").to_owned())
    };
    let first = timestamp();
    eventually(PATIENCE, "the timestamp moves", || timestamp().0 != first.0);
    let later = timestamp();
    assert_eq!(later.1, first.1, "the time of the grant stays");
    place.write("go", "");
    assert_eq!(wait(&mut child), Some(0));
}

#[test]
fn commands_under_one_lock_never_overlap() {
    let place = Place::new();
    let script = "echo in >> log; sleep 0.01; echo out >> log";
    let mut children: Vec<Child> = (0..20)
        .map(|_| {
            let arguments = ["run", "f", "--no-sync", "--", "sh", "-c", script];
            let mut command = place.command("sema", &arguments);
            command.spawn().expect("sema starts")
        })
        .collect();
    for child in &mut children {
        // On a busy machine, all the others may come first.
        assert_eq!(shell_status(wait_for_exit(child, 4 * PATIENCE)), Some(0));
    }
    let log = place.read("log");
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 40);
    assert!(lines.chunks(2).all(|pair| pair == ["in", "out"]), "{log}");
    assert_eq!(place.names(), ["log"]);
}

// ---------------------------------------------------------------------------------------------
// Other programs

#[test]
fn plain_shell_scripts_take_part() {
    let place = Place::new();
    let output = place.script(
        "set -C
         (echo pid=$$ > f) 2>/dev/null; echo $?
         sema try f -q; echo $?
         sema status f --json | grep -c 'contents unreadable'
         rm f
         sema try f -q; echo $?
         (echo pid=$$ > f) 2>/dev/null || echo taken
         rm f
         sema status f; sema run f -- sh -c 'set -C; (: > f) 2>/dev/null || echo taken'
         (: > f) && echo free",
    );
    assert_eq!(
        text(&output.stdout),
        "0\n1\n1\n0\ntaken\nlocked: false\ntaken\nfree\n",
        "{output:?}"
    );
}

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

#[test]
fn scripts_in_shell_and_python_understand_the_lock_file() {
    let python3 = needs!("python3");
    let place = Place::new();
    let output = place.script(
        "echo \"pid=$$\" > my.lock
         echo \"timestamp=$(date +%s)\" >> my.lock
         echo \"tag=shell-script\" >> my.lock
         sema status my.lock | grep -v -e timestamp -e age; sema release my.lock
         sema try my.lock -q --tag 'a=b c'; echo $$",
    );
    let output = text(&output.stdout);
    let lines: Vec<&str> = output.lines().collect();
    let [locked, pid, tag, alive, stale, released, shell] = lines[..] else {
        panic!("{output}")
    };
    assert_eq!(
        [locked, tag, alive, stale, released],
        [
            "locked: true",
            "tag: shell-script",
            "alive: yes",
            "stale: no",
            "Lock released: my.lock"
        ]
    );
    assert_eq!(pid, format!("pid: {shell}"));

    let python = "
import os
def fields(path):
    with open(path) as f:
        return dict(line.strip().split('=', 1) for line in f if '=' in line)
found = fields('my.lock')
print(found['pid'], found['tag'], int(found['timestamp']) > 1700000000)
try:
    os.open('my.lock', os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
except FileExistsError:
    print('held')
os.unlink('my.lock')
with open(os.open('my.lock', os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), 'w') as f:
    f.write('pid=%d\\ntimestamp=%d\\ntag=python\\n' % (1, int(found['timestamp'])))
";
    let output = finish(
        python3
            .command()
            .args(["-c", python])
            .current_dir(place.directory.path())
            .stdout(Stdio::piped()),
    );
    assert_eq!(text(&output.stdout), format!("{shell} a=b c True\nheld\n"));
    let status = text(&place.sema(&["status", "my.lock"]).stdout);
    assert!(
        status.contains("pid: 1\n") && status.contains("tag: python\n"),
        "{status}"
    );
}

#[test]
fn semats_and_sema_see_each_others_locks() {
    let place = Place::new();
    let output = place.script(
        "semats try-acquire f --tag ts-process >/dev/null
         sema status f | head -4; sema try f -q; echo $?
         sema release f; file-semaphore try f -q; semats try-acquire f | head -2
         semats release f; semats status f -j | head -2",
    );
    let stdout = text(&output.stdout);
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines[0], "locked: true");
    assert!(lines[1].starts_with("pid: ") && lines[2].starts_with("timestamp: "));
    assert_eq!(
        lines[3..],
        [
            "tag: ts-process",
            "1",
            "Lock released: f",
            "status: failed",
            "type: ALREADY_LOCKED",
            "status: released",
            "{",
            "  \"locked\": false,",
        ]
    );
}

#[test]
fn a_path_may_be_any_bytes_and_a_link_is_not_replaced() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let place = Place::new();
    let mut command = place.command("sema", &["try"]);
    let output = finish(command.arg(OsStr::from_bytes(b"a\xff\x1b")));
    assert_eq!(text(&output.stdout), "Lock acquired: a\\xff\\x1b\n");
    let mut command = place.command("sema", &["run"]);
    command.arg(OsStr::from_bytes(b"b\xff"));
    let output = finish(command.args(["--", "sh", "-c", "test -e \"$SEMA_PATH\" && echo there"]));
    assert_eq!(text(&output.stdout), "there\n");
    assert_eq!(place.status(&["try", "--", "-f"]), 0);
    assert!(place.path("-f").exists());

    symlink("target", place.path("link")).expect("a link");
    assert_eq!(place.status(&["try", "link"]), 0);
    assert!(place.path("target").exists(), "a link of ours is followed");
    assert_eq!(place.status(&["release", "link"]), 0);
    assert!(!place.path("target").exists() && place.path("link").is_symlink());
    let owner = fs::metadata(place.directory.path())
        .expect("a directory")
        .uid();
    assert_eq!(owner, rustix::process::geteuid().as_raw());
}
