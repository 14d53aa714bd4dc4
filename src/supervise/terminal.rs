//! The controlling terminal, and when the command gets it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use nix::sys::signal::{SigSet, SigmaskHow, Signal as NixSignal};
use rustix::fs::{fstat, FileType};
use rustix::io::Errno;
use rustix::process::{test_kill_process_group, Pid};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use super::signals::our_group;

/// The controlling terminal. `fg` can give it to our process group at any time, and `bg` take it.
pub(super) struct Terminal(File);

impl Terminal {
    pub(super) fn open() -> Option<Terminal> {
        File::open("/dev/tty").ok().map(Terminal)
    }

    pub(super) fn is_ours(&self) -> bool {
        our_group().is_some_and(|group| self.is_of(group))
    }

    pub(super) fn is_of(&self, group: Pid) -> bool {
        tcgetpgrp(&self.0) == Ok(group)
    }

    /// Gives the terminal to the group, and says whether that worked.
    pub(super) fn give_to(&self, group: Pid) -> bool {
        // Blocked, SIGTTOU does not keep us from doing that in the background.
        let blocked = SigSet::from(NixSignal::SIGTTOU).thread_swap_mask(SigmaskHow::SIG_BLOCK);
        let is_given = tcsetpgrp(&self.0, group).is_ok();
        let _ = blocked.and_then(|before| before.thread_set_mask());
        is_given
    }

    /// Takes the terminal back from the group, or from a group that has ended. In the background
    /// the terminal is the shell's: a shell that loses it ends.
    pub(super) fn take_back_from(&self, group: Pid) {
        let (Ok(foreground), Some(ours)) = (tcgetpgrp(&self.0), our_group()) else {
            return;
        };
        if foreground == group || test_kill_process_group(foreground) == Err(Errno::SRCH) {
            self.give_to(ours);
        }
    }
}

/// When the command gets the terminal, if this program has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lending {
    /// Before it runs.
    AtStart,
    /// When it has stopped because it needs the terminal.
    OnDemand,
}

impl Lending {
    /// Decides by the standard streams. In a pipeline another program, such as a pager, may read
    /// the terminal. If the command had the terminal, that program would stop, and the whole job
    /// with it.
    pub(super) fn by_the_streams() -> Lending {
        let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
        let is_in_a_pipeline = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]
            .into_iter()
            .filter_map(|stream| fstat(stream).ok())
            .map(|stat| FileType::from_raw_mode(stat.st_mode))
            .any(|kind| matches!(kind, FileType::Fifo | FileType::Socket));
        match is_in_a_pipeline {
            true => Lending::OnDemand,
            false => Lending::AtStart,
        }
    }
}
