//! The HTTP door: health, metrics, statistics and a page that shows them, and, if the operator
//! wants that, locks. See latchd-http(7).
//!
//! The door has its own limits of connections, so that its clients cannot keep other clients from
//! their locks. Each connection gets one answer, within a time limit, unless it waits for a lock.

mod answer;
mod body;
mod changes;
mod host_names;
mod openapi;
#[cfg(any(test, fuzzing))]
#[path = "tests/pieces.rs"]
pub(crate) mod pieces;
mod recent_samples;
mod reply;
mod request;
mod routes;
mod sessions;

use std::io::{self, Read};
use std::net::{IpAddr, Shutdown};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use log::debug;

use super::auth::rights::Rights;
use super::context::{SessionRules, AUTH_COOLDOWN, CLOSING_TIME};
use super::start::listen_host::ListenHost;
use super::statistics::PAGE_LEN;
use crate::latchd::arbiter::Arbiter;
use crate::latchd::cluster::ClusterNode;
use crate::os::event::time_left;
use crate::os::memory::{self, Purpose};
use crate::os::secret::SEE;
use crate::os::stream::Stream;
use crate::os::tls::Certificate;
use crate::shared::daemon::{self, no_thread};
use crate::shared::net::connections::{Admission, Connections};
use crate::shared::net::listener::{accept_from_all, Listener};
use crate::shared::net::permits::Permits;
use crate::shared::net::workers::Workers;
use answer::{refuse_full, HttpAnswer, Sent, ANSWER_TIME, FULL, INVITATION};
pub(super) use changes::ChangeCaps;
use changes::{refuse_right, HttpChanges};
use recent_samples::RecentSamples;
use reply::{HttpReply, JSON};
use request::{Arrived, HttpRequest, RequestInput, MAX_FRAMED_LEN, MAX_HEAD_LEN};
use routes::{Resource, Route};

/// The maximum number of connections at once that look at something.
const MAX_CONNECTIONS: usize = 16;
/// The maximum number of them from one address.
const MAX_PER_ADDRESS: usize = 8;

/// How long a request may take to arrive.
const REQUEST_TIME: Duration = Duration::from_secs(5);

/// The maximum number of connections over these limits that are told so at once. More are closed.
const MAX_REFUSED: usize = 16;

/// The maximum number of connections at once that change something and do not wait, and of those
/// whose requests have not arrived yet.
const MAX_CHANGING: usize = 16;

/// The maximum number of threads of the door, without those for requests that wait: those for its
/// other connections, one that keeps the history, and one that watches for hang-ups.
pub(super) const MAX_THREADS: usize = MAX_CONNECTIONS + MAX_CHANGING + MAX_REFUSED + 2;

/// How long a client that is told so may take to read it.
const REFUSAL_TIME: Duration = Duration::from_secs(1);

/// Where the door will listen, and the names by which clients may address this server there.
#[derive(Debug)]
pub(super) struct HttpAddresses {
    pub(super) places: Vec<(ListenHost, u16)>,
    pub(super) names: Vec<String>,
}

/// The listening sockets of the door, before it answers requests.
pub(super) struct HttpServer {
    listeners: Arc<[Listener]>,
    /// The host names by which clients may address this server.
    names: Vec<String>,
}

/// Answers the requests at the door.
struct Guide {
    arbiter: Arc<Arbiter>,
    rules: Arc<SessionRules>,
    names: Vec<String>,
    history: Arc<RecentSamples>,
    /// Permits for requests that look at something.
    permits: Arc<Permits>,
    /// `None` if nothing can be changed over HTTP.
    changes: Option<Arc<HttpChanges>>,
}

impl HttpServer {
    /// Listens at all places, if there are any. If there is a certificate, the door speaks TLS with
    /// it.
    pub(super) fn bind(
        places: Option<HttpAddresses>,
        certificate: Option<&Arc<Certificate>>,
    ) -> Result<Option<HttpServer>, String> {
        let Some(HttpAddresses { places, mut names }) = places else {
            return Ok(None);
        };
        let (mut listeners, mut bound) = (Vec::new(), Vec::new());
        for (host, port) in places {
            let mut addresses = host.addresses(port)?;
            // Two names may have an address in common.
            addresses.retain(|address| port == 0 || !bound.contains(address));
            listeners.extend(daemon::listen(&addresses, None, 0, None)?);
            bound.extend(addresses);
        }
        let with_tls = |listener: Listener| match certificate {
            Some(certificate) => listener.with_tls(Arc::clone(certificate)),
            None => listener,
        };
        names.extend(host_names::of_this_host());
        // A request without a host name must not match an empty one.
        names.retain(|name| !name.is_empty());
        Ok(Some(HttpServer {
            listeners: listeners.into_iter().map(with_tls).collect(),
            names,
        }))
    }

