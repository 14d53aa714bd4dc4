//! Who sends a waiter's grant, what operators see of waiters, and who wins when ends meet.

use super::*;
use crate::wire::token::Fence;

/// The connection that breaks grants.
const OPERATOR: ConnId = ConnId(99);

/// A socket that reports each grant and waits for leave to have sent it.
fn slow_socket(sending: Sender<Grant>, leave: Receiver<bool>) -> Arc<Socket> {
    let send_grant = move |grant| {
        sending.send(grant).expect("it is received");
        leave.recv_timeout(PATIENCE).expect("it is sent")
    };
    Arc::new(Socket {
        send_grant: Box::new(send_grant),
        ..Socket::default()
    })
}

/// A waiter whose grants go through a socket.
struct Served {
    blocked: Blocked<WaitEnd>,
    sending: Receiver<Grant>,
    leave: Sender<bool>,
    is_long: Receiver<()>,
}

fn served(arbiter: &Arc<Arbiter>, conn: u64, wait_timeout: Duration) -> Served {
    let (sending, sent) = bounded(9);
    let (leave, leaves) = bounded(9);
    let (telling, is_long) = bounded(9);
    let waiter = arbiter.connect(ConnId(conn), Some(slow_socket(sending, leaves)));
    let blocked = Blocked::start(arbiter, waiter, move |seat| {
        wait_and_tell(seat, wait_timeout, &telling)
    });
    Served {
        blocked,
        sending: sent,
        leave,
        is_long,
    }
}

#[test]
fn a_release_sends_the_waiters_grant_itself() {
    let arbiter = arbiter();
    let holder = arbiter.connect(ConnId(1), None);
    let grant = granted(&holder, FOREVER);
    let waiter = served(&arbiter, 2, FOREVER);
    waiter.leave.send(true).expect("there is room");
    release(&holder, grant);
    // It was sent before the release had returned.
    let sent = waiter.sending.try_recv().expect("it has been sent");
    let (_, waited) = waiter.blocked.end();
    assert_eq!(waited.answer, Ok(Answer::Granted(sent)));
    assert!(waited.is_sent);
    assert!(waiter.sending.is_empty());
}

#[test]
fn a_grant_on_its_way_beats_a_time_out_and_a_hang_up() {
    let arbiter = arbiter();
    let holder = arbiter.connect(ConnId(1), None);
    let grant = granted(&holder, FOREVER);
    let waiter = served(&arbiter, 2, Duration::from_secs(10));
    let releasing = thread::spawn(move || release(&holder, grant));
    let sent = waiter
        .sending
        .recv_timeout(PATIENCE)
        .expect("it is being sent");
    arbiter.advance(Duration::from_secs(10));
    assert!(!arbiter.cut_off(ConnId(2)), "the wait is decided");
    arbiter.hang_up(ConnId(2));
    let other = arbiter.connect(ConnId(3), None);
    assert_eq!(other.try_acquire(&lock(FOREVER)), Ok(Answer::WouldWait));
    waiter.leave.send(false).expect("there is room");
    assert_eq!(
        waiter.blocked.end().1,
        WaitEnd::unsent(Ok(Answer::Granted(sent)))
    );
    releasing.join().expect("no panic");
}

#[test]
fn a_grant_that_its_own_session_found_is_sent_by_no_other_thread() {
    let arbiter = unreaped();
    let holder = arbiter.connect(ConnId(1), None);
    granted(&holder, Duration::from_secs(10));
    let (sending, sent) = bounded(9);
    // Another thread visits the table during its look for a hang-up.
    let visited = Arc::clone(&arbiter);
    let socket = Socket {
        send_grant: Box::new(move |grant| sending.send(grant).is_ok()),
        has_hung_up: Box::new(move || {
            visited.counters();
            false
        }),
        ..Socket::default()
    };
    let waiter = arbiter.connect(ConnId(2), Some(Arc::new(socket)));
    let answer = waiter.acquire(&lock(FOREVER));
    arbiter.advance(Duration::from_secs(10));
    // It finds the lease over, and so its own grant.
    let waited = waited(&waiter, answer, FOREVER);
    assert!(matches!(waited.answer, Ok(Answer::Granted(_))));
    assert!(!waited.is_sent);
    assert!(sent.is_empty());
}

