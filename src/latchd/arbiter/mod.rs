//! The only access to the table: a mutex, the clock, and the wake-ups of waiting threads.
//!
//! The table decides, and a wake-up is only a hint: a thread that wakes looks at the table again.
//! Every visit takes the mutex, reads the clock and acts on the table. After releasing the mutex,
//! the visit wakes the threads of connections whose waits have ended, and wakes the reaper if a
//! lease now ends before the reaper's next look.
//!
//! One mutex for all keys is enough: a grant and its release together take well under a
//! microsecond, a tenth of the cost of the system calls around them (`examples/bench/`).
//!
//! Lock order: `reserved`, then `state`, then the fence source's mutex.

#[cfg(not(test))]
mod clock;
#[cfg(test)]
#[path = "tests/virtual_clock.rs"]
mod clock;
mod events;
#[cfg(all(test, shuttle))]
#[path = "tests/interleavings/mod.rs"]
mod interleavings;
mod last_holders;
mod operators;
mod recorder;
mod seat;
mod sync;
#[cfg(all(test, not(shuttle)))]
mod tests;

use std::cell::OnceCell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use crate::latchd::fence::source::Salts;
use crate::latchd::table::{
    earlier, Answer, Caps, ConnId, HolderRecord, KeyHistory, KeySnapshot, Listing, LockTable,
    Scope, Ticket, STEP,
};
use crate::os::memory::{self, Purpose, Reservation};
use crate::wire::token::{Fence, FenceSource, Grant};
use clock::Clock;
pub use events::DescribedEvent;
use events::EventSink;
pub use last_holders::DrainUntil;
use last_holders::{AwaitedHolders, Then};
pub use operators::KeyStatus;
use recorder::may_others_send;
pub use recorder::{Certainty, Promised, Recorder, ReplyPromise};
pub use seat::{ClientAbilities, Seat, WaitEnd};
use sync::{AtomicUsize, Condvar, Mutex, MutexGuard};

/// The maximum number of grants that one visit sends for other connections. Beyond that, each
/// connection's own thread sends its grant. If visits sent no grants, a contended key would lose 6
/// to 11 % of its rate on one core, and a third on two cores.
const SENT_AT_ONCE: usize = 8;

/// The number of claims between two checks of free memory, and the maximum memory that a claim
/// takes in the table, in bytes.
const CLAIMS_AT_ONCE: usize = 256;
const CLAIM_LEN: usize = 512;

/// The bytes to reserve for each existing holder or waiter, because a map of them may grow.
const MAP_ENTRY_LEN: usize = 160;

#[derive(Clone, Copy)]
pub struct Rules {
    pub caps: Caps,
    /// The minimum time between two searches for idle keys.
    pub gc_interval: Duration,
    /// How long a key may be idle before it is dropped.
    pub gc_max_idle: Duration,
}

/// The table, shared by all connections and the reaper.
pub struct Arbiter {
    state: Mutex<State>,
    clock: Clock,
    reaper: Arc<Condvar>,
    /// Not in `state`, so that a wait for the kernel's random numbers delays no other connection.
    salts: Salts,
    /// Claims that may still be made before free memory is checked again.
    claims_left: AtomicUsize,
    reserved: Mutex<Option<Reservation>>,
    rules: Rules,
}

struct State {
    now: Instant,
    table: LockTable,
    seats: BTreeMap<ConnId, SeatState>,
    /// When the reaper wakes without a notification; `None` if only a notification wakes it.
    reaper_looks_at: Option<Instant>,
    next_gc: Instant,
    /// Set while the server waits for holders before it ends.
    awaited: Option<AwaitedHolders>,
    /// The journal or the state file, if there is one.
    recorder: Option<Box<dyn Recorder>>,
    /// The fences of the grants that operators have broken, the newest last.
    broken: VecDeque<Fence>,
    /// Receives the events of claims, for the log.
    event_sink: Option<EventSink>,
}

/// A sign of life that the reaper gives at regular intervals.
pub struct Heartbeat {
    interval: Duration,
    /// When the next one is due; `None` before the first one.
    due: Option<Instant>,
    beat: Box<dyn FnMut() + Send>,
}

impl Heartbeat {
    /// Calls `beat`, which must not block, at once and then at each interval.
    pub fn new(interval: Duration, beat: impl FnMut() + Send + 'static) -> Heartbeat {
        Heartbeat {
            interval,
            due: None,
            beat: Box::new(beat),
        }
    }
}

