//! The variables in which `latch run` tells its command about the locks: their names, how they are
//! set, and how a `latch` that runs under a lock reads them.

use std::env;
use std::ffi::OsString;

use crate::client::{Guards, Token};
use crate::shared::cli::environment::{locks_around, with_locks_around};

/// The names: the key, the token, the fence, the number of its semaphore slot if it has one, the
/// numbers of the slots if it has several, the keys and tokens of all its locks, those of the
/// locks around it, too, and the names that `--pick` gives to the slots.
pub(super) const NAMES: [&str; 8] = [
    "LATCH_KEY",
    "LATCH_TOKEN",
    "LATCH_FENCE",
    "LATCH_SLOT",
    "LATCH_SLOTS",
    "LATCH_TOKENS",
    ALL_TOKENS,
    "LATCH_PICK",
];

/// The variable with the keys and tokens of the locks of all `latch run`s around a command.
const ALL_TOKENS: &str = "LATCH_ALL_TOKENS";

/// The variables of the command. A variable about a single lock describes the lock of `key`.
pub(super) fn of_command(
    guards: &Guards,
    key: &str,
    picked: Option<String>,
) -> [(&'static str, Option<OsString>); 8] {
    let guard = guards.iter().find(|guard| guard.key() == key);
    let guard = guard.expect("its key is one of those that are held");
    let tokens = guards
        .iter()
        .map(|it| format!("{}={}", it.key(), it.token()));
    let tokens: Vec<String> = tokens.collect();
    let own = tokens.iter().map(OsString::from).collect();
    let all_tokens = with_locks_around(ALL_TOKENS, own);
    let numbers = guard.slot_numbers().iter();
    let numbers: Vec<String> = numbers.map(u32::to_string).collect();
    let values = [
        Some(key.to_owned()),
        Some(guard.token().to_string()),
        Some(guard.fence().to_string()),
        Some(numbers.join(" ")).filter(|_| numbers.len() == 1),
        Some(numbers.join(" ")).filter(|_| numbers.len() > 1),
        Some(tokens.join("\n")),
    ];
    let values = values.map(|value| value.map(OsString::from));
    let mut values = values
        .into_iter()
        .chain([Some(all_tokens), picked.map(OsString::from)]);
    NAMES.map(|name| (name, values.next().flatten()))
}

/// The tokens, from the environment, of the locks of `key` under which this process runs.
pub(super) fn tokens_for(key: &str) -> Vec<Token> {
    let [outer_key, token, _, _, _, tokens, _, _] =
        NAMES.map(|name| env::var(name).unwrap_or_default());
    let all = locks_around(ALL_TOKENS);
    let all = all.iter().filter_map(|line| line.to_str());
    let pairs = tokens.lines().chain(all);
    let pairs = pairs.filter_map(|line| line.rsplit_once('='));
    let pairs = [(&*outer_key, &*token)].into_iter().chain(pairs);
    let of_key = pairs.filter(|(other, _)| *other == key);
    let mut found: Vec<Token> = of_key.filter_map(|(_, token)| token.parse().ok()).collect();
    // Several variables name the same grant.
    found.sort_by_key(Token::fence);
    found.dedup_by_key(|token| token.fence());
    found
}
