//! After a crash, clients prove their grants with their tokens.

use super::lasting::LONGEST_ORDINARY;
use super::*;

/// A server that follows a crash of another one, and settles for ten seconds.
struct Restarted {
    world: World,
    dead: Vec<Fence>,
}

impl World {
    /// A table that makes proofs. Its fences begin after `first`.
    pub fn proving(first: u64, dead: &[Fence]) -> World {
        let mut world = World::new();
        while world.table.fences.next_fence() < Some(first - 1) {}
        world.table.note_changes(Recording::Lasting {
            longest_ordinary: secs(LONGEST_ORDINARY),
        });
        world.table.make_proofs(ProofRules {
            salt_key: SaltKey([7; 16]),
            dead: dead.iter().copied().collect(),
        });
        world
    }

    fn crash(&mut self) -> Restarted {
        Restarted {
            dead: self.dead(),
            world: World::proving(100, &self.dead()),
        }
        .settling(self.now)
    }

    /// The fences of the dead grants since the start.
    fn dead(&mut self) -> Vec<Fence> {
        let changes = self.table.changes().expect("they are noted");
        let is_dead = |change: &&Change| matches!(change.news, News::Dead(_));
        changes.iter().filter(is_dead).map(|it| it.fence).collect()
    }

    fn prove(&mut self, conn: u64, proof: &Proof<'_>) -> Result<(), Refusal> {
        let (table, now) = self.visit(Scope::Everything);
        let adopted = table.adopt(ConnId(conn), proof, secs(10), now);
        self.check();
        adopted.map(|_| ())
    }
}

impl Restarted {
    fn settling(mut self, now: Instant) -> Restarted {
        self.world.now = now;
        self.world.table.settle_until(now + secs(10));
        self
    }
}

/// What a client says of slots of a semaphore with three.
fn slots(key: &str, token: Token, weight: u32, numbers: &[u32]) -> Proof<'static> {
    let key: &'static str = Box::leak(key.to_owned().into_boxed_str());
    Proof {
        key,
        terms: Terms {
            kind: Kind::Semaphore,
            limit: Limit::new(3).expect("above zero"),
            weight: Weight::new(weight).expect("above zero"),
        },
        token,
        numbers: numbers.into(),
        age: None,
    }
}

const REFUSED: Result<(), Refusal> = Err(Refusal::NotHeld);

#[test]
fn a_client_proves_its_lock_and_goes_on() {
    let mut old = World::proving(1, &[]);
    let waiter = {
        let first = old.held(9, "passed-on");
        let waiter = old.queued(1, "passed-on");
        old.release("passed-on", first).expect("it is held");
        old.collected(waiter)
    };
    let token = old.held(1, "k");
    let mut next = old.crash().world;
    assert_eq!(next.prove(5, &proof("k", token)), Ok(()));
    assert_eq!(next.prove(5, &proof("passed-on", waiter)), Ok(()));
    let queued = next.queued(6, "k");
    next.renew_over(5, "k", token, 20);
    next.advance(secs(10));
    next.expire();
    assert!(next.is_held("k", token));
    next.disconnect(5, AtClose::Release);
    assert!(next.collected(queued).fence > token.fence);
}

#[test]
fn a_token_with_any_changed_bit_proves_nothing() {
    let mut old = World::proving(1, &[]);
    let Token { fence, salt } = old.held(1, "k");
    let mut next = old.crash().world;
    for bit in 0..64 {
        let (changed_salt, changed_fence) = (Salt(salt.0 ^ 1 << bit), Fence(fence.0 ^ 1 << bit));
        for token in [
            Token {
                fence,
                salt: changed_salt,
            },
            Token {
                fence: changed_fence,
                salt,
            },
        ] {
            assert_eq!(next.prove(5, &proof("k", token)), REFUSED, "bit {bit}");
        }
    }
    assert_eq!(next.prove(5, &proof("k", Token { fence, salt })), Ok(()));
}