    /// An address of the door that other hosts can reach, if there is one.
    pub(super) fn exposed(&self) -> Option<IpAddr> {
        let mut addrs = self.listeners.iter().filter_map(Listener::tcp_addr);
        let is_exposed = |ip: &IpAddr| !ip.to_canonical().is_loopback();
        addrs.find_map(|addr| Some(addr.ip()).filter(is_exposed))
    }

    /// Starts the threads that answer. They run until the process ends. With `caps`, clients can
    /// also change something; the connections are then returned, whose numbers are not among those
    /// of `others`.
    pub(super) fn open(
        self,
        arbiter: &Arc<Arbiter>,
        rules: &Arc<SessionRules>,
        caps: Option<ChangeCaps>,
        others: &Connections,
    ) -> Result<Option<Arc<Connections>>, String> {
        let connections = Arc::new(connections(caps, others));
        let changes = caps
            .map(|caps| HttpChanges::new(arbiter, rules, &connections, caps))
            .transpose()
            .map_err(daemon::cannot("watch for hang-ups"))?
            .map(Arc::new);
        let guide = Arc::new(Guide {
            arbiter: Arc::clone(arbiter),
            rules: Arc::clone(rules),
            names: self.names,
            history: Arc::default(),
            permits: Permits::new(MAX_CONNECTIONS, Some(MAX_PER_ADDRESS)),
            changes: changes.clone(),
        });
        if let Some(changes) = &changes {
            let changes = Arc::clone(changes);
            daemon::spawn("http-hangup", move || changes.act_on_hangups())?;
        }
        let housekeeper = Arc::clone(&guide);
        daemon::spawn("http-history", move || housekeeper.run_housekeeping())?;
        let workers = Workers::new(move |admission| match admission.exceeds {
            None => guide.serve(&admission),
            Some(_) => refuse(&admission.stream),
        });
        accept_from_all("http", &self.listeners, &connections, &workers).map_err(no_thread)?;
        Ok(changes.map(|_| connections))
    }
}

/// The connections of a door. Those that change something come on top of the others, because only
/// a request tells which is which.
fn connections(caps: Option<ChangeCaps>, others: &Connections) -> Connections {
    let connections = match caps {
        None => Connections::new(MAX_CONNECTIONS, Some(MAX_PER_ADDRESS), FULL),
        Some(caps) => {
            let with_others = |max: usize| max.saturating_add(MAX_CONNECTIONS);
            let max = with_others(caps.max_waiting).saturating_add(MAX_CHANGING);
            // Without a cap, one address could keep all others out, even by silence.
            let unless_capped = max - MAX_CONNECTIONS;
            let max_per_address = caps.max_per_address.map_or(unless_capped, with_others);
            Connections::new(max, Some(max_per_address), FULL)
        }
    };
    let connections = connections.admitting_refused(MAX_REFUSED);
    connections.numbered_with(others)
}

/// Tells a client that there are too many connections. Does not close before the client has read
/// that, because the close would reset the connection if the client still sent its request.
fn refuse(stream: &Stream) {
    if refuse_full(stream).is_ok() {
        stream.shutdown(Shutdown::Write);
        stream.discard_for(REFUSAL_TIME);
    }
}

impl Guide {
    /// Takes a sample now and then, and ends idle sessions, until the process ends. A standby has
    /// nothing to count.
    fn run_housekeeping(&self) {
        let mut sample_at = Instant::now();
        loop {
            let now = Instant::now();
            if sample_at <= now {
                let node = self.rules.node.as_deref();
                if node.is_none_or(ClusterNode::is_active) {
                    let (_, snapshot) = self.arbiter.counters();
                    self.history.note(&snapshot, now);
                }
                sample_at = now + recent_samples::INTERVAL;
            }
            // A session that is opened or used during the sleep ends later than the next sample.
            let changes = self.changes.as_ref();
            let ends_at = changes.and_then(|changes| changes.sessions.end_idle(now));
            let look_at = ends_at.map_or(sample_at, |at| at.min(sample_at));
            thread::sleep(time_left(look_at));
        }
    }

    /// Answers one request. Closes so that the client can still read the answer.
    fn serve(&self, admission: &Admission) {
        let stream = &*admission.stream;
        let Some(asked) = self.read(stream) else {
            return;
        };
        let path = asked.request.as_ref().map(|request| request.route.path);
        let path = path.map_err(|refusal| refusal.status);
        debug!("http peer={stream} asked={path:?}");
        let answer = HttpAnswer::new(stream, asked.is_head, self.changes.is_some());
        let sent = match asked.request {
            Ok(request) => self.answer(&request, admission, &answer),
            Err(refusal) => answer.send(&refusal),
        };
        if sent.is_ok() {
            stream.shutdown(Shutdown::Write);
            stream.discard_for(CLOSING_TIME);
        }
    }

