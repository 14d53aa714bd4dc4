//! What clients did and heard, and whether one correct lock table could have answered so. The tests
//! of the promises record whole conversations. Those of a cluster record what a client believes
//! across several servers, and look at the rules that hold there.
//!
//! A client knows when it sent a request and when it had the reply; the server acted somewhere in
//! between. Fences say in which order grants were made. From these two the checker narrows down
//! when each grant was made, and reports what no such instant explains. What is uncertain, such as
//! the fate of a request without a reply, counts in favour of the server. All checks sort or sweep:
//! their cost is O(n log n).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::time::Duration;

use rustix::time::{clock_gettime, ClockId};

/// An instant of the monotonic clock, which all processes of a host share.
pub type Instant = Duration;

/// The monotonic clock of this host.
pub fn now() -> Instant {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).expect("it starts at zero");
    let nanoseconds = u32::try_from(now.tv_nsec).expect("less than a second");
    Duration::new(seconds, nanoseconds)
}

const NEVER: Instant = Duration::MAX;

/// What a client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// `l` or `sl`, for so many slots.
    Acquire {
        wait: Duration,
        lease: Duration,
        weight: usize,
    },
    /// `e` or `se`, for so many slots.
    Enqueue { lease: Duration, weight: usize },
    /// `w` or `sw`.
    Wait { wait: Duration, lease: Duration },
    /// `n` or `sn`.
    Renew { fence: u64, lease: Duration },
    /// `r` or `sr`.
    Release { fence: u64 },
    /// `break`, by any client.
    Break { fence: u64 },
}

/// What a client heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    Granted {
        fence: u64,
    },
    Queued,
    TimedOut,
    /// The renewal or the release was carried out.
    Done,
    /// Any error.
    Refused,
    /// Nothing: the connection or the client ended first.
    Lost,
}

/// One request of one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Which run of the server.
    pub term: u32,
    pub connection: u64,
    pub key: u32,
    /// No byte was sent before.
    pub begin: Instant,
    /// The whole reply was there.
    pub end: Instant,
    pub request: Request,
    pub reply: Reply,
}

/// All that the clients of a server saw.
#[derive(Debug, Default)]
pub struct History {
    pub records: Vec<Record>,
    /// How many slots each key has.
    pub limits: HashMap<u32, usize>,
    /// When each connection was closed by its client, from the earliest to the latest instant.
    pub hang_ups: HashMap<u64, (Instant, Instant)>,
    /// When each process with clients was stopped. The connections of process `p` have the numbers
    /// `p << 32` and up.
    pub stops: HashMap<u64, Vec<(Instant, Instant)>>,
    /// How late the server or a client may be when it has something to do.
    pub slack: Duration,
    /// How long grants of an earlier term may go on in a later one, if they do.
    pub heritage: Duration,
}

/// What can be wrong with a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// More slots of a key were held than it has.
    Exclusion,
    /// A waiter was served before one that surely came earlier.
    Order,
    /// A fence was used twice, or the order of fences is not that of grants.
    Fence,
    /// Slots stayed free while a client waited for no more than these.
    LostWakeUp,
    /// A slot stayed taken after its lease was over while a client waited.
    LateExpiry,
    /// A token was refused before its lease was over.
    EarlyExpiry,
    /// A token was good for something after its end.
    DeadToken,
    /// A client that had hung up was granted the key.
    AfterHangUp,
}

/// What is wrong, and where.
#[derive(Debug)]
pub struct Violation {
    pub rule: Rule,
    pub story: String,
}

impl History {
    /// All that no correct server could have answered; empty if the history is sound.
    pub fn violations(&self) -> Vec<Violation> {
        let mut queues: BTreeMap<(u32, u32), Vec<Claim>> = BTreeMap::new();
        for claim in self.claims() {
            queues
                .entry((claim.term, claim.key))
                .or_default()
                .push(claim);
        }
        let mut found = Vec::new();
        check_fences(queues.values().flatten(), &mut found);
        let settled = self.settled();
        for ((term, key), claims) in queues {
            let mut queue = Queue::of(claims, self.limits[&key], self);
            queue.settled = settled[&term];
            queue.check(&mut found);
        }
        found
    }

