//! The signals that a supervising program catches, and the end by one of them.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use nix::sys::signal::{SigSet, Signal as NixSignal};
use nix::unistd;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::process::{
    getpid, getppid, kill_process, kill_process_group, set_dumpable_behavior, wait,
    DumpableBehavior, Pid, Signal, WaitOptions,
};
use signal_hook::consts::signal::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2,
};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;
use signal_hook::low_level::emulate_default_handler;

use super::{stat_of, Event};

/// The signals that are passed on to the command, and that end a wait for the lock.
pub(super) const PASSED_ON: [i32; 6] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];

/// Those of them that ask for the end.
pub(super) const ENDING: [i32; 4] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];

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
        let ignored = ignored_signals();
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
    pub(super) fn next(&mut self, events: &[&Event], until: Option<Instant>) -> Vec<i32> {
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
    pub(super) signal: i32,
    pub(super) keyboard: Keyboard,
}

/// To whom the terminal belonged when a signal came that may have been typed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keyboard {
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

/// The signals that we ignored when we started: bit N - 1 stands for signal N. None if /proc cannot tell.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Whether a shell with job control looks after us. If not, nobody would continue us after Ctrl-Z: the
/// system itself discards that signal then, and so do we.
pub(super) fn somebody_can_continue_us() -> bool {
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
        ancestor = stat_of(number).and_then(|stat| Pid::from_raw(stat.parent));
    }
    false
}

/// Our process group; `None` if it is not of our namespace, where it has no number.
pub(super) fn our_group() -> Option<Pid> {
    Pid::from_raw(unistd::getpgrp().as_raw())
}
