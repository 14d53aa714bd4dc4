//! The HTTP door: what it shows, to whom, and what it refuses.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::support::group::Group;
use crate::support::needs::needs;
use crate::support::silent::{free_addr, free_port};
use crate::support::transcript::door_of;
use crate::support::{eventually, is_soon, Daemon, PATIENCE};

/// A daemon with a door, and where that is.
pub(super) fn daemon_with_door(options: &[&str]) -> (Daemon, SocketAddr) {
    let daemon = Daemon::start_alone(&[&["--http", "127.0.0.1:0"], options].concat());
    let addr = door_of(&daemon);
    (daemon, addr)
}

/// All that the door answers to these bytes, until it closes.
pub(super) fn exchange(addr: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(addr).expect("the door is open");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    stream.write_all(request).expect("it takes it");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("it closes in time");
    String::from_utf8(answer).expect("text")
}

pub(super) fn get_with(addr: SocketAddr, path: &str, headers: &str) -> (u16, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\n{headers}\r\n");
    let answer = exchange(addr, request.as_bytes());
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).expect("a status");
    (status.parse().expect("a number"), body.to_owned())
}

fn get(addr: SocketAddr, path: &str) -> (u16, String) {
    get_with(addr, path, "")
}

pub(super) fn json(addr: SocketAddr, path: &str) -> serde_json::Value {
    let (status, body) = get(addr, path);
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

#[test]
fn the_statistics_are_those_of_the_protocol() {
    let (daemon, door) = daemon_with_door(&["--max-locks", "3000", "--max-per-connection", "3000"]);
    let mut client = daemon.connect();
    let key = "<script>\u{ff1c}\"\\";
    let grant = client.acquire(key, 0);
    assert_eq!(json(door, "/v1/stats")["locks"][0]["key"], key);
    let holders = json(door, "/v1/stats/holders");
    assert_eq!(holders["keys"][0]["key"], key);
    assert_eq!(
        holders["keys"][0]["holders"][0]["tag"],
        serde_json::Value::Null
    );
    let counters = json(door, "/v1/stats/counters?x");
    assert_eq!(counters["counters"]["grants"], 1);
    assert_eq!(counters["oldest_hold"]["lock"], key);
    let (status, metrics) = get(door, "/metrics");
    assert_eq!(status, 200);
    assert!(metrics.contains("\nlatchd_grants_total 1\n"), "{metrics}");
    assert_eq!(client.request("r", key, &grant.token), "ok");
    for number in 0..2000 {
        client.acquire(&format!("k{number}"), 0);
    }
    let keys = json(door, "/v1/stats/holders")["keys"]
        .as_array()
        .map(Vec::len);
    assert_eq!(keys, Some(2000));
}

#[test]
fn the_metrics_count_what_has_happened() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("fences");
    let file = ["--fence-state-file", file.to_str().expect("UTF-8")];
    let (daemon, door) = daemon_with_door(&file);
    let mut client = daemon.connect();
    let value = |series: &str| {
        let metrics = get(door, "/metrics").1;
        let mut lines = metrics.lines().map(|line| line.split_once(' '));
        let value = lines.find_map(|line| line.filter(|(name, _)| *name == series));
        value.and_then(|(_, value)| value.parse::<f64>().ok())
    };
    let left = value("latchd_fences_left").expect("a range");
    let grant = client.acquire("released", 0);
    assert_eq!(client.request("r", "released", &grant.token), "ok");
    client.acquire("held", 0);
    assert_eq!(client.request("l", "held", "0"), "timeout");
    assert_eq!(client.request("l", "held", "1"), "timeout");
    assert_eq!(client.request("r", "held", &grant.token), "error");
    for (series, expected) in [
        ("latchd_up", 1.0),
        ("latchd_grants_total", 2.0),
        ("latchd_releases_total", 1.0),
        ("latchd_wait_timeouts_total", 1.0),
        ("latchd_refusals_total{reason=\"busy\"}", 1.0),
        ("latchd_refusals_total{reason=\"not_held\"}", 1.0),
        ("latchd_refusals_total{reason=\"max_locks\"}", 0.0),
        ("latchd_keys{kind=\"semaphore\"}", 0.0),
        ("latchd_waiters", 0.0),
        ("latchd_grant_wait_seconds_count", 0.0),
        ("latchd_grant_wait_seconds_bucket{le=\"0.001\"}", 0.0),
        ("latchd_grant_wait_seconds_bucket{le=\"3600.000\"}", 0.0),
        ("latchd_grant_wait_seconds_bucket{le=\"+Inf\"}", 0.0),
        ("latchd_fences_left", left - 2.0),
    ] {
        assert_eq!(value(series), Some(expected), "{series}");
    }
}

#[test]
fn promtool_accepts_the_metrics_of_the_door() {
    let promtool = needs!("promtool");
    let (daemon, door) = daemon_with_door(&["--expect", "a\"b\\=1h"]);
    daemon.connect().acquire("k", 0);
    let mut checking = promtool
        .command()
        .args(["check", "metrics"])
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let metrics = get(door, "/metrics").1;
    let mut stdin = checking.stdin.take().expect("it is piped");
    stdin.write_all(metrics.as_bytes()).expect("it reads");
    drop(stdin);
    let checked = checking.wait_with_output().expect("it is ours");
    assert_eq!(String::from_utf8_lossy(&checked.stderr), "");
    assert!(checked.status.success());
    let key = r#"latchd_expected_seconds{key="a\"b\\"} 3600.000"#;
    assert!(metrics.lines().any(|line| line == key), "{metrics}");
    assert!(!metrics.contains("latchd_fences_left"), "{metrics}");
}

