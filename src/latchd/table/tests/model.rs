//! The rules of the table once more, as naively as they can be written: lists, searched from the
//! front, with no thought for speed. What the table does must be what this does.

use super::*;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelKey {
    pub name: String,
    pub kind: Kind,
    pub limit: u32,
    /// In order of grants.
    pub holders: Vec<ModelHolder>,
    /// In order of arrival.
    pub waiters: Vec<u64>,
    pub last_used: Instant,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelHolder {
    pub conn: u64,
    pub fence: u64,
    /// How many slots it has.
    pub weight: u32,
    /// Of its slots, once it has asked for them.
    pub numbers: Vec<u32>,
    /// When it was granted.
    pub since: Instant,
    pub expires_at: Instant,
    pub is_kept: bool,
    pub is_provisional: bool,
    /// Of an orphan, and while its adoption is provisional.
    pub tag: Option<String>,
}

/// A claim that was queued; its number is the order of arrival over all keys.
#[derive(Clone, Debug)]
struct ModelTicket {
    number: u64,
    conn: u64,
    key: String,
    lease: Duration,
    weight: u32,
    fence: Option<u64>,
    dismissed: bool,
}

/// A phase-one entry. It is dead if its grant is no holder any more.
#[derive(Clone, Debug)]
pub struct ModelEntry {
    pub conn: u64,
    pub kind: Kind,
    pub name: String,
    began: Began,
}

/// The answer to asking for a key: a grant, or a place in the queue with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Began {
    Acquired(Grant),
    Queued(u64),
}

impl Began {
    /// What a claim comes to; `None` if it would wait.
    pub fn of(answer: Answer) -> Option<Began> {
        match answer {
            Answer::Granted(grant) => Some(Began::Acquired(grant)),
            Answer::Queued(ticket) => Some(Began::Queued(ticket.arrival)),
            Answer::WouldWait => None,
            other => panic!("no answer to a claim: {other:?}"),
        }
    }
}

pub struct Model {
    pub keys: Vec<ModelKey>,
    pub entries: Vec<ModelEntry>,
    tickets: Vec<ModelTicket>,
    /// The keys in the order in which they last became idle.
    idle: Vec<String>,
    /// The slots whose clients know their tokens, in the order in which each came to its
    /// connection: the connection, the key and the fence.
    told: Vec<(u64, String, u64)>,
    caps: Caps,
    pub last_fence: u64,
    last_ticket: u64,
    draining: bool,
    pub out_of_tokens: bool,
    /// Nothing is granted until then.
    pub settling_until: Option<Instant>,
    pub now: Instant,
}

impl Model {
    pub fn new(caps: Caps, now: Instant) -> Model {
        Model {
            keys: Vec::new(),
            entries: Vec::new(),
            tickets: Vec::new(),
            idle: Vec::new(),
            told: Vec::new(),
            caps,
            last_fence: 0,
            last_ticket: 0,
            draining: false,
            out_of_tokens: false,
            settling_until: None,
            now,
        }
    }