/// Access to the table while all requests are stopped.
pub struct Frozen<'a> {
    state: MutexGuard<'a, State>,
    now: Instant,
    max_keep_time: Duration,
}

impl Frozen<'_> {
    /// The next fence, or `None` if there is none, and the holders, for the server that takes over.
    pub fn hand_over(&mut self) -> (Option<u64>, Vec<HolderRecord>) {
        let (next_fence, mut holders) = self.state.table.hand_over(self.now);
        for (conn, record) in &mut holders {
            self.state.complete(record, *conn, self.max_keep_time);
        }
        (
            next_fence,
            holders.into_iter().map(|(_, record)| record).collect(),
        )
    }

    /// How long nothing will be granted, because the table settles.
    pub fn settling_left(&self) -> Duration {
        self.state.table.settling_left(self.now)
    }

    /// What is remembered of keys.
    pub fn histories(&self) -> Vec<KeyHistory> {
        self.state.table.histories(None, usize::MAX, self.now)
    }
}

/// A client's socket, as used by the threads of other connections.
pub trait ClientSocket: Send + Sync {
    /// Describes the client to operators.
    fn peer(&self) -> String;

    /// Sends the reply to a wait, whole or not at all. Returns whether it was sent. Must not block.
    fn send_grant(&self, grant: Grant) -> bool;

    /// Whether the peer has closed its side, or is gone. Must not block.
    fn has_hung_up(&self) -> bool;

    /// Shuts the connection down in both directions. Must not block.
    fn shut_down(&self);
}

struct SeatState {
    wake: Arc<Condvar>,
    socket: Option<Arc<dyn ClientSocket>>,
    /// The description of the client. It is requested from the socket at its first use.
    peer: OnceCell<Box<str>>,
    /// The tag that the client gave itself.
    tag: Option<Arc<str>>,
    client: ClientAbilities,
    is_gone: bool,
    wait: WaitState,
    /// The further seats of this connection, and what wakes the threads that wait there.
    beside: Vec<(ConnId, Arc<Condvar>)>,
}

impl SeatState {
    /// Whether the connection has a grant that its client cannot adopt over another one.
    fn has_unadoptable(&self, conn: ConnId, table: &LockTable) -> bool {
        !self.client.can_adopt && table.has_grant(conn)
    }
}

/// The state of a connection's wait: which thread decides it, and which thread writes to the
/// socket. A wait passes through these states in order, but may skip `BeingSent`. The connection's
/// own thread begins and ends the wait.
enum WaitState {
    NotWaiting,
    /// The claim is queued. The thread that spends the ticket decides the wait: either the
    /// connection's own thread, or the thread whose visit frees the slot.
    Queued(Ticket),
    /// The thread whose visit freed the slot has granted the claim, and is writing to the socket.
    BeingSent,
    /// The ticket is spent. The connection's own thread writes the reply, unless it has been sent.
    Decided(WaitEnd),
}

impl Arbiter {
    /// Creates an arbiter with an empty table. Leases end promptly only while [`Arbiter::reap`]
    /// runs.
    pub fn new(rules: &Rules, fences: Box<dyn FenceSource>, salts: Salts) -> Self {
        let clock = Clock::new();
        Arbiter {
            state: Mutex::new(State {
                now: clock.now(),
                table: LockTable::new(rules.caps, fences),
                seats: BTreeMap::new(),
                reaper_looks_at: None,
                next_gc: clock.now(),
                awaited: None,
                recorder: None,
                broken: VecDeque::new(),
                event_sink: None,
            }),
            clock,
            reaper: Arc::default(),
            salts,
            claims_left: AtomicUsize::new(0),
            reserved: Mutex::new(None),
            rules: *rules,
        }
    }

    pub fn seat_count(&self) -> usize {
        self.state.lock().seats.len()
    }

    /// Ends the wait of `conn`, because its peer has hung up. If the connection does not wait now,
    /// its next wait ends as soon as it begins. The connection keeps its slots until its seat is
    /// dropped. Does nothing if the connection has no seat.
    pub fn hang_up(&self, conn: ConnId) {
        self.mark_gone(conn, |_| true);
    }

    /// Ends an undecided wait of `conn` as if its peer had hung up. Returns whether `conn` had an
    /// undecided wait.
    pub fn cut_off(&self, conn: ConnId) -> bool {
        self.mark_gone(conn, |wait| matches!(wait, WaitState::Queued(_)))
    }

