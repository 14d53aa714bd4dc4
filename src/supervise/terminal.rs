//! The controlling terminal, and when the command gets it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::fs::{fstat, FileType};
use rustix::io::Errno;
use rustix::process::{test_kill_process_group, Pid};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use super::signals::{our_group, Foreground};

/// The controlling terminal, if there is one. `fg` can give it to our process group at any time, and
/// `bg` take it.
pub(super) struct Terminal {
    file: Option<File>,
    lending: Lending,
}

/// When the command gets the terminal, if this program has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lending {
    /// Before it runs, and whenever it is continued.
    AtStart,
    /// When it has stopped because it needs the terminal.
    OnDemand,
}

impl Terminal {
    pub(super) fn open() -> Terminal {
        Terminal {
            file: File::open("/dev/tty").ok(),
            lending: Lending::by_the_streams(),
        }
    }

    /// Which process group has the terminal when the command starts.
    pub(super) fn at_start(&self) -> Foreground {
        match self.lending == Lending::AtStart && self.is_ours() {
            true => Foreground::Command,
            false => Foreground::Ours,
        }
    }

    fn is_ours(&self) -> bool {
        our_group().is_some_and(|group| self.is_of(group))
    }

    pub(super) fn is_of(&self, group: Pid) -> bool {
        let foreground = self.file.as_ref().map(tcgetpgrp);
        foreground == Some(Ok(group))
    }

    /// Gives the terminal to the group if this program has it, and says whether the group got it.
    pub(super) fn lend_to(&self, group: Pid) -> bool {
        let file = self.file.as_ref().filter(|_| self.is_ours());
        file.is_some_and(|file| tcsetpgrp(file, group).is_ok())
    }

    /// Gives the terminal to a command that goes on, unless it gets the terminal only on demand.
    pub(super) fn lend_again_to(&self, group: Pid) {
        if self.lending == Lending::AtStart {
            self.lend_to(group);
        }
    }

    /// Takes the terminal back from the group, or from a group that has ended. In the background
    /// the terminal is the shell's: a shell that loses it ends.
    pub(super) fn take_back_from(&self, group: Pid) {
        let (Some(file), Some(ours)) = (&self.file, our_group()) else {
            return;
        };
        let Ok(foreground) = tcgetpgrp(file) else {
            return;
        };
        if foreground == group || test_kill_process_group(foreground) == Err(Errno::SRCH) {
            let _ = tcsetpgrp(file, ours);
        }
    }
}

impl Lending {
    /// Decides by the standard streams. In a pipeline another program, such as a pager, may read
    /// the terminal. If the command had the terminal, that program would stop, and the whole job
    /// with it.
    fn by_the_streams() -> Lending {
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
