//! The file system that a file is on: its type, its id, and whether only one kernel can have it
//! mounted (sema-lockfile(5), FILE SYSTEMS).

use std::fmt;
use std::os::fd::AsFd;

use rustix::fs::{fstatfs, fstatvfs};

/// The types of file system that only one kernel can have mounted, by the magic number that
/// statfs(2) returns. On these, all processes that reach a file in the same way see the same lock
/// on it, and a hard link leads to the same file.
const SINGLE_KERNEL_TYPES: &[(u32, &str)] = &[
    (0x0000_ef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0xf2f5_2010, "f2fs"),
    (0x0102_1994, TMPFS),
    (0x8584_58f6, RAMFS),
    (0x794c_7630, "overlay"),
    (0x2fc1_2fc1, "zfs"),
    (0xca45_1a4e, "bcachefs"),
    (0x2405_1905, "ubifs"),
    (0x0000_72b6, "jffs2"),
    (0x0000_3434, "nilfs2"),
    (0x0000_4d44, "vfat"),
    (0x2011_bab0, "exfat"),
    (0x7366_746e, "ntfs3"),
    (0x5265_4973, "reiserfs"),
    (0x3153_464a, "jfs"),
    (0x0000_137f, "minix"),
    (0x0000_138f, "minix"),
    (0x0000_2468, "minix"),
    (0x0000_2478, "minix"),
    (0x0000_4d5a, "minix"),
    (0x0000_482b, "hfsplus"),
];

const TMPFS: &str = "tmpfs";
const RAMFS: &str = "ramfs";

/// A mounted file system. A record contains it in the form `ext4:1f3a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FileSystem {
    magic: u32,
    id: u64,
}

impl FileSystem {
    /// Returns the file system of an open file or directory; `None` if a system call fails.
    pub(super) fn of(file: impl AsFd) -> Option<FileSystem> {
        let of_file = fstatfs(&file).ok()?;
        Some(FileSystem {
            // The field is signed on some architectures and 64 bits wide on others.
            magic: of_file.f_type as u32,
            id: fstatvfs(&file).ok()?.f_fsid,
        })
    }

    /// Whether only one kernel can have this file system mounted. If so, all processes that see the
    /// same type and id see the same locks.
    pub(super) fn has_single_kernel(self) -> bool {
        self.type_name().is_some()
    }

    /// Whether the files survive a reboot.
    pub(super) fn survives_reboot(self) -> bool {
        self.type_name()
            .is_some_and(|name| name != TMPFS && name != RAMFS)
    }

    fn type_name(self) -> Option<&'static str> {
        let mut types = SINGLE_KERNEL_TYPES.iter();
        types.find_map(|(magic, name)| (*magic == self.magic).then_some(*name))
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.type_name() {
            Some(name) => write!(f, "{name}:{:x}", self.id),
            None => write!(f, "{:x}:{:x}", self.magic, self.id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl FileSystem {
        pub(in crate::lockfile) fn of_type(name: &str, id: u64) -> FileSystem {
            let mut types = SINGLE_KERNEL_TYPES.iter();
            let magic = types.find_map(|(magic, known)| (*known == name).then_some(*magic));
            FileSystem {
                magic: magic.unwrap_or(0x6573_5546),
                id,
            }
        }
    }

    #[test]
    fn a_file_system_is_named_by_its_type_or_magic_and_its_id() {
        for (name, id, text) in [
            ("ext4", 0x1f, "ext4:1f"),
            ("tmpfs", 0, "tmpfs:0"),
            ("fuse", 0, "65735546:0"),
        ] {
            let file_system = FileSystem::of_type(name, id);
            assert_eq!(file_system.to_string(), text);
            assert_eq!(file_system.has_single_kernel(), name != "fuse");
            assert_eq!(file_system.survives_reboot(), name == "ext4");
        }
    }

    #[test]
    fn a_file_is_on_the_file_system_of_its_directory() {
        let scratch = tempfile::tempdir().expect("a directory");
        let file = std::fs::File::create(scratch.path().join("file")).expect("a file");
        let directory = std::fs::File::open(scratch.path()).expect("a directory");
        let found = FileSystem::of(&file);
        assert!(found.is_some());
        assert_eq!(found, FileSystem::of(&directory));
    }
}
