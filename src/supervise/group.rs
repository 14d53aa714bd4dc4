//! The process group of a command, from its start to the end of its last process.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use rustix::process::{
    getpid, kill_process, kill_process_group, test_kill_process_group, wait, Pid, Signal,
    WaitOptions,
};
use signal_hook::consts::signal::{SIGCHLD, SIGCONT, SIGTSTP, SIGTTIN, SIGTTOU};

use super::shim::SYSTEM_ERROR;
use super::signals::{our_group, somebody_can_continue_us, Keyboard, ENDING};
use super::terminal::{Lending, Terminal};
use super::{has_living, Ended, HeldLock, Killed};

/// More than anybody waits, and less than an `Instant` can bear.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// How often we look whether a process group is empty that is not ours to wait for.
const GROUP_POLL: Duration = Duration::from_millis(20);

/// The command's process group, while any of it is left.
pub(super) struct Group<'a> {
    /// The command itself; also the group's number.
    pub(super) leader: Pid,
    pub(super) terminal: Option<Terminal>,
    pub(super) lending: Lending,
    pub(super) lock: &'a HeldLock<'a>,
    pub(super) kill_after: Duration,
    /// How the command ended.
    pub(super) status: Option<ExitStatus>,
    /// Whose the terminal was when it ended.
    pub(super) keyboard: Keyboard,
    /// The signal that was passed on last.
    pub(super) passed_on: Option<i32>,
    /// Whether it is stopped and we are not, since we look whether the lock is still held.
    pub(super) is_resuming: bool,
    pub(super) is_lost: bool,
    /// When patience is over, once the group was told to end.
    pub(super) kill_at: Option<Instant>,
    pub(super) is_killed: bool,
}

impl Group<'_> {
    /// Takes note of every child that has ended or stopped. As a subreaper, and as process 1, we have
    /// children that we did not start.
    pub(super) fn reap(&mut self) {
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
    pub(super) fn resume(&mut self) {
        if self.is_resuming && self.kill_at.is_none() {
            self.is_resuming = false;
            if self.lending == Lending::Unasked {
                self.lend_terminal();
            }
            self.signal(Signal::CONT);
        }
    }

    pub(super) fn hear(&mut self, signal: i32) {
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

    pub(super) fn lose(&mut self) {
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

    pub(super) fn kill_if_due(&mut self) {
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
    pub(super) fn ended(&mut self) -> Option<Ended> {
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
    pub(super) fn next_look(&self) -> Option<Instant> {
        let kill_at = self.kill_at.filter(|_| !self.is_killed);
        let soon = self.status.map(|_| Instant::now() + GROUP_POLL);
        kill_at.into_iter().chain(soon).min()
    }

    fn signal(&self, signal: Signal) {
        // A group that is gone needs no signal.
        let _ = kill_process_group(self.leader, signal);
    }
}
