//! What the log is told, and by which threads.

use super::*;
use crate::table::{Fate, GrantEnd};

/// A client that can be asked for only until it has gone.
#[derive(Default)]
struct Asked(AtomicBool);

impl ClientSocket for Asked {
    fn peer(&self) -> String {
        let was_asked = self.0.swap(true, Ordering::SeqCst);
        if was_asked { "gone" } else { "here" }.into()
    }

    fn send_grant(&self, _: Grant) -> bool {
        false
    }

    fn has_hung_up(&self) -> bool {
        false
    }

    fn shut_down(&self) {}
}

#[test]
fn the_log_is_told_in_order_and_knows_clients_that_have_gone() {
    let arbiter = arbiter(Holdings::Release);
    let (lines, told) = crossbeam_channel::unbounded();
    let account = move |told: &Told<'_>| {
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
    arbiter.account_to(Box::new(account), true);
    let connect = |conn| {
        let seat = arbiter.connect(ConnId(conn), Some(Arc::new(Asked::default())));
        seat.set_tag("job");
        seat
    };
    let (holder, waiter) = (connect(1), connect(2));
    let grant = granted(&holder, FOREVER);
    let blocked = Blocked::start(&arbiter, waiter, |seat| acquire(seat, FOREVER));
    release(&holder, grant);
    drop(blocked.end());
    let client = r#"Some("here") Some("job")"#;
    let expected = ["granted 1", "released 1", "granted 2", "abandoned 2"];
    let expected = expected.map(|what| format!("{what} {client}"));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), expected);
    assert_eq!(arbiter.seat_count(), 1);
}
