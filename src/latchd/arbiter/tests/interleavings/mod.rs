//! Every thread of the arbiter against every other, in thousands of random schedules of each
//! scenario. A thread that sleeps for ever is a deadlock, which the scheduler reports with the
//! schedule that led to it.
//!
//!     RUSTFLAGS='--cfg shuttle' CARGO_PROFILE_TEST_OPT_LEVEL=1 \
//!         cargo test --target-dir target/interleavings --lib interleavings -- --nocapture
//!
//! `LATCHD_TEST_SCHEDULES` is the number of schedules of each scenario and scheduler.

pub mod sync;

use std::panic::{catch_unwind, RefUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize as Counter};

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::thread::{self, JoinHandle};
use shuttle::{Config, Runner};

use super::*;
use crate::latchd::fence::source::ClockFences;
use crate::latchd::table::{Ask, AtClose};
use crate::wire::terms::{Kind, Limit, Refusal};
use crate::wire::token::Fence;
use sync::{plant, Planted};

const LEASE: Duration = Duration::from_secs(10);
const FOREVER: Duration = Duration::from_secs(1 << 30);
const GC_MAX_IDLE: Duration = Duration::from_secs(60);
const DRAINING: Result<Answer, Refusal> = Err(Refusal::Draining);

/// How many preemptions of one thread by another the second scheduler aims for.
const PREEMPTIONS: usize = 3;

/// Plays a scenario in many schedules: random ones, and ones with few preemptions.
fn explore(scenario: impl Scenario) {
    let schedules = std::env::var("LATCHD_TEST_SCHEDULES");
    let schedules = schedules.map_or(2_000, |count| count.parse().expect("a number"));
    let random = explore_with(RandomScheduler::new(schedules), scenario);
    let few = explore_with(PctScheduler::new(PREEMPTIONS, schedules), scenario);
    println!("{random} random schedules, {few} with {PREEMPTIONS} preemptions");
}

fn explore_with(scheduler: impl Scheduler + 'static, scenario: impl Scenario) -> usize {
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    Runner::new(scheduler, config).run(move || World::play(&scenario))
}

trait Scenario: Fn(&World) + Copy + Send + Sync + 'static {}

impl<F: Fn(&World) + Copy + Send + Sync + 'static> Scenario for F {}

/// An arbiter with its reaper. Connection 1 holds the lock `k`, for the length of [`LEASE`].
#[derive(Clone)]
struct World {
    arbiter: Arc<Arbiter>,
    holder: Arc<Seat>,
    grant: Grant,
    /// The clients that believe that they hold `k`.
    inside: Arc<Counter>,
}

impl World {
    fn play(scenario: &impl Scenario) {
        let rules = Rules {
            caps: Caps {
                max_locks: 1024,
                max_grants: 1 << 20,
                max_per_connection: 1 << 20,
                max_waiters: None,
                max_waiters_total: 65_536,
                max_kept: 65_536,
                max_keep_time: Duration::MAX,
                max_hold: Duration::MAX,
            },
            gc_interval: Duration::from_secs(1),
            gc_max_idle: GC_MAX_IDLE,
        };
        let fences = Box::new(ClockFences::starting_at(1));
        let salts = Salts::new().expect("the kernel has randomness");
        let arbiter = Arc::new(Arbiter::new(&rules, fences, salts));
        let reaper = Reaper::start(&arbiter);
        let holder = Arc::new(arbiter.connect(ConnId(1), None));
        let grant = granted(holder.try_acquire(&ask("k", LEASE)));
        scenario(&World {
            arbiter,
            holder,
            grant,
            inside: Arc::default(),
        });
        reaper.end();
    }

