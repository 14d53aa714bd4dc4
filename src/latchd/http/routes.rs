//! The table of what clients can ask for over HTTP. Pure: no I/O and no clock.

use super::reply::{HttpReply, JSON};
use crate::wire::limits::{MAX_LIMIT, MAX_SECONDS};
use crate::wire::request::Request;
use FieldValue::{Number, OneOf, Text};
use Resource::*;

/// The methods that the server knows. HEAD is a GET whose answer has no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Post,
    Delete,
}

/// What a path is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    Health,
    Ready,
    Metrics,
    /// The JSON that `stats` returns without a key line. The next two are the JSON for the key
    /// lines `holders` and `counters`.
    Keys,
    Holders,
    Counters,
    /// The samples of the last five minutes, as JSON.
    History,
    /// The past holders of keys, as JSON.
    Runs,
    /// The page, or what belongs to it.
    File(&'static [u8]),
    /// The description of the routes.
    OpenApi,
    NewSession,
    Session,
    SessionPing,
    /// A command of the latch protocol about a key, and the fields of the body, which are the words
    /// of the command in their order.
    Key(&'static str, &'static [BodyField]),
}

/// A method and a path that clients can ask for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) method: Method,
    /// A segment in braces stands for any segment.
    pub(super) path: &'static str,
    /// The name of the operation, for programs that make clients.
    pub(super) id: &'static str,
    /// The request of the latch protocol that needs the same right, as far as the path tells.
    /// `None` if a client may ask without the secret.
    pub(super) needs: Option<Request<'static>>,
    pub(super) resource: Resource,
    /// What the answer has if the server does what is asked.
    pub(super) answer: AnswerBody,
}

/// The type of the body of an answer, "" if there is none, and the fields of an object in JSON,
/// unless they are of another form.
type AnswerBody = (&'static str, &'static [BodyField]);

/// A field of a body: its name, whether it must be there, its value, and what it means.
pub(super) type BodyField = (&'static str, bool, FieldValue, &'static str);

#[derive(Debug, PartialEq, Eq)]
pub(super) enum FieldValue {
    /// From the lowest number to the highest.
    Number(u64, u64),
    Text,
    OneOf(&'static [&'static str]),
}

const SECONDS: FieldValue = Number(0, MAX_SECONDS);
const SLOTS: FieldValue = Number(1, MAX_LIMIT as u64);
const WAIT: BodyField = ("acquire_timeout_s", false, SECONDS, "0: do not wait");
const TIMEOUT: BodyField = ("timeout_s", false, SECONDS, "0: do not wait");
pub(super) const LEASE: BodyField = ("lease_ttl_s", false, SECONDS, "0: the server's default");
const LIMIT: BodyField = ("limit", true, SLOTS, "the number of slots");
const TOKEN: BodyField = ("token", true, Text, "the token of the grant");
pub(super) const STATUS: BodyField = ("status", false, Number(0, 255), "an exit status");

const NOTHING: AnswerBody = ("", &[]);
const STATE: &[BodyField] = &[("status", true, STATES, "the state of the server")];
const STATES: FieldValue = OneOf(&["ok", "draining", "no_active_server"]);
const SESSION: &[BodyField] = &[ID, ("idle_timeout_s", true, SECONDS, "when to ping")];
const ID: BodyField = ("session_id", true, Text, "the name of the session");
const GRANTED: &[BodyField] = &[("status", true, WAITED, "the outcome"), GRANT, LEASE];
const WAITED: FieldValue = OneOf(&["ok", "timeout"]);
const ENTERED: &[BodyField] = &[("status", true, QUEUED, "the outcome"), GRANT, LEASE];
const QUEUED: FieldValue = OneOf(&["acquired", "queued"]);
const GRANT: BodyField = ("token", false, Text, "the token of a grant");
const LEFT: &[BodyField] = &[("remaining_s", true, SECONDS, "the new lease")];

/// The requests that need a right to see. The page shows what all routes with `SEE` show.
const STATS: Option<Request<'static>> = Some(Request::Stats);
const COUNT: Option<Request<'static>> = Some(Request::Counters);
const SEE: Option<Request<'static>> = Some(Request::Queues(None));

const fn get(
    path: &'static str,
    id: &'static str,
    needs: Option<Request<'static>>,
    resource: Resource,
    answer: AnswerBody,
) -> Route {
    Route {
        method: Method::Get,
        needs,
        ..change(path, id, resource, answer)
    }
}

/// No request of the latch protocol needs what a new session needs: the right to use some key. What
/// a command needs depends on its key.
const fn change(
    path: &'static str,
    id: &'static str,
    resource: Resource,
    answer: AnswerBody,
) -> Route {
    Route {
        method: Method::Post,
        path,
        id,
        needs: Some(Request::Ping),
        resource,
        answer,
    }
}

