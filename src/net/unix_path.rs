//! Paths of listening Unix sockets: taken over from a dead server, never from a running one.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use log::warn;
use rustix::fs::{chownat, fstat, lstat, openat, AtFlags, FileType, Gid, Mode, OFlags, CWD};
use rustix::io::Errno;
use rustix::net::{
    connect, listen, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::geteuid;

use crate::sys::directory::{lock_within, Directory, FileId};
use crate::text::Escaped;

use super::listener::{Listener, BACKLOG};

/// How long to wait for another process's lock on the directory before going on without it.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The path of a socket that this process bound.
#[derive(Debug)]
pub struct BoundPath {
    path: PathBuf,
    /// Tells our socket from one that another server has put there later.
    identity: FileId,
}

/// Listens on `path`; `mode` and `group` say who may connect. Replaces the socket of a dead server;
/// fails with [`io::ErrorKind::AddrInUse`] if a running server has it, and with
/// [`io::ErrorKind::AlreadyExists`] for any other file. Changes the umask for a moment, so no other
/// thread may create files.
pub fn bind(path: &Path, mode: u32, group: Option<u32>) -> io::Result<Listener> {
    // Two servers that both find a dead server's socket must not remove each other's. The lock on
    // the directory makes look, remove and listen one step. But any user who may read the directory
    // can hold that lock, which must not keep the server from starting.
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
    let umask = rustix::process::umask(Mode::from_raw_mode(!mode & 0o777));
    let bound = rustix::net::bind(&socket, &address);
    rustix::process::umask(umask);
    bound?;
    let (name, identity) = open_bound(path)?;
    let made = BoundPath {
        path: path.to_owned(),
        identity,
    };
    // No client can connect before the socket listens.
    let listening = give_access(&name, mode, group).and_then(|()| Ok(listen(&socket, BACKLOG)?));
    listening.inspect_err(|_| made.remove())?;
    Listener::adopt_unix(socket.into(), Some(made))
}

/// Opens the socket that was just bound, so that access is granted to it and nothing else: any user
/// who may write to the directory can replace the file.
fn open_bound(path: &Path) -> io::Result<(OwnedFd, FileId)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let name = openat(CWD, path, flags, Mode::empty())?;
    let found = fstat(&name)?;
    let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
    // A second name would be a link to another socket of this user.
    if !is_socket || found.st_uid != geteuid().as_raw() || found.st_nlink != 1 {
        return Err(io::Error::other("another file was put in its place"));
    }
    Ok((name, FileId::from(&found)))
}

/// Sets the group and, unless the umask already did, the mode.
fn give_access(name: &OwnedFd, mode: u32, group: Option<u32>) -> io::Result<()> {
    if let Some(group) = group {
        chownat(
            name,
            "",
            None,
            Some(Gid::from_raw(group)),
            AtFlags::EMPTY_PATH,
        )?;
    }
    if fstat(name)?.st_mode & 0o777 == mode {
        return Ok(());
    }
    // The directory has a default ACL, which overrides the umask.
    let by_descriptor = format!("/proc/self/fd/{}", name.as_raw_fd());
    fs::set_permissions(by_descriptor, fs::Permissions::from_mode(mode))
}

impl BoundPath {
    /// Removes the socket, unless another one has replaced it.
    pub(super) fn remove(&self) {
        if lstat(&self.path).is_ok_and(|found| FileId::from(&found) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the socket of a dead server, and nothing else.
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
    // The probe does not block: the backlog of a running server may be full.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&probe, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        // A server that accepts, a full backlog, or a socket that this process may not connect to.
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}
