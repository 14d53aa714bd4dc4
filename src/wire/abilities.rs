//! The abilities that clients and servers have beyond the first version of the protocol. `hello`
//! and its reply name them: see latch-protocol(7), COMMANDS.

use std::fmt;

/// The abilities of one side. The other side ignores words that it does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities(u16);

/// Each ability with its word, in the order in which they are written.
pub(super) const WORDS: [(Abilities, &str); 9] = [
    (Abilities::ADOPT, "adopt"),
    (Abilities::SLOTS, "slots"),
    (Abilities::SURVIVES_RESTART, "keeps"),
    (Abilities::PROOFS, "proofs"),
    (Abilities::LINGERS, "lingers"),
    (Abilities::HEARS_BREAKS, "broken"),
    (Abilities::STATUS, "status"),
    (Abilities::AGES, "ages"),
    (Abilities::HEARS_NOT_WRITTEN, "not_written"),
];

impl Abilities {
    /// No ability.
    pub const NONE: Abilities = Abilities(0);
    /// A client with this ability can adopt its grants over a new connection. A server with this
    /// ability knows `adopt` and `keep`.
    pub const ADOPT: Abilities = Abilities(1);
    /// The server knows `shared`, `slots=` and `waiters=` after a lease.
    pub const SLOTS: Abilities = Abilities(1 << 1);
    /// The server's grants survive its end.
    pub const SURVIVES_RESTART: Abilities = Abilities(1 << 2);
    /// After a crash, the server believes the tokens of the grants of the previous one, if `adopt`
    /// says what was granted.
    pub const PROOFS: Abilities = Abilities(1 << 3);
    /// The server's grants survive the end of their connections, until their leases end.
    pub const LINGERS: Abilities = Abilities(1 << 4);
    /// The client knows the reply `error_broken`.
    pub const HEARS_BREAKS: Abilities = Abilities(1 << 5);
    /// The server knows `status=`, with which a client says how its work has ended.
    pub const STATUS: Abilities = Abilities(1 << 6);
    /// The server knows `age=`, with which `adopt` says how long ago a grant was made.
    pub const AGES: Abilities = Abilities(1 << 7);
    /// The client knows the reply `error_not_written`.
    pub const HEARS_NOT_WRITTEN: Abilities = Abilities(1 << 8);

    /// Reads the abilities from the words of one side.
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Abilities {
        let known = |word| WORDS.iter().find(|(_, own)| *own == word);
        let abilities = words.into_iter().filter_map(known);
        abilities.fold(Abilities::NONE, |all, (ability, _)| all.and(*ability))
    }

    /// Both these abilities and `others`.
    pub const fn and(self, others: Abilities) -> Abilities {
        Abilities(self.0 | others.0)
    }

    /// These abilities if the condition holds, and none otherwise.
    pub fn when(self, condition: bool) -> Abilities {
        if condition {
            self
        } else {
            Abilities::NONE
        }
    }

    /// Whether all abilities in `needed` are present.
    pub fn has(self, needed: Abilities) -> bool {
        self.0 & needed.0 == needed.0
    }
}

/// The words, separated by spaces.
impl fmt::Display for Abilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = WORDS.iter().filter(|(ability, _)| self.has(*ability));
        for (index, (_, word)) in words.enumerate() {
            let blank = if index > 0 { " " } else { "" };
            write!(f, "{blank}{word}")?;
        }
        Ok(())
    }
}
