//! A lock, and the wrapper that runs a command under it.

use std::fs::{self, File, Permissions};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::{mkfifoat, open, Mode, OFlags, CWD};
use rustix::process::{kill_process, kill_process_group, Pid, Signal};

use crate::support::inherited::INHERITS;
use crate::support::latch::{fed, number_in, process_1, shell_status, state, text};
use crate::support::limited::copy_program;
use crate::support::needs::has_pidfds;
use crate::support::{children_of, eventually, PATIENCE};
use crate::wrapper::{GRANT, LOCK, LOSS, WAITING, WRAPPER};

/// Writes the number of a shell to the file `ready`. `$READY` in a script stands for it.
const READY: &str = "echo $$ >$DIR/new; mv $DIR/new $DIR/ready";

/// Waits until the file `go` is there. `$WAIT` in a script stands for it.
const WAIT: &str = "until [ -e $DIR/go ]; do sleep 0.02; done";

pub fn script_of(text: &str) -> String {
    text.replace("$READY", READY).replace("$WAIT", WAIT)
}

/// A folder with the named pipes of one lock. Shells that have its variables find the wrapper as
/// `under`.
pub struct Lock {
    folder: tempfile::TempDir,
    pipe: OwnedFd,
}

impl Lock {
    pub fn new() -> Lock {
        Lock::with(|program, name| symlink(program, name).expect("a link"))
    }

    /// A lock that every user can take with [`as_nobody`].
    pub fn for_all() -> Lock {
        let lock = Lock::with(|program, name| copy_program(program, name));
        for name in ["", "bin", LOCK, LOSS] {
            let mode = Permissions::from_mode(0o777);
            fs::set_permissions(lock.file(name), mode).expect("it is ours");
        }
        lock
    }

    fn with(put: impl Fn(&Path, &Path)) -> Lock {
        let folder = tempfile::tempdir().expect("a folder");
        for name in [LOCK, LOSS] {
            mkfifoat(CWD, folder.path().join(name), Mode::RWXU).expect("a pipe");
        }
        let bin = folder.path().join("bin");
        fs::create_dir(&bin).expect("a folder");
        let program = std::env::current_exe().expect("this program");
        put(&program, &bin.join(WRAPPER));
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let path = folder.path().join(LOCK);
        let pipe = open(&path, flags, Mode::empty()).expect("a pipe");
        // Free, and not only untouched: the reader is at the end of input.
        File::options().write(true).open(path).expect("a pipe");
        Lock { folder, pipe }
    }

    /// Has the wrapper wait for the lock until [`Lock::grant`].
    pub fn hold(&self) {
        mkfifoat(CWD, self.file(GRANT), Mode::RWXU).expect("a pipe");
    }

    /// Grants a lock that the wrapper waits for. Returns what keeps it granted for others.
    pub fn grant(&self) -> File {
        let pipe = File::options().write(true).open(self.file(GRANT));
        pipe.expect("a pipe")
    }

    /// The variables of a shell that finds the wrapper.
    pub fn variables(&self) -> [(&'static str, String); 4] {
        let path = std::env::var("PATH").unwrap_or_default();
        [
            ("DIR", self.folder.path().display().to_string()),
            ("PATH", format!("{}:{path}", self.file("bin").display())),
            ("READY", READY.to_owned()),
            (INHERITS, "yes".to_owned()),
        ]
    }

    /// A program that finds the wrapper.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .envs(self.variables())
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
        command
    }

