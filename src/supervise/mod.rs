//! Runs a command under a lock: process group, terminal, signals, exit status, and what happens when
//! the lock is lost.
//!
//! The command is a process group of its own, and has the terminal if we had it: at once, or in a
//! pipeline when it asks for it. It is started through a second instance of this program
//! ([`stage`]), which arranges for what a parent cannot arrange without unsafe code: that the
//! command gets SIGTERM should we die without a word, where that is wanted, and that it has the
//! terminal before it runs.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal as NixSignal};
use nix::unistd;
use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::{fstat, FileType};
use rustix::io::Errno;
use rustix::process::{
    getpgrp, getpid, getppid, kill_process, kill_process_group, set_child_subreaper,
    set_dumpable_behavior, set_parent_process_death_signal, test_kill_process_group, wait,
    DumpableBehavior, Pid, Signal, WaitOptions,
};
use rustix::termios::{tcgetpgrp, tcsetpgrp};
use signal_hook::consts::signal::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU, SIGUSR1, SIGUSR2,
};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;
use signal_hook::low_level::emulate_default_handler;

use crate::sys::process;

/// The argument by which a program knows that it is to be the [`stage`].
const STAGE: &str = "--exec-stage";

/// This program, also after another version has been installed in its place: to wait for a lock can
/// take days.
const THIS_PROGRAM: &str = "/proc/self/exe";

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

/// Those of them that ask for the end.
const ENDING: [i32; 4] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];

/// More than anybody waits, and less than an `Instant` can bear.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// How often we look whether a process group is empty that is not ours to wait for.
const GROUP_POLL: Duration = Duration::from_millis(20);

/// Something that one thread tells another, which polls for it.
#[derive(Clone, Debug)]
pub struct Event(Arc<OwnedFd>);

impl Event {
    /// Not set yet.
    pub fn new() -> io::Result<Event> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Event(Arc::new(eventfd(0, flags)?)))
    }

    /// Sets it, until it is taken.
    pub fn set(&self) {
        // Fails only where the counter is full, and then it is set.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Whether it was set since it was last asked.
    pub fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

/// The signals that have come. To be made before any other thread, on the main thread.
pub struct SignalWatch {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
}

impl SignalWatch {
    /// Catches the signals from now on.
    ///
    /// # Errors
    ///
    /// If the system will not let us.
    pub fn new() -> io::Result<SignalWatch> {
        // We take the terminal back while we are in the background. Blocked, SIGTTOU does not stop us.
        // What was blocked when we were started is not any more: the end of the command is a signal, too.
        // All threads to come inherit the mask, and the stage takes it off again.
        SigSet::from(NixSignal::SIGTTOU).thread_set_mask()?;
        let ignored = process::ignored_signals();
        let mut caught = PASSED_ON.to_vec();
        caught.push(SIGTSTP);
        // What we are to ignore (nohup, a shell's background), the command is to ignore as well. It
        // would not if we caught it.
        caught.retain(|signal| ignored & (1 << (signal - 1)) == 0);
        caught.extend([SIGCHLD, SIGCONT]);
        let (read, write) = UnixStream::pair()?;
        let delivery = SignalDelivery::with_pipe(read, write, SignalOnly, caught)?;
        Ok(SignalWatch { delivery })
    }

    /// Blocks until `event` is set, or until a signal says to give up. Reaps meanwhile what process
    /// 1 has to reap.
    ///
    /// # Errors
    ///
    /// The signal.
    pub fn wait_for(&mut self, event: &Event) -> Result<(), Killed> {
        loop {
            while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
            for signal in self.next(&[event], None) {
                match signal {
                    SIGTSTP if somebody_can_continue_us() => {
                        let _ = kill_process(getpid(), Signal::STOP);
                    }
                    signal if PASSED_ON.contains(&signal) => {
                        return Err(Killed {
                            signal,
                            keyboard: Keyboard::Ours,
                        });
                    }
                    _ => {}
                }
            }
            if event.take() {
                return Ok(());
            }
        }
    }

    /// Sleeps until one of the events is set, until an instant, or until a signal comes, and gives
    /// the signals that have come.
    fn next(&mut self, events: &[&Event], until: Option<Instant>) -> Vec<i32> {
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let events = events.iter().map(|event| &*event.0);
        let mut watched: Vec<PollFd<'_>> = events
            .map(|event| PollFd::new(event, PollFlags::IN))
            .collect();
        watched.push(PollFd::new(self.delivery.get_read(), PollFlags::IN));
        // An interrupted poll is one that a signal has ended.
        let _ = poll(&mut watched, timeout.as_ref());
        self.delivery.pending().collect()
    }
}

/// The end of the command, or of the wait for its lock, by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Killed {
    signal: i32,
    keyboard: Keyboard,
}

