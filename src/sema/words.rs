//! The options and commands of other programs, which users type for those of `sema`.

use crate::cli::words::Foreign;

/// Words of flock(1), setlock(8), parallel(1), latch(1) and the programs lockfile and dotlockfile,
/// with what to write instead.
pub(super) const FOREIGN: &[Foreign] = &[
    (
        &["--nowait", "--no-wait", "--nb", "--nonblocking", "--try"],
        "use --nonblock",
    ),
    (
        &[
            "--wait",
            "-t",
            "-W",
            "-r",
            "--retry",
            "--retries",
            "-i",
            "--max-wait",
            "--wait-timeout",
            "--lock-timeout",
        ],
        "use --timeout TIME",
    ),
    (
        &["--conflict-exit-code", "--exit-code", "--lock-exit-code"],
        "use --busy-status STATUS",
    ),
    (
        &[
            "--name",
            "--key",
            "--lock",
            "--lock-file",
            "--lockfile",
            "--file",
            "--path",
        ],
        "write the path right after the command; --tag TEXT describes its holder",
    ),
    (
        &["--server", "--host"],
        "a lock file needs no server; latch run takes a lock of latchd",
    ),
    (
        &["-s", "--shared", "--read"],
        "a lock file has one holder; latch run --shared shares a lock of latchd",
    ),
    (
        &["-x", "-e", "--exclusive"],
        "a lock file has one holder; leave the option out",
    ),
    (
        &["-u", "--unlock"],
        "the lock is released when the program ends; see sema release",
    ),
    (
        &["-o", "--close", "-F", "--no-fork"],
        "the program does not get the lock's descriptor; leave the option out",
    ),
    (&["-c", "--command"], "write -- sh -c COMMAND"),
    (&["-p", "--use-pid"], "use --pid PID"),
    (
        &["-l", "--lock-name"],
        "the path is that of the lock file itself; see --stale for its age",
    ),
    (
        &["--ttl", "--lease", "--expire", "--expires", "--expiry"],
        "a lock lasts as long as its holder; see --stale",
    ),
    (
        &["--limit", "--max", "--count", "--jobs"],
        "use --of COUNT for so many at a time",
    ),
    (&["-j"], "use --of COUNT for so many at a time, or --json"),
    (
        &["-N", "--block", "--blocking"],
        "sema waits unless --nonblock is given; leave the option out",
    ),
    (&["-m"], "use --mode MODE"),
    (&["-f"], "use --force"),
    (&["--kill", "-k"], "use --kill-after TIME"),
    (&["lock", "create"], "use sema run, hold or acquire"),
    (&["unlock", "remove", "rm"], "use sema release"),
    (&["break", "force-unlock"], "use sema release with --force"),
    (&["check", "show", "list", "ls", "stats"], "use sema status"),
    (
        &["touch", "renew"],
        "a lock lasts as long as its holder; see --stale",
    ),
    (&["reserve"], "use sema acquire"),
];
