//! A toy server in virtual time, with clients, and the checker tried on what they saw: a checker
//! that has never failed proves nothing. Each bug is one that a real lock server has had.

use std::collections::VecDeque;
use std::time::Duration;

use crate::support::history::{History, Instant, Record, Reply, Request, Rule};
use crate::support::random::Random;

const CLIENTS: u64 = 10;
const LIMITS: [usize; 3] = [1, 1, 3];
const TICKS: u64 = 20_000;
const LEASE: Duration = Duration::from_millis(60);
const SLACK: Duration = Duration::from_millis(20);

/// How many histories there are of each bug, and of none.
const HISTORIES: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    /// A key is granted that another client holds.
    DoubleGrant,
    /// Each holder counts for one slot, however many it has.
    UncountedSlots,
    /// A newcomer is served before those who wait.
    OvertakingWaiter,
    /// A newcomer is served if its slots are free, although a heavier claim waits.
    LightNewcomer,
    /// A slot is free, and the next waiter is not told.
    LostWakeUp,
    /// Several slots become free at once, and one waiter alone is told.
    SingleWakeUp,
    /// A lease ends long after its time.
    LateExpiry,
    /// Two grants have one fence.
    ReusedFence,
    /// A grant has a lower fence than earlier ones.
    FallingFence,
    /// A server that takes over does not know the holders.
    ForgottenHolders,
    /// A lease ends before its time.
    EarlyExpiry,
    /// A renewal brings a dead token back to life.
    DeadToken,
    /// A break ends nothing.
    EmptyBreak,
    /// A waiter that has hung up keeps its place.
    DeadWaiter,
    /// A waiter that has hung up is granted the key, and told so.
    AfterHangUp,
}

impl Bug {
    /// Whether the bug shows at this occasion.
    fn strikes(self, bug: Bug, random: &mut Random) -> bool {
        self == bug && random.one_in(10)
    }
}

// ---- claims ----------------------------------------------------------------------------------

#[test]
fn a_correct_server_has_no_violation() {
    for seed in 0..HISTORIES {
        let history = play(Bug::None, seed);
        assert!(history.grant_count() > 1000, "{}", history.grant_count());
        let found = history.violations();
        assert!(found.is_empty(), "seed {seed}: {found:?}");
    }
}

#[test]
fn a_double_grant_is_found() {
    is_found(Bug::DoubleGrant, &[Rule::Exclusion]);
}

#[test]
fn a_holder_that_counts_for_one_slot_is_found() {
    is_found(Bug::UncountedSlots, &[Rule::Exclusion]);
}

#[test]
fn an_overtaking_waiter_is_found() {
    is_found(Bug::OvertakingWaiter, &[Rule::Order]);
}

#[test]
fn a_light_newcomer_before_a_heavy_waiter_is_found() {
    is_found(Bug::LightNewcomer, &[Rule::Order]);
}

#[test]
fn a_lost_wake_up_is_found() {
    is_found(Bug::LostWakeUp, &[Rule::LostWakeUp]);
}

#[test]
fn a_single_wake_up_for_several_slots_is_found() {
    is_found(Bug::SingleWakeUp, &[Rule::LostWakeUp]);
}

#[test]
fn a_late_expiry_is_found() {
    is_found(Bug::LateExpiry, &[Rule::LateExpiry]);
}

#[test]
fn a_reused_fence_is_found() {
    is_found(Bug::ReusedFence, &[Rule::Fence]);
}

#[test]
fn a_falling_fence_is_found() {
    is_found(Bug::FallingFence, &[Rule::Fence]);
}

#[test]
fn a_take_over_without_the_holders_is_found() {
    is_found(Bug::ForgottenHolders, &[Rule::Exclusion, Rule::EarlyExpiry]);
}

#[test]
fn an_early_expiry_is_found() {
    is_found(Bug::EarlyExpiry, &[Rule::EarlyExpiry, Rule::Exclusion]);
}

#[test]
fn a_token_that_comes_back_to_life_is_found() {
    is_found(Bug::DeadToken, &[Rule::DeadToken]);
}

#[test]
fn a_break_that_ends_nothing_is_found() {
    is_found(Bug::EmptyBreak, &[Rule::DeadToken]);
}

#[test]
fn a_dead_client_that_keeps_its_place_is_found() {
    is_found(Bug::DeadWaiter, &[Rule::LostWakeUp]);
}

#[test]
fn a_grant_after_a_hang_up_is_found() {
    is_found(Bug::AfterHangUp, &[Rule::AfterHangUp]);
}

