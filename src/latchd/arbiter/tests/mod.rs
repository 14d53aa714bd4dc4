//! The arbiter on virtual time, and one test in which many threads meet.

mod beside;
mod counters;
mod events;
mod holds;
mod recorder;
mod sending;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{bounded, Sender};

use super::clock::{PATIENCE, REAPER};
use super::*;
use crate::latchd::fence::source::ClockFences;
use crate::latchd::table::{Answer, Ask, AtClose, Grant};
use crate::wire::terms::{Kind, Limit, Refusal};

const FOREVER: Duration = Duration::from_secs(60);
const ADOPTS: ClientAbilities = ClientAbilities {
    can_adopt: true,
    hears_breaks: false,
};
const DRAINING: Result<Answer, Refusal> = Err(Refusal::Draining);

/// A socket that does what a test says. By default its peer is there, and it sends no grants.
struct Socket {
    peer: Box<dyn Fn() -> &'static str + Send + Sync>,
    send_grant: Box<dyn Fn(Grant) -> bool + Send + Sync>,
    has_hung_up: Box<dyn Fn() -> bool + Send + Sync>,
    is_shut_down: AtomicBool,
}

impl Default for Socket {
    fn default() -> Socket {
        Socket {
            peer: Box::new(|| "elsewhere"),
            send_grant: Box::new(|_| false),
            has_hung_up: Box::new(|| false),
            is_shut_down: AtomicBool::new(false),
        }
    }
}

impl ClientSocket for Socket {
    fn peer(&self) -> String {
        (self.peer)().into()
    }

    fn send_grant(&self, grant: Grant) -> bool {
        (self.send_grant)(grant)
    }

    fn has_hung_up(&self) -> bool {
        (self.has_hung_up)()
    }

    fn shut_down(&self) {
        self.is_shut_down.store(true, Ordering::SeqCst);
    }
}

fn arbiter() -> Arc<Arbiter> {
    let arbiter = unreaped();
    start_reaper(&arbiter, None);
    arbiter
}

fn start_reaper(arbiter: &Arc<Arbiter>, heartbeat: Option<Heartbeat>) {
    let reaper = Arc::clone(arbiter);
    let thread = thread::Builder::new().name(REAPER.into());
    let started = thread.spawn(move || reaper.reap(heartbeat));
    started.expect("the system has room for a thread");
}

/// Caps that a test does not reach.
const CAPS: Caps = Caps {
    max_locks: 1024,
    max_grants: 1 << 20,
    max_per_connection: 1 << 20,
    max_waiters: None,
    max_waiters_total: 65_536,
    max_kept: 65_536,
    max_keep_time: Duration::MAX,
    max_hold: Duration::MAX,
};

/// An arbiter without a reaper.
fn unreaped() -> Arc<Arbiter> {
    unreaped_with(CAPS)
}

fn unreaped_with(caps: Caps) -> Arc<Arbiter> {
    let rules = Rules {
        caps,
        gc_interval: Duration::from_secs(1),
        gc_max_idle: Duration::ZERO,
    };
    Arc::new(Arbiter::new(
        &rules,
        Box::new(ClockFences::starting_at(1)),
        Salts::new().expect("the kernel has randomness"),
    ))
}

/// An arbiter, the seat of a holder and the seat of a waiter.
fn arbiter_and_two() -> (Arc<Arbiter>, Seat, Seat) {
    let arbiter = arbiter();
    let (holder, waiter) = (
        arbiter.connect(ConnId(1), None),
        arbiter.connect(ConnId(2), None),
    );
    (arbiter, holder, waiter)
}

/// Asking for the lock `k`.
fn lock(lease: Duration) -> Ask<'static> {
    Ask::plain("k", Kind::Lock, Limit::ONE, lease)
}

/// Asking for a slot of the semaphore `k`.
fn slot_of(limit: u32) -> Ask<'static> {
    let limit = Limit::new(limit).expect("above zero");
    Ask::plain("k", Kind::Semaphore, limit, FOREVER)
}

