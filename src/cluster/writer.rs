//! The thread that writes the journal: it takes over from the server that was active before, and
//! then writes batch after batch.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use log::{error, info};

use super::etcd::{self, EtcdFailure, Gateway, TxnAnswer};
use super::journal::{granted, FENCE_RANGE};
use super::record::{self, Names};
use super::trouble::Trouble;
use super::{is_planted, Office, Term};
use crate::arbiter::Arbiter;
use crate::fence::source::fence_of_clock;
use crate::sys::moment::Moment;
use crate::table::{Change, HolderRecord};
use crate::text::Escaped;
use crate::token::Fence;

/// Clients count their leases from the reply, mostly. If it comes later than this, the lease begins
/// anew.
const LATE: Duration = Duration::from_millis(100);

/// How many holders are read at a time, and by what that is divided if it was too much: for the
/// time that a request may take, or for the length of an answer.
const PAGE_LEN: usize = 1000;
const PAGE_DIVISOR: usize = 4;

/// The pause after a request without an answer, and after one that etcd has refused.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_millis(250);

/// Writes the journal for one term.
pub(super) struct Writer {
    office: Arc<Office>,
    arbiter: Arc<Arbiter>,
    gateway: Gateway,
    names: Names,
    term: Term,
    trouble: Trouble,
}

impl Writer {
    pub(super) fn new(office: Arc<Office>, arbiter: Arc<Arbiter>, term: Term) -> Writer {
        Writer {
            gateway: office.gateway(),
            names: Names(office.settings.prefix.clone()),
            office,
            arbiter,
            term,
            trouble: Trouble::default(),
        }
    }

    /// Takes over, and writes until the process ends.
    pub(super) fn run(mut self) -> ! {
        self.take_over();
        let journal = Arc::clone(&self.office.journal);
        loop {
            let round = journal.next_round();
            self.commit(&round.changes, round.reserve);
            if round.recorded_at.elapsed() > LATE {
                self.arbiter.begin_anew(&granted(&round.changes));
            }
            if journal.finish(&round) {
                self.arbiter.tokens_are_back();
            }
        }
    }

    /// Reads what the server before has left behind, and gives the holders their leases anew.
    fn take_over(&mut self) {
        let began = Instant::now();
        let fence = etcd::look_up(&self.names.fence());
        let ceiling = self.insist(|gateway| gateway.txn("", &fence, ""));
        let used = ceiling.found.first().and_then(|found| {
            let used = record::decode_ceiling(&found.value);
            if used.is_none() {
                error!("bad-record key={}", Escaped(&found.key));
            }
            used
        });
        let records = self.read_holders();
        let newest = records.last().map(|record| record.token.fence.0);
        let beyond_used = used.max(newest).map_or(0, |fence| fence.saturating_add(1));
        let first = beyond_used.max(fence_of_clock(SystemTime::now()));
        let end = first.saturating_add(FENCE_RANGE);
        self.commit(&[], Some(end));
        self.office.journal.begin(first, end);
        // A lease may be over before the last holder is restored.
        let journal = Arc::clone(&self.office.journal);
        self.arbiter.record_with(Box::new(journal));
        for bad in self.arbiter.restore(&records) {
            let name = self.names.holder(bad.token.fence);
            error!("bad-record key={}", Escaped(&name));
        }
        if is_planted("slow-takeover") {
            thread::sleep(Duration::from_secs(3));
        }
        let epoch = self.term.epoch;
        self.office.become_active(epoch);
        let (holders, fence) = (records.len(), Fence(first));
        let took_ms = began.elapsed().as_millis();
        info!("active epoch={epoch} holders={holders} fence={fence} took_ms={took_ms}");
    }

    /// The holders in etcd, in order of their fences. No other server writes them any more.
    fn read_holders(&mut self) -> Vec<HolderRecord> {
        let (mut next, end) = self.names.holders();
        let (mut records, mut page_len) = (Vec::new(), PAGE_LEN);
        loop {
            let page = self.insist(|gateway| {
                let page = gateway.range(&next, &end, page_len);
                if matches!(page, Err(EtcdFailure::NoAnswer { .. })) {
                    page_len = (page_len / PAGE_DIVISOR).max(1);
                }
                page
            });
            for found in &page {
                match self.names.decode(&found.key, &found.value) {
                    Some(_) if is_planted("orphans-dropped") => {}
                    Some(record) => records.push(record),
                    None => error!("bad-record key={}", Escaped(&found.key)),
                }
            }
            match page.last() {
                Some(last) if page.len() == page_len => {
                    next = last.key.clone();
                    next.push(0);
                    // What was too much may be behind, and a slow etcd may have recovered.
                    page_len = (page_len * 2).min(PAGE_LEN);
                }
                _ => return records,
            }
        }
    }

