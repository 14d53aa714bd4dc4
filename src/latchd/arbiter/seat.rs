//! One connection's access to the arbiter.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sync::{Cell, Condvar, MutexGuard};
use super::{Arbiter, ClientSocket, SeatState, State, WaitState};
use crate::latchd::table::{
    earlier, Answer, Ask, AtClose, Cap, Claimant, ConnId, LockTable, Proof, Scope, Ticket, STEP,
};
use crate::wire::terms::{Kind, Refusal};
use crate::wire::token::{Fence, Token};

/// The time after which a wait counts as long. After that time, one or two more system calls do not
/// matter.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// One connection's access to the arbiter. Dropping it disconnects: the connection loses its places
/// in queues, and its grants become orphans, unless its client [is known](Seat::leave) to have
/// given them up.
///
/// A seat [beside](Seat::beside) another one is a further access of the same connection, with a
/// wait of its own. Dropping it disconnects nothing.
///
/// Only [`Seat::wait`] blocks. The other requests visit the table once. They take the mutex more
/// than once only to end many leases in steps, or to record that the grant of another connection
/// has been sent; [`Seat::adopt`] also takes it to find the socket.
pub struct Seat {
    arbiter: Arc<Arbiter>,
    conn: ConnId,
    /// Whose hang-up ends a wait at this seat: `conn`, except for a seat beside another one.
    waiter: ConnId,
    wake: Arc<Condvar>,
    /// What happens to the connection's grants when the seat is dropped.
    at_close: AtClose,
    /// Whether the client says that it can adopt its grants. Here too, so that a claim need not
    /// look for its seat.
    can_adopt: AtomicBool,
    /// The cap that caused the latest refusal, until the caller takes it.
    pub cap_reached: Cell<Option<Cap>>,
}

/// What a client says that it can do. At first it can do nothing of this.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClientAbilities {
    /// It can adopt its grants over another connection.
    pub can_adopt: bool,
    /// It knows the reply that an operator has broken its grant.
    pub hears_breaks: bool,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitEnd {
    pub answer: Result<Answer, Refusal>,
    /// Whether the thread that freed the slot has sent the reply.
    pub is_sent: bool,
}

impl WaitEnd {
    /// A wait whose reply the connection's own thread must send.
    pub fn unsent(answer: Result<Answer, Refusal>) -> WaitEnd {
        let is_sent = false;
        WaitEnd { answer, is_sent }
    }
}

impl Arbiter {
    /// Gives a connection its seat. The number `conn` must never have been used before. If there is
    /// a `socket`, the threads of other connections may send grants through it.
    pub fn connect(self: &Arc<Self>, conn: ConnId, socket: Option<Arc<dyn ClientSocket>>) -> Seat {
        let seat = SeatState::new(socket);
        let wake = Arc::clone(&seat.wake);
        self.state.lock().seats.insert(conn, seat);
        Seat {
            arbiter: Arc::clone(self),
            conn,
            waiter: conn,
            wake,
            at_close: AtClose::Orphan,
            can_adopt: AtomicBool::new(false),
            cap_reached: Cell::default(),
        }
    }
}

