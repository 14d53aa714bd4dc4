//! Replacing this process with a program. `std::process::Command` is not used, because it would add
//! all the code for child processes.

use std::convert::Infallible;
use std::env;
use std::ffi::{CString, NulError, OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use nix::sys::signal::SigSet;
use nix::unistd::execve;

/// Replaces this process with `program`. `arguments` include argv[0]. `variables` are added to the
/// environment of this process, or replace variables in it. The program starts with no signal
/// blocked. Returns only on failure.
pub fn exec(
    program: &Path,
    arguments: impl Iterator<Item = OsString>,
    variables: &[(&str, &str)],
) -> io::Result<Infallible> {
    let is_kept = |name: &OsStr| variables.iter().all(|(set, _)| name != *set);
    let kept = env::vars_os().filter(|(name, _)| is_kept(name));
    let set = variables
        .iter()
        .map(|(name, value)| (name.into(), value.into()));
    let environment = kept
        .chain(set)
        .map(|(mut variable, value): (OsString, OsString)| {
            variable.push("=");
            variable.push(value);
            variable
        });
    let program = CString::new(program.as_os_str().as_bytes())?;
    let (arguments, environment) = (strings(arguments)?, strings(environment)?);
    let _ = SigSet::empty().thread_set_mask();
    Ok(execve(&program, &arguments, &environment)?)
}

fn strings(texts: impl Iterator<Item = OsString>) -> Result<Vec<CString>, NulError> {
    texts.map(|text| CString::new(text.into_vec())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_missing_is_an_error() {
        let failed = |program: &str| {
            let end = exec(Path::new(program), ["it".into()].into_iter(), &[("A", "1")]);
            end.expect_err("there is none").kind()
        };
        assert_eq!(failed("/nowhere/it"), io::ErrorKind::NotFound);
        assert_eq!(failed("/nowhere\0/it"), io::ErrorKind::InvalidInput);
    }
}