fn granted(seat: &Seat, lease: Duration) -> Grant {
    match seat.try_acquire(&lock(lease)) {
        Ok(Answer::Granted(grant)) => grant,
        other => panic!("the lock should be free: {other:?}"),
    }
}

/// Enqueues for the lock `k`, which is held.
fn enqueue(seat: &Seat) {
    let enqueued = seat.enqueue(&lock(FOREVER));
    assert!(matches!(enqueued, Ok(Answer::Queued(_))), "{enqueued:?}");
}

/// Waits for the claim of `k` if it was queued.
fn waited(seat: &Seat, answer: Result<Answer, Refusal>, wait_timeout: Duration) -> WaitEnd {
    match answer {
        Ok(Answer::Queued(ticket)) => seat.wait("k", ticket, wait_timeout, &mut || {}),
        answer => WaitEnd::unsent(answer),
    }
}

fn acquire(seat: &Seat, wait_timeout: Duration) -> Result<Answer, Refusal> {
    waited(seat, seat.acquire(&lock(FOREVER)), wait_timeout).answer
}

/// Acquires `k`, and tells of a long wait.
fn wait_and_tell(seat: &Seat, wait_timeout: Duration, on_long: &Sender<()>) -> WaitEnd {
    let Ok(Answer::Queued(ticket)) = seat.acquire(&lock(FOREVER)) else {
        panic!("the lock should be held");
    };
    seat.wait("k", ticket, wait_timeout, &mut || {
        on_long.send(()).expect("there is room");
    })
}

fn wait(seat: &Seat, wait_timeout: Duration) -> Result<Answer, Refusal> {
    waited(seat, seat.collect("k", Kind::Lock), wait_timeout).answer
}

/// Blocks until `holds` does, which takes other threads no virtual time.
fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::yield_now();
    }
}

fn waiter_count(arbiter: &Arbiter) -> usize {
    let (keys, _) = arbiter.snapshot(None, usize::MAX);
    keys.iter().map(|key| key.waiter_count).sum()
}

fn is_waiting(arbiter: &Arbiter, conn: ConnId) -> bool {
    matches!(arbiter.state.lock().seats[&conn].wait, WaitState::Queued(_))
}

/// A seat that blocks in another thread.
struct Blocked<T = Result<Answer, Refusal>>(JoinHandle<(Seat, T)>);

impl<T: Send + 'static> Blocked<T> {
    /// Starts the thread. The seat waits when this returns.
    fn start(
        arbiter: &Arbiter,
        seat: Seat,
        block: impl FnOnce(&Seat) -> T + Send + 'static,
    ) -> Blocked<T> {
        let conn = seat.id();
        let thread = thread::spawn(move || {
            let answer = block(&seat);
            (seat, answer)
        });
        until("the seat does not wait", || is_waiting(arbiter, conn));
        Blocked(thread)
    }

    fn end(self) -> (Seat, T) {
        self.0.join().expect("no panic")
    }
}

fn release(seat: &Seat, grant: Grant) {
    assert_eq!(
        seat.release("k", Kind::Lock, grant.token, None),
        Ok(Answer::Released)
    );
}

/// Releases the lock `k` of connection 1 in one visit with what `first` does.
fn release_after(arbiter: &Arbiter, grant: Grant, first: impl FnOnce(&mut State)) {
    let mut state = arbiter.state.lock();
    first(&mut state);
    let now = arbiter.clock.now();
    let released = state
        .table
        .release(ConnId(1), "k", Kind::Lock, grant.token, None, now);
    assert_eq!(released, Ok(Answer::Released));
    arbiter.unlock_and_wake(state);
}

/// The peer of connection 2 hangs up, and its thread is not told.
fn hang_up_unnoticed(state: &mut State) {
    let seat = state.seats.get_mut(&ConnId(2)).expect("it has a seat");
    seat.is_gone = true;
}

fn is_over(drained: &Receiver<()>) -> bool {
    let end = drained.recv_timeout(PATIENCE);
    end.is_err_and(|error| error.is_disconnected())
}

