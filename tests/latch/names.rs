//! Names of servers, and name servers that say nothing.

use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::latch::{latch, output, text};
use crate::support::needs::{needs, skipped};
use crate::support::Daemon;

/// What makes the only name server of a new namespace a socket that nobody answers at.
const SILENT_NAME_SERVER: &str = "ip link set lo up && mount --bind $0 /etc/resolv.conf && \
    { socat -u UDP4-RECV:53 /dev/null & \
    until grep -q ':0035 ' /proc/net/udp; do sleep 0.01; done; }";

#[test]
fn a_silent_name_server_delays_no_command_beyond_its_timeout() {
    needs!("ip", "socat");
    let unshare = "unshare";
    let flags = ["-rmn", "--pid", "--fork", "--kill-child"];
    let probe = output(Command::new(unshare).args(flags).arg("true"));
    if !probe.status.success() {
        return skipped(&["network namespace"]);
    }
    let directory = tempfile::tempdir().expect("a directory");
    let resolv = directory.path().join("resolv.conf");
    fs::write(&resolv, "nameserver 127.0.0.1\n").expect("there is room");
    let ends_in_time = |arguments: &str| {
        let script = format!("{SILENT_NAME_SERVER}; LATCH_SERVER=nowhere.test latch {arguments}");
        let mut command = Command::new(unshare);
        command.args(flags).args(["sh", "-c", &script]).arg(&resolv);
        let began = Instant::now();
        let output = output(command.stdin(Stdio::null()));
        let (took, said) = (began.elapsed(), text(&output.stderr));
        assert_eq!(output.status.code(), Some(69), "{arguments}: {said}");
        assert!(said.contains("nowhere.test:6388: "), "{said}");
        // The resolver gives up after ten seconds, or twenty.
        assert!(took < Duration::from_secs(8), "{arguments}: {took:?}");
    };
    thread::scope(|scope| {
        scope.spawn(|| ends_in_time("wait k --timeout 0"));
        scope.spawn(|| ends_in_time("run k --timeout 2 --retry -- true"));
        scope.spawn(|| ends_in_time("ping --connect-timeout 1"));
    });
}

#[test]
fn an_address_may_have_a_zone_in_brackets_or_bare() {
    let daemon = Daemon::start(&[]);
    for server in ["fe80::1%lo", "[fe80::1%lo]:1", "[fe80::1%1]:1"] {
        let ping = output(latch(&daemon, &["ping"]).env("LATCH_SERVER", server));
        let said = text(&ping.stderr);
        // There is no such server. With a wrong zone the reason would be another.
        assert!(
            !said.contains("invalid") && !said.contains("name"),
            "{said}"
        );
        assert!(said.contains("fe80::1%"), "{said}");
    }
}
