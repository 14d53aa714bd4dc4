//! Locks over HTTP: what each request is answered, one queue with the lines, hang-ups, caps and the
//! drain.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use super::fences::{inject, may_attach};
use super::http::{daemon_with_door, door_of, exchange, json as get_json};
use super::restart::Service;
use crate::support::footprint::{worst_case_mb, Footprint};
use crate::support::needs::needs;
use crate::support::{eventually, waiter_count, Client, Daemon, Signal, PATIENCE};

/// A daemon that grants locks over HTTP, and where it does.
fn granting(options: &[&str]) -> (Daemon, Door) {
    let (daemon, addr) = daemon_with_door(&[&["--http-grants"], options].concat());
    (daemon, Door { addr })
}

#[derive(Clone, Copy)]
struct Door {
    addr: SocketAddr,
}

/// An answer of the door.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn parse(text: &str) -> Answer {
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).expect("a status");
        Answer {
            status: status.parse().expect("a number"),
            head: head.to_owned(),
            body: body.to_owned(),
        }
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    /// The token of a grant.
    fn token(&self) -> String {
        let json = self.json();
        let granted = ["ok", "acquired"]
            .iter()
            .any(|word| json["status"] == *word);
        assert!(self.status == 200 && granted, "{self:?}");
        json["token"].as_str().expect("a token").to_owned()
    }

    /// The status and the code of an error.
    fn error(&self) -> (u16, String) {
        let json = self.json();
        assert!(json["detail"].is_string(), "{self:?}");
        (
            self.status,
            json["error"].as_str().expect("a code").to_owned(),
        )
    }
}

/// A request whose answer is yet to come.
struct Pending(TcpStream);

impl Pending {
    /// Hangs up. A close alone may come late: a program that another test starts has the
    /// descriptor, too, until it is executed.
    fn leave(self) {
        self.0.shutdown(Shutdown::Both).expect("it is open");
    }

    fn answer(mut self) -> Answer {
        let mut answer = String::new();
        self.0
            .read_to_string(&mut answer)
            .expect("it closes in time");
        Answer::parse(&answer)
    }
}

impl Door {
    fn text(self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let (addr, len) = (self.addr, body.len());
        format!(
            "{method} {path} HTTP/1.1\r\nHost: {addr}\r\nContent-Length: {len}\r\n\
             Content-Type: application/json\r\n{headers}\r\n{body}"
        )
    }

    fn ask(self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let request = self.text(method, path, headers, body);
        Answer::parse(&exchange(self.addr, request.as_bytes()))
    }

    fn post(self, path: &str, body: Value) -> Answer {
        self.ask("POST", path, "", &body.to_string())
    }

    fn begin(self, path: &str, headers: &str, body: Value) -> Pending {
        let mut stream = TcpStream::connect(self.addr).expect("the door is open");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time");
        let request = self.text("POST", path, headers, &body.to_string());
        stream.write_all(request.as_bytes()).expect("it takes it");
        Pending(stream)
    }

    fn session(self) -> Session {
        let answer = self.ask("POST", "/v1/sessions", "", "");
        assert_eq!(answer.status, 200, "{answer:?}");
        let json = answer.json();
        assert_eq!(json["idle_timeout_s"], 20);
        let id = json["session_id"].as_str().expect("a name").to_owned();
        let door = self;
        Session { door, id }
    }
}

struct Session {
    door: Door,
    id: String,
}

impl Session {
    fn header(&self) -> String {
        format!("X-Dflockd-Session: {}\r\n", self.id)
    }

    fn post(&self, path: &str, body: Value) -> Answer {
        self.door
            .ask("POST", path, &self.header(), &body.to_string())
    }

    fn begin(&self, path: &str, body: Value) -> Pending {
        self.door.begin(path, &self.header(), body)
    }

    fn end(&self) -> Answer {
        self.door
            .ask("DELETE", &format!("/v1/sessions/{}", self.id), "", "")
    }
}

fn waiting(seconds: u64) -> Value {
    json!({ "acquire_timeout_s": seconds })
}

