//! The lock of `latch run` under which this process runs: whether it covers another claim of the
//! same key, and whether that claim would wait for it.

use std::time::{Duration, Instant};

use crate::client::{Holder, Kind, Queue};

use super::servers::Target;
use super::variables::token_for;

/// A grant under which this process runs.
pub(super) struct OuterGrant {
    /// The key, with this grant as the only holder.
    queue: Queue,
    holder: Holder,
}

impl OuterGrant {
    /// Finds the grant of the key of `target` in the environment, and asks the server about it.
    /// `None` if there is none, if it is over, or if the server does not answer by `deadline`: the
    /// claim then reports that. Blocks for at most the connect and the reply timeout.
    pub(super) fn find(target: &Target, deadline: Option<Instant>) -> Option<OuterGrant> {
        let queue = target.holding(token_for(&target.key)?, deadline)?;
        let holder = queue.holders.first()?.clone();
        Some(OuterGrant { queue, holder })
    }

    /// Whether this grant includes all that `target` asks for.
    pub(super) fn covers(&self, target: &Target) -> bool {
        let asked = &target.slot;
        match asked.limit {
            None => self.is_of(target) && (asked.is_shared || !self.queue.is_shared),
            Some(_) => self.is_of(target) && self.holder.party.slots >= slot_count(target),
        }
    }

    /// Whether `target` can only be granted after this grant has ended. A shared lock under a
    /// shared lock counts, too: another client that waits for the whole lock would be between
    /// them. False if the server refuses the claim at once, because the kind or the limit differs.
    fn blocks(&self, target: &Target) -> bool {
        let slots_left = self.queue.limit.saturating_sub(self.holder.party.slots);
        let must_wait = target.slot.limit.is_none() || slots_left < slot_count(target);
        self.is_of(target) && must_wait
    }

    /// Whether the key has the kind and the limit that `target` asks for.
    fn is_of(&self, target: &Target) -> bool {
        match target.slot.limit {
            None => self.queue.kind == Kind::Lock,
            Some(limit) => {
                self.queue.kind == Kind::Semaphore && self.queue.limit == u64::from(limit)
            }
        }
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
    let outer = OuterGrant::find(target, deadline)?;
    outer.blocks(target).then(|| {
        let place = target.place();
        format!("{place}: this runs under the lock already, and would wait for itself")
    })
}

fn slot_count(target: &Target) -> u64 {
    target.slot.slots.unwrap_or(1).into()
}
