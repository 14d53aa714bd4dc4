//! Sessions of HTTP clients: what a connection is to other clients, without a connection.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Shutdown};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::latchd::arbiter::{Arbiter, ClientSocket, Seat};
use crate::latchd::table::{AtClose, ConnId};
use crate::os::random;
use crate::os::stream::Stream;
use crate::shared::net::permits::{Permit, PermitCap, Permits};
use crate::wire::token::Grant;

/// The time after which the client of an idle session should show that it is there.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// A session that is idle for so long is over.
const ENDS_AFTER: Duration = Duration::from_secs(2 * IDLE_TIMEOUT.as_secs());

/// The sessions of a server.
pub(super) struct Sessions {
    permits: Arc<Permits>,
    open: Mutex<HashMap<SessionId, OpenSession>>,
    /// Notified when the last request of a session that ends is over.
    one_is_free: Condvar,
}

struct OpenSession {
    seat: Seat,
    /// The requests that are under way.
    requests: Vec<ConnId>,
    /// When the last request was over.
    idle_since: Instant,
    /// The client has ended the session, whose requests are not over yet.
    is_ending: bool,
    _permit: Permit,
}

/// The name of a session: 128 random bits, written as 32 hex digits. Whoever knows it can use the
/// session. The map finds it by its hash, which is keyed, so the time of a search tells nothing of
/// the names that are there.
type SessionId = u128;

/// Why there is no new session.
#[derive(Debug)]
pub(super) enum NoSession {
    Full(PermitCap),
    /// The system has no random numbers.
    NoSecret(io::Error),
}

/// A request of a session. The session is not idle until this is dropped.
pub(super) struct SessionRequest<'a> {
    sessions: &'a Sessions,
    id: SessionId,
    request: ConnId,
    /// `None` only while this is being dropped.
    seat: Option<Seat>,
}

impl Sessions {
    /// Allows at most `max` sessions, of which each address may have at most `max_per_address`.
    pub(super) fn new(max: usize, max_per_address: Option<usize>) -> Sessions {
        Sessions {
            permits: Permits::new(max, max_per_address),
            open: Mutex::default(),
            one_is_free: Condvar::new(),
        }
    }

    /// Opens a session for a client at `address`, which operators see as `peer`, and returns its
    /// name. The number `conn` must never have been used before.
    pub(super) fn open(
        &self,
        arbiter: &Arc<Arbiter>,
        conn: ConnId,
        address: Option<IpAddr>,
        peer: String,
        now: Instant,
    ) -> Result<String, NoSession> {
        let permit = self.permits.take(address).map_err(NoSession::Full)?;
        let mut id = [0; 16];
        random::fill(&mut id).map_err(NoSession::NoSecret)?;
        let id = SessionId::from_be_bytes(id);
        let session = OpenSession {
            seat: arbiter.connect(conn, Some(Arc::new(HttpClient { peer, stream: None }))),
            requests: Vec::new(),
            idle_since: now,
            is_ending: false,
            _permit: permit,
        };
        self.open.lock().insert(id, session);
        Ok(format!("{id:032x}"))
    }

    /// Whether the grants of this connection are those of a session.
    pub(super) fn is_one(&self, conn: ConnId) -> bool {
        let open = self.open.lock();
        open.values().any(|session| session.seat.id() == conn)
    }