    /// Runs a thread beside the others.
    fn beside<T: Send + 'static>(
        &self,
        act: impl FnOnce(&World) -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let world = self.clone();
        thread::spawn(move || act(&world))
    }

    /// Queues a claim for `k`.
    fn waiter(&self, conn: u64, wait_timeout: Duration, writer: Writer) -> Waiter {
        self.waiter_with(ask("k", FOREVER), conn, wait_timeout, writer)
    }

    /// Queues a claim; it is in the queue when this returns.
    fn waiter_with(
        &self,
        ask: Ask<'static>,
        conn: u64,
        wait_timeout: Duration,
        writer: Writer,
    ) -> Waiter {
        let sent: Arc<Counter> = Arc::default();
        let slow = || SlowSocket(Arc::clone(&sent));
        let socket: Option<Arc<dyn ClientSocket>> = match writer {
            Writer::OwnThread => None,
            Writer::Releaser => Some(Arc::new(slow())),
            Writer::InVain => Some(Arc::new(DeadSocket)),
        };
        let seat = Arc::new(self.arbiter.connect(ConnId(conn), socket));
        let waiting = Arc::clone(&seat);
        let thread =
            thread::spawn(move || waited(&waiting, ask.key, waiting.acquire(&ask), wait_timeout));
        let is_waiting = || {
            let state = self.arbiter.state.lock();
            matches!(state.seats[&ConnId(conn)].wait, WaitState::Queued(_))
        };
        while !is_waiting() {
            thread::yield_now();
        }
        Waiter { thread, seat, sent }
    }

    fn release_holder(&self) -> Result<Answer, Refusal> {
        self.holder.release("k", Kind::Lock, self.grant.token, None)
    }

    /// A client's whole life: asks for `k`, works while it is alone, releases, and goes.
    fn work(&self, conn: u64) {
        let seat = self.arbiter.connect(ConnId(conn), None);
        let answer = match conn {
            2 => {
                assert!(seat.enqueue(&ask("k", FOREVER)).is_ok());
                thread::yield_now();
                waited(&seat, "k", seat.collect("k", Kind::Lock), FOREVER)
            }
            _ => waited(&seat, "k", seat.acquire(&ask("k", FOREVER)), FOREVER),
        };
        let token = granted(answer).token;
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0);
        thread::yield_now();
        self.inside.fetch_sub(1, Ordering::SeqCst);
        // One client leaves without a release.
        if conn != 4 {
            assert_eq!(
                seat.release("k", Kind::Lock, token, None),
                Ok(Answer::Released)
            );
        } else {
            seat.leave(AtClose::Release);
        }
    }

    /// No claim waits for `k`, and it is held by this grant or free.
    fn expect_holder(&self, holder: Option<Grant>) {
        let queue = self.arbiter.queue("k", 10);
        let (mut fences, mut waiter_count) = (Vec::new(), 0);
        if let Some(status) = &queue {
            let held = status.queue.holders.iter().filter_map(|place| place.held);
            fences = held.map(|(fence, _)| fence).collect();
            waiter_count = status.queue.waiter_count;
        }
        let expected: Vec<Fence> = holder.iter().map(|grant| grant.token.fence).collect();
        assert_eq!((fences, waiter_count), (expected, 0));
    }

    /// Frees `k`, and sees that it can be had again.
    fn expect_in_order(&self, holder: Option<Grant>) {
        self.expect_holder(holder);
        let seat = self.arbiter.connect(ConnId(99), None);
        if let Some(grant) = holder {
            assert_eq!(seat.try_acquire(&ask("k", LEASE)), Ok(Answer::WouldWait));
            assert_eq!(
                seat.release("k", Kind::Lock, grant.token, None),
                Ok(Answer::Released)
            );
        }
        granted(seat.try_acquire(&ask("k", LEASE)));
    }
}

