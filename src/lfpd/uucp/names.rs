//! The names and the content of the lock files of serial devices, in the tradition of UUCP. Pure:
//! no I/O.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

/// The maximum number of bytes that are read from a lock file. The process number comes first; some
/// programs add their name after it.
pub const MAX_CONTENT_LEN: u64 = 64;

/// The prefixes of the names of lock files. We write the first, and look for all of them.
const PREFIXES: [&str; 3] = ["LCK..", "lk..", "LK."];

/// The parts of a path below /dev: at least one, and neither `.` nor `..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePath(Vec<Vec<u8>>);

impl DevicePath {
    /// Parses a path; `None` if it is not below /dev, or has `..` in it.
    pub fn parse(path: &[u8]) -> Option<DevicePath> {
        DevicePath::below(path.strip_prefix(b"/dev/")?)
    }

    /// Parses the part of a path after `/dev/`.
    pub fn below(rest: &[u8]) -> Option<DevicePath> {
        let parts = rest.split(|byte| *byte == b'/');
        let parts: Vec<Vec<u8>> = parts
            .filter(|part| !part.is_empty() && part != b".")
            .map(<[u8]>::to_vec)
            .collect();
        let is_below = !parts.is_empty() && parts.iter().all(|part| part != b"..");
        is_below.then_some(DevicePath(parts))
    }

    /// The path of these parts.
    pub fn of_parts(parts: Vec<Vec<u8>>) -> DevicePath {
        DevicePath(parts)
    }

    pub fn parts(&self) -> &[Vec<u8>] {
        &self.0
    }

    /// The names under which we lock the device. The first is made from the last part of the path.
    /// If the path has several parts, a second name is made from all of them. Other programs use
    /// one or the other.
    pub fn written_names(&self) -> Vec<OsString> {
        let mut names = vec![name(PREFIXES[0], self.base())];
        if self.0.len() > 1 {
            names.push(self.full_name());
        }
        names
    }

    /// The name that is made from all parts of the path.
    pub fn full_name(&self) -> OsString {
        name(PREFIXES[0], &self.0.join(&b'_'))
    }

    /// All names under which a program may have locked the device, including those of
    /// [`DevicePath::written_names`].
    pub fn known_names(&self) -> Vec<OsString> {
        let mut stems = vec![self.base().to_vec()];
        if self.0.len() > 1 {
            stems.extend([self.0.join(&b'_'), self.0.join(&b':')]);
        }
        stems.iter().flat_map(|stem| with_prefixes(stem)).collect()
    }

    fn base(&self) -> &[u8] {
        self.0.last().map_or(b"", Vec::as_slice)
    }
}

/// The names that are made from three numbers: the major number of the node's file system, and the
/// major and minor number of the device.
pub fn numbered_names(file_system_major: u32, major: u32, minor: u32) -> Vec<OsString> {
    with_prefixes(format!("{file_system_major:03}.{major:03}.{minor:03}").as_bytes())
}

/// The content of our lock files: the number right-aligned in ten columns, and a line end.
pub fn content(pid: u32) -> String {
    format!("{pid:10}\n")
}

/// The holder that a lock file names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    Process(u32),
    /// The number 0, as lockfile-create writes it: a lock that no process holds.
    Zero,
    /// The file has no number that a process can have. A program may be about to write one, or a
    /// power cut may have removed the content.
    Nothing,
}

/// The holder that the content of a lock file names.
pub fn named_in(content: &[u8]) -> Named {
    if let Some(number) = binary(content) {
        return if is_a_pid(&number) {
            Named::Process(number)
        } else {
            Named::Nothing
        };
    }
    let text = content.trim_ascii_start();
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let is_whole = match text.get(digits) {
        Some(next) => next.is_ascii_whitespace() || *next == 0,
        // The next byte, which was not read, may be another digit.
        None => (content.len() as u64) < MAX_CONTENT_LEN,
    };
    let digits = &text[..digits];
    match pid_in(digits) {
        Some(pid) if is_whole => Named::Process(pid),
        None if is_whole && !digits.is_empty() && digits.iter().all(|digit| *digit == b'0') => {
            Named::Zero
        }
        _ => Named::Nothing,
    }
}

/// The process whose number these digits are; `None` if no process can have it.
pub fn pid_in(digits: &[u8]) -> Option<u32> {
    let number = std::str::from_utf8(digits).ok()?.parse().ok();
    number.filter(is_a_pid)
}

