//! The names of this host, as its administrator has set them.

use std::fs;

use rustix::system::uname;

/// Where an administrator names this host. On Debian, it says `127.0.1.1 db1.example.com db1`.
const HOSTS: &str = "/etc/hosts";

/// The host name, and all names that /etc/hosts gives to the same address, of which the first is
/// the canonical name. The search list of the resolver is not looked at: the network may have set
/// it, and a page of the network's must not go by a name of this host.
pub(super) fn of_this_host() -> Vec<String> {
    let own = uname().nodename().to_string_lossy().into_owned();
    let hosts = fs::read(HOSTS).unwrap_or_default();
    let aliases = aliases_of(&own, &String::from_utf8_lossy(&hosts));
    [own].into_iter().chain(aliases).collect()
}

/// All names in the lines of /etc/hosts that have the name `own`.
fn aliases_of(own: &str, hosts: &str) -> Vec<String> {
    let mut aliases = Vec::new();
    for line in hosts.lines() {
        let line = line.split_once('#').map_or(line, |(line, _)| line);
        let names: Vec<&str> = line.split_whitespace().skip(1).collect();
        if names.iter().any(|name| name.eq_ignore_ascii_case(own)) {
            aliases.extend(names.iter().map(|name| (*name).to_owned()));
        }
    }
    aliases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_canonical_name_is_that_of_the_own_line() {
        let hosts = "127.0.0.1\tlocalhost\n\
                     # 10.0.0.1 old.example db1\n\
                     127.0.1.1 db1.example.com\tDB1 # db2\n\
                     10.0.0.2 db2.example.com db2\n\
                     db1\n";
        assert_eq!(aliases_of("db1", hosts), ["db1.example.com", "DB1"]);
        assert!(aliases_of("db3", hosts).is_empty());
        assert!(aliases_of("", hosts).is_empty());
    }
}