fn is_found(bug: Bug, rules: &[Rule]) {
    for seed in 0..HISTORIES {
        let found = play(bug, seed).violations();
        for rule in rules {
            assert!(
                found.iter().any(|violation| violation.rule == *rule),
                "seed {seed}: {rule:?} is not among {} violations",
                found.len()
            );
        }
    }
}

fn play(bug: Bug, seed: u64) -> History {
    let mut toy = Toy {
        bug,
        random: Random::new(seed),
        now: 0,
        last_fence: 0,
        queues: LIMITS.iter().map(|limit| Queue::new(*limit)).collect(),
        mail: vec![None; usize::try_from(CLIENTS).expect("a few")],
    };
    let mut history = History {
        limits: (0..).zip(LIMITS).collect(),
        slack: SLACK,
        ..History::default()
    };
    let mut clients: Vec<Client> = (0..CLIENTS).map(Client::new).collect();
    for now in 1..=TICKS {
        toy.now = now;
        toy.expire();
        for client in &mut clients {
            client.step(&mut toy, &mut history);
        }
    }
    history
        .records
        .extend(clients.iter().filter_map(Client::unanswered));
    history
}

fn at(tick: u64) -> Instant {
    Duration::from_millis(tick)
}

fn ticks(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).expect("a short time")
}

// ---- the server ------------------------------------------------------------------------------

struct Toy {
    bug: Bug,
    random: Random,
    now: u64,
    last_fence: u64,
    queues: Vec<Queue>,
    /// The reply to each client that waits.
    mail: Vec<Option<Reply>>,
}

struct Queue {
    limit: usize,
    holders: Vec<Holder>,
    waiters: VecDeque<Waiter>,
}

struct Holder {
    client: u64,
    weight: usize,
    fence: u64,
    expires_at: u64,
}

struct Waiter {
    client: u64,
    weight: usize,
    /// When it gives up, once it says so.
    gives_up: Option<u64>,
    is_connected: bool,
}

impl Queue {
    fn new(limit: usize) -> Queue {
        Queue {
            limit,
            holders: Vec::new(),
            waiters: VecDeque::new(),
        }
    }

    fn has_room(&self, weight: usize) -> bool {
        let taken: usize = self.holders.iter().map(|holder| holder.weight).sum();
        taken + weight <= self.limit
    }
}

impl Toy {
    fn ask(&mut self, client: u64, key: u32, request: Request) -> Option<Reply> {
        match request {
            Request::Acquire { wait, weight, .. } => {
                self.claim(client, key, weight, Some(ticks(wait)))
            }
            Request::Enqueue { weight, .. } => {
                let reply = self.claim(client, key, weight, None);
                reply.or(Some(Reply::Queued))
            }
            Request::Wait { wait, .. } => self.wait(client, key, ticks(wait)),
            Request::Renew { fence, .. } => Some(self.renew(key, fence)),
            Request::Release { fence } => Some(self.release(key, fence)),
            Request::Break { fence } if self.bug == Bug::EmptyBreak => Some(self.seen(key, fence)),
            Request::Break { fence } => Some(self.release(key, fence)),
        }
    }

    fn claim(&mut self, client: u64, key: u32, weight: usize, wait: Option<u64>) -> Option<Reply> {
        let overtakes = self.bug.strikes(Bug::OvertakingWaiter, &mut self.random);
        let doubles = self.bug.strikes(Bug::DoubleGrant, &mut self.random);
        let passes = self.bug == Bug::LightNewcomer;
        let now = self.now;
        let queue = self.queue(key);
        let is_free = queue.has_room(weight) && (queue.waiters.is_empty() || passes);
        if is_free || doubles {
            let fence = self.grant(client, key, weight);
            return Some(Reply::Granted { fence });
        }
        if wait == Some(0) {
            return Some(Reply::TimedOut);
        }
        let waiter = Waiter {
            client,
            weight,
            gives_up: wait.map(|wait| now + wait),
            is_connected: true,
        };
        if overtakes {
            queue.waiters.push_front(waiter)
        } else {
            queue.waiters.push_back(waiter)
        }
        None
    }

    fn wait(&mut self, client: u64, key: u32, wait: u64) -> Option<Reply> {
        let now = self.now;
        let queue = self.queue(key);
        if let Some(holder) = queue.holders.iter_mut().find(|one| one.client == client) {
            holder.expires_at = now + ticks(LEASE);
            let fence = holder.fence;
            return Some(Reply::Granted { fence });
        }
        let Some(waiter) = queue.waiters.iter_mut().find(|one| one.client == client) else {
            return Some(Reply::Refused);
        };
        waiter.gives_up = Some(now + wait);
        None
    }

