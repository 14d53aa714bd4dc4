//! The connections of each user: one user must not shut out the others.

use std::collections::HashMap;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::log::Throttle;
use crate::net::connections::Admission;

use super::peer::Peer;

/// The smallest share of one user.
const MIN_SHARE: usize = 8;

/// A connection on which no command has arrived for so long may be closed in favour of a new one. A
/// client that has just been greeted needs a moment for its command.
const IDLE: Duration = Duration::from_secs(5);

/// The share of one user in `count` places: a quarter.
pub fn share_of(count: usize) -> usize {
    (count / 4).max(MIN_SHARE)
}

/// The places for connections, with a cap on all and on those of one user.
#[derive(Debug)]
pub struct Places {
    max_places: usize,
    /// By the number of the connection.
    taken: Mutex<HashMap<u64, Occupant>>,
    refusals: Throttle,
}

#[derive(Debug)]
struct Occupant {
    peer: Peer,
    active_at: Instant,
    admission: Arc<Admission>,
}

/// A connection's place; dropping it frees the place.
#[derive(Debug)]
pub struct OccupiedPlace {
    places: Arc<Places>,
    id: u64,
}

impl Places {
    pub fn new(max_places: usize) -> Places {
        Places {
            max_places,
            taken: Mutex::default(),
            refusals: Throttle::default(),
        }
    }

    /// Gives a place to a connection of `peer`. If that user has its share, or all places are
    /// taken, it closes the connection that has been idle for longest, of this user or of any.
    /// `None` if none has been idle for long. Peers whose user is unknown count as one user.
    pub fn take(
        self: &Arc<Places>,
        peer: Peer,
        admission: &Arc<Admission>,
    ) -> Option<OccupiedPlace> {
        let mut taken = self.taken.lock();
        let is_peers = |occupant: &Occupant| occupant.peer == peer;
        let own_count = taken.values().filter(|occupant| is_peers(occupant)).count();
        let has_room = (own_count < share_of(self.max_places) || close_idle(&mut taken, is_peers))
            && (taken.len() < self.max_places || close_idle(&mut taken, |_| true));
        if !has_room {
            self.refusals
                .warn(format_args!("turned-away reason=no-place {peer}"));
            return None;
        }
        let occupant = Occupant {
            peer,
            active_at: Instant::now(),
            admission: Arc::clone(admission),
        };
        taken.insert(admission.id, occupant);
        Some(OccupiedPlace {
            places: Arc::clone(self),
            id: admission.id,
        })
    }
}

/// Closes the connection that has been idle for longest among the `eligible`, if that is long
/// enough. Its place is free at once.
fn close_idle(taken: &mut HashMap<u64, Occupant>, eligible: impl Fn(&Occupant) -> bool) -> bool {
    let idlest = taken
        .iter()
        .filter(|(_, occupant)| eligible(occupant))
        .min_by_key(|(_, occupant)| occupant.active_at)
        .filter(|(_, occupant)| occupant.active_at.elapsed() >= IDLE)
        .map(|(id, _)| *id);
    let closed = idlest.and_then(|id| taken.remove(&id));
    if let Some(closed) = &closed {
        closed.admission.stream.shutdown(Shutdown::Both);
    }
    closed.is_some()
}

impl OccupiedPlace {
    /// Notes that a command has arrived.
    pub fn touch(&self) {
        if let Some(occupant) = self.places.taken.lock().get_mut(&self.id) {
            occupant.active_at = Instant::now();
        }
    }
}

impl Drop for OccupiedPlace {
    fn drop(&mut self) {
        self.places.taken.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::connections::Connections;
    use crate::net::stream::Stream;
    use std::os::unix::net::UnixStream;

    const USER: Peer = Peer(Some(1));
    const OTHER: Peer = Peer(Some(2));

    /// So many places, and a way to take them.
    fn places(count: usize) -> (Arc<Places>, impl Fn(Peer) -> Option<OccupiedPlace>) {
        let connections = Arc::new(Connections::new(64, None, b""));
        let places = Arc::new(Places::new(count));
        let taken_from = Arc::clone(&places);
        let take = move |peer| {
            let (ours, _theirs) = UnixStream::pair().expect("a socket pair");
            let admission = connections.admit(|| Ok(Stream::Unix(ours)));
            let admission = admission.expect("a connection").expect("room");
            taken_from.take(peer, &Arc::new(admission))
        };
        (places, take)
    }

    /// Has a connection be silent for the time that makes it idle, and so many seconds more.
    fn silence(places: &Places, place: Option<&OccupiedPlace>, more: u64) {
        let mut taken = places.taken.lock();
        let occupant = place.and_then(|place| taken.get_mut(&place.id));
        let active_at = &mut occupant.expect("it has its place").active_at;
        *active_at -= IDLE + Duration::from_secs(more);
    }

    #[test]
    fn peers_that_have_hung_up_get_the_share_of_one_user() {
        let (_, take) = places(32);
        let unknown: Vec<_> = (0..12).map(|_| take(Peer(None))).collect();
        assert_eq!(unknown.iter().flatten().count(), share_of(32));
        assert!(take(USER).is_some());
    }

    #[test]
    fn a_user_gets_a_quarter_of_the_places_but_eight_where_few() {
        for (count, share) in [(1, 8), (32, 8), (40, 10), (256, 64), (1024, 256)] {
            assert_eq!(share_of(count), share, "{count}");
        }
        let (_, take) = places(40);
        let of_user: Vec<_> = (0..12).map(|_| take(USER)).collect();
        assert_eq!(of_user.iter().flatten().count(), 10);
        assert!(take(OTHER).is_some());
        let (_, take) = places(4);
        let of_user: Vec<_> = (0..6).map(|_| take(USER)).collect();
        assert_eq!(of_user.iter().flatten().count(), 4);
        assert!(take(OTHER).is_none());
    }

    #[test]
    fn a_user_at_its_share_replaces_its_own_idlest_connection() {
        let (places, take) = places(32);
        let of_other = take(OTHER);
        let of_user: Vec<_> = (0..8).map(|_| take(USER)).collect();
        let has_place = |place: &Option<OccupiedPlace>| {
            let id = place.as_ref().map(|place| place.id);
            id.is_some_and(|id| places.taken.lock().contains_key(&id))
        };
        silence(&places, of_other.as_ref(), 9);
        assert!(take(USER).is_none());
        silence(&places, of_user[2].as_ref(), 1);
        silence(&places, of_user[5].as_ref(), 2);
        silence(&places, of_user[6].as_ref(), 3);
        of_user[6].as_ref().expect("it has its place").touch();
        let next = take(USER);
        assert!(has_place(&next) && has_place(&of_other));
        let left: Vec<bool> = of_user.iter().map(has_place).collect();
        let expected = [true, true, true, true, true, false, true, true];
        assert_eq!(left, expected);
    }
}
