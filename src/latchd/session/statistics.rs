//! The replies to `stats` (latch-protocol(7), STATISTICS).

use super::Session;
use crate::arbiter::{Certainty, ReplyPromise};
use crate::latchd::ending::Ending;
use crate::latchd::statistics::{StatisticsSource, PAGE_LEN};
use crate::protocol::queues;
use crate::protocol::reply::Reply;
use crate::sys::memory::{self, Purpose};
use crate::token::Fence;

impl Session<'_, '_> {
    /// Answers a request for statistics. `show` writes them in pages. Replies `error` if there is
    /// no memory for a page.
    #[inline(never)] // other requests need none of its stack, which is large
    pub(super) fn show(
        &mut self,
        show: impl FnOnce(&mut Self) -> Result<(), Ending>,
    ) -> Result<(), Ending> {
        self.input.end_frame();
        match memory::reserve(PAGE_LEN, Purpose::Service) {
            Some(_reservation) => show(self),
            None => self.outbox.add(&Reply::Error, ReplyPromise::Nothing),
        }
    }

    pub(super) fn show_stats(&mut self) -> Result<(), Ending> {
        self.show_in_pieces(|statistics, out, send| statistics.write_keys(out, send))
    }

    pub(super) fn show_queues(&mut self, key: Option<&str>) -> Result<(), Ending> {
        self.show_in_pieces(|statistics, out, send| statistics.write_queues(key, out, send))
    }

    /// Shows the grant of a key that has this fence. If there is none, the client gives up its
    /// lock, so a server that is no longer active must not answer. The reply fits into one piece.
    pub(super) fn show_holder(&mut self, key: &str, fence: Fence) -> Result<(), Ending> {
        let out = &mut self.outbox.out;
        out.extend(b"ok {\"keys\":[");
        if let Some(status) = self.seat.arbiter().holder(key, fence, self.seat.id()) {
            let go_on = |_: &mut Vec<u8>| Ok::<(), Ending>(());
            queues::write_key(&status.queue, status.clients(), out, go_on)?;
        }
        out.extend(b"]}\n");
        // The state file may have to have the numbers.
        self.outbox.await_key(key);
        let promise = ReplyPromise::Holder(Certainty::JournaledByActive, fence);
        self.outbox.end_reply(promise)
    }

    pub(super) fn show_counters(&mut self) -> Result<(), Ending> {
        self.show_in_pieces(|statistics, out, _| {
            statistics.write_counters(out);
            Ok(())
        })?;
        self.outbox.end_reply(ReplyPromise::Nothing)
    }

    fn show_in_pieces(
        &mut self,
        write: impl FnOnce(
            &StatisticsSource<'_>,
            &mut Vec<u8>,
            &dyn Fn(&mut Vec<u8>) -> Result<(), Ending>,
        ) -> Result<(), Ending>,
    ) -> Result<(), Ending> {
        let statistics = StatisticsSource {
            arbiter: self.seat.arbiter(),
            node: self.rules.node.as_deref(),
            log: &self.rules.log,
            worst_case: self.rules.worst_case,
        };
        self.outbox.flush()?;
        let (out, send) = self.outbox.in_pieces();
        out.extend(b"ok ");
        write(&statistics, out, &send)?;
        out.push(b'\n');
        Ok(())
    }
}