#[test]
fn each_route_does_what_its_command_does() {
    let (_daemon, door) = granting(&[]);
    for (kind, limit) in [("locks", json!({})), ("semaphores", json!({ "limit": 1 }))] {
        let with_limit = |mut body: Value| {
            let body_fields = body.as_object_mut().expect("an object");
            body_fields.extend(limit.as_object().expect("an object").clone());
            body
        };
        let (one, other) = (door.session(), door.session());
        let path = |verb: &str| format!("/v1/{kind}/k%2F{kind}{verb}");
        let asked = with_limit(json!({ "acquire_timeout_s": 0, "lease_ttl_s": 60 }));
        let answer = one.post(&path(""), asked);
        let token = answer.token();
        assert_eq!(
            answer.json(),
            json!({ "status": "ok", "token": token, "lease_ttl_s": 60 })
        );
        let timeout = other.post(&path(""), with_limit(waiting(0)));
        assert_eq!(timeout.json(), json!({ "status": "timeout" }));
        let renewed = one.post(&path("/renew"), json!({ "token": token }));
        assert_eq!(renewed.json(), json!({ "remaining_s": 33 }));
        let renew = json!({ "token": token, "lease_ttl_s": 50 });
        let renewed = one.post(&path("/renew"), renew);
        assert_eq!(renewed.json(), json!({ "remaining_s": 50 }));
        let queued = other.post(&path("/enqueue"), with_limit(json!({})));
        assert_eq!(queued.json(), json!({ "status": "queued" }));
        let waits = other.begin(&path("/wait"), json!({ "timeout_s": 10 }));
        let released = one.post(&path("/release"), json!({ "token": token }));
        assert_eq!((released.status, released.body.as_str()), (204, ""));
        assert!(!released.head.contains("Content-Length"), "{released:?}");
        let token = waits.answer().token();
        let released = other.post(&path("/release"), json!({ "token": token }));
        assert_eq!(released.status, 204);
        let acquired = one.post(&path("/enqueue"), with_limit(json!({ "lease_ttl_s": 7 })));
        let token = acquired.token();
        assert_eq!(
            acquired.json(),
            json!({ "status": "acquired", "token": token, "lease_ttl_s": 7 })
        );
        let collected = one.post(&path("/wait"), json!({}));
        assert_eq!(collected.token(), token);
        for session in [one, other] {
            let ping = format!("/v1/sessions/{}/ping", session.id);
            assert_eq!(door.ask("POST", &ping, "", "").status, 204);
            assert_eq!(session.end().status, 204);
            assert_eq!(door.ask("POST", &ping, "", "").status, 410);
        }
        let free = door.session().post(&path(""), with_limit(waiting(0)));
        free.token();
    }
}

#[test]
fn a_client_that_ends_its_session_has_released_its_locks() {
    let (daemon, door) = granting(&["--expect", "k=1h"]);
    let session = door.session();
    session.post("/v1/locks/k", waiting(0)).token();
    assert_eq!(session.end().status, 204);
    let mut client = daemon.connect();
    let of_key = |client: &mut Client, line, key| {
        let said = client.request("stats", line, key);
        serde_json::from_str::<Value>(&said[3..]).expect("JSON")
    };
    let holders = of_key(&mut client, "holders", "k");
    assert_eq!(holders["history"][0]["end"], "released", "{holders}");
    let counters = &of_key(&mut client, "counters", "_")["counters"];
    assert_eq!(counters["releases"], 1, "{counters}");
    assert_eq!(counters["abandonments"], 0, "{counters}");
}

