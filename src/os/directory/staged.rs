//! Atomic changes of file names: a file gets its name only when it is complete, and a name is
//! removed only if it belongs to the intended file.
//!
//! Other programs may create, replace or remove any name at any time.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::fs::{
    linkat, openat, renameat, renameat_with, AtFlags, Mode, OFlags, RenameFlags, CWD,
};
use rustix::io::Errno;

use crate::os::random;
use crate::os::text::hex;

use super::{unsupported, without_links, Directory, FileId, SetAside};

/// The maximum number of private names to try.
const MAX_NAMES_TRIED: usize = 16;

/// Private names, which files have only for a moment. Each name is a prefix, 16 random hex digits
/// and a suffix.
#[derive(Debug)]
pub struct PrivateNames {
    pub prefix: &'static str,
    pub suffix: &'static str,
}

impl PrivateNames {
    /// Whether `name` is one of these private names.
    pub fn contains(&self, name: &OsStr) -> bool {
        let number = |name: &str| {
            let digits = name.strip_prefix(self.prefix)?.strip_suffix(self.suffix)?;
            hex(digits)
        };
        name.to_str().and_then(number).is_some()
    }

    /// Calls `attempt` with up to [`MAX_NAMES_TRIED`] private names, until it returns anything but
    /// [`io::ErrorKind::AlreadyExists`].
    fn try_each<T>(
        &self,
        mut attempt: impl FnMut(&OsStr) -> io::Result<T>,
    ) -> io::Result<(OsString, T)> {
        for _ in 0..MAX_NAMES_TRIED {
            let number = random::number()?;
            let (prefix, suffix) = (self.prefix, self.suffix);
            let name = OsString::from(format!("{prefix}{number:016x}{suffix}"));
            match attempt(&name) {
                Ok(done) => return Ok((name, done)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("all private names are taken"))
    }
}

/// A file that is completed before it gets its real name.
#[derive(Debug)]
pub struct StagedFile<'a> {
    directory: &'a Directory,
    file: File,
    /// The file's private name, if it was created with one.
    private_name: Option<PrivateName<'a>>,
}

/// A private name, which is removed on drop.
#[derive(Debug)]
pub struct PrivateName<'a> {
    directory: &'a Directory,
    name: OsString,
}

impl PrivateName<'_> {
    pub fn name(&self) -> &OsStr {
        &self.name
    }
}

impl<'a> StagedFile<'a> {
    /// Creates a file without a name and calls `complete`, which fills and names it. If the system
    /// cannot create or name such a file, starts again with a file that has a private name.
    pub fn make<T>(
        directory: &'a Directory,
        names: &PrivateNames,
        mode: u32,
        complete: impl Fn(StagedFile<'a>) -> io::Result<T>,
    ) -> io::Result<T> {
        match StagedFile::unnamed(directory, mode).and_then(&complete) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                StagedFile::private(directory, names, mode).and_then(complete)
            }
            other => other,
        }
    }

    /// Creates a file without a name. The umask applies to `mode`.
    fn unnamed(directory: &'a Directory, mode: u32) -> io::Result<StagedFile<'a>> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        match openat(&directory.0, ".", flags, Mode::from_raw_mode(mode)) {
            Ok(file) => Ok(StagedFile {
                directory,
                file: file.into(),
                private_name: None,
            }),
            // A kernel before 3.11 returns ISDIR, because it takes the call for an attempt to write
            // to a directory.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS) => {
                Err(unsupported())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Creates a file with a private name. The umask applies to `mode`.
    pub fn private(
        directory: &'a Directory,
        names: &PrivateNames,
        mode: u32,
    ) -> io::Result<StagedFile<'a>> {
        let (name, file) = names.try_each(|name| directory.create(name, mode))?;
        Ok(StagedFile {
            directory,
            file,
            private_name: Some(PrivateName { directory, name }),
        })
    }

    /// The file, open for reading and writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file a real name, or an additional one. Fails with
    /// [`io::ErrorKind::AlreadyExists`] if the name is taken. Fails with
    /// [`io::ErrorKind::Unsupported`] if the file system has no hard links, or if the file has no
    /// name yet and /proc, which is then needed, is not mounted.
    pub fn link(&self, name: &OsStr) -> io::Result<()> {
        let linked = match &self.private_name {
            None => {
                let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                let (to, flags) = (&self.directory.0, AtFlags::SYMLINK_FOLLOW);
                match linkat(CWD, &*path, to, name, flags) {
                    // /proc is not mounted.
                    Err(Errno::NOENT) => Err(unsupported()),
                    other => without_links(other),
                }
            }
            Some(private) => self.directory.link(&private.name, name),
        };
        // On NFS, the link may have been created although the call failed.
        if linked.is_err() && self.directory.identity(name)? == Some(FileId::of(&self.file)?) {
            return Ok(());
        }
        linked
    }

    /// Gives the file an additional private name. Has the same errors as [`StagedFile::link`].
    pub fn link_privately(&self, names: &PrivateNames) -> io::Result<PrivateName<'a>> {
        let (name, ()) = names.try_each(|name| self.link(name))?;
        Ok(PrivateName {
            directory: self.directory,
            name,
        })
    }

    /// The file's private name, if it was created with one.
    pub fn private_name(&self) -> Option<&OsStr> {
        self.private_name.as_ref().map(PrivateName::name)
    }

    /// Removes the file's private name and returns the file.
    pub fn into_file(self) -> File {
        self.file
    }
}