    fn mark_gone(&self, conn: ConnId, is_meant: impl FnOnce(&WaitState) -> bool) -> bool {
        let mut state = self.state.lock();
        let seat = state.seats.get_mut(&conn);
        let Some(seat) = seat.filter(|seat| is_meant(&seat.wait)) else {
            return false;
        };
        seat.is_gone = true;
        let wake = Arc::clone(&seat.wake);
        drop(state);
        wake.notify_one();
        true
    }

    /// Runs the reaper, which ends leases promptly and drops idle keys. Never returns. If there is
    /// a heartbeat, beats at its interval. A beat shows that the mutex is free to get.
    pub fn reap(&self, mut heartbeat: Option<Heartbeat>) -> ! {
        let mut state = self.state.lock();
        loop {
            let beats_at = heartbeat.as_mut().and_then(|heartbeat| {
                let now = self.clock.now();
                if heartbeat.due.is_none_or(|due| due <= now) {
                    heartbeat.due = Some(now + heartbeat.interval);
                    MutexGuard::unlocked(&mut state, &mut heartbeat.beat);
                }
                heartbeat.due
            });
            self.reap_once(&mut state, beats_at);
        }
    }

    /// Ends due leases and drops due idle keys, then sleeps until more are due, at most until
    /// `beats_at`. Returns without sleeping if it has woken other threads.
    fn reap_once(&self, state: &mut MutexGuard<'_, State>, beats_at: Option<Instant>) {
        self.in_steps(state, Scope::Everything, |state, now| {
            state.table.note_overdue(now);
            if state.next_gc > now {
                return true;
            }
            let is_done = state.table.prune(self.rules.gc_max_idle, STEP, now);
            if is_done {
                state.next_gc = now + self.rules.gc_interval;
            }
            is_done
        });
        if self.wake_before_sleep(state) {
            return;
        }
        state.reaper_looks_at = earlier(self.next_look(state), beats_at);
        let look_at = state.reaper_looks_at;
        self.clock.wait(&self.reaper, state, look_at);
    }

    /// Refuses new claims from now on and dismisses the waiters. The returned channel closes once
    /// the condition `waits_for` is met.
    pub fn begin_drain(&self, waits_for: DrainUntil) -> Receiver<()> {
        self.refuse_claims();
        let (mut visit, _) = self.visit(Scope::Everything);
        visit.await_holders(waits_for, Then::Nothing)
    }

    /// Refuses new claims from now on and dismisses the waiters.
    pub fn refuse_claims(&self) {
        let (mut visit, now) = self.visit(Scope::Everything);
        visit.table.begin_drain(now);
    }

