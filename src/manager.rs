//! The one door to the table: one mutex, and the wake-ups of whoever waits.
//!
//! Truth is in the table, wake-ups are hints: whoever wakes looks again. Every visit takes the
//! mutex, reads the clock, acts on the table, and on leaving wakes the connections whose waits have
//! ended (after the mutex is released) and the reaper if a lease now ends before it would look.
//!
//! One mutex, no shards and no lock order: a grant and its release take well under a microsecond
//! together, a tenth of what the system calls around them cost (`examples/bench.rs`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, Receiver, Sender};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::fence::source::Salts;
use crate::table::{
    Ask, Caps, Claim, ConnId, Grant, Holdings, Key, KeySnapshot, Kind, Limit, LockTable, Progress,
    Refusal, Scope, Ticket,
};
use crate::token::{FenceSource, Token};

/// How many leases are ended, or slots of a closed connection released, before other threads get
/// their turn: about a tenth of a millisecond.
const RELEASED_AT_ONCE: usize = 500;

/// A wait that lasts for so long is worth a system call or two more.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// What a manager is told once, at its start.
pub struct Rules {
    /// The most that the table takes on.
    pub caps: Caps,
    /// What becomes of a connection's slots when it closes.
    pub holdings: Holdings,
    /// How often idle keys are looked at.
    pub gc_interval: Duration,
    /// For how long a key may be idle before it is dropped.
    pub gc_max_idle: Duration,
}

/// The table, shared by all connections and the reaper.
pub struct Manager {
    state: Mutex<State>,
    reaper: Condvar,
    /// Beside the mutex, so that the kernel's randomness never holds the table up.
    salts: Salts,
    holdings: Holdings,
    gc_interval: Duration,
    gc_max_idle: Duration,
}

struct State {
    table: LockTable,
    seats: HashMap<ConnId, Seat>,
    /// When the reaper looks next if nobody wakes it; `None` while it sleeps for good.
    reaper_looks_at: Option<Instant>,
    /// Idle keys are not looked at before.
    next_gc: Instant,
    /// Dropped when the drain is over.
    drained: Option<Sender<()>>,
}

/// Where a connection waits.
struct Seat {
    wake: Arc<Condvar>,
    is_gone: bool,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The claim's turn came.
    Granted(Grant),
    /// The claim will never be granted.
    Refused(Refusal),
    /// The time was over first; the place is given up.
    TimedOut,
    /// The peer hung up first; the place is given up.
    Gone,
}

impl Manager {
    /// A manager with an empty table. Leases end promptly only while [`Manager::reap`] runs.
    pub fn new(rules: &Rules, fences: Box<dyn FenceSource>, salts: Salts) -> Self {
        Manager {
            state: Mutex::new(State {
                table: LockTable::new(rules.caps, fences),
                seats: HashMap::new(),
                reaper_looks_at: None,
                next_gc: Instant::now(),
                drained: None,
            }),
            reaper: Condvar::new(),
            salts,
            holdings: rules.holdings,
            gc_interval: rules.gc_interval,
            gc_max_idle: rules.gc_max_idle,
        }
    }

    /// Lets a connection in. Its number must never have been used before.
    pub fn connect(self: &Arc<Self>, conn: ConnId) -> Connection {
        let wake = Arc::new(Condvar::new());
        let seat = Seat {
            wake: Arc::clone(&wake),
            is_gone: false,
        };
        self.state.lock().seats.insert(conn, seat);
        Connection {
            manager: Arc::clone(self),
            conn,
            wake,
        }
    }

    /// Takes note that the peer of `conn` has hung up: its wait ends, now or when it begins. What
    /// it holds, it keeps until it is dropped. A connection that is no more is ignored.
    pub fn hang_up(&self, conn: ConnId) {
        let mut state = self.state.lock();
        let Some(seat) = state.seats.get_mut(&conn) else {
            return;
        };
        seat.is_gone = true;
        let wake = Arc::clone(&seat.wake);
        drop(state);
        wake.notify_one();
    }