#[test]
fn each_error_has_its_status_and_its_code() {
    let options = [
        "--max-locks",
        "2",
        "--max-waiters",
        "1",
        "--max-kept",
        "2",
        "--max-hold",
        "99",
    ];
    let (_daemon, door) = granting(&options);
    let (one, other) = (door.session(), door.session());
    let none = "0".repeat(32);
    let acquire = |session: &Session| session.post("/v1/locks/k", waiting(0));
    let token = acquire(&one).token();
    let error = |answer: Answer| answer.error();
    let at = |status: u16, code: &str| (status, code.to_owned());
    for (path, body) in [
        ("/v1/locks/", json!({})),
        ("/v1/locks/a%20b", json!({})),
        ("/v1/locks/%zz", json!({})),
        ("/v1/locks/%ff", json!({})),
        ("/v1/locks/k", json!({ "acquire_timeout_s": -1 })),
        ("/v1/locks/k", json!({ "acquire_timeout_s": 1.5 })),
        ("/v1/locks/k", json!({ "acquire_timeout_s": "1" })),
        (
            "/v1/locks/k",
            json!({ "acquire_timeout_s": 9_223_372_037_u64 }),
        ),
        ("/v1/locks/k", json!({ "lease_ttl_s": 100 })),
        ("/v1/locks/k", json!({ "limit": 1 })),
        ("/v1/locks/k", json!([])),
        ("/v1/locks/k", json!({ "lease_ttl_s": [[]] })),
        ("/v1/locks/k/release", json!({})),
        ("/v1/locks/k/renew", json!({ "token": "" })),
        ("/v1/semaphores/s", json!({})),
        ("/v1/semaphores/s", json!({ "limit": 0 })),
        ("/v1/semaphores/s", json!({ "limit": 1_048_577 })),
    ] {
        let answer = one.post(path, body.clone());
        assert_eq!(error(answer), at(400, "bad_request"), "{path} {body}");
    }
    for verb in ["enqueue", "wait"] {
        let answer = door.post(&format!("/v1/locks/k/{verb}"), json!({}));
        assert!(answer.body.contains("X-Dflockd-Session"), "{answer:?}");
        assert_eq!(error(answer), at(400, "bad_request"));
    }
    for path in ["/v1/locks/k/steal", "/v1/locks", "/v2/locks/k"] {
        assert_eq!(
            error(one.post(path, json!({}))),
            at(404, "not_found"),
            "{path}"
        );
    }
    for verb in ["release", "renew"] {
        let path = format!("/v1/locks/k/{verb}");
        for token in [&none, "nonsense"] {
            let answer = one.post(&path, json!({ "token": token }));
            assert_eq!(error(answer), at(404, "not_held"), "{verb}");
        }
    }
    for (method, path, allowed) in [
        ("PUT", "/v1/locks/k", "POST"),
        ("GET", "/v1/sessions/x", "DELETE"),
        ("POST", "/v1/stats", "GET, HEAD"),
    ] {
        let answer = door.ask(method, path, "", "");
        assert!(
            answer.head.contains(&format!("\r\nAllow: {allowed}\r\n")),
            "{answer:?}"
        );
        assert_eq!(error(answer), at(405, "method_not_allowed"), "{path}");
    }
    let mismatch = one.post("/v1/semaphores/k", json!({ "limit": 1 }));
    assert_eq!(error(mismatch), at(409, "limit_mismatch"));
    assert_eq!(other.post("/v1/locks/k/enqueue", json!({})).status, 200);
    let again = other.post("/v1/locks/k/enqueue", json!({}));
    assert_eq!(error(again), at(409, "already_enqueued"));
    assert_eq!(
        error(one.post("/v1/locks/k/wait", json!({}))),
        at(409, "not_enqueued")
    );
    assert_eq!(
        error(one.post("/v1/locks/k", waiting(9))),
        at(503, "max_waiters")
    );
    assert_eq!(
        one.post("/v1/locks/k/release", json!({ "token": token }))
            .status,
        204
    );
    eventually(PATIENCE, "the grant of an enqueued key has a lease", || {
        get_json(door.addr, "/v1/stats")["locks"][0]["owner_conn_id"].is_number()
    });
    one.post("/v1/locks/l", waiting(0)).token();
    assert_eq!(
        error(one.post("/v1/locks/m", waiting(0))),
        at(503, "max_locks")
    );
    for session in [
        "",
        "0",
        &none,
        &one.id.replace(|c: char| c.is_alphabetic(), "0"),
    ] {
        let header = format!("X-Dflockd-Session: {session}\r\n");
        let answer = door.ask("POST", "/v1/locks/k", &header, "{}");
        assert_eq!(error(answer), at(410, "session_gone"), "{session}");
    }
    assert_eq!(other.end().status, 204);
    assert_eq!(error(other.end()), at(410, "session_gone"));
    assert_eq!(
        error(other.post("/v1/locks/k", json!({}))),
        at(410, "session_gone")
    );
}

#[test]
fn a_grant_that_ends_before_its_wait_is_lost_once() {
    let (daemon, door) = granting(&[]);
    let session = door.session();
    let enqueued = session.post("/v1/locks/k/enqueue", json!({ "lease_ttl_s": 60 }));
    let mut client = daemon.connect();
    assert_eq!(client.request("r", "k", &enqueued.token()), "ok");
    let wait = || session.post("/v1/locks/k/wait", json!({})).error();
    assert_eq!(wait(), (409, "lease_expired".to_owned()));
    assert_eq!(wait(), (409, "not_enqueued".to_owned()));
}

#[test]
fn without_the_option_a_post_is_told_of_it() {
    let (_daemon, addr) = daemon_with_door(&[]);
    let door = Door { addr };
    for (method, path) in [("POST", "/v1/locks/k"), ("DELETE", "/v1/sessions/x")] {
        let answer = door.ask(method, path, "", "");
        assert_eq!(answer.status, 405);
        assert!(answer.body.contains("--http-grants"), "{answer:?}");
        assert!(
            answer.head.contains("\r\nAllow: GET, HEAD\r\n"),
            "{answer:?}"
        );
    }
    let described = get_json(addr, "/v1/openapi.json");
    assert!(described["paths"]["/v1/locks/{key}"].is_null());
    assert!(described["paths"]["/v1/stats"]["get"].is_object());
}