/// To whom the terminal belonged when a signal came that may have been typed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keyboard {
    /// To our process group, which has seen what we have seen.
    Ours,
    /// To the command's, and ours has not seen the key.
    Lent,
}

impl Killed {
    /// Ends this process by the same signal, if it is one that is passed on: a shell that ran it
    /// can tell that from an exit, and ends its loop or its script after Ctrl-C. To be called after
    /// all else is done. Gives the exit status that says the same where the process goes on.
    pub fn follow(self) -> u8 {
        let typed = [(SIGINT, Signal::INT), (SIGQUIT, Signal::QUIT)];
        let typed = typed.iter().find(|(number, _)| *number == self.signal);
        if let (Some((_, signal)), Keyboard::Lent, Some(group)) =
            (typed, self.keyboard, our_group())
        {
            // The script that we are in, or the rest of our pipeline.
            let _ = kill_process_group(group, *signal);
        }
        // No signal that process 1 sends itself ends it.
        if PASSED_ON.contains(&self.signal) && getpid() != Pid::INIT {
            // If there is a core to be seen, it is the command's.
            let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            let _ = emulate_default_handler(self.signal);
        }
        u8::try_from(128 + self.signal).unwrap_or(u8::MAX)
    }
}

/// Whether a shell with job control looks after us. If not, nobody would continue us after Ctrl-Z: the
/// system itself discards that signal then, and so do we.
fn somebody_can_continue_us() -> bool {
    let ours = (unistd::getsid(None), unistd::getpgrp());
    let mut ancestor = getppid();
    while let Some(pid) = ancestor {
        let number = pid.as_raw_nonzero().get();
        let its = unistd::Pid::from_raw(number);
        if unistd::getsid(Some(its)) != ours.0 {
            return false;
        }
        if unistd::getpgid(Some(its)) != Ok(ours.1) {
            return true;
        }
        ancestor = process::stat(number.unsigned_abs()).and_then(|stat| Pid::from_raw(stat.parent));
    }
    false
}

/// Our process group; `None` if it is not of our namespace, where it has no number.
fn our_group() -> Option<Pid> {
    Pid::from_raw(unistd::getpgrp().as_raw())
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
    /// By itself, with this exit status.
    Exited(i32),
    /// By a signal.
    Killed(Killed),
    /// By us, since the lock was lost.
    Lost,
}

/// The lock that a command runs under, as far as the loop that waits for the command has to know.
pub struct HeldLock<'a> {
    /// Set when it is lost.
    pub lost: &'a Event,
    /// Set when it was found to be held after a look.
    pub confirmed: &'a Event,
    /// Looks whether it is still held, without blocking. One of the events is set then, or later.
    pub look: &'a dyn Fn(),
}

/// Runs the job to its end, and sees to it that no process of its group outlives that. To be called on
/// the main thread.
///
/// # Errors
///
/// If the job could not be started.
pub fn run(job: &Job<'_>, signals: &mut SignalWatch, lock: &HeldLock<'_>) -> io::Result<Ended> {
    // What the command leaves behind in its group becomes our child, so that we learn of its end.
    let _ = set_child_subreaper(Some(getpid()));
    let terminal = Terminal::open();
    let lending = Lending::by_the_streams();
    let has_terminal =
        lending == Lending::Unasked && terminal.as_ref().is_some_and(Terminal::is_ours);
    let leader = start(job, has_terminal)?;
    let mut group = Group {
        leader,
        terminal,
        lending,
        lock,
        kill_after: job.kill_after,
        status: None,
        keyboard: Keyboard::Ours,
        passed_on: None,
        is_resuming: false,
        is_lost: false,
        kill_at: None,
        is_killed: false,
    };
    loop {
        group.reap();
        if let Some(ended) = group.ended() {
            return Ok(ended);
        }
        for signal in signals.next(&[lock.lost, lock.confirmed], group.next_look()) {
            group.hear(signal);
        }
        if lock.lost.take() {
            group.lose();
        }
        if lock.confirmed.take() {
            group.resume();
        }
        group.kill_if_due();
    }
}

/// Looks whether a command can be started at all, before anybody waits for its lock.
///
/// # Errors
///
/// If the program has no second instance to start, since /proc is not mounted.
pub fn check_proc() -> Result<(), String> {
    match fs::metadata(THIS_PROGRAM) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{THIS_PROGRAM}: {}", crate::text::reason(&error))),
    }
}

fn start(job: &Job<'_>, has_terminal: bool) -> io::Result<Pid> {
    let mut stage = Command::new(THIS_PROGRAM);
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
    let _ = SigSet::empty().thread_set_mask();
    let mut error = Command::new(&command).args(arguments).exec();
    if error.kind() == io::ErrorKind::PermissionDenied && is_nowhere_in_the_path(&command) {
        error = Errno::NOENT.into();
    }
    // Where nobody can hear that, the status still says it.
    let _ = writeln!(
        io::stderr(),
        "{program}: {}: {}",
        crate::text::Plain(command.as_bytes()),
        crate::text::reason(&error)
    );
    let status = if error.kind() == io::ErrorKind::NotFound {
        NOT_FOUND
    } else {
        CANNOT_RUN
    };
    std::process::exit(status);
}

