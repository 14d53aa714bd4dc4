//! What the log is told, and by which threads.

use super::*;
use crate::latchd::table::{Fate, GrantEnd};

/// A client that is asked for its address.
fn at(peer: impl Fn() -> &'static str + Send + Sync + 'static) -> Arc<Socket> {
    Arc::new(Socket {
        peer: Box::new(peer),
        ..Socket::default()
    })
}

#[test]
fn the_log_is_told_in_order_and_knows_clients_that_have_gone() {
    let arbiter = arbiter();
    let (lines, told) = crossbeam_channel::unbounded();
    let sink = move |told: &DescribedEvent<'_>| {
        let event = told.event;
        let what = match event.fate {
            Fate::Granted => "granted",
            Fate::Ended(GrantEnd::Released(_)) => "released",
            Fate::Ended(GrantEnd::Abandoned) => "abandoned",
            other => panic!("{other:?}"),
        };
        let (peer, tag) = (told.peer(event.conn), told.tag());
        let line = format!("{what} {} {peer:?} {tag:?}", event.conn);
        lines.send(line).expect("it is read");
    };
    arbiter.report_events(Box::new(sink), true);
    let connect = |conn| {
        let was_asked = AtomicBool::new(false);
        let peer = move || {
            let was_asked = was_asked.swap(true, Ordering::SeqCst);
            if was_asked {
                "gone"
            } else {
                "here"
            }
        };
        let seat = arbiter.connect(ConnId(conn), Some(at(peer)));
        seat.set_tag("job");
        seat
    };
    let (holder, waiter) = (connect(1), connect(2));
    let grant = granted(&holder, FOREVER);
    let blocked = Blocked::start(&arbiter, waiter, |seat| acquire(seat, FOREVER));
    release(&holder, grant);
    blocked.end().0.leave(AtClose::Release);
    let client = r#"Some("here") Some("job")"#;
    let expected = ["granted 1", "released 1", "granted 2", "abandoned 2"];
    let expected = expected.map(|what| format!("{what} {client}"));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), expected);
    assert_eq!(arbiter.seat_count(), 1);
}

#[test]
fn a_refused_claim_is_remembered_with_the_names_of_both_clients() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    let [nameless, named] = [(3, "10.0.0.5:4711"), (4, "10.0.0.6:4711")]
        .map(|(conn, address)| arbiter.connect(ConnId(conn), Some(at(move || address))));
    named.set_tag("job");
    let grant = granted(&holder, FOREVER);
    assert_eq!(nameless.try_acquire(&lock(FOREVER)), Ok(Answer::WouldWait));
    release(&holder, grant);
    let grant = granted(&nameless, FOREVER);
    assert_eq!(named.try_acquire(&lock(FOREVER)), Ok(Answer::WouldWait));
    release(&nameless, grant);
    granted(&named, FOREVER);
    let second = Duration::from_secs(1);
    let blocked = Blocked::start(&arbiter, waiter, move |seat| acquire(seat, second));
    arbiter.advance(second);
    assert_eq!(blocked.end().1, Ok(Answer::TimedOut));
    named.leave(AtClose::Orphan);
    assert_eq!(nameless.try_acquire(&lock(FOREVER)), Ok(Answer::WouldWait));
    let history = arbiter.history("k").expect("claims were refused");
    let refused = history.refused.iter();
    let refused = refused.map(|it| (it.fate, it.tag.as_deref(), it.holder.as_deref()));
    let expected = [
        (Fate::Busy, Some("10.0.0.5"), None),
        (Fate::Busy, Some("job"), Some("10.0.0.5")),
        (Fate::GaveUp, None, Some("job")),
        (Fate::Busy, Some("10.0.0.5"), Some("job")),
    ];
    assert_eq!(refused.collect::<Vec<_>>(), expected);
    // Clients without a tag are no past holders with an address.
    let tags = history.past.iter().map(|it| it.tag.as_deref());
    assert_eq!(tags.collect::<Vec<_>>(), [None, None]);
}

#[test]
fn the_reaper_tells_in_time_what_is_overdue() {
    let arbiter = arbiter();
    let (lines, told) = crossbeam_channel::unbounded();
    let sink = move |told: &DescribedEvent<'_>| {
        if let Fate::Overdue(is_late) = told.event.fate {
            lines.send(is_late).expect("it is read");
        }
    };
    arbiter.report_events(Box::new(sink), false);
    arbiter.expect([("k", FOREVER)]);
    arbiter.expect_anew();
    let seat = arbiter.connect(ConnId(1), None);
    let run = || {
        let token = granted(&seat, FOREVER).token;
        let released = seat.release("k", Kind::Lock, token, Some(0));
        assert_eq!(released, Ok(Answer::Released));
    };
    arbiter.advance(FOREVER / 2);
    run();
    arbiter.advance(FOREVER);
    assert!(told.is_empty());
    arbiter.advance(Duration::from_nanos(1));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
    run();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(false));
    assert!(told.is_empty());
}
