//! The variables in which `latch run` tells its command about the locks: their names, how they are
//! set, and how a `latch` that runs under a lock reads them.

use std::env;
use std::ffi::OsString;

use crate::client::{Guards, Token};

/// The names: the key, the token, the fence, the number of its semaphore slot if it has one, the
/// numbers of the slots if it has several, and the keys and tokens of all its locks.
pub(super) const NAMES: [&str; 6] = [
    "LATCH_KEY",
    "LATCH_TOKEN",
    "LATCH_FENCE",
    "LATCH_SLOT",
    "LATCH_SLOTS",
    "LATCH_TOKENS",
];

/// The variables of the command. A variable about a single lock describes the lock of `key`.
pub(super) fn of_command(guards: &Guards, key: &str) -> [(&'static str, Option<OsString>); 6] {
    let guard = guards.iter().find(|guard| guard.key() == key);
    let guard = guard.expect("its key is one of those that are held");
    let tokens = guards
        .iter()
        .map(|it| format!("{}={}\n", it.key(), it.token()));
    let numbers = guard.slot_numbers().iter();
    let numbers: Vec<String> = numbers.map(u32::to_string).collect();
    let values = [
        Some(key.to_owned()),
        Some(guard.token().to_string()),
        Some(guard.fence().to_string()),
        Some(numbers.join(" ")).filter(|_| numbers.len() == 1),
        Some(numbers.join(" ")).filter(|_| numbers.len() > 1),
        Some(tokens.collect::<String>().trim_end().to_owned()),
    ];
    let mut values = values.into_iter();
    NAMES.map(|name| (name, values.next().flatten().map(OsString::from)))
}

/// The token, from the environment, of the lock of `key` under which this process runs.
pub(super) fn token_for(key: &str) -> Option<Token> {
    let [outer_key, token, _, _, _, tokens] = NAMES.map(|name| env::var(name).unwrap_or_default());
    let mut others = tokens.lines().filter_map(|line| line.rsplit_once('='));
    let token = match outer_key == key {
        true => &token,
        false => others.find(|(other, _)| *other == key)?.1,
    };
    token.parse().ok()
}
