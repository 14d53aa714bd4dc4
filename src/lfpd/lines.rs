//! A line for each user, in which its requests wait before they wait with those of others. So a
//! user who asks a lot, for what takes long, delays the others by one request.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::peer::Peer;

/// The lines of those users who ask right now.
#[derive(Debug, Default)]
pub struct Lines(Mutex<BTreeMap<Peer, Arc<Mutex<()>>>>);

impl Lines {
    /// Runs `request` at the head of the line of `peer`. Blocks until `deadline` at most, and gives
    /// `None` if the others of the same user take as long.
    pub fn at_the_head<T>(
        &self,
        peer: Peer,
        deadline: Instant,
        request: impl FnOnce() -> T,
    ) -> Option<T> {
        let line = Arc::clone(self.0.lock().entry(peer).or_default());
        let head = line.try_lock_until(deadline);
        let answer = head.map(|_head| request());
        let mut lines = self.0.lock();
        let is_last = Arc::strong_count(&line) == 2; // ours and that of the map
        if is_last {
            lines.remove(&peer);
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn one_request_of_a_user_runs_at_a_time() {
        let lines = Lines::default();
        let soon = || Instant::now() + Duration::from_millis(20);
        let [one, other, unknown] = [Some(1), Some(2), None].map(Peer);
        let nested = |peer| lines.at_the_head(peer, soon(), || ());
        let inner = lines.at_the_head(one, soon(), || [one, other, unknown].map(nested));
        assert_eq!(inner, Some([None, Some(()), Some(())]));
        assert_eq!(nested(one), Some(()));
        assert!(lines.0.lock().is_empty());
    }
}