    /// The status of a shell script, what it prints, and its errors behind a `!`.
    pub fn output(&self, script: &str) -> String {
        let output = fed(self.command("sh").args(["-c", &script_of(script)]), b"in");
        let status = shell_status(output.status).expect("one");
        let [out, err] = [output.stdout, output.stderr].map(|it| text(&it));
        let mut said = format!("{status} {out}");
        if !err.is_empty() {
            said += &format!("! {err}");
        }
        let folder = self.folder.path().to_str().expect("text");
        said.replace(folder, "DIR").trim_end().to_owned()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn touch(&self, name: &str) {
        fs::write(self.file(name), "").expect("a file");
    }

    pub fn lines(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.file(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits for a process number in a file.
    pub fn number(&self, name: &str) -> Pid {
        let mut number = None;
        eventually(PATIENCE, "a process number", || {
            number = number_in(&self.file(name));
            number.is_some()
        });
        number.expect("just read")
    }

    pub fn lose(&self) {
        let pipe = File::options().write(true).open(self.file(LOSS));
        pipe.expect("a pipe");
    }

    pub fn is_locked(&self) -> bool {
        let now = Timespec::default();
        let mut polled = [PollFd::new(&self.pipe, PollFlags::IN)];
        poll(&mut polled, Some(&now)).expect("a pipe") == 0
    }
}

/// The wrapper, which is killed when dropped, and its command's group, too.
pub struct Wrapper {
    lock: Arc<Lock>,
    pub child: Child,
}

impl Deref for Wrapper {
    type Target = Lock;

    fn deref(&self) -> &Lock {
        &self.lock
    }
}

impl Wrapper {
    /// Starts a program that is the wrapper or becomes it, in a group of its own: the test is its
    /// shell with job control. Waits until the wrapper waits for a lock that is held, and else for
    /// the number that `script` writes with `$READY`, if it does so.
    fn start(lock: Arc<Lock>, script: &str, command: &mut Command) -> Wrapper {
        let child = command
            .stdout(Stdio::null())
            .stderr(File::create(lock.file("stderr")).expect("a file"))
            .process_group(0)
            .spawn()
            .expect("the wrapper");
        let wrapper = Wrapper { lock, child };
        if wrapper.file(GRANT).exists() {
            eventually(PATIENCE, "the wrapper waits", || {
                wrapper.file(WAITING).exists()
            });
        } else if script.contains("$READY") {
            wrapper.command();
        }
        wrapper
    }

    /// Starts a shell script that becomes the wrapper.
    pub fn shell(lock: Arc<Lock>, script: &str) -> Wrapper {
        let mut shell = lock.command("sh");
        shell.args(["-c", &script_of(script)]);
        Wrapper::start(lock, script, &mut shell)
    }

    /// Starts a shell script as process 1 of a namespace, which becomes the wrapper. The numbers of
    /// its processes are those of others here.
    pub fn unshared(lock: Arc<Lock>, script: &str) -> Wrapper {
        assert!(!script.contains("$READY"));
        let mut command = process_1(&[]).expect("it is possible");
        let variables = lock.variables();
        command
            .envs(variables)
            .args(["sh", "-c", &script_of(script)]);
        Wrapper::start(lock, script, &mut command)
    }

    /// Runs a shell script under the lock. The options are the leftovers, and behind a slash the
    /// time before SIGKILL in seconds; no test waits for the default.
    pub fn script(lock: Arc<Lock>, options: &str, script: &str) -> Wrapper {
        let (leftovers, kill_after) = options.split_once('/').unwrap_or((options, "60"));
        let mut command = lock.command(WRAPPER);
        command
            .env("LEFTOVERS", leftovers)
            .env("KILL_AFTER", kill_after)
            .args(["sh", "-c", &script_of(script)]);
        Wrapper::start(lock, script, &mut command)
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The process that writes its number with `$READY`, which leads its group.
    pub fn command(&self) -> Pid {
        self.number("ready")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it runs");
    }

    /// The status, once the wrapper has ended.
    pub fn end(&mut self) -> ExitStatus {
        let mut status = None;
        eventually(PATIENCE, "the wrapper ends", || {
            status = self.child.try_wait().expect("a child");
            status.is_some()
        });
        status.expect("just set")
    }

    /// The status as a shell has it, once the wrapper has ended.
    pub fn status(&mut self) -> i32 {
        shell_status(self.end()).expect("one")
    }

    pub fn said(&self) -> String {
        fs::read_to_string(self.file("stderr")).expect("a file")
    }

    /// The guard, once the wrapper has started it and it waits.
    pub fn guard(&self) -> Pid {
        let find = || {
            let mut children = children_of(self.child.id()).into_iter();
            children.find(|pid| {
                let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()));
                name.is_ok_and(|name| name == "latch-guard\n")
            })
        };
        eventually(PATIENCE, "a guard", || find().is_some());
        let guard = find().expect("just found");
        // It opens its pidfd at its start, and reads then: it has that and the streams.
        let least = 3 + usize::from(has_pidfds());
        let fds = format!("/proc/{}/fd", guard.as_raw_nonzero());
        eventually(PATIENCE, "the guard waits", || {
            let count = fs::read_dir(&fds).map_or(0, Iterator::count);
            state(guard) == Some('S') && count >= least
        });
        guard
    }
}

impl Drop for Wrapper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(command) = number_in(&self.file("ready")) {
            let _ = kill_process_group(command, Signal::KILL);
        }
    }
}

/// A process outside the group, killed when dropped.
pub struct Stray(pub Pid);

impl Drop for Stray {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

pub fn has_stopped(pid: Pid) -> bool {
    state(pid) == Some('T')
}

/// Whether a process has ended. A zombie has: another process must reap it.
pub fn has_ended(pid: Pid) -> bool {
    matches!(state(pid), None | Some('Z'))
}

/// What a script puts before a command to run it as a user who owns nothing here.
pub fn as_nobody() -> &'static str {
    if rustix::process::geteuid().is_root() {
        "setpriv --reuid=65534 --regid=65534 --clear-groups"
    } else {
        "env"
    }
}
