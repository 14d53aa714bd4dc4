//! The words of other programs that ours answer with what to write instead.

use latchd::command_lines::{foreign, CommandRow, Program, LATCH, LATCHD, LFPD, SEMA};

const PROGRAMS: [Program; 4] = [LATCH, LATCHD, LFPD, SEMA];

/// Spellings that are replaced before the rows are asked.
const ALIASES: [&str; 1] = ["--of"];

fn commands(program: &Program) -> impl Iterator<Item = &CommandRow> {
    program.commands.iter().chain([&program.own])
}

fn is_known(program: &Program, word: &str) -> bool {
    ALIASES.contains(&word)
        || commands(program).any(|command| {
            let is_option = program.all_rows(command).any(|row| row.is_named(word));
            is_option || command.name == word
        })
}

/// The parts of a piece of advice that look like options.
fn options_in(advice: &str) -> impl Iterator<Item = &str> {
    let parts = advice.split([' ', ',', ';']);
    parts.filter(|part| part.starts_with("--") && part.len() > 2)
}

/// The lines of foreign words for a program and its commands: the command, or "", the words and
/// the advice.
fn lines(program: &Program) -> Vec<(&str, &str, &str)> {
    let commands = program.commands.iter().map(|command| command.name);
    let of = |command: &'static str| {
        let ours = format!("{} {command}", program.name);
        let lines: Vec<_> = foreign(ours.trim_end()).collect();
        lines
            .into_iter()
            .map(move |(words, advice)| (command, words, advice))
    };
    [""].into_iter().chain(commands).flat_map(of).collect()
}

#[test]
fn every_line_of_foreign_words_is_for_programs_of_ours() {
    let read: usize = PROGRAMS.iter().map(|program| lines(program).len()).sum();
    let text = include_str!("../../src/shared/cli/foreign.txt");
    let programs = text.lines().filter_map(|line| line.split_once(": "));
    assert_eq!(
        read,
        programs
            .flat_map(|(programs, _)| programs.split(", "))
            .count()
    );
    assert!(text.lines().all(|line| line.contains(" | ")));
}

#[test]
fn no_foreign_word_is_one_of_ours_or_answered_twice() {
    for program in &PROGRAMS {
        let all = lines(program);
        let all = all
            .iter()
            .flat_map(|(command, words, _)| words.split(' ').map(move |it| (*command, it)));
        let mut all: Vec<(&str, &str)> = all.collect();
        for (name, word) in &all {
            let Some(command) = program.command(name) else {
                assert!(!is_known(program, word), "{}: {word}", program.name);
                continue;
            };
            let mut rows = program.all_rows(command);
            assert!(!rows.any(|row| row.is_named(word)), "{name} {word}");
        }
        all.sort_unstable();
        let twice = all.windows(2).find(|pair| pair[0] == pair[1]);
        assert_eq!(twice, None, "{}", program.name);
    }
}

#[test]
fn every_option_in_the_advice_exists() {
    for program in &PROGRAMS {
        for (_, words, advice) in lines(program) {
            for option in options_in(advice) {
                let is_ours = is_known(program, option);
                let of = |name, of: &Program| advice.contains(name) && is_known(of, option);
                let is_of_another = of("latch run", &LATCH) || of("latchd", &LATCHD);
                assert!(is_ours || is_of_another, "{words}: {option}");
            }
        }
    }
}