#[test]
fn nothing_is_sent_to_a_peer_that_has_hung_up() {
    let arbiter = arbiter();
    let holder = arbiter.connect(ConnId(1), None);
    let grant = granted(&holder, FOREVER);
    let waiter = served(&arbiter, 2, FOREVER);
    release_after(&arbiter, grant, hang_up_unnoticed);
    assert_eq!(waiter.blocked.end().1.answer, Ok(Answer::Gone));
    assert!(waiter.sending.is_empty());
    granted(&holder, FOREVER);
}

#[test]
fn a_grant_for_a_peer_that_has_gone_passes_on() {
    let arbiter = arbiter();
    let holder = arbiter.connect(ConnId(1), None);
    let grant = granted(&holder, FOREVER);
    let dead = [2, 3].map(|conn| {
        let dead = Socket {
            has_hung_up: Box::new(|| true),
            ..Socket::default()
        };
        let seat = arbiter.connect(ConnId(conn), Some(Arc::new(dead)));
        Blocked::start(&arbiter, seat, |seat| acquire(seat, FOREVER))
    });
    let next = arbiter.connect(ConnId(4), None);
    let next = Blocked::start(&arbiter, next, |seat| acquire(seat, FOREVER));
    release(&holder, grant);
    // Their seats stay.
    let _dead = dead.map(|blocked| {
        let (seat, answer) = blocked.end();
        assert_eq!(answer, Ok(Answer::Gone));
        seat
    });
    assert!(matches!(next.end().1, Ok(Answer::Granted(_))));
}

#[test]
fn a_waiter_dismissed_by_the_drain_hears_so_despite_a_hang_up_and_is_sent_nothing() {
    let arbiter = arbiter();
    let holder = arbiter.connect(ConnId(1), None);
    granted(&holder, FOREVER);
    let waiter = served(&arbiter, 2, FOREVER);
    let mut state = arbiter.state.lock();
    state.table.begin_drain(arbiter.clock.now());
    hang_up_unnoticed(&mut state);
    arbiter.unlock_and_wake(state);
    assert_eq!(waiter.blocked.end().1.answer, DRAINING);
    assert!(waiter.sending.is_empty());
}

#[test]
fn one_visit_sends_few_grants_and_all_waiters_get_theirs() {
    let arbiter = arbiter();
    const COUNT: u32 = 3 * SENT_AT_ONCE as u32;
    let holder = arbiter.connect(ConnId(1), None);
    for _ in 0..COUNT {
        let answer = holder.try_acquire(&slot_of(COUNT));
        assert!(matches!(answer, Ok(Answer::Granted(_))));
    }
    let (sending, sent) = bounded(COUNT as usize);
    let (leave, leaves) = bounded(COUNT as usize);
    (0..COUNT).for_each(|_| leave.send(false).expect("there is room"));
    let socket = slow_socket(sending, leaves);
    let waiters: Vec<Blocked> = (2..2 + u64::from(COUNT))
        .map(|conn| {
            let waiter = arbiter.connect(ConnId(conn), Some(socket.clone()));
            Blocked::start(&arbiter, waiter, move |seat| {
                waited(seat, seat.acquire(&slot_of(COUNT)), FOREVER).answer
            })
        })
        .collect();
    let mut state = arbiter.state.lock();
    let now = arbiter.clock.now();
    state.table.disconnect(ConnId(1), AtClose::Release, None);
    assert!(state.table.release_some(ConnId(1), usize::MAX, now));
    arbiter.unlock_and_wake(state);
    assert_eq!(sent.len(), SENT_AT_ONCE);
    for waiter in waiters {
        assert!(matches!(waiter.end().1, Ok(Answer::Granted(_))));
    }
}

#[test]
fn a_status_names_holders_and_waiters_in_order() {
    let arbiter = arbiter();
    let holder = arbiter.connect(ConnId(1), None);
    let grant = granted(&holder, FOREVER);
    holder.set_tag("backup");
    drop(holder);
    let waiters = [2, 3].map(|conn| served(&arbiter, conn, FOREVER));
    arbiter.advance(Duration::from_secs(5));
    let status = arbiter.queue("k", 10).expect("it is in use");
    let fence = Fence(grant.token.fence());
    let left = FOREVER - Duration::from_secs(5);
    assert_eq!(status.queue.holders[0].held, Some((fence, left)));
    assert_eq!(status.queue.holders[0].age, Duration::from_secs(5));
    let conns: Vec<u64> = status
        .queue
        .waiters
        .iter()
        .map(|place| place.conn.0)
        .collect();
    assert_eq!(conns, [2, 3]);
    let clients: Vec<_> = status.clients().collect();
    let waiting = (Some("elsewhere"), None);
    assert_eq!(clients, [(None, Some("backup")), waiting, waiting]);
    let few = &arbiter.queues(None, 1).0[0].queue;
    assert_eq!((few.waiters.len(), few.waiter_count), (1, 2));
    assert!(arbiter.queue("other", 10).is_none());
    for waiter in waiters {
        waiter.leave.send(false).expect("there is room");
        arbiter.break_grants("k", None, OPERATOR);
        assert!(matches!(
            waiter.blocked.end().1.answer,
            Ok(Answer::Granted(_))
        ));
    }
}