    fn renew(&mut self, key: u32, fence: u64) -> Reply {
        let revives = self.bug.strikes(Bug::DeadToken, &mut self.random);
        let expires_at = self.now + ticks(LEASE);
        let holders = &mut self.queue(key).holders;
        match holders.iter_mut().find(|holder| holder.fence == fence) {
            Some(holder) => {
                holder.expires_at = expires_at;
                Reply::Done
            }
            None if revives => Reply::Done,
            None => Reply::Refused,
        }
    }

    fn release(&mut self, key: u32, fence: u64) -> Reply {
        let holders = &mut self.queue(key).holders;
        let Some(index) = holders.iter().position(|holder| holder.fence == fence) else {
            return Reply::Refused;
        };
        holders.remove(index);
        if !self.bug.strikes(Bug::LostWakeUp, &mut self.random) {
            self.promote(key);
        }
        Reply::Done
    }

    /// Whether there is such a grant.
    fn seen(&mut self, key: u32, fence: u64) -> Reply {
        let holders = &self.queue(key).holders;
        if holders.iter().any(|holder| holder.fence == fence) {
            Reply::Done
        } else {
            Reply::Refused
        }
    }

    fn hang_up(&mut self, client: u64) {
        let stays = self.bug.strikes(Bug::DeadWaiter, &mut self.random);
        let is_told = self.bug == Bug::AfterHangUp;
        for key in 0..3 {
            let queue = self.queue(key);
            queue.holders.retain(|holder| holder.client != client);
            let stays = stays || is_told;
            queue
                .waiters
                .retain(|waiter| stays || waiter.client != client);
            for waiter in &mut queue.waiters {
                waiter.is_connected &= waiter.client != client || is_told;
            }
            self.promote(key);
        }
    }

    fn expire(&mut self) {
        let now = self.now;
        let lateness = match self.bug {
            Bug::LateExpiry => 2 * ticks(SLACK),
            _ => 0,
        };
        let earliness = match self.bug {
            Bug::EarlyExpiry => 20,
            _ => 0,
        };
        let is_forgotten = self.bug == Bug::ForgottenHolders && now % 500 == 0;
        for key in 0..3 {
            let queue = self.queue(key);
            queue
                .holders
                .retain(|holder| !is_forgotten && now < holder.expires_at + lateness - earliness);
            let mut dismissed = Vec::new();
            queue.waiters.retain(|waiter| {
                let is_over = waiter.gives_up.is_some_and(|time| time <= now);
                if is_over && waiter.is_connected {
                    dismissed.push(waiter.client);
                }
                !is_over
            });
            for client in dismissed {
                *self.mail_of(client) = Some(Reply::TimedOut);
            }
            if !matches!(self.bug, Bug::LostWakeUp | Bug::SingleWakeUp) {
                self.promote(key);
            }
        }
    }

    fn promote(&mut self, key: u32) {
        loop {
            let queue = self.queue(key);
            let first = queue.waiters.front();
            if !first.is_some_and(|waiter| queue.has_room(waiter.weight)) {
                return;
            }
            let waiter = queue.waiters.pop_front().expect("the first");
            let fence = self.grant(waiter.client, key, waiter.weight);
            if waiter.gives_up.is_some() && waiter.is_connected {
                *self.mail_of(waiter.client) = Some(Reply::Granted { fence });
            }
            if self.bug == Bug::SingleWakeUp {
                return;
            }
        }
    }

    fn grant(&mut self, client: u64, key: u32, weight: usize) -> u64 {
        let weight = match self.bug {
            Bug::UncountedSlots => 1,
            _ => weight,
        };
        if !self.bug.strikes(Bug::ReusedFence, &mut self.random) {
            self.last_fence += 2;
        }
        // The odd ones are lower than those of the last few grants.
        let falls = self.last_fence > 9 && self.bug.strikes(Bug::FallingFence, &mut self.random);
        let fence = self.last_fence - if falls { 9 } else { 0 };
        let expires_at = self.now + ticks(LEASE);
        self.queue(key).holders.push(Holder {
            client,
            weight,
            fence,
            expires_at,
        });
        fence
    }

    fn queue(&mut self, key: u32) -> &mut Queue {
        &mut self.queues[usize::try_from(key).expect("an index")]
    }

    fn mail_of(&mut self, client: u64) -> &mut Option<Reply> {
        &mut self.mail[usize::try_from(client % CLIENTS).expect("an index")]
    }
}

// ---- the clients -----------------------------------------------------------------------------

struct Client {
    /// Of its connection: the client's number, and a multiple of the number of clients.
    connection: u64,
    state: State,
}