/// Each claim of a client differs from what it was granted in one respect.
#[test]
fn a_proof_of_other_terms_is_refused() {
    let mut old = World::proving(1, &[]);
    let shared = {
        let ask = Ask::plain("shared", Kind::Lock, Limit::ONE, secs(10)).with_weight(1);
        Proof {
            key: ask.key,
            terms: ask.terms,
            token: granted(old.claim(1, &ask)),
            numbers: [].into(),
            age: None,
        }
    };
    let slot = slots("slot", granted(old.slot(1, "slot", 3)), 1, &[]);
    let lock = proof("lock", old.held(1, "lock"));
    let of = |proof: &Proof<'static>, change: fn(&mut Proof<'static>)| {
        let mut forged = proof.clone();
        change(&mut forged);
        forged
    };
    let mut next = old.crash().world;
    for (respect, forged) in [
        ("key", of(&slot, |proof| proof.key = "slots")),
        ("key", of(&lock, |proof| proof.key = "shared")),
        (
            "kind",
            of(&shared, |proof| proof.terms.kind = Kind::Semaphore),
        ),
        ("limit", of(&slot, |proof| proof.terms.limit = Limit::ONE)),
        (
            "limit",
            of(&slot, |proof| proof.terms.limit = Limit::new(4).unwrap()),
        ),
        (
            "weight",
            of(&slot, |proof| proof.terms.weight = Weight::new(2).unwrap()),
        ),
        (
            "weight",
            of(&shared, |proof| proof.terms.weight = Weight::WHOLE),
        ),
        (
            "weight",
            of(&lock, |proof| proof.terms.weight = Weight::ONE),
        ),
    ] {
        assert_eq!(next.prove(5, &forged), REFUSED, "{respect}: {forged:?}");
    }
    for honest in [shared, slot, lock] {
        assert_eq!(next.prove(5, &honest), Ok(()), "{honest:?}");
    }
}

/// A proof says nothing of the numbers, but they must be possible.
#[test]
fn a_proof_with_numbers_of_no_slots_is_refused() {
    let mut old = World::proving(1, &[]);
    let slot = granted(old.slot(1, "s", 3));
    let lock = old.held(1, "k");
    let mut next = old.crash().world;
    for numbers in [&[3][..], &[u32::MAX], &[0, 1], &[1, 1]] {
        let forged = slots("s", slot, 1, numbers);
        assert_eq!(next.prove(5, &forged), REFUSED, "{numbers:?}");
    }
    let numbered = Proof {
        numbers: [0].into(),
        ..proof("k", lock)
    };
    assert_eq!(next.prove(5, &numbered), REFUSED);
    assert_eq!(next.prove(5, &slots("s", slot, 1, &[2])), Ok(()));
}

#[test]
fn a_grant_that_its_client_does_not_know_to_be_over_is_dead() {
    let mut old = World::proving(1, &[]);
    let broken = old.held(1, "broken");
    let cut = old.held(2, "cut");
    let released = old.held(3, "released");
    let own = old.held(4, "own");
    let raw = old.held(RAW, "raw");
    let kept = old.held(6, "kept");
    let expired = old.held(7, "expired");
    let run_out = old.held(8, "run-out");
    for (key, token, time) in [("kept", kept, 60), ("run-out", run_out, 5)] {
        old.keep(key, token, time).expect("it is held");
    }
    old.table
        .break_grant("broken", broken.fence, ConnId(9), old.now);
    old.disconnect(2, AtClose::Release);
    old.release("released", released).expect("it is held");
    let released_by_own = (old.table).release(ConnId(4), "own", Kind::Lock, own, None, old.now);
    assert!(released_by_own.is_ok());
    old.disconnect(RAW, AtClose::Release);
    old.release("kept", kept).expect("it is held");
    old.advance(secs(10));
    old.expire();
    let next = old.crash();
    let dead = [
        ("broken", broken),
        ("cut", cut),
        ("released", released),
        ("run-out", run_out),
        ("expired", expired),
    ];
    assert_eq!(next.dead, dead.map(|(_, token)| token.fence));
    let mut world = next.world;
    for (key, token) in dead.into_iter().chain([("raw", raw)]) {
        assert_eq!(world.prove(5, &proof(key, token)), REFUSED, "{key}");
    }
    // Its client knows.
    assert_eq!(world.prove(5, &proof("own", own)), Ok(()));
}

