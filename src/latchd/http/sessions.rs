//! Sessions of HTTP clients: what a connection is to other clients, without a connection.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::arbiter::{Arbiter, ClientSocket, Seat};
use crate::latchd::rights::Rights;
use crate::net::permits::{Permit, PermitCap, Permits};
use crate::sys::{random, secret};
use crate::table::ConnId;
use crate::token::Grant;

/// The time after which the client of an idle session should show that it is there.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// A session that is idle for so long is over.
const ENDS_AFTER: Duration = Duration::from_secs(2 * IDLE_TIMEOUT.as_secs());

/// The sessions of a server.
pub(super) struct Sessions {
    permits: Arc<Permits>,
    open: Mutex<BTreeMap<ConnId, OpenSession>>,
    /// Notified when the last request of a session that ends is over.
    one_is_free: Condvar,
}

struct OpenSession {
    secret: Secret,
    /// The rights of the client that has opened it. A client with other rights cannot use it.
    rights: Rights,
    seat: Seat,
    /// The requests that are under way.
    requests: Vec<ConnId>,
    /// When the last request was over.
    idle_since: Instant,
    /// The client has ended the session, whose requests are not over yet.
    is_ending: bool,
    _permit: Permit,
}

/// What makes the name of a session unguessable: 128 random bits.
type Secret = [u8; 16];

/// The name of a session: its number as a connection, and its secret.
#[derive(Clone, Copy)]
pub(super) struct SessionId {
    conn: ConnId,
    secret: Secret,
}

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
    id: ConnId,
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

    /// Opens a session for a client at `address`, which operators see as `peer`. The number `conn`
    /// must never have been used before.
    pub(super) fn open(
        &self,
        arbiter: &Arc<Arbiter>,
        rights: &Rights,
        conn: ConnId,
        address: Option<IpAddr>,
        peer: String,
        now: Instant,
    ) -> Result<SessionId, NoSession> {
        let permit = self.permits.take(address).map_err(NoSession::Full)?;
        let mut secret = Secret::default();
        random::fill(&mut secret).map_err(NoSession::NoSecret)?;
        let session = OpenSession {
            secret,
            rights: rights.clone(),
            seat: arbiter.connect(conn, Some(Arc::new(SessionClient(peer)))),
            requests: Vec::new(),
            idle_since: now,
            is_ending: false,
            _permit: permit,
        };
        self.open.lock().insert(conn, session);
        Ok(SessionId { conn, secret })
    }

    /// Begins a request of a session; `None` if the session is unknown or over, or of a client with
    /// other rights. The request has the number `request`, which must never have been used before,
    /// and comes from `socket`.
    pub(super) fn enter(
        &self,
        id: &str,
        rights: &Rights,
        request: ConnId,
        socket: Arc<dyn ClientSocket>,
    ) -> Option<SessionRequest<'_>> {
        let mut open = self.open.lock();
        let (conn, session) = find(&mut open, id, rights)?;
        session.requests.push(request);
        Some(SessionRequest {
            sessions: self,
            id: conn,
            request,
            seat: Some(session.seat.beside(request, socket)),
        })
    }

    /// Ends a session. Its waiting requests end, and what it holds is released. Blocks until its
    /// requests are over. Returns whether there was such a session.
    pub(super) fn end(&self, id: &str, rights: &Rights) -> bool {
        let mut open = self.open.lock();
        let Some((conn, session)) = find(&mut open, id, rights) else {
            return false;
        };
        session.is_ending = true;
        for request in &session.requests {
            session.seat.arbiter().hang_up(*request);
        }
        while open.get(&conn).is_some_and(|it| !it.requests.is_empty()) {
            self.one_is_free.wait(&mut open);
        }
        let session = open.remove(&conn);
        // What it holds is released without the mutex, because that may take a while.
        drop(open);
        if let Some(session) = session {
            session.seat.release_all();
        }
        true
    }

    /// Ends the sessions that have been idle for too long. Returns when the next one may have to
    /// end.
    pub(super) fn end_idle(&self, now: Instant) -> Option<Instant> {
        let mut open = self.open.lock();
        let ends_at = |session: &OpenSession| {
            let is_idle = session.requests.is_empty() && !session.is_ending;
            is_idle.then_some(session.idle_since + ENDS_AFTER)
        };
        let is_over = |session: &OpenSession| ends_at(session).is_some_and(|at| at <= now);
        let over = open.iter().filter(|(_, session)| is_over(session));
        let conns: Vec<ConnId> = over.map(|(conn, _)| *conn).collect();
        let ended: Vec<_> = conns.iter().map(|conn| open.remove(conn)).collect();
        let next = open.values().filter_map(ends_at).min();
        drop(open);
        drop(ended);
        next
    }
}

