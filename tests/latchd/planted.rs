//! Files that other users have put, or can read, where a server or `latch` looks for its own.

use std::fs::{self, Permissions};
use std::os::unix::fs::{chown, lchown, symlink, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{mknodat, FileType, Mode, CWD};

use crate::support::limited::{copy_program, without_users};
use crate::support::needs::needs;
use crate::support::silent::free_port;
use crate::support::{eventually, program, Daemon, PATIENCE};

/// A user who is neither root nor the one of the test.
const OTHER: u32 = 54_321;

/// A directory of root with a link of another user to a file that does not exist.
struct Trap {
    directory: tempfile::TempDir,
}

impl Trap {
    fn new() -> Trap {
        let trap = Trap {
            directory: tempfile::tempdir().expect("there is room"),
        };
        symlink(trap.target(), trap.link()).expect("there is room");
        lchown(trap.link(), Some(OTHER), Some(OTHER)).expect("we are root");
        trap
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn link(&self) -> PathBuf {
        self.path("link")
    }

    fn target(&self) -> PathBuf {
        self.path("target")
    }
}

/// Starts a server with an option that names a file; `Err` with its log if it does not start.
fn start(option: &str, path: &Path) -> Result<Daemon, String> {
    let mut command = Daemon::command();
    command.args(["--port", "0", option]).arg(path);
    command.stdout(Stdio::null());
    let daemon = Daemon::from_command(command);
    loop {
        if daemon.log().contains("listening") {
            return Ok(daemon);
        }
        if let Some(status) = daemon.wait_exit(std::time::Duration::from_millis(5)) {
            assert_eq!(status.code(), Some(1), "{}", daemon.log());
            return Err(daemon.log());
        }
    }
}

fn refusal(option: &str, path: &Path) -> String {
    start(option, path)
        .err()
        .unwrap_or_else(|| panic!("{option} is taken"))
}

fn fence_check(file: &Path) -> std::process::Output {
    let mut command = Command::new(program("latch"));
    command.arg("fence-check").arg(file).arg("0".repeat(32));
    command.output().expect("it runs")
}

#[test]
fn a_link_of_another_user_is_not_followed() {
    needs!(root);
    let trap = Trap::new();
    for option in ["--log-file", "--fence-state-file", "--auth-token-file"] {
        let said = refusal(option, &trap.link());
        assert!(said.contains("it is a symbolic link"), "{option}: {said}");
        assert!(!trap.target().exists(), "{option}");
    }
    let checked = fence_check(&trap.link());
    assert_eq!(checked.status.code(), Some(74), "{checked:?}");
    assert!(!trap.target().exists());
    // Nor if it is behind a link of our own.
    symlink(trap.link(), trap.path("own")).expect("there is room");
    assert_eq!(fence_check(&trap.path("own")).status.code(), Some(74));
    fs::write(trap.target(), "secret").expect("there is room");
    refusal("--auth-token-file", &trap.link());
    refusal("--admin-token-file", &trap.path("own"));
}

/// A namespace without users shows all of them, us and the other one, as the same.
#[test]
fn a_link_of_a_user_unknown_to_the_namespace_is_not_followed() {
    needs!(root);
    let Some(unshare) = without_users() else {
        return;
    };
    let trap = Trap::new();
    let mut command = Command::new(unshare[0]);
    command.arg(unshare[1]).arg(program("latch"));
    command
        .arg("fence-check")
        .arg(trap.link())
        .arg("0".repeat(32));
    let checked = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(said.contains("a symbolic link of another user"), "{said}");
    assert!(!trap.target().exists());
}

#[test]
fn a_fence_of_another_user_where_all_may_create_files_is_refused() {
    needs!(root);
    let directory = tempfile::tempdir().expect("there is room");
    let file = directory.path().join("fence");
    fs::write(&file, "").expect("there is room");
    chown(&file, Some(OTHER), None).expect("we are root");
    let checked = |mode| {
        fs::set_permissions(directory.path(), Permissions::from_mode(mode)).expect("it is ours");
        fence_check(&file).status.code()
    };
    assert_eq!(checked(0o1777), Some(74));
    assert_eq!(fs::read_to_string(&file).expect("text"), "");
    // Its users share a directory like this one, and each may replace the file.
    assert_eq!(checked(0o2775), Some(0));
    chown(directory.path(), Some(OTHER), None).expect("we are root");
    assert_eq!(checked(0o1777), Some(0));
}

#[test]
fn a_link_of_our_own_or_of_the_directorys_owner_is_followed() {
    needs!(root);
    let trap = Trap::new();
    chown(trap.directory.path(), Some(OTHER), Some(OTHER)).expect("we are root");
    let checked = fence_check(&trap.link());
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
    symlink("fence", trap.path("own")).expect("there is room");
    assert_eq!(fence_check(&trap.path("own")).status.code(), Some(0));
    assert!(trap.path("fence").exists());
    fs::write(trap.path("token"), "secret").expect("there is room");
    symlink("token", trap.path("own-token")).expect("there is room");
    start("--auth-token-file", &trap.path("own-token")).expect("it is our own");
}

/// A user of the host can take the place of a server that is not there.
#[test]
fn latch_refuses_the_socket_of_an_impostor() {
    needs!(root);
    let directory = tempfile::tempdir().expect("there is room");
    fs::set_permissions(directory.path(), Permissions::from_mode(0o1777)).expect("it is ours");
    let socket = directory.path().join("socket");
    let mut command = Daemon::command_of("setpriv");
    command.args([&format!("--reuid={OTHER}"), "--clear-groups"]);
    // The other user need not be able to read the directory of the build.
    let copy = directory.path().join("latchd");
    copy_program(program("latchd"), &copy);
    command.arg(copy);
    command
        .args(["--port", "off", "--unix-mode", "0666", "--unix"])
        .arg(&socket);
    let impostor = Daemon::from_command(command);
    impostor.wait_for_log("listening", PATIENCE);
    let ping = || {
        let mut latch = Command::new(program("latch"));
        latch.arg("ping").arg("--server").arg(&socket);
        latch.output().expect("it runs")
    };
    let refused = ping();
    assert_eq!(refused.status.code(), Some(69));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        said.contains(&format!("its server runs as user {OTHER}, who does not")),
        "{said}"
    );
    if let Some(unshare) = without_users() {
        let latch = directory.path().join("latch");
        copy_program(program("latch"), &latch);
        // A namespace shows the owner of the directory and the impostor as one user; one without a
        // user of ours, us as well.
        for map in [&["--map-root-user"][..], &[]] {
            let mut command = Command::new("setpriv");
            command.args([&format!("--reuid={}", OTHER + 1), "--clear-groups"]);
            command.args(unshare).args(map).arg(&latch);
            command.arg("ping").arg("--server").arg(&socket);
            let refused = command.output().expect("it runs");
            assert_eq!(refused.status.code(), Some(69), "{map:?}: {refused:?}");
        }
    }
    // In the other user's own directory, that user decides.
    chown(directory.path(), Some(OTHER), None).expect("we are root");
    assert_eq!(ping().status.code(), Some(0));
}

#[test]
fn a_fifo_in_place_of_a_token_file_is_refused_at_once() {
    let directory = tempfile::tempdir().expect("there is room");
    let fifo = directory.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("there is room");
    let said = refusal("--auth-token-file", &fifo);
    assert!(said.contains("it is not a regular file"), "{said}");
}

#[test]
fn the_pipe_of_a_shell_is_read_as_a_token_file() {
    let mut command = Daemon::command_of("bash");
    let script = "exec \"$0\" --port 0 --auth-token-file <(sleep 0.2; echo secret) \"$@\"";
    command.args(["-c", script, program("latchd"), "--print-port"]);
    let daemon = Daemon::from_command(command);
    assert_eq!(daemon.connect().request("auth", "_", "secret"), "ok");
}

#[test]
fn a_file_that_other_users_have_access_to_gets_a_warning() {
    let directory = tempfile::tempdir().expect("there is room");
    let file = directory.path().join("file");
    let with_mode = |option: &str, content: &[u8], mode| {
        fs::write(&file, content).expect("there is room");
        fs::set_permissions(&file, Permissions::from_mode(mode)).expect("it is ours");
        let daemon = start(option, &file).expect("it starts all the same");
        daemon.log()
    };
    for (mode, reason) in [
        (0o600, None),
        (0o640, None),
        (0o644, Some("other users may read it")),
        (0o620, Some("other users may write it")),
    ] {
        for option in ["--auth-token-file", "--admin-token-file"] {
            let log = with_mode(option, b"secret", mode);
            let warnings: Vec<&str> = log.lines().filter(|it| it.contains("exposed")).collect();
            let expected = reason.map(|reason| {
                let path = file.display();
                format!("exposed-file path={path} reason=\"{reason}\"")
            });
            assert_eq!(
                warnings.len(),
                usize::from(reason.is_some()),
                "{mode:o}: {log}"
            );
            assert!(
                expected.is_none_or(|it| warnings[0].ends_with(&it)),
                "{log}"
            );
        }
    }
    // A fence is no secret.
    assert!(!with_mode("--fence-state-file", b"", 0o644).contains("exposed"));
    assert!(with_mode("--fence-state-file", b"", 0o666).contains("other users may write it"));
}

#[test]
fn a_file_of_another_user_gets_a_warning() {
    needs!(root);
    let directory = tempfile::tempdir().expect("there is room");
    let file = directory.path().join("file");
    fs::write(&file, "secret").expect("there is room");
    fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("it is ours");
    for (path, reason) in [
        (directory.path(), "its directory belongs to another user"),
        (&file, "it belongs to another user"),
    ] {
        chown(path, Some(OTHER), None).expect("we are root");
        let daemon = start("--auth-token-file", &file).expect("it starts all the same");
        daemon.wait_for_log(&format!("reason=\"{reason}\""), PATIENCE);
    }
}

#[test]
fn a_log_and_a_state_file_where_another_user_decides_get_a_warning() {
    needs!(root);
    let directory = tempfile::tempdir().expect("there is room");
    chown(directory.path(), Some(OTHER), None).expect("we are root");
    let [log, state] = ["log", "state"].map(|name| directory.path().join(name));
    fs::write(&log, "").expect("there is room");
    chown(&log, Some(OTHER), None).expect("we are root");
    let mut command = Daemon::command();
    command.args(["--port", &free_port().to_string(), "--log-file"]);
    command.arg(&log).arg("--state-file").arg(&state);
    let _daemon = Daemon::from_command(command);
    for reason in [
        "it belongs to another user",
        "its directory belongs to another user",
    ] {
        let reason = format!("reason=\"{reason}\"");
        eventually(PATIENCE, "a warning", || {
            fs::read_to_string(&log).expect("text").contains(&reason)
        });
    }
}