    /// Reads a request; `None` if the client does not send one in time.
    fn read(&self, stream: &Stream) -> Option<Arrived> {
        let secret_len = self.rules.max_token_len();
        // A secret in Base64 has four bytes for every three.
        let max_len = MAX_HEAD_LEN + 2 * secret_len;
        let _reservation = memory::reserve(2 * (max_len + MAX_FRAMED_LEN), Purpose::Newcomer)?;
        let due = Instant::now() + REQUEST_TIME;
        request::read(
            max_len,
            self.changes.is_some(),
            &mut ArrivingRequest { stream, due },
        )
    }

    fn answer(
        &self,
        request: &HttpRequest,
        admission: &Admission,
        answer: &HttpAnswer<'_>,
    ) -> Sent {
        let route = request.route;
        if let Some(needed) = route.needs {
            // With a secret, a page of another host cannot read or change anything.
            if self.rules.auth_tokens.is_none() && !request.is_for(&self.names) {
                return answer.send(&HttpReply::other_name());
            }
            let Some(rights) = self.rights_of(request, answer.stream) else {
                return answer.send(&HttpReply::ask_for_secret());
            };
            if rights.permit(&needed, || false).is_none() {
                return answer.send(&refuse_right(&self.rules, &needed, SEE, answer.stream));
            }
            if let (Some(changes), true) = (&self.changes, route.is_change()) {
                return changes.serve(request, &rights, admission, answer);
            }
        }
        self.show_with_permit(route, answer)
    }

    /// Shows something, unless too many clients look at something already.
    fn show_with_permit(&self, route: &Route, answer: &HttpAnswer<'_>) -> Sent {
        let Ok(_permit) = self.permits.take(answer.stream.source()) else {
            return refuse_full(answer.stream);
        };
        answer.send(&match route.resource {
            Resource::Health => HttpReply::state(None),
            Resource::Ready => HttpReply::state(self.why_not_ready()),
            Resource::File(bytes) => HttpReply::whole(route.answer.0, bytes),
            Resource::OpenApi => HttpReply::whole(JSON, openapi::describe(self.changes.is_some())),
            _ => return self.show_statistics(route, answer),
        })
    }

    /// The rights of the client; `None` if the server has a secret and the request does not. A
    /// request without any secret is not logged, because a browser always tries that first.
    fn rights_of(&self, request: &HttpRequest, stream: &Stream) -> Option<Rights> {
        let Some(tokens) = &self.rules.auth_tokens else {
            return Some(Rights::UNLIMITED);
        };
        let given = request.secret.as_ref()?;
        let rights = tokens.rights_of(given, true);
        if rights.is_none() {
            let refusals = &self.rules.auth_refusals;
            refusals.warn_of(format_args!("auth-refused peer={stream}"), &stream.source());
            thread::sleep(AUTH_COOLDOWN);
        }
        rights
    }

    fn why_not_ready(&self) -> Option<&'static str> {
        let node = self.rules.node.as_ref();
        if node.is_some_and(|node| !node.has_active_server()) {
            return Some("no_active_server");
        }
        let (_, counters) = self.arbiter.counters();
        counters.is_draining.then_some("draining")
    }

    fn show_statistics(&self, route: &Route, answer: &HttpAnswer<'_>) -> Sent {
        let Some(_reservation) = memory::reserve(PAGE_LEN, Purpose::Service) else {
            return answer.send(&HttpReply::unavailable("too little memory is left"));
        };
        let node = self.rules.node.as_deref();
        let statistics = self.rules.statistics(&self.arbiter);
        // The table of a standby is empty.
        let is_standby = node.is_some_and(|node| !node.is_active());
        if is_standby && route.resource != Resource::Metrics {
            return answer.send(&HttpReply::standby());
        }
        match route.resource {
            Resource::Metrics => {
                let text = statistics.counters().exposition();
                answer.send(&HttpReply::whole(route.answer.0, text.into_bytes()))
            }
            Resource::Counters => {
                let mut out = Vec::new();
                statistics.write_counters(&mut out);
                out.push(b'\n');
                answer.send(&HttpReply::whole(JSON, out))
            }
            Resource::History => {
                let mut out = Vec::new();
                self.history.write_json(Instant::now(), &mut out);
                answer.send(&HttpReply::whole(JSON, out))
            }
            Resource::Runs => answer.in_pieces(|out, send| statistics.write_histories(out, send)),
            Resource::Keys => answer.in_pieces(|out, send| statistics.write_keys(out, send)),
            _ => answer.in_pieces(|out, send| statistics.write_queues(None, out, send)),
        }
    }
}

/// A client that sends a request.
struct ArrivingRequest<'a> {
    stream: &'a Stream,
    /// When the request must have arrived.
    due: Instant,
}

impl Read for ArrivingRequest<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let left = time_left(self.due);
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(left)?;
        (&mut &*self.stream).read(room)
    }
}

impl RequestInput for ArrivingRequest<'_> {
    fn invite_body(&mut self) {
        let _ = self
            .stream
            .write_within(&mut &*INVITATION, Some(ANSWER_TIME));
    }
}
