//! The replies to `stats` (latch-protocol(7), STATISTICS).

use super::{Ending, Session};
use crate::arbiter::Certainty;
use crate::protocol::reply::Reply;
use crate::protocol::{counters, queues, stats};
use crate::sys::memory::{self, Purpose};
use crate::table::Key;
use crate::token::Fence;

/// What a page of statistics takes at the most, in bytes.
const STATS_PAGE_LEN: usize = 64 * 1024;

/// Pages of statistics before other threads get the processor: half a millisecond.
const PAGES_AT_ONCE: usize = 8;

impl Session<'_, '_> {
    /// Answers a request for statistics: `show` makes them in pages, for one of which there must be
    /// memory.
    pub(super) fn show(
        &mut self,
        show: impl FnOnce(&mut Self) -> Result<(), Ending>,
    ) -> Result<(), Ending> {
        self.input.end_frame();
        match memory::reserve(STATS_PAGE_LEN, Purpose::Service) {
            Some(_reservation) => show(self),
            None => self.outbox.add(&Reply::Error, 0),
        }
    }

    /// Statistics can be large, and a peer may not read them: they are sent piece by piece, so that
    /// they take no more memory than any other reply.
    pub(super) fn show_stats(&mut self) -> Result<(), Ending> {
        let arbiter = self.seat.arbiter();
        let (out, send) = self.outbox.in_pieces();
        let mut page_count = 0;
        let page_after = |after: Option<&Key>| {
            give_way_after(&mut page_count);
            arbiter.snapshot(after, stats::PAGE_LEN)
        };
        out.extend(b"ok ");
        stats::write_json(arbiter.seat_count(), page_after, out, send)?;
        self.append_figures();
        self.outbox.out.push(b'\n');
        Ok(())
    }

    /// Appends what `stats` says of this server as one of several.
    fn append_figures(&mut self) {
        let figures = self
            .rules
            .office
            .as_ref()
            .and_then(|office| office.figures());
        if let Some((epoch, journal_time)) = figures {
            let orphans = self.seat.arbiter().orphan_count();
            stats::append_cluster(epoch, orphans, journal_time, &mut self.outbox.out);
        }
    }

    /// Who holds and waits for a key, or for all keys in use: sent in pieces, too.
    pub(super) fn show_queues(&mut self, key: Option<&str>) -> Result<(), Ending> {
        let arbiter = self.seat.arbiter();
        let (out, send) = self.outbox.in_pieces();
        out.extend(b"ok {\"keys\":[");
        let (mut page, mut last) = match key {
            Some(key) => {
                let roll = arbiter.queue(key, queues::PLACES_OF_ONE);
                (roll.into_iter().collect(), None)
            }
            None => arbiter.queues(None, queues::PLACES_OF_EACH),
        };
        let (mut separator, mut page_count) = ("", 0);
        loop {
            give_way_after(&mut page_count);
            for roll in std::mem::take(&mut page) {
                out.extend(separator.bytes());
                queues::write_key(&roll.queue, roll.clients(), out, &send)?;
                separator = ",";
            }
            if last.is_none() {
                break;
            }
            (page, last) = arbiter.queues(last.as_ref(), queues::PLACES_OF_EACH);
        }
        out.extend(b"]}\n");
        Ok(())
    }

    /// The grant of a key that has this fence. Its client gives the lock up if there is none, so a
    /// server that has lost its office must not answer. It fits in one piece.
    pub(super) fn show_holder(&mut self, key: &str, fence: Fence) -> Result<(), Ending> {
        let out = &mut self.outbox.out;
        out.extend(b"ok {\"keys\":[");
        if let Some(roll) = self.seat.arbiter().holder(key, fence, self.seat.id()) {
            let go_on = |_: &mut Vec<u8>| Ok::<(), Ending>(());
            queues::write_key(&roll.queue, roll.clients(), out, go_on)?;
        }
        out.extend(b"]}\n");
        self.outbox.promise(Certainty::Anew, Some(fence));
        self.outbox.flush_if_full()
    }

    /// What the server has counted: short beside the statistics, but longer than other replies.
    pub(super) fn show_counters(&mut self) -> Result<(), Ending> {
        let (connection_count, snapshot) = self.seat.arbiter().counters();
        let dropped_line_count = self.rules.log.dropped_count();
        let out = &mut self.outbox.out;
        out.extend(b"ok ");
        counters::write_json(connection_count, dropped_line_count, &snapshot, out);
        out.push(b'\n');
        self.outbox.flush_if_full()
    }
}

/// Counts the pages of a long reply. On a host with one processor, the sessions that have a request
/// to read run between them: otherwise each would wait for several ticks of the kernel's clock.
fn give_way_after(page_count: &mut usize) {
    *page_count += 1;
    if *page_count % PAGES_AT_ONCE == 0 {
        std::thread::yield_now();
    }
}