#[test]
fn both_doors_have_one_queue() {
    let (daemon, door) = granting(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let session = door.session();
    let mut waits = Vec::new();
    let mut lines = Vec::new();
    for place in 0..6 {
        match place % 3 {
            0 => {
                let mut client = daemon.connect();
                client.send("l\nk\n60\n");
                lines.push(client);
            }
            1 => waits.push(session.begin("/v1/locks/k", waiting(60))),
            _ => waits.push(door.begin("/v1/locks/k", "", waiting(60))),
        }
        daemon.wait_for_waiters("k", place + 1);
    }
    let mut waits = waits.into_iter();
    let mut token = grant.token;
    let mut fence = 0;
    for place in 0..6_usize {
        assert_eq!(holder.request("r", "k", &token), "ok");
        token = if place % 3 == 0 {
            let reply = lines[place / 3].line();
            let granted = crate::support::parse_grant(&reply, "ok");
            granted.expect("its turn").token
        } else {
            waits.next().expect("four of them").answer().token()
        };
        let next = crate::support::fence(&token);
        assert!(next > fence, "in the order of arrival");
        fence = next;
        let left = waiter_count(&daemon.stats(), "k");
        assert_eq!(left, 5 - place as u64, "nobody has overtaken");
    }
}

#[test]
fn a_client_that_hangs_up_gives_up_its_claim() {
    let (daemon, door) = granting(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let session = door.session();
    assert_eq!(session.post("/v1/locks/k/enqueue", json!({})).status, 200);
    let leaving = [
        session.begin("/v1/locks/k/wait", json!({ "timeout_s": 60 })),
        session.begin("/v1/locks/k", waiting(60)),
        door.begin("/v1/locks/k", "", waiting(60)),
    ];
    daemon.wait_for_waiters("k", 3);
    // A wait of the same session goes on.
    let staying = session.begin("/v1/locks/k", waiting(60));
    daemon.wait_for_waiters("k", 4);
    leaving.into_iter().for_each(Pending::leave);
    daemon.wait_for_waiters("k", 1);
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    staying.answer().token();
    // A session can wait again after one of its requests has been given up.
    holder.acquire("l", 0);
    let waits = session.begin("/v1/locks/l", waiting(60));
    daemon.wait_for_waiters("l", 1);
    drop(holder);
    waits.answer().token();
}

#[test]
fn a_grant_for_a_client_that_has_left_passes_on() {
    let (daemon, door) = granting(&[]);
    for round in 0..20 {
        let key = format!("k{round}");
        let mut holder = daemon.connect();
        let grant = holder.acquire(&key, 0);
        let path = format!("/v1/locks/{key}");
        let leaving = door.begin(&path, "", waiting(60));
        daemon.wait_for_waiters(&key, 1);
        let mut next = daemon.connect();
        next.send(&format!("l\n{key}\n60\n"));
        daemon.wait_for_waiters(&key, 2);
        // Both at once: the grant may come before the server knows that the client has left.
        leaving.leave();
        assert_eq!(holder.request("r", &key, &grant.token), "ok");
        let reply = next.line();
        assert!(reply.starts_with("ok "), "{reply}");
    }
}

#[test]
fn a_grant_passes_on_if_its_client_leaves_before_it_is_written() {
    let strace = needs!("strace");
    if !may_attach(&strace) {
        return;
    }
    let service = Service::new(&["--http-grants", "--http", "127.0.0.1:0", "--settle", "60"]);
    let daemon = service.start();
    let addr = door_of(&daemon);
    let door = Door { addr };
    let (mut holder, mut next) = (service.connect(), service.connect());
    let grant = holder.acquire("k", 0);
    let mut waiting_are = |count| {
        eventually(PATIENCE, "all wait", || {
            waiter_count(&holder.stats(), "k") == count
        })
    };
    let body = json!({ "acquire_timeout_s": 600, "lease_ttl_s": 600 });
    let leaving = door.begin("/v1/locks/k", "", body);
    waiting_are(1);
    next.send("l\nk\n600\n");
    waiting_are(2);
    let recover = inject(&strace, &daemon, "fsync:delay_enter=60000000");
    holder.send(&format!("r\nk\n{}\n", grant.token));
    eventually(PATIENCE, "it is granted", || {
        waiter_count(&get_json(door.addr, "/v1/stats"), "k") == 1
    });
    leaving.leave();
    recover();
    let reply = next.line();
    assert!(reply.starts_with("ok "), "{reply}");
}

#[test]
fn the_end_of_a_session_ends_its_requests_and_frees_its_locks() {
    let (daemon, door) = granting(&[]);
    let (one, other) = (door.session(), door.session());
    let mut holder = daemon.connect();
    holder.acquire("l", 0);
    one.post("/v1/locks/k", waiting(0)).token();
    let waits = one.begin("/v1/locks/l", waiting(60));
    daemon.wait_for_waiters("l", 1);
    assert_eq!(one.end().status, 204);
    assert_eq!(waits.answer().error(), (410, "session_gone".to_owned()));
    assert_eq!(waiter_count(&daemon.stats(), "l"), 0);
    // All is free when the answer has come.
    other.post("/v1/locks/k", waiting(0)).token();
}

#[test]
fn without_auto_release_a_session_leaves_orphans() {
    let (_daemon, door) = granting(&["--no-auto-release-on-disconnect"]);
    let session = door.session();
    let token = session.post("/v1/locks/k", waiting(0)).token();
    assert_eq!(session.end().status, 204);
    let answer = door.post("/v1/locks/k", waiting(0));
    assert_eq!(answer.json()["status"], "timeout");
    let answer = door.post("/v1/locks/k/release", json!({ "token": token }));
    assert_eq!(answer.status, 204);
}

#[test]
fn without_a_session_a_lock_belongs_to_its_token() {
    let (daemon, door) = granting(&["--max-kept", "1", "--max-keep-time", "100"]);
    let token = door
        .post("/v1/locks/k", json!({ "lease_ttl_s": 60 }))
        .token();
    let holder = &get_json(door.addr, "/v1/stats/holders")["keys"][0]["holders"][0];
    assert_eq!(
        (&holder["conn_id"], &holder["kept"]),
        (&json!(0), &json!(true))
    );
    let tag = holder["tag"].as_str().expect("a tag").to_owned();
    assert!(tag.starts_with("http 127.0.0.1:"), "{tag}");
    let full = door.post("/v1/locks/l", waiting(0));
    assert_eq!(full.error(), (503, "max_locks".to_owned()));
    // What could not be kept is free again.
    let mut client = daemon.connect();
    client.acquire("l", 0);
    let renew = json!({ "token": token, "lease_ttl_s": 90 });
    let renewed = door.post("/v1/locks/k/renew", renew);
    assert_eq!(renewed.json(), json!({ "remaining_s": 90 }));
    let too_long = door.post("/v1/locks/m", json!({ "lease_ttl_s": 101 }));
    assert!(too_long.body.contains("--max-keep-time"), "{too_long:?}");
    let waits = door.begin("/v1/locks/k", "", waiting(60));
    daemon.wait_for_waiters("k", 1);
    let released = door.post("/v1/locks/k/release", json!({ "token": token }));
    assert_eq!(released.status, 204);
    let next = waits.answer().token();
    assert_ne!(next, token);
    assert_eq!(client.request("r", "k", &next), "ok");
}

#[test]
fn a_lock_may_be_held_for_as_long_as_a_hold_may_last() {
    let (_daemon, door) = granting(&["--max-hold", "5"]);
    let granted = door.post("/v1/locks/k", json!({ "lease_ttl_s": 5 }));
    // A part of the second in which the grant began is over when it is kept.
    assert_eq!(granted.json()["lease_ttl_s"], 4);
}

#[test]
fn a_lock_without_a_session_survives_a_crash() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = |name: &str| directory.path().join(name);
    let state = path("state");
    let state = state.to_str().expect("UTF-8");
    let options = ["--http-grants", "--settle", "1", "--state-file", state];
    let start = || {
        let options = [&["--http", "127.0.0.1:0"], &options[..]].concat();
        let daemon = Daemon::start_unix(&path("socket"), &options);
        let addr = door_of(&daemon);
        (daemon, Door { addr })
    };
    let (daemon, door) = start();
    let token = door
        .post(
            "/v1/locks/k",
            json!({ "acquire_timeout_s": 30, "lease_ttl_s": 600 }),
        )
        .token();
    daemon.signal(Signal::KILL);
    daemon.wait_exit(PATIENCE).expect("it is killed");
    let (_daemon, door) = start();
    let renew = json!({ "token": token, "lease_ttl_s": 600 });
    let renewed = door.post("/v1/locks/k/renew", renew);
    assert_eq!(renewed.json(), json!({ "remaining_s": 600 }));
}

#[test]
fn a_drain_answers_the_waiting_and_lets_holders_finish() {
    let (daemon, door) = granting(&[]);
    let session = door.session();
    let token = session.post("/v1/locks/k", waiting(0)).token();
    let waits = [
        session.begin("/v1/locks/k", waiting(60)),
        door.begin("/v1/locks/k", "", waiting(60)),
    ];
    daemon.wait_for_waiters("k", 2);
    daemon.signal(Signal::TERM);
    let draining = (503, "draining".to_owned());
    for wait in waits {
        assert_eq!(wait.answer().error(), draining);
    }
    assert_eq!(session.post("/v1/locks/l", waiting(0)).error(), draining);
    assert_eq!(door.post("/v1/sessions", json!({})).error(), draining);
    let renewed = session.post("/v1/locks/k/renew", json!({ "token": token }));
    assert_eq!(renewed.status, 200);
    let released = session.begin("/v1/locks/k/release", json!({ "token": token }));
    assert_eq!(released.answer().status, 204);
    let status = daemon.wait_exit(PATIENCE).expect("it stops");
    assert!(status.success());
}

#[test]
fn a_server_that_stops_answers_every_waiting_request() {
    let (daemon, door) = granting(&["--shutdown-timeout", "1"]);
    daemon.connect();
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let waits: Vec<Pending> = (0..30)
        .map(|_| door.begin("/v1/locks/k", "", waiting(60)))
        .collect();
    daemon.wait_for_waiters("k", 30);
    drop(holder);
    daemon.signal(Signal::TERM);
    let statuses: Vec<u16> = waits.into_iter().map(|wait| wait.answer().status).collect();
    let refused = statuses.iter().filter(|status| **status == 503).count();
    assert!(
        statuses.iter().all(|status| [200, 503].contains(status)),
        "{statuses:?}"
    );
    assert!(refused >= 28, "{statuses:?}");
}

#[test]
fn waiting_requests_have_places_of_their_own() {
    let (daemon, door) = granting(&["--http-max-waiting", "20"]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    // Requests over several connections come in any order.
    let first = door.begin("/v1/locks/k", "", waiting(60));
    daemon.wait_for_waiters("k", 1);
    let _others: Vec<Pending> = (1..20)
        .map(|_| door.begin("/v1/locks/k", "", waiting(60)))
        .collect();
    daemon.wait_for_waiters("k", 20);
    let refused = door.post("/v1/locks/other", waiting(1));
    assert!(
        refused.head.contains("\r\nRetry-After: 1\r\n"),
        "{refused:?}"
    );
    assert_eq!(refused.error(), (429, "rate_limited".to_owned()));
    daemon.wait_for_log("cap-reached cap=http-max-waiting", PATIENCE);
    // Those that do not wait have others, and so have those who look.
    let token = door.post("/v1/locks/other", waiting(0)).token();
    let release = json!({ "token": token });
    assert_eq!(door.post("/v1/locks/other/release", release).status, 204);
    let lookers: Vec<TcpStream> = (0..8)
        .map(|_| TcpStream::connect(door.addr).expect("the backlog has room"))
        .collect();
    assert_eq!(get_json(door.addr, "/v1/stats")["locks"][0]["waiters"], 20);
    drop(lookers);
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    first.answer().token();
    eventually(PATIENCE, "a place is free", || {
        door.post("/v1/locks/other", waiting(1)).status == 200
    });
}

#[test]
fn sessions_and_requests_are_capped_for_each_address() {
    let options = ["--http-max-waiting", "3", "--max-connections-per-ip", "2"];
    let (daemon, door) = granting(&options);
    let sessions = [door.session(), door.session()];
    let refused = door.ask("POST", "/v1/sessions", "", "");
    assert_eq!(refused.error(), (503, "max_sessions_per_ip".to_owned()));
    let mut others = Vec::new();
    let mut open_from = |last: u8| {
        let mut client = Client::tcp_from([127, 0, 0, last], door.addr);
        client.send(&door.text("POST", "/v1/sessions", "", ""));
        let status = client.line();
        others.push(client);
        status
    };
    assert!(open_from(9).contains(" 200 "));
    let full = open_from(8);
    assert!(full.contains(" 503 "), "{full}");
    assert_eq!(sessions[0].end().status, 204);
    assert!(open_from(7).contains(" 200 "));
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let _waits = [(); 2].map(|()| door.begin("/v1/locks/k", "", waiting(60)));
    daemon.wait_for_waiters("k", 2);
    let refused = door.post("/v1/locks/l", waiting(1));
    assert_eq!(refused.error(), (429, "rate_limited".to_owned()));
    assert!(
        refused.body.contains("--max-connections-per-ip"),
        "{refused:?}"
    );
    daemon.wait_for_log("cap-reached cap=max-connections-per-ip", PATIENCE);
}

#[test]
fn silent_connections_of_one_address_keep_no_other_out() {
    let (_daemon, door) = granting(&["--http-max-waiting", "3"]);
    let _silent: Vec<TcpStream> = (0..40)
        .map(|_| TcpStream::connect(door.addr).expect("the backlog has room"))
        .collect();
    let mut other = Client::tcp_from([127, 0, 0, 9], door.addr);
    other.send("GET /health HTTP/1.0\r\n\r\n");
    let status = other.line();
    assert!(status.contains(" 200 "), "{status}");
}

#[test]
fn a_session_without_room_is_refused() {
    let (_daemon, door) = granting(&["--http-max-waiting", "1"]);
    let session = door.session();
    let refused = door.ask("POST", "/v1/sessions", "", "");
    assert_eq!(refused.error(), (503, "max_sessions".to_owned()));
    assert_eq!(session.end().status, 204);
    door.session();
}

#[test]
fn a_server_with_a_session_does_not_exit_for_being_idle() {
    let (daemon, door) = granting(&["--idle-exit", "1"]);
    let session = door.session();
    let ping = format!("/v1/sessions/{}/ping", session.id);
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        assert_eq!(door.ask("POST", &ping, "", "").status, 204);
    }
    assert_eq!(session.end().status, 204);
    let status = daemon.wait_exit(PATIENCE).expect("nobody is there");
    assert!(status.success());
}

#[test]
fn the_secret_opens_sessions_and_locks() {
    let (_daemon, door) = granting(&["--auth-token", "s3cret"]);
    let unauthorized = (401, "unauthorized".to_owned());
    for (path, header) in [
        ("/v1/sessions", ""),
        ("/v1/locks/k", ""),
        ("/v1/locks/k", "Authorization: Bearer s3cre\r\n"),
    ] {
        let answer = door.ask("POST", path, header, "{}");
        assert_eq!(answer.error(), unauthorized, "{path}");
    }
    let answer = door.ask(
        "POST",
        "/v1/locks/k",
        "Authorization: Bearer s3cret\r\n",
        "{}",
    );
    answer.token();
    assert_eq!(get_json(door.addr, "/v1/openapi.json")["openapi"], "3.1.0");
}

#[test]
fn a_page_elsewhere_can_take_no_lock() {
    let (_daemon, door) = granting(&[]);
    let own = format!("Origin: http://{}\r\n", door.addr);
    assert_eq!(door.ask("POST", "/v1/locks/own", &own, "{}").status, 200);
    for origin in ["http://evil.example", "null", "http://127.0.0.1"] {
        let answer = door.ask(
            "POST",
            "/v1/locks/k",
            &format!("Origin: {origin}\r\n"),
            "{}",
        );
        assert_eq!(answer.error(), (403, "forbidden".to_owned()), "{origin}");
    }
    let request = "POST /v1/locks/k HTTP/1.1\r\nHost: evil.example\r\n\r\n";
    let answer = Answer::parse(&exchange(door.addr, request.as_bytes()));
    assert_eq!(answer.error(), (421, "bad_request".to_owned()));
    let preflight = door.ask(
        "OPTIONS",
        "/v1/locks/k",
        "Origin: http://evil.example\r\n",
        "",
    );
    assert!(!preflight.head.contains("Access-Control"), "{preflight:?}");
    assert_eq!(preflight.status, 405);
}

#[test]
fn a_body_may_come_late_and_in_pieces_but_not_be_long() {
    let (_daemon, door) = granting(&[]);
    let body = r#"{"acquire_timeout_s":0}"#;
    let mut stream = TcpStream::connect(door.addr).expect("the door is open");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    let request = door.text("POST", "/v1/locks/k", "Expect: 100-continue\r\n", body);
    let (head, _) = request.split_once(body).expect("it has a body");
    stream.write_all(head.as_bytes()).expect("it takes it");
    let mut invitation = [0; 25];
    stream.read_exact(&mut invitation).expect("an invitation");
    assert_eq!(&invitation, b"HTTP/1.1 100 Continue\r\n\r\n");
    for byte in body.bytes() {
        stream.write_all(&[byte]).expect("it takes it");
    }
    Pending(stream).answer().token();
    let long = door.ask("POST", "/v1/locks/l", "", &" ".repeat(4097));
    assert_eq!(long.error(), (400, "bad_request".to_owned()));
    let longest = format!("{{}}{}", " ".repeat(4094));
    door.ask("POST", "/v1/locks/l", "", &longest).token();
    let nested = "[".repeat(4000);
    assert_eq!(door.ask("POST", "/v1/locks/m", "", &nested).status, 400);
}

#[test]
fn a_flood_behind_a_waiting_request_ends_the_wait() {
    let (daemon, door) = granting(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let Pending(mut stream) = door.begin("/v1/locks/k", "", waiting(600));
    daemon.wait_for_waiters("k", 1);
    let _ = stream.write_all(&vec![b'x'; 200_000]);
    daemon.wait_for_waiters("k", 0);
}

#[test]
fn a_waiting_request_takes_no_more_memory_than_is_said() {
    const COUNT: u64 = 100;
    let options = ["--http-max-waiting", "100", "--max-connections", "10"];
    let (daemon, door) = granting(&options);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let before = Footprint::of(daemon.pid());
    let sessions: Vec<Session> = (0..COUNT).map(|_| door.session()).collect();
    let waits: Vec<Pending> = sessions
        .iter()
        .map(|session| session.begin("/v1/locks/k", waiting(60)))
        .collect();
    daemon.wait_for_waiters("k", COUNT);
    let after = Footprint::of(daemon.pid());
    let each = (after.resident.saturating_sub(before.resident)) as f64 / COUNT as f64;
    println!("{each:.1} KiB for each session with a waiting request");
    let worst_case = worst_case_mb(&daemon) * 1024;
    assert!(
        after.resident < worst_case,
        "{after:?}, {worst_case} KiB said"
    );
    waits.into_iter().for_each(Pending::leave);
    daemon.wait_for_waiters("k", 0);
    for session in sessions {
        assert_eq!(session.end().status, 204);
    }
    eventually(PATIENCE, "all descriptors are closed", || {
        Footprint::of(daemon.pid()).descriptors <= before.descriptors
    });
}

#[test]
fn the_published_examples_of_dflockd_work_with_curl() {
    let curl = needs!("curl");
    let (daemon, door) = granting(&[]);
    let program = curl;
    let curl = |arguments: &[&str]| -> String {
        let mut command = program.command();
        command.args(["-sS", "--max-time", "30"]).args(arguments);
        let output = command.output().expect("it starts");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    let url = |path: &str| format!("http://{}{path}", door.addr);
    let json = |text: &str| -> Value { serde_json::from_str(text).expect("JSON") };
    let opened = json(&curl(&["-X", "POST", &url("/v1/sessions")]));
    let id = opened["session_id"].as_str().expect("a name");
    let header = format!("X-Dflockd-Session: {id}");
    let lock = url("/v1/locks/deploy-job");
    let asked = r#"{"acquire_timeout_s": 10, "lease_ttl_s": 60}"#;
    let granted = json(&curl(&["-X", "POST", &lock, "-H", &header, "-d", asked]));
    assert_eq!(
        (&granted["status"], &granted["lease_ttl_s"]),
        (&json!("ok"), &json!(60))
    );
    let release = format!(r#"{{"token": {}}}"#, granted["token"]);
    let (typed, path) = ("Content-Type: application/json", format!("{lock}/release"));
    let status = ["-w", "%{http_code}"];
    let arguments = [
        "-X", "POST", &path, "-H", &header, "-H", typed, "-d", &release,
    ];
    assert_eq!(curl(&[&arguments[..], &status].concat()), "204");
    curl(&["-X", "POST", &lock, "-H", &header, "-d", asked]);
    let session = url(&format!("/v1/sessions/{id}"));
    assert_eq!(
        curl(&[&["-X", "DELETE", &session][..], &status].concat()),
        "204"
    );
    daemon.connect().acquire("deploy-job", 0);
    // One line is enough for a script.
    let line = [
        "-f",
        "-X",
        "POST",
        &url("/v1/locks/k"),
        "-d",
        r#"{"acquire_timeout_s":10}"#,
    ];
    assert_eq!(json(&curl(&line))["lease_ttl_s"], 33);
    // A client that curl interrupts leaves no waiter behind.
    let mut waits = program.command();
    waits.args(["-s", "--max-time", "1", "-d", r#"{"acquire_timeout_s":60}"#]);
    let status = waits.arg(url("/v1/locks/k")).status().expect("it starts");
    assert_eq!(status.code(), Some(28));
    daemon.wait_for_waiters("k", 0);
}

#[test]
fn a_session_is_not_idle_while_it_is_used() {
    let (daemon, door) = granting(&[]);
    let session = door.session();
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let waits = session.begin("/v1/locks/k", waiting(60));
    daemon.wait_for_waiters("k", 1);
    // Its other requests are carried out in the meantime.
    let token = session.post("/v1/locks/l", waiting(0)).token();
    assert_eq!(
        session
            .post("/v1/locks/l/renew", json!({ "token": token }))
            .status,
        200
    );
    assert_eq!(daemon.stats()["connections"], 4);
    drop(holder);
    waits.answer().token();
}

/// Waits for the end of a session that is idle, which takes 40 seconds.
#[test]
#[ignore = "takes 40 seconds"]
fn an_idle_session_frees_its_locks() {
    let (daemon, door) = granting(&[]);
    let session = door.session();
    session
        .post("/v1/locks/k", json!({ "lease_ttl_s": 600 }))
        .token();
    let began = Instant::now();
    let mut client = daemon.connect();
    client.send("l\nk\n60\n");
    let reply = client.try_line(Duration::from_secs(60)).expect("it ends");
    assert!(reply.starts_with("ok "), "{reply}");
    assert!(began.elapsed() >= Duration::from_secs(38));
    assert_eq!(session.end().status, 410);
}
