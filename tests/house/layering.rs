//! Which module may use which: the picture in the crate's documentation, as a table.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter::Peekable;
use std::path::{Path, PathBuf};

/// Each module with the modules of this crate that it may name. Whatever is not listed is
/// forbidden.
const MAY_USE: &[(&str, &[&str])] = &[
    // programs
    (
        "latchd",
        &[
            "latchd", "server", "cli", "cluster", "arbiter", "fence", "protocol", "table", "terms",
            "token", "net", "sys", "text", "base64", "log",
        ],
    ),
    (
        "lfpd",
        &["lfpd", "server", "cli", "net", "sys", "text", "log"],
    ),
    (
        "latch",
        &[
            "latch",
            "cli",
            "supervise",
            "client",
            "protocol",
            "sys",
            "text",
        ],
    ),
    (
        "sema",
        &["sema", "cli", "supervise", "lockfile", "sys", "text"],
    ),
    (
        "fuzzing",
        &[
            "latchd", "lfpd", "fence", "lockfile", "protocol", "table", "net", "token",
        ],
    ),
    // shared by programs
    ("server", &["cli", "net", "sys", "text", "log"]),
    ("cli", &["cli", "supervise", "text"]),
    ("supervise", &["sys", "text"]),
    // services
    (
        "cluster",
        &[
            "cluster", "arbiter", "fence", "protocol", "table", "terms", "token", "net", "sys",
            "text", "base64", "log",
        ],
    ),
    ("arbiter", &["table", "terms", "token", "fence", "sys"]),
    ("fence", &["token", "sys", "text", "log"]),
    (
        "client",
        &["client", "protocol", "terms", "token", "net", "sys", "text"],
    ),
    ("lockfile", &["lockfile", "sys", "text"]),
    // codecs
    ("protocol", &["protocol", "table", "terms", "text", "token"]),
    // core
    ("table", &["table", "terms", "token"]),
    ("terms", &[]),
    ("token", &[]),
    // ground
    ("net", &["net", "sys", "text", "log"]),
    ("sys", &["sys", "text"]),
    ("text", &[]),
    ("base64", &[]),
    ("log", &["sys", "text"]),
];

/// What the pure modules must not touch: clocks, threads, sockets, files, randomness, logs.
const PURE: &[&str] = &[
    "src/base64.rs",
    "src/cluster/record.rs",
    "src/table",
    "src/terms.rs",
    "src/token.rs",
    "src/fence/file.rs",
    "src/fence/range.rs",
    "src/protocol",
    "src/latchd/state_file/format.rs",
    "src/latchd/state_file/start.rs",
    "src/latchd/http/body.rs",
    "src/latchd/http/openapi.rs",
    "src/latchd/http/request.rs",
    "src/latchd/http/routes.rs",
    "src/latchd/rights.rs",
    "src/lfpd/command.rs",
    "src/lfpd/reply.rs",
    "src/lfpd/uucp/names.rs",
    "src/lockfile/record.rs",
    "src/lockfile/staleness.rs",
    "src/lockfile/takeover.rs",
    "src/text.rs",
];
const IMPURE: &[&str] = &[
    "Instant::now",
    "SystemTime",
    "std::thread",
    "std::net",
    "std::fs",
    "std::process",
    "Mutex",
    "Condvar",
    "getrandom",
    "log::",
    "rustix",
    "crossbeam",
    "crate::arbiter",
    "crate::net",
    "crate::fence::source",
];

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn sources(under: &Path) -> Vec<PathBuf> {
    if under.is_file() {
        return vec![under.to_owned()];
    }
    let entries =
        fs::read_dir(under).unwrap_or_else(|error| panic!("{}: {error}", under.display()));
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a directory entry").path())
        .flat_map(|path| sources(&path))
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    files.sort();
    files
}

