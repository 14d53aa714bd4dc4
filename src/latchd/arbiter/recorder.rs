//! The arbiter's interface to a journal or a state file, and to the sessions that wait for them.

use std::time::Duration;

use crossbeam_channel::Receiver;

use super::{Arbiter, DrainUntil, State, Then};
use crate::latchd::table::{
    Change, ConnId, HolderRecord, Key, KeyHistory, LockTable, News, ProofRules, Recording, Scope,
    Ticket, STEP,
};
use crate::wire::token::Fence;

/// Receives every change of the holders that it records, in the order in which the table makes
/// them. Its methods run under the arbiter's mutex, so they must not block and not call the
/// arbiter.
pub trait Recorder: Send {
    fn record(&mut self, changes: Vec<Change>);

    /// Whether no change that concerns this key is unwritten. If one is, only the thread of its own
    /// connection may send a grant of the key, because it must first wait.
    fn is_written(&self, key: &str) -> bool;

    /// Stops taking changes, because another server continues from the changes recorded so far.
    /// Also records the end of the grants that no client knows of.
    fn stop(&mut self);
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

/// Whether the thread that frees a slot may send the grant to the waiter. If the grant is recorded,
/// or an unwritten change concerns its key, the connection's own thread sends it, because it must
/// first wait until the change is certain.
pub fn may_others_send(recorder: Option<&dyn Recorder>, table: &LockTable, ticket: Ticket) -> bool {
    recorder.is_none_or(|recorder| {
        let is_written = |key: &Key| recorder.is_written(key.as_str());
        !table.will_be_recorded(ticket) && table.key_of(ticket).is_none_or(is_written)
    })
}

impl Arbiter {
    /// Records the changes of these holders from now on. The thread of each session then sends the
    /// recorded grants itself, and must first wait until the reply is certain.
    pub fn record_with(&self, recording: Recording, recorder: Box<dyn Recorder>) {
        let mut state = self.state.lock();
        state.table.note_changes(recording);
        state.recorder = Some(recorder);
    }

    /// Lets the tokens of grants prove them from now on. Uses up a fence.
    pub fn make_proofs(&self, rules: ProofRules) {
        self.state.lock().table.make_proofs(rules);
    }

    /// Sets whether the state file can be written. While it cannot, no grant becomes a lasting one,
    /// and no lasting one gets a longer lease.
    pub fn set_writable(&self, is_writable: bool) {
        let (mut visit, now) = self.visit(Scope::Nothing);
        visit.table.set_writable(is_writable, now);
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

    /// Restores holders from the records of a journal or a state file, in order of their fences,
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

    /// Restores what an earlier server remembered of keys.
    pub fn restore_histories(&self, histories: Vec<KeyHistory>) {
        let (mut visit, _) = self.visit(Scope::Nothing);
        let histories = histories.into_iter();
        histories.for_each(|history| visit.table.restore_history(history));
    }

    /// Restarts the leases of these holders, except leases that have run out or would get shorter.
    pub fn begin_anew(&self, fences: &[Fence]) {
        let (mut visit, now) = self.visit(Scope::Nothing);
        visit.table.begin_anew(fences, now);
    }
}

impl State {
    /// Reports the changes since the last call. `max_keep_time` limits the leases of holders that
    /// would have no client at the next server.
    #[inline]
    pub fn record_changes(&mut self, max_keep_time: Duration) {
        let changes = self.table.changes();
        if let Some(changes) = changes.filter(|it| !it.is_empty()).map(std::mem::take) {
            self.record(changes, max_keep_time);
        }
    }

    fn record(&mut self, mut changes: Vec<Change>, max_keep_time: Duration) {
        if !self.table.records_all() {
            for change in &mut changes {
                if let News::Held(grant) = &mut change.news {
                    self.complete(&mut grant.record, grant.conn, max_keep_time);
                }
            }
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.record(changes);
        }
    }

    /// Adds to a record what only the client's seat knows. A client that cannot adopt its grant
    /// leaves it behind, so the grant must not last longer than a kept one could.
    pub fn complete(&self, record: &mut HolderRecord, conn: ConnId, max_keep_time: Duration) {
        if let Some(seat) = self.seats.get(&conn) {
            record.tag = record.tag.take().or_else(|| seat.tag.clone());
            if !seat.client.can_adopt {
                record.lease = record.lease.min(max_keep_time);
                record.left = record.left.map(|left| left.min(max_keep_time));
            }
        }
    }
}