#[test]
fn the_reaper_passes_an_expired_lease_on_in_time() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    // The reaper sleeps until a later lease ends.
    let other = Ask::plain("other", Kind::Lock, Limit::ONE, FOREVER);
    assert!(matches!(holder.try_acquire(&other), Ok(Answer::Granted(_))));
    let lease = Duration::from_millis(100);
    granted(&holder, lease);
    let blocked = Blocked::start(&arbiter, waiter, |seat| acquire(seat, FOREVER));
    arbiter.advance(lease - Duration::from_nanos(1));
    assert_eq!(waiter_count(&arbiter), 1);
    // Only the reaper sleeps until the end of the lease.
    arbiter.advance(Duration::from_nanos(1));
    assert!(matches!(blocked.end().1, Ok(Answer::Granted(_))));
}

#[test]
fn leases_that_end_together_end_in_steps() {
    // On a busy machine, the witness may come too late to see it.
    let got_in_between = (0..20).any(|_| a_witness_gets_in_between());
    assert!(got_in_between, "the table was closed until all had ended");
}

/// Whether another thread gets at the table while many leases end together.
fn a_witness_gets_in_between() -> bool {
    const SLOTS: usize = 50_000;
    let arbiter = arbiter();
    let holder = arbiter.connect(ConnId(1), None);
    let ask = slot_of(1 << 20);
    for _ in 0..SLOTS {
        assert!(matches!(holder.try_acquire(&ask), Ok(Answer::Granted(_))));
    }
    let mut state = arbiter.state.lock();
    arbiter.clock.advance(FOREVER);
    let (asking, asked) = bounded(0);
    let other = Arc::clone(&arbiter);
    let witness = thread::spawn(move || {
        asking.send(()).expect("it is received");
        let state = other.state.lock();
        state.table.has_due(Scope::Everything, other.clock.now())
    });
    asked.recv_timeout(PATIENCE).expect("it is sent");
    thread::sleep(Duration::from_millis(200)); // by now the witness sleeps at the mutex
    arbiter.expire_due(&mut state, Scope::Everything);
    drop(state);
    witness.join().expect("no panic")
}

#[test]
fn a_wait_that_times_out_gives_up_its_place() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    let timeout = Duration::from_secs(10);
    let blocked = Blocked::start(&arbiter, waiter, move |seat| acquire(seat, timeout));
    arbiter.advance(timeout - Duration::from_nanos(1));
    assert_eq!(waiter_count(&arbiter), 1);
    arbiter.advance(Duration::from_nanos(1));
    let (waiter, answer) = blocked.end();
    assert_eq!(answer, Ok(Answer::TimedOut));
    release(&holder, grant);
    granted(&holder, FOREVER);

    enqueue(&waiter);
    assert_eq!(wait(&waiter, Duration::ZERO), Ok(Answer::TimedOut));
    assert_eq!(wait(&waiter, Duration::ZERO), Err(Refusal::NotEnqueued));
    assert_eq!(waiter_count(&arbiter), 0);
}

#[test]
fn a_grant_that_is_there_beats_a_time_that_is_over() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    let timeout = Duration::from_secs(10);
    let blocked = Blocked::start(&arbiter, waiter, move |seat| acquire(seat, timeout));
    release_after(&arbiter, grant, |_| arbiter.clock.advance(timeout));
    assert!(matches!(blocked.end().1, Ok(Answer::Granted(_))));
}

#[test]
fn a_hang_up_ends_a_wait_before_and_while_it_lasts() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    granted(&holder, FOREVER);
    let blocked = Blocked::start(&arbiter, waiter, |seat| acquire(seat, FOREVER));
    arbiter.hang_up(ConnId(2));
    let (waiter, answer) = blocked.end();
    assert_eq!(answer, Ok(Answer::Gone));
    assert_eq!(acquire(&waiter, FOREVER), Ok(Answer::Gone));
    enqueue(&waiter);
    assert_eq!(wait(&waiter, FOREVER), Ok(Answer::Gone));
    // It does not end a try, in either form.
    assert_eq!(waiter.try_acquire(&lock(FOREVER)), Ok(Answer::WouldWait));
    enqueue(&waiter);
    assert_eq!(wait(&waiter, Duration::ZERO), Ok(Answer::TimedOut));
    arbiter.hang_up(ConnId(77)); // has no seat
}

