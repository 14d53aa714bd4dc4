//! The thread that writes the journal. It takes over from the previous active server, and then
//! writes one batch after the other.

use std::iter;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use log::{error, info};

use super::etcd::{self, EtcdFailure, Gateway, Trouble, TxnAnswer};
use super::journal::fences_of_grants;
use super::record::{self, Names};
use super::{is_fault_planted, ClusterNode, Term};
use crate::latchd::arbiter::Arbiter;
use crate::latchd::fence::range::RANGE;
use crate::latchd::fence::source::fence_of_clock;
use crate::latchd::table::{Change, HolderRecord, News, Recording};
use crate::os::moment::Moment;
use crate::os::text::Escaped;
use crate::wire::token::Fence;

/// If the journal takes longer than this, the reply to a grant is late, and the lease starts again,
/// because most clients count their lease from the reply.
const LATE: Duration = Duration::from_millis(100);

/// The maximum number of holders to read in one request.
const PAGE_LEN: usize = 1000;
/// After a failure, the number of holders per request is divided by this, because the answer may
/// have been too long or too slow.
const PAGE_DIVISOR: usize = 4;

/// The error for a holder's record that this server cannot read.
#[derive(Debug)]
pub struct UnreadableRecord;

/// The pause after a request without an answer.
const PAUSE: Duration = Duration::from_millis(20);
/// The pause after a request that etcd has refused.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_millis(250);

/// Writes the journal for one term.
pub struct JournalWriter {
    node: Arc<ClusterNode>,
    arbiter: Arc<Arbiter>,
    gateway: Gateway,
    names: Names,
    term: Term,
    /// When this server sent the first request that has failed since the latest success; `None` if
    /// the latest request was successful.
    failing_since: Option<Moment>,
    trouble: Trouble,
}

/// Whether etcd has accepted a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchResult {
    Certain,
    /// etcd has refused the batch, and has definitely not carried it out.
    Refused,
}

impl JournalWriter {
    pub fn new(node: Arc<ClusterNode>, arbiter: Arc<Arbiter>, term: Term) -> JournalWriter {
        JournalWriter {
            gateway: node.gateway(),
            names: Names(node.settings.prefix.clone()),
            node,
            arbiter,
            term,
            failing_since: None,
            trouble: Trouble::default(),
        }
    }

    /// Writes batches until the process ends. Call [`JournalWriter::take_over`] first.
    pub fn run(mut self) -> ! {
        let journal = Arc::clone(&self.node.journal);
        loop {
            let round = journal.next_round();
            let outcome = self.commit(round.changes(), round.reserve);
            if round.recorded_at.elapsed() > LATE {
                self.arbiter.begin_anew(&fences_of_grants(round.changes()));
            }
            match outcome {
                BatchResult::Refused => journal.put_back(round, PAUSE_AFTER_REFUSAL),
                BatchResult::Certain => {
                    if journal.finish(&round) {
                        self.arbiter.grant_owed_slots();
                    }
                }
            }
        }
    }

    /// Reads the holders that the previous active server has left behind, and starts their leases
    /// again. Fails if this server cannot read a holder, because it would then grant that holder's
    /// lock a second time.
    pub fn take_over(&mut self) -> Result<(), UnreadableRecord> {
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
        let records = self.read_holders()?;
        let newest = records.last().map(|record| record.token.fence.0);
        let beyond_used = used.max(newest).map_or(0, |fence| fence.saturating_add(1));
        let first = beyond_used.max(fence_of_clock(SystemTime::now()));
        let end = first.saturating_add(RANGE);
        while self.commit(iter::empty(), Some(end)) == BatchResult::Refused {
            thread::sleep(PAUSE_AFTER_REFUSAL);
        }
        self.node.journal.begin_term(first, end);
        // The journal is set first, because a lease may end before the last holder is restored.
        let journal = Arc::clone(&self.node.journal);
        self.arbiter.record_with(Recording::All, Box::new(journal));
        for bad in self.arbiter.restore(&records) {
            let name = self.names.holder(bad.token.fence);
            error!("bad-record key={}", Escaped(&name));
        }
        self.arbiter.expect_anew();
        if is_fault_planted("slow-takeover") {
            thread::sleep(Duration::from_secs(3));
        }
        let epoch = self.term.epoch;
        self.node.become_active(epoch);
        let (holders, fence) = (records.len(), Fence(first));
        let took_ms = began.elapsed().as_millis();
        info!("active epoch={epoch} holders={holders} fence={fence} took_ms={took_ms}");
        Ok(())
    }

