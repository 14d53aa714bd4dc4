//! The names of which `latch run --pick` gives one to each holder.

use crate::text::{is_unseen, reason, Readable};

/// The names of the slots of a semaphore, in the order of their numbers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PickList(pub(super) Vec<String>);

/// Parses names that are separated by commas.
pub(super) fn names(text: &str) -> Result<PickList, String> {
    distinct(text.split(',').map(str::trim))
}

/// Reads the names from a file, one in each line. A line may be empty or begin with `#`.
pub(super) fn names_in(path: &str) -> Result<PickList, String> {
    let text = std::fs::read_to_string(path).map_err(|error| reason(&error))?;
    let lines = text.lines().map(str::trim);
    distinct(lines.filter(|line| !line.is_empty() && !line.starts_with('#')))
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Result<PickList, String> {
    let names: Vec<String> = names.map(str::to_owned).collect();
    let is_word = |name: &String| {
        !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || is_unseen(c))
    };
    if names.is_empty() || !names.iter().all(is_word) {
        return Err("expected names without blanks".into());
    }
    let mut sorted: Vec<&String> = names.iter().collect();
    sorted.sort_unstable();
    if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("the name {} is given twice", Readable(twice[0])));
    }
    Ok(PickList(names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_to_pick_from_are_distinct_words() {
        let list = |names: &[&str]| Ok(PickList(names.iter().map(|it| (*it).to_owned()).collect()));
        assert_eq!(names("a, b,c"), list(&["a", "b", "c"]));
        for text in ["", "a,,b", "a,b,a", "a b,c"] {
            assert!(names(text).is_err(), "{text}");
        }
    }
}
