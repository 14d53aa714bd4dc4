//! Several waits of one connection at once.

use super::*;

const ONE: ConnId = ConnId(11);
const OTHER: ConnId = ConnId(12);

fn acquire_key(seat: &Seat, key: &str) -> Result<Answer, Refusal> {
    let ask = Ask::plain(key, Kind::Lock, Limit::ONE, FOREVER);
    match seat.acquire(&ask) {
        Ok(Answer::Queued(ticket)) => seat.wait(key, ticket, FOREVER, &mut || {}).answer,
        answer => answer,
    }
}

/// Waits for `key` at a seat beside `main` in another thread.
fn waiting(arbiter: &Arc<Arbiter>, main: &Seat, waiter: ConnId, key: &'static str) -> Blocked {
    let seat = main.beside(waiter, Arc::<Socket>::default());
    let thread = thread::spawn(move || {
        let answer = acquire_key(&seat, key);
        (seat, answer)
    });
    until("the seat does not wait", || is_waiting(arbiter, waiter));
    Blocked(thread)
}

#[test]
fn a_hang_up_ends_one_wait_of_a_connection_and_no_other() {
    let (arbiter, holder, main) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    assert!(matches!(acquire_key(&holder, "l"), Ok(Answer::Granted(_))));
    let one = waiting(&arbiter, &main, ONE, "k");
    let other = waiting(&arbiter, &main, OTHER, "l");
    arbiter.hang_up(OTHER);
    assert_eq!(other.end().1, Ok(Answer::Gone));
    assert_eq!(waiter_count(&arbiter), 1);
    release(&holder, grant);
    let (seat, answer) = one.end();
    assert!(matches!(answer, Ok(Answer::Granted(_))));
    // The grant belongs to the connection, not to the wait.
    drop(seat);
    assert_eq!(holder.try_acquire(&lock(FOREVER)), Ok(Answer::WouldWait));
    main.leave(AtClose::Release);
    granted(&holder, FOREVER);
    assert_eq!(arbiter.seat_count(), 1);
}

#[test]
fn each_wait_of_a_connection_ends_with_its_own_grant() {
    let (arbiter, holder, main) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    let waits = [ONE, OTHER].map(|waiter| waiting(&arbiter, &main, waiter, "k"));
    release(&holder, grant);
    let mut count = 0;
    for wait in waits {
        if let (seat, Ok(Answer::Granted(grant))) = wait.end() {
            count += 1;
            release(&seat, grant);
        }
    }
    assert_eq!(count, 2);
}

#[test]
fn an_enqueued_key_is_waited_for_at_any_seat() {
    let (arbiter, holder, main) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    let enqueued = main
        .beside(ONE, Arc::<Socket>::default())
        .enqueue(&lock(FOREVER));
    assert!(matches!(enqueued, Ok(Answer::Queued(_))));
    let seat = main.beside(OTHER, Arc::<Socket>::default());
    let thread = thread::spawn(move || {
        let answer = wait(&seat, FOREVER);
        (seat, answer)
    });
    until("the seat does not wait", || is_waiting(&arbiter, OTHER));
    release(&holder, grant);
    let (_, answer) = thread.join().expect("no panic");
    assert!(matches!(answer, Ok(Answer::Granted(_))));
}
