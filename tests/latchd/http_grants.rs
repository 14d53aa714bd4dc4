//! Locks over HTTP: what each request is answered, one queue with the lines, hang-ups, caps and the
//! drain.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use super::fences::{inject, tracer};
use super::http::{daemon_with_door, exchange, json as get_json};
use super::restart::Service;
use crate::support::footprint::{worst_case_mb, Footprint};
use crate::support::group::Group;
use crate::support::needs::needs;
use crate::support::silent::free_addr;
use crate::support::transcript::door_of;
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
    let Some(strace) = tracer() else { return };
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
    let recover = inject(&strace, &daemon, "fsync,fdatasync:delay_enter=60000000");
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
fn curl_gets_a_lock_in_one_line_and_leaves_no_waiter_behind() {
    let curl = needs!("curl");
    let (daemon, door) = granting(&[]);
    let claim = |seconds: &str, key: &str, body: &str| {
        let mut command = curl.command();
        command.args(["-fsS", "--max-time", seconds, "-X", "POST", "-d", body]);
        command.arg(format!("http://{}/v1/locks/{key}", door.addr));
        command.output().expect("it starts")
    };
    let granted = claim("30", "k", r#"{"acquire_timeout_s":10}"#);
    let granted: Value = serde_json::from_slice(&granted.stdout).expect("JSON");
    assert_eq!(granted["lease_ttl_s"], 33);
    let interrupted = claim("1", "k", r#"{"acquire_timeout_s":60}"#);
    assert_eq!(interrupted.status.code(), Some(28));
    daemon.wait_for_waiters("k", 0);
}

#[test]
fn of_two_waits_of_a_session_one_has_the_grant() {
    let (daemon, door) = granting(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let session = door.session();
    let entered = session.post("/v1/locks/k/enqueue", json!({}));
    assert_eq!(entered.json()["status"], "queued");
    let waits = [(); 2].map(|()| session.begin("/v1/locks/k/wait", json!({ "timeout_s": 60 })));
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    let answers = waits.map(|wait| wait.answer().json());
    let granted = answers.iter().filter(|answer| answer["status"] == "ok");
    assert_eq!(granted.count(), 1, "{answers:?}");
}

#[test]
fn a_client_behind_haproxy_that_leaves_gives_up_its_claim() {
    let haproxy = needs!("haproxy");
    let (daemon, door) = granting(&[]);
    let directory = tempfile::tempdir().expect("there is room for a directory");
    let (settings, proxy) = (directory.path().join("cfg"), free_addr());
    // As latchd-http(7) says.
    let text = format!(
        "defaults\n mode http\n option abortonclose\n timeout connect 9m\n timeout client 9m\n \
         timeout server 9m\nfrontend f\n bind {proxy}\n default_backend b\nbackend b\n \
         server s {}\n",
        door.addr
    );
    std::fs::write(&settings, text).expect("there is room");
    let mut command = haproxy.command();
    let _proxy = Group::spawn(command.arg("-db").arg("-f").arg(settings));
    eventually(PATIENCE, "the proxy listens", || {
        TcpStream::connect(proxy).is_ok()
    });
    let behind = Door { addr: proxy };
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let waits: Vec<Pending> = (0..8)
        .map(|_| behind.begin("/v1/locks/k", "", waiting(600)))
        .collect();
    daemon.wait_for_waiters("k", 8);
    waits.into_iter().for_each(Pending::leave);
    daemon.wait_for_waiters("k", 0);
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    door.post("/v1/locks/k", waiting(0)).token();
}

/// The columns of each row of `operations.txt`.
fn operations() -> impl Iterator<Item = [&'static str; 4]> {
    let lines = include_str!("operations.txt").lines();
    let rows = lines.filter(|line| !line.starts_with('#'));
    rows.map(|row| {
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        columns.try_into().expect("four columns")
    })
}

#[test]
fn a_client_made_from_the_description_of_dflockd_fits() {
    let (_daemon, door) = granting(&[]);
    let described = get_json(door.addr, "/v1/openapi.json");
    assert_eq!(described["servers"], json!([{ "url": "/" }]));
    let mut ids = Vec::new();
    for (path, operations) in described["paths"].as_object().expect("paths") {
        for (method, operation) in operations.as_object().expect("methods") {
            ids.push(
                operation["operationId"]
                    .as_str()
                    .expect("a name")
                    .to_owned(),
            );
            let content = &operation["responses"]["200"]["content"];
            let is_empty = operation["responses"]["204"].is_object();
            assert!(
                is_empty || content.is_object(),
                "{method} {path}: {operation}"
            );
        }
    }
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "{ids:?}");
    for [id, path, asked, answered] in operations() {
        let method = if id == "deleteSession" {
            "delete"
        } else {
            "post"
        };
        let operation = &described["paths"][path][method];
        assert_eq!(operation["operationId"], id, "{path}");
        let schema_in = |body: &Value| body["content"]["application/json"]["schema"].clone();
        let is_required = |schema: &Value, name: &str| {
            let required = schema["required"].as_array().map(Vec::as_slice);
            required.unwrap_or_default().iter().any(|it| it == name)
        };
        let schema = schema_in(&operation["requestBody"]);
        for field in asked.split_whitespace() {
            let name = field.trim_end_matches('!');
            assert!(schema["properties"][name].is_object(), "{id}: {name}");
            let may_lack = name == field;
            assert!(!(may_lack && is_required(&schema, name)), "{id}: {name}");
        }
        let properties = schema["properties"].as_object().into_iter().flatten();
        for (name, _) in properties {
            let is_known = asked
                .split_whitespace()
                .any(|it| it.trim_end_matches('!') == name);
            assert!(is_known || !is_required(&schema, name), "{id}: {name}");
        }
        let status = if answered.is_empty() { "204" } else { "200" };
        let response = &operation["responses"][status];
        assert!(response.is_object(), "{id}: {operation}");
        let schema = schema_in(response);
        for field in answered.split_whitespace() {
            let name = field.trim_end_matches('!');
            assert!(schema["properties"][name].is_object(), "{id}: {name}");
            assert_eq!(is_required(&schema, name), name != field, "{id}: {name}");
        }
    }
    let words = |id: &str| {
        let [_, path, ..] = operations().find(|it| it[0] == id).expect("it is there");
        let content = &described["paths"][path]["post"]["responses"]["200"]["content"];
        content["application/json"]["schema"]["properties"]["status"]["enum"].clone()
    };
    for (id, expected) in [
        ("acquireLock", json!(["ok", "timeout"])),
        ("waitSemaphore", json!(["ok", "timeout"])),
        ("enqueueLock", json!(["acquired", "queued"])),
    ] {
        assert_eq!(words(id), expected, "{id}");
    }
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