#[test]
fn prometheus_scrapes_the_door() {
    let prometheus = needs!("prometheus");
    let (daemon, door) = daemon_with_door(&["--auth-token", "s3cret"]);
    let mut client = daemon.connect();
    assert_eq!(client.request("auth", "_", "s3cret"), "ok");
    client.acquire("k", 0);
    let folder = tempfile::tempdir().expect("there is room for a directory");
    let config = folder.path().join("prometheus.yml");
    let scrape = format!(
        "scrape_configs:\n- job_name: latchd\n  scrape_interval: 100ms\n  scrape_timeout: 100ms\n  \
         authorization: {{credentials: s3cret}}\n  static_configs: [{{targets: ['{door}']}}]\n"
    );
    std::fs::write(&config, scrape).expect("it is ours");
    let addr = free_addr();
    let mut command = prometheus.command();
    command.arg(format!("--config.file={}", config.display()));
    command.arg(format!("--storage.tsdb.path={}", folder.path().display()));
    command.arg(format!("--web.listen-address={addr}"));
    command.stderr(std::process::Stdio::null());
    let _prometheus = Group::spawn(&mut command);
    for series in ["up", "latchd_grants_total", "latchd_keys{kind=\"lock\"}"] {
        let query = series.replace('"', "%22");
        let path = format!("/api/v1/query?query={query}");
        let mut answer = String::new();
        let is_found = is_soon(PATIENCE, || {
            if TcpStream::connect(addr).is_ok() {
                answer = get_with(addr, &path, "Connection: close\r\n").1;
            }
            answer.contains("\"__name__\"") && answer.contains(",\"1\"]")
        });
        assert!(is_found, "{series}: {answer}");
    }
}

#[test]
fn the_page_loads_nothing_from_elsewhere() {
    let (_daemon, door) = daemon_with_door(&[]);
    let request = format!("GET / HTTP/1.1\r\nHost: {door}\r\n\r\n");
    let page = exchange(door, request.as_bytes());
    assert!(page.contains("Content-Security-Policy: default-src 'none'; script-src 'self';"));
    assert!(!page.contains("Access-Control"));
    let script = get(door, "/page.js").1;
    for (name, text) in [("page", &page), ("script", &script)] {
        let mut others = text.matches("://").count();
        // The name of the namespace of SVG is no address.
        others -= text.matches("http://www.w3.org/2000/svg").count();
        assert_eq!(others, 0, "{name}");
        for word in ["innerHTML", "style=", "onclick=", "eval("] {
            assert!(!text.contains(word), "{word} in the {name}");
        }
    }
    // A proxy may put the page below a path.
    for name in ["src=\"/", "href=\"/"] {
        assert!(!page.contains(name), "{name}");
    }
    // Without JavaScript, nothing would change this.
    assert!(!page.contains("connecting"));
    for path in ["/page.css", "/icon.svg"] {
        assert_eq!(get(door, path).0, 200, "{path}");
    }
}

#[test]
fn the_port_of_dflockds_http_says_what_it_does_not_do() {
    let port = free_port();
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port", "--http-host", "127.0.0.2"]);
    command.env("DFLOCKD_HTTP_PORT", port.to_string());
    let daemon = Daemon::from_command(command);
    daemon.wait_for_log(&format!("listening http=127.0.0.2:{port}"), PATIENCE);
    let told = "INFO http-is-read-only setting=DFLOCKD_HTTP_PORT hint=";
    assert_eq!(daemon.log().matches(told).count(), 1);
    let request = "POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.2\r\nContent-Length: 0\r\n\r\n";
    let answer = exchange(([127, 0, 0, 2], port).into(), request.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
    assert!(answer.contains("latchd --http-grants"), "{answer}");
}

#[test]
fn the_door_goes_by_the_name_of_its_host() {
    let (_daemon, door) = daemon_with_door(&[]);
    let own = rustix::system::uname();
    let own = own.nodename().to_str().expect("text");
    for name in [own, &format!("{own}.")] {
        let request = format!("GET /v1/stats HTTP/1.1\r\nHost: {name}\r\n\r\n");
        let answer = exchange(door, request.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
}

#[test]
fn one_door_may_be_at_several_addresses() {
    let daemon =
        Daemon::start_alone(&["--http", "127.0.0.1:0,127.0.0.2:0", "--http", "127.0.0.3:0"]);
    let log = || daemon.log();
    eventually(PATIENCE, "three doors", || {
        log().matches("listening http=").count() == 3
    });
    for line in log().lines() {
        if let Some((_, addr)) = line.split_once("listening http=") {
            assert_eq!(get(addr.parse().expect("an address"), "/health").0, 200);
        }
    }
}

#[test]
fn a_crowd_at_the_door_keeps_no_client_from_its_locks() {
    let (daemon, door) = daemon_with_door(&[]);
    let crowd: Vec<TcpStream> = (0..40)
        .map(|_| {
            let mut stream = TcpStream::connect(door).expect("the backlog has room");
            let _ = stream.write_all(b"GET / HT");
            stream
        })
        .collect();
    let mut client = daemon.connect();
    let grant = client.acquire("k", 0);
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    // Those who say nothing lose their places in time.
    let began = Instant::now();
    eventually(PATIENCE, "a place at the door", || {
        let mut stream = TcpStream::connect(door).expect("the door is open");
        let _ = stream.write_all(b"GET /health HTTP/1.0\r\n\r\n");
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer.starts_with("HTTP/1.1 200")
    });
    assert!(began.elapsed() < Duration::from_secs(20));
    drop(crowd);
}

#[test]
fn without_the_option_no_request_for_a_lock_is_described() {
    let (_daemon, door) = daemon_with_door(&[]);
    let described = json(door, "/v1/openapi.json");
    assert!(described["paths"]["/v1/locks/{key}"].is_null());
    assert!(described["paths"]["/v1/stats"]["get"].is_object());
}