#[rustfmt::skip]
pub(super) const ROUTES: &[Route] = &[
    get("/health", "getHealth", None, Health, (JSON, STATE)),
    get("/ready", "getReady", None, Ready, (JSON, STATE)),
    get("/metrics", "getMetrics", COUNT, Metrics,
        ("text/plain; version=0.0.4; charset=utf-8", &[])),
    get("/v1/stats", "getStats", STATS, Keys, (JSON, &[])),
    get("/v1/stats/holders", "getHolders", SEE, Holders, (JSON, &[])),
    get("/v1/stats/counters", "getCounters", COUNT, Counters, (JSON, &[])),
    get("/v1/stats/history", "getHistory", COUNT, History, (JSON, &[])),
    get("/v1/stats/runs", "getRuns", SEE, Runs, (JSON, &[])),
    get("/", "getPage", SEE, File(include_bytes!("page.html")), ("text/html; charset=utf-8", &[])),
    get("/page.css", "getStyle", SEE, File(include_bytes!("page.css")),
        ("text/css; charset=utf-8", &[])),
    get("/page.js", "getScript", SEE, File(include_bytes!("page.js")),
        ("text/javascript; charset=utf-8", &[])),
    get("/icon.svg", "getIcon", SEE, File(include_bytes!("icon.svg")), ("image/svg+xml", &[])),
    get("/v1/openapi.json", "getOpenAPI", None, OpenApi, (JSON, &[])),
    change("/v1/sessions", "createSession", NewSession, (JSON, SESSION)),
    Route {
        method: Method::Delete,
        ..change("/v1/sessions/{id}", "deleteSession", Session, NOTHING)
    },
    change("/v1/sessions/{id}/ping", "pingSession", SessionPing, NOTHING),
    change("/v1/locks/{key}", "acquireLock", Key("l", &[WAIT, LEASE]), (JSON, GRANTED)),
    change("/v1/locks/{key}/release", "releaseLock", Key("r", &[TOKEN, STATUS]), NOTHING),
    change("/v1/locks/{key}/renew", "renewLock", Key("n", &[TOKEN, LEASE]), (JSON, LEFT)),
    change("/v1/locks/{key}/enqueue", "enqueueLock", Key("e", &[LEASE]), (JSON, ENTERED)),
    change("/v1/locks/{key}/wait", "waitLock", Key("w", &[TIMEOUT]), (JSON, GRANTED)),
    change("/v1/semaphores/{key}", "acquireSemaphore", Key("sl", &[WAIT, LIMIT, LEASE]),
           (JSON, GRANTED)),
    change("/v1/semaphores/{key}/release", "releaseSemaphore", Key("sr", &[TOKEN, STATUS]),
           NOTHING),
    change("/v1/semaphores/{key}/renew", "renewSemaphore", Key("sn", &[TOKEN, LEASE]),
           (JSON, LEFT)),
    change("/v1/semaphores/{key}/enqueue", "enqueueSemaphore", Key("se", &[LIMIT, LEASE]),
           (JSON, ENTERED)),
    change("/v1/semaphores/{key}/wait", "waitSemaphore", Key("sw", &[TIMEOUT]), (JSON, GRANTED)),
];

impl Route {
    /// Whether a request for this changes sessions, holders or queues.
    pub(super) fn is_change(&self) -> bool {
        self.method != Method::Get
    }

    /// The segment of `path` that stands in the place of the braces, or "" if there are none.
    /// `None` if the path is another one.
    fn parameter<'a>(&self, path: &'a str) -> Option<&'a str> {
        let Some((before, after)) = self.path.split_once('{') else {
            return (self.path == path).then_some("");
        };
        let (_, after) = after.split_once('}').unwrap_or_default();
        let parameter = path.strip_prefix(before)?.strip_suffix(after)?;
        (!parameter.contains('/')).then_some(parameter)
    }
}

/// The routes; without `with_changes`, only those that change nothing.
pub(super) fn offered(with_changes: bool) -> impl Iterator<Item = &'static Route> {
    let routes = ROUTES.iter();
    routes.filter(move |route| with_changes || !route.is_change())
}

/// The offered route of a request, and the segment that its path has in the place of the braces.
pub(super) fn find(
    method: Option<Method>,
    path: &str,
    with_changes: bool,
) -> Result<(&'static Route, &str), HttpReply> {
    let mut is_known = None;
    for route in offered(with_changes) {
        if let Some(parameter) = route.parameter(path) {
            if method == Some(route.method) {
                return Ok((route, parameter));
            }
            is_known = Some(route.method);
        }
    }
    Err(match is_known {
        None => HttpReply::not_found(),
        Some(Method::Get) => HttpReply::other_method("GET, HEAD"),
        Some(Method::Post) => HttpReply::other_method("POST"),
        Some(Method::Delete) => HttpReply::other_method("DELETE"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_one_segment_of_a_path() {
        let of = |path| {
            let found = find(Some(Method::Post), path, true);
            found.map(|(route, key)| match route.resource {
                Key(command, _) => (command, key),
                _ => panic!("{path} is not about a key"),
            })
        };
        assert_eq!(of("/v1/locks/k"), Ok(("l", "k")));
        assert_eq!(of("/v1/locks/"), Ok(("l", "")));
        assert_eq!(of("/v1/locks/release"), Ok(("l", "release")));
        assert_eq!(of("/v1/locks/a%2Fb/release"), Ok(("r", "a%2Fb")));
        assert_eq!(of("/v1/locks//release"), Ok(("r", "")));
        for unknown in [
            "/v1/locks",
            "/v1/locks/k/",
            "/v1/locks/a/b/release",
            "/v1/locks/k/steal",
        ] {
            assert_eq!(of(unknown), Err(HttpReply::not_found()), "{unknown}");
        }
        assert_eq!(of("/v1/semaphores/k/wait"), Ok(("sw", "k")));
    }

    #[test]
    fn a_known_path_names_its_method() {
        for (method, path, allowed) in [
            (Some(Method::Get), "/v1/locks/k", "POST"),
            (None, "/v1/sessions/i", "DELETE"),
            (Some(Method::Post), "/v1/stats", "GET, HEAD"),
        ] {
            let found = find(method, path, true);
            assert_eq!(found, Err(HttpReply::other_method(allowed)), "{path}");
        }
        let found = find(Some(Method::Get), "/v1/locks/k", false);
        assert_eq!(found, Err(HttpReply::not_found()));
    }

    #[test]
    fn no_two_routes_are_the_same() {
        for route in ROUTES {
            let (found, _) = find(Some(route.method), route.path, true).expect("its own");
            assert_eq!(found, route);
        }
    }
}
