//! The process group of a command, from its start to the end of its last process.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use nix::unistd;
use rustix::process::{kill_process, kill_process_group, wait, Pid, Signal, WaitOptions};
use rustix_libc_wrappers::process::SignalExt;
use signal_hook::consts::signal::{SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU};

use crate::sys::moment::Moment;

use super::guard::JobGuard;
use super::leftovers::{exists, living_count, tell_of_leftovers, Leftovers, Rest};
use super::signals::{ends_by_default, has_job_control, stop, ENDING};
use super::terminal::{our_group, Foreground, Terminal};
#[cfg(test)]
use super::ProgramFile;
use super::{Finish, Job, Killed};

/// How long a command that has stopped itself with SIGSTOP may keep the terminal before this
/// program stops, too. An operator, or a program such as cpulimit, continues the command sooner.
const STOP_GRACE: Duration = Duration::from_millis(300);

/// How long a resumed command may take to end after a signal was passed on to it. Then it gets
/// SIGTERM.
const PASSED_ON_TIME: Duration = Duration::from_secs(1);

/// What a stopped command waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopState {
    /// The command runs and waits for nothing.
    Over,
    /// It waits for SIGCONT, which may be sent to it alone, and this program goes on. At this
    /// moment, this program stops, too, if the command still has the terminal.
    CommandOnly(Moment),
    /// It waits for SIGCONT. This program is stopped, too.
    UntilContinued,
    /// It waits for a check that the lock is still held.
    UntilConfirmed,
}

/// Which signals have asked the group to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escalation {
    NotAsked,
    /// A signal that was passed on has asked the group to end. SIGTERM follows at this moment.
    TermAt(Moment),
    /// SIGTERM or the loss signal has been sent. SIGKILL follows at this moment.
    KillAt(Moment),
    Killed,
}

/// The command's process group, until its last process ends.
pub(super) struct Group<'a> {
    /// The process number of the command, which is also the number of its group.
    leader: Pid,
    terminal: Terminal,
    job: &'a Job<'a>,
    status: Option<ExitStatus>,
    /// Which group had the terminal when the command ended.
    foreground: Foreground,
    /// The latest signal that was passed on and whose default action ends a program.
    passed_on: Option<i32>,
    pause: StopState,
    /// Whether this program has sent SIGSTOP to the command, because the whole job must stop.
    has_stopped_command: bool,
    ending: Escalation,
    /// What is left of the group, once the command has ended.
    rest: Option<Rest>,
    /// Ends the group if this program is killed.
    guard: JobGuard<'a>,
    pub(super) is_lost: bool,
}

