//! The process group of a command, from its start to the end of its last process.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use nix::unistd;
use rustix::process::{kill_process, kill_process_group, wait, Pid, Signal, WaitOptions};
use rustix_libc_wrappers::process::SignalExt;
use signal_hook::consts::signal::{SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU};

use crate::os::moment::Moment;
use crate::os::output;
use crate::os::process::{ignored_signals, is_in};

use super::guard::JobGuard;
use super::leftovers::{going_on, Leftovers, Look, Rest};
use super::signals::{has_job_control, stop, ENDING};
use super::terminal::{our_group, Foreground, Terminal};
use super::{Finish, Job, Killed};

/// How long a command that has stopped itself with SIGSTOP may keep the terminal before this
/// program stops, too. An operator, or a program such as cpulimit, continues the command sooner.
const STOP_GRACE: Duration = Duration::from_millis(300);

/// How long a resumed command may take to end after a signal was passed on to it. Then it gets
/// SIGTERM.
const PASSED_ON_TIME: Duration = Duration::from_secs(1);

/// How long the same signal counts as one: timeout(1) sends its signal to its child and to its
/// group, and a command may take a second SIGTERM as "at once".
const ONE_STOP: Duration = Duration::from_millis(20);

/// How far the command has come, and what this program waits for.
#[derive(Debug)]
enum JobPhase {
    /// The command runs, as far as this program knows.
    Running,
    /// This program has sent SIGSTOP to the command, because the whole job must stop.
    Stopping,
    /// The command waits for SIGCONT, which may be sent to it alone, and this program goes on. At
    /// this moment, this program stops, too, if the command still has the terminal.
    StoppedAlone(Moment),
    /// The command waits for SIGCONT. This program is stopped, too.
    Stopped,
    /// The stopped command waits for a check that the lock is still held.
    Unconfirmed,
    /// The command has ended, when this group had the terminal.
    Ended(ExitStatus, Foreground, Rest),
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
pub struct Group<'a> {
    /// The process number of the command, which is also the number of its group.
    leader: Pid,
    terminal: Terminal,
    job: &'a Job<'a>,
    phase: JobPhase,
    /// The latest signal that asks a program to end and was passed on, and when.
    passed_on: Option<(i32, Moment)>,
    ending: Escalation,
    /// Ends the group if this program is killed.
    guard: JobGuard<'a>,
    pub is_lost: bool,
}

