//! The signals that a supervising program catches, and the signal that ends it.

use std::io;
use std::os::unix::net::UnixStream;

use nix::sys::signal::{SigSet, SigmaskHow, Signal as NixSignal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::process::{
    getpid, kill_process, kill_process_group, set_dumpable_behavior, wait, DumpableBehavior, Pid,
    Signal, WaitOptions,
};
use rustix_libc_wrappers::process::SignalExt;
use signal_hook::consts::signal::{
    SIGABRT, SIGBUS, SIGCHLD, SIGCONT, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGPIPE, SIGQUIT,
    SIGSEGV, SIGSTOP, SIGSYS, SIGTERM, SIGTRAP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH,
    SIGXFSZ,
};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;
use signal_hook::low_level::emulate_default_handler;

use crate::os::event::Event;
use crate::os::moment::{Alarm, Moment};
use crate::os::process::{self, is_in};

use super::terminal::{our_group, Foreground, TYPED};

/// The signals that are not passed on to the command: signals that no program can catch, signals
/// for job control and child processes, and signals that a fault or a write of this program causes.
const NOT_PASSED_ON: [i32; 16] = [
    SIGKILL, SIGSTOP, SIGCHLD, SIGCONT, SIGTSTP, SIGTTIN, SIGTTOU, SIGABRT, SIGBUS, SIGFPE, SIGILL,
    SIGSEGV, SIGSYS, SIGTRAP, SIGPIPE, SIGXFSZ,
];

/// Whether a signal is passed on to the command, as all others are, including real-time signals.
fn is_passed_on(signal: i32) -> bool {
    Signal::from_raw(signal).is_some() && !NOT_PASSED_ON.contains(&signal)
}

/// The signals that ask a program to end.
pub const ENDING: [i32; 4] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];

/// The signals that stop the processes of a job. They are blocked rather than caught, so that they
/// can still stop this program: see [`stop`].
pub const STOPPING: [NixSignal; 3] = [NixSignal::SIGTSTP, NixSignal::SIGTTIN, NixSignal::SIGTTOU];

/// Receives the signals of this process. Make it on the main thread, before any other thread
/// starts.
pub struct SignalWatch {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
    /// Reports the signals in [`STOPPING`], which are blocked.
    stops: SignalFd,
    alarm: Alarm,
}