    /// For each term, when the grants of earlier ones were over for sure.
    fn settled(&self) -> BTreeMap<u32, Instant> {
        let mut settled = BTreeMap::new();
        for record in &self.records {
            // The term had begun when a client asked.
            let first = settled.entry(record.term).or_insert(NEVER);
            *first = record.begin.min(*first);
        }
        for (index, first) in settled.values_mut().enumerate() {
            *first = match index {
                0 => Instant::ZERO,
                _ if self.heritage.is_zero() => Instant::ZERO,
                _ => *first + self.heritage,
            };
        }
        settled
    }

    /// Takes it that a connection may have ended at the first of these instants in its life.
    pub fn may_end_at(&mut self, instants: &[Instant]) {
        let mut begins: HashMap<u64, Instant> = HashMap::new();
        for record in &self.records {
            let begin = begins.entry(record.connection).or_insert(NEVER);
            *begin = record.begin.min(*begin);
        }
        for (connection, hang_up) in &mut self.hang_ups {
            let begin = begins.get(connection).copied().unwrap_or(NEVER);
            let next = instants.partition_point(|instant| *instant < begin);
            hang_up.0 = instants
                .get(next)
                .map_or(hang_up.0, |at| hang_up.0.min(*at));
        }
    }

    /// Takes it that a connection may have ended with the break of a grant of its, if the server
    /// answered nothing on it after that. The server ends a connection that had nothing else, and
    /// what the client is granted until then goes with it. If nobody heard the reply to the break,
    /// the server may still have been at it until it surely knew that the operator was gone.
    pub fn breaks_may_end_connections(&mut self) {
        let (mut holders, mut last_replies) = (HashMap::new(), HashMap::new());
        for record in self.records.iter().filter(|it| it.reply != Reply::Lost) {
            if let Reply::Granted { fence } = record.reply {
                holders.insert(fence, record.connection);
            }
            let last = last_replies.entry(record.connection).or_insert(record.end);
            *last = record.end.max(*last);
        }
        for record in &self.records {
            let Request::Break { fence } = record.request else {
                continue;
            };
            let done_by = if record.reply == Reply::Lost {
                self.gone(record.connection)
            } else {
                record.end
            };
            let holder = holders.get(&fence);
            let is_over = |holder: &&u64| last_replies[*holder] <= done_by;
            if let Some(holder) = holder.filter(is_over) {
                let hang_up = self.hang_ups.entry(*holder).or_insert((NEVER, NEVER));
                hang_up.0 = hang_up.0.min(record.begin);
            }
        }
    }

    /// How many grants there are.
    pub fn grant_count(&self) -> usize {
        let is_grant = |record: &&Record| {
            // A `w` after `acquired` repeats its fence.
            matches!(record.reply, Reply::Granted { .. })
        };
        let fences = self.records.iter().filter(is_grant);
        let mut fences: Vec<u64> = fences.filter_map(|record| record.fence()).collect();
        fences.sort_unstable();
        fences.dedup();
        fences.len()
    }

    /// Joins the requests that belong to one place in a queue, or to one grant.
    fn claims(&self) -> Vec<Claim> {
        let mut records = self.records.clone();
        records.sort_by_key(|record| (record.term, record.key, record.connection, record.begin));
        let mut claims: Vec<Claim> = Vec::new();
        // The entry that `e` made, by its index among the claims.
        let mut entries: HashMap<(u32, u32, u64), usize> = HashMap::new();
        let mut uses = Vec::new();
        for record in records {
            let place = (record.term, record.key, record.connection);
            match record.request {
                Request::Acquire {
                    wait,
                    lease,
                    weight,
                } => {
                    let is_place = !wait.is_zero() || record.fence().is_some();
                    if is_place || record.reply == Reply::Lost {
                        claims.push(self.claim(&record, wait, lease, weight));
                    }
                }
                Request::Enqueue { lease, weight } => {
                    if record.reply != Reply::Refused {
                        entries.insert(place, claims.len());
                        claims.push(self.claim(&record, Duration::ZERO, lease, weight));
                    }
                }
                Request::Wait { wait, lease } => {
                    let Some(&index) = entries.get(&place) else {
                        continue;
                    };
                    if let Some(used) = self.collect(&mut claims[index], &record, wait, lease) {
                        uses.push(used);
                    }
                }
                Request::Renew { .. } | Request::Release { .. } | Request::Break { .. } => {
                    uses.push(record);
                }
            }
        }
        attach(&mut claims, uses);
        claims
    }

