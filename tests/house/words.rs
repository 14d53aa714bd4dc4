//! The words of other programs that ours answer with what to write instead.

use latchd::command_lines::{CommandRow, Program, LATCH, LATCHD, LFPD, SEMA};

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

#[test]
fn no_foreign_word_is_one_of_ours_or_answered_twice() {
    for program in &PROGRAMS {
        let all = program.foreign.iter().flat_map(|(words, _)| words.iter());
        let mut all: Vec<&str> = all.copied().collect();
        for word in &all {
            let Some((name, option)) = word.split_once(' ') else {
                assert!(!is_known(program, word), "{}: {word}", program.name);
                continue;
            };
            let command = program.command(name);
            let command = command.unwrap_or_else(|| panic!("{name} is no command"));
            let mut rows = program.all_rows(command);
            assert!(!rows.any(|row| row.is_named(option)), "{word}");
        }
        all.sort_unstable();
        let twice = all.windows(2).find(|pair| pair[0] == pair[1]);
        assert_eq!(twice, None, "{}", program.name);
    }
}

#[test]
fn every_option_in_the_advice_exists() {
    for program in &PROGRAMS {
        for (words, advice) in program.foreign {
            for option in options_in(advice) {
                let is_ours = is_known(program, option);
                let is_of_latch = advice.contains("latch run") && is_known(&LATCH, option);
                assert!(is_ours || is_of_latch, "{words:?}: {option}");
            }
        }
    }
}
