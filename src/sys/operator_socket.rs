//! The path of a server's operator socket. The server binds it, and the operator's program looks
//! for it in the same directories, in the same order.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{access, Access};
use rustix::process::geteuid;

use super::trusted::{is_own, is_own_or_root};
use crate::text::digits;

/// The directory that an init script creates for a server that does not run as root.
const OF_SERVICE: &str = "/run/latchd";

/// The directory for a server that runs as root.
const OF_ROOT: &str = "/run";

/// The directory of the runtime directories of logged-in users, each named after the user's number.
const OF_USERS: &str = "/run/user";

/// The directory where a user's server makes a directory if the user has none of those above.
const OF_ALL: &str = "/tmp";

/// The path of the socket that the packaged systemd unit creates, and the port of its server.
const OF_UNIT: (&str, u16) = ("/run/latchd.sock", 6388);

/// The path at which a server on `port` binds its operator socket: in $XDG_RUNTIME_DIR, /run/latchd
/// or /run, whichever is the first that belongs to this user and can be written, else in
/// /tmp/latchd-UID. Makes that directory if it is missing.
///
/// The system removes /run/user/UID when the user logs out, so that directory is only used if the
/// environment names it.
///
/// # Errors
///
/// Fails with the path and the reason if that directory cannot be made, or belongs to another user.
pub fn path_to_bind(port: u16) -> Result<PathBuf, (PathBuf, io::Error)> {
    let system = [OF_SERVICE, OF_ROOT].map(PathBuf::from);
    let mut directories = of_environment().into_iter().chain(system);
    let is_usable = |it: &PathBuf| is_our_directory(it) && access(it, Access::WRITE_OK).is_ok();
    let directory = match directories.find(is_usable) {
        Some(directory) => directory,
        None => {
            let directory = private();
            make_private(&directory).map_err(|error| (directory.join(name(port)), error))?;
            directory
        }
    };
    Ok(directory.join(name(port)))
}

/// The paths at which the server on `port` of this host may have bound its operator socket.
///
/// Only root, the service's user and this user can create sockets at these paths. Connecting to the
/// port would be less safe: another user may listen on it at another address and pretend to be the
/// server. The operator would send the secret to that user, and believe that the grant was broken.
pub fn paths_to_try(port: u16) -> Vec<PathBuf> {
    // The server may have been started with a variable that is missing here.
    let of_login = Path::new(OF_USERS).join(geteuid().as_raw().to_string());
    let of_this_user = of_environment().into_iter().chain([of_login]);
    let of_this_user = of_this_user.filter(|it| is_our_directory(it));
    let of_system = [OF_SERVICE, OF_ROOT].map(PathBuf::from);
    let private = Some(private()).filter(|it| check_private(it).is_ok());
    let mut paths: Vec<PathBuf> = Vec::new();
    let directories = of_this_user.chain(of_system).chain(private);
    for path in directories.map(|it| it.join(name(port))) {
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    if port == OF_UNIT.1 {
        paths.push(OF_UNIT.0.into());
    }
    paths
}

fn of_environment() -> Option<PathBuf> {
    let directory = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    directory.filter(|directory| directory.is_absolute())
}

/// Whether the path is a directory of this user. Does not follow a link.
fn is_our_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && is_own(found.uid()))
}

/// The directory of this user's servers below /tmp.
fn private() -> PathBuf {
    Path::new(OF_ALL).join(format!("latchd-{}", geteuid().as_raw()))
}

fn make_private(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => check_private(directory),
    }
}

/// Fails unless only root and this user can create files in this directory or replace it.
fn check_private(directory: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(directory)?;
    let refused = |why| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    if !found.is_dir() || !is_own(found.uid()) || found.mode() & 0o077 != 0 {
        return refused("it is no directory of this user alone");
    }
    if !protects_names(&fs::metadata(OF_ALL)?) {
        return refused("other users may replace its directory");
    }
    Ok(())
}

/// Whether a user cannot remove or rename the directory of another user in this one.
fn protects_names(directory: &Metadata) -> bool {
    let is_sticky = directory.mode() & 0o1000 != 0;
    is_own_or_root(directory.uid()) && (is_sticky || directory.mode() & 0o022 == 0)
}

fn name(port: u16) -> String {
    format!("latchd-{port}.sock")
}

/// Whether an operator socket may have this name.
pub fn is_name(file_name: &OsStr) -> bool {
    let port = file_name.to_str().and_then(|it| it.strip_prefix("latchd-"));
    let port = port.and_then(|it| digits(it.strip_suffix(".sock")?));
    port.is_some_and(|port| *name(port) == *file_name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};

    #[test]
    fn a_private_directory_is_made_and_none_that_others_can_enter() {
        let scratch = tempfile::tempdir().expect("a directory");
        let [ours, open, link, file] =
            ["ours", "open", "link", "file"].map(|name| scratch.path().join(name));
        for _ in 0..2 {
            make_private(&ours).expect("it is ours alone");
        }
        let mode = fs::metadata(&ours).expect("it is there").mode();
        assert_eq!(mode & 0o777, 0o700);
        fs::create_dir(&open).expect("a directory");
        fs::set_permissions(&open, fs::Permissions::from_mode(0o770)).expect("it is ours");
        symlink(&ours, &link).expect("a link");
        fs::write(&file, "").expect("a file");
        for refused in [&open, &link, &file] {
            let error = make_private(refused).expect_err("others may be there");
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{refused:?}");
        }
    }

    #[test]
    fn only_the_name_of_an_operator_socket_is_one() {
        for (file_name, is_one) in [
            ("latchd-6388.sock", true),
            ("latchd-06388.sock", false),
            ("latchd-65536.sock", false),
            ("latchd-.sock", false),
            ("latchd.sock", false),
            ("latchd-6388.sock.lock", false),
        ] {
            assert_eq!(is_name(OsStr::new(file_name)), is_one, "{file_name}");
        }
    }

    #[test]
    fn a_private_directory_is_not_used_where_others_can_replace_it() {
        let scratch = tempfile::tempdir().expect("a directory");
        for (mode, is_kept) in [
            (0o1777, true),
            (0o755, true),
            (0o777, false),
            (0o775, false),
        ] {
            let permissions = fs::Permissions::from_mode(mode);
            fs::set_permissions(scratch.path(), permissions).expect("it is ours");
            let found = fs::metadata(scratch.path()).expect("it is there");
            assert_eq!(protects_names(&found), is_kept, "{mode:o}");
        }
    }
}