/// The code of a file: without its comments, and without its tests where `with_tests` is false.
fn code(file: &Path, with_tests: bool) -> String {
    let text = fs::read_to_string(file).expect("a source file");
    let code = if with_tests {
        &text
    } else {
        text.split("#[cfg(test)]\nmod tests {")
            .next()
            .expect("a first part")
    };
    let lines = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The modules that a piece of code names after `crate::`.
fn uses(code: &str) -> Vec<String> {
    let after = code.split("crate::").skip(1);
    after
        .map(|rest| {
            rest.chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect()
        })
        .collect()
}

/// The path of a module, from the crate's root.
type Module = Vec<String>;

/// Each file below `src/` that is a module, without tests and stand-ins.
fn modules() -> BTreeMap<Module, PathBuf> {
    let src = root().join("src");
    let mut found = BTreeMap::new();
    for file in sources(&src) {
        let path = file
            .strip_prefix(&src)
            .expect("below src")
            .with_extension("");
        let mut module: Module = path
            .iter()
            .map(|part| part.to_string_lossy().into_owned())
            .collect();
        let is_left_out =
            |part: &String| ["tests", "bin", "lib", "absent"].contains(&part.as_str());
        if module.last().is_some_and(|name| name == "mod") {
            module.pop();
        }
        if !module.iter().any(is_left_out) {
            found.insert(module, file);
        }
    }
    found
}

/// The words of a piece of code, `::`, and its other characters.
fn tokens(code: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut found, mut rest) = (Vec::new(), code.trim_start());
    while let Some(first) = rest.chars().next() {
        let len = match first {
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            _ if rest.starts_with("::") => 2,
            c => c.len_utf8(),
        };
        found.push(&rest[..len]);
        rest = rest[len..].trim_start();
    }
    found
}

/// Adds the paths of a tree, such as `a::{b, c::d}`, which follows `path`.
fn add_paths<'a>(
    tokens: &mut Peekable<impl Iterator<Item = &'a str>>,
    mut path: Module,
    found: &mut Vec<Module>,
) {
    while let Some(token) = tokens.peek().copied() {
        if token == "{" {
            while matches!(tokens.next(), Some("{" | ",")) {
                add_paths(tokens, path.clone(), found);
            }
            return;
        }
        if !token.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
            break;
        }
        path.push(token.to_owned());
        tokens.next();
        if tokens.next_if_eq(&"::").is_none() {
            break;
        }
    }
    found.push(path);
}

/// What a piece of code in `module` names after `crate::` and `super::`.
fn named_paths(code: &str, module: &[String]) -> Vec<Module> {
    let (mut found, mut tokens) = (Vec::new(), tokens(code).into_iter().peekable());
    while let Some(token) = tokens.next() {
        let from = match token {
            "crate" => &[],
            "super" => &module[..module.len() - 1],
            _ => continue,
        };
        if tokens.next_if_eq(&"::").is_some() {
            add_paths(&mut tokens, from.to_vec(), &mut found);
        }
    }
    found
}

/// The modules that can be reached from one by following what each uses.
fn reached<'a>(
    from: &'a Module,
    uses: &'a BTreeMap<Module, BTreeSet<Module>>,
) -> BTreeSet<&'a Module> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        next.extend(uses[module].iter().filter(|used| seen.insert(*used)));
    }
    seen
}

/// In a circle of files a reader cannot begin anywhere. A module and the modules inside it may use
/// each other.
#[test]
fn no_files_use_each_other_in_a_circle() {
    let modules = modules();
    let file_of = |mut path: Module| {
        while !path.is_empty() && !modules.contains_key(&path) {
            path.pop();
        }
        path
    };
    let uses: BTreeMap<Module, BTreeSet<Module>> = modules
        .iter()
        .map(|(module, file)| {
            let named = named_paths(&code(file, false), module).into_iter();
            let named = named.map(file_of).filter(|used| !used.is_empty());
            let is_beside = |used: &Module| !used.starts_with(module) && !module.starts_with(used);
            (module.clone(), named.filter(is_beside).collect())
        })
        .collect();
    let reached: BTreeMap<_, _> = modules.keys().map(|it| (it, reached(it, &uses))).collect();
    let circles: BTreeSet<Vec<String>> = modules
        .keys()
        .filter(|module| reached[module].contains(module))
        .map(|module| {
            let beside = reached[module]
                .iter()
                .filter(|it| reached[*it].contains(module));
            beside.map(|it| it.join("::")).collect()
        })
        .collect();
    assert!(circles.is_empty(), "{circles:#?}");
}