/// The session with this name, unless it is ending or of a client with other rights.
fn find<'a>(
    open: &'a mut BTreeMap<ConnId, OpenSession>,
    id: &str,
    rights: &Rights,
) -> Option<(ConnId, &'a mut OpenSession)> {
    let SessionId { conn, secret } = SessionId::parse(id)?;
    let session = open.get_mut(&conn)?;
    let is_meant = secret::is_same(&session.secret, &secret) && !session.is_ending;
    (is_meant && session.rights == *rights).then_some((conn, session))
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

impl SessionId {
    /// The number of hex digits of the number, which come first, and of the secret.
    const DIGITS: [usize; 2] = [16, 32];

    fn parse(text: &str) -> Option<SessionId> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let [number_len, secret_len] = Self::DIGITS;
        if text.len() != number_len + secret_len || !text.bytes().all(is_digit) {
            return None;
        }
        let (number, secret) = text.split_at(number_len);
        let secret = u128::from_str_radix(secret, 16).ok()?;
        Some(SessionId {
            conn: ConnId(u64::from_str_radix(number, 16).ok()?),
            secret: secret.to_be_bytes(),
        })
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secret = u128::from_be_bytes(self.secret);
        write!(f, "{:016x}{secret:032x}", self.conn.0)
    }
}

/// The client of a session, between its requests.
struct SessionClient(String);

impl ClientSocket for SessionClient {
    fn peer(&self) -> String {
        self.0.clone()
    }

    /// The thread of the request that waits sends the answer.
    fn send_grant(&self, _: Grant) -> bool {
        false
    }

    fn has_hung_up(&self) -> bool {
        false
    }

    /// A session ends only when its client ends it or is silent.
    fn shut_down(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arbiter::Rules;
    use crate::fence::source::{ClockFences, Salts};
    use crate::table::{Answer, Ask, Caps, Holdings};
    use crate::terms::{Kind, Limit};

    const ALL: Rights = Rights::UNLIMITED;
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
            holdings: Holdings::Release,
            gc_interval: MINUTE,
            gc_max_idle: MINUTE,
        };
        let salts = Salts::new().expect("the kernel has randomness");
        let fences = Box::new(ClockFences::starting_at(1));
        Arc::new(Arbiter::new(&rules, fences, salts))
    }

    fn open(sessions: &Sessions, arbiter: &Arc<Arbiter>, conn: u64, now: Instant) -> String {
        let opened = sessions.open(arbiter, &ALL, ConnId(conn), None, "here".into(), now);
        opened.expect("there is room").to_string()
    }

    fn client() -> Arc<dyn ClientSocket> {
        Arc::new(SessionClient("here".into()))
    }

    #[test]
    fn an_idle_session_ends_and_frees_what_it_holds() {
        let (arbiter, sessions) = (arbiter(), Sessions::new(9, None));
        let began = Instant::now();
        let id = open(&sessions, &arbiter, 1, began);
        let request = sessions
            .enter(&id, &ALL, ConnId(2), client())
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
        assert!(sessions.enter(&id, &ALL, ConnId(3), client()).is_none());
    }

    #[test]
    fn only_the_whole_name_of_a_session_opens_it() {
        let (arbiter, sessions) = (arbiter(), Sessions::new(9, None));
        let id = open(&sessions, &arbiter, 7, Instant::now());
        let mut number = 7;
        let mut is_known = |id: &str| {
            number += 1;
            sessions.enter(id, &ALL, ConnId(number), client()).is_some()
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
    fn a_session_is_for_clients_with_its_rights() {
        let (arbiter, sessions) = (arbiter(), Sessions::new(9, None));
        let id = open(&sessions, &arbiter, 1, Instant::now());
        let other = Rights::parse("use *").expect("a right");
        assert!(sessions.enter(&id, &other, ConnId(2), client()).is_none());
        assert!(!sessions.end(&id, &other));
        assert!(sessions.enter(&id, &ALL, ConnId(3), client()).is_some());
    }

    #[test]
    fn the_number_of_sessions_is_capped_until_one_ends() {
        let (arbiter, sessions) = (arbiter(), Sessions::new(1, None));
        let now = Instant::now();
        let id = open(&sessions, &arbiter, 1, now);
        let full = sessions.open(&arbiter, &ALL, ConnId(2), None, String::new(), now);
        assert!(matches!(full, Err(NoSession::Full(PermitCap::Total))));
        assert!(sessions.end(&id, &ALL));
        assert!(!sessions.end(&id, &ALL));
        open(&sessions, &arbiter, 3, now);
    }
}
