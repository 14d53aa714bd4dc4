//! What refers to a section of a manual page names one that is there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use crate::layering::root;
use crate::manual;
use crate::tidy::{all_code, expect_none, read};

/// The headings of each page, which is named as in `latchd(8)`.
type Pages = BTreeMap<String, BTreeSet<String>>;

fn examples() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("examples")).expect("it is part of the source");
    let paths = entries.map(|entry| entry.expect("it stays").path());
    paths.filter(|path| path.is_file()).collect()
}

fn pages() -> Pages {
    let page = |path: PathBuf| {
        let name = path.file_name()?.to_str()?;
        let (title, number) = name.rsplit_once('.')?;
        Some((format!("{title}({number})"), headings(&read(&path))))
    };
    manual::pages().into_iter().filter_map(page).collect()
}

fn headings(page: &str) -> BTreeSet<String> {
    let lines = page.lines();
    lines
        .filter_map(|line| line.strip_prefix(".Sh ").or(line.strip_prefix(".Ss ")))
        .map(str::to_owned)
        .collect()
}

/// The text in one line, with `latchd(8)` for `.Xr latchd 8` and without the marks of comments.
fn in_one_line(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let line = line.trim_start().trim_start_matches(['/', '!', '#']).trim();
        match line.strip_prefix(".Xr ").map(|rest| rest.split(' ')) {
            Some(mut words) => {
                let mut next = || words.next().unwrap_or_default();
                let (title, number) = (next(), next());
                format!("{title}({number}){}", next())
            }
            None => line.to_owned(),
        }
    });
    lines.collect::<Vec<_>>().join(" ")
}

fn is_heading_word(word: &&str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_uppercase())
}

/// The references to sections that are not there: `UPGRADES in latchd(8)`, `CAVEATS of latch(1)`
/// and `latchd(8), UPGRADES`.
fn dead_references(text: &str, pages: &Pages) -> Vec<String> {
    let text = in_one_line(text);
    let mut dead = Vec::new();
    for (title, headings) in pages {
        for (place, _) in text.match_indices(title.as_str()) {
            let (before, after) = (&text[..place], &text[place + title.len()..]);
            let before = before.strip_suffix(" in ").or(before.strip_suffix(" of "));
            let words = before.unwrap_or_default().rsplit(' ');
            let mut before: Vec<&str> = words.take_while(is_heading_word).collect();
            before.reverse();
            let words = after.strip_prefix(", ").unwrap_or_default();
            let words = words.split(|c: char| !c.is_ascii_alphabetic());
            let after: Vec<&str> = words.take_while(is_heading_word).collect();
            let names = [before.join(" "), after.join(" ")];
            let names = names.into_iter().filter(|name| !name.is_empty());
            dead.extend(
                names
                    .filter(|name| !headings.contains(name))
                    .map(|name| format!("{name} in {title}")),
            );
        }
    }
    dead
}

#[test]
fn each_reference_to_a_section_names_one_that_exists() {
    let pages = pages();
    let texts = ["README.md", "SECURITY.md", "tests/promises/PROMISES.md"];
    let texts = texts.map(|name| root().join(name)).into_iter();
    let texts = texts.chain(manual::pages()).chain(examples());
    let texts = texts.filter(|path| path.extension().is_none_or(|it| it != "png"));
    // The names in this file are examples.
    let code = all_code()
        .into_iter()
        .filter(|path| !path.ends_with("references.rs"));
    let mut found = Vec::new();
    for path in texts.chain(code) {
        let dead = dead_references(&read(&path), &pages);
        found.extend(
            dead.iter()
                .map(|name| format!("{}: {name}", path.display())),
        );
    }
    for path in manual::pages() {
        let text = read(&path);
        let headings = headings(&text);
        let named = text.lines().filter_map(|line| line.strip_prefix(".Sx "));
        let named = named.map(|name| name.trim_end_matches([' ', '.', ',', ':', ';', ')']));
        let dead = named.filter(|name| !headings.contains(*name));
        found.extend(dead.map(|name| format!("{}: {name}", path.display())));
    }
    expect_none(&found, "these sections do not exist");
}

#[test]
fn a_dead_reference_is_found_in_each_form() {
    let pages = Pages::from([("a(1)".to_owned(), headings(".Sh HERE\n.Sh EXIT STATUS\n"))]);
    let dead = |text: &str| dead_references(text, &pages);
    assert_eq!(dead("see HERE in\n.Xr a 1 ,\nEXIT STATUS"), [""; 0]);
    assert_eq!(dead("see GONE in\n.Xr a 1 ."), ["GONE in a(1)"]);
    assert_eq!(dead("//! CAVEATS of\n//! a(1)"), ["CAVEATS in a(1)"]);
    assert_eq!(dead("see a(1), EXIT HERE."), ["EXIT HERE in a(1)"]);
}