    /// `None` where a try would wait.
    pub fn acquire(
        &mut self,
        conn: u64,
        ask: &Ask<'_>,
        is_a_try: bool,
    ) -> Result<Option<Began>, Refusal> {
        let (name, kind, limit, lease) =
            (ask.key, ask.terms.kind, ask.terms.limit.get(), ask.lease);
        let weight = ask.terms.weight.get();
        self.end_settling();
        while (self.has_due(name) || self.needs_room(conn, name)) && self.end_first() {}
        if self.draining {
            return Err(Refusal::Draining);
        }
        self.grant_owed_slots();
        if let Some(at) = self.find(name) {
            self.agree(at, kind, limit)?;
        }
        if self.connection_count(conn) >= self.caps.max_per_connection {
            return Err(Refusal::MaxLocks);
        }
        // Behind a waiter whose turn it is, nobody queues.
        let is_settling = self.settling_until.is_some();
        let is_free = !is_settling
            && self.find(name).is_none_or(|at| {
                let key = &self.keys[at];
                weight <= key.free() && (key.waiters.is_empty() || self.is_owed(key))
            });
        if is_free && self.is_full() {
            return Err(Refusal::MaxLocks);
        }
        if is_free && self.keys.iter().any(|key| self.is_owed(key)) {
            return Err(Refusal::NoToken);
        }
        if is_settling {
            let waiters = self.find(name).map_or(&[][..], |at| &self.keys[at].waiters);
            self.may_wait(waiters.len(), ask)?;
            if is_a_try {
                return Ok(None);
            }
        }
        if self.find(name).is_none() {
            if self.keys.len() >= self.caps.max_locks {
                let is_idle = |name: &&String| self.keys.iter().any(|key| key.is_idle_as(name));
                let oldest = self.idle.iter().find(is_idle);
                let oldest = oldest.ok_or(Refusal::MaxLocks)?.clone();
                self.keys.retain(|key| key.name != oldest);
            }
            self.keys.push(ModelKey {
                name: name.to_owned(),
                kind,
                limit,
                holders: Vec::new(),
                waiters: Vec::new(),
                last_used: self.now,
            });
            self.is_idle_now(name);
        }
        let now = self.now;
        let at = self.find(name).expect("known or added");
        if !is_free {
            self.may_wait(self.keys[at].waiters.len(), ask)?;
        }
        let key = &mut self.keys[at];
        if is_free {
            if self.out_of_tokens {
                return Err(Refusal::NoToken);
            }
            self.last_fence += 1;
            key.holders.push(ModelHolder {
                conn,
                fence: self.last_fence,
                weight,
                numbers: Vec::new(),
                since: now,
                expires_at: now + lease,
                is_kept: false,
                is_provisional: false,
                tag: None,
            });
            self.told.push((conn, name.to_owned(), self.last_fence));
            return Ok(Some(Began::Acquired(grant(self.last_fence, lease))));
        }
        if is_a_try {
            return Ok(None);
        }
        let number = self.last_ticket;
        self.last_ticket += 1;
        key.waiters.push(number);
        self.tickets.push(ModelTicket {
            number,
            conn,
            key: name.to_owned(),
            lease,
            weight,
            fence: None,
            dismissed: false,
        });
        Ok(Some(Began::Queued(number)))
    }

    /// Whether a claim may join a queue of this length.
    fn may_wait(&self, len: usize, ask: &Ask<'_>) -> Result<(), Refusal> {
        let waiter_count: usize = self.keys.iter().map(|key| key.waiters.len()).sum();
        let is_too_long = ask.max_waiters.is_some_and(|max| len >= max as usize)
            || self.caps.max_waiters.is_some_and(|max| len >= max)
            || waiter_count >= self.caps.max_waiters_total;
        (!is_too_long).then_some(()).ok_or(Refusal::MaxWaiters)
    }

    pub fn enqueue(&mut self, conn: u64, ask: &Ask<'_>) -> Result<Began, Refusal> {
        let (name, kind) = (ask.key, ask.terms.kind);
        self.end_settling();
        while (self.has_due(name) || self.needs_room(conn, name)) && self.end_first() {}
        if let Some(at) = self.find_entry(conn, kind, name) {
            if !self.is_dead(&self.entries[at]) {
                return if self.draining {
                    Err(Refusal::Draining)
                } else {
                    Err(Refusal::AlreadyEnqueued)
                };
            }
            if let Began::Queued(number) = self.entries.remove(at).began {
                self.tickets.retain(|known| known.number != number);
            }
        }
        let claim = self.acquire(conn, ask, false)?.expect("not a try");
        self.entries.push(ModelEntry {
            conn,
            kind,
            name: name.to_owned(),
            began: claim,
        });
        Ok(claim)
    }

    pub fn try_wait(&mut self, conn: u64, name: &str, kind: Kind) -> Result<Answer, Refusal> {
        self.catch_up(name);
        let Some(at) = self.find_entry(conn, kind, name) else {
            return Err(Refusal::NotEnqueued);
        };
        let now = self.now;
        let answer = match self.entries[at].began {
            Began::Acquired(grant) => match self.holder(name, grant.token.fence.0) {
                Some(holder) => {
                    holder.expires_at = now + grant.lease;
                    Ok(Answer::Granted(grant))
                }
                None => Err(Refusal::LeaseExpired),
            },
            Began::Queued(number) => match self.collect(number) {
                Ok(Answer::WouldWait) => {
                    let key = &self.keys[self.find(name).expect("waited for")];
                    let lacks_token =
                        self.is_owed(key) && key.waiters[0] == number && !self.is_full();
                    return if lacks_token {
                        Err(Refusal::NoToken)
                    } else {
                        Ok(Answer::WouldWait)
                    };
                }
                answer => answer,
            },
        };
        self.entries.remove(at);
        answer
    }

