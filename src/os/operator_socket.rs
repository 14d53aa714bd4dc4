//! The path of a server's operator socket. The answer to `hello` tells it to clients on this host.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{access, Access};
use rustix::process::geteuid;

use super::trusted::{is_own, is_own_or_root};
use crate::os::text::digits;

/// The directory that an init script creates for a server that does not run as root.
const OF_SERVICE: &str = "/run/latchd";

/// The directory for a server that runs as root.
const OF_ROOT: &str = "/run";

/// The directory where a user's server makes a directory if the user has none of those above.
const OF_ALL: &str = "/tmp";

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
    let of_environment = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let of_environment = of_environment.filter(|directory| directory.is_absolute());
    let mut directories = of_environment.into_iter().chain(system);
    let is_ours = |found: Metadata| found.is_dir() && is_own(found.uid());
    // Does not follow a link.
    let is_ours = |it: &PathBuf| fs::symlink_metadata(it).is_ok_and(is_ours);
    let is_usable = |it: &PathBuf| is_ours(it) && access(it, Access::WRITE_OK).is_ok();
    let directory = match directories.find(is_usable) {
        Some(directory) => directory,
        None => {
            let directory = Path::new(OF_ALL).join(format!("latchd-{}", geteuid().as_raw()));
            make_private(&directory).map_err(|error| (directory.join(name(port)), error))?;
            directory
        }
    };
    Ok(directory.join(name(port)))
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
