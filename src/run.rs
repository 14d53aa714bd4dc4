//! Runs a command under a lock: process group, terminal, signals, exit status, and what happens when
//! the lock is lost.
//!
//! The command is a process group of its own, and has the terminal if we had it. It is started through a
//! second instance of this program ([`stage`]), which arranges for what a parent cannot arrange without
//! unsafe code: that the command gets SIGTERM should we die without a word, where that is wanted, and
//! that it has the terminal before it runs.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use crossbeam_channel::{at, never, select, unbounded, Receiver};
use nix::sys::signal::{SigSet, Signal as NixSignal};
use rustix::process::{
    getpgrp, getpid, getppid, kill_process, kill_process_group, set_child_subreaper,
    set_parent_process_death_signal, test_kill_process_group, wait, Pid, Signal, WaitOptions,
};
use rustix::termios::{tcgetpgrp, tcsetpgrp};
use signal_hook::consts::signal::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2,
};
use signal_hook::iterator::Signals;

/// The argument by which a program knows that it is to be the [`stage`].
const STAGE: &str = "--exec-stage";

/// What stands there for our process number if the command is not to end with us.
const NO_PARENT: &str = "-";

/// Exit status: the command was not found.
const NOT_FOUND: i32 = 127;
/// Exit status: the command was found, but could not be run.
const CANNOT_RUN: i32 = 126;
/// Exit status: the system failed us.
const SYSTEM_ERROR: i32 = 71;

/// The signals that are passed on to the command, and that end a wait for the lock.
const PASSED_ON: [i32; 6] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];

/// No patience is longer: the clock must be able to tell when it is over.
const LONGEST_PATIENCE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How often we look whether a process group is empty that is not ours to wait for.
const GROUP_POLL: Duration = Duration::from_millis(20);

/// The signals that have come. To be made before any other thread, on the main thread.
pub struct SignalWatch {
    signals: Receiver<i32>,
}

impl SignalWatch {
    /// Catches the signals from now on.
    ///
    /// # Errors
    ///
    /// If the system will not let us, or no thread can be had.
    pub fn new() -> io::Result<SignalWatch> {
        // We take the terminal back while we are in the background. Blocked, SIGTTOU does not stop us;
        // all threads to come inherit the mask, and the stage takes it off again.
        terminal_signal().thread_block()?;
        let mut caught = PASSED_ON.to_vec();
        caught.extend([SIGCHLD, SIGCONT, SIGTSTP]);
        let mut signals = Signals::new(caught)?;
        let (sender, receiver) = unbounded();
        std::thread::Builder::new()
            .name("signals".into())
            .stack_size(64 * 1024)
            .spawn(move || {
                for signal in signals.forever() {
                    if sender.send(signal).is_err() {
                        return;
                    }
                }
            })?;
        Ok(SignalWatch { signals: receiver })
    }

    /// Blocks until `event` has something, or until a signal says to give up.
    ///
    /// # Errors
    ///
    /// The signal.
    pub fn wait_for<T>(&self, event: &Receiver<T>) -> Result<T, i32> {
        loop {
            select! {
                recv(event) -> value => match value {
                    Ok(value) => return Ok(value),
                    Err(_) => panic!("the event's other end is gone"),
                },
                recv(self.signals) -> signal => match signal {
                    Ok(signal) if PASSED_ON.contains(&signal) => return Err(signal),
                    _ => {}
                },
            }
        }
    }
}

/// What to run, and how.
#[derive(Debug)]
pub struct Job<'a> {
    /// The command and its arguments; at least one word.
    pub command: &'a [OsString],
    /// What it finds in its environment besides ours.
    pub environment: &'a [(&'a str, OsString)],
    /// For how long it may go on after it was told to end.
    pub kill_after: Duration,
    /// What it inherits besides the standard streams: a lock that it holds together with us.
    pub inherited: Option<BorrowedFd<'a>>,
    /// What becomes of it if we die without a word.
    pub orphan: Orphan,
}

/// What becomes of a command whose parent was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Orphan {
    /// It gets SIGTERM: the lock goes with us.
    Ends,
    /// It goes on, since it holds the lock itself.
    GoesOn,
}

