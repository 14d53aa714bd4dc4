use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::thread;

use tempfile::NamedTempFile;

use super::*;

/// A member that gives these answers, one to each request, each over a connection of its own where
/// it ends with the stream.
fn member(answers: Vec<String>) -> (Member, thread::JoinHandle<Vec<String>>) {
    let (listener, member) = listening();
    let serve = move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut requests = Vec::new();
        for answer in answers {
            requests.push(request(&mut stream));
            stream.write_all(answer.as_bytes()).expect("a reader");
        }
        requests
    };
    (member, thread::spawn(serve))
}

/// A member that accepts connections, and answers only if the test does.
fn listening() -> (TcpListener, Member) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let member = Member {
        address: listener.local_addr().expect("an address").to_string(),
        speaks_tls: false,
    };
    (listener, member)
}

fn request(stream: &mut impl Read) -> String {
    let mut request = Vec::new();
    let mut byte = [0];
    while !request.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).expect("a head");
        request.push(byte[0]);
    }
    let head = String::from_utf8(request).expect("text");
    let len = head.split("Content-Length: ").nth(1).expect("a length");
    let len = len.split("\r\n").next().and_then(|len| len.parse().ok());
    let mut body = vec![0; len.expect("a number")];
    stream.read_exact(&mut body).expect("a body");
    head + &String::from_utf8(body).expect("text")
}

fn ok(body: &str) -> String {
    let len = body.len();
    format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n\r\n{body}")
}

/// The head of an answer in chunks.
const HEAD: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

fn refused(status: u16, code: u64) -> String {
    refused_because(status, code, "no")
}

