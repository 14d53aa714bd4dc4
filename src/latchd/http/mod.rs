//! The HTTP door: health, metrics, statistics and a page that shows them, and, if the operator
//! wants that, locks. See latchd-operations(7), HTTP.
//!
//! The door has its own limits of connections, so that its clients cannot keep other clients from
//! their locks. Each connection gets one answer, within a time limit, unless it waits for a lock.

mod answer;
mod body;
mod grants;
mod history;
mod host_names;
mod openapi;
#[cfg(any(test, fuzzing))]
pub(crate) mod pieces;
mod reply;
mod request;
mod routes;
mod sessions;

use std::io::Read;
use std::net::{IpAddr, Shutdown};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use log::debug;

use super::listen_host::ListenHost;
use super::rights::Rights;
use super::rules::{SessionRules, AUTH_COOLDOWN, CLOSING_TIME};
use super::statistics::{StatisticsSource, PAGE_LEN};
use crate::arbiter::Arbiter;
use crate::cluster::ClusterNode;
use crate::net::connections::{Admission, Connections};
use crate::net::listener::{accept_from_all, Listener};
use crate::net::permits::Permits;
use crate::net::stream::Stream;
use crate::net::tls::Certificate;
use crate::net::workers::Workers;
use crate::protocol::metrics::exposition;
use crate::protocol::request::Request;
use crate::server::{self, no_thread};
use crate::sys::deadline::time_left;
use crate::sys::memory::{self, Purpose};
use answer::{refuse_full, Errors, HttpAnswer, Sent, FULL, JSON, METRICS};
use body::MAX_BODY_LEN;
pub(super) use grants::GrantCaps;
use grants::Grants;
use history::RecentSamples;
use request::{Arrived, HttpRequest, RequestInput, MAX_HEAD_LEN};
use routes::Resource;

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
pub(super) struct DoorPlaces {
    pub(super) places: Vec<(ListenHost, u16)>,
    pub(super) names: Vec<String>,
}

/// The listening sockets of the door, before it answers requests.
pub(super) struct Door {
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
    grants: Option<Arc<Grants>>,
}