/// The reaper, which here comes to an end.
struct Reaper {
    arbiter: Arc<Arbiter>,
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Reaper {
    fn start(arbiter: &Arc<Arbiter>) -> Reaper {
        let is_over = Arc::new(AtomicBool::new(false));
        let (reaping, end) = (Arc::clone(arbiter), Arc::clone(&is_over));
        let thread = thread::spawn(move || {
            let mut state = reaping.state.lock();
            while !end.load(Ordering::SeqCst) {
                reaping.reap_once(&mut state, None);
            }
        });
        Reaper {
            arbiter: Arc::clone(arbiter),
            is_over,
            thread,
        }
    }

    fn end(self) {
        let state = self.arbiter.state.lock();
        self.is_over.store(true, Ordering::SeqCst);
        drop(state);
        self.arbiter.reaper.notify_one();
        self.thread.join().expect("no panic");
    }
}

/// Who writes the reply to a wait.
#[derive(Clone, Copy)]
enum Writer {
    OwnThread,
    /// The thread that frees the slot.
    Releaser,
    /// The peer has gone, which is found out only when there is a grant.
    InVain,
}

struct Waiter {
    thread: JoinHandle<Result<Answer, Refusal>>,
    seat: Arc<Seat>,
    sent: Arc<Counter>,
}

/// Ends the connection by a word of its client, unless another thread still has the seat.
fn close(seat: Arc<Seat>) {
    if let Some(seat) = Arc::into_inner(seat) {
        seat.leave(AtClose::Release);
    }
}

impl Waiter {
    /// The answer. Fails if a grant went out that the client's own thread does not know of.
    fn end(self) -> Result<Answer, Refusal> {
        let answer = self.thread.join().expect("no panic");
        let sent_count = self.sent.load(Ordering::SeqCst);
        let is_granted = matches!(answer, Ok(Answer::Granted(_)));
        assert!(sent_count <= usize::from(is_granted), "{answer:?}");
        close(self.seat);
        answer
    }

    /// As [`Waiter::end`], but the connection stays open.
    fn answer(self) -> (Result<Answer, Refusal>, Arc<Seat>) {
        let seat = Arc::clone(&self.seat);
        (self.end(), seat)
    }
}

/// The connection that breaks grants.
const OPERATOR: ConnId = ConnId(99);

/// A socket that lets other threads run while it takes a grant.
struct SlowSocket(Arc<Counter>);

impl ClientSocket for SlowSocket {
    fn peer(&self) -> String {
        String::new()
    }

    fn send_grant(&self, _: Grant) -> bool {
        thread::yield_now();
        self.0.fetch_add(1, Ordering::SeqCst);
        thread::yield_now();
        true
    }

    fn has_hung_up(&self) -> bool {
        false
    }

    fn shut_down(&self) {}
}

/// The socket of a peer that has gone.
struct DeadSocket;

impl ClientSocket for DeadSocket {
    fn peer(&self) -> String {
        String::new()
    }

    fn send_grant(&self, _: Grant) -> bool {
        thread::yield_now();
        false
    }

    fn has_hung_up(&self) -> bool {
        thread::yield_now();
        true
    }

    fn shut_down(&self) {}
}

fn ask(key: &str, lease: Duration) -> Ask<'_> {
    Ask::plain(key, Kind::Lock, Limit::ONE, lease)
}

/// Waits for a claim of `key` if it was queued.
fn waited(
    seat: &Seat,
    key: &str,
    answer: Result<Answer, Refusal>,
    wait_timeout: Duration,
) -> Result<Answer, Refusal> {
    match answer {
        Ok(Answer::Queued(ticket)) => seat.wait(key, ticket, wait_timeout, &mut || {}).answer,
        answer => answer,
    }
}

fn granted(answer: Result<Answer, Refusal>) -> Grant {
    grant_in(answer).unwrap_or_else(|| panic!("{answer:?}"))
}

fn grant_in(answer: Result<Answer, Refusal>) -> Option<Grant> {
    match answer {
        Ok(Answer::Granted(grant) | Answer::GrantedBefore(grant)) => Some(grant),
        _ => None,
    }
}

/// A grant against what may end the wait at the same time, with both writers of the reply.
fn grant_against(
    world: &World,
    wait_timeout: Duration,
    writer: Writer,
    other_end: fn(&World),
    otherwise: Result<Answer, Refusal>,
) {
    let waiter = world.waiter(2, wait_timeout, writer);
    let releasing = world.beside(World::release_holder);
    let ending = world.beside(other_end);
    let (answer, seat) = waiter.answer();
    assert_eq!(releasing.join().expect("no panic"), Ok(Answer::Released));
    ending.join().expect("no panic");
    let grant = grant_in(answer);
    if grant.is_none() {
        assert_eq!(answer, otherwise);
    }
    world.expect_holder(grant);
    if otherwise != DRAINING {
        world.expect_in_order(grant);
    }
    close(seat);
}

