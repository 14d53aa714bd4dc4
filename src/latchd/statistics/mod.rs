//! The statistics of a server, as the JSON of `stats` (latch-protocol(7), STATISTICS). They are for
//! sessions and for the HTTP door, which also shows the counters in the format of Prometheus.

pub mod counters;
pub mod histories;
pub mod queues;
pub mod stats;

use crate::latchd::arbiter::Arbiter;
use crate::latchd::cluster::ClusterNode;
use crate::latchd::statistics::counters::{Figures, Oldest};
use crate::latchd::table::{KeySnapshot, Listing, KEYS_AT_ONCE};
use crate::shared::log::Log;
use crate::shared::net::connections::Connections;

/// The maximum memory of a page of statistics, in bytes.
pub(super) const PAGE_LEN: usize = 64 * 1024;

/// The number of pages that are written before other threads get the processor. Writing them takes
/// half a millisecond.
const PAGES_AT_ONCE: usize = 8;

/// The number of histories of keys in a page.
const HISTORIES_AT_ONCE: usize = 16;

pub(super) struct StatisticsSource<'a> {
    pub(super) arbiter: &'a Arbiter,
    pub(super) connections: &'a Connections,
    pub(super) node: Option<&'a ClusterNode>,
    pub(super) log: &'a Log,
    pub(super) worst_case: u64,
}

/// Statistics can be large, and a peer may not read them, so they are written in pieces. `send` is
/// called after each piece, and may clear the buffer.
impl StatisticsSource<'_> {
    /// Writes all keys, in the form that every version knows.
    pub(super) fn write_keys<E>(
        &self,
        out: &mut Vec<u8>,
        send: impl FnMut(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        stats::write_json(self.arbiter.seat_count(), self.pages(), out, send)?;
        let figures = self.node.and_then(ClusterNode::figures);
        if let Some((epoch, journal_time)) = figures {
            let orphans = self.arbiter.counters().1.orphan_count;
            stats::append_cluster(epoch, orphans, journal_time, out);
        }
        stats::append_settling(self.arbiter.settling_left(), out);
        stats::append_turned_away(self.connections.turned_away_count(), out);
        Ok(())
    }

    /// Writes who holds and who waits: for one key, or for all keys in use.
    pub(super) fn write_queues<E>(
        &self,
        key: Option<&str>,
        out: &mut Vec<u8>,
        mut send: impl FnMut(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        out.extend(b"{\"keys\":[");
        let (mut page, mut next) = match key {
            Some(key) => {
                let status = self.arbiter.queue(key, queues::PLACES_OF_ONE);
                (status.into_iter().collect(), None)
            }
            None => self.arbiter.queues(None, queues::PLACES_OF_EACH),
        };
        let mut page_count = 0;
        loop {
            yield_after(&mut page_count);
            for status in std::mem::take(&mut page) {
                stats::separate(out);
                queues::write_key(&status.queue, status.clients(), out, &mut send)?;
            }
            if next.is_none() {
                break;
            }
            (page, next) = self.arbiter.queues(next, queues::PLACES_OF_EACH);
        }
        out.extend(b"]}");
        stats::append_settling(self.arbiter.settling_left(), out);
        stats::append_turned_away(self.connections.turned_away_count(), out);
        if let Some(history) = key.and_then(|key| self.arbiter.history(key)) {
            histories::append_history(&history, out);
        }
        Ok(())
    }

    /// Writes the histories of all keys that have one.
    pub(super) fn write_histories<E>(
        &self,
        out: &mut Vec<u8>,
        mut send: impl FnMut(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        out.extend(b"{\"keys\":[");
        let mut page = self.arbiter.histories(None, HISTORIES_AT_ONCE);
        while let Some(last) = page.last().map(|history| history.key.clone()) {
            for history in &page {
                stats::separate(out);
                histories::write_history(history, out);
                send(out)?;
            }
            page = self.arbiter.histories(Some(&last), HISTORIES_AT_ONCE);
        }
        out.extend(b"]}");
        Ok(())
    }

    /// Writes the server's counters. They are short, so they are written in one piece.
    pub(super) fn write_counters(&self, out: &mut Vec<u8>) {
        self.counters().write_json(out);
    }

    pub(super) fn counters(&self) -> Figures {
        let oldest = self.oldest();
        let (mut expected, now) = self.arbiter.expected();
        // Clients tell the active server how their work has ended.
        if self.node.is_some_and(|node| !node.is_active()) {
            expected.clear();
        }
        let (connection_count, snapshot) = self.arbiter.counters();
        Figures {
            connection_count,
            unadoptable_holder_count: self.arbiter.unadoptable_holder_count(),
            turned_away_count: self.connections.turned_away_count(),
            dropped_line_count: self.log.dropped_count(),
            worst_case_bytes: self.worst_case,
            snapshot,
            oldest,
            expected,
            now,
        }
    }

    /// The oldest waits and holds of all keys. The keys are looked at page by page.
    fn oldest(&self) -> Oldest {
        let mut page_of = self.pages();
        let (mut oldest, mut listing) = (Oldest::default(), None);
        loop {
            let (page, next) = page_of(listing);
            page.iter().for_each(|key| oldest.add(key));
            if next.is_none() {
                return oldest;
            }
            listing = next;
        }
    }

    /// Returns a function that gives one page of the keys, and where the next page begins.
    fn pages(&self) -> impl FnMut(Option<Listing>) -> (Vec<KeySnapshot>, Option<Listing>) + '_ {
        let mut page_count = 0;
        move |listing| {
            yield_after(&mut page_count);
            self.arbiter.snapshot(listing, KEYS_AT_ONCE)
        }
    }
}

/// Counts the pages of a long reply, and yields the processor after some of them. Otherwise, on a
/// host with one processor, every other session that has a request to read would wait for several
/// ticks of the kernel's clock.
fn yield_after(page_count: &mut usize) {
    *page_count += 1;
    if *page_count % PAGES_AT_ONCE == 0 {
        std::thread::yield_now();
    }
}
