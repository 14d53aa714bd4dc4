//! A process and all that it starts.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::process::{kill_process_group, Pid, Signal};

/// A process group, killed when dropped.
pub struct Group(pub Child);

impl Group {
    /// Starts `command` as the leader of a group.
    pub fn spawn(command: &mut Command) -> Group {
        let started = command.process_group(0).spawn();
        Group(started.unwrap_or_else(|error| panic!("cannot run {command:?}: {error}")))
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A group that is empty is an error, and well.
        let _ = kill_process_group(self.pid(), Signal::KILL);
        let _ = self.0.wait();
    }
}