fn time_passes(world: &World) {
    world.arbiter.advance(LONG);
}

fn hang_up(world: &World) {
    world.arbiter.hang_up(ConnId(2));
}

const SHORT: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(2);

#[test]
fn a_hang_up_alone_ends_the_wait() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter(2, FOREVER, writer);
        hang_up(world);
        assert_eq!(waiter.end(), Ok(Answer::Gone));
    });
}

#[test]
fn nothing_is_granted_after_a_hang_up() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter(2, FOREVER, writer);
        hang_up(world);
        assert_eq!(world.release_holder(), Ok(Answer::Released));
        assert_eq!(waiter.end(), Ok(Answer::Gone));
        world.expect_in_order(None);
    });
}

#[test]
fn the_drain_alone_ends_the_wait() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter(2, FOREVER, writer);
        let drained = world.arbiter.begin_drain(DrainUntil::NoHolder);
        assert_eq!(waiter.end(), DRAINING);
        assert!(drained.try_recv().is_err_and(|error| error.is_empty()));
    });
}

#[test]
fn the_deadline_alone_ends_the_wait() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter(2, SHORT, writer);
        world.arbiter.advance(SHORT);
        assert_eq!(waiter.end(), Ok(Answer::TimedOut));
    });
}

#[test]
fn a_grant_meets_a_timeout() {
    explore(|world| {
        let writer = Writer::OwnThread;
        grant_against(world, SHORT, writer, time_passes, Ok(Answer::TimedOut));
    });
}

#[test]
fn a_sent_grant_meets_a_timeout() {
    explore(|world| {
        let writer = Writer::Releaser;
        grant_against(world, SHORT, writer, time_passes, Ok(Answer::TimedOut));
    });
}

#[test]
fn a_grant_meets_a_hang_up() {
    explore(|world| grant_against(world, FOREVER, Writer::OwnThread, hang_up, Ok(Answer::Gone)));
}

#[test]
fn a_sent_grant_meets_a_hang_up() {
    explore(|world| grant_against(world, FOREVER, Writer::Releaser, hang_up, Ok(Answer::Gone)));
}

fn drain(world: &World) {
    drop(world.arbiter.begin_drain(DrainUntil::NoHolder));
}

#[test]
fn a_grant_meets_the_drain() {
    explore(|world| grant_against(world, FOREVER, Writer::OwnThread, drain, DRAINING));
}

#[test]
fn a_sent_grant_meets_the_drain() {
    explore(|world| grant_against(world, FOREVER, Writer::Releaser, drain, DRAINING));
}

/// Three ends at once: the deadline, the hang-up and the drain.
#[test]
fn a_sent_grant_meets_all_other_ends() {
    explore(|world| {
        let waiter = world.waiter(2, SHORT, Writer::Releaser);
        let threads = [time_passes, hang_up, drain].map(|end| world.beside(end));
        let releasing = world.beside(World::release_holder);
        let (answer, seat) = waiter.answer();
        for thread in threads {
            thread.join().expect("no panic");
        }
        assert_eq!(releasing.join().expect("no panic"), Ok(Answer::Released));
        let ends = [Ok(Answer::TimedOut), Ok(Answer::Gone), DRAINING];
        assert!(grant_in(answer).is_some() || ends.contains(&answer));
        world.expect_holder(grant_in(answer));
        close(seat);
    });
}

/// Two peers have gone, and the first one's wait may end otherwise meanwhile.
#[test]
fn a_grant_for_a_peer_that_has_gone_passes_on() {
    explore(|world| {
        let gone = [2, 3].map(|conn| world.waiter(conn, FOREVER, Writer::InVain));
        let next = world.waiter(4, FOREVER, Writer::Releaser);
        let ending = world.beside(hang_up);
        let breaking = world.beside(|world| world.arbiter.break_grants("k", None, OPERATOR));
        let _ = world.release_holder();
        ending.join().expect("no panic");
        breaking.join().expect("no panic");
        let _seats = gone.map(|waiter| {
            let (answer, seat) = waiter.answer();
            assert_eq!(answer, Ok(Answer::Gone));
            seat
        });
        let (answer, _seat) = next.answer();
        let grant = granted(answer);
        // The break may have come later than the grant.
        if world.arbiter.queue("k", 1).is_some() {
            world.expect_in_order(Some(grant));
        }
    });
}

