//! The options of other servers, which users type for those of `latchd`.

use crate::cli::words::{
    Foreign, CONFIG_FILE, DETACH, FOREGROUND, PID_FILE, QUIET, SYSLOG, VERBOSE,
};

/// Words of other servers, with what to write instead. A single dash counts as two.
pub(super) const FOREIGN: &[Foreign] = &[
    (
        &[
            "--bind",
            "--bind-address",
            "--listen",
            "--listen-addr",
            "--listen-address",
            "--addr",
            "--address",
            "-l",
        ],
        "use --host HOST and --port PORT",
    ),
    (&["-p"], "use --port PORT"),
    (
        &["--socket", "--unix-socket", "--unixsocket", "-s"],
        "use --unix PATH",
    ),
    (
        &["--secret", "--password", "--requirepass", "--token", "-a"],
        "use --auth-token-file PATH",
    ),
    (
        DETACH,
        "latchd stays in the foreground; have systemd or another supervisor start it",
    ),
    (
        FOREGROUND,
        "latchd stays in the foreground; leave the option out",
    ),
    (
        PID_FILE,
        "latchd writes no such file; a supervisor knows the process",
    ),
    (
        CONFIG_FILE,
        "latchd reads no such file; use options or LATCHD_ variables",
    ),
    VERBOSE,
    QUIET,
    SYSLOG,
    (
        &["--user", "--group", "--chroot", "-u", "-g"],
        "have the supervisor start it as that user",
    ),
    (
        &["--ssl", "--tls", "--cert", "--cert-file", "--tls-cert-file"],
        "use --tls-cert PATH with --tls-key PATH",
    ),
    (
        &["--ttl", "--lease", "--lease-ttl"],
        "use --default-lease-ttl TIME",
    ),
    (
        &["--maxclients", "--max-clients"],
        "use --max-connections COUNT",
    ),
    (
        &["--data", "--data-dir", "--datadir", "--dir", "--persist"],
        "use --state-file PATH",
    ),
    (
        &[
            "--metrics",
            "--metrics-addr",
            "--metrics-port",
            "--prometheus",
            "--http-addr",
            "--web",
            "--web.listen-address",
            "--ui",
        ],
        "use --http HOST:PORT",
    ),
    (
        &[
            "--peers",
            "--join",
            "--cluster",
            "--initial-cluster",
            "--bootstrap",
        ],
        "use --etcd LIST",
    ),
];