    pub fn take_ticket(&mut self, conn: u64, name: &str, kind: Kind) -> Option<u64> {
        let at = self.find_entry(conn, kind, name)?;
        match self.entries[at].began {
            Began::Queued(number) if self.tickets[self.find_ticket(number)].is_waiting() => {
                self.entries.remove(at);
                Some(number)
            }
            _ => None,
        }
    }

    /// What has become of an entry. A grant that its client does not know goes by its fence.
    pub fn state_of(&self, entry: &ModelEntry) -> Result<Began, Refusal> {
        if self.is_dead(entry) {
            return Err(Refusal::LeaseExpired);
        }
        let Began::Queued(number) = entry.began else {
            return Ok(entry.began);
        };
        let ticket = &self.tickets[self.find_ticket(number)];
        if ticket.dismissed {
            Err(Refusal::Draining)
        } else {
            Ok(Began::Queued(ticket.fence.unwrap_or(number)))
        }
    }

    fn is_dead(&self, entry: &ModelEntry) -> bool {
        let fence = match entry.began {
            Began::Acquired(grant) => Some(grant.token.fence.0),
            Began::Queued(number) => self.tickets[self.find_ticket(number)].fence,
        };
        let has_slot = |fence| {
            let holders = self.keys.iter().flat_map(|key| &key.holders);
            holders.into_iter().any(|holder| holder.fence == fence)
        };
        fence.is_some_and(|fence| !has_slot(fence))
    }

    fn find_entry(&self, conn: u64, kind: Kind, name: &str) -> Option<usize> {
        self.entries
            .iter()
            .position(|entry| entry.conn == conn && entry.kind == kind && entry.name == name)
    }

    pub fn collect(&mut self, number: u64) -> Result<Answer, Refusal> {
        self.catch_up_ticket(number);
        let at = self.find_ticket(number);
        let ticket = self.tickets[at].clone();
        let now = self.now;
        let answer = match ticket.fence {
            None if ticket.dismissed => Err(Refusal::Draining),
            None => return Ok(Answer::WouldWait),
            Some(fence) => match self.holder(&ticket.key, fence) {
                Some(holder) => {
                    holder.expires_at = now + ticket.lease;
                    self.told.push((ticket.conn, ticket.key, fence));
                    Ok(Answer::Granted(grant(fence, ticket.lease)))
                }
                None => Err(Refusal::LeaseExpired),
            },
        };
        self.tickets.remove(at);
        answer
    }

    pub fn cancel(&mut self, number: u64) {
        self.catch_up_ticket(number);
        let at = self.find_ticket(number);
        let ticket = self.tickets.remove(at);
        self.drop_ticket(&ticket);
    }

    pub fn release(
        &mut self,
        conn: u64,
        name: &str,
        kind: Kind,
        token: Token,
    ) -> Result<(), Refusal> {
        self.find_held(name, kind, token)?;
        if let Some(at) = self.find_entry(conn, kind, name) {
            if matches!(self.entries[at].began, Began::Acquired(grant) if grant.token == token) {
                self.entries.remove(at);
            }
        }
        self.revoke(name, token.fence.0);
        Ok(())
    }

    /// The connection that held it, if it was held.
    pub fn break_grant(&mut self, name: &str, fence: u64) -> Option<u64> {
        self.catch_up(name);
        let conn = self.holder(name, fence)?.conn;
        self.revoke(name, fence);
        Some(conn)
    }

