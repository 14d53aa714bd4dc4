//! An earlier build of latchd, latch and sema, to measure beside the present one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs that are built.
const PROGRAMS: [&str; 3] = ["latchd", "latch", "sema"];

/// Builds the programs as they were at `commit`, once for each commit, in `target/baseline` of this
/// package. Returns a short name of the commit, and where latchd is. The other programs are beside
/// it. Needs git, tar and cargo.
pub fn latchd_at(commit: &str) -> io::Result<(String, PathBuf)> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let revision = format!("{commit}^{{commit}}");
    let mut resolve = Command::new("git");
    resolve.args(["rev-parse", "--verify", "--short=12", &revision]);
    let name = run(resolve.current_dir(package))?.trim().to_owned();

    let directory = package.join("target/baseline");
    let programs = directory.join(&name);
    let latchd = programs.join(PROGRAMS[0]);
    if programs.exists() {
        return Ok((name, latchd));
    }
    let [source, archive, staged] =
        ["source", "tar", "staged"].map(|it| directory.join(format!("{name}.{it}")));
    fs::create_dir_all(&source)?;
    let mut pack = Command::new("git");
    pack.args(["archive", "--output"]).arg(&archive).arg(&name);
    run(pack.current_dir(package))?;
    run(Command::new("tar")
        .arg("-xf")
        .arg(&archive)
        .arg("-C")
        .arg(&source))?;
    let build = directory.join("build");
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--release", "--locked"]);
    cargo.args(PROGRAMS.map(|program| format!("--bin={program}")));
    run(cargo.arg("--target-dir").arg(&build).current_dir(&source))?;
    // The last rename is of the directory, so that a build that was cut off is not taken for whole.
    fs::create_dir_all(&staged)?;
    for program in PROGRAMS {
        fs::rename(build.join("release").join(program), staged.join(program))?;
    }
    fs::remove_dir_all(&source)?;
    fs::remove_file(&archive)?;
    fs::rename(&staged, &programs)?;
    Ok((name, latchd))
}

/// Runs a program, and returns what it prints. Its diagnostics go to this program's stderr.
fn run(command: &mut Command) -> io::Result<String> {
    let output = command.stderr(std::process::Stdio::inherit()).output();
    let program = command.get_program().to_string_lossy().into_owned();
    let output =
        output.map_err(|error| io::Error::other(format!("--baseline: {program}: {error}")))?;
    if output.status.success() {
        String::from_utf8(output.stdout).map_err(io::Error::other)
    } else {
        Err(io::Error::other(format!(
            "--baseline: {program}: {}",
            output.status
        )))
    }
}