#[test]
fn the_check_sees_what_a_file_uses() {
    let code = "use crate::a::{b, c::{self, D}, e};\nuse super::f::G;\nlet x = crate::h();";
    let module = ["m", "n"].map(str::to_owned);
    let named: Vec<String> = named_paths(code, &module)
        .iter()
        .map(|it| it.join("::"))
        .collect();
    assert_eq!(
        named,
        ["a::b", "a::c::self", "a::c::D", "a::e", "m::f::G", "h"]
    );
}

#[test]
fn every_module_uses_only_what_lies_below_it() {
    for (module, allowed) in MAY_USE {
        let directory = root().join("src").join(module);
        let place = if directory.is_dir() {
            directory
        } else {
            directory.with_extension("rs")
        };
        for file in sources(&place) {
            for used in uses(&code(&file, true)) {
                assert!(
                    allowed.contains(&used.as_str()),
                    "{}: {module} must not use {used}",
                    file.display()
                );
            }
        }
    }
}

#[test]
fn every_module_has_its_place_in_the_table() {
    let lib = code(&root().join("src/lib.rs"), true);
    let declared = lib.lines().filter_map(|line| {
        let name = line
            .trim()
            .trim_start_matches("pub ")
            .strip_prefix("mod ")?;
        name.strip_suffix(';')
    });
    for module in declared {
        assert!(
            MAY_USE.iter().any(|(known, _)| *known == module),
            "{module} is in no layer"
        );
    }
}

#[test]
fn the_pure_modules_touch_nothing_outside() {
    for place in PURE {
        for file in sources(&root().join(place)) {
            if file.starts_with(root().join("src/table/tests")) {
                continue;
            }
            let code = code(&file, false);
            for word in IMPURE {
                assert!(
                    !code.contains(word),
                    "{}: {word} in a pure module",
                    file.display()
                );
            }
        }
    }
}

/// Whether a file says at its top, as a word of its own, that it is pure.
fn claims_purity(text: &str) -> bool {
    let header = text.lines().take_while(|line| line.starts_with("//!"));
    header
        .flat_map(|line| line.split(|c: char| !c.is_alphanumeric()))
        .any(|word| word == "Pure")
}

#[test]
fn the_pure_modules_are_those_that_say_so() {
    let listed: Vec<PathBuf> = PURE.iter().map(|place| root().join(place)).collect();
    for place in &listed {
        let top = if place.is_dir() {
            place.join("mod.rs")
        } else {
            place.clone()
        };
        let text = fs::read_to_string(&top).expect("a source file");
        assert!(claims_purity(&text), "{}: not Pure.", top.display());
    }
    for file in sources(&root().join("src")) {
        let text = fs::read_to_string(&file).expect("a source file");
        assert!(
            !claims_purity(&text) || listed.iter().any(|place| file.starts_with(place)),
            "{}: not in PURE",
            file.display()
        );
    }
}

#[test]
fn the_check_sees_a_claim_of_purity() {
    assert!(claims_purity("//! A.\n//! B. Pure: no clock.\n"));
    assert!(!claims_purity("//! A. Impure.\n\n//! Pure.\n"));
}

#[test]
fn nobody_climbs_to_another_module_by_relative_steps() {
    for file in sources(&root().join("src")) {
        assert!(
            !code(&file, true).contains("super::super"),
            "{}",
            file.display()
        );
    }
}

#[test]
fn no_code_of_ours_is_unsafe() {
    for file in [
        "src/lib.rs",
        "src/bin/latchd.rs",
        "src/bin/lfpd.rs",
        "src/bin/latch.rs",
        "src/bin/sema.rs",
    ] {
        let text = fs::read_to_string(root().join(file)).expect("a source file");
        assert!(text.contains("#![forbid(unsafe_code)]"), "{file}");
    }
}

#[test]
fn the_check_sees_a_forbidden_use() {
    assert_eq!(
        uses("use crate::net::lines;\nlet x = crate::table::Key;"),
        ["net", "table"]
    );
}
