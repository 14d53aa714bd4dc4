//! A process and all that it starts.

use std::fs;
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

/// Whether no process of the group runs. Zombies do not count: they stay for ever where process 1
/// reaps no orphans.
pub fn is_empty(group: Pid) -> bool {
    let group = group.as_raw_nonzero().to_string();
    let processes = fs::read_dir("/proc").expect("it is Linux").flatten();
    let mut stats =
        processes.filter_map(|process| fs::read_to_string(process.path().join("stat")).ok());
    !stats.any(|stat| {
        // The name of the program, which may have anything in it, comes before these.
        let (_, fields) = stat.rsplit_once(") ").expect("a process has a name");
        let fields: Vec<&str> = fields.split(' ').collect();
        fields[2] == group && !["Z", "X"].contains(&fields[0])
    })
}
