//! The session as the peer of a request that may wait.

use rustix::process::geteuid;

use super::{flush, Ending, SessionRules};
use crate::arbiter::{Certainty, WaitStage};
use crate::latchd::requests::Peer;
use crate::net::hangup::{HangupWatch, Input};
use crate::net::stream::Stream;

/// The peer of a request that may wait.
pub(super) struct Waiter<'a> {
    pub(super) stream: &'a Stream,
    pub(super) watch: &'a HangupWatch,
    pub(super) rules: &'a SessionRules,
    pub(super) id: u64,
    pub(super) out: &'a mut Vec<u8>,
    pub(super) unattested: &'a mut Certainty,
    pub(super) is_watched: &'a mut bool,
    /// How far the wait has come.
    pub(super) reached: Option<WaitStage>,
    /// How many bytes of the reply have been sent.
    pub(super) sent_len: usize,
}

impl Peer for Waiter<'_> {
    fn is_ready_to_wait(&self) -> bool {
        *self.is_watched && self.out.is_empty()
    }

    fn prepare_to_wait(&mut self) -> Result<(), Ending> {
        self.rules.attest(self.unattested);
        flush(self.out, self.stream, self.rules)?;
        if !*self.is_watched {
            let watched = self.watch.watch(self.stream, self.id);
            watched.map_err(Ending::Broken)?;
            *self.is_watched = true;
        }
        Ok(())
    }

    fn is_operator(&self, admin_token: Option<&str>) -> bool {
        let uid = self.stream.peer_uid();
        uid.is_some_and(|uid| uid == 0 || uid == geteuid().as_raw())
            || self.rules.is_admin_token(admin_token)
    }

    fn identity(&self) -> String {
        self.stream.identity()
    }

    fn note(&mut self, stage: WaitStage) {
        match stage {
            WaitStage::Begins => self.reached = Some(stage),
            WaitStage::IsLong => {
                self.reached = Some(stage);
                self.heed(Input::Heeded);
            }
            WaitStage::Sent(sent_len) => self.sent_len = sent_len,
        }
    }
}

impl Waiter<'_> {
    /// A peer that fills its window behind the wait counts as gone. The watch looks at what the
    /// peer sends only while the wait is long.
    fn heed(&self, input: Input) {
        // If this fails, a peer that floods the connection is seen to leave only later.
        let _ = self.watch.set_input(self.stream, self.id, input);
    }

    /// Whether the request has waited.
    pub(super) fn end_wait(self) -> bool {
        if self.reached == Some(WaitStage::IsLong) {
            self.heed(Input::Ignored);
        }
        self.reached.is_some()
    }
}