#[test]
fn slots_are_proved_in_any_order_with_their_numbers() {
    let mut old = World::proving(1, &[]);
    let tokens = [1, 2, 3].map(|conn| granted(old.slot(conn, "s", 3)));
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        let mut next = old.crash().world;
        let before = next.slot(9, "s", 3);
        assert!(matches!(before, Ok(Answer::Queued(_))), "{before:?}");
        for at in order {
            let number = u32::try_from(at).expect("a small number");
            let slot = slots("s", tokens[at], 1, &[number]);
            assert_eq!(next.prove(20 + at as u64, &slot), Ok(()), "{order:?}");
        }
        let queue = next.table.queue("s", 9, next.now).expect("it is in use");
        let fences: Vec<Fence> = queue
            .holders
            .iter()
            .filter_map(|holder| Some(holder.held?.0))
            .collect();
        assert_eq!(fences, tokens.map(|token| token.fence));
    }
}

/// Which does not happen if the previous server knew all dead grants.
#[test]
fn a_lower_fence_gives_way_to_a_higher_one() {
    let mut old = World::proving(1, &[]);
    let first = old.held(1, "k");
    old.release("k", first).expect("it is held");
    let second = old.held(2, "k");
    for order in [[first, second], [second, first]] {
        let mut next = World::proving(100, &[]);
        next.table.settle_until(next.now + secs(10));
        let proved = order.map(|token| next.prove(token.fence.0, &proof("k", token)));
        let is_sorted = order[0].fence < order[1].fence;
        assert_eq!(proved[0], Ok(()));
        assert_eq!(proved[1], if is_sorted { Ok(()) } else { REFUSED });
        assert!(next.is_held("k", second) && !next.is_held("k", first));
        let given_way = next.table.take_given_way();
        assert_eq!(given_way.len(), usize::from(is_sorted));
        assert_eq!(next.dead().len(), usize::from(is_sorted));
        // No operator has broken it.
        let lost = is_sorted.then(|| "gave way k 3 of 3 after 0".to_owned());
        assert_eq!(next.events(), Vec::from_iter(lost));
        let counted = next.table.counters(next.now).counters;
        let expected = (0, u64::from(is_sorted));
        assert_eq!((counted.breaks, counted.abandonments), expected);
    }
}

#[test]
fn a_proof_decides_what_a_key_is_used_as() {
    let mut old = World::proving(1, &[]);
    let slot = granted(old.slot(1, "k", 3));
    let mut next = old.crash().world;
    let waiter = next.queued(9, "k");
    assert_eq!(next.prove(5, &slots("k", slot, 1, &[])), Ok(()));
    assert_eq!(next.collect(waiter), Err(Refusal::LimitMismatch));
    assert_eq!(next.resolved(), [9]);
    // No new numbers are given meanwhile: a holder that comes back may have them.
    next.table.number_slots(ConnId(5), "k", slot.fence);
    let queue = next.table.queue("k", 9, next.now).expect("it is in use");
    assert!(queue.holders[0].numbers.is_empty());
}

#[test]
fn a_grant_of_another_salt_key_is_noted() {
    let mut world = World::proving(100, &[]);
    let token = token(1);
    let record = HolderRecord::new("k", Terms::LOCK, token, secs(10));
    assert!(world.table.restore(&record, world.now));
    world.renew("k", token, 10).expect("it is held");
    let changes = world.table.changes().expect("they are noted");
    assert_eq!(changes.len(), 1, "{changes:?}");
    assert!(matches!(changes[0].news, News::Held(_)));
}

