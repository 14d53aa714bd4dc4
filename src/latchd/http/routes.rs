//! The table of what clients can ask for over HTTP. Pure: no I/O and no clock.

use crate::protocol::request::Request;
use crate::terms::Kind;

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
    /// The HTML page. The next three are its stylesheet, script and icon.
    Page,
    Style,
    Script,
    Icon,
    /// The description of the routes.
    OpenApi,
    NewSession,
    Session,
    SessionPing,
    Key(Verb, Kind),
}

/// What a request asks for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Acquire,
    Release,
    Renew,
    Enqueue,
    Wait,
}

/// A method and a path that clients can ask for.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) method: Method,
    /// A segment in braces stands for any segment.
    pub(super) path: &'static str,
    pub(super) resource: Resource,
    pub(super) summary: &'static str,
}

/// Why there is no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoute {
    NotFound,
    /// The path has only other methods.
    OtherMethod(Allowed),
}

/// The methods of a path, as the header `Allow` lists them.
pub(super) type Allowed = &'static str;

const fn get(path: &'static str, resource: Resource, summary: &'static str) -> Route {
    route(Method::Get, path, resource, summary)
}

const fn lock(path: &'static str, verb: Verb, summary: &'static str) -> Route {
    route(Method::Post, path, Resource::Key(verb, Kind::Lock), summary)
}

const fn slot(path: &'static str, verb: Verb, summary: &'static str) -> Route {
    let resource = Resource::Key(verb, Kind::Semaphore);
    route(Method::Post, path, resource, summary)
}

const fn route(
    method: Method,
    path: &'static str,
    resource: Resource,
    summary: &'static str,
) -> Route {
    Route {
        method,
        path,
        resource,
        summary,
    }
}

#[rustfmt::skip]
pub(super) const ROUTES: [Route; 26] = [
    get("/health", Resource::Health, "Whether the server answers"),
    get("/ready", Resource::Ready, "Whether the server grants locks"),
    get("/metrics", Resource::Metrics, "The counters, for Prometheus"),
    get("/v1/stats", Resource::Keys, "The keys that are in use or were lately"),
    get("/v1/stats/holders", Resource::Holders, "Who holds and who waits"),
    get("/v1/stats/counters", Resource::Counters, "The counters"),
    get("/v1/stats/history", Resource::History, "The last five minutes"),
    get("/v1/stats/runs", Resource::Runs, "Who held a key lately, and how that ended"),
    get("/", Resource::Page, "A page that shows the statistics"),
    get("/page.css", Resource::Style, "The style of the page"),
    get("/page.js", Resource::Script, "The script of the page"),
    get("/icon.svg", Resource::Icon, "The icon of the page"),
    get("/v1/openapi.json", Resource::OpenApi, "This description"),
    route(Method::Post, "/v1/sessions", Resource::NewSession, "Open a session"),
    route(Method::Delete, "/v1/sessions/{id}", Resource::Session,
          "Release what a session holds, and end it"),
    route(Method::Post, "/v1/sessions/{id}/ping", Resource::SessionPing,
          "Keep a session from being idle"),
    lock("/v1/locks/{key}", Verb::Acquire, "Wait for a lock"),
    lock("/v1/locks/{key}/release", Verb::Release, "Release a lock"),
    lock("/v1/locks/{key}/renew", Verb::Renew, "Restart the lease of a lock"),
    lock("/v1/locks/{key}/enqueue", Verb::Enqueue, "Enter the queue of a lock"),
    lock("/v1/locks/{key}/wait", Verb::Wait, "Wait for a lock after entering its queue"),
    slot("/v1/semaphores/{key}", Verb::Acquire, "Wait for a slot of a semaphore"),
    slot("/v1/semaphores/{key}/release", Verb::Release, "Release a slot"),
    slot("/v1/semaphores/{key}/renew", Verb::Renew, "Restart the lease of a slot"),
    slot("/v1/semaphores/{key}/enqueue", Verb::Enqueue, "Enter the queue of a semaphore"),
    slot("/v1/semaphores/{key}/wait", Verb::Wait, "Wait for a slot after entering the queue"),
];

