//! One connection's access to the arbiter.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sync::{Condvar, MutexGuard};
use super::{Arbiter, ClientSocket, SeatState, State, WaitState, RELEASED_AT_ONCE};
use crate::table::{Answer, Ask, Claimant, ConnId, Holdings, Kind, Refusal, Scope, Ticket};
use crate::token::Token;

/// After this time a wait is long, and worth a system call or two more.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// One connection's access to the arbiter. Dropping it disconnects: the connection loses its places
/// in queues, and its slots are released or kept, as its `holdings` say.
///
/// Only [`Seat::acquire`] and [`Seat::wait`] block. The other requests visit the table once. They
/// take the mutex again only on behalf of other connections: to end many leases in steps, or to
/// record that the grant of another connection has been sent.
pub struct Seat {
    arbiter: Arc<Arbiter>,
    conn: ConnId,
    wake: Arc<Condvar>,
    /// What becomes of the connection's slots when it ends.
    holdings: Holdings,
}

/// What a request that blocks tells its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEvent {
    /// The claim is queued. Told under the mutex: the caller must not block.
    Queued,
    /// The wait has lasted for a second. Told once, without the mutex.
    IsLong,
    /// The thread that freed the slot has sent this many bytes of the reply. Told under the mutex.
    ReplySent(usize),
}

impl Arbiter {
    /// Gives a connection its seat. Its number must never have been used before. The grants it
    /// waits for go through the socket, if it has one.
    pub fn connect(self: &Arc<Self>, conn: ConnId, socket: Option<Arc<dyn ClientSocket>>) -> Seat {
        let wake = Arc::default();
        let seat = SeatState {
            wake: Arc::clone(&wake),
            socket,
            peer: OnceCell::new(),
            tag: None,
            can_adopt: false,
            is_gone: false,
            wait: WaitState::NotWaiting,
        };
        self.state.lock().seats.insert(conn, seat);
        Seat {
            arbiter: Arc::clone(self),
            conn,
            wake,
            holdings: self.rules.holdings,
        }
    }
}

impl Seat {
    pub fn id(&self) -> ConnId {
        self.conn
    }

    pub fn arbiter(&self) -> &Arbiter {
        &self.arbiter
    }

    /// Asks for a key without taking a place in its queue: [`Answer::WouldWait`] if the claim would
    /// wait. That is not counted, because the caller may go on to wait. Does not block, except
    /// perhaps for the kernel's randomness.
    pub fn try_acquire(&self, ask: &Ask<'_>) -> Result<Answer, Refusal> {
        let claimant = self.claimant();
        let (mut visit, now) = self.arbiter.visit(Scope::Ask(self.conn, ask));
        match claimant.and_then(|claimant| visit.table.try_acquire(claimant, ask, now)) {
            Ok(Answer::WouldWait) => Ok(Answer::WouldWait),
            answer => visit.table.counted(answer),
        }
    }

    /// Asks for a key. Blocks until it is granted or refused, the peer hangs up, or `wait_timeout`
    /// is over. If that is zero, it is [`Seat::try_acquire`], and a claim that would wait is
    /// counted.
    pub fn acquire(
        &self,
        ask: &Ask<'_>,
        wait_timeout: Duration,
        tell: &mut dyn FnMut(WaitEvent),
    ) -> Result<Answer, Refusal> {
        let claimant = self.claimant();
        let (mut visit, now) = self.arbiter.visit(Scope::Ask(self.conn, ask));
        let answer = claimant.and_then(|claimant| match wait_timeout.is_zero() {
            true => visit.table.try_acquire(claimant, ask, now),
            false => visit.table.acquire(claimant, ask, now),
        });
        let answer = match answer {
            Ok(Answer::Queued(ticket)) => {
                self.wait_with(visit.guard(), ask.key, ticket, wait_timeout, tell)
            }
            answer => answer,
        };
        visit.table.counted(answer)
    }

    /// Asks for a key, and keeps the grant or the place in the queue for [`Seat::wait`]. Does not
    /// block, except perhaps for the kernel's randomness.
    pub fn enqueue(&self, ask: &Ask<'_>) -> Result<Answer, Refusal> {
        let claimant = self.claimant();
        let (mut visit, now) = self.arbiter.visit(Scope::Ask(self.conn, ask));
        let answer = claimant.and_then(|claimant| visit.table.enqueue(claimant, ask, now));
        visit.table.counted(answer)
    }

    /// As [`Seat::wait`], but [`Answer::WouldWait`] if it would block; the place is kept.
    pub fn try_wait(&self, key: &str, kind: Kind) -> Result<Answer, Refusal> {
        let (mut visit, now) = self.arbiter.visit(Scope::Key(key));
        match visit.table.try_wait(self.conn, key, kind, now) {
            Ok(Answer::WouldWait) => Ok(Answer::WouldWait),
            answer => visit.table.counted(answer),
        }
    }

