//! The arbiter's interface to a journal, and to the sessions that wait for it.

use crossbeam_channel::Receiver;

use super::{Arbiter, DrainUntil, Then};
use crate::table::{Change, HolderRecord, Scope};
use crate::token::Fence;

/// How many holders are restored before other threads get their turn.
const RESTORED_AT_ONCE: usize = 500;

/// Receives every change of the holders, in the order of the table.
pub trait Recorder: Send {
    /// Takes all changes out of the list. Called under the arbiter's mutex: it must not block, nor
    /// call the arbiter.
    fn record(&mut self, changes: &mut Vec<Change>);

    /// Takes no more changes: another server continues from those recorded so far. Ends the grants
    /// that no client knows of, `untold` among them. Called as [`Recorder::record`] is.
    fn close(&mut self, untold: Vec<Fence>);
}

/// What must be certain before a reply leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Certainty {
    /// Nothing: the reply promises nothing.
    #[default]
    None,
    /// The changes of its holder are in the journal.
    Journaled,
    /// In addition, this server is still the active one: the reply promises more time, perhaps
    /// without any change in the journal.
    JournaledByActive,
}

impl Arbiter {
    /// Records every change from now on. Grants are then sent by the threads of their own sessions,
    /// which must wait for the [`Certainty`] that they need.
    pub fn record_with(&self, recorder: Box<dyn Recorder>) {
        let mut state = self.state.lock();
        state.table.note_changes();
        state.recorder = Some(recorder);
    }

    /// Closes the record at the end of the visit that leaves no holder who cannot come back over
    /// another connection. Grants go on until then. The receiver's channel closes with the record.
    pub fn close_record_once_all_can_adopt(&self) -> Receiver<()> {
        let (mut visit, _) = self.visit(Scope::Everything);
        visit.await_holders(DrainUntil::AllCanAdopt, Then::CloseRecord)
    }

    pub fn close_record(&self) {
        self.visit(Scope::Everything).0.close_record();
    }

    /// Brings back the holders that a journal knows, in order of their fences, each with its lease
    /// beginning now. Returns those that contradict others.
    pub fn restore<'a>(&self, records: &'a [HolderRecord]) -> Vec<&'a HolderRecord> {
        let mut bad = Vec::new();
        for some in records.chunks(RESTORED_AT_ONCE) {
            let (mut visit, now) = self.visit(Scope::Nothing);
            let is_bad = |record: &&HolderRecord| !visit.table.restore(record, now);
            bad.extend(some.iter().filter(is_bad));
        }
        bad
    }

    /// Starts leases anew that are not over.
    pub fn begin_anew(&self, fences: &[Fence]) {
        let (mut visit, now) = self.visit(Scope::Nothing);
        visit.table.begin_anew(fences, now);
    }

    /// How many holders were restored whose clients have not come back.
    pub fn orphan_count(&self) -> usize {
        self.visit(Scope::Everything).0.table.orphan_count()
    }
}
