//! The secret that client and server share. A client presents it with `auth`.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read};
use std::path::Path;

use rustix::fs::{fcntl_setfl, fstatfs, FsWord, OFlags};

use super::directory::not_a_file;
use super::text::bare;
use super::trusted;

/// The magic number of pipefs, the file system of anonymous pipes.
const PIPEFS_MAGIC: FsWord = 0x5049_5045;

/// The maximum length of a secret in bytes. A longer secret does not fit into a request.
const MAX_SECRET_LEN: usize = 65_536;

/// The maximum length of a file with a secret, in bytes. It leaves room for white space around the
/// secret.
const MAX_FILE_LEN: u64 = 128 * 1024;

/// The rights that the words behind an auth token may name: see latchd-security(7), RIGHTS.
pub const SEE: &str = "see";
pub const USE: &str = "use";
pub const BREAK: &str = "break";

/// Reads the secrets in a file, one in each line, and trims the white space around them. There is
/// at least one. Empty lines do not count. No error shows a secret.
pub fn read_lines(path: &Path) -> io::Result<Vec<String>> {
    let content = content(path)?;
    let lines = bare(&content).lines();
    let lines = lines.filter(|line| !line.trim().is_empty());
    let secrets: Result<Vec<String>, _> =
        lines.map(|line| check(line).map(str::to_owned)).collect();
    match secrets {
        Ok(secrets) if secrets.is_empty() => check("").map(|_| secrets),
        secrets => secrets,
    }
    .map_err(io::Error::other)
}

/// Reads the first secret in a file that [`read_lines`] accepts: the one that a client presents.
pub fn read_first(path: &Path) -> io::Result<String> {
    Ok(read_lines(path)?.swap_remove(0))
}

/// Reads the first auth token in a file, without the rights behind it.
pub fn read_auth_token(path: &Path) -> io::Result<String> {
    let line = read_first(path)?;
    Ok(split_rights(&line).0.to_owned())
}

/// Splits a line of a file with auth tokens into the token and its rights. A token may contain
/// blanks. So only a right in the place of the second word ends the token.
pub fn split_rights(line: &str) -> (&str, Option<&str>) {
    let Some((token, words)) = line.split_once(char::is_whitespace) else {
        return (line, None);
    };
    let words = words.trim_start();
    let second = words.split(char::is_whitespace).next();
    if second.is_some_and(|word| [SEE, USE, BREAK].contains(&word)) {
        (token, Some(words))
    } else {
        (line, None)
    }
}

fn content(path: &Path) -> io::Result<String> {
    let mut content = String::new();
    let mut limited = open(path)?.take(MAX_FILE_LEN + 1);
    if limited.read_to_string(&mut content)? as u64 > MAX_FILE_LEN {
        return Err(io::Error::other("it is too long for a token"));
    }
    Ok(content)
}

/// Opens a file with a secret. Accepts the pipe of a shell's `<(command)`, because that pipe has a
/// writer. Refuses a named FIFO, which may never get a writer.
fn open(path: &Path) -> io::Result<File> {
    let file = trusted::open(path, OFlags::RDONLY, 0)?;
    if fstatfs(&file)?.f_type == PIPEFS_MAGIC {
        fcntl_setfl(&file, OFlags::empty())?;
    } else if !file.metadata()?.is_file() {
        return Err(not_a_file());
    }
    Ok(file)
}

/// Trims white space around a secret and checks it. An empty secret would let every client in, and
/// no client could present a secret with a line end. The error does not show the secret.
pub fn check(secret: &str) -> Result<&str, &'static str> {
    let secret = secret.trim();
    if secret.is_empty() {
        Err("the token is empty")
    } else if secret.contains(['\r', '\n']) {
        Err("the token has a line end in it")
    } else if secret.len() > MAX_SECRET_LEN {
        Err("the token is longer than 65536 bytes")
    } else {
        Ok(secret)
    }
}

/// Compares two secrets. The time depends only on their lengths, so it does not tell whether a
/// guess is partly correct.
pub fn is_same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut difference = 0;
    for (one, other) in one.iter().zip(other) {
        // `black_box` keeps the compiler from ending the loop at the first difference.
        difference = black_box(difference | (one ^ other));
    }
    difference == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_of_several_secrets_has_one_in_each_line() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("secrets");
        for (content, expected) in [
            ("new", Ok(&["new"][..])),
            (" new\t\r\n\n old token \n", Ok(&["new", "old token"])),
            ("\u{feff}new\n", Ok(&["new"])),
            ("\n \n", Err("the token is empty")),
            ("new\nol\rd", Err("the token has a line end in it")),
        ] {
            fs::write(&path, content).expect("the directory is ours");
            let found = read_lines(&path).map_err(|error| error.to_string());
            let expected = expected.map(|lines| lines.iter().map(|it| (*it).to_owned()).collect());
            assert_eq!(found, expected.map_err(str::to_owned), "{content:?}");
        }
        fs::write(&path, "new\nold\n").expect("the directory is ours");
        assert_eq!(read_first(&path).expect("it is usable"), "new");
    }

    #[test]
    fn only_a_right_as_the_second_word_ends_a_token() {
        for (line, token, rights) in [
            ("token see", "token", Some("see")),
            (
                "token\t use  ci/ break *",
                "token",
                Some("use  ci/ break *"),
            ),
            ("token", "token", None),
            ("old token", "old token", None),
            ("old token see", "old token see", None),
            ("see", "see", None),
            ("token sees", "token sees", None),
            ("token See", "token See", None),
        ] {
            assert_eq!(split_rights(line), (token, rights), "{line}");
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("secrets");
        fs::write(&path, "\n first use ci/\nsecond\n").expect("the directory is ours");
        assert_eq!(read_auth_token(&path).expect("it is usable"), "first");
    }

    #[test]
    fn a_secret_in_a_file_fits_into_a_request() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("secret");
        let longest = [b'x'; MAX_SECRET_LEN];
        for (content, expected) in [
            (&b" \thunter 2\r\n\n"[..], Ok(8)),
            (&longest, Ok(MAX_SECRET_LEN)),
            (b"", Err("the token is empty")),
            (b" \n\t\r\n", Err("the token is empty")),
            (b"ab\nc", Ok(2)),
            (b"a\rb", Err("the token has a line end in it")),
            (b"a\xff", Err("stream did not contain valid UTF-8")),
            (
                &[&longest[..], b"x"].concat(),
                Err("the token is longer than 65536 bytes"),
            ),
        ] {
            fs::write(&path, content).expect("the directory is ours");
            let found = read_first(&path).map(|secret| secret.len());
            let found = found.map_err(|error| error.to_string());
            assert_eq!(found, expected.map_err(str::to_owned));
        }
        let file = File::options().write(true).open(&path);
        let is_set = file.and_then(|file| file.set_len(MAX_FILE_LEN + 1));
        is_set.expect("a hole takes no room");
        let error = read_first(&path).expect_err("it is too long");
        assert_eq!(error.to_string(), "it is too long for a token");
    }
}