/// How a command under a lock has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this exit status; 128 + N if a signal N killed it.
    Exited(i32),
    /// By us, since the lock was lost.
    Lost,
}

/// Runs the job to its end, and sees to it that no process of its group outlives that. To be called on
/// the main thread. `lost` says when the lock is lost; `still_held` asks the server after we were stopped.
///
/// # Errors
///
/// If the job could not be started.
pub fn run(
    job: &Job<'_>,
    signals: &SignalWatch,
    lost: &Receiver<()>,
    still_held: impl Fn() -> bool,
) -> io::Result<Ended> {
    // What the command leaves behind in its group becomes our child, so that we learn of its end.
    let _ = set_child_subreaper(Some(getpid()));
    let terminal = Terminal::if_ours();
    let leader = start(job, terminal.is_some())?;
    let mut group = Group {
        leader,
        terminal,
        kill_after: job.kill_after,
        status: None,
        is_lost: false,
        kill_at: None,
    };
    let mut lost = Some(lost);
    loop {
        group.reap(&still_held);
        if let Some(ended) = group.ended() {
            return Ok(ended);
        }
        let wake_at = group.next_look().map_or_else(never, at);
        let no_loss = never();
        select! {
            recv(signals.signals) -> signal => match signal {
                Ok(signal) if PASSED_ON.contains(&signal) || signal == SIGTSTP => group.pass_on(signal),
                _ => {}
            },
            recv(lost.unwrap_or(&no_loss)) -> _ => {
                lost = None;
                group.lose();
            }
            recv(wake_at) -> _ => group.kill_if_due(),
        }
    }
}

fn start(job: &Job<'_>, has_terminal: bool) -> io::Result<Pid> {
    let mut stage = Command::new(env::current_exe()?);
    let parent = match job.orphan {
        Orphan::Ends => getpid().as_raw_nonzero().to_string(),
        Orphan::GoesOn => NO_PARENT.to_owned(),
    };
    // The copy, unlike the original, stays open when another program takes over. It is closed here once the
    // command has it.
    let _inherited = job.inherited.map(rustix::io::dup).transpose()?;
    stage
        .arg(STAGE)
        .arg(parent)
        .arg(if has_terminal { "terminal" } else { "-" })
        .args(job.command)
        .process_group(0);
    for (name, value) in job.environment {
        stage.env(name, value);
    }
    let child = stage.spawn()?;
    Ok(Pid::from_child(&child))
}

/// The second instance of the program, if this is one: makes itself the command, and never returns then.
/// To be called first thing in main.
pub fn stage(program: &str) {
    let mut arguments = env::args_os().skip(1);
    if arguments.next().as_deref() != Some(OsStr::new(STAGE)) {
        return;
    }
    let parent = arguments.next();
    let has_terminal = arguments.next().is_some_and(|word| word == "terminal");
    let Some(command) = arguments.next() else {
        std::process::exit(SYSTEM_ERROR);
    };
    if parent.as_deref() != Some(OsStr::new(NO_PARENT)) {
        end_with(parent.as_deref());
    }
    if has_terminal {
        if let Ok(terminal) = File::open("/dev/tty") {
            let _ = tcsetpgrp(&terminal, getpgrp());
        }
    }
    let _ = terminal_signal().thread_unblock();
    let error = Command::new(&command).args(arguments).exec();
    eprintln!(
        "{program}: {}: {}",
        command.to_string_lossy(),
        crate::escape::reason(&error)
    );
    let status = if error.kind() == io::ErrorKind::NotFound {
        NOT_FOUND
    } else {
        CANNOT_RUN
    };
    std::process::exit(status);
}

/// Arranges for this process to end when its parent does, whose number is given.
fn end_with(parent: Option<&OsStr>) {
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
    // It may have died before we asked to be told.
    let parent_now = getppid().map(|parent| parent.as_raw_nonzero().to_string());
    if parent != Some(OsStr::new(parent_now.as_deref().unwrap_or_default())) {
        std::process::exit(128 + SIGTERM);
    }
}

