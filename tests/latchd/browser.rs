//! The page of the HTTP door in a browser: Chromium without a window, driven through two pipes by
//! the DevTools protocol, a message of JSON and a NUL each.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{channel, Receiver};
use std::thread;

use serde_json::{json, Value};

use super::http::daemon_with_door;
use crate::support::group::Group;
use crate::support::needs::{needs, Program};
use crate::support::silent::free_addr;
use crate::support::{eventually, is_soon, Client, Daemon, PATIENCE};

/// One tab of a browser of its own.
struct Browser {
    _process: Group,
    requests: ChildStdin,
    messages: Receiver<Value>,
    last_id: u64,
    session: Value,
    /// What the page has thrown, and what it was kept from by its policy.
    complaints: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    fn open(chromium: &Program, url: &str) -> Browser {
        let profile = tempfile::tempdir().expect("there is room for a directory");
        // Root may not use its sandbox; a container may have little in /dev/shm.
        let script = "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1";
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).arg(chromium);
        command.args(["--headless", "--no-sandbox", "--disable-dev-shm-usage"]);
        command.args(["--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]);
        let folder = profile.path().display();
        command.arg(format!("--user-data-dir={folder}"));
        // Where a browser keeps things beside its profile.
        command.env("HOME", profile.path());
        command.env("TMPDIR", profile.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Group::spawn(&mut command);
        let requests = process.0.stdin.take().expect("it is piped");
        let answers = BufReader::new(process.0.stdout.take().expect("it is piped"));
        let (sender, messages) = channel();
        thread::spawn(move || {
            for message in answers.split(0).map_while(Result::ok) {
                let _ = sender.send(serde_json::from_slice(&message).expect("JSON"));
            }
        });
        let mut browser = Browser {
            _process: process,
            requests,
            messages,
            last_id: 0,
            session: Value::Null,
            complaints: Vec::new(),
            _profile: profile,
        };
        let tab = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let tab = json!({"targetId": tab["targetId"], "flatten": true});
        browser.session = browser.call("Target.attachToTarget", tab)["sessionId"].take();
        for domain in ["Runtime", "Audits", "Page"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser.call("Page.navigate", json!({"url": url}));
        browser
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let mut request = json!({"id": self.last_id, "method": method, "params": params});
        if !self.session.is_null() {
            request["sessionId"] = self.session.clone();
        }
        let written = write!(self.requests, "{request}\0");
        written.expect("the browser reads");
        loop {
            let message = self.messages.recv_timeout(PATIENCE);
            let mut message = message.unwrap_or_else(|_| panic!("no answer to {method}"));
            if message["id"] == self.last_id {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].take();
            }
            if message["method"] == "Runtime.exceptionThrown"
                || message["params"]["issue"]["code"] == "ContentSecurityPolicyIssue"
            {
                self.complaints.push(message);
            }
        }
    }

    /// What an expression in JavaScript is, in the page.
    fn value(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true});
        self.call("Runtime.evaluate", params)["result"]["value"].take()
    }

