//! What `latch` says and does while a server that has just restarted cannot know all holders yet.

use std::process::Stdio;
use std::thread;
use std::time::Duration;

use crate::support::latch::{ended, latch, Latch};
use crate::support::silent::free_addr;
use crate::support::stalls::{fair_test, in_time};
use crate::support::Daemon;

/// A token that holds nothing, as in a worker that has outlived its job.
fn with_a_token(daemon: &Daemon, arguments: &[&str]) -> std::process::Command {
    let mut command = latch(daemon, arguments);
    command
        .env("LATCH_KEY", "k")
        .env("LATCH_TOKEN", "0".repeat(32));
    command
}

#[test]
fn a_server_that_does_not_answer_says_nothing_about_a_lock() {
    fair_test(|| {
        let addr = free_addr().to_string();
        let elsewhere = Daemon::start(&[]);
        let ask = |options: &[&str]| {
            let server = ["--server", &addr];
            let arguments = [
                &["run", "k", "--nested"],
                &server[..],
                options,
                &["--", "true"],
            ];
            Latch::start(with_a_token(&elsewhere, &arguments.concat()).stderr(Stdio::piped()))
        };
        let began = std::time::Instant::now();
        let (status, said) = ended(&mut ask(&[]));
        assert_eq!(status, Some(69), "{said}");
        assert!(began.elapsed() > Duration::from_millis(1500));
        in_time!(began.elapsed() < Duration::from_secs(10));
        // With the server back, the answer is that the lock is over.
        let mut asking = [ask(&[]), ask(&["--retry"])];
        thread::sleep(Duration::from_millis(500));
        let port = addr.rsplit(':').next().expect("a port");
        let mut command = Daemon::command();
        command.args(["--port", port, "--print-port"]);
        let _daemon = Daemon::from_command(command);
        for asking in &mut asking {
            assert_eq!(ended(asking), (Some(0), String::new()));
        }
    });
}
