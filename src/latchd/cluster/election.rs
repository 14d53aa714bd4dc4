//! The thread that runs for leader and renews the leader key.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use log::{error, info};

use super::etcd::{self, EtcdFailure, Gateway, KeyValue, Trouble};
use super::record::Names;
use super::{is_fault_planted, lease_before, Active, ClusterNode, Role, Term, PATIENCE};
use crate::os::moment::Moment;
use crate::os::text::{host_and_port, Escaped};

/// The pause between a failure and the next attempt.
const PAUSE: Duration = Duration::from_millis(100);

pub struct Candidate {
    node: Arc<ClusterNode>,
    gateway: Gateway,
    leader: Vec<u8>,
    /// True until this server has seen a leader or has run for leader. If the first leader that it
    /// sees has its own address, that leader may be this server before a restart.
    is_first_look: bool,
    /// When this server most recently stepped down.
    unfit_since: Option<Moment>,
    trouble: Trouble,
}

impl Candidate {
    pub fn new(node: Arc<ClusterNode>) -> Candidate {
        Candidate {
            gateway: node.gateway(),
            leader: Names(node.settings.prefix.clone()).leader(),
            node,
            is_first_look: true,
            unfit_since: None,
            trouble: Trouble::default(),
        }
    }

    /// Blocks until this server is elected.
    pub fn run_until_elected(&mut self) -> Term {
        loop {
            self.node.wait_while_leaving();
            match self.run_once() {
                Ok(Some(term)) => return term,
                Ok(None) => {}
                Err(failure) => {
                    self.trouble.report(&failure, 0);
                    thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Looks up the leader. If another server is the leader, waits for a while. If there is no
    /// leader, runs for leader. `None` means that the caller should look again.
    fn run_once(&mut self) -> Result<Option<Term>, EtcdFailure> {
        let kept = Moment::now();
        // The leader is read in its own request, because a full etcd refuses any transaction that
        // might write.
        let look_up = etcd::look_up(&self.leader);
        let answer = self.gateway.txn("", &look_up, "")?;
        let Some(leader) = answer.found.first() else {
            // If this server has stepped down recently, it leaves the election to the other
            // servers, one of which may be able to take over.
            let time = self.node.settings.ttl * PATIENCE;
            if self.unfit_since.is_some_and(|since| since.elapsed() < time) {
                return self.wait_behind(answer.revision);
            }
            return self.run_for_leader(kept);
        };
        let own_lease = self.node.state.lock().lease;
        // An earlier attempt was successful, but etcd's answer was lost.
        if own_lease == Some(leader.lease) {
            return Ok(Some(Term {
                epoch: leader.create_revision,
                version: leader.version,
                lease: leader.lease,
                kept,
            }));
        }
        let address = self.node.settings.advertise.as_bytes();
        let is_first_look = std::mem::take(&mut self.is_first_look);
        // A leader with this server's own address may be this server before its restart. A server
        // that has started over knows the lease that it had, and compares that lease. Otherwise two
        // servers with the same address would depose each other again and again.
        let is_former_self = || lease_before().is_none_or(|lease| lease == leader.lease);
        if is_first_look && leader.value == address && is_former_self() {
            let is_still = etcd::is_created(&self.leader, leader.create_revision);
            self.gateway
                .txn(&is_still, &etcd::delete(&self.leader), "")?;
            return Ok(None);
        }
        self.note(leader);
        // The lease is kept ready for the next election. A full etcd grants no lease. That is only
        // logged, because the active server can continue.
        if let Err(failure) = self.ensure_lease() {
            self.trouble.report(&failure, 0);
        }
        self.wait_behind(answer.revision)
    }

    /// Runs for leader. Call this only if there is no leader. The lease counts from `kept`.
    fn run_for_leader(&mut self, kept: Moment) -> Result<Option<Term>, EtcdFailure> {
        let lease = self.ensure_lease()?;
        let address = self.node.settings.advertise.as_bytes();
        let answer = self.gateway.txn(
            &etcd::is_created(&self.leader, 0),
            &etcd::put(&self.leader, address, lease),
            "",
        )?;
        self.is_first_look = false;
        Ok(answer.succeeded.then_some(Term {
            epoch: answer.revision,
            version: 1,
            lease,
            kept,
        }))
    }

    /// Blocks until the leader key may have changed since `revision`, or for a third of the TTL.
    fn wait_behind(&mut self, revision: u64) -> Result<Option<Term>, EtcdFailure> {
        let at_most = self.node.settings.ttl / 3;
        self.gateway.watch(&self.leader, revision + 1, at_most)?;
        Ok(None)
    }

    /// Renews this server's lease, or requests a new one. Returns its number.
    fn ensure_lease(&mut self) -> Result<u64, EtcdFailure> {
        let known = self.node.state.lock().lease;
        if let Some(lease) = known {
            if self.gateway.keep_alive(lease)? {
                return Ok(lease);
            }
        }
        let seconds = self.node.settings.ttl.as_secs();
        let lease = self.gateway.grant_lease(seconds)?;
        self.node.state.lock().lease = Some(lease);
        Ok(lease)
    }

    fn note(&self, leader: &KeyValue) {
        let epoch = leader.create_revision;
        let address = address_in(&leader.value);
        let is_this_servers = address.as_ref() == Some(&self.node.settings.advertise);
        let shown = Escaped(&leader.value);
        let has_address = address.is_some();
        let role = Role {
            active: Some(Active { epoch, address }),
            is_own: false,
        };
        let mut state = self.node.state.lock();
        state.active_seen = Some(Moment::now());
        let old = std::mem::replace(&mut state.role, role.clone());
        drop(state);
        if old == role {
            return;
        }
        self.node.changed.notify_all();
        info!("standby active={shown} epoch={epoch}");
        if !has_address {
            error!("bad-address active={shown} epoch={epoch}");
        }
        if is_this_servers {
            error!("same-advertise address={shown} epoch={epoch}");
        }
    }

    /// Renews the leader key until this server steps down or starts over, or the process ends.
    pub fn stay_elected(&mut self, term: &Term) {
        let ttl = self.node.settings.ttl;
        let (mut kept, mut pause) = (term.kept, ttl / 5);
        while !self.node.steps_down_within(pause) {
            let sent = Moment::now();
            pause = ttl / 5;
            match self.gateway.keep_alive(term.lease) {
                Ok(true) => kept = sent,
                Ok(false) if is_fault_planted("no-epoch") => {}
                // This server is stepping down, and has revoked the lease itself.
                Ok(false) if self.node.state.lock().lease.is_none() => {}
                Ok(false) => self.node.start_over("the lease of the leader key is over"),
                Err(failure) => {
                    let waiting = self.node.journal.waiting_sessions();
                    self.trouble.report(&failure, waiting);
                    if kept.elapsed() > ttl {
                        let why = "the leader key was not renewed for too long";
                        self.node.start_over(why);
                    }
                    pause = PAUSE;
                }
            }
        }
        self.unfit_since = Some(Moment::now());
    }
}

/// The address in the value of the leader key; `None` if it does not have the form of
/// `--advertise`. Any client of etcd could have written the value.
fn address_in(value: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(value).ok()?;
    host_and_port(text)?;
    Some(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port_and_nothing_else() {
        for good in ["a:1", "127.0.0.1:6388", "[::1]:6388", "db-1.example:65535"] {
            assert_eq!(address_in(good.as_bytes()).as_deref(), Some(good));
        }
        for bad in [
            &b""[..],
            b"a",
            b"a:0",
            b"a:1\nok",
            b"a\n:1",
            b"a:1 ",
            b"\x1b[2J:1",
            b"a b:1",
            b"\xff:1",
        ] {
            assert_eq!(address_in(bad), None, "{}", Escaped(bad));
        }
    }
}