/// Whether a shell would not find the command. The system tells of a directory of the path which may not
/// be searched, and of a file which may not be executed, in the same way.
fn is_nowhere_in_the_path(command: &OsStr) -> bool {
    let Some(path) = env::var_os("PATH").filter(|_| !command.as_bytes().contains(&b'/')) else {
        return false;
    };
    !env::split_paths(&path).any(|directory| directory.join(command).exists())
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

/// The controlling terminal. It can be ours at one time (`fg`) and somebody else's at another (`bg`).
struct Terminal(File);

impl Terminal {
    fn open() -> Option<Terminal> {
        File::open("/dev/tty").ok().map(Terminal)
    }

    fn is_ours(&self) -> bool {
        our_group().is_some_and(|group| self.is_of(group))
    }

    fn is_of(&self, group: Pid) -> bool {
        tcgetpgrp(&self.0) == Ok(group)
    }

    /// Whether it is the group's now.
    fn give_to(&self, group: Pid) -> bool {
        tcsetpgrp(&self.0, group).is_ok()
    }

    /// Takes it back from a group that had it from us, or from what that has left. In the background it
    /// is the shell's, which would lose its terminal and end.
    fn take_back_from(&self, group: Pid) {
        let (Ok(owner), Some(ours)) = (tcgetpgrp(&self.0), our_group()) else {
            return;
        };
        if owner == group || test_kill_process_group(owner) == Err(Errno::SRCH) {
            let _ = tcsetpgrp(&self.0, ours);
        }
    }
}

/// When the command gets the terminal, if we have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lending {
    /// Before it runs.
    Unasked,
    /// Once it has stopped for want of it.
    OnDemand,
}

impl Lending {
    /// In a pipeline another program may read the terminal: a pager behind the command, for
    /// instance. That would stop, and the whole job with it, if the command had the terminal.
    fn by_the_streams() -> Lending {
        let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
        let is_in_a_pipeline = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]
            .into_iter()
            .filter_map(|stream| fstat(stream).ok())
            .map(|stat| FileType::from_raw_mode(stat.st_mode))
            .any(|kind| matches!(kind, FileType::Fifo | FileType::Socket));
        match is_in_a_pipeline {
            true => Lending::OnDemand,
            false => Lending::Unasked,
        }
    }
}

/// The command's process group, while any of it is left.
struct Group<'a> {
    /// The command itself; also the group's number.
    leader: Pid,
    terminal: Option<Terminal>,
    lending: Lending,
    lock: &'a HeldLock<'a>,
    kill_after: Duration,
    /// How the command ended.
    status: Option<ExitStatus>,
    /// Whose the terminal was when it ended.
    keyboard: Keyboard,
    /// The signal that was passed on last.
    passed_on: Option<i32>,
    /// Whether it is stopped and we are not, since we look whether the lock is still held.
    is_resuming: bool,
    is_lost: bool,
    /// When patience is over, once the group was told to end.
    kill_at: Option<Instant>,
    is_killed: bool,
}

