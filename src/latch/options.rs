//! The command line of `latch`: see latch(1).

use argh::FromArgs;

/// The options that need no value.
pub(super) const BOOLEANS: [&str; 3] = ["--busy-ok", "--json", "--watch"];

/// Locks and semaphores of a latchd server, for the shell.
#[derive(FromArgs, Debug)]
pub(super) struct Flags {
    #[argh(subcommand)]
    pub(super) command: SubCommand,
}

#[derive(FromArgs, Debug)]
#[argh(subcommand)]
pub(super) enum SubCommand {
    Run(Run),
    Wait(Wait),
    Acquire(Acquire),
    Renew(Renew),
    Release(Release),
    Stats(Stats),
    Ping(Ping),
    FenceCheck(FenceCheck),
}

/// Declares a command with the options that all commands have which talk to a server.
macro_rules! command {
    ($(#[$meta:meta])* $name:ident { $($fields:tt)* }) => {
        #[derive(FromArgs, Debug)]
        $(#[$meta])*
        pub(super) struct $name {
            $($fields)*
            /// server as HOST:PORT or path of a Unix socket; repeat for several (127.0.0.1:6388)
            #[argh(option, arg_name = "address")]
            pub(super) server: Vec<String>,
            /// a file with the token that the server wants
            #[argh(option, arg_name = "path")]
            pub(super) auth_token_file: Option<String>,
            /// how long connecting, and an answer that is due, may take, in seconds (5)
            #[argh(option, arg_name = "seconds", default = "5")]
            pub(super) connect_timeout: u64,
        }

        impl $name {
            pub(super) fn reach(&self) -> Reach<'_> {
                Reach {
                    servers: &self.server,
                    auth_token_file: self.auth_token_file.as_deref(),
                    connect_timeout: self.connect_timeout,
                }
            }
        }
    };
}

/// How to reach the servers, as far as the command line says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach<'a> {
    pub(super) servers: &'a [String],
    pub(super) auth_token_file: Option<&'a str>,
    pub(super) connect_timeout: u64,
}

command! {
    /// Run a command under a lock: latch run KEY [options] -- COMMAND [ARGUMENTS]
    #[argh(subcommand, name = "run")]
    Run {
        /// the key to hold
        #[argh(positional)]
        pub(super) key: String,
        /// for how long to wait for the lock, in seconds; 0 tries once (for ever)
        #[argh(option, arg_name = "seconds")]
        pub(super) timeout: Option<u64>,
        /// length of the lease, in seconds (the server's default)
        #[argh(option, arg_name = "seconds")]
        pub(super) lease: Option<u64>,
        /// take one of so many slots of a semaphore
        #[argh(option, arg_name = "count")]
        pub(super) limit: Option<u32>,
        /// how long the command may take to end once the lock is lost, in seconds (10)
        #[argh(option, arg_name = "seconds", default = "10")]
        pub(super) kill_after: u64,
        /// exit status if somebody else has the lock (75)
        #[argh(option, short = 'E', arg_name = "status", default = "75")]
        pub(super) busy_status: u8,
        /// exit with 0 if somebody else has the lock
        #[argh(option, arg_name = "bool")]
        pub(super) busy_ok: Option<String>,
    }
}

command! {
    /// Wait until the lock could be had, without keeping it
    #[argh(subcommand, name = "wait")]
    Wait {
        /// the key to wait for
        #[argh(positional)]
        pub(super) key: String,
        /// for how long to wait, in seconds; 0 tries once (for ever)
        #[argh(option, arg_name = "seconds")]
        pub(super) timeout: Option<u64>,
        /// wait for one of so many slots of a semaphore
        #[argh(option, arg_name = "count")]
        pub(super) limit: Option<u32>,
    }
}

command! {
    /// Take a lock that outlives the connection, and print its token
    #[argh(subcommand, name = "acquire")]
    Acquire {
        /// the key to hold
        #[argh(positional)]
        pub(super) key: String,
        /// for how long to wait for the lock, in seconds; 0 tries once (for ever)
        #[argh(option, arg_name = "seconds")]
        pub(super) timeout: Option<u64>,
        /// length of the lease, in seconds (the server's default)
        #[argh(option, arg_name = "seconds")]
        pub(super) lease: Option<u64>,
        /// take one of so many slots of a semaphore
        #[argh(option, arg_name = "count")]
        pub(super) limit: Option<u32>,
    }
}

command! {
    /// Start the lease of a lock anew, and print its length
    #[argh(subcommand, name = "renew")]
    Renew {
        /// the key that is held
        #[argh(positional)]
        pub(super) key: String,
        /// the token of the grant
        #[argh(positional)]
        pub(super) token: String,
        /// length of the lease, in seconds (the server's default)
        #[argh(option, arg_name = "seconds")]
        pub(super) lease: Option<u64>,
        /// the key is a semaphore with so many slots
        #[argh(option, arg_name = "count")]
        pub(super) limit: Option<u32>,
    }
}

command! {
    /// Give a lock back
    #[argh(subcommand, name = "release")]
    Release {
        /// the key that is held
        #[argh(positional)]
        pub(super) key: String,
        /// the token of the grant
        #[argh(positional)]
        pub(super) token: String,
        /// the key is a semaphore with so many slots
        #[argh(option, arg_name = "count")]
        pub(super) limit: Option<u32>,
    }
}

command! {
    /// Show who holds and who waits
    #[argh(subcommand, name = "stats")]
    Stats {
        /// print the server's JSON as it is
        #[argh(option, arg_name = "bool")]
        pub(super) json: Option<String>,
        /// show it again every two seconds
        #[argh(option, arg_name = "bool")]
        pub(super) watch: Option<String>,
    }
}

command! {
    /// Ask whether the servers are there
    #[argh(subcommand, name = "ping")]
    Ping {}
}

/// Check that a token is not older than the newest that a resource has seen
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "fence-check")]
pub(super) struct FenceCheck {
    /// where the highest fence is remembered; made if it is not there
    #[argh(positional)]
    pub(super) file: String,
    /// the token to check
    #[argh(positional)]
    pub(super) token: String,
}