impl<'a> Group<'a> {
    pub(super) fn new(leader: Pid, terminal: Terminal, job: &'a Job<'a>) -> Group<'a> {
        Group {
            leader,
            terminal,
            job,
            status: None,
            foreground: Foreground::Ours,
            passed_on: None,
            pause: StopState::Over,
            has_stopped_command: false,
            ending: Escalation::NotAsked,
            rest: None,
            guard: JobGuard::new(leader, job),
            is_lost: false,
        }
    }

    /// Reaps the children that have ended, and handles a stop of the command. This program also has
    /// children that it did not start, because it is a subreaper and may be process 1.
    pub(super) fn reap(&mut self) {
        let changes = WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED;
        while let Ok(Some((pid, status))) = wait(changes) {
            if pid != self.leader {
                if !status.stopped() && !status.continued() {
                    self.guard.reaped(pid);
                }
                continue;
            }
            if let Some(stopped_by) = status.stopping_signal() {
                self.follow_stop(stopped_by);
            } else if status.continued() {
                self.has_stopped_command = false;
                if matches!(self.pause, StopState::CommandOnly(_)) {
                    self.pause = StopState::Over;
                }
            } else {
                self.status = Some(ExitStatus::from_raw(status.as_raw()));
                self.pause = StopState::Over;
                self.foreground = self.terminal.reclaim_from(self.leader);
            }
        }
    }

    /// Handles a stop of the command: continues the command, lets it wait, or stops this program,
    /// too. When this program is continued after that, the command goes on only if the lock is
    /// still held.
    fn follow_stop(&mut self, stopped_by: i32) {
        if self.ending != Escalation::NotAsked {
            // The command was told to end, and it cannot end while it is stopped.
            self.signal(Signal::CONT);
            return;
        }
        if stopped_by == SIGSTOP {
            self.follow_sigstop();
            return;
        }
        let wants_terminal = [SIGTTIN, SIGTTOU].contains(&stopped_by);
        if wants_terminal && self.terminal.lend_to(self.leader) {
            // The shell's `fg` has given us the terminal. No signal reports that.
            self.signal(Signal::CONT);
            return;
        }
        if !has_job_control() {
            if wants_terminal {
                // The command can never get the terminal. Without SIGHUP, it would stop again and
                // again.
                self.signal(Signal::HUP);
            }
            self.signal(Signal::CONT);
            return;
        }
        self.stop_and_look(stopped_by);
    }

    /// Handles SIGSTOP, which an operator may have sent to the command, and will follow by SIGCONT
    /// to the command alone. This program must then not be stopped, because it renews the lock and
    /// could not see that the command goes on. But if the command has stopped itself at the
    /// terminal, as `suspend` does, the user's shell must see the job stop.
    fn follow_sigstop(&mut self) {
        if self.has_stopped_command {
            self.has_stopped_command = false;
            self.stop_and_look(SIGSTOP);
        } else if self.pause == StopState::Over {
            let follow_at = if self.holds_up_the_terminal() {
                Moment::now() + STOP_GRACE
            } else {
                Moment::NEVER
            };
            self.pause = StopState::CommandOnly(follow_at);
        }
    }

    /// Whether the command has the terminal, and a shell waits to get it back.
    fn holds_up_the_terminal(&self) -> bool {
        self.terminal.is_of(self.leader) && has_job_control()
    }

    /// Stops this program if the command has kept the terminal although it is stopped.
    pub(super) fn follow_if_due(&mut self) {
        if matches!(self.pause, StopState::CommandOnly(at) if at <= Moment::now()) {
            if self.holds_up_the_terminal() {
                self.stop_and_look(SIGSTOP)
            } else {
                self.pause = StopState::CommandOnly(Moment::NEVER)
            }
        }
    }

    /// Stops this program with the signal. The lock is checked once this program is continued,
    /// which may be much later.
    fn stop_and_look(&mut self, signal: i32) {
        self.pause = StopState::UntilContinued;
        // This thread may run on for a moment, so only SIGCONT shows that the stop is over.
        self.stop_this_program(signal);
    }

    /// Checks the lock after a stop of this program, which may have been longer than the lease, or
    /// before a stopped command is continued.
    fn go_on(&mut self) {
        if matches!(
            self.pause,
            StopState::UntilContinued | StopState::CommandOnly(_)
        ) {
            self.pause = StopState::UntilConfirmed;
            // A check from before the stop does not show that the lock is still held.
            self.job.confirmed.take();
        }
        (self.job.look)();
    }

    /// Continues a stopped command, because the lock is still held.
    pub(super) fn resume(&mut self) {
        let may_go_on = !matches!(self.ending, Escalation::KillAt(_) | Escalation::Killed);
        if self.pause == StopState::UntilConfirmed && may_go_on {
            self.pause = StopState::Over;
            // A command that has survived a signal that was passed on may go on, because the lock
            // is held.
            self.ending = Escalation::NotAsked;
            self.terminal.return_to(self.leader);
            self.signal(Signal::CONT);
        }
    }

    pub(super) fn handle(&mut self, signal: i32) {
        match signal {
            SIGCONT => self.go_on(),
            SIGTSTP if self.is_command_stopped() && has_job_control() => {
                self.stop_and_look(SIGTSTP)
            }
            SIGTTIN | SIGTTOU => self.follow_need(),
            SIGCHLD => {}
            _ => self.pass_on(signal),
        }
    }

    /// Stops this program with the signal that has stopped the command. A signal from the terminal
    /// reached only the command's group. In that case this stops the whole job, including the
    /// script that runs us or the rest of our pipeline, because a shell does not continue a job
    /// while one of its processes runs.
    fn stop_this_program(&self, signal: i32) {
        let foreground = self.terminal.reclaim_from(self.leader);
        let is_for_all = match signal {
            SIGTSTP => foreground == Foreground::Command,
            // After SIGTTIN or SIGTTOU, the command is in the background, and so is the job.
            _ => signal != SIGSTOP,
        };
        stop(signal, our_group().filter(|_| is_for_all));
    }

    /// Handles the stop of another member of our process group, such as a pager, that needs the
    /// terminal. Takes the terminal back for that member. The command gets it again when it needs
    /// it.
    fn follow_need(&mut self) {
        self.terminal.reclaim_from(self.leader);
        if let Some(ours) = our_group().filter(|ours| self.terminal.is_of(*ours)) {
            let _ = kill_process_group(ours, Signal::CONT);
        } else if has_job_control() {
            // The whole job is in the background and must stop. The command stops before this
            // program, because it must not run on while nothing renews the lock.
            if self.is_command_stopped() {
                self.stop_and_look(SIGSTOP)
            } else {
                self.has_stopped_command = true;
                self.signal(Signal::STOP);
            }
        }
    }

    /// Whether the command is stopped, and this program is not.
    fn is_command_stopped(&self) -> bool {
        matches!(
            self.pause,
            StopState::UntilConfirmed | StopState::CommandOnly(_)
        )
    }

    fn pass_on(&mut self, signal: i32) {
        if ends_by_default(signal) {
            self.passed_on = Some(signal);
        }
        if let Some(signal) = Signal::from_raw(signal) {
            self.signal(signal);
        }
        if self.is_command_stopped() && ENDING.contains(&signal) {
            self.signal(Signal::CONT);
            if self.pause == StopState::UntilConfirmed && self.ending == Escalation::NotAsked {
                // The lock may be lost, so the command must end instead of continuing its work.
                // SIGTERM comes later, so that the command dies of the signal that was passed on.
                self.ending = Escalation::TermAt(Moment::now() + PASSED_ON_TIME);
            }
        }
    }

    pub(super) fn lose(&mut self) {
        self.is_lost = true;
        self.terminate(self.job.loss_signal);
    }

    /// Sends a signal that ends the group, and sets the time for SIGKILL.
    fn terminate(&mut self, signal: Signal) {
        if matches!(self.ending, Escalation::NotAsked | Escalation::TermAt(_)) {
            self.signal(signal);
            self.signal(Signal::CONT);
            self.ending = Escalation::KillAt(Moment::now() + self.job.kill_after);
        }
    }

    pub(super) fn start_guard_if_due(&mut self) {
        self.guard.start_if_due();
    }

    pub(super) fn escalate_if_due(&mut self) {
        match self.ending {
            Escalation::TermAt(time) if time <= Moment::now() => self.terminate(Signal::TERM),
            Escalation::KillAt(time) if time <= Moment::now() => {
                self.signal(Signal::KILL);
                self.ending = Escalation::Killed;
                if let Some(rest) = &mut self.rest {
                    // Only zombies of other parents may be left. These may never be reaped.
                    rest.read_at = rest.next_look;
                }
            }
            _ => {}
        }
    }

    /// Looks for a process of the group that counts, after the command has ended, and returns
    /// whether there is one. If its time is over, tells it to end.
    fn look_for_rest(&mut self) -> bool {
        let leftovers = self.job.leftovers;
        if leftovers == Leftovers::Leave || !exists(self.leader) {
            return false;
        }
        let now = Moment::now();
        let rest = self.rest.get_or_insert_with(|| Rest::new(leftovers, now));
        rest.plan_look(now);
        let is_asked = !matches!(self.ending, Escalation::NotAsked | Escalation::TermAt(_));
        if rest.read_at <= now {
            let living = living_count(self.leader);
            if living == Some(0) {
                return false;
            }
            rest.plan_reading(is_asked);
            rest.living = living;
        }
        if rest.ends_at <= now && !is_asked {
            let living = rest.living;
            self.terminate(Signal::TERM);
            tell_of_leftovers(self.job.program, living);
        }
        true
    }

    /// Returns how the command ended, once its whole group has ended or is left alone.
    pub(super) fn conclude(&mut self) -> Option<Finish> {
        let status = self.status?;
        if self.look_for_rest() {
            return None;
        }
        let is_killed = self.is_lost || status.signal().is_some();
        if is_killed && self.foreground == Foreground::Command {
            // The command may not have restored the terminal's modes, and a shell restores them
            // only after a signal.
            self.terminal.restore_modes();
        }
        let Some(signal) = status.signal() else {
            // The system keeps only eight bits of the status.
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Some(Finish::Exited(code.unwrap_or(u8::MAX)));
        };
        let foreground = if self.passed_on == Some(signal) {
            // We received this signal and passed it on, so it was not typed.
            Foreground::Ours
        } else {
            self.foreground
        };
        Some(Finish::Killed(Killed { signal, foreground }))
    }

    /// When to check the group again if no signal arrives: to stop this program, to kill the group,
    /// or to notice the end of processes that are not our children.
    pub(super) fn next_look(&self) -> Moment {
        let due_at = match self.ending {
            Escalation::TermAt(time) | Escalation::KillAt(time) => time,
            Escalation::NotAsked | Escalation::Killed => Moment::NEVER,
        };
        let follow_at = match self.pause {
            StopState::CommandOnly(at) => at,
            _ => Moment::NEVER,
        };
        let look_at = self
            .rest
            .as_ref()
            .map_or(Moment::NEVER, |rest| rest.next_look);
        due_at
            .min(follow_at)
            .min(look_at)
            .min(self.guard.start_at())
    }

    fn signal(&self, signal: Signal) {
        // An error means that the group has ended, or that it belongs to another user and this
        // program may not send it a signal.
        let _ = kill_process_group(self.leader, signal);
        if self.status.is_none() && self.has_left() {
            let _ = kill_process(self.leader, signal);
        }
    }

    /// Whether the command has moved to another process group. The command must not have been
    /// reaped.
    fn has_left(&self) -> bool {
        let leader = unistd::Pid::from_raw(self.leader.as_raw_nonzero().get());
        unistd::getpgid(Some(leader)).is_ok_and(|group| group != leader)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rustix::process::getpid;

    use super::*;
    use crate::sys::event::Event;

    #[test]
    fn a_check_from_before_the_stop_continues_nothing() {
        let [lost, confirmed] = [(); 2].map(|()| Event::new().expect("an event"));
        let look_count = Cell::new(0);
        let job = Job {
            program: "test",
            program_file: &ProgramFile::find().expect("this program"),
            command: &[],
            environment: &[],
            loss_signal: Signal::TERM,
            kill_after: Duration::MAX,
            leftovers: Leftovers::Leave,
            inherited: None,
            lost: &lost,
            confirmed: &confirmed,
            look: &|| look_count.set(look_count.get() + 1),
        };
        for pause in [
            StopState::UntilContinued,
            StopState::CommandOnly(Moment::NEVER),
        ] {
            // No signal is sent to this process: nothing is continued.
            let mut group = Group::new(getpid(), Terminal::open(), &job);
            group.pause = pause;
            confirmed.set();
            group.handle(SIGCONT);
            assert_eq!(group.pause, StopState::UntilConfirmed);
            assert!(!confirmed.is_set(), "{pause:?}");
        }
        assert_eq!(look_count.get(), 2);
    }
}
