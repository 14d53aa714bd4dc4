//! The statistics of a server, as the JSON of `stats` (latch-protocol(7), STATISTICS). They are for
//! sessions and for the HTTP door, which also shows the counters in the format of Prometheus.

use crate::arbiter::Arbiter;
use crate::cluster::ClusterNode;
use crate::log::Log;
use crate::protocol::counters::{Figures, Oldest};
use crate::protocol::{histories, queues, stats};
use crate::table::{Key, KeySnapshot, Listing, KEYS_AT_ONCE};

/// The maximum memory of a page of statistics, in bytes.
pub(super) const PAGE_LEN: usize = 64 * 1024;

/// The number of pages that are written before other threads get the processor. Writing them takes
/// half a millisecond.
const PAGES_AT_ONCE: usize = 8;

/// The number of histories of keys in a page.
const HISTORIES_AT_ONCE: usize = 16;

pub(super) struct StatisticsSource<'a> {
    pub(super) arbiter: &'a Arbiter,
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
            let orphans = self.arbiter.orphan_count();
            stats::append_cluster(epoch, orphans, journal_time, out);
        }
        stats::append_settling(self.arbiter.settling_left(), out);
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
        let (mut separator, mut page_count) = ("", 0);
        loop {
            yield_after(&mut page_count);
            for status in std::mem::take(&mut page) {
                out.extend(separator.bytes());
                queues::write_key(&status.queue, status.clients(), out, &mut send)?;
                separator = ",";
            }
            if next.is_none() {
                break;
            }
            (page, next) = self.arbiter.queues(next, queues::PLACES_OF_EACH);
        }
        out.extend(b"]}");
        stats::append_settling(self.arbiter.settling_left(), out);
        if let Some(history) = key.and_then(|key| self.arbiter.history(key)) {
            histories::append_history(&history, out);
        }
        Ok(())
    }

    /// Writes the past holders of all keys that have some, or under which work is expected.
    pub(super) fn write_histories<E>(
        &self,
        out: &mut Vec<u8>,
        mut send: impl FnMut(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        out.extend(b"{\"keys\":[");
        let (mut last, mut separator): (Option<Key>, _) = (None, "");
        loop {
            let page = self.arbiter.histories(last.as_ref(), HISTORIES_AT_ONCE);
            for history in &page {
                out.extend(separator.bytes());
                histories::write_history(history, out);
                separator = ",";
                send(out)?;
            }
            match page.last() {
                Some(history) => last = Some(history.key.clone()),
                None => break,
            }
        }
        out.extend(b"]}");
        Ok(())
    }

    /// Writes the server's counters. They are short, so they are written in one piece.
    pub(super) fn write_counters(&self, out: &mut Vec<u8>) {
        let (figures, oldest) = self.counters();
        figures.write_json(&oldest, out);
    }

    /// The server's counters, and its oldest waits and holds.
    pub(super) fn counters(&self) -> (Figures, Oldest) {
        let oldest = self.oldest();
        let (mut expected, at) = self.arbiter.expected();
        // Clients tell the active server how their work has ended.
        if self.node.is_some_and(|node| !node.is_active()) {
            expected.clear();
        }
        let (connection_count, snapshot) = self.arbiter.counters();
        let figures = Figures::new(
            connection_count,
            self.arbiter.bound_holder_count(),
            self.log.dropped_count(),
            self.worst_case,
            &snapshot,
            &oldest,
            &(expected, at),
        );
        (figures, oldest)
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