impl Resource {
    /// Whether a client may ask for this without the secret.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Resource::Health | Resource::Ready | Resource::OpenApi)
    }

    /// The request of the latch protocol that needs the same right, if the path alone tells that.
    /// The page shows what all of these show. No request of that protocol needs what a new session
    /// needs: the right to use some key.
    pub(super) fn request(self) -> Request<'static> {
        match self {
            Resource::Keys => Request::Stats,
            Resource::Metrics | Resource::Counters | Resource::History => Request::Counters,
            Resource::Holders
            | Resource::Runs
            | Resource::Page
            | Resource::Style
            | Resource::Script
            | Resource::Icon => Request::Queues(None),
            Resource::Health
            | Resource::Ready
            | Resource::OpenApi
            | Resource::NewSession
            | Resource::Session
            | Resource::SessionPing
            | Resource::Key(..) => Request::Ping,
        }
    }

    /// Whether a request for this changes sessions, holders or queues.
    pub(super) fn is_change(self) -> bool {
        matches!(
            self,
            Resource::NewSession | Resource::Session | Resource::SessionPing | Resource::Key(..)
        )
    }
}

impl Route {
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

/// The route of a request, and the segment that its path has in the place of the braces. Without
/// `with_changes`, there are only the routes that change nothing.
pub(super) fn find(
    method: Option<Method>,
    path: &str,
    with_changes: bool,
) -> Result<(Resource, &str), NoRoute> {
    let offered = ROUTES
        .iter()
        .filter(|route| with_changes || !route.resource.is_change());
    let mut is_known = None;
    for route in offered {
        if let Some(parameter) = route.parameter(path) {
            if method == Some(route.method) {
                return Ok((route.resource, parameter));
            }
            is_known = Some(route.method);
        }
    }
    Err(match is_known {
        None => NoRoute::NotFound,
        Some(Method::Get) => NoRoute::OtherMethod("GET, HEAD"),
        Some(Method::Post) => NoRoute::OtherMethod("POST"),
        Some(Method::Delete) => NoRoute::OtherMethod("DELETE"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_one_segment_of_a_path() {
        let of = |path| find(Some(Method::Post), path, true);
        let acquire = Resource::Key(Verb::Acquire, Kind::Lock);
        let release = Resource::Key(Verb::Release, Kind::Lock);
        assert_eq!(of("/v1/locks/k"), Ok((acquire, "k")));
        assert_eq!(of("/v1/locks/"), Ok((acquire, "")));
        assert_eq!(of("/v1/locks/release"), Ok((acquire, "release")));
        assert_eq!(of("/v1/locks/a%2Fb/release"), Ok((release, "a%2Fb")));
        assert_eq!(of("/v1/locks//release"), Ok((release, "")));
        for unknown in [
            "/v1/locks",
            "/v1/locks/k/",
            "/v1/locks/a/b/release",
            "/v1/locks/k/steal",
        ] {
            assert_eq!(of(unknown), Err(NoRoute::NotFound), "{unknown}");
        }
        let wait = Resource::Key(Verb::Wait, Kind::Semaphore);
        assert_eq!(of("/v1/semaphores/k/wait"), Ok((wait, "k")));
    }

    #[test]
    fn a_known_path_names_its_method() {
        for (method, path, allowed) in [
            (Some(Method::Get), "/v1/locks/k", "POST"),
            (None, "/v1/sessions/i", "DELETE"),
            (Some(Method::Post), "/v1/stats", "GET, HEAD"),
        ] {
            let found = find(method, path, true);
            assert_eq!(found, Err(NoRoute::OtherMethod(allowed)), "{path}");
        }
        let found = find(Some(Method::Get), "/v1/locks/k", false);
        assert_eq!(found, Err(NoRoute::NotFound));
    }

    #[test]
    fn no_two_routes_are_the_same() {
        for (at, route) in ROUTES.iter().enumerate() {
            let (found, _) = find(Some(route.method), route.path, true).expect("its own");
            assert_eq!(found, route.resource, "{at}");
        }
    }
}