/// The end of the lease and the release free one slot once.
#[test]
fn a_release_meets_the_end_of_the_lease() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter(2, FOREVER, writer);
        let releasing = world.beside(World::release_holder);
        world.arbiter.advance(LEASE);
        let (answer, _seat) = waiter.answer();
        let released = releasing.join().expect("no panic");
        assert!(matches!(
            released,
            Ok(Answer::Released) | Err(Refusal::NotHeld)
        ));
        world.expect_in_order(Some(granted(answer)));
    });
}

fn for_both_writers(scenario: fn(&World, Writer)) {
    for writer in [Writer::OwnThread, Writer::Releaser] {
        explore(move |world: &World| scenario(world, writer));
    }
}

/// The waiter has been told that its wait is long: then only the reaper looks at the lease.
#[test]
fn the_reaper_alone_passes_the_slot_on() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter(2, FOREVER, writer);
        world.arbiter.advance(LONG);
        world.arbiter.advance(LEASE);
        let (answer, _seat) = waiter.answer();
        world.expect_in_order(Some(granted(answer)));
    });
}

/// A claim that comes after the end of the lease ends it, and sends or passes on the grant of the
/// waiter before it. That one may have released before the claim's own thread sleeps.
#[test]
fn a_claim_that_passes_a_grant_on_misses_none() {
    for_both_writers(|world, writer| {
        let first = world.waiter(2, FOREVER, writer);
        let working = world.beside(|_| {
            let (answer, seat) = first.answer();
            let token = granted(answer).token;
            assert_eq!(
                seat.release("k", Kind::Lock, token, None),
                Ok(Answer::Released)
            );
        });
        let passing = world.beside(|world| world.arbiter.advance(LEASE));
        let next = world.arbiter.connect(ConnId(3), None);
        let answer = waited(&next, "k", next.acquire(&ask("k", FOREVER)), FOREVER);
        working.join().expect("no panic");
        passing.join().expect("no panic");
        world.expect_in_order(Some(granted(answer)));
    });
}

#[test]
fn the_end_of_a_lease_meets_a_timeout() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter(2, LEASE, writer);
        world.arbiter.advance(LEASE);
        let (answer, _seat) = waiter.answer();
        assert!(answer == Ok(Answer::TimedOut) || grant_in(answer).is_some());
        world.expect_in_order(grant_in(answer));
    });
}

/// Either the renewal comes in time and the waiter waits on, or it is refused.
#[test]
fn a_renewal_meets_the_end_of_the_lease() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter(2, FOREVER, writer);
        let renewing = world.beside(|world| {
            let token = world.grant.token;
            world.holder.renew("k", Kind::Lock, token, 2 * LEASE)
        });
        world.arbiter.advance(LEASE);
        match renewing.join().expect("no panic") {
            Ok(_) => assert_eq!(world.release_holder(), Ok(Answer::Released)),
            Err(refusal) => assert_eq!(refusal, Refusal::NotHeld),
        }
        let (answer, _seat) = waiter.answer();
        world.expect_in_order(Some(granted(answer)));
    });
}

/// The grant that is being sent runs out meanwhile.
#[test]
fn a_sent_grant_meets_the_end_of_its_lease() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter_with(ask("k", LEASE), 2, FOREVER, writer);
        let next = world.waiter_with(ask("k", LEASE), 3, FOREVER, writer);
        let releasing = world.beside(World::release_holder);
        world.arbiter.advance(LEASE);
        let expired = Err(Refusal::LeaseExpired);
        let (first, _seat) = waiter.answer();
        assert!(first == expired || grant_in(first).is_some());
        let passing_on = world.beside(|world| world.arbiter.advance(LEASE));
        let (second, _seat) = next.answer();
        assert!(second == expired || grant_in(second).is_some());
        passing_on.join().expect("no panic");
        let released = releasing.join().expect("no panic");
        assert!(matches!(
            released,
            Ok(Answer::Released) | Err(Refusal::NotHeld)
        ));
        world.arbiter.advance(LEASE);
        world.expect_in_order(None);
    });
}