impl SignalWatch {
    pub fn new() -> io::Result<SignalWatch> {
        let ignored = process::ignored_signals();
        // SIGTTOU is blocked, so that it does not stop us when we take the terminal back from the
        // background. An ignored SIGTSTP is not blocked, because a blocked signal would be reported
        // even though it is ignored. All other signals are unblocked, because SIGCHLD reports the
        // end of the command. Threads that start later inherit the mask, and so does the exec shim.
        let mut blocked = SigSet::from_iter(STOPPING);
        if is_in(ignored, SIGTSTP) {
            blocked.remove(NixSignal::SIGTSTP);
        }
        let before = blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        if before == SigSet::from_iter(TYPED) {
            // By fish, which ignores no signal for a job that a script starts with `&`.
            before.thread_block()?;
        }
        let stops = SignalFd::with_flags(&blocked, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let all = 1..=Signal::rt_max().as_raw();
        let mut caught: Vec<i32> = all.filter(|signal| is_passed_on(*signal)).collect();
        // A signal that is ignored at the start (by nohup, or by a shell for a background job)
        // stays ignored. The command also ignores it, because exec resets only caught signals.
        caught.retain(|signal| !is_in(ignored, *signal));
        caught.extend([SIGCHLD, SIGCONT]);
        let (read, write) = UnixStream::pair()?;
        let delivery = SignalDelivery::with_pipe(read, write, SignalOnly, caught)?;
        let alarm = Alarm::new()?;
        Ok(SignalWatch {
            delivery,
            stops,
            alarm,
        })
    }

    /// Blocks until one of the events is set, or until a signal ends the wait. Reaps children while
    /// it waits, because this program may be process 1 and have children that it did not start.
    pub fn wait_for(&mut self, events: &[&Event]) -> Result<(), Killed> {
        self.wait_until(events, Moment::NEVER)
    }

    /// Blocks in the same way as [`SignalWatch::wait_for`], at most until the moment `until`.
    pub fn wait_until(&mut self, events: &[&Event], until: Moment) -> Result<(), Killed> {
        loop {
            while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
            for signal in self.next(events, until) {
                match signal {
                    SIGTSTP | SIGTTIN | SIGTTOU if has_job_control() => stop(signal, None),
                    // By default, these do not end a program.
                    SIGWINCH | SIGURG => {}
                    signal if is_passed_on(signal) => {
                        let foreground = Foreground::Ours;
                        return Err(Killed { signal, foreground });
                    }
                    _ => {}
                }
            }
            if events.iter().any(|event| event.is_set()) || Moment::now() >= until {
                return Ok(());
            }
        }
    }

    /// Blocks until an event is set, a signal arrives, or the moment `until` has come. Returns the
    /// signals that have arrived.
    pub fn next(&mut self, events: &[&Event], until: Moment) -> Vec<i32> {
        self.alarm.set(until);
        let events = events.iter();
        let mut watched: Vec<PollFd<'_>> = events
            .map(|event| PollFd::new(*event, PollFlags::IN))
            .collect();
        watched.push(PollFd::new(self.delivery.get_read(), PollFlags::IN));
        watched.push(PollFd::new(&self.stops, PollFlags::IN));
        watched.push(PollFd::new(&self.alarm, PollFlags::IN));
        // If a signal interrupts the poll, that is not an error, because the signal is then
        // pending.
        let _ = poll(&mut watched, None);
        let mut arrived: Vec<i32> = self.delivery.pending().collect();
        while let Ok(Some(stop)) = self.stops.read_signal() {
            arrived.extend(i32::try_from(stop.ssi_signo));
        }
        arrived
    }
}

/// Stops this program, or its process group if that is given as `group`, with the signal that has
/// stopped the command. So a program that supervises this one sees the reason for the stop. Call
/// this on the main thread, which may run on for a moment afterwards.
pub fn stop(signal: i32, group: Option<Pid>) {
    // An ignored signal would not stop us, so SIGSTOP replaces it.
    let named =
        Signal::from_named_raw(signal).filter(|_| !is_in(process::ignored_signals(), signal));
    let signal = named.unwrap_or(Signal::STOP);
    let _ = match group {
        Some(group) => kill_process_group(group, signal),
        None => kill_process(getpid(), signal),
    };
    if let Ok(pending) = NixSignal::try_from(signal.as_raw()) {
        // A blocked signal takes effect here.
        let blocked = SigSet::from(pending).thread_swap_mask(SigmaskHow::SIG_UNBLOCK);
        let _ = blocked.and_then(|before| before.thread_set_mask());
    }
}

/// The signal that has ended the command, or the wait for its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Killed {
    pub signal: i32,
    pub foreground: Foreground,
}

impl Killed {
    /// Ends this process with the same signal if that signal is one that is passed on. A shell can
    /// tell such an end from an exit, and ends its loop or its script after Ctrl-C. Call this last.
    /// If this returns, the process must exit with the returned status.
    pub fn follow(self) -> u8 {
        let group = our_group().filter(|_| self.foreground == Foreground::Command);
        let typed = Signal::from_named_raw(self.signal);
        if let (Some(typed @ (Signal::INT | Signal::QUIT)), Some(group)) = (typed, group) {
            // The terminal sent the signal only to the command's group. Our group, with the script
            // that runs us or the rest of our pipeline, gets the signal here.
            let _ = kill_process_group(group, typed);
        }
        // Process 1 cannot end itself by a signal.
        if is_passed_on(self.signal) && getpid() != Pid::INIT {
            // If the command has dumped core, a core dump of this process must not replace its core
            // file.
            let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            let _ = emulate_default_handler(self.signal);
        }
        self.status()
    }

    /// The exit status that a shell gives for the signal.
    pub fn status(self) -> u8 {
        u8::try_from(128 + self.signal).unwrap_or(u8::MAX)
    }
}

/// Whether a shell with job control runs this program: an ancestor in our session, but in another
/// process group. Only such a shell continues a stopped program. Without one, the kernel discards
/// SIGTSTP for a process group, and so does this program.
pub fn has_job_control() -> bool {
    let ours = (unistd::getsid(None), unistd::getpgrp());
    for ancestor in process::ancestors() {
        let Ok(number) = ancestor.try_into() else {
            return false;
        };
        let its = unistd::Pid::from_raw(number);
        if unistd::getsid(Some(its)) != ours.0 {
            return false;
        }
        if unistd::getpgid(Some(its)) != Ok(ours.1) {
            return true;
        }
    }
    false
}
