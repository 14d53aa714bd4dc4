//! The arbiter's interface to a journal or a state file, and to the sessions that wait for them.

use std::time::Duration;

use crossbeam_channel::Receiver;

use super::{Arbiter, DrainUntil, State, Then};
use crate::table::{
    Change, ConnId, HolderRecord, LastingChange, LastingNews, LockTable, ProofRules, Scope, Ticket,
    STEP,
};
use crate::token::Fence;

/// Receives every change of the holders, in the order in which the table makes them.
pub trait Recorder: Send {
    /// Takes all changes out of the list. Runs under the arbiter's mutex, so it must neither block
    /// nor call the arbiter.
    fn record(&mut self, changes: &mut Vec<Change>);

    /// Stops taking changes, because another server continues from the changes recorded so far.
    /// Also records the end of the grants that no client knows of. Runs under the arbiter's mutex,
    /// too.
    fn close(&mut self);
}

/// Receives every change of lasting grants, in the order in which the table makes them.
pub trait LastingRecorder: Send {
    /// Takes all changes out of the list. Runs under the arbiter's mutex, so it must neither block
    /// nor call the arbiter.
    fn record(&mut self, changes: &mut Vec<LastingChange>);

    /// Whether no change that concerns this key is unwritten. If one is, only the thread of its own
    /// connection may send a grant of the key, because it must first wait. Runs under the arbiter's
    /// mutex, too.
    fn is_written(&self, key: &str) -> bool;
}

/// What must be certain before the server sends a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Certainty {
    /// Nothing, because the reply promises nothing.
    #[default]
    None,
    /// The journal must have the changes of the holder that the reply is about.
    Journaled,
    /// In addition, this server must still be the active one. A reply that extends a lease needs
    /// this, because the journal may contain no change for it.
    JournaledByActive,
}

/// What one reply promises about holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyPromise {
    Nothing,
    /// The holder with this fence is as the reply says. The client may have made up the fence.
    Holder(Certainty, Fence),
    /// The client has the grant with this fence. The reply has its token.
    Grant(Certainty, Fence),
    /// All holders are as the reply says.
    All(Certainty),
}

/// What the replies that are sent together promise about holders.
#[derive(Debug, Default)]
pub struct Promised {
    pub certainty: Certainty,
    /// The holders that the replies are about.
    pub holders: Vec<Fence>,
    /// Whether the replies are about all holders.
    pub is_about_all: bool,
    /// The holders whose tokens are in the replies.
    pub grants: Vec<Fence>,
}

impl Promised {
    /// Adds what a reply promises.
    pub fn add(&mut self, promise: ReplyPromise) {
        let certainty = match promise {
            ReplyPromise::Nothing => return,
            ReplyPromise::Holder(certainty, fence) => {
                self.holders.push(fence);
                certainty
            }
            ReplyPromise::Grant(certainty, fence) => {
                self.holders.push(fence);
                self.grants.push(fence);
                certainty
            }
            ReplyPromise::All(certainty) => {
                self.is_about_all = true;
                certainty
            }
        };
        self.certainty = self.certainty.max(certainty);
    }
}

/// The journal and the state file, if there are any.
#[derive(Default)]
pub(super) struct Recorders {
    pub(super) journal: Option<Box<dyn Recorder>>,
    lasting: Option<Box<dyn LastingRecorder>>,
}

impl Recorders {
    /// Whether the thread that frees a slot may send the grant to the waiter. With a journal, the
    /// connection's own thread sends it, because it must first wait until the grant is certain. The
    /// same holds for a grant that the state file must have, and for one of a key of which it must
    /// first have a change.
    pub(super) fn let_others_send(&self, table: &LockTable, ticket: Ticket) -> bool {
        let may_send = |recorder: &dyn LastingRecorder| {
            let key = table.key_of(ticket);
            !table.will_last(ticket) && key.is_none_or(|key| recorder.is_written(key.as_str()))
        };
        self.journal.is_none() && self.lasting.as_deref().is_none_or(may_send)
    }
}

impl Arbiter {
    /// Records every change from now on. The thread of each session then sends its own grants, and
    /// must first wait for the [`Certainty`] that the reply needs.
    pub fn record_with(&self, recorder: Box<dyn Recorder>) {
        let mut state = self.state.lock();
        state.table.note_changes();
        state.recorders.journal = Some(recorder);
    }

