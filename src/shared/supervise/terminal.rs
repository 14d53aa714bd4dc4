//! The controlling terminal, which this program lends to the command.

use std::cell::OnceCell;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use nix::sys::signal::{SigSet, SigmaskHow, Signal as NixSignal};
use nix::unistd::getpgrp;
use rustix::fs::{fstat, FileType};
use rustix::io::Errno;
use rustix::process::{test_kill_process_group, Pid};
use rustix::termios::{tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp, OptionalActions, Termios};

use crate::os::process::{ignored_signals, is_in};

/// The signals of the keys that end a job.
pub const TYPED: [NixSignal; 2] = [NixSignal::SIGINT, NixSignal::SIGQUIT];

/// The controlling terminal, if there is one. The shell can give it to our process group (`fg`) or
/// take it away at any time.
pub struct Terminal {
    file: Option<File>,
    /// If set, the command gets the terminal only after SIGTTIN or SIGTTOU.
    is_lent_on_need: bool,
    /// The modes of the terminal before the command first had it.
    modes: OnceCell<Termios>,
}

/// Which process group had the terminal, and so received the signal of a typed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreground {
    /// Our process group. Its other members received the signal, too.
    Ours,
    /// The command's process group. Ours did not receive the signal.
    Command,
}

impl Terminal {
    pub fn open() -> Terminal {
        Terminal {
            file: File::open("/dev/tty").ok(),
            is_lent_on_need: is_in_a_pipeline() || is_in_the_background(),
            modes: OnceCell::new(),
        }
    }

    /// Which group gets the terminal when the command starts.
    pub fn at_start(&self) -> Foreground {
        if !self.is_lent_on_need && self.can_be_lent() {
            Foreground::Command
        } else {
            Foreground::Ours
        }
    }

    pub fn is_of(&self, group: Pid) -> bool {
        self.foreground() == Some(group)
    }

    fn is_ours(&self) -> bool {
        our_group().is_some_and(|group| self.is_of(group))
    }

    /// Whether this program has the terminal. If so, saves the modes of the terminal before the
    /// command can change them.
    fn can_be_lent(&self) -> bool {
        let is_ours = self.is_ours();
        if let (true, Some(file), None) = (is_ours, &self.file, self.modes.get()) {
            let _ = tcgetattr(file).map(|modes| self.modes.set(modes));
        }
        is_ours
    }

    /// Restores the modes that the terminal had before the command first had it.
    pub fn restore_modes(&self) {
        if let (true, Some(file), Some(modes)) = (self.is_ours(), &self.file, self.modes.get()) {
            // This must not wait for the output, because Ctrl-S may have stopped the terminal.
            let _ = tcsetattr(file, OptionalActions::Now, modes);
        }
    }

    fn foreground(&self) -> Option<Pid> {
        tcgetpgrp(self.file.as_ref()?).ok()
    }

    /// Gives the terminal to the command's group if this program has it. Returns whether the
    /// command got it.
    pub fn lend_to(&self, group: Pid) -> bool {
        self.can_be_lent() && self.give_to(group)
    }

    /// Gives the terminal to the command's group again after a stop, by the same rule as at the
    /// start.
    pub fn return_to(&self, group: Pid) {
        if self.at_start() == Foreground::Command {
            self.give_to(group);
        }
    }

    fn give_to(&self, group: Pid) -> bool {
        // While SIGTTOU is blocked, this works even in the background.
        let blocked = SigSet::from(NixSignal::SIGTTOU).thread_swap_mask(SigmaskHow::SIG_BLOCK);
        let file = self.file.as_ref();
        let is_given = file.is_some_and(|file| tcsetpgrp(file, group).is_ok());
        let _ = blocked.and_then(|before| before.thread_set_mask());
        is_given
    }

    /// Takes the terminal back from the command's group, or from a group that has ended. Returns
    /// which group had it. Does not take the terminal from any other group: in the background the
    /// shell has it, and a shell that loses its terminal ends.
    pub fn reclaim_from(&self, group: Pid) -> Foreground {
        let Some(foreground) = self.foreground() else {
            return Foreground::Ours;
        };
        let is_lent = foreground == group;
        if is_lent || test_kill_process_group(foreground) == Err(Errno::SRCH) {
            our_group().map(|ours| self.give_to(ours));
        }
        if is_lent {
            Foreground::Command
        } else {
            Foreground::Ours
        }
    }
}

/// Our process group, or `None` if it belongs to another pid namespace and has no number here.
pub fn our_group() -> Option<Pid> {
    Pid::from_raw(getpgrp().as_raw())
}

/// Whether a standard stream leads to another program, such as a pager, that may read the terminal.
/// If the command had the terminal, that program would stop, and the whole job would stop with it.
fn is_in_a_pipeline() -> bool {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let mut kinds = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]
        .into_iter()
        .filter_map(|stream| fstat(stream).ok())
        .map(|stat| FileType::from_raw_mode(stat.st_mode));
    kinds.any(|kind| matches!(kind, FileType::Fifo | FileType::Socket))
}

/// Whether a shell without job control has started this program with `&`: it has the signals of the
/// keys ignored then, or blocked, by fish. Our group has the terminal, but the shell is in front.
fn is_in_the_background() -> bool {
    let ignored = ignored_signals();
    let blocked = SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty());
    let is_kept_away =
        |typed: &NixSignal| is_in(ignored, *typed as i32) || blocked.contains(*typed);
    TYPED.iter().all(is_kept_away)
}
