//! The device that a path leads to, and the names of its lock files. The device itself is never
//! opened, because that may have an effect, such as hanging up a modem.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{
    major, minor, openat, readlinkat, statat, AtFlags, Dir, FileType, Mode, OFlags, Stat, CWD,
};
use rustix::io::Errno;

use crate::os::directory::FileId;

use super::names::{numbered_names, DevicePath};

/// The maximum number of links in a path, as in the kernel.
const MAX_LINKS: usize = 40;

/// The maximum number of steps of a walk. Each `..` in a link starts the walk again from /dev.
const MAX_STEPS: usize = 1000;

/// The mode bit of a folder that every user may search.
const SEARCHABLE_BY_ALL: u32 = 0o001;

/// The folders below /dev in which a device may have other names. Only root can write there.
const ALIAS_FOLDERS: [&[&[u8]]; 3] = [&[], &[b"serial", b"by-id"], &[b"serial", b"by-path"]];

/// The names of the lock files of a device, and the device's nodes.
#[derive(Debug, PartialEq, Eq)]
pub struct Device {
    /// The names of the lock files that we make: without duplicates, and sorted, so that all our
    /// processes use the same order.
    pub written: Vec<OsString>,
    /// The names in `written` that contain all parts of a path. The first is the name for the path
    /// that was looked up. Other devices may share the other names in `written`.
    pub full: Vec<OsString>,
    /// All names under which a program may have locked the device, including those in `written`.
    pub known: Vec<OsString>,
    /// The nodes with the device's numbers. A program may have locked any of them. Empty if the
    /// device is not plugged in, and if it was looked up to unlock it.
    pub nodes: Vec<FileId>,
}

impl Device {
    /// Looks up the device at `path`, with /dev at `root`; `None` if the path leads out of /dev, or
    /// to something that is not a character device. A device that is not plugged in is accepted,
    /// because a lock on it does no harm.
    pub fn look_up(path: &DevicePath, root: &Path) -> Option<Device> {
        let target = walk(path, root)?;
        let (aliases, numbers) = match target.node {
            None => (Aliases::default(), Vec::new()),
            Some((_, node)) if is_device(&node) => {
                let (file_system, device) = (node.st_dev, node.st_rdev);
                let numbers = numbered_names(major(file_system), major(device), minor(device));
                (Aliases::of(&node, root), numbers)
            }
            Some(_) => return None,
        };
        Some(Device::new(&[path, &target.path], aliases, numbers))
    }

    /// Looks up the names under which `path` may have been locked, even if the path now leads
    /// elsewhere.
    pub fn look_up_to_unlock(path: &DevicePath, root: &Path) -> Device {
        match walk(path, root) {
            Some(target) => Device::new(&[path, &target.path], Aliases::default(), Vec::new()),
            None => Device::new(&[path], Aliases::default(), Vec::new()),
        }
    }

    fn new(paths: &[&DevicePath], aliases: Aliases, numbers: Vec<OsString>) -> Device {
        let sorted = |mut names: Vec<OsString>| {
            names.sort_unstable();
            names.dedup();
            names
        };
        let all_paths = paths.iter().copied().chain(&aliases.paths);
        Device {
            written: sorted(paths.iter().flat_map(|path| path.written_names()).collect()),
            full: paths.iter().map(|path| path.full_name()).collect(),
            known: sorted(
                all_paths
                    .flat_map(DevicePath::known_names)
                    .chain(numbers)
                    .collect(),
            ),
            nodes: aliases.nodes,
        }
    }
}

struct Destination {
    path: DevicePath,
    /// The file at the path, opened with O_PATH; `None` if there is none.
    node: Option<(OwnedFd, Stat)>,
}

