//! What a reader can follow at first reading: short sentences, and plain words for idioms.

use std::path::{Path, PathBuf};

use latchd::command_lines::{LATCH, LATCHD, LFPD, SEMA};

use crate::layering::{root, sources};
use crate::manual::pages;
use crate::tidy::{expect_none, read, shown};

/// The longest sentence, in words.
const MAX_WORDS: usize = 30;

/// The texts in Markdown that keep them.
const DOCUMENTS: [&str; 2] = ["README.md", "SECURITY.md"];

/// The sources whose comments appear in the documentation of the library.
const LIBRARY: [&str; 2] = ["src/client", "src/lockfile"];

/// Idioms that want a second reading, and what to write instead.
const IDIOMS: [(&str, &str); 18] = [
    ("a crowd", "many clients"),
    ("also over", "even across"),
    ("an idle key go", "evicts an idle key"),
    ("answered error", "the server replies `error`"),
    ("are answered", "say who replies"),
    ("are asked for", "say who asks"),
    ("are gone", "have ended, or were removed"),
    ("at the most", "at most"),
    ("for good", "permanently"),
    ("heeded", "accepted"),
    ("hung up", "closes the connection"),
    ("in clear", "unencrypted"),
    ("is answered", "say who replies"),
    ("is asked for", "say who asks"),
    ("is gone", "has ended, or was removed"),
    ("of its own", "separate"),
    ("without a word", "without a reply"),
    ("worth nothing", "becomes invalid"),
];

/// A sentence, and the file that has it.
struct Sentence {
    place: String,
    text: String,
}

/// All sentences that the rules are for.
fn sentences() -> Vec<Sentence> {
    let mut all = Vec::new();
    let mut add = |place: &str, texts: Vec<String>| {
        let place = place.to_owned();
        all.extend(texts.into_iter().map(|text| Sentence {
            place: place.clone(),
            text,
        }));
    };
    for path in pages() {
        add(&shown(&path), sentences_of_page(&read(&path)));
    }
    for name in DOCUMENTS {
        add(
            name,
            sentences_of_markdown(read(&root().join(name)).lines()),
        );
    }
    for program in [LATCH, LATCHD, LFPD, SEMA] {
        for command in program.commands.iter().chain([&program.own]) {
            let texts = command.rows.iter().map(|row| row.about.to_owned());
            let place = format!("{} {} --help", program.name, command.name);
            add(&place, texts.chain([command.about.to_owned()]).collect());
        }
    }
    let files = LIBRARY
        .iter()
        .flat_map(|place| sources(&root().join(place)));
    let is_test = |file: &PathBuf| file.components().any(|part| part.as_os_str() == "tests");
    for file in files.filter(|file| !is_test(file)) {
        let place = file.strip_prefix(root()).unwrap_or(&file);
        add(&place.display().to_string(), sentences_of_source(&file));
    }
    all
}

/// The sentences of a manual page, without its tables, its examples and the heads of its entries.
/// In mdoc a sentence ends with its line.
fn sentences_of_page(page: &str) -> Vec<String> {
    let mut sentences = vec![String::new()];
    let (mut is_literal, mut is_in_names, mut lists) = (false, false, Vec::new());
    for line in page.lines().filter(|line| !line.starts_with(".\\\"")) {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        match first {
            ".Bd" => is_literal = true,
            ".Ed" => is_literal = false,
            ".Bl" => lists.push(line.contains("-column")),
            ".El" => drop(lists.pop()),
            ".Sh" => is_in_names = [".Sh NAME", ".Sh SYNOPSIS", ".Sh SEE ALSO"].contains(&line),
            _ => {}
        }
        let is_table = lists.last() == Some(&true);
        let ends = [
            ".Bd", ".Bl", ".Dd", ".Dl", ".Dt", ".Ed", ".El", ".It", ".Os", ".Pp", ".Sh", ".Ss",
        ];
        let is_end = ends.contains(&first);
        let last = sentences.last_mut().expect("there is one");
        if !is_end && !is_literal && !is_table && !is_in_names {
            for word in shown_words(line) {
                *last += &format!("{word} ");
            }
        }
        if is_end
            || last
                .trim_end()
                .trim_end_matches(')')
                .ends_with(['.', '?', '!'])
        {
            sentences.push(String::new());
        }
    }
    sentences.retain(|sentence| !sentence.trim().is_empty());
    sentences
}

/// The words of a line of mdoc, without its macros.
fn shown_words(line: &str) -> Vec<&str> {
    let is_macro = |word: &str| {
        let mut letters = word.chars();
        let is_first = letters.next().is_some_and(|c| c.is_ascii_uppercase());
        is_first && word.len() == 2 && letters.all(|c| c.is_ascii_lowercase())
    };
    match line.strip_prefix('.') {
        None => line.split_whitespace().collect(),
        // The name of the page, which has no argument.
        Some(call) if call == "Nm" || call.starts_with("Nm ") && call.len() < 6 => {
            [&["name"][..], &call.split(' ').skip(1).collect::<Vec<_>>()].concat()
        }
        Some(call) => call.split(' ').filter(|word| !is_macro(word)).collect(),
    }
}