impl Group<'_> {
    /// Takes note of every child that has ended or stopped. As a subreaper, and as process 1, we have
    /// children that we did not start.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if pid != self.leader {
                continue;
            }
            if let Some(stopped_by) = status.stopping_signal() {
                self.stop_with_it(stopped_by);
            } else {
                self.status = Some(ExitStatus::from_raw(status.as_raw()));
                if let Some(terminal) = &self.terminal {
                    if terminal.is_of(self.leader) {
                        self.keyboard = Keyboard::Lent;
                    }
                    terminal.take_back_from(self.leader);
                }
            }
        }
    }

    /// The command has stopped: so do we, and when we go on, it does so only if the lock is still ours.
    fn stop_with_it(&mut self, stopped_by: i32) {
        if self.kill_at.is_some() {
            // Told to end, it shall not sleep over it.
            self.signal(Signal::CONT);
            return;
        }
        let wants_terminal = [SIGTTIN, SIGTTOU].contains(&stopped_by);
        if wants_terminal && self.lend_terminal() {
            // `fg` has brought us to the foreground without a word.
            self.signal(Signal::CONT);
            return;
        }
        let is_job_control = wants_terminal || stopped_by == SIGTSTP;
        if is_job_control && !somebody_can_continue_us() {
            if wants_terminal {
                // It would ask again and again for what it cannot have.
                self.signal(Signal::HUP);
            }
            self.signal(Signal::CONT);
            return;
        }
        self.stop_and_look(is_job_control);
    }

    /// Stops us, and looks whether the lock is still held when somebody has continued us, who knows
    /// how much later.
    fn stop_and_look(&mut self, is_job_control: bool) {
        // What was found before the stop says nothing about the time after it.
        self.lock.confirmed.take();
        self.stop_ourselves(is_job_control);
        self.is_resuming = true;
        (self.lock.look)();
    }

    /// The lock is held: a command that was stopped can go on.
    fn resume(&mut self) {
        if self.is_resuming && self.kill_at.is_none() {
            self.is_resuming = false;
            if self.lending == Lending::Unasked {
                self.lend_terminal();
            }
            self.signal(Signal::CONT);
        }
    }

    fn hear(&mut self, signal: i32) {
        match signal {
            // We may have been stopped for longer than the lease.
            SIGCONT => (self.lock.look)(),
            SIGTSTP if self.is_resuming && somebody_can_continue_us() => self.stop_and_look(true),
            SIGCHLD => {}
            _ => self.pass_on(signal),
        }
    }

    fn stop_ourselves(&self, is_job_control: bool) {
        let had_terminal = self
            .terminal
            .as_ref()
            .is_some_and(|terminal| terminal.is_of(self.leader));
        if let Some(terminal) = &self.terminal {
            terminal.take_back_from(self.leader);
        }
        let _ = match our_group() {
            // Ctrl-Z is for the whole job: the script that we are in, or the rest of our pipeline. Those
            // have not seen it, for the terminal was the command's.
            Some(group) if is_job_control && had_terminal => {
                kill_process_group(group, Signal::STOP)
            }
            _ => kill_process(getpid(), Signal::STOP),
        };
    }

    /// Gives the terminal to the command if it is ours to give; in the background it is not.
    fn lend_terminal(&self) -> bool {
        self.terminal
            .as_ref()
            .is_some_and(|terminal| terminal.is_ours() && terminal.give_to(self.leader))
    }

    fn pass_on(&mut self, signal: i32) {
        self.passed_on = Some(signal);
        if let Some(named) = Signal::from_named_raw(signal) {
            self.signal(named);
        }
        if self.is_resuming && ENDING.contains(&signal) {
            // It must not go on with anything else: nobody knows whether the lock is still held.
            self.end_it();
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
            self.kill_at = Some(Instant::now() + self.kill_after.min(LONGEST));
        }
    }

    fn kill_if_due(&mut self) {
        let is_due = self
            .kill_at
            .is_some_and(|kill_at| kill_at <= Instant::now());
        if is_due && !self.is_killed {
            self.signal(Signal::KILL);
            self.is_killed = true;
        }
    }

    /// Whether anything of the group is left that could still do something. After the kill, these are
    /// not the dead whose parent has left the group and does not care for them: we would stay for as
    /// long as it lives.
    fn is_alive(&self) -> bool {
        test_kill_process_group(self.leader).is_ok() && (!self.is_killed || has_living(self.leader))
    }

    /// How it all ended, once the command and all of its group are gone. What the command leaves
    /// behind in its group is told to end.
    fn ended(&mut self) -> Option<Ended> {
        let status = self.status?;
        if self.is_alive() {
            self.end_it();
            return None;
        }
        if self.is_lost {
            return Some(Ended::Lost);
        }
        Some(match status.signal() {
            // What we had and have passed on was not typed.
            Some(signal) if self.passed_on == Some(signal) => Ended::Killed(Killed {
                signal,
                keyboard: Keyboard::Ours,
            }),
            Some(signal) => Ended::Killed(Killed {
                signal,
                keyboard: self.keyboard,
            }),
            None => Ended::Exited(status.code().unwrap_or(SYSTEM_ERROR)),
        })
    }

    /// When to look again without a signal: for the kill, and for the end of what is not our child.
    fn next_look(&self) -> Option<Instant> {
        let kill_at = self.kill_at.filter(|_| !self.is_killed);
        let soon = self.status.map(|_| Instant::now() + GROUP_POLL);
        kill_at.into_iter().chain(soon).min()
    }

    fn signal(&self, signal: Signal) {
        // A group that is gone needs no signal.
        let _ = kill_process_group(self.leader, signal);
    }
}

/// Whether a process of the group is more than a zombie, or one that is ours to wait for. If /proc cannot
/// tell, one is.
fn has_living(group: Pid) -> bool {
    let Some(processes) = process::all() else {
        return true;
    };
    processes
        .filter_map(process::stat)
        .filter(|stat| stat.group == group.as_raw_nonzero().get())
        .any(|stat| {
            let is_dead = matches!(stat.state, 'Z' | 'X');
            !is_dead || stat.parent == getpid().as_raw_nonzero().get()
        })
}
