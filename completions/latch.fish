# Completion of latch for fish. Made from what its --help says; do not edit.

function __latch_command
    set -l words (commandline -opc) (commandline -ct)
    set -l dashes (contains -i -- -- $words)
    complete -C (string join ' ' -- (string escape -- $words[(math $dashes + 1)..-2]) $words[-1])
end

complete -c latch -f
complete -c latch -n __fish_use_subcommand -a run -d 'Run a command under a lock'
complete -c latch -n __fish_use_subcommand -a wait -d 'Wait until the lock could be had, without keeping it'
complete -c latch -n __fish_use_subcommand -a acquire -d 'Take a lock that outlives the connection, and print its token'
complete -c latch -n __fish_use_subcommand -a renew -d 'Start the lease of a lock anew, and print its length'
complete -c latch -n __fish_use_subcommand -a release -d 'Give a lock back'
complete -c latch -n __fish_use_subcommand -a stats -d 'Show who holds and who waits'
complete -c latch -n __fish_use_subcommand -a ping -d 'Ask whether the servers are there'
complete -c latch -n __fish_use_subcommand -a fence-check -d 'Check that a token is not older than the newest that a resource has seen'

complete -c latch -n __fish_use_subcommand -s h -l help -d 'print this and exit'
complete -c latch -n __fish_use_subcommand -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from run' -l timeout -x -d 'for how long to wait for the lock, in seconds; 0 tries once (for ever)'
complete -c latch -n '__fish_seen_subcommand_from run' -l lease -x -d 'length of the lease, in seconds (the server'\''s default)'
complete -c latch -n '__fish_seen_subcommand_from run' -l limit -x -d 'take one of so many slots of a semaphore'
complete -c latch -n '__fish_seen_subcommand_from run' -l kill-after -x -d 'how long the command may take to end once the lock is lost, in seconds (10)'
complete -c latch -n '__fish_seen_subcommand_from run' -s E -l busy-status -x -d 'exit status if somebody else has the lock (75)'
complete -c latch -n '__fish_seen_subcommand_from run' -l busy-ok -d 'exit with 0 if somebody else has the lock'
complete -c latch -n '__fish_seen_subcommand_from run' -l server -x -d 'server as HOST:PORT or path of a Unix socket; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from run' -l auth-token-file -r -F -d 'a file with the token that the server wants'
complete -c latch -n '__fish_seen_subcommand_from run' -l connect-timeout -x -d 'how long connecting, and an answer that is due, may take, in seconds (5)'
complete -c latch -n '__fish_seen_subcommand_from run' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from run' -s V -l version -d 'print the version and exit'
complete -c latch -n '__fish_seen_subcommand_from run; and contains -- -- (commandline -opc)' -a '(__latch_command)'

complete -c latch -n '__fish_seen_subcommand_from wait' -l timeout -x -d 'for how long to wait, in seconds; 0 tries once (for ever)'
complete -c latch -n '__fish_seen_subcommand_from wait' -l limit -x -d 'wait for one of so many slots of a semaphore'
complete -c latch -n '__fish_seen_subcommand_from wait' -l server -x -d 'server as HOST:PORT or path of a Unix socket; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from wait' -l auth-token-file -r -F -d 'a file with the token that the server wants'
complete -c latch -n '__fish_seen_subcommand_from wait' -l connect-timeout -x -d 'how long connecting, and an answer that is due, may take, in seconds (5)'
complete -c latch -n '__fish_seen_subcommand_from wait' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from wait' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from acquire' -l timeout -x -d 'for how long to wait for the lock, in seconds; 0 tries once (for ever)'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l lease -x -d 'length of the lease, in seconds (the server'\''s default)'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l limit -x -d 'take one of so many slots of a semaphore'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l server -x -d 'server as HOST:PORT or path of a Unix socket; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l auth-token-file -r -F -d 'a file with the token that the server wants'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l connect-timeout -x -d 'how long connecting, and an answer that is due, may take, in seconds (5)'
complete -c latch -n '__fish_seen_subcommand_from acquire' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from acquire' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from renew' -l lease -x -d 'length of the lease, in seconds (the server'\''s default)'
complete -c latch -n '__fish_seen_subcommand_from renew' -l limit -x -d 'the key is a semaphore with so many slots'
complete -c latch -n '__fish_seen_subcommand_from renew' -l server -x -d 'server as HOST:PORT or path of a Unix socket; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from renew' -l auth-token-file -r -F -d 'a file with the token that the server wants'
complete -c latch -n '__fish_seen_subcommand_from renew' -l connect-timeout -x -d 'how long connecting, and an answer that is due, may take, in seconds (5)'
complete -c latch -n '__fish_seen_subcommand_from renew' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from renew' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from release' -l limit -x -d 'the key is a semaphore with so many slots'
complete -c latch -n '__fish_seen_subcommand_from release' -l server -x -d 'server as HOST:PORT or path of a Unix socket; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from release' -l auth-token-file -r -F -d 'a file with the token that the server wants'
complete -c latch -n '__fish_seen_subcommand_from release' -l connect-timeout -x -d 'how long connecting, and an answer that is due, may take, in seconds (5)'
complete -c latch -n '__fish_seen_subcommand_from release' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from release' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from stats' -l json -d 'print the server'\''s JSON as it is'
complete -c latch -n '__fish_seen_subcommand_from stats' -l watch -d 'show it again every two seconds'
complete -c latch -n '__fish_seen_subcommand_from stats' -l server -x -d 'server as HOST:PORT or path of a Unix socket; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from stats' -l auth-token-file -r -F -d 'a file with the token that the server wants'
complete -c latch -n '__fish_seen_subcommand_from stats' -l connect-timeout -x -d 'how long connecting, and an answer that is due, may take, in seconds (5)'
complete -c latch -n '__fish_seen_subcommand_from stats' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from stats' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from ping' -l server -x -d 'server as HOST:PORT or path of a Unix socket; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from ping' -l auth-token-file -r -F -d 'a file with the token that the server wants'
complete -c latch -n '__fish_seen_subcommand_from ping' -l connect-timeout -x -d 'how long connecting, and an answer that is due, may take, in seconds (5)'
complete -c latch -n '__fish_seen_subcommand_from ping' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from ping' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from fence-check' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from fence-check' -s V -l version -d 'print the version and exit'
complete -c latch -n '__fish_seen_subcommand_from fence-check' -F
