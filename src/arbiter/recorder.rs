//! The arbiter's interface to a journal, and to the sessions that wait for it.

use crossbeam_channel::Receiver;

use super::{Arbiter, DrainUntil, Then};
use crate::table::{Change, HolderRecord, Scope, STEP};
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

impl Arbiter {
    /// Records every change from now on. The thread of each session then sends its own grants, and
    /// must first wait for the [`Certainty`] that the reply needs.
    pub fn record_with(&self, recorder: Box<dyn Recorder>) {
        let mut state = self.state.lock();
        state.table.note_changes();
        state.recorder = Some(recorder);
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