#[test]
fn a_cut_off_ends_the_wait_that_lasts_and_no_later_one() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    assert!(!arbiter.cut_off(ConnId(2)));
    let blocked = Blocked::start(&arbiter, waiter, |seat| acquire(seat, FOREVER));
    release(&holder, grant);
    let (waiter, answer) = blocked.end();
    assert!(matches!(answer, Ok(Answer::Granted(_))));
    assert!(!arbiter.cut_off(ConnId(2)));
    let blocked = Blocked::start(&arbiter, holder, |seat| acquire(seat, FOREVER));
    assert!(arbiter.cut_off(ConnId(1)));
    assert_eq!(blocked.end().1, Ok(Answer::Gone));
    waiter.leave(AtClose::Release);
    assert!(!arbiter.cut_off(ConnId(77))); // has no seat
}

#[test]
fn a_long_wait_is_told_once_after_a_second() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    let (telling, told) = bounded(9);
    let blocked = Blocked::start(&arbiter, waiter, move |seat| {
        wait_and_tell(seat, FOREVER, &telling).answer
    });
    arbiter.advance(Duration::from_millis(999));
    arbiter.grant_owed_slots(); // wakes the reaper at most
    assert!(told.is_empty());
    arbiter.advance(Duration::from_millis(1));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(()));
    arbiter.advance(Duration::from_secs(5));
    release(&holder, grant);
    assert!(matches!(blocked.end().1, Ok(Answer::Granted(_))));
    assert!(told.is_empty());
}

#[test]
fn a_drain_ends_when_the_last_holder_is_done() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    let blocked = Blocked::start(&arbiter, waiter, |seat| acquire(seat, FOREVER));
    let drained = arbiter.begin_drain(DrainUntil::NoHolder);
    let (waiter, answer) = blocked.end();
    assert_eq!(answer, DRAINING);
    assert_eq!(acquire(&waiter, FOREVER), DRAINING);
    assert!(drained.try_recv().is_err_and(|error| error.is_empty()));
    release(&holder, grant);
    assert!(is_over(&drained));
    // With nothing held, it ends at once.
    assert!(is_over(&arbiter.begin_drain(DrainUntil::NoHolder)));
}

#[test]
fn a_drain_ends_with_the_last_lease() {
    let arbiter = arbiter();
    let holder = arbiter.connect(ConnId(1), None);
    granted(&holder, FOREVER);
    let drained = arbiter.begin_drain(DrainUntil::NoHolder);
    assert!(drained.try_recv().is_err_and(|error| error.is_empty()));
    arbiter.advance(FOREVER);
    assert!(is_over(&drained));
}

#[test]
fn a_connection_is_idle_since_it_last_had_anything() {
    let (arbiter, holder, _) = arbiter_and_two();
    assert_eq!(holder.idle_since(), None);
    let grant = granted(&holder, FOREVER);
    arbiter.advance(Duration::from_secs(3));
    let released_at = arbiter.clock.now();
    assert_eq!(holder.idle_since(), Some(released_at));
    release(&holder, grant);
    arbiter.advance(Duration::from_secs(3));
    assert_eq!(holder.idle_since(), Some(released_at));
    // An entry counts until its lease is over.
    let enqueued = holder.enqueue(&lock(Duration::from_secs(2)));
    assert!(matches!(enqueued, Ok(Answer::Granted(_))));
    arbiter.advance(Duration::from_secs(1));
    assert_eq!(holder.idle_since(), Some(arbiter.clock.now()));
    arbiter.advance(Duration::from_secs(2));
    let expired_at = holder.idle_since();
    assert_ne!(expired_at, Some(released_at));
    arbiter.advance(Duration::from_secs(3));
    assert_eq!(holder.idle_since(), expired_at);
}