    pub fn renew(
        &mut self,
        conn: u64,
        name: &str,
        kind: Kind,
        token: Token,
        lease: Duration,
    ) -> Result<Answer, Refusal> {
        self.find_held(name, kind, token)?;
        let held = self.holder(name, token.fence.0).expect("it was found");
        let (since, is_kept) = (held.since, held.is_kept);
        let left = self.left_of_hold(since, is_kept, lease)?;
        self.renew_holder(conn, name, token, lease.min(left));
        Ok(Answer::Renewed(lease.min(secs(left.as_secs()))))
    }

    /// For how long a grant may still be held.
    fn left_of_hold(
        &self,
        since: Instant,
        is_kept: bool,
        lease: Duration,
    ) -> Result<Duration, Refusal> {
        let left = self.caps.max_hold.saturating_sub(self.now - since);
        let is_refused = left < secs(1) || is_kept && lease > self.caps.max_keep_time;
        (!is_refused).then_some(left).ok_or(Refusal::NotHeld)
    }

    pub fn number_slots(&mut self, conn: u64, name: &str, fence: u64) {
        let holders = self.keys.iter().flat_map(|key| &key.holders);
        let count: usize = holders.map(|holder| holder.numbers.len()).sum();
        let Some(at) = self.find(name) else { return };
        let key = &mut self.keys[at];
        let all = key.holders.iter();
        let in_use: Vec<u32> = all.flat_map(|it| it.numbers.clone()).collect();
        let free = (0..key.limit).filter(|number| !in_use.contains(number));
        let is_meant = |it: &&mut ModelHolder| it.fence == fence && it.conn == conn;
        let found = key.holders.iter_mut().find(is_meant);
        if let Some(holder) = found.filter(|_| key.kind == Kind::Semaphore) {
            let weight = holder.weight as usize;
            let has_room = weight == 1 || count + weight <= self.caps.max_grants;
            if has_room && holder.numbers.is_empty() {
                holder.numbers = free.take(weight).collect();
            }
        }
    }

    fn renew_holder(&mut self, conn: u64, name: &str, token: Token, lease: Duration) {
        let now = self.now;
        let holder = self.holder(name, token.fence.0).expect("it was found");
        if holder.is_provisional && holder.conn == conn {
            holder.is_provisional = false;
            holder.is_kept = false;
            holder.tag = None;
        }
        holder.expires_at = if holder.is_kept {
            holder.expires_at.max(now + lease)
        } else {
            now + lease
        };
    }

    pub fn adopt(
        &mut self,
        conn: u64,
        name: &str,
        token: Token,
        lease: Duration,
    ) -> Result<Answer, Refusal> {
        self.expire();
        let held = self.find_told(name, token);
        let is_own = held.as_ref().is_ok_and(|held| held.conn == conn);
        if !is_own && self.connection_count(conn) >= self.caps.max_per_connection {
            return Err(Refusal::MaxLocks);
        }
        let held = held?;
        let left = self.left_of_hold(held.since, held.is_kept, lease)?;
        self.renew_holder(conn, name, token, lease.min(left));
        if !is_own {
            self.move_grant(name, token, conn);
            let holder = self.holder(name, token.fence.0).expect("it was found");
            holder.is_provisional = true;
        }
        Ok(Answer::Renewed(lease.min(secs(left.as_secs()))))
    }

    pub fn keep(
        &mut self,
        name: &str,
        token: Token,
        lease: Duration,
        tag_of: impl FnOnce(u64) -> Option<String>,
    ) -> Result<(), Refusal> {
        self.expire();
        let held = self.find_told(name, token)?;
        let left = self.left_of_hold(held.since, held.is_kept, lease)?;
        let is_too_long = lease > left.min(self.caps.max_keep_time);
        if self.caps.max_kept == 0 || is_too_long {
            return Err(Refusal::NotHeld);
        }
        if !held.is_kept && self.kept_count() >= self.caps.max_kept {
            return Err(Refusal::MaxLocks);
        }
        let expires_at = self.now + lease;
        self.renew_holder(held.conn, name, token, lease);
        if held.conn != 0 {
            self.make_orphan(name, token, tag_of(held.conn));
        }
        let holder = self.holder(name, token.fence.0).expect("it was found");
        holder.is_kept = true;
        holder.expires_at = expires_at;
        Ok(())
    }

