//! Memory that runs out at any moment: the server ends or refuses, and its fences still rise.

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::amount::amount;
use crate::support::needs::{needs, OwnPrograms};
use crate::support::{fence, parse_grant, poll_for, Client, Daemon, Event, PATIENCE};

/// An allocator whose call number `FAILING_CALL` fails, and leaves the file `FAILED` as a sign.
const ALLOCATOR: &str = r#"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

static long count;

static int fails(void) {
    const char *call = getenv("FAILING_CALL");
    if (__atomic_add_fetch(&count, 1, __ATOMIC_RELAXED) != atol(call))
        return 0;
    close(open(getenv("FAILED"), O_CREAT | O_WRONLY, 0600));
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t len) { return fails() ? 0 : __libc_malloc(len); }
void *calloc(size_t n, size_t len) { return fails() ? 0 : __libc_calloc(n, len); }
void *realloc(void *old, size_t len) { return fails() ? 0 : __libc_realloc(old, len); }
int posix_memalign(void **memory, size_t align, size_t len) {
    if (fails())
        return ENOMEM;
    *memory = __libc_memalign(align, len);
    return *memory ? 0 : ENOMEM;
}
"#;

#[test]
fn fences_rise_over_an_allocation_that_fails_anywhere() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = |name: &str| directory.path().join(name);
    let (allocator, failed, socket) = (path("allocator.so"), path("failed"), path("socket"));
    build(&allocator, needs!(own_programs));
    let start = |call: u32| {
        let mut command = Daemon::command();
        command
            .args(["--port", "off", "--unix"])
            .arg(&socket)
            .arg("--fence-state-file")
            .arg(path("fences"))
            .env("LD_PRELOAD", &allocator)
            .env("FAILING_CALL", call.to_string())
            .env("FAILED", &failed)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.spawn().expect("it was built")
    };
    let (mut highest, mut aborts, mut call) = (0, 0, 1);
    loop {
        let mut server = start(call);
        for fence in fences_of(&mut server, &socket) {
            assert!(fence > highest, "{fence} after {highest}, call {call}");
            highest = fence;
        }
        let _ = server.kill();
        let status = server.wait().expect("it was started");
        // Its own end, a refusal to start, or the end of this round.
        assert!(
            matches!(status.signal(), None | Some(6 | 9)),
            "call {call}: {status}"
        );
        aborts += u32::from(status.signal() == Some(6));
        if fs::remove_file(&failed).is_err() {
            break;
        }
        call += amount(29, 1);
    }
    println!("{call} calls, {aborts} ended the server");
    assert!(aborts > 0 && highest > 0, "no call failed");
}

/// The library, which only programs of cargo's are certain to load.
fn build(allocator: &Path, _: OwnPrograms) {
    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-fno-builtin", "-x", "c", "-o"])
        .arg(allocator)
        .arg("-")
        .stdin(Stdio::piped())
        .spawn()
        .expect("Rust needs a C compiler, too");
    let mut input = compiler.stdin.take().expect("it is a pipe");
    input.write_all(ALLOCATOR.as_bytes()).expect("it reads");
    drop(input);
    assert!(compiler.wait().expect("it ends").success());
}

/// The fences that the server grants before it ends, if it does.
fn fences_of(server: &mut Child, socket: &Path) -> Vec<u64> {
    let mut fences = Vec::new();
    let Some(mut client) = connected(server, socket) else {
        return fences;
    };
    for key in ["a", "b", "c"] {
        for request in [
            format!("tag\n_\n{key}\n"),
            format!("l\n{key}\n0\n"),
            format!("se\nslots-{key}\n3\n"),
            format!("sw\nslots-{key}\n0\n"),
            "stats\n_\n_\n".into(),
            "stats\nholders\n_\n".into(),
        ] {
            if client.try_send(request.as_bytes()).is_err() {
                return fences;
            }
            let reply = match client.next_event(PATIENCE) {
                Event::Line(line) => String::from_utf8(line).expect("it is text"),
                Event::Nothing => panic!("no reply to {request:?}"),
                _ => return fences,
            };
            let granted = ["ok", "acquired"].map(|word| parse_grant(&reply, word));
            let token = granted.into_iter().flatten().next();
            // `sw` gives the token of `se` once more.
            let new = token.map(|grant| fence(&grant.token));
            fences.extend(new.filter(|new| fences.last() != Some(new)));
        }
    }
    fences
}

/// A connection to the server, unless that ends before it listens.
fn connected(server: &mut Child, socket: &Path) -> Option<Client> {
    let found = poll_for(PATIENCE, || match Client::try_unix(socket) {
        Some(client) => Some(Some(client)),
        None => server.try_wait().expect("it was started").map(|_| None),
    });
    found.expect("it listens or ends")
}