    /// What the page shows in the elements of a selector.
    fn text(&mut self, selector: &str) -> String {
        let script = format!(
            "[...document.querySelectorAll({selector:?})].filter((it) => it.checkVisibility())\
             .map((it) => it.innerText).join('|')"
        );
        self.value(&script).as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the page shows this text in the elements of a selector.
    fn expect(&mut self, selector: &str, text: &str) {
        let mut shown = String::new();
        let is_shown = is_soon(PATIENCE, || {
            shown = self.text(selector);
            shown == text
        });
        assert!(is_shown, "{selector}: {text:?} expected, {shown:?} shown");
    }

    fn filter(&mut self, words: &str) {
        self.value(&format!(
            "{{ const it = document.getElementById('filter'); it.value = {words:?}; \
             it.dispatchEvent(new Event('input')); }}"
        ));
    }
}

fn tagged(daemon: &Daemon, tag: &str) -> Client {
    let mut client = daemon.connect();
    assert_eq!(client.request("tag", "_", tag), "ok");
    client
}

#[test]
fn a_browser_shows_keys_as_text_and_filters_them() {
    let chromium = needs!("chromium");
    let (daemon, door) = daemon_with_door(&[]);
    let mut browser = Browser::open(&chromium, &format!("http://{door}/"));
    browser.expect("#state", "live");
    browser.expect("#none", "No locks in use.");
    browser.expect("#rows > tr", "");

    let script = "<script>document.title='script'</script>";
    let tag = "<img src=x onerror=document.title='tag'>";
    let _held = [(script, tag), ("nightly", "backup.sh"), ("other", "x")].map(|(key, tag)| {
        let mut client = tagged(&daemon, tag);
        client.acquire(key, 0);
        client
    });
    let mut client = tagged(&daemon, "report.sh");
    client.send("l\nnightly\n60\n");
    browser.expect("#count", "3 in use");
    // Who waits for longest is first.
    browser.expect("#rows > tr:first-child .key", "nightly");
    browser.expect("#rows > tr:first-child .kind", "lock, 1 waiting");
    browser.expect("#rows > tr:first-child .place .who", "backup.sh");
    browser.expect("#rows > tr:first-child .waiter .who", "report.sh");
    let waiter = browser.text("#rows > tr:first-child .waiter .peer");
    assert!(waiter.starts_with("127.0.0.1:"), "{waiter}");
    browser.filter("SCRIPT>");
    browser.expect("#count", "1 of 3 in use");
    browser.expect(".key", script);
    browser.expect(".place .who", tag);
    browser.filter("report");
    browser.expect(".key", "nightly");
    browser.filter("no such");
    browser.expect("#none", "No matches.");
    assert_eq!(browser.value("document.title"), "latchd");
    assert_eq!(browser.value("document.images.length"), 1, "the icon");
    assert!(browser.complaints.is_empty(), "{:?}", browser.complaints);
}

#[test]
fn a_tag_changes_no_direction_of_writing_in_a_browser() {
    let chromium = needs!("chromium");
    let (daemon, door) = daemon_with_door(&[]);
    let mut client = tagged(&daemon, "\u{202e}\u{5d0}\u{5d1}\u{200b}");
    client.acquire("\u{2066}ключ", 0);
    let mut browser = Browser::open(&chromium, &format!("http://{door}/"));
    browser.expect(".key bdi", "\\u{2066}ключ");
    browser.expect(".place .who bdi", "\\u{202e}\u{5d0}\u{5d1}\\u{200b}");
    let peer = browser.text(".place .peer bdi");
    assert!(peer.starts_with("127.0.0.1:"), "{peer}");
}

#[test]
fn a_browser_says_how_a_key_is_held() {
    let chromium = needs!("chromium");
    let (daemon, door) = daemon_with_door(&[]);
    let mut client = tagged(&daemon, "anna");
    let grant = client.acquire("kept", 0);
    let keep = format!("{} 3600", grant.token);
    assert_eq!(client.request("keep", "kept", &keep), "ok 3600");
    for (command, key, argument) in [
        ("sl", "pool", "0 3 600 slots=2"),
        ("l", "report", "0 600 shared"),
    ] {
        let reply = client.request(command, key, argument);
        assert!(reply.starts_with("ok "), "{reply}");
    }
    let mut browser = Browser::open(&chromium, &format!("http://{door}/"));
    browser.expect("#count", "3 in use");
    for (key, kind) in [
        ("kept", "lock"),
        ("pool", "semaphore, 2 of 3 held"),
        ("report", "lock, shared by 1"),
    ] {
        browser.filter(key);
        browser.expect(".key", key);
        browser.expect(".kind", kind);
    }
    browser.filter("pool");
    browser.expect(".badge", "2 slots");
    browser.filter("report");
    browser.expect(".badge", "shared");
    browser.filter("kept");
    browser.expect(".key", "kept");
    browser.expect(".badge", "reserved");
    let peer = browser.text(".place .peer");
    // The fence may be in a line of its own.
    let words: Vec<&str> = peer
        .split(&[' ', '\n', '·'][..])
        .filter(|it| !it.is_empty())
        .collect();
    assert_eq!(words[..3], ["no", "connection", "fence"], "{peer}");
    // An hour is left of an hour.
    let width = browser.value("document.querySelector('.lease i').style.width");
    let width = width
        .as_str()
        .and_then(|it| it.strip_suffix('%')?.parse::<f64>().ok());
    assert!(width.is_some_and(|width| width > 90.0), "{width:?}");
}

#[test]
fn a_browser_goes_to_a_key_and_keeps_the_filter_in_the_url() {
    let chromium = needs!("chromium");
    let (daemon, door) = daemon_with_door(&[]);
    let mut client = daemon.connect();
    let quote = "it's";
    for key in ["nightly", "nightly-2", quote] {
        client.acquire(key, 0);
    }
    let mut browser = Browser::open(&chromium, &format!("http://{door}/#q=nightly-2"));
    browser.expect("#count", "1 of 3 in use");
    browser.expect(".key", "nightly-2");
    browser.filter("it");
    browser.expect(".key", quote);
    assert_eq!(browser.value("location.hash"), "#q=it");
    browser.value("document.querySelector('.break').click()");
    let fence = browser.text(".place .peer");
    let fence = fence
        .split("fence ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let fence = fence.expect("a fence").to_owned();
    browser.expect("#text", &format!("latch break 'it'\\''s' --fence {fence}"));
    browser.filter("");
    browser.value(
        "[...document.querySelectorAll('.key')].find((it) => it.innerText === 'nightly').click()",
    );
    browser.expect("#count", "1 of 3 in use");
    browser.expect(".key", "nightly");
    browser.value("document.getElementById('all').click()");
    browser.expect("#count", "3 in use");
    assert!(browser.complaints.is_empty(), "{:?}", browser.complaints);
}

#[test]
fn a_browser_shows_what_it_has_not_seen() {
    let chromium = needs!("chromium");
    let (daemon, door) = daemon_with_door(&[]);
    let mut client = daemon.connect();
    client.acquire("k", 0);
    eventually(PATIENCE, "two samples", || {
        let samples = super::http::json(door, "/v1/stats/history");
        samples["samples"]
            .as_array()
            .is_some_and(|all| all.len() > 1)
    });
    let mut browser = Browser::open(&chromium, &format!("http://{door}/"));
    browser.expect("#state", "live");
    let count = browser.value("samples.length").as_u64();
    assert!(count.is_some_and(|count| count > 2), "{count:?}");
    // No claim has been granted for a while: that is no wait of no length.
    browser.expect("#plots > :last-child .value", "no grant");
}

#[test]
fn a_browser_shows_the_first_200_of_5000_keys() {
    let chromium = needs!("chromium");
    let (daemon, door) = daemon_with_door(&["--max-locks", "5000", "--max-per-connection", "5000"]);
    let mut client = daemon.connect();
    for number in 0..5000 {
        client.acquire_for(&format!("orders/{number}"), 0, 600);
    }
    let mut browser = Browser::open(&chromium, &format!("http://{door}/"));
    browser.expect("#count", "5,000 in use");
    browser.expect("#more", "4,800 more");
    assert_eq!(
        browser.value("document.querySelectorAll('#rows > tr').length"),
        200
    );
    let first = browser.value("answeredAt").as_f64();
    eventually(PATIENCE, "it goes on asking", || {
        browser.value("answeredAt").as_f64() > first
    });
    browser.filter("orders/4321");
    browser.expect(".key", "orders/4321");
    browser.filter("");
    browser.value("document.getElementById('more').click()");
    browser.expect("#more", "4,600 more");
}

#[test]
fn a_browser_says_that_the_server_is_gone_and_that_it_is_back() {
    let chromium = needs!("chromium");
    let door = free_addr();
    let serve = || Daemon::start_alone(&["--http", &door.to_string()]);
    let daemon = serve();
    let mut browser = Browser::open(&chromium, &format!("http://{door}/"));
    browser.expect("#state", "live");
    browser.expect("#none", "No locks in use.");
    drop(daemon);
    eventually(PATIENCE, "it says so", || {
        browser.text("#state").starts_with("no answer for ")
    });
    let said = browser.text("#gone");
    assert!(
        said.starts_with("The server does not answer. What is shown is "),
        "{said}"
    );
    let title = browser.value("document.title");
    assert!(
        title
            .as_str()
            .is_some_and(|it| it.starts_with("latchd: no answer")),
        "{title}"
    );
    // Nobody knows that now.
    browser.expect("#none", "");
    let _daemon = serve();
    browser.expect("#state", "live");
    browser.expect("#gone", "");
    assert_eq!(browser.value("document.title"), "latchd");
    assert!(browser.complaints.is_empty(), "{:?}", browser.complaints);
}

#[test]
fn a_browser_gives_the_auth_token_as_a_password() {
    let chromium = needs!("chromium");
    let (_daemon, door) = daemon_with_door(&["--auth-token", "s3cret"]);
    let mut browser = Browser::open(&chromium, &format!("http://anna:s3cret@{door}/"));
    browser.expect("#state", "live");
}

#[test]
fn a_browser_names_the_job_that_did_not_run() {
    let chromium = needs!("chromium");
    let (daemon, door) = daemon_with_door(&["--expect", "nightly=1s,weekly=8d"]);
    let mut client = tagged(&daemon, "<i>backup.sh");
    for status in [0, 3] {
        let grant = client.acquire("weekly", 0);
        let refused = tagged(&daemon, "<i>late").request("l", "weekly", "0");
        assert_eq!(refused, "timeout");
        let argument = format!("{} status={status}", grant.token);
        assert_eq!(client.request("r", "weekly", &argument), "ok");
    }
    eventually(PATIENCE, "a job is overdue", || {
        super::http::json(door, "/v1/stats/runs")["keys"][0]["expected"]["overdue"] == true
    });
    let mut browser = Browser::open(&chromium, &format!("http://{door}/"));
    browser.expect(".job .name", "nightly|weekly");
    browser.expect(".late .standing", "did not run: no success yet");
    let standing = browser.text(".job:last-child .standing");
    let words: Vec<&str> = standing.split(", refused ").collect();
    assert!(words[0].starts_with("on time: last success "), "{standing}");
    assert!(words[1].ends_with(" ago"), "{standing}");
    let title = browser.value("document.querySelector('.job:last-child .standing').title");
    assert_eq!(title, "busy: <i>late; held by <i>backup.sh");
    let runs = "[...document.querySelectorAll('.run')]";
    let levels = browser.value(&format!("{runs}.map((it) => it.className).join()"));
    assert_eq!(levels, "run good,run bad");
    let title = browser.value(&format!("{runs}[1].title"));
    let title = title.as_str().expect("text");
    assert!(
        title.starts_with("released ") && title.contains(", status 3, held "),
        "{title}"
    );
    assert!(title.ends_with("<i>backup.sh"), "{title}");
    assert!(browser.complaints.is_empty(), "{:?}", browser.complaints);
}