    fn kept_count(&self) -> usize {
        let holders = self.keys.iter().flat_map(|key| &key.holders);
        holders.filter(|holder| holder.is_kept).count()
    }

    fn make_orphan(&mut self, name: &str, token: Token, tag: Option<String>) {
        self.move_grant(name, token, 0);
        let holder = self.holder(name, token.fence.0).expect("it was found");
        holder.is_provisional = false;
        holder.tag = holder.tag.take().or(tag);
    }

    fn move_grant(&mut self, name: &str, token: Token, conn: u64) {
        let fence = token.fence.0;
        self.entries.retain(
            |entry| !matches!(entry.began, Began::Acquired(grant) if grant.token.fence.0 == fence),
        );
        self.told.retain(|told| told.2 != fence);
        self.told.push((conn, name.to_owned(), fence));
        let holder = self.holder(name, fence).expect("it was found");
        holder.conn = conn;
    }

    /// The holder with this token, of either kind, if its client knows the token.
    fn find_told(&mut self, name: &str, given: Token) -> Result<ModelHolder, Refusal> {
        let fence = given.fence.0;
        let is_told = self.told.iter().any(|told| told.2 == fence);
        let holder = self.holder(name, fence).cloned();
        let holder = holder.filter(|_| is_told && token(fence) == given);
        holder.ok_or(Refusal::NotHeld)
    }

    /// The grants of a connection whose tokens its client knows; those of 0 have none.
    pub fn told_to(&self, conn: u64) -> Vec<u64> {
        let holders = self.keys.iter().flat_map(|key| &key.holders);
        let fences = holders.map(|holder| holder.fence);
        let is_its_own = |fence: &u64| self.told.iter().any(|it| (it.0, it.2) == (conn, *fence));
        fences.filter(is_its_own).collect()
    }

    pub fn abandon_grant(&mut self, fence: u64) {
        let is_of = |key: &&ModelKey| key.holders.iter().any(|holder| holder.fence == fence);
        if let Some(name) = self.keys.iter().find(is_of).map(|key| key.name.clone()) {
            self.revoke(&name, fence);
        }
    }

    pub fn disconnect(&mut self, conn: u64, holdings: AtClose, tag: Option<String>) {
        let mine: Vec<ModelTicket> = self
            .tickets
            .iter()
            .filter(|ticket| ticket.conn == conn)
            .cloned()
            .collect();
        self.tickets.retain(|ticket| ticket.conn != conn);
        self.entries.retain(|entry| entry.conn != conn);
        // Each once: the key of two places is idle, or passes on, with the first of them.
        let mut left: Vec<&String> = Vec::new();
        for ticket in mine.iter().filter(|ticket| ticket.is_waiting()) {
            if !left.contains(&&ticket.key) {
                left.push(&ticket.key);
            }
        }
        for key in &mut self.keys {
            key.waiters
                .retain(|number| !mine.iter().any(|ticket| ticket.number == *number));
        }
        for name in left {
            self.promote(name);
        }
        for ticket in mine.iter().filter(|ticket| ticket.fence.is_some()) {
            self.drop_ticket(ticket);
        }
        let told = self.told.clone();
        for (_, name, fence) in told.iter().filter(|told| told.0 == conn) {
            let Some(holder) = self.holder(name, *fence) else {
                continue;
            };
            if holdings == AtClose::Orphan || holder.is_provisional {
                self.make_orphan(name, token(*fence), tag.clone());
            } else {
                self.revoke(name, *fence);
            }
        }
    }

    pub fn expire(&mut self) {
        self.end_settling();
        while self.end_first() {}
    }

    /// If it has settled by now, serves all keys.
    pub fn end_settling(&mut self) {
        if self.has_settled() {
            self.settling_until = None;
            self.grant_owed_slots();
        }
    }

    fn has_settled(&self) -> bool {
        self.settling_until.is_some_and(|until| until <= self.now)
    }

    /// Ends the lease that ran out first; `false` if none has run out.
    pub fn end_first(&mut self) -> bool {
        let due = self.keys.iter().flat_map(|key| {
            key.holders
                .iter()
                .map(|holder| (holder.expires_at, holder.fence, key.name.clone()))
        });
        match due.min() {
            Some((expires_at, fence, name)) if expires_at <= self.now => {
                self.revoke(&name, fence);
                true
            }
            _ => false,
        }
    }