impl<'a> Group<'a> {
    pub fn new(leader: Pid, terminal: Terminal, job: &'a Job<'a>) -> Group<'a> {
        Group {
            leader,
            terminal,
            job,
            phase: JobPhase::Running,
            passed_on: None,
            ending: Escalation::NotAsked,
            guard: JobGuard::new(leader, job),
            is_lost: false,
        }
    }

    /// Reaps the children that have ended, and handles a stop of the command. This program also has
    /// children that it did not start, because it is a subreaper and may be process 1.
    pub fn reap(&mut self) {
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
                if matches!(self.phase, JobPhase::StoppedAlone(_) | JobPhase::Stopping) {
                    self.phase = JobPhase::Running;
                }
            } else {
                let status = ExitStatus::from_raw(status.as_raw());
                let foreground = self.terminal.reclaim_from(self.leader);
                let rest = Rest::new(self.job.leftovers);
                self.phase = JobPhase::Ended(status, foreground, rest);
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
        // A shell that has this signal ignored, as bash in `$(...)`, does not expect a stop.
        if !has_job_control() || (wants_terminal && is_in(ignored_signals(), stopped_by)) {
            if wants_terminal {
                // The command can never get the terminal: without SIGHUP, it would stop for ever.
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
        if matches!(self.phase, JobPhase::Stopping) {
            self.stop_and_look(SIGSTOP);
        } else if matches!(self.phase, JobPhase::Running) {
            let follow_at = if self.holds_up_the_terminal() {
                Moment::now() + STOP_GRACE
            } else {
                Moment::NEVER
            };
            self.phase = JobPhase::StoppedAlone(follow_at);
        }
    }

    /// Whether the command has the terminal, and a shell waits to get it back.
    fn holds_up_the_terminal(&self) -> bool {
        self.terminal.is_of(self.leader) && has_job_control()
    }

    /// Checks the lock after a stop of this program, which may have been longer than the lease, or
    /// before a stopped command is continued.
    fn go_on(&mut self) {
        if matches!(self.phase, JobPhase::Stopped | JobPhase::StoppedAlone(_)) {
            self.phase = JobPhase::Unconfirmed;
            // A check from before the stop does not show that the lock is still held.
            self.job.confirmed.take();
        }
        (self.job.look)();
    }

    /// Continues a stopped command, because the lock is still held.
    pub fn resume(&mut self) {
        let may_go_on = !matches!(self.ending, Escalation::KillAt(_) | Escalation::Killed);
        if matches!(self.phase, JobPhase::Unconfirmed) && may_go_on {
            self.phase = JobPhase::Running;
            // A command that has survived a signal that was passed on may go on, because the lock
            // is held.
            self.ending = Escalation::NotAsked;
            self.terminal.return_to(self.leader);
            self.signal(Signal::CONT);
        }
    }

    pub fn handle(&mut self, signal: i32) {
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

    /// Stops this program with the signal that has stopped the command. The lock is checked once
    /// this program is continued, which may be much later.
    ///
    /// A signal from the terminal reached only the command's group. In that case this stops the
    /// whole job, including the script that runs us or the rest of our pipeline, because a shell
    /// does not continue a job while one of its processes runs.
    fn stop_and_look(&mut self, signal: i32) {
        self.phase = JobPhase::Stopped;
        let foreground = self.terminal.reclaim_from(self.leader);
        let is_for_all = match signal {
            SIGTSTP => foreground == Foreground::Command,
            // After SIGTTIN or SIGTTOU, the command is in the background, and so is the job.
            _ => signal != SIGSTOP,
        };
        // This thread may run on for a moment, so only SIGCONT shows that the stop is over.
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
            match self.phase {
                JobPhase::Unconfirmed | JobPhase::StoppedAlone(_) => self.stop_and_look(SIGSTOP),
                JobPhase::Running => {
                    self.phase = JobPhase::Stopping;
                    self.signal(Signal::STOP);
                }
                _ => self.signal(Signal::STOP),
            }
        }
    }

    /// Whether the command is stopped, and this program is not.
    fn is_command_stopped(&self) -> bool {
        matches!(
            self.phase,
            JobPhase::Unconfirmed | JobPhase::StoppedAlone(_)
        )
    }

    fn pass_on(&mut self, signal: i32) {
        let is_ending = ENDING.contains(&signal);
        if is_ending {
            let now = Moment::now();
            let is_same = |(latest, at)| latest == signal && now < at + ONE_STOP;
            if self.passed_on.is_some_and(is_same) {
                return;
            }
            self.passed_on = Some((signal, now));
        }
        if let Some(signal) = Signal::from_raw(signal) {
            self.signal(signal);
        }
        if is_ending && self.is_command_stopped() {
            self.signal(Signal::CONT);
            if matches!(self.phase, JobPhase::Unconfirmed) && self.ending == Escalation::NotAsked {
                // The lock may be lost, so the command must end instead of continuing its work.
                // SIGTERM comes later, so that the command dies of the signal that was passed on.
                self.ending = Escalation::TermAt(Moment::now() + PASSED_ON_TIME);
            }
        }
    }

    pub fn lose(&mut self) {
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

    /// Does what is due by now: starts a guard, stops this program if the command has kept the
    /// terminal although it is stopped, and tells the group to end.
    pub fn act_if_due(&mut self) {
        self.guard.start_if_due();
        let now = Moment::now();
        match self.phase {
            JobPhase::StoppedAlone(at) if at > now => {}
            JobPhase::StoppedAlone(_) if self.holds_up_the_terminal() => {
                self.stop_and_look(SIGSTOP)
            }
            JobPhase::StoppedAlone(_) => self.phase = JobPhase::StoppedAlone(Moment::NEVER),
            _ => {}
        }
        match self.ending {
            Escalation::TermAt(time) if time <= now => self.terminate(Signal::TERM),
            Escalation::KillAt(time) if time <= now => {
                self.signal(Signal::KILL);
                self.ending = Escalation::Killed;
                if let JobPhase::Ended(_, _, rest) = &mut self.phase {
                    // Only zombies of other parents may be left. These may never be reaped.
                    rest.read_at = rest.next_look;
                }
            }
            _ => {}
        }
    }

    /// Returns how the command ended, once its whole group has ended or is left alone.
    pub fn conclude(&mut self) -> Option<Finish> {
        let JobPhase::Ended(status, foreground, rest) = &mut self.phase else {
            return None;
        };
        let (status, foreground) = (*status, *foreground);
        let is_asked = !matches!(self.ending, Escalation::NotAsked | Escalation::TermAt(_));
        let left = match rest.look(self.leader, is_asked) {
            Look::Empty => None,
            Look::Wait => return None,
            // A command that was told to end must leave nothing that works on beside the next
            // holder. A lost lock has asked the group to end already.
            Look::Overdue(left)
                if self.job.leftovers == Leftovers::Leave
                    && status.signal().is_none()
                    && self.passed_on.is_none() =>
            {
                Some(going_on(&left))
            }
            Look::Overdue(left) => {
                self.terminate(Signal::TERM);
                // The work of these processes may not be complete.
                let what = "in its group: ending them; see --leftovers";
                output::complain(
                    self.job.program,
                    format_args!("the command left {left} {what}"),
                );
                return None;
            }
        };
        let is_killed = self.is_lost || status.signal().is_some();
        if is_killed && foreground == Foreground::Command {
            // The command may not have restored the terminal's modes, and a shell restores them
            // only after a signal.
            self.terminal.restore_modes();
        }
        // The system keeps only eight bits of the status.
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        let killed = status.signal().map(|signal| Killed {
            signal,
            // What we received and passed on was not typed.
            foreground: match self.passed_on {
                Some((latest, _)) if latest == signal => Foreground::Ours,
                _ => foreground,
            },
        });
        Some(Finish {
            status: killed.map_or(code.unwrap_or(u8::MAX), Killed::status),
            killed,
            has_run: true,
            left,
        })
    }

    /// When to call [`Group::act_if_due`] and [`Group::conclude`] again if no signal arrives.
    pub fn next_look(&self) -> Moment {
        let due_at = match self.ending {
            Escalation::TermAt(time) | Escalation::KillAt(time) => time,
            Escalation::NotAsked | Escalation::Killed => Moment::NEVER,
        };
        let look_at = match &self.phase {
            JobPhase::StoppedAlone(at) => *at,
            JobPhase::Ended(_, _, rest) => rest.next_look,
            _ => Moment::NEVER,
        };
        due_at.min(look_at).min(self.guard.start_at())
    }

    fn signal(&self, signal: Signal) {
        // An error means that the group has ended, or that it belongs to another user and this
        // program may not send it a signal.
        let _ = kill_process_group(self.leader, signal);
        if !matches!(self.phase, JobPhase::Ended(..)) {
            // The command, which has not been reaped, may have moved to another process group.
            let leader = unistd::Pid::from_raw(self.leader.as_raw_nonzero().get());
            if unistd::getpgid(Some(leader)).is_ok_and(|group| group != leader) {
                let _ = kill_process(self.leader, signal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rustix::process::getpid;

    use super::*;
    use crate::os::event::Event;
    use crate::shared::supervise::ProgramFile;

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
        for phase in [JobPhase::Stopped, JobPhase::StoppedAlone(Moment::NEVER)] {
            // No signal is sent to this process: nothing is continued.
            let mut group = Group::new(getpid(), Terminal::open(), &job);
            group.phase = phase;
            confirmed.set();
            group.handle(SIGCONT);
            assert!(matches!(group.phase, JobPhase::Unconfirmed));
            assert!(!confirmed.is_set());
        }
        assert_eq!(look_count.get(), 2);
    }
}