    fn claim(&self, record: &Record, wait: Duration, lease: Duration, weight: usize) -> Claim {
        let outcome = match record.reply {
            Reply::Granted { fence } => Outcome::Granted { fence },
            Reply::TimedOut => Outcome::Left {
                not_before: record.begin + wait,
            },
            _ => Outcome::Unknown,
        };
        let end = match record.reply {
            // The place is there until the entry is collected or its connection ends.
            Reply::Queued | Reply::Lost => self.gone(record.connection),
            _ => record.end,
        };
        Claim {
            term: record.term,
            key: record.key,
            connection: record.connection,
            arrived: record.begin,
            queued: (record.reply == Reply::Queued).then_some(record.end),
            wait_began: record.begin,
            end,
            outcome,
            lease,
            weight,
            is_prompt: self.is_prompt(record),
            uses: Vec::new(),
        }
    }

    /// Notes what `w` answered. After `acquired` it is the use of a token, like a renewal.
    fn collect(
        &self,
        claim: &mut Claim,
        record: &Record,
        wait: Duration,
        lease: Duration,
    ) -> Option<Record> {
        if let Outcome::Granted { fence } = claim.outcome {
            let reply = match record.reply {
                Reply::Granted { fence: again } if again == fence => Reply::Done,
                Reply::Lost => Reply::Lost,
                _ => Reply::Refused,
            };
            let request = Request::Renew { fence, lease };
            return Some(Record {
                request,
                reply,
                ..*record
            });
        }
        claim.wait_began = record.begin;
        claim.is_prompt = self.is_prompt(record);
        claim.outcome = match record.reply {
            Reply::Granted { fence } => Outcome::Granted { fence },
            Reply::TimedOut => Outcome::Left {
                not_before: record.begin + wait,
            },
            _ => Outcome::Unknown,
        };
        if record.reply != Reply::Lost {
            claim.end = record.end;
        }
        None
    }

    /// When the server surely knew that a connection was gone.
    fn gone(&self, connection: u64) -> Instant {
        let hang_up = self.hang_ups.get(&connection);
        hang_up.map_or(NEVER, |(_, end)| *end + self.slack)
    }

    /// Whether the client's process could run while it waited for the reply.
    fn is_prompt(&self, record: &Record) -> bool {
        let stops = self.stops.get(&(record.connection >> 32));
        !stops.into_iter().flatten().any(|(stopped, continued)| {
            *stopped < record.end && record.begin < *continued + self.slack
        })
    }
}

impl Record {
    fn fence(&self) -> Option<u64> {
        match (self.request, self.reply) {
            (_, Reply::Granted { fence }) => Some(fence),
            (Request::Renew { fence, .. }, _) => Some(fence),
            (Request::Release { fence } | Request::Break { fence }, _) => Some(fence),
            _ => None,
        }
    }

    /// Whether the grant is over after this, if it had an effect.
    fn is_end(&self) -> bool {
        let is_renewal = matches!(self.request, Request::Renew { .. });
        !is_renewal && self.reply != Reply::Refused
    }
}

/// One place in a queue, and the grant that came of it.
#[derive(Debug)]
struct Claim {
    term: u32,
    key: u32,
    connection: u64,
    /// It was not in the queue before.
    arrived: Instant,
    /// It was in the queue by then, as `queued` says.
    queued: Option<Instant>,
    /// From when on a grant is answered at once.
    wait_began: Instant,
    /// When its fate was known.
    end: Instant,
    outcome: Outcome,
    lease: Duration,
    /// How many slots it takes.
    weight: usize,
    is_prompt: bool,
    /// Renewals and releases with its token, and breaks of it, by their beginning.
    uses: Vec<Record>,
}

#[derive(Debug, Clone, Copy)]
enum Outcome {
    Granted {
        fence: u64,
    },
    /// It kept its place until then, and was never granted.
    Left {
        not_before: Instant,
    },
    /// It may have been granted.
    Unknown,
}

impl Claim {
    fn fence(&self) -> Option<u64> {
        match self.outcome {
            Outcome::Granted { fence } => Some(fence),
            _ => None,
        }
    }