    /// Whether a lease has run out and has not been ended.
    pub fn is_behind(&self) -> bool {
        self.has_settled() || self.keys.iter().any(|key| self.has_due(&key.name))
    }

    /// Ends leases in order until none of `name` has run out.
    fn catch_up(&mut self, name: &str) {
        self.end_settling();
        while self.has_due(name) && self.end_first() {}
    }

    fn catch_up_ticket(&mut self, number: u64) {
        let ticket = self.tickets[self.find_ticket(number)].clone();
        let has_slot = |fence| self.holder(&ticket.key, fence).is_some();
        if ticket.is_waiting() || ticket.fence.is_some_and(has_slot) {
            self.catch_up(&ticket.key);
        }
    }

    fn has_due(&self, name: &str) -> bool {
        let holders = self.find(name).map(|at| &self.keys[at].holders);
        holders.is_some_and(|holders| holders.iter().any(|holder| holder.expires_at <= self.now))
    }

    fn needs_room(&self, conn: u64, name: &str) -> bool {
        let waiter_count: usize = self.keys.iter().map(|key| key.waiters.len()).sum();
        self.keys.len() >= self.caps.max_locks && self.find(name).is_none()
            || self.is_full()
            || self.connection_count(conn) >= self.caps.max_per_connection
            || waiter_count >= self.caps.max_waiters_total
    }

    pub fn prune(&mut self, max_idle: Duration) {
        let now = self.now;
        self.keys
            .retain(|key| !key.is_idle() || now - key.last_used < max_idle);
    }

    pub fn begin_drain(&mut self) {
        self.expire();
        self.draining = true;
        for ticket in self
            .tickets
            .iter_mut()
            .filter(|ticket| ticket.fence.is_none())
        {
            ticket.dismissed = true;
        }
        let mut names: Vec<String> = self.keys.iter().map(|key| key.name.clone()).collect();
        names.sort();
        names.retain(|name| {
            let at = self.find(name).expect("just listed");
            !std::mem::take(&mut self.keys[at].waiters).is_empty()
        });
        for name in names {
            self.promote(&name);
        }
    }

    /// Serves one key after the other, the one whose first waiter came first.
    pub fn grant_owed_slots(&mut self) {
        let owed = self.keys.iter().filter(|key| self.is_owed(key));
        let mut owed: Vec<(u64, String)> =
            owed.map(|key| (key.waiters[0], key.name.clone())).collect();
        owed.sort();
        for (_, name) in owed {
            self.serve(&name);
        }
    }

    /// Whether it is the turn of the first waiter of a key.
    fn is_owed(&self, key: &ModelKey) -> bool {
        let first = key.waiters.first();
        self.settling_until.is_none()
            && first
                .is_some_and(|first| self.tickets[self.find_ticket(*first)].weight <= key.free())
    }

    /// Whether as many slots are held as may be.
    fn is_full(&self) -> bool {
        let held_count: usize = self.keys.iter().map(|key| key.holders.len()).sum();
        held_count >= self.caps.max_grants
    }

    /// Whether a connection holds or waits for anything. An entry that has ended does not count.
    pub fn is_busy(&self, conn: u64) -> bool {
        let has_ended = |ticket: &ModelTicket| {
            let began = Began::Queued(ticket.number);
            let mut entries = self.entries.iter();
            let entry = entries.find(|entry| entry.began == began);
            entry.is_some_and(|entry| self.state_of(entry).is_err())
        };
        let mut tickets = self.tickets.iter();
        tickets.any(|ticket| ticket.conn == conn && !has_ended(ticket))
            || self
                .keys
                .iter()
                .any(|key| key.holders.iter().any(|holder| holder.conn == conn))
    }

    fn drop_ticket(&mut self, ticket: &ModelTicket) {
        match ticket.fence {
            Some(fence) => self.revoke(&ticket.key, fence),
            None if ticket.dismissed => {}
            None => {
                let at = self.find(&ticket.key).expect("waited for");
                self.keys[at]
                    .waiters
                    .retain(|number| *number != ticket.number);
                self.promote(&ticket.key);
            }
        }
    }