    /// Ends leases at the instant they run out, and drops keys that are idle for too long. Never
    /// returns: it is the reaper thread's body. Correctness does not depend on it, promptness does.
    pub fn reap(&self) -> ! {
        let mut state = self.state.lock();
        loop {
            let now = self.catch_up(&mut state, Scope::Everything);
            if state.next_gc <= now {
                state.table.prune(self.gc_max_idle, now);
                state.next_gc = now + self.gc_interval;
            }
            if self.pass_on(&mut state) {
                continue;
            }
            state.reaper_looks_at = self.next_look(&state);
            match state.reaper_looks_at {
                Some(at) => {
                    self.reaper.wait_until(&mut state, at);
                }
                None => self.reaper.wait(&mut state),
            }
        }
    }

    /// Refuses new claims from now on and dismisses whoever waits. The receiver's channel closes
    /// as soon as nobody holds anything.
    pub fn begin_drain(&self) -> Receiver<()> {
        let (sender, receiver) = bounded(0);
        let mut state = self.state.lock();
        let now = self.catch_up(&mut state, Scope::Everything);
        state.drained = Some(sender);
        state.table.begin_drain(now);
        self.leave(state);
        receiver
    }

    /// Whether the drain has begun.
    pub fn is_draining(&self) -> bool {
        self.visit(Scope::Nothing, |table, _| table.is_draining())
    }

    /// What an operator may see of up to `at_most` keys, sorted: of those behind `after`, or of the
    /// first ones.
    pub fn snapshot(&self, after: Option<&Key>, at_most: usize) -> Vec<KeySnapshot> {
        self.visit(Scope::Everything, |table, now| {
            table.snapshot(after, at_most, now)
        })
    }

    /// Grants what waiters are owed since there were no tokens.
    pub fn tokens_are_back(&self) {
        self.visit(Scope::Nothing, |table, now| table.tokens_are_back(now));
    }

    /// Whether any key is held.
    pub fn has_holders(&self) -> bool {
        self.visit(Scope::Everything, |table, now| {
            table.last_held(now) == Some(now)
        })
    }

    /// When a key was last held: now, if one is; `None` if none ever was.
    pub fn last_held(&self) -> Option<Instant> {
        self.visit(Scope::Everything, |table, now| table.last_held(now))
    }

    fn visit<T>(&self, scope: Scope<'_>, act: impl FnOnce(&mut LockTable, Instant) -> T) -> T {
        let mut state = self.state.lock();
        let now = self.catch_up(&mut state, scope);
        let result = act(&mut state.table, now);
        self.leave(state);
        result
    }

    /// Ends the leases that have run out and matter within `scope`, and gives the time of that. A
    /// million leases may run out in one instant, so other threads get their turn between the steps.
    fn catch_up(&self, state: &mut MutexGuard<'_, State>, scope: Scope<'_>) -> Instant {
        loop {
            // Read under the mutex, so that the table never sees time go back.
            let now = Instant::now();
            state.table.expire_some(RELEASED_AT_ONCE, now);
            if !state.table.is_behind(scope, now) {
                return now;
            }
            if !self.pass_on(state) {
                MutexGuard::bump(state);
            }
        }
    }

    /// Releases the mutex, then passes on what this visit has caused.
    fn leave(&self, mut state: MutexGuard<'_, State>) {
        let aftermath = self.aftermath(&mut state);
        drop(state);
        self.carry_out(aftermath);
    }

    /// Passes on what has happened before going to sleep; `true` if the mutex was released for
    /// that, so that the table must be looked at once more.
    fn pass_on(&self, state: &mut MutexGuard<'_, State>) -> bool {
        let aftermath = self.aftermath(state);
        if aftermath.is_empty() {
            return false;
        }
        MutexGuard::unlocked(state, || self.carry_out(aftermath));
        true
    }