/// The first waiter's peer hangs up and its seat goes: the next one must be granted the lock.
#[test]
fn a_disconnect_passes_a_grant_on() {
    for_both_writers(|world, writer| {
        let first = world.waiter(2, FOREVER, writer);
        let next = world.waiter(3, FOREVER, writer);
        let releasing = world.beside(World::release_holder);
        let hanging_up = world.beside(hang_up);
        let answer = first.end();
        assert!(answer == Ok(Answer::Gone) || grant_in(answer).is_some());
        let (answer, _seat) = next.answer();
        world.expect_in_order(Some(granted(answer)));
        assert_eq!(releasing.join().expect("no panic"), Ok(Answer::Released));
        hanging_up.join().expect("no panic");
    });
}

/// The holder's connection closes while the waiter gives up.
#[test]
fn a_holders_disconnect_meets_a_timeout() {
    for_both_writers(|world, writer| {
        let second = world.arbiter.connect(ConnId(50), None);
        let mine = granted(second.try_acquire(&ask("other", FOREVER)));
        let closing = Arc::new(std::sync::Mutex::new(Some(second)));
        let waiter = world.waiter_with(ask("other", FOREVER), 2, SHORT, writer);
        let passing = world.beside(time_passes);
        let dropping = world.beside(move |_| {
            let seat = closing.lock().expect("no panic").take();
            seat.expect("it is open").leave(AtClose::Release);
        });
        let (answer, _seat) = waiter.answer();
        passing.join().expect("no panic");
        dropping.join().expect("no panic");
        let other = world.arbiter.connect(ConnId(51), None);
        match answer {
            Ok(Answer::Granted(grant)) => {
                assert!(grant.token.fence > mine.token.fence);
                assert_eq!(
                    other.try_acquire(&ask("other", LEASE)),
                    Ok(Answer::WouldWait)
                );
            }
            answer => {
                assert_eq!(answer, Ok(Answer::TimedOut));
                granted(other.try_acquire(&ask("other", LEASE)));
            }
        }
    });
}

/// One token is released twice, as by a client that sends again: one release counts.
#[test]
fn two_releases_of_one_token_free_one_slot() {
    for_both_writers(|world, writer| {
        let first = world.waiter(2, FOREVER, writer);
        let next = world.waiter(3, SHORT, writer);
        let releases = [(); 2].map(|()| world.beside(World::release_holder));
        let (answer, _seat) = first.answer();
        let grant = granted(answer);
        let released = releases.map(|thread| thread.join().expect("no panic"));
        let count = released.iter().filter(|released| released.is_ok()).count();
        assert_eq!(count, 1);
        world.arbiter.advance(SHORT);
        assert_eq!(next.end(), Ok(Answer::TimedOut));
        world.expect_in_order(Some(grant));
    });
}

/// Two slots of a semaphore come free at once: both waiters are granted one, in order.
#[test]
fn two_releases_wake_two_waiters() {
    for_both_writers(|world, writer| {
        let seats = [10, 11].map(|conn| Arc::new(world.arbiter.connect(ConnId(conn), None)));
        let grants = [0, 1].map(|at| granted(seats[at].try_acquire(&permit())));
        let waiters = [2, 3].map(|conn| world.waiter_with(permit(), conn, FOREVER, writer));
        let releasing = [0, 1].map(|at| {
            let (seat, token) = (Arc::clone(&seats[at]), grants[at].token);
            world.beside(move |_| seat.release("s", Kind::Semaphore, token, None))
        });
        let ends = waiters.map(Waiter::answer);
        assert!(fence_of(ends[0].0) < fence_of(ends[1].0));
        for thread in releasing {
            assert_eq!(thread.join().expect("no panic"), Ok(Answer::Released));
        }
    });
}

fn fence_of(answer: Result<Answer, Refusal>) -> Fence {
    granted(answer).token.fence
}

fn permit() -> Ask<'static> {
    let limit = Limit::new(2).expect("above zero");
    Ask::plain("s", Kind::Semaphore, limit, FOREVER)
}