    /// Reads the holders from etcd, in fence order. By now, no other server can write holders.
    fn read_holders(&mut self) -> Result<Vec<HolderRecord>, UnreadableRecord> {
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
                // The key may belong to another service whose prefix begins with ours.
                let Some(fence) = self.names.fence_in(&found.key) else {
                    continue;
                };
                match record::decode(fence, &found.value) {
                    Some(_) if is_fault_planted("orphans-dropped") => {}
                    Some(record) => records.push(record),
                    None => {
                        let hint = "a newer server may have written it; see latchd-cluster(7)";
                        error!("bad-record key={} hint=\"{hint}\"", Escaped(&found.key));
                        return Err(UnreadableRecord);
                    }
                }
            }
            match page.last() {
                Some(last) if page.len() == page_len => {
                    next = last.key.clone();
                    next.push(0);
                    // The holders that made the answer too long may have been read by now, or a
                    // slow etcd may have recovered.
                    page_len = (page_len * 2).min(PAGE_LEN);
                }
                _ => return Ok(records),
            }
        }
    }

    /// Repeats a request until it is carried out.
    fn insist<T>(&mut self, mut request: impl FnMut(&mut Gateway) -> Result<T, EtcdFailure>) -> T {
        loop {
            match self.attempt(&mut request) {
                Ok(done) => return done,
                Err(failure) => thread::sleep(pause_after(&failure)),
            }
        }
    }

    /// Sends a request once. Starts over if this server may no longer be the leader, because
    /// requests have failed for too long.
    fn attempt<T>(
        &mut self,
        request: impl FnOnce(&mut Gateway) -> Result<T, EtcdFailure>,
    ) -> Result<T, EtcdFailure> {
        let sent = Moment::now();
        let answered = request(&mut self.gateway);
        match &answered {
            Ok(_) => self.failing_since = None,
            Err(failure) => {
                let since = *self.failing_since.get_or_insert(sent);
                self.judge(failure, since);
            }
        }
        answered
    }

    /// Writes a batch, or sends a question if there is nothing to write. Returns when the batch is
    /// certain, or when etcd has definitely refused it. Starts over if this server has been
    /// deposed.
    fn commit<'a>(
        &mut self,
        changes: impl Iterator<Item = &'a Change> + Clone,
        reserve: Option<u64>,
    ) -> BatchResult {
        let is_question = changes.clone().next().is_none() && reserve.is_none();
        let [compare, then, otherwise] = self.parts(changes.clone(), reserve, is_question);
        let mut is_in_doubt = false;
        loop {
            let answered = self.attempt(|gateway| gateway.txn(&compare, &then, &otherwise));
            let failure = match answered {
                Ok(answer) if answer.succeeded => break,
                // Another copy of this batch was carried out, or this server has been deposed.
                Ok(answer) if self.is_next_version(&answer) && !is_question => break,
                Ok(answer) => self.start_over_after_foreign_batch(&answer),
                Err(failure) => failure,
            };
            // The replies to these grants are late. Their leases start again, so that no lease ends
            // before its holder knows of it.
            let mut fences = fences_of_grants(changes.clone());
            fences.extend(self.node.journal.pending_grants());
            self.arbiter.begin_anew(&fences);
            let is_lost = matches!(failure, EtcdFailure::NoAnswer { .. });
            is_in_doubt |= is_lost && !is_question;
            if !is_question && !is_in_doubt {
                return BatchResult::Refused;
            }
            if is_in_doubt && self.ask_if_carried_out() {
                break;
            }
            thread::sleep(pause_after(&failure));
        }
        if !is_question {
            self.term.version += 1;
            self.trouble.end_of_refusals();
        }
        BatchResult::Certain
    }

    /// Sends a question about a batch whose answer is lost. The question tells the waiting sessions
    /// whether this server is still active, and tells this thread whether the batch was carried
    /// out. It does not compare the batch number, because the batch may still be carried out at any
    /// moment.
    fn ask_if_carried_out(&mut self) -> bool {
        let number = self.node.journal.begin_question();
        let leader = self.names.leader();
        let (compare, look_up) = (
            etcd::is_created(&leader, self.term.epoch),
            etcd::look_up(&leader),
        );
        let answered = self.attempt(|gateway| gateway.txn(&compare, &look_up, &look_up));
        let Ok(answer) = answered else {
            return false;
        };
        let is_next = self.is_next_version(&answer);
        self.node.journal.finish_question(number);
        is_next
    }

    /// The three parts of the transaction: the comparisons, the operations if they hold, and the
    /// operations if they do not.
    fn parts<'a>(
        &self,
        changes: impl Iterator<Item = &'a Change>,
        reserve: Option<u64>,
        is_question: bool,
    ) -> [String; 3] {
        let leader = self.names.leader();
        let mut compare = Vec::new();
        if !is_fault_planted("no-epoch") {
            compare.push(etcd::is_created(&leader, self.term.epoch));
        }
        if !is_fault_planted("no-batch-number") {
            compare.push(etcd::is_version(&leader, self.term.version));
        }
        let operations = changes.map(|change| self.operation(change));
        let mut then: Vec<String> = operations.collect();
        if let Some(end) = reserve {
            let ceiling = end.saturating_sub(1).to_string();
            then.push(etcd::put(&self.names.fence(), ceiling.as_bytes(), 0));
        }
        // Without an operation, a member would answer a question from its own state, which may be
        // outdated.
        let look_up = if is_fault_planted("question-without-range") {
            String::new()
        } else {
            etcd::look_up(&leader)
        };
        then.push(if is_question {
            look_up.clone()
        } else {
            let address = self.node.settings.advertise.as_bytes();
            etcd::put(&leader, address, self.term.lease)
        });
        [compare.join(","), then.join(","), look_up]
    }

    fn operation(&self, change: &Change) -> String {
        let name = self.names.holder(change.fence);
        match &change.news {
            News::Held(grant) => etcd::put(&name, record::encode(&grant.record).as_bytes(), 0),
            News::Ended | News::Dead(_) => etcd::delete(&name),
        }
    }

    /// Returns `true` if the leader key has the version that the next batch expects, and `false` if
    /// it has the version that this batch expects. Otherwise this server has been deposed, and
    /// starts over.
    fn is_next_version(&self, answer: &TxnAnswer) -> bool {
        let (node, Term { epoch, version, .. }) = (&self.node, self.term);
        let Some(leader) = answer.found.first() else {
            node.start_over("the leader key is gone")
        };
        if leader.create_revision != epoch {
            node.start_over("another server is active");
        }
        match leader.version {
            found if found == version + 1 => true,
            found if found == version => false,
            _ => self.start_over_after_foreign_batch(answer),
        }
    }

    fn start_over_after_foreign_batch(&self, answer: &TxnAnswer) -> ! {
        let Term { epoch, version, .. } = self.term;
        let found = answer.found.first().map_or(0, |leader| leader.version);
        error!("foreign-batch epoch={epoch} found={found} expected={version}");
        self.node.start_over("another has written under this epoch")
    }

    /// Logs a failure. `since` is when the first of the consecutive failed requests was sent.
    /// Starts over if the lease of the leader key is gone, or if more than the TTL has passed since
    /// then.
    fn judge(&mut self, failure: &EtcdFailure, since: Moment) {
        let waiting = self.node.journal.waiting_sessions();
        self.trouble.report(failure, waiting);
        if matches!(failure, EtcdFailure::Refused { code, .. } if *code == etcd::NOT_FOUND) {
            self.node.start_over("the lease of the leader key is over");
        }
        if since.elapsed() > self.node.settings.ttl {
            self.node.start_over(&match failure {
                EtcdFailure::NoAnswer { .. } => "etcd has not answered for too long".to_owned(),
                EtcdFailure::Refused { code, .. } => {
                    format!("etcd has refused all requests for too long, with code {code}")
                }
            });
        }
    }
}

fn pause_after(failure: &EtcdFailure) -> Duration {
    match failure {
        EtcdFailure::NoAnswer { .. } => PAUSE,
        EtcdFailure::Refused { .. } => PAUSE_AFTER_REFUSAL,
    }
}