    /// Collects the grant of a key that was enqueued for. Blocks until it is there or refused, the
    /// peer hangs up, or `wait_timeout` is over; the last two give up the place.
    pub fn wait(
        &self,
        key: &str,
        kind: Kind,
        wait_timeout: Duration,
        tell: &mut dyn FnMut(WaitEvent),
    ) -> Result<Answer, Refusal> {
        let (mut visit, now) = self.arbiter.visit(Scope::Key(key));
        let answer = match visit.table.wait(self.conn, key, kind, now) {
            // A try does not wait, so it is answered even if the peer has hung up.
            Ok(Answer::Queued(ticket)) if wait_timeout.is_zero() => {
                let cancelled = visit.table.cancel(ticket, now);
                cancelled.map(|()| Answer::TimedOut)
            }
            Ok(Answer::Queued(ticket)) => {
                self.wait_with(visit.guard(), key, ticket, wait_timeout, tell)
            }
            answer => answer,
        };
        visit.table.counted(answer)
    }

    /// Gives back a slot, whichever connection it was granted to. [`Refusal::NotHeld`] if the token
    /// is not that of a live holder.
    pub fn release(&self, key: &str, kind: Kind, token: Token) -> Result<Answer, Refusal> {
        let (mut visit, now) = self.arbiter.visit(Scope::Key(key));
        let released = visit.table.release(self.conn, key, kind, token, now);
        visit.table.counted(released)
    }

    /// Starts a lease anew, whichever connection it was granted to. [`Refusal::NotHeld`] if the
    /// token is not that of a live holder.
    pub fn renew(
        &self,
        key: &str,
        kind: Kind,
        token: Token,
        lease: Duration,
    ) -> Result<Answer, Refusal> {
        let (mut visit, now) = self.arbiter.visit(Scope::Key(key));
        let renewed = visit.table.renew(self.conn, key, kind, token, lease, now);
        visit.table.counted(renewed)
    }

    /// Starts a lease anew, and makes the grant one of this connection, whichever had it. The
    /// client must renew the grant once: if the connection ends before that, the grant becomes an
    /// orphan.
    /// [`Answer::Gone`], and nothing changes, if the peer has hung up. [`Refusal::MaxLocks`] if the
    /// connection has as much as it may; [`Refusal::NotHeld`] if the token is not that of a live
    /// holder. Costs a system call.
    pub fn adopt(&self, key: &str, token: Token, lease: Duration) -> Result<Answer, Refusal> {
        let has_hung_up = self.has_hung_up(&mut self.arbiter.state.lock());
        let (mut visit, now) = self.arbiter.visit(Scope::Everything);
        if has_hung_up || self.state_in(&mut visit).is_gone {
            return Ok(Answer::Gone);
        }
        let adopted = visit.table.adopt(self.conn, key, token, lease, now);
        visit.table.counted(adopted)
    }

    /// Starts a lease anew, and takes the grant from its connection: it lives until the lease ends.
    /// [`Refusal::MaxLocks`] if as many grants are kept as may be; [`Refusal::NotHeld`] if the
    /// token is not that of a live holder, or if the lease is too long for a kept grant.
    pub fn keep(&self, key: &str, token: Token, lease: Duration) -> Result<Answer, Refusal> {
        let (mut visit, now) = self.arbiter.visit(Scope::Everything);
        let State { table, seats, .. } = &mut *visit;
        let tag_of = |conn| seats.get(&conn).and_then(|seat| seat.tag.clone());
        let kept = table.keep(key, token, lease, tag_of, now);
        table.counted(kept)
    }

    /// Sets whether the client can adopt its grants over another connection.
    pub fn set_can_adopt(&self, can_adopt: bool) {
        self.state_in(&mut self.arbiter.state.lock()).can_adopt = can_adopt;
    }

    /// Has the grants of the connection outlive it, if its client can adopt them.
    pub fn keep_if_client_can_adopt(&mut self) {
        if self.state_in(&mut self.arbiter.state.lock()).can_adopt {
            self.holdings = Holdings::Keep;
        }
    }

    /// Sets what the client says of itself, or clears it if that is empty. The caller bounds its
    /// length.
    pub fn set_tag(&self, tag: &str) {
        let tag = (!tag.is_empty()).then(|| Arc::from(tag));
        let old = std::mem::replace(&mut self.state_in(&mut self.arbiter.state.lock()).tag, tag);
        drop(old);
    }

    /// The time since which the connection has neither held a lock nor waited for one, for which a
    /// place in a queue counts. That is now, if it holds or waits; and `None` if it never did.
    pub fn idle_since(&self) -> Option<Instant> {
        let (visit, now) = self.arbiter.visit(Scope::Nothing);
        visit.table.connection_idle_since(self.conn, now)
    }

    fn claimant(&self) -> Result<Claimant, Refusal> {
        if !self.arbiter.has_room() {
            return Err(Refusal::MaxLocks);
        }
        let salt = self.arbiter.salts.next().ok_or(Refusal::NoToken)?;
        let conn = self.conn;
        Ok(Claimant { conn, salt })
    }

