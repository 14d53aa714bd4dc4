//! The signals that a supervising program catches, and the end by one of them.

use std::io;
use std::os::unix::net::UnixStream;

use nix::sys::signal::{SigSet, Signal as NixSignal};
use nix::unistd;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::process::{
    getpid, getppid, kill_process, kill_process_group, set_dumpable_behavior, wait,
    DumpableBehavior, Pid, Signal, WaitOptions,
};
use signal_hook::consts::signal::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU, SIGUSR1, SIGUSR2,
};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;
use signal_hook::low_level::emulate_default_handler;

use crate::sys::event::Event;
use crate::sys::moment::{Alarm, Moment};
use crate::sys::process;

use super::terminal::Foreground;

/// The signals that are passed on to the command, and that end a wait for the lock.
pub(super) const PASSED_ON: [i32; 6] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];

/// The signals among them that ask a program to end.
pub(super) const ENDING: [i32; 4] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];

/// The signals that have arrived. Make it on the main thread, before any other thread starts.
pub struct SignalWatch {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
    alarm: Alarm,
}

impl SignalWatch {
    /// Catches the signals from now on.
    pub fn new() -> io::Result<SignalWatch> {
        // We take the terminal back while we are in the background: blocked, SIGTTOU does not stop
        // us. Everything else is unblocked, because the end of the command is a signal, too. Later
        // threads inherit the mask, and the exec shim clears it.
        SigSet::from(NixSignal::SIGTTOU).thread_set_mask()?;
        let ignored = process::ignored_signals();
        let mut caught = PASSED_ON.to_vec();
        caught.push(SIGTSTP);
        // A signal that is ignored at the start (by nohup, or by a shell for a background job)
        // stays ignored, so that the command ignores it, too: exec resets only caught signals.
        caught.retain(|signal| ignored & (1 << (signal - 1)) == 0);
        caught.extend([SIGCHLD, SIGCONT]);
        let (read, write) = UnixStream::pair()?;
        let delivery = SignalDelivery::with_pipe(read, write, SignalOnly, caught)?;
        let alarm = Alarm::new()?;
        Ok(SignalWatch { delivery, alarm })
    }

    /// Catches, on this thread, the signals that our process group gets when one of its members
    /// needs the terminal and does not have it.
    pub(super) fn catch_terminal_needs(&self) -> io::Result<()> {
        for signal in [SIGTTIN, SIGTTOU] {
            self.delivery.handle().add_signal(signal)?;
        }
        Ok(SigSet::from(NixSignal::SIGTTOU).thread_unblock()?)
    }

    /// Lets this program write to a terminal again that it does not have.
    pub(super) fn block_terminal_needs(&self) {
        let _ = SigSet::from(NixSignal::SIGTTOU).thread_block();
    }

    /// Blocks until one of the events is set, or until a signal ends the wait. Reaps children
    /// meanwhile: as process 1, this program has children that it did not start.
    pub fn wait_for(&mut self, events: &[&Event]) -> Result<(), Killed> {
        loop {
            while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
            for signal in self.next(events, Moment::NEVER) {
                match signal {
                    SIGTSTP if has_job_control() => {
                        let _ = kill_process(getpid(), Signal::STOP);
                    }
                    signal if PASSED_ON.contains(&signal) => {
                        return Err(Killed {
                            signal,
                            foreground: Foreground::Ours,
                        });
                    }
                    _ => {}
                }
            }
            if events.iter().any(|event| event.is_set()) {
                return Ok(());
            }
        }
    }

    /// Blocks until an event is set, a signal arrives, or `until` has come. Returns the signals
    /// that have arrived.
    pub(super) fn next(&mut self, events: &[&Event], until: Moment) -> Vec<i32> {
        self.alarm.set(until);
        let events = events.iter();
        let mut watched: Vec<PollFd<'_>> = events
            .map(|event| PollFd::new(*event, PollFlags::IN))
            .collect();
        watched.push(PollFd::new(self.delivery.get_read(), PollFlags::IN));
        watched.push(PollFd::new(&self.alarm, PollFlags::IN));
        // A signal interrupts the poll. That is no error: the signal is pending.
        let _ = poll(&mut watched, None);
        self.delivery.pending().collect()
    }
}

/// A signal has ended the command, or the wait for its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Killed {
    pub(super) signal: i32,
    pub(super) foreground: Foreground,
}

impl Killed {
    /// Ends this process by the same signal if that signal is passed on. A shell can tell this from
    /// an exit, and ends its loop or its script after Ctrl-C. Call it last. If it returns, the
    /// process exits with the status that it returns.
    pub fn follow(self) -> u8 {
        let typed = [(SIGINT, Signal::INT), (SIGQUIT, Signal::QUIT)];
        let typed = typed.iter().find(|(number, _)| *number == self.signal);
        if let (Some((_, signal)), Foreground::Command, Some(group)) =
            (typed, self.foreground, our_group())
        {
            // This reaches the script that runs us, or the rest of our pipeline.
            let _ = kill_process_group(group, *signal);
        }
        // Process 1 cannot end itself by a signal.
        if PASSED_ON.contains(&self.signal) && getpid() != Pid::INIT {
            // If there is a core dump, it is the command's, and ours must not replace it.
            let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            let _ = emulate_default_handler(self.signal);
        }
        u8::try_from(128 + self.signal).unwrap_or(u8::MAX)
    }
}

/// Whether a shell with job control runs this program: an ancestor in our session, but in another
/// process group. Without one, a stopped program would stay stopped. The kernel discards SIGTSTP
/// for such a process group, and so do we.
pub(super) fn has_job_control() -> bool {
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

/// Our process group, or `None` if it belongs to another pid namespace and has no number here.
pub(super) fn our_group() -> Option<Pid> {
    Pid::from_raw(unistd::getpgrp().as_raw())
}