impl Door {
    /// Listens at all places, if there are any. If there is a certificate, the door speaks TLS with
    /// it.
    pub(super) fn bind(
        places: Option<DoorPlaces>,
        certificate: Option<&Arc<Certificate>>,
    ) -> Result<Option<Door>, String> {
        let Some(DoorPlaces { places, mut names }) = places else {
            return Ok(None);
        };
        let (mut listeners, mut bound) = (Vec::new(), Vec::new());
        for (host, port) in places {
            let mut addresses = host.addresses(port)?;
            // Two names may have an address in common.
            addresses.retain(|address| port == 0 || !bound.contains(address));
            listeners.extend(server::listen(&addresses, None, 0, None)?);
            bound.extend(addresses);
        }
        let with_tls = |listener: Listener| match certificate {
            Some(certificate) => listener.with_tls(Arc::clone(certificate)),
            None => listener,
        };
        names.extend(host_names::of_this_host());
        // A request without a host name must not match an empty one.
        names.retain(|name| !name.is_empty());
        Ok(Some(Door {
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
        caps: Option<GrantCaps>,
        others: &Connections,
    ) -> Result<Option<Arc<Connections>>, String> {
        let connections = Arc::new(connections(caps, others));
        let grants = caps
            .map(|caps| Grants::new(arbiter, rules, &connections, caps))
            .transpose()
            .map_err(server::cannot("watch for hang-ups"))?
            .map(Arc::new);
        let guide = Arc::new(Guide {
            arbiter: Arc::clone(arbiter),
            rules: Arc::clone(rules),
            names: self.names,
            history: Arc::default(),
            permits: Permits::new(MAX_CONNECTIONS, Some(MAX_PER_ADDRESS)),
            grants: grants.clone(),
        });
        if let Some(grants) = &grants {
            let grants = Arc::clone(grants);
            server::spawn("http-hangup", move || grants.report_hangups())?;
        }
        let housekeeper = Arc::clone(&guide);
        server::spawn("http-history", move || housekeeper.run_housekeeping())?;
        let workers = Workers::new(move |admission| match admission.exceeds {
            None => guide.serve(&admission),
            Some(_) => refuse(&admission.stream),
        });
        accept_from_all("http", &self.listeners, &connections, &workers).map_err(no_thread)?;
        Ok(grants.map(|_| connections))
    }
}

/// The connections of a door. Those that change something come on top of the others, because only
/// a request tells which is which.
fn connections(caps: Option<GrantCaps>, others: &Connections) -> Connections {
    let connections = match caps {
        None => Connections::new(MAX_CONNECTIONS, Some(MAX_PER_ADDRESS), FULL),
        Some(caps) => {
            let with_others = |max: usize| max.saturating_add(MAX_CONNECTIONS);
            let max = with_others(caps.max_waiting).saturating_add(MAX_CHANGING);
            // Without a cap, one address could keep all others out, even by silence.
            let unless_capped = max - MAX_CONNECTIONS;
            let max_per_address = caps.max_per_address.map_or(unless_capped, with_others);
            Connections::new(max, Some(max_per_address), FULL).numbered_with(others)
        }
    };
    connections.admitting_refused(MAX_REFUSED)
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
                if self
                    .rules
                    .node
                    .as_deref()
                    .is_none_or(ClusterNode::is_active)
                {
                    let (_, snapshot) = self.arbiter.counters();
                    self.history.note(&snapshot, now);
                }
                sample_at = now + history::INTERVAL;
            }
            // A session that is opened or used during the sleep ends later than the next sample.
            let grants = self.grants.as_ref();
            let ends_at = grants.and_then(|grants| grants.sessions.end_idle(now));
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
        let resource = asked.request.as_ref().map(|request| request.resource);
        debug!("http peer={stream} asked={resource:?}");
        let errors = self.grants.as_ref().map_or(Errors::Text, |_| Errors::Json);
        let answer = HttpAnswer::new(stream, asked.is_head, errors);
        let sent = match asked.request {
            Ok(request) => self.answer(&request, admission, &answer),
            Err(refusal) => answer.refuse(refusal),
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
        let _reservation = memory::reserve(2 * max_len + MAX_BODY_LEN, Purpose::Newcomer)?;
        let due = Instant::now() + REQUEST_TIME;
        request::read(
            max_len,
            self.grants.is_some(),
            &mut ArrivingRequest { stream, due },
        )
    }

    fn answer(
        &self,
        request: &HttpRequest,
        admission: &Admission,
        answer: &HttpAnswer<'_>,
    ) -> Sent {
        if !request.resource.is_open() {
            if !request.is_for(&self.names) {
                let why = "this server does not go by that name; \
                    latchd --http-name NAME gives it another";
                return answer.error("421 Misdirected Request", "bad_request", why, "");
            }
            let Some(rights) = self.rights_of(request, answer.stream) else {
                return answer.ask_for_secret();
            };
            if let Err(asked) = rights.permit(request.resource.request(), || false) {
                return self.refuse_right(&asked, answer);
            }
            if let (Some(grants), true) = (&self.grants, request.resource.is_change()) {
                return grants.serve(request, &rights, admission, answer);
            }
        }
        self.show_with_permit(request.resource, answer)
    }

    /// Shows something, unless too many clients look at something already.
    fn show_with_permit(&self, resource: Resource, answer: &HttpAnswer<'_>) -> Sent {
        let Ok(_permit) = self.permits.take(answer.stream.source()) else {
            return refuse_full(answer.stream);
        };
        match resource {
            Resource::Health => answer.text("200 OK", "ok\n"),
            Resource::Ready => match self.why_not_ready() {
                None => answer.text("200 OK", "ready\n"),
                Some(why) => answer.text("503 Service Unavailable", why),
            },
            Resource::Page => answer.whole("text/html; charset=utf-8", include_bytes!("page.html")),
            Resource::Style => answer.whole("text/css; charset=utf-8", include_bytes!("page.css")),
            Resource::Script => {
                answer.whole("text/javascript; charset=utf-8", include_bytes!("page.js"))
            }
            Resource::Icon => answer.whole("image/svg+xml", include_bytes!("icon.svg")),
            Resource::OpenApi => answer.whole(JSON, &openapi::describe(self.grants.is_some())),
            _ => self.show_state(resource, answer),
        }
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
            refusals.warn(format_args!("auth-refused peer={stream}"), stream.source());
            thread::sleep(AUTH_COOLDOWN);
        }
        rights
    }

    fn refuse_right(&self, asked: &Request<'_>, answer: &HttpAnswer<'_>) -> Sent {
        self.rules.log_right_refused(answer.stream, b"http", asked);
        answer.error("403 Forbidden", "forbidden", reply::NO_RIGHT, "")
    }

    fn why_not_ready(&self) -> Option<&'static str> {
        let node = self.rules.node.as_ref();
        if node.is_some_and(|node| !node.has_active_server()) {
            return Some("no active server\n");
        }
        let (_, counters) = self.arbiter.counters();
        counters.is_draining.then_some("draining\n")
    }

    fn show_state(&self, resource: Resource, answer: &HttpAnswer<'_>) -> Sent {
        let Some(_reservation) = memory::reserve(PAGE_LEN, Purpose::Service) else {
            return answer.text("503 Service Unavailable", "too little memory is left\n");
        };
        let node = self.rules.node.as_deref();
        let statistics = StatisticsSource {
            arbiter: &self.arbiter,
            node,
            log: &self.rules.log,
            worst_case: self.rules.worst_case,
        };
        // The table of a standby is empty.
        let is_standby = node.is_some_and(|node| !node.is_active());
        if is_standby && resource != Resource::Metrics {
            return answer.text(
                "503 Service Unavailable",
                "this server is a standby; the active server has the locks\n",
            );
        }
        match resource {
            Resource::Metrics => {
                let (figures, _) = statistics.counters();
                let text = exposition(&[(None, Some(figures))]);
                answer.whole(METRICS, text.as_bytes())
            }
            Resource::Counters => {
                let mut out = Vec::new();
                statistics.write_counters(&mut out);
                out.push(b'\n');
                answer.whole(JSON, &out)
            }
            Resource::History => {
                let mut out = Vec::new();
                self.history.write_json(Instant::now(), &mut out);
                answer.whole(JSON, &out)
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

impl RequestInput for ArrivingRequest<'_> {
    fn read(&mut self, room: &mut [u8]) -> usize {
        let left = time_left(self.due);
        if left.is_zero() || self.stream.set_read_timeout(left).is_err() {
            return 0;
        }
        (&mut &*self.stream).read(room).unwrap_or(0)
    }

    fn invite_body(&mut self) {
        answer::invite_body(self.stream);
    }
}
