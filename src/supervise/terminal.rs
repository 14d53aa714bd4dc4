//! The controlling terminal, and when the command gets it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::fs::{fstat, FileType};
use rustix::io::Errno;
use rustix::process::{test_kill_process_group, Pid};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use super::signals::our_group;

/// The controlling terminal. It can be ours at one time (`fg`) and somebody else's at another (`bg`).
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

    /// Whether it is the group's now.
    pub(super) fn give_to(&self, group: Pid) -> bool {
        tcsetpgrp(&self.0, group).is_ok()
    }

    /// Takes it back from a group that had it from us, or from what that has left. In the background it
    /// is the shell's, which would lose its terminal and end.
    pub(super) fn take_back_from(&self, group: Pid) {
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
pub(super) enum Lending {
    /// Before it runs.
    Unasked,
    /// Once it has stopped for want of it.
    OnDemand,
}

impl Lending {
    /// In a pipeline another program may read the terminal: a pager behind the command, for
    /// instance. That would stop, and the whole job with it, if the command had the terminal.
    pub(super) fn by_the_streams() -> Lending {
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