    fn revoke(&mut self, name: &str, fence: u64) {
        let Some(at) = self.find(name) else { return };
        let count = self.keys[at].holders.len();
        self.keys[at].holders.retain(|holder| holder.fence != fence);
        if self.keys[at].holders.len() < count {
            self.promote(name);
        }
    }

    fn promote(&mut self, name: &str) {
        self.serve(name);
        self.grant_owed_slots();
    }

    fn serve(&mut self, name: &str) {
        let at = self.find(name).expect("in use until now");
        while self.is_owed(&self.keys[at]) && !self.is_full() && !self.out_of_tokens {
            let key = &mut self.keys[at];
            let number = key.waiters.remove(0);
            self.last_fence += 1;
            let ticket = self
                .tickets
                .iter_mut()
                .find(|ticket| ticket.number == number)
                .expect("queued");
            ticket.fence = Some(self.last_fence);
            key.holders.push(ModelHolder {
                conn: ticket.conn,
                fence: self.last_fence,
                weight: ticket.weight,
                numbers: Vec::new(),
                since: self.now,
                expires_at: self.now + ticket.lease,
                is_kept: false,
                is_provisional: false,
                tag: None,
            });
        }
        let key = &mut self.keys[at];
        if key.is_idle() {
            key.last_used = self.now;
            self.is_idle_now(name);
        }
    }

    fn is_idle_now(&mut self, name: &str) {
        self.idle.retain(|idle| idle != name);
        self.idle.push(name.to_owned());
    }

    fn agree(&mut self, at: usize, kind: Kind, limit: u32) -> Result<(), Refusal> {
        let key = &mut self.keys[at];
        if key.is_idle() {
            key.kind = kind;
            key.limit = limit;
        }
        if (key.kind, key.limit) == (kind, limit) {
            Ok(())
        } else {
            Err(Refusal::LimitMismatch)
        }
    }

    /// Slots and places.
    fn connection_count(&self, conn: u64) -> usize {
        let holders = self.keys.iter().flat_map(|key| &key.holders);
        let places = self.tickets.iter().filter(|ticket| ticket.is_waiting());
        holders.filter(|holder| holder.conn == conn).count()
            + places.filter(|ticket| ticket.conn == conn).count()
    }

    fn find(&self, name: &str) -> Option<usize> {
        self.keys.iter().position(|key| key.name == name)
    }

    fn find_ticket(&self, number: u64) -> usize {
        self.tickets
            .iter()
            .position(|ticket| ticket.number == number)
            .expect("not spent")
    }

    fn find_held(&mut self, name: &str, kind: Kind, given: Token) -> Result<(), Refusal> {
        self.catch_up(name);
        let at = self.find(name).ok_or(Refusal::NotHeld)?;
        let key = &self.keys[at];
        let is_holder = key
            .holders
            .iter()
            .any(|holder| token(holder.fence) == given);
        if key.kind == kind && is_holder {
            Ok(())
        } else {
            Err(Refusal::NotHeld)
        }
    }

    fn holder(&mut self, name: &str, fence: u64) -> Option<&mut ModelHolder> {
        let at = self.find(name)?;
        self.keys[at]
            .holders
            .iter_mut()
            .find(|holder| holder.fence == fence)
    }
}

fn grant(fence: u64, lease: Duration) -> Grant {
    Grant {
        token: token(fence),
        lease,
    }
}

impl ModelTicket {
    fn is_waiting(&self) -> bool {
        self.fence.is_none() && !self.dismissed
    }
}

impl ModelKey {
    /// A lock has as many slots as shared claims can divide it into.
    fn free(&self) -> u32 {
        let slot_count = match self.kind {
            Kind::Lock => 1_048_576,
            Kind::Semaphore => self.limit,
        };
        slot_count - self.holders.iter().map(|holder| holder.weight).sum::<u32>()
    }

    fn is_idle(&self) -> bool {
        self.holders.is_empty() && self.waiters.is_empty()
    }

    fn is_idle_as(&self, name: &str) -> bool {
        self.is_idle() && self.name == name
    }
}