/// Follows `path`, with /dev at `root`; `None` if the path leaves /dev at any point. Looks up each
/// part on its own and does not let the kernel follow links. Otherwise a link could lead out of
/// /dev, and the reply would reveal whether a file exists there.
fn walk(path: &DevicePath, root: &Path) -> Option<Destination> {
    let open_root = || openat(CWD, root, OFlags::DIRECTORY | NAME_ONLY, Mode::empty()).ok();
    let mut folder = open_root()?;
    let mut walked: Vec<Vec<u8>> = Vec::new();
    let mut ahead: Vec<Vec<u8>> = path.parts().iter().rev().cloned().collect();
    let mut link_count = 0;
    for _ in 0..MAX_STEPS {
        let Some(part) = ahead.pop() else {
            // The path ends at a directory.
            let stat = stat_of(&folder)?;
            let path = DevicePath::of_parts(walked);
            let node = Some((folder, stat));
            return Some(Destination { path, node });
        };
        if part == b".." {
            walked.pop()?;
            ahead.extend(walked.drain(..).rev());
            folder = open_root()?;
            continue;
        }
        let node = match openat(&folder, &part[..], NAME_ONLY, Mode::empty()) {
            Ok(node) => node,
            Err(Errno::NOENT) => {
                walked.push(part);
                walked.extend(ahead.into_iter().rev());
                let path = DevicePath::of_parts(walked);
                let is_plain = path.parts().iter().all(|part| part != b"..");
                return is_plain.then_some(Destination { path, node: None });
            }
            Err(_) => return None,
        };
        let stat = stat_of(&node)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => {
                link_count += 1;
                if link_count > MAX_LINKS {
                    return None;
                }
                let target = readlinkat(&node, "", Vec::new()).ok()?;
                let mut target = target.to_bytes();
                if target.starts_with(b"/") {
                    target = target.strip_prefix(b"/dev/")?;
                    walked.clear();
                    folder = open_root()?;
                }
                let parts = target.split(|byte| *byte == b'/');
                let parts = parts.filter(|part| !part.is_empty() && *part != b".");
                ahead.extend(parts.rev().map(<[u8]>::to_vec));
            }
            // The reply must not reveal what is in a folder that the client may not search.
            FileType::Directory if stat.st_mode & SEARCHABLE_BY_ALL == 0 => return None,
            FileType::Directory => {
                walked.push(part);
                folder = node;
            }
            _ if ahead.is_empty() => {
                walked.push(part);
                let path = DevicePath::of_parts(walked);
                let node = Some((node, stat));
                return Some(Destination { path, node });
            }
            _ => return None,
        }
    }
    None
}

/// The flags to open a file with O_PATH, which has no effect on a device.
const NAME_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The other paths of a device, and all its nodes.
#[derive(Default)]
struct Aliases {
    paths: Vec<DevicePath>,
    nodes: Vec<FileId>,
}

impl Aliases {
    /// Finds the other paths of the device `node` in [`ALIAS_FOLDERS`]: nodes with the same
    /// numbers, links to such a node, and the paths to which these links lead.
    fn of(node: &Stat, root: &Path) -> Aliases {
        let mut aliases = Aliases {
            paths: Vec::new(),
            nodes: vec![FileId::from(node)],
        };
        let is_same = |stat: &Stat| is_device(stat) && stat.st_rdev == node.st_rdev;
        for folder in ALIAS_FOLDERS {
            let parts: Vec<Vec<u8>> = folder.iter().map(|part| part.to_vec()).collect();
            let Some((opened, entries)) = list(&DevicePath::of_parts(parts.clone()), root) else {
                continue;
            };
            for entry in entries.map_while(Result::ok) {
                let name = entry.file_name();
                let part = || vec![name.to_bytes().to_vec()];
                let path = || DevicePath::of_parts([&parts[..], &part()].concat());
                match entry.file_type() {
                    FileType::CharacterDevice => {
                        let stat = statat(&opened, name, AtFlags::SYMLINK_NOFOLLOW);
                        if let Some(stat) = stat.ok().filter(is_same) {
                            aliases.add([path()], &stat);
                        }
                    }
                    FileType::Symlink | FileType::Unknown => {
                        let target = walk(&path(), root);
                        if let Some(Destination {
                            path: target,
                            node: Some((_, stat)),
                        }) = target
                        {
                            if is_same(&stat) {
                                aliases.add([path(), target], &stat);
                            }
                        }
                    }
                    _ => {}
                }
            }
        }
        aliases
    }