    /// Begins a request of a session; `None` if the session is unknown or over. The request has the
    /// number `request`, which must never have been used before, and comes from `socket`.
    pub(super) fn enter(
        &self,
        id: &str,
        request: ConnId,
        socket: Arc<dyn ClientSocket>,
    ) -> Option<SessionRequest<'_>> {
        let mut open = self.open.lock();
        let (id, session) = find(&mut open, id)?;
        session.requests.push(request);
        Some(SessionRequest {
            sessions: self,
            id,
            request,
            seat: Some(session.seat.beside(request, socket)),
        })
    }

    /// Ends a session. Its waiting requests end, and what it holds is released. Blocks until its
    /// requests are over. Returns whether there was such a session.
    pub(super) fn end(&self, id: &str) -> bool {
        let mut open = self.open.lock();
        let Some((id, session)) = find(&mut open, id) else {
            return false;
        };
        session.is_ending = true;
        for request in &session.requests {
            session.seat.arbiter().hang_up(*request);
        }
        while open.get(&id).is_some_and(|it| !it.requests.is_empty()) {
            self.one_is_free.wait(&mut open);
        }
        let session = open.remove(&id);
        // What it holds is released without the mutex, because that may take a while.
        drop(open);
        if let Some(session) = session {
            session.seat.leave(AtClose::ReleaseAsAsked);
        }
        true
    }

    /// Ends the sessions that have been idle for too long, and releases what they hold: their
    /// clients know this time. Returns when the next one may have to end.
    pub(super) fn end_idle(&self, now: Instant) -> Option<Instant> {
        let mut open = self.open.lock();
        let ends_at = |session: &OpenSession| {
            let is_idle = session.requests.is_empty() && !session.is_ending;
            is_idle.then_some(session.idle_since + ENDS_AFTER)
        };
        let is_over = |session: &OpenSession| ends_at(session).is_some_and(|at| at <= now);
        let over = open.iter().filter(|(_, session)| is_over(session));
        let ids: Vec<SessionId> = over.map(|(id, _)| *id).collect();
        let ended: Vec<_> = ids.iter().map(|id| open.remove(id)).collect();
        let next = open.values().filter_map(ends_at).min();
        drop(open);
        for session in ended.into_iter().flatten() {
            session.seat.leave(AtClose::Release);
        }
        next
    }
}

/// The session with this name, unless it is ending.
fn find<'a>(
    open: &'a mut HashMap<SessionId, OpenSession>,
    id: &str,
) -> Option<(SessionId, &'a mut OpenSession)> {
    let number = SessionId::from_str_radix(id, 16).ok();
    let id = number.filter(|number| format!("{number:032x}") == id)?;
    let session = open.get_mut(&id)?;
    (!session.is_ending).then_some((id, session))
}

impl SessionRequest<'_> {
    pub(super) fn seat(&self) -> &Seat {
        self.seat.as_ref().expect("it is not being dropped")
    }

    /// Whether the client has ended the session.
    pub(super) fn is_ending(&self) -> bool {
        let open = self.sessions.open.lock();
        open.get(&self.id).is_some_and(|session| session.is_ending)
    }
}

impl Drop for SessionRequest<'_> {
    fn drop(&mut self) {
        // The seat of the session must be the last one of it.
        drop(self.seat.take());
        let mut open = self.sessions.open.lock();
        let Some(session) = open.get_mut(&self.id) else {
            return;
        };
        session.requests.retain(|request| *request != self.request);
        session.idle_since = Instant::now();
        let is_awaited = session.is_ending && session.requests.is_empty();
        drop(open);
        if is_awaited {
            self.sessions.one_is_free.notify_all();
        }
    }
}

/// The client of a request, or of a session between its requests, as the threads of other clients
/// see it.
pub(super) struct HttpClient {
    pub(super) peer: String,
    /// `None` between the requests of a session, which ends only when its client ends it or is
    /// silent.
    pub(super) stream: Option<Arc<Stream>>,
}

impl ClientSocket for HttpClient {
    fn peer(&self) -> String {
        self.peer.clone()
    }

    /// An answer is not a line, so the request's own thread sends it.
    fn send_grant(&self, _: Grant) -> bool {
        false
    }

    fn has_hung_up(&self) -> bool {
        self.stream.as_ref().is_some_and(|it| it.has_hung_up())
    }