#[test]
fn a_key_that_was_brought_back_and_released_is_not_free() {
    let mut old = World::proving(1, &[]);
    let token = old.held(1, "k");
    let mut next = old.crash().world;
    let waiter = next.queued(9, "k");
    // The first adoption is provisional.
    for _ in 0..2 {
        assert_eq!(next.prove(5, &proof("k", token)), Ok(()));
    }
    next.disconnect(5, AtClose::Release);
    assert_eq!(next.collect(waiter), Ok(Answer::WouldWait));
    assert_eq!(next.prove(6, &proof("k", token)), REFUSED);
    next.advance(secs(10));
    next.expire();
    next.collected(waiter);
}

#[test]
fn no_more_holders_give_way_than_must() {
    let mut old = World::proving(1, &[]);
    let [low, taken, high] = [1, 2, 3].map(|conn| granted(old.slot(conn, "s", 3)));
    let late = {
        old.disconnect(2, AtClose::Release);
        granted(old.slot(4, "s", 3))
    };
    let settling = || {
        let mut next = World::proving(100, &[]);
        next.table.settle_until(next.now + secs(10));
        next
    };
    let is_there = |world: &World, token: Token| world.table.holders.contains_key(&token.fence);
    // The number of one is taken.
    let mut next = settling();
    assert_eq!(next.prove(1, &slots("s", low, 1, &[0])), Ok(()));
    assert_eq!(next.prove(2, &slots("s", taken, 1, &[1])), Ok(()));
    assert_eq!(next.prove(4, &slots("s", late, 1, &[1])), Ok(()));
    assert!(is_there(&next, low) && !is_there(&next, taken) && is_there(&next, late));
    // A higher fence is in the way, so nothing gives way in vain.
    let mut next = settling();
    assert_eq!(next.prove(1, &slots("s", low, 1, &[1])), Ok(()));
    assert_eq!(next.prove(4, &slots("s", late, 1, &[2])), Ok(()));
    assert_eq!(next.prove(3, &slots("s", high, 1, &[2])), REFUSED);
    assert!(is_there(&next, low) && is_there(&next, late));
    assert!(next.table.take_given_way().is_empty());
}

#[test]
fn a_grant_with_too_many_numbers_to_prove_is_noted() {
    for (conn, count, lasts) in [(1, 20, false), (1, 21, true), (RAW, 21, false)] {
        let mut world = World::proving(1, &[]);
        let limit = Limit::new(64).expect("above zero");
        let ask = Ask::plain("k", Kind::Semaphore, limit, secs(10)).with_weight(count);
        let token = granted(world.claim(conn, &ask));
        world.table.set_writable(false, world.now);
        world.table.number_slots(ConnId(conn), "k", token.fence);
        let is_numbered = !world.table.numbers.of(token.fence).is_empty();
        assert_eq!(is_numbered, !lasts, "the file cannot have the numbers");
        world.table.set_writable(true, world.now);
        world.table.number_slots(ConnId(conn), "k", token.fence);
        let changes = world.table.changes().expect("they are noted");
        let lasting = changes.iter().filter_map(|change| match &change.news {
            News::Held(grant) => Some(grant.record.numbers.len()),
            _ => None,
        });
        let expected: &[usize] = if lasts { &[21] } else { &[] };
        assert_eq!(lasting.collect::<Vec<_>>(), expected);
        // It stays in the file with each lease.
        let kind = Kind::Semaphore;
        let now = world.now;
        let renewed = (world.table).renew(ConnId(conn), "k", kind, token, secs(20), now);
        assert!(renewed.is_ok());
        let changes = world.table.changes().expect("they are noted");
        assert_eq!(changes.len(), if lasts { 2 } else { 0 });
    }
}