fn refused_because(status: u16, code: u64, why: &str) -> String {
    let body = format!(r#"{{"error":"{why}","message":"{why}","code":{code}}}"#);
    let len = body.len();
    format!(
        "HTTP/1.1 {status} No\r\nTransfer-Encoding: chunked\r\n\r\n{len:x}\r\n{body}\r\n0\r\n\
         Grpc-Status: {code}\r\n\r\n"
    )
}

/// A gateway that even a late machine answers in time.
fn gateway(members: &[Member]) -> Gateway {
    Gateway::new(&settings(members, None), Duration::from_secs(60))
}

/// A gateway that asks as the user `u`, and the file of its password, `p`.
fn gateway_with_user(member: Member, timeout: Duration) -> (Gateway, NamedTempFile) {
    let file = NamedTempFile::new().expect("there is room");
    fs::write(file.path(), "p").expect("there is room");
    let settings = settings(&[member], Some(("u", file.path())));
    (Gateway::new(&settings, timeout), file)
}

fn settings(members: &[Member], user: Option<(&str, &Path)>) -> ClusterSettings {
    ClusterSettings {
        members: members.to_vec(),
        advertise: String::new(),
        prefix: String::new(),
        ttl: Duration::ZERO,
        user: user.map(|(name, file)| (name.into(), file.into())),
        tls: None,
    }
}

#[test]
fn what_etcd_leaves_out_is_zero_or_false() {
    let kv = r#"{"key":"YQ==","create_revision":"7","mod_revision":"9","version":"2"}"#;
    let header = r#""header":{"revision":"9"}"#;
    let range = format!(r#"{{{header},"responses":[{{"response_range":{{"kvs":[{kv}]}}}}]}}"#);
    let answers = vec![
        ok(&range),
        ok(&format!(r#"{{{header},"succeeded":true}}"#)),
        ok(r#"{"result":{}}"#),
    ];
    let (member, requests) = member(answers);
    let mut gateway = gateway(&[member]);
    let found = gateway.txn("", "", "").expect("an answer");
    assert!(!found.succeeded);
    let expected = KeyValue {
        key: b"a".into(),
        value: Vec::new(),
        create_revision: 7,
        version: 2,
        lease: 0,
    };
    assert_eq!(found.found, [expected]);
    assert!(gateway.txn("", "", "").expect("an answer").succeeded);
    assert_eq!(gateway.keep_alive(5), Ok(false));
    assert_eq!(requests.join().expect("no panic").len(), 3);
}

#[test]
fn a_refusal_leaves_the_connection_usable() {
    let (member, _requests) = member(vec![refused(400, 5), ok(r#"{"ID":"77","TTL":"10"}"#)]);
    let mut gateway = gateway(&[member]);
    let refused = gateway.grant_lease(10).expect_err("a refusal");
    let (code, message) = (NOT_FOUND, "no".to_owned());
    assert_eq!(refused, EtcdFailure::Refused { code, message });
    assert_eq!(gateway.grant_lease(10), Ok(77));
}

#[test]
fn the_next_request_goes_to_the_next_member() {
    let (_, dead) = listening();
    let (silent, _requests) = member(vec![refused(503, 14)]);
    let (good, _requests) = member(vec![ok(r#"{"ID":"1"}"#)]);
    let mut gateway = gateway(&[dead.clone(), silent.clone(), good]);
    for name in [dead, silent] {
        match gateway.grant_lease(10) {
            Err(EtcdFailure::NoAnswer { member, .. }) => assert_eq!(member, name.address),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(gateway.grant_lease(10), Ok(1));
}

#[test]
fn an_expired_token_is_replaced_with_the_password_of_that_time() {
    let token = |token: &str| ok(&format!(r#"{{"token":"{token}"}}"#));
    let expired = refused(401, 16);
    // Of a token that etcd has signed, after any change of users.
    let old = refused_because(400, 3, "etcdserver: revision of auth store is old");
    for refusal in [expired, old] {
        let answers = vec![token("a.1"), refusal, token("b.2"), ok(r#"{"ID":"1"}"#)];
        let (member, requests) = member(answers);
        let (mut gateway, file) = gateway_with_user(member, Duration::from_secs(5));
        fs::write(file.path(), "\"p\\").expect("there is room");
        gateway.authenticate().expect("it is accepted");
        fs::write(file.path(), "new").expect("there is room");
        assert_eq!(gateway.grant_lease(10), Ok(1));
        let requests = requests.join().expect("no panic");
        assert!(requests[0].ends_with(r#"{"name":"u","password":"\"p\\"}"#));
        assert!(requests[2].ends_with(r#"{"name":"u","password":"new"}"#));
        assert!(requests[1].contains("\r\nAuthorization: a.1\r\n"));
        assert!(requests[3].contains("\r\nAuthorization: b.2\r\n"));
    }
}

/// With a client certificate, etcd refuses a request without a token with code 7, not 3.
#[test]
fn authentication_that_is_turned_on_is_noticed_by_any_code() {
    for (status, code) in [(400, 3), (403, 7), (401, 16)] {
        let off = refused_because(400, FAILED_PRECONDITION, "authentication is not enabled");
        let token = ok(r#"{"token":"a.1"}"#);
        let granted = ok(r#"{"ID":"1"}"#);
        let no = refused(status, code);
        let answers = vec![off, granted.clone(), no, token, granted];
        let (member, requests) = member(answers);
        let (mut gateway, _file) = gateway_with_user(member, Duration::from_secs(60));
        assert_eq!(gateway.grant_lease(10), Ok(1), "code {code}");
        assert_eq!(gateway.grant_lease(10), Ok(1), "code {code}");
        let requests = requests.join().expect("no panic");
        let last = requests.last().expect("a request");
        assert!(last.contains("\r\nAuthorization: a.1\r\n"), "{last}");
    }
}

#[test]
fn a_user_who_lacks_a_permission_is_asked_for_one_token() {
    let token = ok(r#"{"token":"a.1"}"#);
    let (member, requests) = member(vec![token, refused(403, 7), refused(403, 7)]);
    let (mut gateway, _file) = gateway_with_user(member, Duration::from_secs(60));
    for _ in 0..2 {
        let denied = gateway.grant_lease(10).expect_err("a refusal");
        let (code, message) = (PERMISSION_DENIED, "no".to_owned());
        assert_eq!(denied, EtcdFailure::Refused { code, message });
    }
    assert_eq!(requests.join().expect("no panic").len(), 3);
}

#[test]
fn a_slow_check_of_the_password_is_waited_for() {
    let (listener, member) = listening();
    let timeout = Duration::from_millis(600);
    let serve = move || {
        let (mut stream, _) = listener.accept().expect("a client");
        request(&mut stream);
        thread::sleep(timeout * 3 / 2);
        for answer in [ok(r#"{"token":"a.1"}"#), ok(r#"{"ID":"1"}"#)] {
            stream.write_all(answer.as_bytes()).expect("a reader");
        }
        request(&mut stream);
    };
    let slow = thread::spawn(serve);
    let (mut gateway, _file) = gateway_with_user(member, timeout);
    assert_eq!(gateway.grant_lease(10), Ok(1));
    slow.join().expect("no panic");
}

#[test]
fn a_watch_ends_with_the_first_event() {
    let created = chunk("{\"result\":{\"created\":true}}\n");
    let event = chunk("{\"result\":{\"events\":[{}]}}\n");
    let (member, _requests) = member(vec![format!("{HEAD}{created}{event}")]);
    let mut gateway = gateway(&[member]);
    let began = Instant::now();
    assert_eq!(gateway.watch(b"k", 1, Duration::from_secs(60)), Ok(()));
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_watch_without_events_ends_in_time() {
    let (_listener, silent) = listening();
    let time = Duration::from_millis(100);
    let began = Instant::now();
    assert_eq!(gateway(&[silent]).watch(b"k", 1, time), Ok(()));
    assert!(began.elapsed() >= time);
}

#[test]
fn a_watch_that_ends_without_an_event_is_a_failure() {
    let canceled = chunk("{\"result\":{\"canceled\":true}}\n");
    for answer in [canceled, chunk("{}\n"), chunk("")] {
        let (member, _requests) = member(vec![format!("{HEAD}{answer}\r\n")]);
        let watched = gateway(&[member]).watch(b"k", 1, Duration::from_secs(60));
        assert!(
            matches!(watched, Err(EtcdFailure::NoAnswer { .. })),
            "{watched:?}"
        );
    }
}

#[test]
fn a_watch_that_says_nothing_new_without_end_ends_in_time() {
    let (listener, member) = listening();
    let serve = move || {
        let (mut stream, _) = listener.accept().expect("a client");
        request(&mut stream);
        let lines = "{\"result\":{}}\n".repeat(1000);
        let chunk = chunk(&lines);
        stream.write_all(HEAD.as_bytes()).expect("a reader");
        while stream.write_all(chunk.as_bytes()).is_ok() {}
    };
    let endless = thread::spawn(serve);
    let mut gateway = gateway(&[member]);
    assert_eq!(gateway.watch(b"k", 1, Duration::from_secs(1)), Ok(()));
    drop(gateway);
    endless
        .join()
        .expect("the member sees that its client left");
}

#[test]
fn a_lease_without_a_number_is_none() {
    let (member, _requests) = member(vec![ok("{}")]);
    let granted = gateway(&[member]).grant_lease(10);
    assert!(
        matches!(granted, Err(EtcdFailure::NoAnswer { .. })),
        "{granted:?}"
    );
}

/// It would say that nothing is held.
#[test]
fn what_names_no_revision_is_no_answer_about_keys() {
    for text in [
        "{}",
        "null",
        "[]",
        r#"{"header":{}}"#,
        r#"{"succeeded":true}"#,
    ] {
        let members = [(); 2].map(|()| member(vec![ok(text)]).0);
        let (good, _requests) = member(vec![ok(r#"{"header":{"revision":"9"}}"#)]);
        let members = members.into_iter().chain([good]).collect::<Vec<_>>();
        let mut gateway = gateway(&members);
        let failures = [
            gateway.range(b"a", b"b", 10).err(),
            gateway.txn("", "", "").err(),
        ];
        for (failure, asked) in failures.into_iter().zip(&members) {
            let member = asked.address.clone();
            let reason = "an answer without a revision".to_owned();
            assert_eq!(failure, Some(EtcdFailure::NoAnswer { member, reason }));
        }
        assert_eq!(gateway.range(b"a", b"b", 10), Ok(Vec::new()));
    }
}

#[test]
fn a_member_that_is_silent_has_timed_out() {
    let (_listener, silent) = listening();
    let settings = settings(std::slice::from_ref(&silent), None);
    let mut gateway = Gateway::new(&settings, Duration::from_millis(100));
    let failure = gateway.grant_lease(10).expect_err("silence");
    let (member, reason) = (silent.address, "timed out".to_owned());
    assert_eq!(failure, EtcdFailure::NoAnswer { member, reason });
}