    /// Blocks until a queued claim is decided. Spends the ticket in any case.
    fn wait_with(
        &self,
        state: &mut MutexGuard<'_, State>,
        key: &str,
        ticket: Ticket,
        wait_timeout: Duration,
        tell: &mut dyn FnMut(WaitEvent),
    ) -> Result<Answer, Refusal> {
        tell(WaitEvent::Queued);
        self.state_in(state).wait = WaitState::Queued(ticket);
        let (mut answer, sent_len) = self.wait_until_decided(state, key, wait_timeout, tell);
        if sent_len > 0 {
            tell(WaitEvent::ReplySent(sent_len));
        } else if let Ok(Answer::Granted(grant)) = answer {
            // The peer may have hung up shortly before its grant: then the slot passes to the next
            // waiter, as if this had been known.
            if self.has_hung_up(state) {
                let now = self.arbiter.expire_due(state, Scope::Nothing);
                state.table.take_back(grant.token.fence, now);
                answer = Ok(Answer::Gone);
            }
        }
        self.state_in(state).wait = WaitState::NotWaiting;
        answer
    }

    /// Blocks until a queued claim is [`WaitState::Decided`]. Returns the answer, and how many
    /// bytes of the reply have been sent.
    fn wait_until_decided(
        &self,
        state: &mut MutexGuard<'_, State>,
        key: &str,
        wait_timeout: Duration,
        tell: &mut dyn FnMut(WaitEvent),
    ) -> (Result<Answer, Refusal>, usize) {
        let arbiter = &self.arbiter;
        let began = state.now;
        let deadline = began.checked_add(wait_timeout);
        let mut long_at = Some(began + LONG_WAIT);
        loop {
            let now = arbiter.expire_due(state, Scope::Key(key));
            let ticket = match self.state_in(state).wait {
                WaitState::Queued(ticket) => ticket,
                WaitState::BeingSent => {
                    arbiter.clock.wait(&self.wake, state, None);
                    continue;
                }
                WaitState::Decided { answer, sent_len } => return (answer, sent_len),
                WaitState::NotWaiting => unreachable!("only this thread ends the wait"),
            };
            if let Some(answer) = self.decide(state, ticket, deadline, now) {
                let sent_len = 0;
                self.state_in(state).wait = WaitState::Decided { answer, sent_len };
                return (answer, sent_len);
            }
            // This look may have ended the lease of another connection.
            if arbiter.wake_before_sleep(state) {
                continue;
            }
            if long_at.take_if(|at| *at <= now).is_some() {
                MutexGuard::unlocked(state, || tell(WaitEvent::IsLong));
                continue;
            }
            let look_again = deadline.into_iter().chain(long_at).min();
            arbiter.clock.wait(&self.wake, state, look_again);
        }
    }

    /// The answer to a queued claim, if there is one now. That spends the ticket.
    fn decide(
        &self,
        state: &mut State,
        ticket: Ticket,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Option<Result<Answer, Refusal>> {
        // A peer that has hung up is granted nothing. If its grant arrives at the same time, the
        // hang-up wins and the slot passes to the next waiter: the peer would not release it.
        if self.state_in(state).is_gone {
            return Some(state.table.cancel(ticket, now).map(|()| Answer::Gone));
        }
        // A release may have granted the key between the last look and the deadline. The grant
        // wins: answering `timeout` now would strand the slot until its lease runs out.
        match state.table.collect(ticket, now) {
            Ok(Answer::WouldWait) if deadline.is_none_or(|deadline| now < deadline) => None,
            Ok(Answer::WouldWait) => {
                Some(state.table.cancel(ticket, now).map(|()| Answer::TimedOut))
            }
            answer => Some(answer),
        }
    }

    /// Asks the socket whether the peer has hung up, with the mutex released.
    fn has_hung_up(&self, state: &mut MutexGuard<'_, State>) -> bool {
        let socket = self.state_in(state).socket.clone();
        MutexGuard::unlocked(state, || socket.is_some_and(|socket| socket.has_hung_up()))
    }

    fn state_in<'a>(&self, state: &'a mut State) -> &'a mut SeatState {
        let seat = state.seats.get_mut(&self.conn);
        seat.expect("a seat is known until it is dropped")
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let arbiter = &self.arbiter;
        let mut state = arbiter.state.lock();
        let tag = self.state_in(&mut state).tag.clone();
        state.table.disconnect(self.conn, self.holdings, tag);
        drop(state);
        arbiter.visit_in_steps(Scope::Nothing, |state, now| {
            let is_done = state.table.release_some(self.conn, RELEASED_AT_ONCE, now);
            if is_done {
                // The events are those of this client.
                state.tell_events();
                state.seats.remove(&self.conn);
            }
            is_done
        });
    }
}