    fn told(&self) -> String {
        format!(
            "key {} of connection {:x}: {self:?}",
            self.key, self.connection
        )
    }

    /// Until when the slot was surely held, if it was granted at `granted` or later.
    fn held_until(&self, granted: Instant, hang_up: Instant) -> Instant {
        let (mut until, mut ended) = (granted.max(self.wait_began) + self.lease, hang_up);
        for used in &self.uses {
            until = match (used.request, used.reply) {
                (_, Reply::Refused) => until,
                (Request::Renew { lease, .. }, Reply::Done) => used.begin + lease,
                (Request::Renew { lease, .. }, _) => until.min(used.begin + lease),
                (_, Reply::Done) => until.max(used.begin),
                (_, _) => until,
            };
            // A renewal that began later may have come before the end.
            if used.is_end() {
                ended = ended.min(used.begin);
            }
        }
        until.min(ended)
    }

    /// When the slot was surely free again, and whether the lease freed it. Reports tokens that
    /// were used after their end.
    fn freed_by(&self, gone: Instant, found: &mut Vec<Violation>) -> (Instant, Rule) {
        let mut freed = (self.end.saturating_add(self.lease), Rule::LateExpiry);
        let mut ended = NEVER;
        for used in &self.uses {
            let is_done = used.reply == Reply::Done;
            let dead = freed.0.min(ended);
            if is_done && used.begin > dead {
                let story = format!("used after {dead:?}: {}", self.told());
                found.push(Violation {
                    rule: Rule::DeadToken,
                    story,
                });
            }
            freed = match (used.request, used.reply) {
                (_, Reply::Refused) => freed.min((used.end, freed.1)),
                (Request::Renew { lease, .. }, Reply::Done) => (used.end + lease, freed.1),
                (Request::Renew { .. }, _) => (NEVER, freed.1),
                (_, _) => freed,
            };
            if is_done && used.is_end() {
                ended = ended.min(used.end);
            }
        }
        freed.min((ended.min(gone), Rule::LostWakeUp))
    }
}

/// Gives each use of a token to the claim that was granted it.
fn attach(claims: &mut [Claim], uses: Vec<Record>) {
    let mut owners: HashMap<(u32, u32, u64), usize> = HashMap::new();
    for (index, claim) in claims.iter().enumerate() {
        if let Some(fence) = claim.fence() {
            owners
                .entry((claim.term, claim.key, fence))
                .or_insert(index);
        }
    }
    for used in uses {
        let fence = used.fence().expect("a use of a token names it");
        // A token of an earlier term is nobody's in this one, and nothing may be done with it.
        if let Some(&owner) = owners.get(&(used.term, used.key, fence)) {
            claims[owner].uses.push(used);
        }
    }
    for claim in claims {
        claim.uses.sort_by_key(|used| used.begin);
    }
}

/// Checks that no fence is used twice, and that fences rise in the order of grants, over all keys
/// and terms.
fn check_fences<'a>(claims: impl Iterator<Item = &'a Claim>, found: &mut Vec<Violation>) {
    let mut grants: Vec<(u64, &Claim)> = claims
        .filter_map(|claim| Some((claim.fence()?, claim)))
        .collect();
    grants.sort_by_key(|(fence, _)| *fence);
    for pair in grants.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        let story = format!("used twice: {}\n{}", pair[0].1.told(), pair[1].1.told());
        found.push(Violation {
            rule: Rule::Fence,
            story,
        });
    }
    let mut latest = Instant::ZERO;
    for (_, claim) in &grants {
        latest = latest.max(claim.arrived);
        if claim.end < latest {
            let story = format!("a lower fence came after {}", claim.told());
            found.push(Violation {
                rule: Rule::Fence,
                story,
            });
        }
    }
}

/// One key in one term: its grants in the order of their fences, and the other claims.
struct Queue<'a> {
    history: &'a History,
    limit: usize,
    grants: Vec<Claim>,
    others: Vec<Claim>,
    /// The latest instant at which each grant can have been made.
    latest: Vec<Instant>,
    /// From when on grants of this term alone keep others waiting.
    settled: Instant,
}

