//! `latch` as a process of its own.

use std::fs;
use std::io::{Read, Write};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;

use rustix::fs::OFlags;
use rustix::process::{kill_process, test_kill_process, Pid};

use super::needs::skipped;
use super::{
    children_of, eventually, no_input, program, stat_of, wait_for_exit, Daemon, Signal, PATIENCE,
};

/// A running `latch`, killed when dropped: its command gets SIGTERM from the system then.
pub struct Latch(Child);

impl Latch {
    /// Starts `command`.
    pub fn start(command: &mut Command) -> Latch {
        Latch(
            command
                .spawn()
                .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}")),
        )
    }
}

impl Deref for Latch {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Latch {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        // Both fail only if the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command line of `latch` for a server, deaf to whatever the environment of the test says.
pub fn latch(daemon: &Daemon, arguments: &[&str]) -> Command {
    let mut command = Command::new(program("latch"));
    command
        .args(arguments)
        .env("LATCH_SERVER", daemon.addr().to_string())
        .env_remove("LATCH_AUTH_TOKEN_FILE")
        .env_remove("LATCH_TLS")
        .env_remove("LATCH_TLS_CA")
        .env_remove("LATCH_TLS_NAME")
        .stdin(no_input(arguments));
    command
}

/// What it prints, and its status.
pub fn run(daemon: &Daemon, arguments: &[&str]) -> Output {
    output(&mut latch(daemon, arguments))
}

/// What `command` prints, and its status, in bounded time.
pub fn output(command: &mut Command) -> Output {
    fed(command, &[])
}

/// What `command` prints, and its status, if it reads `input`. All three streams are served at
/// once.
pub fn fed(command: &mut Command, input: &[u8]) -> Output {
    if !input.is_empty() {
        command.stdin(Stdio::piped());
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Latch::start(command);
    let stdin = child.stdin.take();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        scope.spawn(|| {
            if let Some(mut stdin) = stdin {
                // A program may end without reading all of it.
                let _ = stdin.write_all(input);
            }
        });
        let [stdout, stderr] = [
            scope.spawn(|| all_of(stdout)),
            scope.spawn(|| all_of(stderr)),
        ];
        wait(&mut child);
        Output {
            status: child.wait().expect("it has ended"),
            stdout: stdout.join().expect("read"),
            stderr: stderr.join().expect("read"),
        }
    })
}

fn all_of(stream: Option<impl Read>) -> Vec<u8> {
    let mut content = Vec::new();
    let mut stream = stream.expect("piped");
    stream.read_to_end(&mut content).expect("a pipe");
    content
}

/// The exit status of a child, in bounded time; `None` if a signal ended it.
pub fn wait(child: &mut Child) -> Option<i32> {
    wait_for_exit(child, PATIENCE).code()
}

/// The exit status of a child as a shell has it, in bounded time.
pub fn wait_as_shell(child: &mut Child) -> Option<i32> {
    shell_status(wait_for_exit(child, PATIENCE))
}

/// Its exit status as a shell has it.
pub fn status(daemon: &Daemon, arguments: &[&str]) -> i32 {
    shell_status(run(daemon, arguments).status).expect("an exit status")
}

/// An exit status as a shell has it: 128 + N if signal N ended the process.
pub fn shell_status(status: ExitStatus) -> Option<i32> {
    let signal = status.signal().map(|signal| 128 + signal);
    status.code().or(signal)
}

/// Fills the pipe that `reader` reads, so that its writer finds no room.
pub fn fill(reader: &impl AsRawFd) {
    let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
    let nonblocking = OFlags::NONBLOCK.bits().try_into().expect("a flag");
    let mut options = fs::File::options();
    let mut pipe = options
        .write(true)
        .custom_flags(nonblocking)
        .open(path)
        .expect("a pipe");
    while pipe.write(&[b'.'; 4096]).is_ok() {}
}

/// Output as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Sends a signal to a child that has not been waited for.
pub fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("it runs");
}

/// Whether the lock `key` is held.
pub fn is_held(daemon: &Daemon, key: &str) -> bool {
    let stats = daemon.stats();
    let locks = stats["locks"].as_array().expect("a list");
    locks.iter().any(|lock| lock["key"] == key)
}

/// Starts a command under a lock and waits until it is ready; returns its process number. The
/// script says so with `eval "$READY"`.
pub fn started(
    daemon: &Daemon,
    key: &str,
    directory: &tempfile::TempDir,
    options: &[&str],
    script: &str,
) -> (Latch, Pid) {
    let mut arguments = vec!["run", key];
    arguments.extend(options);
    arguments.extend(["--", "sh", "-c", script]);
    ready(latch(daemon, &arguments), directory)
}

/// Starts a command and waits until a shell under it evaluates `$READY`; returns that shell's
/// number.
pub fn ready(mut command: Command, directory: &tempfile::TempDir) -> (Latch, Pid) {
    let file = directory.path().join("ready");
    let say = format!("echo $$ > {0}.new; mv {0}.new {0}", file.display());
    // SIGQUIT must not leave a core dump behind.
    let child = Latch::start(command.env("READY", format!("ulimit -c 0; {say}")));
    let mut pid = None;
    eventually(PATIENCE, "the command runs", || {
        pid = number_in(&file);
        pid.is_some()
    });
    (child, pid.expect("just read"))
}

/// The process number in `file`, once the file has one.
pub fn number_in(file: &std::path::Path) -> Option<Pid> {
    let text = fs::read_to_string(file).ok()?;
    Pid::from_raw(text.trim().parse().ok()?)
}

/// Whether there is no such process, not even a zombie.
pub fn is_gone(pid: Pid) -> bool {
    test_kill_process(pid).is_err()
}

/// The state of a process as one letter, see proc(5); `None` if it is gone.
pub fn state(pid: Pid) -> Option<char> {
    let fields = stat_of(pid.as_raw_nonzero().get().unsigned_abs())?;
    fields[0].chars().next()
}

/// The exit status and the standard error of a latch whose streams are pipes.
pub fn ended(child: &mut Latch) -> (Option<i32>, String) {
    let status = wait_as_shell(child);
    let mut said = String::new();
    let mut stderr = child.stderr.take().expect("piped");
    stderr.read_to_string(&mut said).expect("text");
    (status, said)
}

/// The beginning of a command line that runs in new namespaces, with `more` flags. `None` if the
/// system allows no namespace.
pub fn process_1(more: &[&str]) -> Option<Command> {
    let unshare = "unshare";
    let mut flags = vec!["--pid", "--fork", "--mount-proc", "--kill-child"];
    flags.extend(more);
    if !rustix::process::geteuid().is_root() {
        flags.extend(["--user", "--map-root-user"]);
    }
    let probe = output(Command::new(unshare).args(&flags).arg("true"));
    if !probe.status.success() {
        skipped(&["PID namespace"]);
        return None;
    }
    let mut command = Command::new(unshare);
    command.args(flags).stdin(Stdio::null());
    Some(command)
}

/// The process that `unshare` started.
pub fn init_of(unshare: &Latch) -> Pid {
    children_of(unshare.id())[0]
}
