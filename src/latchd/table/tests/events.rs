//! What the table notes for the log.

use super::*;

impl World {
    /// The events since they were last taken, in short: the first letters of what happened, the
    /// fence or the connection, and for how long it waited or held.
    pub fn events(&mut self) -> Vec<String> {
        let events = self.table.take_events();
        let shown = events.map(|event| {
            let what = match event.fate {
                Fate::Granted => "granted",
                Fate::GaveUp => "gave up",
                Fate::Busy => "busy",
                Fate::Overdue(true) => "overdue",
                Fate::Overdue(false) => "on time",
                Fate::Kept(_) => "kept",
                Fate::Ended(GrantEnd::Released(_)) => "released",
                Fate::Ended(GrantEnd::Expired) => "expired",
                Fate::Ended(GrantEnd::Broken(ELSEWHERE)) => "broken",
                Fate::Ended(GrantEnd::Broken(other)) => panic!("not by {other}"),
                Fate::Ended(GrantEnd::GaveWay) => "gave way",
                Fate::Ended(GrantEnd::Abandoned) => "abandoned",
            };
            let (fence, key) = (event.fence.map(|it| it.0), event.key.as_str());
            let (conn, lasted) = (event.conn, event.lasted.as_secs());
            let fence = fence.map_or_else(String::new, |fence| format!(" {fence}"));
            let tag = event
                .orphan_tag
                .map_or_else(String::new, |tag| format!(" {tag}"));
            format!("{what} {key}{fence} of {conn}{tag} after {lasted}")
        });
        shown.collect()
    }

    pub fn break_grant(&mut self, key: &str, token: Token) {
        let broken = self
            .table
            .break_grant(key, token.fence, ELSEWHERE, self.now);
        assert!(broken.is_some());
        self.check();
    }
}

#[test]
fn each_grant_and_each_end_is_an_event() {
    let mut world = World::new();
    world.table.note_all_events();
    let token = world.held(1, "k");
    assert_eq!(world.events(), ["granted k 1 of 1 after 0"]);
    world.advance(secs(2));
    let second = world.queued(2, "k");
    let third = world.queued(3, "k");
    world.advance(secs(3));
    world.release("k", token).expect("it is held");
    let passed_on = ["released k 1 of 1 after 5", "granted k 2 of 2 after 3"];
    assert_eq!(world.events(), passed_on);
    world.collected(second);
    world.advance(secs(1));
    world.cancel(third);
    world.queued(4, "k");
    world.disconnect(4, AtClose::Release);
    let in_vain = ["gave up k of 3 after 4", "gave up k of 4 after 0"];
    assert_eq!(world.events(), in_vain);
    world.disconnect(2, AtClose::Release);
    assert_eq!(world.events(), ["abandoned k 2 of 2 after 1"]);
    world.held(5, "k");
    world.advance(secs(10));
    world.expire();
    let token = world.held(6, "k");
    world.break_grant("k", token);
    let ends = [
        "granted k 3 of 5 after 0",
        "expired k 3 of 5 after 10",
        "granted k 4 of 6 after 0",
        "broken k 4 of 6 after 0",
    ];
    assert_eq!(world.events(), ends);
}

#[test]
fn by_default_only_what_was_refused_or_went_wrong_is_an_event() {
    let mut world = World::new();
    let token = world.held(1, "released");
    world.release("released", token).expect("it is held");
    world.held(2, "abandoned");
    world.queued(3, "abandoned");
    world.disconnect(3, AtClose::Release);
    world.disconnect(2, AtClose::Release);
    let token = world.held(1, "broken");
    world.break_grant("broken", token);
    world.held(1, "expired");
    world.held(4, "orphaned");
    world.disconnect(4, AtClose::Orphan);
    let token = world.held(5, "kept");
    let kept = world
        .table
        .keep("kept", token, secs(10), None, |_| None, world.now);
    assert!(kept.is_ok());
    world.advance(secs(10));
    world.expire();
    let tag = histories::tag_of(4).map_or_else(String::new, |tag| format!(" {tag}"));
    let orphaned = format!("expired orphaned 5 of 0{tag} after 10");
    let wrong = [
        "gave up abandoned of 3 after 0",
        "broken broken 3 of 1 after 0",
        "expired expired 4 of 1 after 10",
        &orphaned,
    ];
    assert_eq!(world.events(), wrong);
}
