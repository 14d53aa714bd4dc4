//! The thread that runs for the office, and keeps it.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use log::{error, info};

use super::etcd::{self, EtcdFailure, Gateway, KeyValue};
use super::record::Names;
use super::trouble::Trouble;
use super::{is_planted, lease_before, Active, Office, Role, Term};
use crate::sys::moment::Moment;
use crate::text::Escaped;

/// The pause after a failure, before the next attempt.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct Candidate {
    office: Arc<Office>,
    gateway: Gateway,
    leader: Vec<u8>,
    /// A leader with this server's own address at the first look is its former self.
    is_first_look: bool,
    trouble: Trouble,
}

/// Whether a leader with this server's own address, at the first look, is what it was before it was
/// started again. A server that has started over knows its lease: if two servers have one address,
/// each would else take the office from the other, over and over.
fn is_former_self(leader: &KeyValue) -> bool {
    lease_before().is_none_or(|lease| lease == leader.lease)
}

impl Candidate {
    pub(super) fn new(office: Arc<Office>) -> Candidate {
        Candidate {
            gateway: office.gateway(),
            leader: Names(office.settings.prefix.clone()).leader(),
            office,
            is_first_look: true,
            trouble: Trouble::default(),
        }
    }

    /// Blocks until this server is elected.
    pub(super) fn stand(&mut self) -> Term {
        loop {
            self.office.wait_while_leaving();
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

    /// Runs for the office, and if another server has it, waits for a while. `None`: it is time to
    /// run again.
    fn run_once(&mut self) -> Result<Option<Term>, EtcdFailure> {
        let kept = Moment::now();
        let lease = self.keep_lease()?;
        let address = self.office.settings.advertise.clone();
        let answer = self.gateway.txn(
            &etcd::is_created(&self.leader, 0),
            &etcd::put(&self.leader, address.as_bytes(), lease),
            &etcd::look_up(&self.leader),
        )?;
        let term = |epoch, version| {
            Ok(Some(Term {
                epoch,
                version,
                lease,
                kept,
            }))
        };
        if answer.succeeded {
            return term(answer.revision, 1);
        }
        let Some(leader) = answer.found.first() else {
            return Err(EtcdFailure::Refused {
                code: 0,
                message: "the office is neither vacant nor taken".to_owned(),
            });
        };
        // The answer to an earlier attempt was lost.
        if leader.lease == lease {
            return term(leader.create_revision, leader.version);
        }
        let is_first_look = std::mem::take(&mut self.is_first_look);
        if is_first_look && leader.value == address.as_bytes() && is_former_self(leader) {
            let is_still = etcd::is_created(&self.leader, leader.create_revision);
            self.gateway
                .txn(&is_still, &etcd::delete(&self.leader), "")?;
            return Ok(None);
        }
        self.note(leader);
        let at_most = self.office.settings.ttl / 3;
        self.gateway
            .watch(&self.leader, answer.revision + 1, at_most)?;
        Ok(None)
    }

    /// The number of a lease that was begun or kept alive just now.
    fn keep_lease(&mut self) -> Result<u64, EtcdFailure> {
        let known = self.office.state.lock().lease;
        if let Some(lease) = known {
            if self.gateway.keep_alive(lease)? {
                return Ok(lease);
            }
        }
        let seconds = self.office.settings.ttl.as_secs();
        let lease = self.gateway.grant_lease(seconds)?;
        self.office.state.lock().lease = Some(lease);
        Ok(lease)
    }

    fn note(&self, leader: &KeyValue) {
        let address = String::from_utf8_lossy(&leader.value).into_owned();
        let shown = Escaped(address.as_bytes()).to_string();
        let epoch = leader.create_revision;
        let is_this_servers = address == self.office.settings.advertise;
        let role = Role {
            active: Some(Active { epoch, address }),
            is_own: false,
        };
        let old = std::mem::replace(&mut self.office.state.lock().role, role.clone());
        if old == role {
            return;
        }
        self.office.changed.notify_all();
        info!("standby active={shown} epoch={epoch}");
        if is_this_servers {
            error!("same-advertise address={shown} epoch={epoch}");
        }
    }

    /// Keeps the office until the process ends, or the server starts over.
    pub(super) fn keep(&mut self, term: &Term) -> ! {
        let ttl = self.office.settings.ttl;
        let (mut kept, mut pause) = (term.kept, ttl / 5);
        loop {
            thread::sleep(pause);
            let sent = Moment::now();
            pause = ttl / 5;
            match self.gateway.keep_alive(term.lease) {
                Ok(true) => kept = sent,
                Ok(false) if is_planted("no-epoch") => {}
                Ok(false) => self.office.start_over("the office's lease is over"),
                Err(failure) => {
                    let held_back = self.office.journal.held_back();
                    self.trouble.report(&failure, held_back);
                    if kept.elapsed() > ttl {
                        let why = "the office was not kept for too long";
                        self.office.start_over(why);
                    }
                    pause = PAUSE;
                }
            }
        }
    }
}
