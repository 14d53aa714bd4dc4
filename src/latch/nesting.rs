//! The locks of the `latch run`s under which this process runs: whether one of them covers another
//! claim of the same key, and whether that claim would wait for them.

use std::time::{Duration, Instant};

use crate::client::{Kind, Queue};

use super::servers::Target;
use super::variables::tokens_for;

/// The grants of one key under which this process runs.
pub(super) struct OuterGrants {
    /// The key, once for each grant, with that grant as the only holder.
    queues: Vec<Queue>,
}

impl OuterGrants {
    /// Finds the grants of the key of `target` in the environment, and asks the server about them.
    /// A grant that is over does not count, nor one about which the server does not answer by
    /// `deadline`: the claim then reports that. Blocks for at most the connect and the reply
    /// timeout.
    pub(super) fn find(target: &Target, deadline: Option<Instant>) -> OuterGrants {
        let tokens = tokens_for(&target.key);
        // Without a token, there is nothing to ask the server about.
        let queues = if tokens.is_empty() {
            Vec::new()
        } else {
            target.holdings(&tokens, deadline)
        };
        OuterGrants { queues }
    }

    /// Whether one of the grants includes all that `target` asks for.
    pub(super) fn cover(&self, target: &Target) -> bool {
        let asked = &target.slot;
        self.of_kind(target).any(|queue| match asked.limit {
            None => asked.is_shared || !queue.is_shared,
            Some(_) => slots_of(queue) >= slot_count(target),
        })
    }

    /// Whether `target` can only be granted after the grants have ended. A shared lock under a
    /// shared lock counts, too: another client that waits for the whole lock would be between
    /// them. False if the server refuses the claim at once, because the kind or the limit differs.
    fn block(&self, target: &Target) -> bool {
        let slots: u64 = self.of_kind(target).map(slots_of).sum();
        match target.slot.limit {
            _ if slots == 0 => false,
            None => true,
            Some(limit) => u64::from(limit).saturating_sub(slots) < slot_count(target),
        }
    }

    /// The grants of the kind and the limit that `target` asks for.
    fn of_kind(&self, target: &Target) -> impl Iterator<Item = &Queue> {
        let limit = target.slot.limit;
        self.queues.iter().filter(move |queue| match limit {
            None => queue.kind == Kind::Lock,
            Some(limit) => queue.kind == Kind::Semaphore && queue.limit == u64::from(limit),
        })
    }
}

/// The reason to refuse a claim that would wait for a lock under which this process runs; `None` if
/// it would not.
pub(super) fn waits_for_itself(
    target: &Target,
    timeout: Option<Duration>,
    deadline: Option<Instant>,
) -> Option<String> {
    if timeout == Some(Duration::ZERO) {
        return None;
    }
    let is_blocked = OuterGrants::find(target, deadline).block(target);
    is_blocked.then(|| {
        let place = target.place();
        format!("{place}: this runs under the lock already, and would wait for itself")
    })
}

/// How many slots the only holder has.
fn slots_of(queue: &Queue) -> u64 {
    queue.holders.iter().map(|holder| holder.party.slots).sum()
}

fn slot_count(target: &Target) -> u64 {
    target.slot.slots.unwrap_or(1).into()
}