    /// Records every change of lasting grants from now on: of kept grants, of grants whose leases
    /// are longer than `longest_ordinary`, and of grants whose clients cannot prove them. A session
    /// whose reply concerns such a grant must wait until the change is written. All other grants
    /// can be proved by their tokens from now on. Uses up a fence.
    pub fn record_lasting_grants(
        &self,
        longest_ordinary: Duration,
        proofs: ProofRules,
        recorder: Box<dyn LastingRecorder>,
    ) {
        let mut state = self.state.lock();
        state.table.note_lasting_grants(longest_ordinary);
        state.table.make_proofs(proofs);
        state.recorders.lasting = Some(recorder);
    }

    /// Sets whether changes of lasting grants can be written. While they cannot, no grant becomes a
    /// lasting one, and no lasting one gets a longer lease.
    pub fn set_lasting_writable(&self, is_writable: bool) {
        let (mut visit, _) = self.visit(Scope::Nothing);
        visit.table.set_lasting_writable(is_writable);
    }

    /// Closes the record as soon as every grant that belongs to a connection can be adopted over
    /// another connection. Until then, claims are granted as usual. The returned channel closes
    /// when the record is closed.
    pub fn close_record_once_all_can_adopt(&self) -> Receiver<()> {
        let (mut visit, _) = self.visit(Scope::Everything);
        visit.await_holders(DrainUntil::AllCanAdopt, Then::CloseRecord)
    }

    pub fn close_record(&self) {
        self.visit(Scope::Everything).0.close_record();
    }

    /// Restores holders from the records of a journal or a hand-over, in order of their fences,
    /// each with a lease that begins now. Returns the records that contradict others.
    pub fn restore<'a>(&self, records: &'a [HolderRecord]) -> Vec<&'a HolderRecord> {
        let (mut bad, mut left) = (Vec::new(), records.chunks(STEP));
        self.visit_in_steps(Scope::Nothing, |state, now| {
            let some = left.next().unwrap_or_default();
            let is_bad = |record: &&HolderRecord| !state.table.restore(record, now);
            bad.extend(some.iter().filter(is_bad));
            left.len() == 0
        });
        bad
    }

    /// Restarts the leases of these holders, except leases that have run out or would get shorter.
    pub fn begin_anew(&self, fences: &[Fence]) {
        let (mut visit, now) = self.visit(Scope::Nothing);
        visit.table.begin_anew(fences, now);
    }

    /// The number of holders without a connection.
    pub fn orphan_count(&self) -> usize {
        self.visit(Scope::Everything).0.table.orphan_count()
    }
}

impl State {
    /// Reports the changes since the last call. `max_keep_time` limits the leases of holders that
    /// would have no client at the next server.
    #[inline]
    pub(super) fn record_changes(&mut self, max_keep_time: Duration) {
        if let (Some(recorder), Some(changes)) = (&mut self.recorders.journal, self.table.changes())
        {
            if !changes.is_empty() {
                recorder.record(changes);
            }
        }
        if self.recorders.lasting.is_some() {
            self.record_lasting_changes(max_keep_time);
        }
    }

    fn record_lasting_changes(&mut self, max_keep_time: Duration) {
        let Some(changes) = self.table.lasting_changes().filter(|it| !it.is_empty()) else {
            return;
        };
        let mut changes = std::mem::take(changes);
        for change in &mut changes {
            if let LastingNews::Lasts(grant) = &mut change.news {
                self.complete(&mut grant.record, grant.conn, max_keep_time);
            }
        }
        if let Some(recorder) = &mut self.recorders.lasting {
            recorder.record(&mut changes);
        }
    }

    /// Adds to a record what only the client's seat knows. A client that cannot adopt its grant
    /// leaves it behind, so the grant must not last longer than a kept one could.
    pub(super) fn complete(
        &self,
        record: &mut HolderRecord,
        conn: ConnId,
        max_keep_time: Duration,
    ) {
        if let Some(seat) = self.seats.get(&conn) {
            record.tag = record.tag.take().or_else(|| seat.tag.clone());
            if !seat.client.can_adopt {
                record.lease = record.lease.min(max_keep_time);
            }
        }
    }
}