    fn aftermath(&self, state: &mut State) -> Aftermath {
        if state.drained.is_some() && !state.table.has_holders() {
            state.drained = None;
        }
        let mut aftermath = Aftermath::default();
        for conn in state.table.take_resolved() {
            if let Some(seat) = state.seats.get(&conn) {
                aftermath.add(&seat.wake);
            }
        }
        let next_look = self.next_look(state);
        if is_sooner(next_look, state.reaper_looks_at) {
            state.reaper_looks_at = next_look;
            aftermath.wake_reaper = true;
        }
        aftermath
    }

    fn carry_out(&self, aftermath: Aftermath) {
        for wake in aftermath.first.into_iter().chain(aftermath.rest) {
            wake.notify_one();
        }
        if aftermath.wake_reaper {
            self.reaper.notify_one();
        }
    }

    /// When the reaper should look: at the end of the next lease, or when an idle key is due.
    fn next_look(&self, state: &State) -> Option<Instant> {
        let gc = state
            .table
            .idle_since()
            .and_then(|since| since.checked_add(self.gc_max_idle))
            .map(|due| due.max(state.next_gc));
        match (state.table.next_deadline(), gc) {
            (Some(lease), Some(gc)) => Some(lease.min(gc)),
            (lease, gc) => lease.or(gc),
        }
    }
}

fn is_sooner(next: Option<Instant>, planned: Option<Instant>) -> bool {
    match (next, planned) {
        (Some(next), Some(planned)) => next < planned,
        (Some(_), None) => true,
        (None, _) => false,
    }
}

/// Whom to wake: mostly nobody or one connection, and then without an allocation.
#[derive(Default)]
struct Aftermath {
    first: Option<Arc<Condvar>>,
    rest: Vec<Arc<Condvar>>,
    wake_reaper: bool,
}

impl Aftermath {
    fn add(&mut self, wake: &Arc<Condvar>) {
        if self.first.is_none() {
            self.first = Some(Arc::clone(wake));
        } else {
            self.rest.push(Arc::clone(wake));
        }
    }

    fn is_empty(&self) -> bool {
        self.first.is_none() && !self.wake_reaper
    }
}

/// One connection's way through the door. Dropping it disconnects: its places go, and its slots do
/// what the rules say.
pub struct Connection {
    manager: Arc<Manager>,
    conn: ConnId,
    wake: Arc<Condvar>,
}

impl Connection {
    /// The connection's number.
    pub fn id(&self) -> ConnId {
        self.conn
    }

    /// The manager behind the door.
    pub fn manager(&self) -> &Manager {
        &self.manager
    }

    /// Asks for a key. Does not wait for it, though it may wait for the kernel's randomness.
    ///
    /// # Errors
    ///
    /// As [`LockTable::enqueue`].
    pub fn enqueue(
        &self,
        key: &str,
        kind: Kind,
        limit: Limit,
        lease: Duration,
    ) -> Result<Claim, Refusal> {
        let ask = self.ask(key, kind, limit, lease)?;
        self.manager
            .visit(Scope::Ask(&ask), |table, now| table.enqueue(&ask, now))
    }

    /// Asks for a key without ever taking a place in its queue: `None` if somebody else is first.
    /// Does not wait, but perhaps for the kernel's randomness.
    ///
    /// # Errors
    ///
    /// As [`LockTable::enqueue`].
    pub fn try_acquire(
        &self,
        key: &str,
        kind: Kind,
        limit: Limit,
        lease: Duration,
    ) -> Result<Option<Grant>, Refusal> {
        let ask = self.ask(key, kind, limit, lease)?;
        self.manager
            .visit(Scope::Ask(&ask), |table, now| table.try_acquire(&ask, now))
    }