/// What a client does.
#[derive(Clone, Copy)]
enum State {
    /// It does nothing until then.
    Idle(u64),
    /// It has enqueued, and does nothing until then.
    Enqueued(u64, u32),
    /// It holds a key, and does nothing until then.
    Holding(u64, u32, u64),
    /// Its request arrives at that time.
    Sent(u64, Record),
    /// It waits for the reply; it hangs up at that time, if ever, and then hears what still comes.
    Waiting(Option<u64>, Record),
    /// The reply arrives at that time.
    Answered(u64, Record),
}

impl Client {
    fn new(number: u64) -> Client {
        Client {
            connection: number,
            state: State::Idle(number),
        }
    }

    fn step(&mut self, toy: &mut Toy, history: &mut History) {
        let now = toy.now;
        let delay = toy.random.below(3);
        self.state = match self.state {
            State::Idle(until) if until <= now => {
                let key = u32::try_from(toy.random.below(3)).expect("a few");
                let wait = at(toy.random.below(4) * 60);
                let limit = toy.queue(key).limit as u64;
                let weight = usize::try_from(1 + toy.random.below(limit)).expect("a few");
                let holder = toy.queue(key).holders.first().map(|holder| holder.fence);
                let request = match (toy.random.below(10), holder) {
                    (0, Some(fence)) => Request::Break { fence },
                    (0..=4, _) => Request::Acquire {
                        wait,
                        lease: LEASE,
                        weight,
                    },
                    _ => Request::Enqueue {
                        lease: LEASE,
                        weight,
                    },
                };
                State::Sent(now + delay, self.record(now, key, request))
            }
            State::Enqueued(until, key) if until <= now => {
                let (wait, lease) = (at(150), LEASE);
                let record = self.record(now, key, Request::Wait { wait, lease });
                State::Sent(now + delay, record)
            }
            State::Holding(until, key, fence) if until <= now => {
                let request = if toy.random.one_in(3) {
                    Request::Renew {
                        fence,
                        lease: LEASE,
                    }
                } else {
                    Request::Release { fence }
                };
                State::Sent(now + delay, self.record(now, key, request))
            }
            State::Sent(arrives, record) if arrives <= now => {
                match toy.ask(self.connection, record.key, record.request) {
                    Some(reply) => State::Answered(now + delay, Record { reply, ..record }),
                    None => {
                        let hangs_up = toy.random.one_in(8);
                        let after = now + 2 + toy.random.below(20);
                        State::Waiting(hangs_up.then_some(after), record)
                    }
                }
            }
            State::Waiting(hangs_up, record) => self.await_reply(toy, history, hangs_up, record),
            State::Answered(arrives, record) if arrives <= now => {
                let end = at(now);
                history.records.push(Record { end, ..record });
                if history.hang_ups.contains_key(&self.connection) {
                    self.connection += CLIENTS;
                    State::Idle(now + 5)
                } else {
                    after(record, now, &mut toy.random)
                }
            }
            state => state,
        };
    }

    fn await_reply(
        &mut self,
        toy: &mut Toy,
        history: &mut History,
        hangs_up: Option<u64>,
        record: Record,
    ) -> State {
        let now = toy.now;
        if let Some(reply) = toy.mail_of(self.connection).take() {
            return State::Answered(now + toy.random.below(3), Record { reply, ..record });
        }
        if hangs_up != Some(now) {
            return State::Waiting(hangs_up, record);
        }
        history.hang_ups.insert(self.connection, (at(now), at(now)));
        toy.hang_up(self.connection);
        if toy.bug == Bug::AfterHangUp {
            return State::Waiting(None, record);
        }
        history.records.push(Record {
            end: at(now),
            ..record
        });
        self.connection += CLIENTS;
        State::Idle(now + 5)
    }

    /// The request whose reply has not arrived.
    fn unanswered(&self) -> Option<Record> {
        match self.state {
            State::Sent(_, record) | State::Waiting(_, record) | State::Answered(_, record) => {
                let reply = Reply::Lost;
                Some(Record { reply, ..record })
            }
            _ => None,
        }
    }

    fn record(&self, now: u64, key: u32, request: Request) -> Record {
        Record {
            term: 0,
            connection: self.connection,
            key,
            begin: at(now),
            end: at(now),
            request,
            reply: Reply::Lost,
        }
    }
}

/// What a client does after a reply.
fn after(record: Record, now: u64, random: &mut Random) -> State {
    let key = record.key;
    let pause = if random.one_in(6) {
        ticks(LEASE) / 2 + random.below(50)
    } else {
        random.below(20)
    };
    match (record.request, record.reply) {
        (_, Reply::Granted { fence }) => State::Holding(now + pause, key, fence),
        (Request::Renew { fence, .. }, Reply::Done) => State::Holding(now + pause, key, fence),
        (_, Reply::Queued) => State::Enqueued(now + random.below(10), key),
        _ => State::Idle(now + random.below(40)),
    }
}
