//! The abilities that clients and servers have beyond the first version of the protocol. `hello`
//! and its reply name them: see latch-protocol(7), COMMANDS.

use std::fmt;

/// The abilities of one side. The other side ignores words that it does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// A client with this ability can adopt its grants over a new connection. A server with this
    /// ability knows `adopt` and `keep`.
    pub adopt: bool,
    /// The server knows `shared`, `slots=` and `waiters=` after a lease.
    pub slots: bool,
    /// The server's grants survive its end.
    pub survives_restart: bool,
    /// After a crash, the server believes the tokens of the grants of the previous one, if `adopt`
    /// says what was granted.
    pub proofs: bool,
    /// The server's grants survive the end of their connections, until their leases end.
    pub lingers: bool,
    /// The client knows the reply `error_broken`.
    pub hears_breaks: bool,
    /// The server knows `status=`, with which a client says how its work has ended.
    pub status: bool,
}

impl Abilities {
    /// Reads the abilities from the words of one side.
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Abilities {
        let mut abilities = Abilities::default();
        for word in words {
            match word {
                "adopt" => abilities.adopt = true,
                "slots" => abilities.slots = true,
                "keeps" => abilities.survives_restart = true,
                "proofs" => abilities.proofs = true,
                "lingers" => abilities.lingers = true,
                "broken" => abilities.hears_breaks = true,
                "status" => abilities.status = true,
                _ => {}
            }
        }
        abilities
    }

    /// Whether all abilities in `needed` are present.
    pub fn includes(self, needed: Abilities) -> bool {
        let is_there = |needed: bool, ours: bool| ours || !needed;
        is_there(needed.adopt, self.adopt)
            && is_there(needed.slots, self.slots)
            && is_there(needed.survives_restart, self.survives_restart)
            && is_there(needed.proofs, self.proofs)
            && is_there(needed.lingers, self.lingers)
            && is_there(needed.hears_breaks, self.hears_breaks)
            && is_there(needed.status, self.status)
    }

    fn words(self) -> impl Iterator<Item = &'static str> {
        let all = [
            (self.adopt, "adopt"),
            (self.slots, "slots"),
            (self.survives_restart, "keeps"),
            (self.proofs, "proofs"),
            (self.lingers, "lingers"),
            (self.hears_breaks, "broken"),
            (self.status, "status"),
        ];
        all.into_iter().filter(|it| it.0).map(|it| it.1)
    }
}

/// The words, separated by spaces.
impl fmt::Display for Abilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, word) in self.words().enumerate() {
            let blank = if index > 0 { " " } else { "" };
            write!(f, "{blank}{word}")?;
        }
        Ok(())
    }
}
