//! The paths of listening Unix sockets. A server takes over the path of a dead server, but never
//! that of a living one.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use log::warn;
use rustix::fs::{chownat, fstat, lstat, openat, AtFlags, FileType, Gid, Mode, OFlags, Stat, CWD};
use rustix::io::Errno;
use rustix::net::{
    connect, getpeername, listen, socket_with, sockopt, AddressFamily, SocketAddrUnix, SocketFlags,
    SocketType,
};
use rustix::process::getpid;

use crate::os::directory::{lock_within, Directory, FileId};
use crate::os::process::is_own;
use crate::os::text::Escaped;

use super::BACKLOG;

/// How long to wait for another process's lock on the directory before going on without the lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// A server that goes on without the lock on the directory has listened long before its socket is
/// this old.
const MIN_DEAD_AGE: Duration = Duration::from_secs(10);

/// The path of a socket that this process has bound.
#[derive(Debug)]
pub struct BoundPath {
    path: PathBuf,
    /// The socket that was bound. Another server may later put its own socket at the same path.
    identity: FileId,
}

/// Listens on `path`; `mode` and `group` say who may connect. Replaces the socket of a dead server.
/// Fails with [`io::ErrorKind::AddrInUse`] if a living server has the path, or with
/// [`io::ErrorKind::AlreadyExists`] if the path is a file of another kind. Changes the umask for a
/// moment, during which no other thread may create files.
pub fn bind(path: &Path, mode: u32, group: Option<u32>) -> io::Result<(UnixListener, BoundPath)> {
    // If two servers find the socket of a dead server, neither may remove the other's new socket.
    // So a server locks the directory before it looks, and unlocks it once it listens. A user who
    // may read the directory can keep it locked, but must not thereby prevent a server from
    // starting.
    let directory = Directory::of(path)?;
    match lock_within(&directory, LOCK_PATIENCE) {
        Ok(true) => {}
        Ok(false) => warn!("cannot-lock-directory socket={}", Escaped::path(path)),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
        Err(error) => return Err(error),
    }
    remove_dead_socket(path)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let address = SocketAddrUnix::new(path)?;
    // Only the owner may connect until the group is set.
    let first_mode = if group.is_some() { 0o600 } else { mode };
    let umask = rustix::process::umask(Mode::from_raw_mode(!first_mode & 0o777));
    let bound = rustix::net::bind(&socket, &address);
    rustix::process::umask(umask);
    bound?;
    let (name, found) = open_name(path)?;
    let made = BoundPath {
        path: path.to_owned(),
        identity: FileId::from(&found),
    };
    listen(&socket, BACKLOG).inspect_err(|_| made.remove())?;
    // The mode differs only if the directory has a default ACL.
    if group.is_some() || found.st_mode & 0o777 != mode {
        let by_descriptor = format!("/proc/self/fd/{}", name.as_raw_fd());
        if !is_own_listener(&by_descriptor, &address)? {
            return Err(replaced());
        }
        give_access(&name, &by_descriptor, mode, group).inspect_err(|_| made.remove())?;
    }
    Ok((socket.into(), made))
}

/// Opens the path of the socket that was just bound. Fails if another process has meanwhile put a
/// file of another kind in its place.
fn open_name(path: &Path) -> io::Result<(OwnedFd, Stat)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let name = openat(CWD, path, flags, Mode::empty())?;
    let found = fstat(&name)?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Socket => Ok((name, found)),
        _ => Err(replaced()),
    }
}

/// Sets the group and the mode of a socket through a descriptor opened with O_PATH.
fn give_access(
    name: &OwnedFd,
    by_descriptor: &str,
    mode: u32,
    group: Option<u32>,
) -> io::Result<()> {
    if let Some(group) = group {
        let group = Some(Gid::from_raw(group));
        chownat(name, "", None, group, AtFlags::EMPTY_PATH)?;
    }
    fs::set_permissions(by_descriptor, fs::Permissions::from_mode(mode))
}

/// Whether the socket at `path` is one that this process listens on and has bound to `address`. The
/// kernel says so only to a client of the socket, so this function connects and hangs up.
fn is_own_listener(path: &str, address: &SocketAddrUnix) -> io::Result<bool> {
    let client = client_socket()?;
    match connect(&client, &SocketAddrUnix::new(path)?) {
        Ok(()) => {}
        Err(Errno::CONNREFUSED | Errno::AGAIN) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    let server = sockopt::socket_peercred(&client)?;
    let bound_to = getpeername(&client)?.map(SocketAddrUnix::try_from);
    Ok(server.pid == getpid() && bound_to == Some(Ok(address.clone())))
}

fn replaced() -> io::Error {
    io::Error::other("another file was put in its place")
}

/// A socket whose connect does not block, even if the backlog of a living server is full.
fn client_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(socket)
}

impl BoundPath {
    /// Removes the socket, unless another file has taken its place.
    pub fn remove(&self) {
        if lstat(&self.path).is_ok_and(|found| FileId::from(&found) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the socket of a dead server. Fails if the path is the socket of a living server, or any
/// other file.
fn remove_dead_socket(path: &Path) -> io::Result<()> {
    let found = match lstat(path) {
        Err(Errno::NOENT) => return Ok(()),
        found => found?,
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "something that is not a socket is in the way",
        ));
    }
    match connect(client_socket()?, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        // Either the server accepts, or its backlog is full, or this process may not connect to the
        // socket.
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}

/// Removes the sockets that dead servers of this user have left in `directory`. `is_ours` says
/// which names such sockets have. Removes none if a server may be binding one: it holds the lock on
/// the directory until it listens.
pub fn remove_dead_sockets(directory: &Path, is_ours: impl Fn(&OsStr) -> bool) -> io::Result<()> {
    let lock = Directory::open(directory)?;
    if !lock_within(&lock, LOCK_PATIENCE)? {
        return Ok(());
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if is_ours(&entry.file_name()) && entry.metadata().is_ok_and(|found| is_left_over(&found)) {
            // It fails if the server is alive.
            let _ = remove_dead_socket(&entry.path());
        }
    }
    Ok(())
}

/// Whether a dead server of this user may have left this socket.
fn is_left_over(found: &fs::Metadata) -> bool {
    let age = found
        .modified()
        .map(|bound| SystemTime::now().duration_since(bound));
    let is_old = matches!(age, Ok(Ok(age)) if age >= MIN_DEAD_AGE);
    found.file_type().is_socket() && is_own(found.uid()) && is_old
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::short_directory;

    #[test]
    fn only_the_socket_that_was_bound_there_is_taken_for_it() {
        let directory = short_directory();
        let [ours, other, dead] = ["ours", "other", "dead"].map(|name| directory.path().join(name));
        let _listening = [&ours, &other].map(|path| UnixListener::bind(path).expect("a socket"));
        drop(UnixListener::bind(&dead).expect("a socket"));
        let address = SocketAddrUnix::new(&*ours).expect("an address");
        for (path, is_own) in [(&ours, true), (&other, false), (&dead, false)] {
            let path = path.to_str().expect("UTF-8");
            assert_eq!(is_own_listener(path, &address).expect("an answer"), is_own);
        }
    }
}