    /// Blocks all requests until the result is dropped.
    pub fn freeze(&self) -> Frozen<'_> {
        let mut state = self.state.lock();
        let now = self.expire_due(&mut state, Scope::Everything);
        let max_keep_time = self.rules.caps.max_keep_time;
        Frozen {
            state,
            now,
            max_keep_time,
        }
    }

    /// Describes up to `at_most` keys to an operator, in sorted order. Returns the position to
    /// continue from if there may be more keys.
    pub fn snapshot(
        &self,
        listing: Option<Listing>,
        at_most: usize,
    ) -> (Vec<KeySnapshot>, Option<Listing>) {
        let (mut visit, now) = self.visit(Scope::Everything);
        visit.table.snapshot(listing, at_most, now)
    }

    /// Grants slots that waiters are owed, now that there may be fences for them.
    pub fn grant_owed_slots(&self) {
        let (mut visit, now) = self.visit(Scope::Nothing);
        visit.table.grant_owed_slots(now);
    }

    /// Grants nothing for this time. Must be called before any claim.
    pub fn settle_for(&self, time: Duration) {
        let (mut visit, now) = self.visit(Scope::Nothing);
        visit.table.settle_until(now + time);
    }

    /// For how long nothing will be granted, because the table settles.
    pub fn settling_left(&self) -> Duration {
        let (visit, now) = self.visit(Scope::Everything);
        visit.table.settling_left(now)
    }

    /// When the table will grant again; `None` if it does already.
    pub fn settling_until(&self) -> Option<Instant> {
        self.visit(Scope::Everything).0.table.settling_until()
    }

    /// When any key was last held: now, if one is held; `None` if none ever was.
    pub fn last_held(&self) -> Option<Instant> {
        let (visit, now) = self.visit(Scope::Everything);
        visit.table.last_held(now)
    }

    /// Whether there is memory for one more claim. Checked because a failed allocation would end
    /// the process.
    fn has_room(&self) -> bool {
        let take = |left: usize| left.checked_sub(1);
        let left = &self.claims_left;
        let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        if taken.is_ok() {
            return true;
        }
        let mut reserved = self.reserved.lock();
        let entry_count = self.state.lock().table.entry_count();
        let len = CLAIMS_AT_ONCE * CLAIM_LEN + entry_count * MAP_ENTRY_LEN;
        *reserved = None; // or both would count
        *reserved = memory::reserve(len, Purpose::Service);
        if reserved.is_some() {
            left.store(CLAIMS_AT_ONCE - 1, Ordering::Relaxed);
        }
        reserved.is_some()
    }

    /// Takes the mutex and ends the expired leases within `scope`. Dropping the visit releases the
    /// mutex, and then sends the resulting grants and wakes the threads concerned.
    fn visit(&self, scope: Scope<'_>) -> (Visit<'_>, Instant) {
        let mut state = self.state.lock();
        let now = self.expire_due(&mut state, scope);
        let (arbiter, state) = (self, Some(state));
        (Visit { arbiter, state }, now)
    }

    /// Like [`Arbiter::in_steps`]. Locks, and unlocks at the end.
    fn visit_in_steps(&self, scope: Scope<'_>, step: impl FnMut(&mut State, Instant) -> bool) {
        let mut state = self.state.lock();
        self.in_steps(&mut state, scope, step);
        self.unlock_and_wake(state);
    }

    /// Ends the expired leases within `scope`, and returns the present time.
    fn expire_due(&self, state: &mut MutexGuard<'_, State>, scope: Scope<'_>) -> Instant {
        self.in_steps(state, scope, |_, _| true)
    }

    /// Ends the expired leases within `scope`, and then calls `step` until it returns `true`.
    /// Returns the time of the last call. A million leases may run out in one instant, and `step`
    /// may have as much to do, so other threads get the mutex between the steps. Leases that run
    /// out meanwhile are ended before the next call.
    fn in_steps(
        &self,
        state: &mut MutexGuard<'_, State>,
        scope: Scope<'_>,
        mut step: impl FnMut(&mut State, Instant) -> bool,
    ) -> Instant {
        loop {
            // The clock is read under the mutex, so that the table never sees time go back.
            let now = self.clock.now();
            state.now = now;
            if state.table.catch_up(scope, STEP, now) && step(state, now) {
                return now;
            }
            self.yield_lock(state);
        }
    }

    /// Lets other threads have the mutex between two steps. Meanwhile sends the grants that result
    /// from the previous step, and wakes the threads concerned.
    ///
    /// Unlocks fairly, so that a waiting thread runs before this one relocks. Then yields the
    /// processor: with a single core, a thread that has a request to read would otherwise wait for
    /// several ticks of the kernel's clock.
    fn yield_lock(&self, state: &mut MutexGuard<'_, State>) {
        let wake_ups = self.finish_visit(state);
        MutexGuard::unlocked_fair(state, || {
            self.send_and_wake(wake_ups);
            std::thread::yield_now();
        });
    }

    /// Releases the mutex, then sends the resulting grants and wakes the threads concerned.
    fn unlock_and_wake(&self, mut state: MutexGuard<'_, State>) {
        let wake_ups = self.finish_visit(&mut state);
        drop(state);
        self.send_and_wake(wake_ups);
    }

    /// Called before a sleep: sends the resulting grants and wakes the threads concerned. If it
    /// released the mutex for that, returns `true`, and the caller must look at the table again.
    fn wake_before_sleep(&self, state: &mut MutexGuard<'_, State>) -> bool {
        let wake_ups = self.finish_visit(state);
        if wake_ups.is_empty() {
            return false;
        }
        MutexGuard::unlocked(state, || self.send_and_wake(wake_ups));
        true
    }

    /// Reports the events and changes of a visit, and collects the threads that the visit must
    /// wake. Usually there are none.
    fn finish_visit(&self, state: &mut State) -> WakeUps {
        state.tell_events();
        state.record_changes(self.rules.caps.max_keep_time);
        state.end_wait_for_holders();
        let next_look = self.next_look(state);
        let is_sooner = |next| state.reaper_looks_at.is_none_or(|planned| next < planned);
        let wake_reaper = next_look.is_some_and(is_sooner);
        if wake_reaper {
            state.reaper_looks_at = next_look;
        }
        let (mut threads, mut sending_count) = (Vec::new(), 0);
        while let Some(conn) = state.table.pop_resolved() {
            let Some(seat) = state.seats.get_mut(&conn) else {
                continue;
            };
            // A peer that has hung up is granted nothing: its connection's own thread cancels the
            // claim.
            let may_send = sending_count < SENT_AT_ONCE && !seat.is_gone;
            let socket = seat.socket.as_ref().filter(|_| may_send);
            let (recorder, table) = (state.recorder.as_deref(), &mut state.table);
            let mut sending = None;
            match (&seat.wait, socket) {
                (WaitState::Queued(ticket), Some(socket))
                    if may_others_send(recorder, table, *ticket) =>
                {
                    match table.collect(*ticket, state.now) {
                        Ok(Answer::WouldWait) => {}
                        Ok(Answer::Granted(grant)) => {
                            sending = Some((Arc::clone(socket), grant));
                            sending_count += 1;
                            seat.wait = WaitState::BeingSent;
                        }
                        answer => seat.wait = WaitState::Decided(WaitEnd::unsent(answer)),
                    }
                }
                _ => {}
            }
            threads.push(WakeUp {
                conn,
                wake: Arc::clone(&seat.wake),
                sending,
            });
            // The table does not know which of them waits for the claim.
            threads.extend(seat.beside.iter().map(|(conn, wake)| WakeUp {
                conn: *conn,
                wake: Arc::clone(wake),
                sending: None,
            }));
        }
        WakeUps {
            threads,
            wake_reaper,
        }
    }

    /// Sends grants and wakes threads, without the mutex. A thread is woken even if its grant has
    /// been sent: waking it now costs less than letting the hang-up watch wake it when the client
    /// sends its next request.
    fn send_and_wake(&self, wake_ups: WakeUps) {
        for wake_up in wake_ups.threads {
            if let Some((socket, grant)) = wake_up.sending {
                let is_sent = socket.send_grant(grant);
                let mut state = self.state.lock();
                if let Some(seat) = state.seats.get_mut(&wake_up.conn) {
                    let answer = Ok(Answer::Granted(grant));
                    seat.wait = WaitState::Decided(WaitEnd { answer, is_sent });
                }
            }
            wake_up.wake.notify_one();
        }
        if wake_ups.wake_reaper {
            self.reaper.notify_one();
        }
    }

    /// When the reaper should look next: now, if owed slots are left to grant; otherwise at the end
    /// of the next lease, or when the next idle key or expected work is due, whichever is earlier.
    fn next_look(&self, state: &State) -> Option<Instant> {
        if state.table.must_go_on_granting() {
            return Some(state.now);
        }
        let idle_since = state.table.idle_since();
        let gc = idle_since.and_then(|since| since.checked_add(self.rules.gc_max_idle));
        let gc = gc.map(|due| due.max(state.next_gc));
        let overdue = state.table.next_overdue();
        earlier(earlier(state.table.next_deadline(), gc), overdue)
    }
}

/// Exclusive access to the arbiter's state. Dropping it releases the mutex, then sends grants and
/// wakes threads.
struct Visit<'a> {
    arbiter: &'a Arbiter,
    /// `None` only while the visit is being dropped.
    state: Option<MutexGuard<'a, State>>,
}

const PRESENT: &str = "a visit has the mutex";

impl<'a> Visit<'a> {
    /// The guard of the mutex, which a wait releases while it sleeps.
    fn guard(&mut self) -> &mut MutexGuard<'a, State> {
        self.state.as_mut().expect(PRESENT)
    }
}

impl Deref for Visit<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect(PRESENT)
    }
}

impl DerefMut for Visit<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.guard()
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        if let Some(state) = self.state.take() {
            self.arbiter.unlock_and_wake(state);
        }
    }
}

/// The threads to wake.
struct WakeUps {
    threads: Vec<WakeUp>,
    wake_reaper: bool,
}

/// A connection's thread to wake, and a grant to send before that.
struct WakeUp {
    conn: ConnId,
    wake: Arc<Condvar>,
    sending: Option<(Arc<dyn ClientSocket>, Grant)>,
}

impl WakeUps {
    fn is_empty(&self) -> bool {
        self.threads.is_empty() && !self.wake_reaper
    }
}