impl<'a> Queue<'a> {
    fn of(claims: Vec<Claim>, limit: usize, history: &'a History) -> Queue<'a> {
        let (mut grants, others): (Vec<_>, Vec<_>) = claims
            .into_iter()
            .partition(|claim| claim.fence().is_some());
        grants.sort_by_key(Claim::fence);
        let mut latest: Vec<Instant> = grants.iter().map(|grant| grant.end).collect();
        for index in (1..latest.len()).rev() {
            latest[index - 1] = latest[index - 1].min(latest[index]);
        }
        Queue {
            history,
            limit,
            grants,
            others,
            latest,
            settled: Instant::ZERO,
        }
    }

    fn check(&self, found: &mut Vec<Violation>) {
        let earliest = self.check_exclusion(found);
        self.check_order(found);
        self.check_refusals(&earliest, found);
        self.check_hang_ups(&earliest, found);
        self.check_liveness(&earliest, found);
    }

    fn hang_up(&self, claim: &Claim) -> Instant {
        let hang_up = self.history.hang_ups.get(&claim.connection);
        hang_up.map_or(NEVER, |(begin, _)| *begin)
    }

    /// Finds for each grant the earliest instant at which it can have been made: not before the
    /// claim came, nor before an earlier grant, nor while so many slots were surely held that its
    /// own were not free. If that is later than the latest such instant, too many were held.
    fn check_exclusion(&self, found: &mut Vec<Violation>) -> Vec<Instant> {
        let mut holds: BinaryHeap<Reverse<(Instant, usize)>> = BinaryHeap::new();
        let mut taken = 0;
        let mut earliest = Instant::ZERO;
        let mut all = Vec::new();
        // The grant that ended last.
        let mut last = None;
        for (index, (grant, &latest)) in self.grants.iter().zip(&self.latest).enumerate() {
            earliest = earliest.max(grant.arrived);
            while let Some(&Reverse((until, holder))) = holds.peek() {
                if until > earliest && taken + grant.weight <= self.limit {
                    break;
                }
                if until > earliest {
                    (earliest, last) = (until, Some(holder));
                }
                taken -= self.grants[holder].weight;
                holds.pop();
            }
            if earliest > latest {
                let holder = last.map(|holder| self.grants[holder].told());
                let story = format!(
                    "held until {earliest:?} by {}, when granted: {}",
                    holder.unwrap_or_default(),
                    grant.told()
                );
                found.push(Violation {
                    rule: Rule::Exclusion,
                    story,
                });
                earliest = latest; // so that one overlap is one report
            }
            all.push(earliest);
            let until = grant.held_until(earliest, self.hang_up(grant));
            holds.push(Reverse((until, index)));
            taken += grant.weight;
        }
        all
    }

    /// A claim that came after another was in the queue for sure is not granted before it.
    fn check_order(&self, found: &mut Vec<Violation>) {
        // The latest arrival among the grants up to each.
        let mut arrivals = Vec::new();
        for grant in &self.grants {
            let so_far = arrivals.last().map_or(Instant::ZERO, |latest| *latest);
            arrivals.push(grant.arrived.max(so_far));
        }
        let is_overtaken = |claim: &Claim, earlier_grants: usize| {
            let newcomer = earlier_grants.checked_sub(1).map(|last| arrivals[last]);
            newcomer > claim.queued
        };
        let of_grants = self.grants.iter().enumerate();
        let of_others = self.others.iter().filter_map(|claim| match claim.outcome {
            Outcome::Left { not_before } => {
                let count = self.latest.partition_point(|latest| *latest < not_before);
                Some((count, claim))
            }
            _ => None,
        });
        for (earlier_grants, claim) in of_grants.chain(of_others) {
            if claim.queued.is_some() && is_overtaken(claim, earlier_grants) {
                let story = format!("overtaken: {}", claim.told());
                found.push(Violation {
                    rule: Rule::Order,
                    story,
                });
            }
        }
    }

    /// A token is good until its lease is over.
    fn check_refusals(&self, earliest: &[Instant], found: &mut Vec<Violation>) {
        for (grant, &granted) in self.grants.iter().zip(earliest) {
            let held = grant.held_until(granted, self.hang_up(grant));
            let is_early = |used: &&Record| used.reply == Reply::Refused && used.end < held;
            if let Some(used) = grant.uses.iter().find(is_early) {
                let story = format!("refused at {:?}: {}", used.end, grant.told());
                found.push(Violation {
                    rule: Rule::EarlyExpiry,
                    story,
                });
            }
        }
    }

    fn check_hang_ups(&self, earliest: &[Instant], found: &mut Vec<Violation>) {
        for (grant, &granted) in self.grants.iter().zip(earliest) {
            if granted > self.history.gone(grant.connection) {
                let story = format!("granted after {granted:?}: {}", grant.told());
                found.push(Violation {
                    rule: Rule::AfterHangUp,
                    story,
                });
            }
        }
    }

    /// No slot is free for long while a client waits for it.
    fn check_liveness(&self, earliest: &[Instant], found: &mut Vec<Violation>) {
        let gaps = self.gaps(earliest, found);
        let slack = self.history.slack;
        for claim in self.grants.iter().chain(&self.others) {
            if !claim.is_prompt || matches!(claim.outcome, Outcome::Unknown) {
                continue;
            }
            let next = gaps.partition_point(|gap| gap.end <= claim.wait_began + slack);
            let Some(gap) = gaps.get(next) else {
                continue;
            };
            // A later gap has nothing to add if the wait was over before it.
            let free_from = gap.begin.max(claim.wait_began);
            if gap.end.min(claim.end) > free_from.saturating_add(slack) {
                let story = format!("free from {free_from:?} to {:?}: {}", gap.end, claim.told());
                found.push(Violation {
                    rule: gap.rule,
                    story,
                });
            }
        }
    }

    /// When so few slots can have been held that those of the first in the queue were free, for
    /// longer than the slack. Which claim is the first is not known, so the heaviest decides.
    fn gaps(&self, earliest: &[Instant], found: &mut Vec<Violation>) -> Vec<Gap> {
        let mut changes: Vec<(Instant, Place, Change)> = Vec::new();
        for (index, (grant, &granted)) in self.grants.iter().zip(earliest).enumerate() {
            let from = if grant.is_prompt && grant.end > grant.wait_began + self.history.slack {
                grant.end // it waited, so the reply came with the grant
            } else {
                granted
            };
            let gone = self.history.gone(grant.connection);
            let (freed, rule) = grant.freed_by(gone, found);
            let place = (grant.weight, index);
            changes.push((grant.arrived, place, Change::Came));
            changes.push((from.max(grant.arrived), place, Change::Left));
            changes.push((from, place, Change::Taken));
            changes.push((freed.max(from), place, Change::Freed(rule)));
        }
        for (index, claim) in (self.grants.len()..).zip(&self.others) {
            let (begin, end) = match claim.outcome {
                Outcome::Unknown => (Change::Taken, Change::Freed(Rule::LostWakeUp)),
                _ => (Change::Came, Change::Left),
            };
            let place = (claim.weight, index);
            changes.push((claim.arrived, place, begin));
            changes.push((claim.end.max(claim.arrived), place, end));
        }
        changes.sort_by_key(|(at, _, _)| *at);
        let mut gaps = Vec::new();
        let (mut waiting, mut taken, mut was_full) = (BTreeSet::new(), 0, false);
        let mut open = Gap {
            begin: self.settled,
            end: NEVER,
            rule: Rule::LostWakeUp,
        };
        // Holders that come and go in one instant are counted first.
        for (at, place, change) in changes {
            let mut rule = Rule::LostWakeUp;
            match change {
                Change::Came => _ = waiting.insert(place),
                Change::Left => _ = waiting.remove(&place),
                Change::Taken => taken += place.0,
                Change::Freed(why) => (taken, rule) = (taken - place.0, why),
            }
            let heaviest = waiting.last().map_or(1, |(weight, _)| *weight);
            let is_full = taken + heaviest > self.limit;
            if is_full && !was_full && at > open.begin.saturating_add(self.history.slack) {
                gaps.push(Gap { end: at, ..open });
            }
            if was_full && !is_full {
                open.begin = at.max(self.settled);
                open.rule = rule;
            }
            was_full = is_full;
        }
        gaps.push(open);
        gaps
    }
}

/// A claim: its weight, and its index.
type Place = (usize, usize);

#[derive(Debug, Clone, Copy)]
enum Change {
    Came,
    Left,
    Taken,
    Freed(Rule),
}

#[derive(Debug, Clone, Copy)]
struct Gap {
    begin: Instant,
    end: Instant,
    rule: Rule,
}