    fn add<const COUNT: usize>(&mut self, paths: [DevicePath; COUNT], node: &Stat) {
        self.paths.extend(paths);
        let node = FileId::from(node);
        if !self.nodes.contains(&node) {
            self.nodes.push(node);
        }
    }
}

/// Opens and lists a folder; `None` if there is no such folder.
fn list(path: &DevicePath, root: &Path) -> Option<(OwnedFd, Dir)> {
    let (folder, _) = walk(path, root)?.node?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let entries = openat(&folder, ".", flags, Mode::empty()).ok()?;
    Some((folder, Dir::new(entries).ok()?))
}

fn stat_of(node: &OwnedFd) -> Option<Stat> {
    // Before Linux 3.6, fstat fails for a descriptor that was opened with O_PATH.
    statat(node, "", AtFlags::EMPTY_PATH).ok()
}

fn is_device(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
}

#[cfg(test)]
pub(super) use tests::make_searchable;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{symlink, PermissionsExt};

    /// Makes a directory below `root` that every user may search, whatever the umask is.
    pub(in crate::lfpd::uucp) fn make_searchable(root: &Path, path: &str) {
        let mut place = root.to_owned();
        for part in Path::new(path) {
            place.push(part);
            fs::create_dir_all(&place).expect("a directory");
            let mode = fs::Permissions::from_mode(0o755);
            fs::set_permissions(&place, mode).expect("it is ours");
        }
    }

    fn look_up(root: &Path, path: &str) -> Option<Vec<String>> {
        let path = DevicePath::parse(path.as_bytes()).expect("below /dev");
        let names = Device::look_up(&path, root)?.written;
        Some(
            names
                .into_iter()
                .map(|name| name.into_string().expect("UTF-8"))
                .collect(),
        )
    }

    #[test]
    fn a_link_is_locked_with_what_it_leads_to() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        make_searchable(root.path(), "serial/by-id");
        symlink("ttyUSB0", at("modem")).expect("a link");
        symlink("modem", at("fax")).expect("a link");
        symlink("../../ttyUSB0", at("serial/by-id/x")).expect("a link");
        assert_eq!(
            look_up(root.path(), "/dev/modem").expect("a device"),
            ["LCK..modem", "LCK..ttyUSB0"]
        );
        assert_eq!(
            look_up(root.path(), "/dev/fax").expect("a device"),
            ["LCK..fax", "LCK..ttyUSB0"]
        );
        assert_eq!(
            look_up(root.path(), "/dev/serial/by-id/x").expect("a device"),
            ["LCK..serial_by-id_x", "LCK..ttyUSB0", "LCK..x"]
        );
    }

    #[test]
    fn a_path_that_leaves_dev_for_a_part_of_the_way_is_refused() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        let name = root.path().file_name().expect("a name").to_owned();
        make_searchable(root.path(), "sub");
        for (name, target) in [
            ("out", "/etc/passwd".as_ref()),
            ("nowhere", "/nonexistent/tty".as_ref()),
            ("up", "../x".as_ref()),
            ("circle", "circle".as_ref()),
            ("proc", "/proc/self/fd".as_ref()),
            ("missing", "nothing/../x".as_ref()),
            ("back", Path::new("..").join(&name).join("sub").as_path()),
            ("again", Path::new("/dev/..").join(&name).as_path()),
            ("in", root.path().join("sub").as_path()),
        ] {
            symlink(target, at(name)).expect("a link");
            for path in [format!("/dev/{name}"), format!("/dev/{name}/x")] {
                assert_eq!(look_up(root.path(), &path), None, "{path}");
            }
        }
    }

    #[test]
    fn a_folder_that_is_closed_to_others_is_not_looked_into() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        make_searchable(root.path(), "closed");
        fs::write(at("closed/file"), "").expect("a file");
        symlink("closed/missing", at("link")).expect("a link");
        let paths = ["/dev/closed/file", "/dev/closed/missing", "/dev/link"];
        for (mode, are_told) in [(0o755, [false, true, true]), (0o770, [false; 3])] {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(at("closed"), mode).expect("it is ours");
            let found = paths.map(|path| look_up(root.path(), path).is_some());
            assert_eq!(found, are_told);
        }
    }

    #[test]
    fn links_within_dev_are_followed_the_absolute_ones_too() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        make_searchable(root.path(), "sub/deep");
        for (name, target) in [
            ("modem", "/dev/ttyS1"),
            ("sub/deep/up", "../../ttyS1"),
            ("sub/round", "deep/.././../sub/deep/up"),
            ("inside", "missing"),
        ] {
            symlink(target, at(name)).expect("a link");
        }
        for (path, names) in [
            ("modem", &["LCK..modem", "LCK..ttyS1"][..]),
            (
                "sub/deep/up",
                &["LCK..sub_deep_up", "LCK..ttyS1", "LCK..up"],
            ),
            ("sub/round", &["LCK..round", "LCK..sub_round", "LCK..ttyS1"]),
            ("inside/0", &["LCK..0", "LCK..inside_0", "LCK..missing_0"]),
        ] {
            let path = format!("/dev/{path}");
            assert_eq!(look_up(root.path(), &path).expect("a device"), names);
        }
    }

    #[test]
    fn other_nodes_and_links_with_the_same_numbers_are_known() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        make_searchable(root.path(), "serial/by-id");
        let make = |name: &str, minor| {
            let numbers = rustix::fs::makedev(1, minor);
            let mode = Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(CWD, at(name), FileType::CharacterDevice, mode, numbers)
        };
        if make("ttyUSB0", 3).is_err() {
            return eprintln!("NOT TESTED: only root can make nodes");
        }
        make("second", 3).expect("a node");
        make("other", 5).expect("a node");
        symlink("../../ttyUSB0", at("serial/by-id/usb-x")).expect("a link");
        symlink("other", at("elsewhere")).expect("a link");
        let path = DevicePath::parse(b"/dev/ttyUSB0").expect("below /dev");
        let device = Device::look_up(&path, root.path()).expect("a device");
        assert_eq!(device.written, ["LCK..ttyUSB0"]);
        let is_known = |name: &str| device.known.iter().any(|known| known == name);
        for name in ["LCK..second", "LK.usb-x", "LCK..serial_by-id_usb-x"] {
            assert!(is_known(name), "{name}");
        }
        assert!(!is_known("LCK..other") && !is_known("LCK..elsewhere"));
    }

    #[test]
    fn only_a_character_device_is_one() {
        assert!(look_up(Path::new("/dev"), "/dev/null").is_some());
        assert_eq!(look_up(Path::new("/dev"), "/dev/null/x"), None);
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("file"), "").expect("a file");
        fs::create_dir(root.path().join("directory")).expect("a directory");
        for path in ["/dev/file", "/dev/directory"] {
            assert_eq!(look_up(root.path(), path), None, "{path}");
        }
    }

    #[test]
    fn the_numbers_of_a_device_are_looked_for() {
        let path = DevicePath::parse(b"/dev/null").expect("below /dev");
        let device = Device::look_up(&path, Path::new("/dev")).expect("a device");
        let has_numbers = |name: &OsString| {
            let name = name.to_string_lossy();
            name.starts_with("LK.") && name.ends_with(".001.003")
        };
        assert!(device.known.iter().any(has_numbers), "{device:?}");
    }
}