    fn shut_down(&self) {
        if let Some(stream) = &self.stream {
            stream.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latchd::arbiter::Rules;
    use crate::latchd::fence::source::{ClockFences, Salts};
    use crate::latchd::table::{Answer, Ask, Caps};
    use crate::wire::terms::{Kind, Limit};

    const MINUTE: Duration = Duration::from_secs(60);

    fn arbiter() -> Arc<Arbiter> {
        let rules = Rules {
            caps: Caps {
                max_locks: 9,
                max_grants: 9,
                max_per_connection: 9,
                max_waiters: None,
                max_waiters_total: 9,
                max_kept: 9,
                max_keep_time: MINUTE,
                max_hold: Duration::MAX,
            },
            gc_interval: MINUTE,
            gc_max_idle: MINUTE,
        };
        let salts = Salts::new().expect("the kernel has randomness");
        let fences = Box::new(ClockFences::starting_at(1));
        Arc::new(Arbiter::new(&rules, fences, salts))
    }

    fn open(sessions: &Sessions, arbiter: &Arc<Arbiter>, conn: u64, now: Instant) -> String {
        let opened = sessions.open(arbiter, ConnId(conn), None, "here".into(), now);
        opened.expect("there is room")
    }

    fn client() -> Arc<dyn ClientSocket> {
        Arc::new(HttpClient {
            peer: "here".into(),
            stream: None,
        })
    }

    #[test]
    fn an_idle_session_ends_and_frees_what_it_holds() {
        let (arbiter, sessions) = (arbiter(), Sessions::new(9, None));
        let began = Instant::now();
        let id = open(&sessions, &arbiter, 1, began);
        let request = sessions
            .enter(&id, ConnId(2), client())
            .expect("it is open");
        let ask = Ask::plain("k", Kind::Lock, Limit::ONE, MINUTE);
        assert!(matches!(
            request.seat().acquire(&ask),
            Ok(Answer::Granted(_))
        ));
        // A session is never idle while a request is under way.
        assert_eq!(sessions.end_idle(began + 9 * MINUTE), None);
        drop(request);
        let ends_at = sessions.end_idle(began).expect("it is idle");
        assert!(ends_at >= began + ENDS_AFTER);
        assert_eq!(
            sessions.end_idle(ends_at - Duration::from_millis(1)),
            Some(ends_at)
        );
        let other = arbiter.connect(ConnId(4), None);
        assert_eq!(other.try_acquire(&ask), Ok(Answer::WouldWait));
        assert_eq!(sessions.end_idle(ends_at), None);
        assert!(matches!(other.try_acquire(&ask), Ok(Answer::Granted(_))));
        assert_eq!(arbiter.seat_count(), 1);
        assert!(sessions.enter(&id, ConnId(3), client()).is_none());
    }

    #[test]
    fn only_the_whole_name_of_a_session_opens_it() {
        let (arbiter, sessions) = (arbiter(), Sessions::new(9, None));
        let id = open(&sessions, &arbiter, 7, Instant::now());
        assert_eq!(id.len(), 32, "the pattern of dflockd's description");
        let mut number = 7;
        let mut is_known = |id: &str| {
            number += 1;
            sessions.enter(id, ConnId(number), client()).is_some()
        };
        assert!(is_known(&id));
        for at in 0..id.len() {
            let other = if id.as_bytes()[at] == b'0' { "1" } else { "0" };
            let mut forged = id.clone();
            forged.replace_range(at..=at, other);
            assert!(!is_known(&forged), "{forged}");
        }
        for forged in ["", &id[1..], &id.to_uppercase(), &format!("+{}", &id[1..])] {
            // A name without letters is its own upper case.
            assert!(!is_known(forged) || forged == id, "{forged}");
        }
    }

    #[test]
    fn the_number_of_sessions_is_capped_until_one_ends() {
        let (arbiter, sessions) = (arbiter(), Sessions::new(1, None));
        let now = Instant::now();
        let id = open(&sessions, &arbiter, 1, now);
        let full = sessions.open(&arbiter, ConnId(2), None, String::new(), now);
        assert!(matches!(full, Err(NoSession::Full(PermitCap::Total))));
        assert!(sessions.end(&id));
        assert!(!sessions.end(&id));
        open(&sessions, &arbiter, 3, now);
    }
}