#[test]
fn a_broken_grant_passes_on_and_its_token_is_dead() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    let fence = Fence(grant.token.fence());
    let blocked = Blocked::start(&arbiter, waiter, |seat| acquire(seat, FOREVER));
    let breaks = |key, fence| arbiter.break_grants(key, fence, OPERATOR);
    assert!(!breaks("other", Some(fence)));
    assert!(!breaks("k", Some(Fence(fence.0 + 7))));
    // The waiter's grant is newer, and stays.
    assert!(breaks("k", None));
    assert!(matches!(blocked.end().1, Ok(Answer::Granted(_))));
    let renewed = holder.renew("k", Kind::Lock, grant.token, FOREVER);
    assert_eq!(renewed, Err(Refusal::NotHeld));
}

#[test]
fn a_break_cuts_off_a_client_that_then_has_nothing() {
    let arbiter = arbiter();
    let [holder, operator] = [ConnId(1), OPERATOR].map(|conn| {
        let socket = Arc::new(Socket::default());
        (arbiter.connect(conn, Some(socket.clone())), socket)
    });
    let ask = |key| Ask::plain(key, Kind::Lock, Limit::ONE, FOREVER);
    let holds = |seat: &Seat, key| {
        let answer = seat.try_acquire(&ask(key));
        assert!(matches!(answer, Ok(Answer::Granted(_))), "{key}");
    };
    holds(&holder.0, "one");
    holds(&holder.0, "other");
    holds(&operator.0, "waited for");
    let enqueued = holder.0.enqueue(&ask("waited for"));
    assert!(matches!(enqueued, Ok(Answer::Queued(_))));
    for key in ["one", "other", "waited for"] {
        assert!(arbiter.break_grants(key, None, OPERATOR));
        assert!(!holder.1.is_shut_down.load(Ordering::SeqCst), "{key}");
    }
    // The last break was that of the operator's own grant, and the waiter has it now.
    assert!(!operator.1.is_shut_down.load(Ordering::SeqCst));
    let collected = holder.0.collect("waited for", Kind::Lock);
    assert!(matches!(collected, Ok(Answer::Granted(_))));
    assert!(arbiter.break_grants("waited for", None, OPERATOR));
    assert!(holder.1.is_shut_down.load(Ordering::SeqCst));
}

/// The virtual time of the last request may be long ago.
#[test]
fn a_disconnect_that_passes_a_grant_on_gives_a_whole_lease() {
    let arbiter = arbiter();
    let [holder, first] = [1, 2].map(|conn| arbiter.connect(ConnId(conn), None));
    let grant = granted(&holder, FOREVER);
    enqueue(&first);
    let waiter = served(&arbiter, 3, FOREVER);
    release(&holder, grant);
    arbiter.advance(Duration::from_secs(2));
    assert_eq!(waiter.is_long.recv_timeout(PATIENCE), Ok(()));
    thread::sleep(Duration::from_millis(100)); // by now the waiter sleeps again
    arbiter.advance(FOREVER - Duration::from_secs(3));
    waiter.leave.send(false).expect("there is room");
    first.leave(AtClose::Release);
    let (_seat, waited) = waiter.blocked.end();
    assert!(matches!(waited.answer, Ok(Answer::Granted(_))));
    let status = arbiter.queue("k", 1).expect("it is held");
    let left = status.queue.holders[0].held.map(|(_, left)| left);
    assert_eq!(left, Some(FOREVER));
}

#[test]
fn a_status_keeps_no_connection_open() {
    let arbiter = arbiter();
    let socket = Arc::new(Socket::default());
    let holder = arbiter.connect(ConnId(1), Some(socket.clone()));
    granted(&holder, FOREVER);
    let status = arbiter.queue("k", 1).expect("it is held");
    holder.leave(AtClose::Release);
    assert_eq!(Arc::strong_count(&socket), 1);
    assert!(status.clients().eq([(Some("elsewhere"), None)]));
}