/// Each client asks, works and releases, one of them in two phases: they exclude each other.
#[test]
fn clients_exclude_each_other() {
    explore(|world: &World| {
        let clients = [2, 3, 4].map(|conn| world.beside(move |world| world.work(conn)));
        assert_eq!(world.release_holder(), Ok(Answer::Released));
        for client in clients {
            client.join().expect("no panic");
        }
        world.expect_in_order(None);
    });
}

/// A grant that was enqueued for runs out before the client waits for it, or is collected.
#[test]
fn an_enqueued_grant_meets_the_end_of_its_lease() {
    explore(|world: &World| {
        let seat = world.arbiter.connect(ConnId(2), None);
        assert!(matches!(
            seat.enqueue(&ask("k", SHORT)),
            Ok(Answer::Queued(_))
        ));
        let releasing = world.beside(World::release_holder);
        let passing = world.beside(|world| world.arbiter.advance(SHORT));
        let answer = waited(&seat, "k", seat.collect("k", Kind::Lock), FOREVER);
        assert_eq!(releasing.join().expect("no panic"), Ok(Answer::Released));
        passing.join().expect("no panic");
        let expired = Err(Refusal::LeaseExpired);
        assert!(answer == expired || grant_in(answer).is_some());
        world.arbiter.advance(SHORT);
        world.expect_in_order(None);
    });
}

/// The drain is over when the last holder is gone, however it goes.
#[test]
fn the_drain_meets_the_end_of_the_last_lease() {
    explore(|world: &World| {
        let draining = world.beside(|world| world.arbiter.begin_drain(DrainUntil::NoHolder));
        let releasing = world.beside(World::release_holder);
        world.arbiter.advance(LEASE);
        let drained = draining.join().expect("no panic");
        let released = releasing.join().expect("no panic");
        assert!(matches!(
            released,
            Ok(Answer::Released) | Err(Refusal::NotHeld)
        ));
        // The reaper may come later; any visit ends the lease.
        assert!(world.arbiter.last_held().is_some());
        let state = drained.try_recv();
        assert!(state.is_err_and(|error| error.is_disconnected()));
    });
}

/// An operator breaks the grant while its holder gives it back.
#[test]
fn a_break_meets_a_release() {
    for_both_writers(|world, writer| {
        let waiter = world.waiter(2, FOREVER, writer);
        let releasing = world.beside(World::release_holder);
        let broken = world
            .arbiter
            .break_grants("k", Some(world.grant.token.fence), OPERATOR);
        let released = releasing.join().expect("no panic");
        assert_eq!(broken, released.is_err());
        let (answer, _seat) = waiter.answer();
        world.expect_in_order(Some(granted(answer)));
    });
}

/// An idle key goes while a client asks for it.
#[test]
fn a_claim_meets_the_end_of_an_idle_key() {
    explore(|world: &World| {
        assert_eq!(world.release_holder(), Ok(Answer::Released));
        let asking = world.beside(|world| world.holder.try_acquire(&ask("k", FOREVER)));
        world.arbiter.advance(GC_MAX_IDLE);
        let answer = asking.join().expect("no panic");
        world.expect_in_order(Some(granted(answer)));
    });
}

/// A checker that has never failed proves nothing.
fn expect_found(bug: Planted, scenario: impl Scenario + RefUnwindSafe) {
    plant(bug);
    let explored = catch_unwind(|| explore(scenario));
    plant(Planted::Nothing);
    assert!(explored.is_err());
}

#[test]
fn a_forgotten_wake_up_is_found() {
    expect_found(Planted::ForgottenWakeUp, |world| {
        let waiter = world.waiter(2, FOREVER, Writer::OwnThread);
        assert_eq!(world.release_holder(), Ok(Answer::Released));
        granted(waiter.end());
    });
}

#[test]
fn a_sleep_decided_outside_the_mutex_is_found() {
    expect_found(Planted::SleepOutsideMutex, |world| {
        let waiter = world.waiter(2, FOREVER, Writer::OwnThread);
        assert_eq!(world.release_holder(), Ok(Answer::Released));
        granted(waiter.end());
    });
}