impl Drop for PrivateName<'_> {
    fn drop(&mut self) {
        let _ = self.directory.remove(&self.name);
    }
}

impl Directory {
    /// Removes `name` if `is_meant` says that its file is the intended one. Another process may
    /// replace the file at any time, so this first moves the file to a private name and passes it
    /// to `is_meant` there.
    pub fn remove_if(
        &self,
        name: &OsStr,
        names: &PrivateNames,
        is_meant: impl FnOnce(&OsStr) -> bool,
    ) -> io::Result<SetAside> {
        let moved = names.try_each(|aside| {
            if self.identity(aside)?.is_some() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            Ok(renameat(&self.0, name, &self.0, aside)?)
        });
        let aside = match moved {
            Ok((aside, ())) => aside,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(SetAside::Missing),
            Err(error) => return Err(error),
        };
        if is_meant(&aside) {
            self.remove(&aside)?;
            return Ok(SetAside::Removed);
        }
        self.put_back(&aside, name)
    }

    fn put_back(&self, aside: &OsStr, name: &OsStr) -> io::Result<SetAside> {
        let moved = renameat_with(&self.0, aside, &self.0, name, RenameFlags::NOREPLACE);
        let put_back = match moved {
            // The call does not exist before Linux 3.15, or on some file systems in user space.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                self.put_back_in_steps(aside, name)
            }
            other => other.map_err(io::Error::from),
        };
        match put_back {
            Ok(()) => Ok(SetAside::PutBack),
            // Another process has taken the name since the file was moved.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.remove(aside)?;
                Ok(SetAside::Displaced)
            }
            Err(error) => Err(error),
        }
    }

    /// Moves a file back to its name without renameat2(2). Fails with
    /// [`io::ErrorKind::AlreadyExists`] if the name is taken.
    fn put_back_in_steps(&self, aside: &OsStr, name: &OsStr) -> io::Result<()> {
        match self.link(aside, name) {
            Ok(()) => self.remove(aside),
            // A hard link is not possible: the file system has none, this is a directory, or the
            // file belongs to another user and hard links are protected. If another process takes
            // the name between this check and the rename, the rename takes the name from that
            // process.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                if self.identity(name)?.is_some() {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                Ok(renameat(&self.0, aside, &self.0, name)?)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
pub use tests::{in_directory, names_in};

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    const NAMES: PrivateNames = PrivateNames {
        prefix: ".aside-",
        suffix: "~",
    };

    impl FileId {
        /// The id of a file in the tests' model.
        pub fn of_model(device: u64, inode: u64) -> FileId {
            FileId(device, inode)
        }
    }

    pub fn in_directory(check: impl FnOnce(&Path, &Directory)) {
        let scratch = tempfile::tempdir().expect("a directory");
        let directory = Directory::open(scratch.path()).expect("a directory");
        check(scratch.path(), &directory);
    }

    /// Sorted.
    pub fn names_in(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("a directory");
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let names = entries.map(|entry| name(entry).into_string().expect("UTF-8"));
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_privately_named_file_leaves_only_its_real_name() {
        in_directory(|path, directory| {
            let staged = StagedFile::private(directory, &NAMES, 0o644).expect("a file");
            assert!(NAMES.contains(OsStr::new(&names_in(path)[0])));
            staged.link(OsStr::new("real")).expect("a free name");
            let other = StagedFile::private(directory, &NAMES, 0o644).expect("a file");
            let error = other.link(OsStr::new("real")).expect_err("a taken name");
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            drop((staged, other));
            assert_eq!(names_in(path), ["real"]);
        });
    }

    #[test]
    fn a_link_that_was_made_counts_whatever_the_reply() {
        in_directory(|path, directory| {
            let staged = StagedFile::private(directory, &NAMES, 0o644).expect("a file");
            let private_name = path.join(&names_in(path)[0]);
            // As if by a request whose reply was lost, and that was sent once more.
            fs::hard_link(private_name, path.join("real")).expect("a link");
            staged.link(OsStr::new("real")).expect("our link");
            fs::remove_file(path.join("real")).expect("our link");
            fs::write(path.join("real"), "").expect("another file");
            let error = staged.link(OsStr::new("real")).expect_err("taken");
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        });
    }

    #[test]
    fn a_file_that_cannot_be_named_is_staged_again_privately() {
        in_directory(|path, directory| {
            let is_private = |staged: StagedFile<'_>| match staged.private_name {
                None => Err(io::ErrorKind::Unsupported.into()),
                Some(_) => Ok(()),
            };
            StagedFile::make(directory, &NAMES, 0o644, is_private).expect("the fallback");
            assert!(names_in(path).is_empty());
        });
    }

    #[test]
    fn only_the_file_that_is_meant_loses_its_name() {
        in_directory(|path, directory| {
            let name = OsStr::new("file");
            let remove_if = |is_meant| directory.remove_if(name, &NAMES, |_| is_meant);
            assert_eq!(remove_if(true).expect("usable"), SetAside::Missing);
            fs::write(path.join(name), "").expect("a file");
            assert_eq!(remove_if(false).expect("usable"), SetAside::PutBack);
            assert_eq!(names_in(path), ["file"]);
            assert_eq!(remove_if(true).expect("usable"), SetAside::Removed);
            assert!(names_in(path).is_empty());
        });
    }

    #[test]
    fn a_name_taken_meanwhile_stays_with_the_taker() {
        in_directory(|path, directory| {
            fs::write(path.join("file"), "first").expect("a file");
            let displaced = directory.remove_if(OsStr::new("file"), &NAMES, |_| {
                fs::write(path.join("file"), "second").expect("a file");
                false
            });
            assert_eq!(displaced.expect("usable"), SetAside::Displaced);
            assert_eq!(names_in(path), ["file"]);
            let content = fs::read_to_string(path.join("file")).expect("a file");
            assert_eq!(content, "second");
        });
    }

    #[test]
    fn a_name_is_given_back_where_neither_call_can_do_it_alone() {
        in_directory(|path, directory| {
            let [aside, name] = ["aside", "name"].map(OsStr::new);
            let put_back = || directory.put_back_in_steps(aside, name);
            fs::write(path.join(aside), "").expect("a file");
            put_back().expect("a link");
            assert_eq!(names_in(path), ["name"]);
            // A directory cannot have a second name, like a file on FAT.
            fs::create_dir(path.join(aside)).expect("a directory");
            let error = put_back().expect_err("taken");
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            fs::remove_file(path.join(name)).expect("it is ours");
            put_back().expect("a rename");
            assert_eq!(names_in(path), ["name"]);
        });
    }

    #[test]
    fn private_names_are_known_and_others_are_not() {
        for (name, is_private) in [
            (".aside-0123456789abcdef~", true),
            (".aside-0123456789abcdef", false),
            (".aside-0123456789abcde~", false),
            (".aside-0123456789abcdef0~", false),
            (".aside-0123456789abcdeg~", false),
            ("aside-0123456789abcdef~", false),
            (".aside-~", false),
            ("", false),
        ] {
            assert_eq!(NAMES.contains(OsStr::new(name)), is_private, "{name}");
        }
    }
}
