//! The guard: a second instance of this program, which ends the command's group if this program
//! is killed. The kernel tells only the command itself, not the processes that it has started.

use std::env;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::signal::SigSet;
use nix::unistd;
use rustix::pipe::{pipe_with, PipeFlags};
use rustix::process::{
    getpid, kill_process, kill_process_group, pidfd_send_signal, setsid, waitpid, Pid, Signal,
    WaitOptions,
};
use rustix::thread::set_name;

use crate::os::event::wait_until_readable;
use crate::os::moment::Moment;
use crate::os::output;
use crate::os::process;

use super::leftovers::{Look, Rest};
use super::{Job, Leftovers};

/// The first argument of the guard.
pub const GUARD: &str = "--guard";

/// How long a command runs before it gets a guard, so that short commands do not pay for one.
const START_AFTER: Duration = Duration::from_millis(200);

/// The pause before a guard that has ended is replaced, and how often that is done.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
const MAX_GUARDS: u32 = 3;

/// How often the guard checks the group. A process number is not used again while its group has a
/// process, so the guard must notice the end of the group before other processes can get its
/// number: the kernel needs seconds to reach the same number again.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// The highest descriptor that a guard closes if /proc does not list the open ones.
const MAX_UNLISTED_FD: RawFd = 1023;

/// This program's side of the guard. A drop ends the guard.
pub struct JobGuard<'a> {
    leader: Pid,
    job: &'a Job<'a>,
    /// The guard that runs, and the pipe that it reads. The pipe closes when this program ends.
    running: Option<(Pid, OwnedFd)>,
    start_at: Moment,
    ended_count: u32,
}

impl<'a> JobGuard<'a> {
    pub fn new(leader: Pid, job: &'a Job<'a>) -> JobGuard<'a> {
        JobGuard {
            leader,
            job,
            running: None,
            start_at: if getpid().is_init() {
                // With process 1, the kernel ends all processes of the container.
                Moment::NEVER
            } else {
                Moment::now() + START_AFTER
            },
            ended_count: 0,
        }
    }

    /// When to call [`JobGuard::start_if_due`].
    pub fn start_at(&self) -> Moment {
        self.start_at
    }

    pub fn start_if_due(&mut self) {
        if self.start_at > Moment::now() {
            return;
        }
        self.start_at = Moment::NEVER;
        match self.start() {
            Ok(guard) => self.running = Some(guard),
            Err(_) => self.note_end(),
        }
    }

    /// Handles the end of a child of this program, which may be the guard.
    pub fn reaped(&mut self, child: Pid) {
        if self.running.as_ref().is_some_and(|(pid, _)| *pid == child) {
            self.running = None;
            self.note_end();
        }
    }

    fn note_end(&mut self) {
        self.ended_count += 1;
        if self.ended_count < MAX_GUARDS {
            self.start_at = Moment::now() + RESTART_PAUSE;
            return;
        }
        let program = self.job.program;
        let if_killed = format!("if {program} is killed, processes of the command may run on");
        let message = format!("no guard process stays alive: {if_killed}");
        output::complain(program, message);
    }

    fn start(&self) -> io::Result<(Pid, OwnedFd)> {
        // Made after the start of the command, which therefore cannot inherit it.
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let mut guard = Command::new(self.job.program_file.path()?);
        let kill_after = self.job.kill_after.as_millis();
        guard
            .arg0(format!("{}-guard", self.job.program))
            .args([GUARD, &self.leader.to_string(), &kill_after.to_string()])
            .env_clear()
            // The output is not /dev/null, which a chroot may lack.
            .stdout(read.try_clone()?)
            .stderr(read.try_clone()?)
            .stdin(Stdio::from(read));
        Ok((Pid::from_child(&guard.spawn()?), write))
    }
}

impl Drop for JobGuard<'_> {
    fn drop(&mut self) {
        if let Some((pid, _pipe)) = self.running.take() {
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}

/// The life of the guard: waits until the program that started it has ended, and then ends the
/// group. `arguments` follow [`GUARD`].
pub fn guard(program: &str, arguments: &[String]) -> Option<()> {
    // The guard must not end, stop or be noticed by the job: systemd, for example, sends SIGTERM to
    // all processes of a service.
    SigSet::all().thread_set_mask().ok()?;
    let _ = setsid();
    let _ = env::set_current_dir("/");
    close_other_descriptors();
    let name = match program {
        "sema" => c"sema-guard",
        _ => c"latch-guard",
    };
    let _ = set_name(name);
    let [leader, kill_after] = arguments else {
        return None;
    };
    let leader: u32 = leader.parse().ok()?;
    let kill_after = Duration::from_millis(kill_after.parse().unwrap_or(u64::MAX));
    let target = GuardedGroup {
        group: Pid::from_raw(leader.try_into().ok()?)?,
        command: process::pidfd(leader).ok(),
    };
    let _ = io::stdin().read_to_end(&mut Vec::new());
    target.end(kill_after);
    Some(())
}

/// Closes all descriptors but the standard streams. The program that started this one may have been
/// given others, such as a pipe whose reader waits for its end.
fn close_other_descriptors() {
    let listed = fs::read_dir("/proc/self/fd").map(|entries| {
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter_map(|name| name.parse().ok()).collect()
    });
    let open: Vec<RawFd> = listed.unwrap_or_else(|_| (0..=MAX_UNLISTED_FD).collect());
    for descriptor in open.into_iter().filter(|descriptor| *descriptor > 2) {
        let _ = unistd::close(descriptor);
    }
}

/// What the guard ends.
struct GuardedGroup {
    group: Pid,
    /// The command, which may have left its group; `None` if the kernel has no pidfds.
    command: Option<OwnedFd>,
}

impl GuardedGroup {
    /// Sends SIGTERM, and SIGKILL after a time. Returns when all have ended.
    fn end(&self, kill_after: Duration) {
        let kill_at = Moment::now() + kill_after;
        let mut is_killed = false;
        self.signal(Signal::TERM);
        self.signal(Signal::CONT);
        let mut rest = Rest::new(Leftovers::End);
        while self.command().is_some() || !matches!(rest.look(self.group, true), Look::Empty) {
            if kill_at <= Moment::now() && !is_killed {
                self.signal(Signal::KILL);
                is_killed = true;
            }
            thread::sleep(LOOK_PAUSE);
        }
    }

    /// The command, if it has not ended.
    fn command(&self) -> Option<impl AsFd + '_> {
        let now = std::time::Instant::now();
        let command = self.command.as_ref();
        command.filter(|command| !wait_until_readable(command, now))
    }

    fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.group, signal);
        if let Some(command) = self.command() {
            // A member of the group gets the signal twice, which has the effect of one.
            let _ = pidfd_send_signal(command, signal);
        }
    }
}