fn terminal_signal() -> SigSet {
    let mut set = SigSet::empty();
    set.add(NixSignal::SIGTTOU);
    set
}

/// The controlling terminal, which was ours when we started.
struct Terminal(File);

impl Terminal {
    fn if_ours() -> Option<Terminal> {
        let terminal = File::open("/dev/tty").ok()?;
        let is_ours = tcgetpgrp(&terminal).ok() == Some(getpgrp());
        is_ours.then_some(Terminal(terminal))
    }

    fn give_to(&self, group: Pid) {
        let _ = tcsetpgrp(&self.0, group);
    }

    fn take_back(&self) {
        let _ = tcsetpgrp(&self.0, getpgrp());
    }

    fn is_ours(&self) -> bool {
        tcgetpgrp(&self.0).ok() == Some(getpgrp())
    }
}

/// The command's process group, while any of it is left.
struct Group {
    /// The command itself; also the group's number.
    leader: Pid,
    terminal: Option<Terminal>,
    kill_after: Duration,
    /// How the command ended.
    status: Option<ExitStatus>,
    is_lost: bool,
    /// When patience is over, once the group was told to end.
    kill_at: Option<Instant>,
}

impl Group {
    /// Takes note of every child that has ended or stopped. As a subreaper, and as process 1, we have
    /// children that we did not start.
    fn reap(&mut self, still_held: &impl Fn() -> bool) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if pid != self.leader {
                continue;
            }
            if status.stopped() {
                self.stop_with_it(still_held);
            } else {
                self.status = Some(ExitStatus::from_raw(status.as_raw()));
                if let Some(terminal) = &self.terminal {
                    terminal.take_back();
                }
            }
        }
    }

    /// The command has stopped: so do we, and when we go on, it does so only if the lock is still ours.
    fn stop_with_it(&mut self, still_held: &impl Fn() -> bool) {
        if self.kill_at.is_some() {
            // Told to end, it shall not sleep over it.
            self.signal(Signal::CONT);
            return;
        }
        if let Some(terminal) = &self.terminal {
            terminal.take_back();
        }
        let _ = kill_process(getpid(), Signal::STOP);
        // Somebody has continued us, who knows how much later.
        if !still_held() {
            self.lose();
            return;
        }
        if let Some(terminal) = &self.terminal {
            // In the background (`bg`), the terminal is not ours to give.
            if terminal.is_ours() {
                terminal.give_to(self.leader);
            }
        }
        self.signal(Signal::CONT);
    }

    fn pass_on(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.signal(signal);
        }
    }

    fn lose(&mut self) {
        self.is_lost = true;
        self.end_it();
    }

    /// Tells the group to end, and sets a time for it.
    fn end_it(&mut self) {
        if self.kill_at.is_none() {
            self.signal(Signal::TERM);
            self.signal(Signal::CONT);
            self.kill_at = Some(Instant::now() + self.kill_after.min(LONGEST_PATIENCE));
        }
    }

    fn kill_if_due(&mut self) {
        if self
            .kill_at
            .is_some_and(|kill_at| kill_at <= Instant::now())
        {
            self.signal(Signal::KILL);
        }
    }

    /// How it all ended, once the command and all of its group are gone. What the command leaves
    /// behind in its group is told to end.
    fn ended(&mut self) -> Option<Ended> {
        let status = self.status?;
        if test_kill_process_group(self.leader).is_ok() {
            self.end_it();
            return None;
        }
        if self.is_lost {
            return Some(Ended::Lost);
        }
        let code = status
            .code()
            .or_else(|| status.signal().map(|signal| 128 + signal));
        Some(Ended::Exited(code.unwrap_or(SYSTEM_ERROR)))
    }

    /// When to look again without a signal: for the kill, and for the end of what is not our child.
    fn next_look(&self) -> Option<Instant> {
        let kill_at = self.kill_at?;
        Some(kill_at.max(Instant::now()).min(Instant::now() + GROUP_POLL))
    }

    fn signal(&self, signal: Signal) {
        // A group that is gone needs no signal.
        let _ = kill_process_group(self.leader, signal);
    }
}