    /// Has a request carried out, however often it takes.
    fn insist<T>(&mut self, mut request: impl FnMut(&mut Gateway) -> Result<T, EtcdFailure>) -> T {
        let began = Moment::now();
        loop {
            match request(&mut self.gateway) {
                Ok(done) => return done,
                Err(failure) => self.bear(&failure, began),
            }
        }
    }

    /// Writes a batch, or asks a question if there is nothing to write. Returns when it is certain.
    /// If this server is deposed, it starts over.
    fn commit(&mut self, changes: &[Change], reserve: Option<u64>) {
        let is_question = changes.is_empty() && reserve.is_none();
        let [compare, then, otherwise] = self.parts(changes, reserve, is_question);
        let began = Moment::now();
        loop {
            match self.gateway.txn(&compare, &then, &otherwise) {
                Ok(answer) if answer.succeeded => break,
                Ok(answer) => break self.expect_copy(&answer, is_question),
                Err(failure) => {
                    self.bear(&failure, began);
                    // No lease ends before its holder has been told of it.
                    let mut fences = granted(changes);
                    fences.extend(self.office.journal.pending_grants());
                    self.arbiter.begin_anew(&fences);
                }
            }
        }
        self.term.version += u64::from(!is_question);
    }

    /// The parts of the transaction.
    fn parts(&self, changes: &[Change], reserve: Option<u64>, is_question: bool) -> [String; 3] {
        let leader = self.names.leader();
        let mut compare = Vec::new();
        if !is_planted("no-epoch") {
            compare.push(etcd::is_created(&leader, self.term.epoch));
        }
        if !is_planted("no-batch-number") {
            compare.push(etcd::is_version(&leader, self.term.version));
        }
        let operations = changes.iter().map(|change| self.operation(change));
        let mut then: Vec<String> = operations.collect();
        if let Some(end) = reserve {
            let ceiling = end.saturating_sub(1).to_string();
            then.push(etcd::put(&self.names.fence(), ceiling.as_bytes(), 0));
        }
        // Without an operation, a member would answer a question from its own memory.
        let look_up = match is_planted("question-without-range") {
            true => String::new(),
            false => etcd::look_up(&leader),
        };
        then.push(match is_question {
            true => look_up.clone(),
            false => {
                let address = self.office.settings.advertise.as_bytes();
                etcd::put(&leader, address, self.term.lease)
            }
        });
        [compare.join(","), then.join(","), look_up]
    }

    fn operation(&self, change: &Change) -> String {
        let name = self.names.holder(change.fence());
        match change {
            Change::Held(record) => etcd::put(&name, record::encode(record).as_bytes(), 0),
            Change::Ended(_) => etcd::delete(&name),
        }
    }

    /// Returns if the comparisons failed because another copy of this batch was carried out. Else
    /// this server is deposed, and starts over.
    fn expect_copy(&self, answer: &TxnAnswer, is_question: bool) {
        let (office, Term { epoch, version, .. }) = (&self.office, self.term);
        let Some(leader) = answer.found.first() else {
            office.start_over("the office is vacant")
        };
        if leader.create_revision != epoch {
            office.start_over("another server is active");
        }
        let found = leader.version;
        if is_question || found != version + 1 {
            error!("foreign-batch epoch={epoch} found={found} expected={version}");
            office.start_over("another has written under this epoch");
        }
    }

    /// Bears a failure for a while. If it may have cost the office, the server starts over.
    fn bear(&mut self, failure: &EtcdFailure, began: Moment) {
        let held_back = self.office.journal.held_back();
        self.trouble.report(failure, held_back);
        if matches!(failure, EtcdFailure::Refused { code, .. } if *code == etcd::NOT_FOUND) {
            self.office.start_over("the office's lease is over");
        }
        if began.elapsed() > self.office.settings.ttl {
            self.office.start_over("etcd has not answered for too long");
        }
        thread::sleep(match failure {
            EtcdFailure::NoAnswer { .. } => PAUSE,
            EtcdFailure::Refused { .. } => PAUSE_AFTER_REFUSAL,
        });
    }
}
