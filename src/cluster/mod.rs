//! Several servers, one service: one of them is active, by an election in etcd, and journals there
//! who holds what before a client is told. The others pass connections on to it.
//!
//! **Invariant:** nothing is certain until etcd says so. Every write and every question to etcd
//! compares the epoch and the batch number, so a server that has lost its office without knowing
//! changes nothing and tells no client anything.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// The client address of an etcd member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// A name or an address, without brackets.
    pub host: String,
    pub port: u16,
}

/// The settings of a server that is one of several.
#[derive(Clone, Debug)]
pub struct Settings {
    /// All members of etcd.
    pub members: Vec<Member>,
    /// Where the other servers reach this one: `HOST:PORT`.
    pub advertise: String,
    /// What the keys in etcd begin with; servers with the same prefix are one service.
    pub prefix: String,
    /// For how long the active server may be silent.
    pub ttl: Duration,
    /// The user and the password for etcd, if it asks for them.
    pub user: Option<(String, String)>,
}

/// Who is active, as far as this server knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Another server is active, or none is known to be.
    Standby { active: Option<Active> },
    /// This server is active.
    Active { epoch: u64 },
}

/// The server that is active.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Active {
    /// One term of one active server. Epochs rise.
    pub epoch: u64,
    /// Where to reach it: `HOST:PORT`.
    pub address: String,
}

/// This server's part in the service.
pub struct Office {
    settings: Settings,
    role: Mutex<Role>,
    changed: Condvar,
}

impl Office {
    pub fn new(settings: Settings) -> Office {
        Office {
            settings,
            role: Mutex::new(Role::Standby { active: None }),
            changed: Condvar::new(),
        }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What this server is now.
    pub fn role(&self) -> Role {
        self.role.lock().clone()
    }

    /// What this server is now. Blocks while that is what was `seen`, but no longer than `at_most`.
    pub fn wait_for_change(&self, seen: &Role, at_most: Duration) -> Role {
        let mut role = self.role.lock();
        self.changed
            .wait_while_for(&mut role, |role| role == seen, at_most);
        role.clone()
    }

    /// The time that a batch of the journal takes, smoothed, in milliseconds.
    pub fn journal_ms(&self) -> f32 {
        0.0
    }
}