impl SeatState {
    fn new(socket: Option<Arc<dyn ClientSocket>>) -> SeatState {
        SeatState {
            wake: Arc::default(),
            socket,
            peer: OnceCell::new(),
            tag: None,
            client: ClientAbilities::default(),
            is_gone: false,
            wait: WaitState::NotWaiting,
            beside: Vec::new(),
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

    /// A further seat of this connection, which must be dropped first. Requests of the connection
    /// can wait at several seats at once, each until its own peer hangs up. That peer is known to
    /// the arbiter as `waiter`, a number that must never have been used before.
    pub fn beside(&self, waiter: ConnId, socket: Arc<dyn ClientSocket>) -> Seat {
        let seat = SeatState::new(Some(socket));
        let wake = Arc::clone(&seat.wake);
        let mut state = self.arbiter.state.lock();
        let entry = (waiter, Arc::clone(&wake));
        self.state_in(&mut state).beside.push(entry);
        state.seats.insert(waiter, seat);
        drop(state);
        Seat {
            arbiter: Arc::clone(&self.arbiter),
            conn: self.conn,
            waiter,
            wake,
            at_close: self.at_close,
            can_adopt: AtomicBool::new(false),
            cap_reached: Cell::default(),
        }
    }

    /// Claims a key, but never queues. The answer is [`Answer::WouldWait`] if the claim would have
    /// to wait. Does not block, except perhaps for the kernel's random numbers.
    pub fn try_acquire(&self, ask: &Ask<'_>) -> Result<Answer, Refusal> {
        self.claim(ask, |table, claimant, ask, now| {
            let answer = table.try_acquire(claimant, ask, now);
            if answer == Ok(Answer::WouldWait) {
                table.note_busy(self.conn, ask.key);
            }
            answer
        })
    }

    /// Claims a key. If the claim is queued, the caller must pass the ticket to [`Seat::wait`],
    /// unless the connection ends. Does not block, except perhaps for the kernel's random numbers.
    pub fn acquire(&self, ask: &Ask<'_>) -> Result<Answer, Refusal> {
        self.claim(ask, LockTable::acquire)
    }

    /// Claims a key, and keeps the grant or the place in the queue for [`Seat::collect`]. Does not
    /// block, except perhaps for the kernel's random numbers.
    pub fn enqueue(&self, ask: &Ask<'_>) -> Result<Answer, Refusal> {
        self.claim(ask, LockTable::enqueue)
    }

    /// Takes the grant of a key that the connection has enqueued for, or the ticket of the claim if
    /// it still waits: see [`Seat::acquire`].
    pub fn collect(&self, key: &str, kind: Kind) -> Result<Answer, Refusal> {
        let (mut visit, now) = self.arbiter.visit(Scope::Key(key));
        let answer = visit.table.collect_enqueued(self.conn, key, kind, now);
        visit.table.counted(answer)
    }

    /// Blocks until a queued claim for `key` is granted or refused, the peer hangs up, or
    /// `wait_timeout` is over. After a hang-up or a timeout, the claim has lost its place. With a
    /// timeout of zero, the claim does not wait, so a hang-up does not change the answer.
    ///
    /// The thread that frees the slot may send the grant, so all earlier replies must have been
    /// sent. Calls `on_long`, without the mutex, once the wait has lasted for a second.
    pub fn wait(
        &self,
        key: &str,
        ticket: Ticket,
        wait_timeout: Duration,
        on_long: &mut dyn FnMut(),
    ) -> WaitEnd {
        let mut state = self.arbiter.state.lock();
        let mut waited = if wait_timeout.is_zero() {
            let now = self.arbiter.expire_due(&mut state, Scope::Key(key));
            WaitEnd::unsent(give_up(&mut state, ticket, Answer::TimedOut, now))
        } else {
            self.wait_until_decided(&mut state, key, ticket, wait_timeout, on_long)
        };
        // From here on, no other thread may send the grant: asking the socket releases the mutex.
        self.state_in(&mut state).wait = WaitState::NotWaiting;
        if let (false, Ok(Answer::Granted(grant))) = (waited.is_sent, waited.answer) {
            // The peer may have hung up shortly before the grant. Then the slot passes to the next
            // waiter, as if the hang-up had been noticed in time.
            if self.has_hung_up(&mut state) {
                let now = self.arbiter.expire_due(&mut state, Scope::Nothing);
                state.table.abandon_grant(grant.token.fence, now);
                waited.answer = Ok(Answer::Gone);
            }
        }
        waited.answer = state.table.counted(waited.answer);
        self.arbiter.unlock_and_wake(state);
        waited
    }

    /// Releases a grant of any connection. `status` is the exit status of the work under it, if the
    /// client tells it. Refuses with [`Refusal::NotHeld`] unless the token belongs to a live
    /// holder.
    pub fn release(
        &self,
        key: &str,
        kind: Kind,
        token: Token,
        status: Option<u8>,
    ) -> Result<Answer, Refusal> {
        let (mut visit, now) = self.arbiter.visit(Scope::Key(key));
        let released = visit
            .table
            .release(self.conn, key, kind, token, status, now);
        visit.table.counted(released)
    }

    /// Restarts the lease of a grant of any connection. Refuses with [`Refusal::NotHeld`] if the
    /// token does not belong to a live holder, or if the lease would be too long.
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

    /// Restarts the lease of a grant, and moves the grant to this connection from any other. The
    /// client must then renew the grant once. If the connection closes before that, the grant
    /// becomes an orphan. If the peer has hung up, nothing changes and the answer is
    /// [`Answer::Gone`]. Refuses with [`Refusal::MaxLocks`] if the connection has reached
    /// its cap; [`Refusal::NotHeld`] if the token neither belongs to a live holder nor proves a
    /// grant of an earlier server, or if the lease would be too long. Costs a system call.
    pub fn adopt(&self, proof: &Proof<'_>, lease: Duration) -> Result<Answer, Refusal> {
        let has_hung_up = self.has_hung_up(&mut self.arbiter.state.lock());
        let (mut visit, now) = self.arbiter.visit(Scope::Everything);
        if has_hung_up || self.state_in(&mut visit).is_gone {
            return Ok(Answer::Gone);
        }
        let adopted = visit.table.adopt(self.conn, proof, lease, now);
        self.cap_reached.set(visit.table.take_cap_reached());
        let adopted = visit.table.counted(adopted);
        let given_way = visit.table.take_given_way();
        let losers: Vec<_> = given_way
            .into_iter()
            .filter(|conn| *conn != self.conn && visit.table.has_nothing(*conn))
            .filter_map(|conn| visit.seats.get(&conn)?.socket.clone())
            .collect();
        drop(visit);
        losers.iter().for_each(|socket| socket.shut_down());
        adopted
    }

    /// Restarts the lease of a grant, and makes the grant a kept one: it no longer belongs to a
    /// connection, and lives until the lease ends. `status` is the exit status of the work under
    /// it, if the work has ended. Refuses with [`Refusal::MaxLocks`] if there
    /// would be more kept grants than the cap allows; [`Refusal::NotHeld`] if the token does not
    /// belong to a live holder, or if the lease is too long for a kept grant.
    pub fn keep(
        &self,
        key: &str,
        token: Token,
        lease: Duration,
        status: Option<u8>,
    ) -> Result<Answer, Refusal> {
        let (mut visit, now) = self.arbiter.visit(Scope::Everything);
        let State { table, seats, .. } = &mut *visit;
        let tag_of = |conn| seats.get(&conn).and_then(|seat| seat.tag.clone());
        let kept = table.keep(key, token, lease, status, tag_of, now);
        self.cap_reached.set(table.take_cap_reached());
        table.counted(kept)
    }

    /// Ends a grant of this connection that the client was not told of. Does nothing if the grant
    /// has ended already.
    pub fn abandon_grant(&self, fence: Fence) {
        let (mut visit, now) = self.arbiter.visit(Scope::Nothing);
        visit.table.abandon_grant(fence, now);
    }

    /// Sets what the client says that it can do.
    pub fn set_abilities(&self, client: ClientAbilities) {
        self.can_adopt.store(client.can_adopt, Ordering::Relaxed);
        self.state_in(&mut self.arbiter.state.lock()).client = client;
    }

    /// Whether an operator has broken the grant with this fence, and the client can be told so.
    pub fn hears_of_break(&self, fence: Fence) -> bool {
        let mut state = self.arbiter.state.lock();
        self.state_in(&mut state).client.hears_breaks && state.broken.contains(&fence)
    }

    /// Disconnects. Of a client that has not given up its grants, they become orphans.
    pub fn leave(mut self, at_close: AtClose) {
        self.at_close = at_close;
    }

    /// Sets the tag that the client gives itself, or clears it if `tag` is empty. The caller limits
    /// the length.
    pub fn set_tag(&self, tag: &str) {
        let tag = (!tag.is_empty()).then(|| Arc::from(tag));
        let old = std::mem::replace(&mut self.state_in(&mut self.arbiter.state.lock()).tag, tag);
        drop(old);
    }

    /// When the connection last had a grant or a place in a queue: now, if it still has one; `None`
    /// if it never had one.
    pub fn idle_since(&self) -> Option<Instant> {
        let (visit, now) = self.arbiter.visit(Scope::Nothing);
        visit.table.connection_idle_since(self.conn, now)
    }

    /// Has the table decide on a claim.
    fn claim(
        &self,
        ask: &Ask<'_>,
        claim: impl FnOnce(&mut LockTable, Claimant, &Ask<'_>, Instant) -> Result<Answer, Refusal>,
    ) -> Result<Answer, Refusal> {
        let claimant = self.claimant();
        let (mut visit, now) = self.arbiter.visit(Scope::Ask(self.conn, ask));
        let answer = claimant.and_then(|claimant| claim(&mut visit.table, claimant, ask, now));
        self.cap_reached.set(visit.table.take_cap_reached());
        visit.table.counted(answer)
    }

    fn claimant(&self) -> Result<Claimant, Refusal> {
        if !self.arbiter.has_room() {
            return Err(Refusal::MaxLocks);
        }
        let salt = self.arbiter.salts.next().ok_or(Refusal::NoToken)?;
        Ok(Claimant {
            conn: self.conn,
            salt,
            can_adopt: self.can_adopt.load(Ordering::Relaxed),
        })
    }

    /// Blocks until a queued claim is [`WaitState::Decided`], which spends the ticket.
    fn wait_until_decided(
        &self,
        state: &mut MutexGuard<'_, State>,
        key: &str,
        ticket: Ticket,
        wait_timeout: Duration,
        on_long: &mut dyn FnMut(),
    ) -> WaitEnd {
        let arbiter = &self.arbiter;
        let mut now = arbiter.expire_due(state, Scope::Key(key));
        let deadline = now.checked_add(wait_timeout);
        let mut long_at = Some(now + LONG_WAIT);
        self.state_in(state).wait = WaitState::Queued(ticket);
        loop {
            match self.state_in(state).wait {
                WaitState::Queued(ticket) => {
                    if let Some(answer) = self.decide(state, ticket, deadline, now) {
                        return WaitEnd::unsent(answer);
                    }
                    // This look at the table may have ended a lease, so other threads may have to
                    // be woken.
                    let is_long = long_at.take_if(|at| *at <= now).is_some();
                    if is_long {
                        MutexGuard::unlocked(state, &mut *on_long);
                    } else if !arbiter.wake_before_sleep(state) {
                        let look_again = earlier(deadline, long_at);
                        arbiter.clock.wait(&self.wake, state, look_again);
                    }
                }
                WaitState::BeingSent => arbiter.clock.wait(&self.wake, state, None),
                WaitState::Decided(waited) => return waited,
                WaitState::NotWaiting => unreachable!("only this thread ends the wait"),
            }
            now = arbiter.expire_due(state, Scope::Key(key));
        }
    }

    /// The answer to a queued claim, if there is one now. An answer spends the ticket.
    fn decide(
        &self,
        state: &mut State,
        ticket: Ticket,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Option<Result<Answer, Refusal>> {
        // A peer that has hung up is granted nothing. If the grant and the hang-up coincide, the
        // hang-up wins and the slot passes to the next waiter, because the peer would not release
        // it.
        if self.state_in(state).is_gone {
            return Some(give_up(state, ticket, Answer::Gone, now));
        }
        // A release may have granted the key between the previous look and the deadline. The grant
        // wins: answering `timeout` now would strand the slot until its lease runs out.
        match state.table.collect(ticket, now) {
            Ok(Answer::WouldWait) if deadline.is_none_or(|deadline| now < deadline) => None,
            Ok(Answer::WouldWait) => Some(give_up(state, ticket, Answer::TimedOut, now)),
            answer => Some(answer),
        }
    }

    /// Asks the socket whether the peer has hung up, with the mutex released.
    fn has_hung_up(&self, state: &mut MutexGuard<'_, State>) -> bool {
        let socket = self.state_in(state).socket.clone();
        MutexGuard::unlocked(state, || socket.is_some_and(|socket| socket.has_hung_up()))
    }

    fn state_in<'a>(&self, state: &'a mut State) -> &'a mut SeatState {
        let seat = state.seats.get_mut(&self.waiter);
        seat.expect("a seat is known until it is dropped")
    }
}

/// Gives up a place, and returns `answer` unless the drain has dismissed the claim.
fn give_up(
    state: &mut State,
    ticket: Ticket,
    answer: Answer,
    now: Instant,
) -> Result<Answer, Refusal> {
    state.table.cancel(ticket, now).map(|()| answer)
}

impl Drop for Seat {
    fn drop(&mut self) {
        let arbiter = &self.arbiter;
        let mut state = arbiter.state.lock();
        if self.waiter != self.conn {
            let seat = state.seats.remove(&self.waiter);
            if let Some(main) = state.seats.get_mut(&self.conn) {
                main.beside.retain(|(waiter, _)| *waiter != self.waiter);
            }
            // The socket may be closed with it, which should not hold up others.
            drop(state);
            drop(seat);
            return;
        }
        let tag = self.state_in(&mut state).tag.clone();
        state.table.disconnect(self.conn, self.at_close, tag);
        drop(state);
        arbiter.visit_in_steps(Scope::Nothing, |state, now| {
            let is_done = state.table.release_some(self.conn, STEP, now);
            if is_done {
                // The events must be reported while this client's seat still exists, because they
                // name the client.
                state.tell_events();
                state.seats.remove(&self.conn);
            }
            is_done
        });
    }
}