/// How many grants a thread of the test below wants to see.
const ENOUGH_GRANTS: u64 = 170;

/// One thread of the test below; returns how many grants it got.
fn compete(arbiter: &Arc<Arbiter>, thread: u64, inside: &AtomicUsize, stop_at: Instant) -> u64 {
    const STEP: u64 = 1000;
    let give_up_at = stop_at + Duration::from_secs(60);
    let mut grants = 0;
    let mut conn = thread;
    let mut seat = arbiter.connect(ConnId(conn), None);
    for round in 0u64.. {
        let now = Instant::now();
        // A slow machine takes longer to try often enough.
        if now >= stop_at && (grants > ENOUGH_GRANTS || now >= give_up_at) {
            break;
        }
        if round % 7 == 0 {
            arbiter.hang_up(ConnId(conn));
        }
        let wait_timeout = Duration::from_micros(round * 13 % 60);
        let answer = match round % 2 {
            0 => acquire(&seat, wait_timeout),
            _ => match seat.enqueue(&lock(FOREVER)) {
                Ok(Answer::Granted(_)) | Ok(Answer::Queued(_)) => wait(&seat, wait_timeout),
                other => panic!("{other:?}"),
            },
        };
        match answer {
            Ok(Answer::Granted(grant) | Answer::GrantedBefore(grant)) => {
                let others = inside.fetch_add(1, Ordering::SeqCst);
                assert_eq!(others, 0, "two holders at once");
                inside.fetch_sub(1, Ordering::SeqCst);
                grants += 1;
                release(&seat, grant);
            }
            Ok(Answer::WouldWait) | Ok(Answer::TimedOut) | Ok(Answer::Gone) => {}
            other => panic!("{other:?}"),
        }
        if round % 7 == 0 {
            seat.leave(AtClose::Release);
            conn += STEP;
            seat = arbiter.connect(ConnId(conn), None);
        }
    }
    grants
}

/// Timeouts that meet grants: no two holders overlap, no slot is lost, and no thread hangs.
#[test]
fn no_grant_is_lost_between_timeouts_hang_ups_and_releases() {
    let arbiter = arbiter();
    let (inside, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let stop_at = Instant::now() + Duration::from_secs(1);
    let grants: u64 = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                arbiter.advance(Duration::from_micros(10));
                thread::yield_now();
            }
        });
        let (arbiter, inside) = (&arbiter, &inside);
        let threads: Vec<_> = (1..=6)
            .map(|thread| scope.spawn(move || compete(arbiter, thread, inside, stop_at)))
            .collect();
        let grants = threads.into_iter().map(|thread| thread.join());
        let grants: Vec<_> = grants.collect();
        is_over.store(true, Ordering::Relaxed);
        grants
            .into_iter()
            .map(|grants| grants.expect("no panic"))
            .sum()
    });
    assert!(grants > 6 * ENOUGH_GRANTS, "only {grants} grants");
    let last = arbiter.connect(ConnId(1_000_000_000), None);
    granted(&last, FOREVER);
}

#[test]
fn a_heartbeat_needs_the_mutex() {
    let (sender, beats) = bounded(100);
    let arbiter = unreaped();
    let interval = Duration::from_secs(10);
    let beat = move || sender.send(()).expect("there is room");
    let heartbeat = Heartbeat::new(interval, beat);
    start_reaper(&arbiter, Some(heartbeat));
    let next_beat = |within| beats.recv_timeout(within);
    next_beat(PATIENCE).expect("the first beat");
    let due = |arbiter: &Arbiter| arbiter.state.lock().reaper_looks_at;
    until("the reaper does not sleep", || due(&arbiter).is_some());
    for _ in 0..3 {
        let frozen = arbiter.freeze();
        arbiter.clock.advance(interval);
        let early = next_beat(Duration::from_millis(50));
        assert!(early.is_err(), "it beat without the mutex");
        drop(frozen);
        next_beat(PATIENCE).expect("a beat");
    }
}