/// The number in a file of exactly four bytes, if they are not text.
fn binary(content: &[u8]) -> Option<u32> {
    let bytes: [u8; 4] = content.try_into().ok()?;
    // No process number is so high that all four of its bytes are printable characters or spaces,
    // but some of them can be. If the number 49 were taken for text, it would be `1` followed by
    // NUL bytes, and would name another process.
    let is_text = bytes
        .iter()
        .all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
    (!is_text).then_some(u32::from_ne_bytes(bytes))
}

fn is_a_pid(number: &u32) -> bool {
    (1..=i32::MAX.unsigned_abs()).contains(number)
}

fn with_prefixes(stem: &[u8]) -> Vec<OsString> {
    PREFIXES.iter().map(|prefix| name(prefix, stem)).collect()
}

fn name(prefix: &str, stem: &[u8]) -> OsString {
    OsString::from_vec([prefix.as_bytes(), stem].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(path: &str) -> Vec<String> {
        let device = DevicePath::parse(path.as_bytes()).expect("a device");
        shown(device.written_names())
    }

    fn shown(names: Vec<OsString>) -> Vec<String> {
        names
            .into_iter()
            .map(|name| name.into_string().expect("UTF-8"))
            .collect()
    }

    #[test]
    fn a_nested_device_is_locked_by_its_last_part_and_by_all_parts() {
        assert_eq!(written("/dev/ttyS1"), ["LCK..ttyS1"]);
        assert_eq!(written("/dev/usb/tts/0"), ["LCK..0", "LCK..usb_tts_0"]);
        assert_eq!(written("/dev//./usb//tts/./0/"), written("/dev/usb/tts/0"));
    }

    #[test]
    fn all_spellings_are_looked_for() {
        let device = DevicePath::parse(b"/dev/usb/0").expect("a device");
        assert_eq!(
            shown(device.known_names()),
            [
                "LCK..0",
                "lk..0",
                "LK.0",
                "LCK..usb_0",
                "lk..usb_0",
                "LK.usb_0",
                "LCK..usb:0",
                "lk..usb:0",
                "LK.usb:0"
            ]
        );
        assert_eq!(
            shown(numbered_names(0, 4, 65)),
            ["LCK..000.004.065", "lk..000.004.065", "LK.000.004.065"]
        );
    }

    #[test]
    fn what_is_not_below_dev_is_no_device() {
        for path in [
            "",
            "/",
            "/dev",
            "/dev/",
            "/dev//",
            "/dev/.",
            "/dev/..",
            "/dev/../etc/passwd",
            "/dev/a/../../etc",
            "/dev/a/../b",
            "/device",
            "/etc/passwd",
            "ttyS1",
            "dev/ttyS1",
            "//dev/ttyS1",
            "/DEV/ttyS1",
        ] {
            assert_eq!(DevicePath::parse(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn our_own_content_is_eleven_bytes_and_is_understood() {
        for pid in [1, 1234, i32::MAX.unsigned_abs()] {
            let content = content(pid);
            assert_eq!(content.len(), 11);
            assert_eq!(named_in(content.as_bytes()), Named::Process(pid));
        }
    }

    #[test]
    fn every_way_to_write_a_number_is_understood() {
        for (content, pid) in [
            (&b"1234"[..], 1234),
            (b"123\n", 123),
            (b"12\n\n", 12),
            (b"      1234\n", 1234),
            (b"  16929 minicom root\n", 16929),
            (b"\t77\0\0", 77),
            (&1234i32.to_ne_bytes(), 1234),
            (&4_194_303i32.to_ne_bytes(), 4_194_303),
            // Their bytes begin with digits.
            (&0x31i32.to_ne_bytes(), 0x31),
            (&0x3231i32.to_ne_bytes(), 0x3231),
            (&0x2031i32.to_ne_bytes(), 0x2031),
            (&0x0A_32_31i32.to_ne_bytes(), 0x0A_32_31),
            (b"123\0\n", 123),
        ] {
            assert_eq!(named_in(content), Named::Process(pid), "{content:?}");
        }
    }

    #[test]
    fn other_content_names_no_process() {
        let cut = [&[b' '; 60][..], b"1234"].concat();
        for content in [
            &b""[..],
            b"\n",
            b"   \n",
            b"garbage",
            b"abcd",
            b"12x",
            b"\0\0\0\0\0\0\0\0\0\0\0",
            b"-1\n",
            b"+1\n",
            b"2147483648\n",
            b"99999999999999999999\n",
            b"\0\0\0\0",
            b"\xff\xff\xff\xff",
            b"\x01\0\0",
            b"\x01\0\0\0\0",
            &cut,
        ] {
            assert_eq!(named_in(content), Named::Nothing, "{content:?}");
        }
        for content in [&b"0\n"[..], b"         0\n", b"0", b"000\n"] {
            assert_eq!(named_in(content), Named::Zero, "{content:?}");
        }
    }
}