    fn ask<'a>(
        &self,
        key: &'a str,
        kind: Kind,
        limit: Limit,
        lease: Duration,
    ) -> Result<Ask<'a>, Refusal> {
        Ok(Ask {
            conn: self.conn,
            key,
            kind,
            limit,
            lease,
            salt: self.manager.salts.next().ok_or(Refusal::NoToken)?,
        })
    }

    /// Looks how a queued claim stands. Does not block. Any answer but `Waiting` spends the ticket.
    pub fn collect(&self, ticket: Ticket) -> Progress {
        self.manager.visit(Scope::Ticket(ticket), |table, now| {
            table.collect(ticket, now)
        })
    }

    /// Blocks until the claim is granted or refused, the peer hangs up, or `wait_timeout` is over.
    /// Spends the ticket in any case.
    pub fn wait(&self, ticket: Ticket, wait_timeout: Duration) -> Outcome {
        self.wait_and_tell(ticket, wait_timeout, || {})
    }

    /// As [`Connection::wait`]. A wait that lasts for a second calls `when_long` once, without the
    /// mutex.
    pub fn wait_and_tell(
        &self,
        ticket: Ticket,
        wait_timeout: Duration,
        when_long: impl FnOnce(),
    ) -> Outcome {
        let mut state = self.manager.state.lock();
        let began = Instant::now();
        let deadline = began.checked_add(wait_timeout);
        let mut when_long = Some(when_long);
        let is_a_try = wait_timeout.is_zero();
        let outcome = loop {
            let now = self.manager.catch_up(&mut state, Scope::Ticket(ticket));
            // A peer that has hung up gets nothing any more. If its grant arrives at the same time,
            // the hang-up wins and the slot passes to the next waiter: nobody would release it.
            // A try does not wait, so it is answered all the same.
            if state.seats[&self.conn].is_gone && !is_a_try {
                let refusal = state.table.cancel(ticket, now);
                break refusal.map_or(Outcome::Gone, Outcome::Refused);
            }
            // A release may have granted us the key between the last look and the deadline. The
            // grant wins: answering `timeout` now would strand the slot until its lease runs out.
            match state.table.collect(ticket, now) {
                Progress::Granted(grant) => break Outcome::Granted(grant),
                Progress::Refused(refusal) => break Outcome::Refused(refusal),
                Progress::Waiting => {}
            }
            if deadline.is_some_and(|deadline| deadline <= now) {
                state.table.cancel(ticket, now);
                break Outcome::TimedOut;
            }
            // Looking may have ended somebody else's lease.
            if self.manager.pass_on(&mut state) {
                continue;
            }
            let long_at = began + LONG_WAIT;
            if let Some(when_long) = when_long.take_if(|_| long_at <= now) {
                MutexGuard::unlocked(&mut state, when_long);
                continue;
            }
            let look_again = match (deadline, when_long.is_some()) {
                (Some(deadline), true) => Some(deadline.min(long_at)),
                (None, true) => Some(long_at),
                (deadline, false) => deadline,
            };
            match look_again {
                Some(at) => {
                    self.wake.wait_until(&mut state, at);
                }
                None => self.wake.wait(&mut state),
            }
        };
        self.manager.leave(state);
        outcome
    }

    /// Gives up a place in a queue. A grant that has come meanwhile passes to the next waiter.
    pub fn cancel(&self, ticket: Ticket) {
        self.manager.visit(Scope::Ticket(ticket), |table, now| {
            table.cancel(ticket, now)
        });
    }

    /// Gives back a slot, whichever connection it was granted to.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotHeld`] if the token is not that of a live holder.
    pub fn release(&self, key: &str, kind: Kind, token: Token) -> Result<(), Refusal> {
        self.manager.visit(Scope::Key(key), |table, now| {
            table.release(key, kind, token, now)
        })
    }

    /// Starts a lease anew, whichever connection it was granted to.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotHeld`] if the token is not that of a live holder.
    pub fn renew(
        &self,
        key: &str,
        kind: Kind,
        token: Token,
        lease: Duration,
    ) -> Result<(), Refusal> {
        self.manager.visit(Scope::Key(key), |table, now| {
            table.renew(key, kind, token, lease, now)
        })
    }

    /// Whether the token is that of a live holder.
    pub fn is_held(&self, key: &str, kind: Kind, token: Token) -> bool {
        self.manager.visit(Scope::Key(key), |table, now| {
            table.is_held(key, kind, token, now)
        })
    }

    /// Whether the ticket's grant came, and died before it was collected.
    pub fn has_lapsed(&self, ticket: Ticket) -> bool {
        self.manager.visit(Scope::Ticket(ticket), |table, now| {
            table.has_lapsed(ticket, now)
        })
    }

    /// Whether it is the ticket's turn, and only a token is wanting.
    pub fn is_owed(&self, ticket: Ticket) -> bool {
        self.manager.visit(Scope::Ticket(ticket), |table, now| {
            table.is_owed(ticket, now)
        })
    }

    /// When this connection last held or waited for anything: now, if it does; `None` if it never did.
    pub fn last_busy(&self) -> Option<Instant> {
        self.manager
            .visit(Scope::Nothing, |table, now| table.last_busy(self.conn, now))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let manager = &self.manager;
        let mut state = manager.state.lock();
        state.seats.remove(&self.conn);
        let table = &mut state.table;
        table.disconnect(self.conn, manager.holdings, Instant::now());
        manager.leave(state);
        // Others get their turn between the steps.
        let release =
            |table: &mut LockTable, now| table.release_some(self.conn, RELEASED_AT_ONCE, now);
        while !manager.visit(Scope::Nothing, release) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fence::source::ClockFences;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    const FOREVER: Duration = Duration::from_secs(60);

    fn manager(holdings: Holdings) -> Arc<Manager> {
        let rules = Rules {
            caps: Caps {
                max_locks: 1024,
                max_slots: 1 << 20,
                max_per_connection: 1 << 20,
                max_waiters: None,
                max_waiters_total: 65_536,
            },
            holdings,
            gc_interval: Duration::from_secs(1),
            gc_max_idle: Duration::ZERO,
        };
        let manager = Arc::new(Manager::new(
            &rules,
            Box::new(ClockFences::starting_at(1)),
            Salts::new().expect("the kernel has randomness"),
        ));
        let reaper = Arc::clone(&manager);
        thread::spawn(move || reaper.reap());
        manager
    }

    fn lock(connection: &Connection, lease: Duration) -> Claim {
        connection
            .enqueue("k", Kind::Lock, Limit::ONE, lease)
            .expect("no cap is reached")
    }

    fn granted(connection: &Connection, lease: Duration) -> Grant {
        match lock(connection, lease) {
            Claim::Acquired(grant) => grant,
            Claim::Queued(_) => panic!("the lock should be free"),
        }
    }

    fn queued(connection: &Connection) -> Ticket {
        match lock(connection, FOREVER) {
            Claim::Queued(ticket) => ticket,
            Claim::Acquired(_) => panic!("the lock should be held"),
        }
    }

    #[test]
    fn a_release_wakes_the_waiter() {
        let manager = manager(Holdings::Release);
        let (holder, waiter) = (manager.connect(ConnId(1)), manager.connect(ConnId(2)));
        let grant = granted(&holder, FOREVER);
        let ticket = queued(&waiter);
        let waiting = thread::spawn(move || waiter.wait(ticket, FOREVER));
        assert_eq!(holder.release("k", Kind::Lock, grant.token), Ok(()));
        assert!(matches!(
            waiting.join().expect("no panic"),
            Outcome::Granted(_)
        ));
    }

    #[test]
    fn the_reaper_passes_an_expired_lease_on_in_time() {
        let manager = manager(Holdings::Release);
        let (holder, waiter) = (manager.connect(ConnId(1)), manager.connect(ConnId(2)));
        let lease = Duration::from_millis(100);
        let granted_at = Instant::now();
        granted(&holder, lease);
        let ticket = queued(&waiter);
        assert!(matches!(waiter.wait(ticket, FOREVER), Outcome::Granted(_)));
        assert!(granted_at.elapsed() >= lease);
        assert!(granted_at.elapsed() < FOREVER / 2);
    }

    #[test]
    fn leases_that_end_together_end_in_steps() {
        const SLOTS: usize = 50_000;
        let manager = manager(Holdings::Release);
        let limit = Limit::new(1 << 20).expect("above zero");
        let all_end_at = Instant::now() + Duration::from_secs(3);
        let holder = manager.connect(ConnId(1));
        for _ in 0..SLOTS {
            let lease = all_end_at.saturating_duration_since(Instant::now());
            let claim = holder.enqueue("k", Kind::Semaphore, limit, lease);
            assert!(matches!(claim, Ok(Claim::Acquired(_))), "{claim:?}");
        }
        let mut state = manager.state.lock();
        assert!(Instant::now() < all_end_at, "the slots took too long");
        let (asking, asked) = bounded(0);
        let other = Arc::clone(&manager);
        let witness = thread::spawn(move || {
            asking.send(()).expect("it is received");
            let state = other.state.lock();
            state.table.is_behind(Scope::Everything, Instant::now())
        });
        asked.recv().expect("it is sent");
        thread::sleep(all_end_at.saturating_duration_since(Instant::now()));
        thread::sleep(Duration::from_millis(200)); // by now the witness sleeps at the mutex
        manager.catch_up(&mut state, Scope::Everything);
        drop(state);
        let got_in_between = witness.join().expect("no panic");
        assert!(got_in_between, "the table was closed until all had ended");
    }

    #[test]
    fn a_wait_without_a_grant_times_out_and_gives_up_its_place() {
        let manager = manager(Holdings::Release);
        let (holder, waiter) = (manager.connect(ConnId(1)), manager.connect(ConnId(2)));
        let grant = granted(&holder, FOREVER);
        let ticket = queued(&waiter);
        assert_eq!(
            waiter.wait(ticket, Duration::from_millis(10)),
            Outcome::TimedOut
        );
        assert_eq!(holder.release("k", Kind::Lock, grant.token), Ok(()));
        granted(&holder, FOREVER);
    }

    #[test]
    fn a_grant_that_is_there_beats_a_time_that_is_over() {
        let manager = manager(Holdings::Release);
        let (holder, waiter) = (manager.connect(ConnId(1)), manager.connect(ConnId(2)));
        let grant = granted(&holder, FOREVER);
        let ticket = queued(&waiter);
        assert_eq!(holder.release("k", Kind::Lock, grant.token), Ok(()));
        assert!(matches!(
            waiter.wait(ticket, Duration::ZERO),
            Outcome::Granted(_)
        ));
    }

    #[test]
    fn a_hang_up_dismisses_a_wait_before_and_while_it_lasts_but_not_a_try() {
        let manager = manager(Holdings::Release);
        let (holder, waiter) = (manager.connect(ConnId(1)), manager.connect(ConnId(2)));
        granted(&holder, FOREVER);
        let ticket = queued(&waiter);
        let hanging_up = Arc::clone(&manager);
        let hang_up = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            hanging_up.hang_up(ConnId(2));
        });
        assert_eq!(waiter.wait(ticket, FOREVER), Outcome::Gone);
        hang_up.join().expect("no panic");
        let ticket = queued(&waiter);
        assert_eq!(waiter.wait(ticket, FOREVER), Outcome::Gone);
        let ticket = queued(&waiter);
        assert_eq!(waiter.wait(ticket, Duration::ZERO), Outcome::TimedOut);
        manager.hang_up(ConnId(77)); // never heard of
    }

    #[test]
    fn a_waiter_dismissed_by_the_drain_is_told_so_even_if_it_hangs_up() {
        let manager = manager(Holdings::Release);
        let (holder, waiter) = (manager.connect(ConnId(1)), manager.connect(ConnId(2)));
        granted(&holder, FOREVER);
        let ticket = queued(&waiter);
        manager.begin_drain();
        manager.hang_up(ConnId(2));
        assert_eq!(
            waiter.wait(ticket, FOREVER),
            Outcome::Refused(Refusal::Draining)
        );
    }

    #[test]
    fn a_grant_that_meets_a_hang_up_passes_on_even_if_slots_are_kept() {
        let manager = manager(Holdings::Keep);
        let (holder, waiter) = (manager.connect(ConnId(1)), manager.connect(ConnId(2)));
        let grant = granted(&holder, FOREVER);
        let ticket = queued(&waiter);
        manager.hang_up(ConnId(2));
        assert_eq!(holder.release("k", Kind::Lock, grant.token), Ok(()));
        assert_eq!(waiter.wait(ticket, FOREVER), Outcome::Gone);
        granted(&holder, FOREVER);
    }

    #[test]
    fn a_drain_ends_when_the_last_holder_is_done() {
        let manager = manager(Holdings::Release);
        let (holder, waiter) = (manager.connect(ConnId(1)), manager.connect(ConnId(2)));
        let grant = granted(&holder, FOREVER);
        let ticket = queued(&waiter);
        let drained = manager.begin_drain();
        assert_eq!(
            waiter.wait(ticket, FOREVER),
            Outcome::Refused(Refusal::Draining)
        );
        assert!(drained.try_recv().is_err_and(|error| error.is_empty()));
        assert_eq!(holder.release("k", Kind::Lock, grant.token), Ok(()));
        assert!(drained
            .recv_timeout(FOREVER)
            .is_err_and(|error| error.is_disconnected()));
    }

    #[test]
    fn a_drain_with_nothing_held_ends_at_once_and_one_ends_with_the_last_lease() {
        let manager = manager(Holdings::Release);
        assert!(manager
            .begin_drain()
            .recv_timeout(FOREVER)
            .is_err_and(|error| error.is_disconnected()));

        let manager = self::manager(Holdings::Release);
        let holder = manager.connect(ConnId(1));
        granted(&holder, Duration::from_millis(50));
        let drained = manager.begin_drain();
        assert!(drained
            .recv_timeout(FOREVER)
            .is_err_and(|error| error.is_disconnected()));
    }

    #[test]
    fn idle_keys_go_by_themselves() {
        let manager = manager(Holdings::Release);
        let holder = manager.connect(ConnId(1));
        let grant = granted(&holder, FOREVER);
        assert_eq!(holder.release("k", Kind::Lock, grant.token), Ok(()));
        let deadline = Instant::now() + FOREVER;
        while !manager.snapshot(None, 1).is_empty() {
            assert!(Instant::now() < deadline, "the idle key is still there");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Timeouts tuned to meet grants: whatever wins, nobody overlaps, no slot is lost, nobody hangs.
    #[test]
    fn no_grant_is_lost_between_timeouts_hang_ups_and_releases() {
        const THREADS: u64 = 6;
        let manager = manager(Holdings::Release);
        let inside = Arc::new(AtomicUsize::new(0));
        let stop_at = Instant::now() + Duration::from_secs(2);
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (manager, inside) = (Arc::clone(&manager), Arc::clone(&inside));
                thread::spawn(move || {
                    let mut grants = 0u64;
                    let mut conn = 1 + thread;
                    let mut connection = manager.connect(ConnId(conn));
                    for round in 0u64.. {
                        if Instant::now() >= stop_at {
                            break;
                        }
                        let grant = match lock(&connection, FOREVER) {
                            Claim::Acquired(grant) => Some(grant),
                            Claim::Queued(ticket) => {
                                if round % 7 == 0 {
                                    manager.hang_up(ConnId(conn));
                                }
                                let patience = Duration::from_micros(round * 13 % 60);
                                match connection.wait(ticket, patience) {
                                    Outcome::Granted(grant) => Some(grant),
                                    Outcome::TimedOut | Outcome::Gone => None,
                                    Outcome::Refused(refusal) => panic!("{refusal:?}"),
                                }
                            }
                        };
                        if let Some(grant) = grant {
                            assert_eq!(
                                inside.fetch_add(1, Ordering::SeqCst),
                                0,
                                "two holders at once"
                            );
                            inside.fetch_sub(1, Ordering::SeqCst);
                            grants += 1;
                            assert_eq!(connection.release("k", Kind::Lock, grant.token), Ok(()));
                        }
                        if round % 7 == 0 {
                            drop(connection);
                            conn += THREADS;
                            connection = manager.connect(ConnId(conn));
                        }
                    }
                    grants
                })
            })
            .collect();
        let grants: u64 = threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .sum();
        assert!(grants > 1000, "only {grants} grants");
        let last = manager.connect(ConnId(1_000_000_000));
        granted(&last, FOREVER);
    }
}