/// The sentences of a text in Markdown, without its code, its tables and its headings.
fn sentences_of_markdown<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut paragraphs = vec![String::new()];
    let mut is_code = false;
    for line in lines {
        let text = line.trim();
        let is_fence = text.starts_with("```");
        is_code ^= is_fence;
        let is_item = ["- ", "* ", "1. "].iter().any(|it| text.starts_with(it));
        let is_other = is_fence || text.starts_with(['#', '|']) || line.starts_with("    ");
        let is_text = !text.is_empty() && !is_other;
        if is_code || !is_text || is_item {
            paragraphs.push(String::new());
        }
        if is_text && !is_code {
            let last = paragraphs.last_mut().expect("there is one");
            *last += &format!("{text} ");
        }
    }
    let ends = [". ", "? ", ": ", "; ", ".) "];
    let mut sentences = Vec::new();
    for paragraph in paragraphs {
        let mut rest = paragraph.as_str();
        let end_of = |text: &str| {
            let ends = ends
                .iter()
                .filter_map(|end| Some(text.find(end)? + end.len()));
            ends.min()
        };
        while let Some(end) = end_of(rest) {
            sentences.push(rest[..end].to_owned());
            rest = &rest[end..];
        }
        sentences.push(rest.to_owned());
    }
    sentences.retain(|sentence| !sentence.trim().is_empty());
    sentences
}

/// The sentences of the comments that document a source.
fn sentences_of_source(file: &Path) -> Vec<String> {
    let text = read(file);
    // What is between two comments ends a paragraph.
    let comments = text.lines().map(|line| {
        let line = line.trim_start();
        let comment = line.strip_prefix("///").or(line.strip_prefix("//!"));
        comment.map_or("", |comment| comment.strip_prefix(' ').unwrap_or(comment))
    });
    sentences_of_markdown(comments)
}

fn word_count(sentence: &str) -> usize {
    let words = sentence.split_whitespace();
    words
        .filter(|word| word.contains(char::is_alphanumeric))
        .count()
}

/// Whether these words are in the sentence, as whole words.
fn has_words(sentence: &str, words: &str) -> bool {
    let is_free = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric());
    sentence.match_indices(words).any(|(at, _)| {
        let (before, after) = (&sentence[..at], &sentence[at + words.len()..]);
        is_free(before.chars().next_back()) && is_free(after.chars().next())
    })
}

/// Whether a sentence begins with "Where" in the sense of "if".
fn says_where_for_if(sentence: &str) -> bool {
    let mut words = sentence.split_whitespace();
    let is_where = words.next() == Some("Where");
    is_where && matches!(words.next(), Some("it" | "the" | "that" | "no"))
}

#[test]
fn sentences_have_at_most_thirty_words() {
    let long = sentences().into_iter().filter_map(|sentence| {
        let count = word_count(&sentence.text);
        let is_long = count > MAX_WORDS;
        is_long.then(|| format!("{}: {count} words: {}", sentence.place, sentence.text))
    });
    expect_none(&long.collect::<Vec<_>>(), "sentences to split");
}

#[test]
fn no_idiom_stands_for_a_plain_word() {
    let mut found = Vec::new();
    for Sentence { place, text } in sentences() {
        for (idiom, plain) in IDIOMS.iter().filter(|(idiom, _)| has_words(&text, idiom)) {
            found.push(format!("{place}: {idiom:?} ({plain}): {text}"));
        }
    }
    expect_none(&found, "write plain words instead");
}

#[test]
fn entries_of_the_next_version_are_short_and_in_a_group() {
    let text = read(&root().join("CHANGELOG.md"));
    let (_, next) = text.split_once("\n## ").expect("there is a version");
    let (next, _) = next.split_once("\n## ").expect("there is an older one");
    let groups = [
        "Upgrading from 1.1",
        "Breaking",
        "Security",
        "Added",
        "Changed",
        "Fixed",
    ];
    let mut found = Vec::new();
    let mut parts = next.split("\n### ");
    if parts.next().is_some_and(|before| before.contains("\n- ")) {
        found.push("there are entries without a group".to_owned());
    }
    for part in parts {
        let group = part.lines().next().unwrap_or_default();
        if !groups.contains(&group) {
            found.push(format!("{group}: no group"));
        }
        for entry in part.split("\n- ").skip(1) {
            if entry.trim_end().lines().count() > 2 {
                found.push(format!("{group}: more than two lines: {entry}"));
            }
        }
    }
    expect_none(&found, "CHANGELOG.md");
}

#[test]
fn a_condition_begins_with_if_and_not_with_where() {
    let sentences = sentences().into_iter();
    let found = sentences.filter(|sentence| says_where_for_if(&sentence.text));
    let found = found.map(|Sentence { place, text }| format!("{place}: {text}"));
    expect_none(&found.collect::<Vec<_>>(), "write \"If\"");
}

#[test]
fn the_checks_of_prose_see_what_they_look_for() {
    let page = ".Sh TEXT\nOne\n.Fl -two\nthree.\n.Bd -literal\nnot this\n.Ed\n.Bl -column a\n\
                .It nor Ta this\n.El\n.Bl -tag\n.It head\n.Nm\nends (here.)\n.Xr is 1 .\n.El\n";
    let expected = ["One -two three. ", "name ends (here.) ", "is 1 . "];
    assert_eq!(sentences_of_page(page), expected);
    let text = "# Head\n\nOne. Two:\n```\ncode.\n```\n- three\n  four\n| a |\n";
    let expected = ["One. ", "Two: ", "- three four "];
    assert_eq!(sentences_of_markdown(text.lines()), expected);
    assert_eq!(word_count("one, `two` - 3."), 3);
    assert!(has_words("It is gone.", "is gone") && !has_words("this gone", "is gone"));
    assert!(says_where_for_if("Where no fence is new") && !says_where_for_if("Where files are"));
    let few = [pages().len(), DOCUMENTS.len(), LIBRARY.len()];
    assert!(sentences().len() > 100 * few.iter().sum::<usize>());
}
