# Completion of latch for fish. Made from what its --help says; do not edit.

function __latch_command
    set -l words (commandline -opc) (commandline -ct)
    set -l dashes (contains -i -- -- $words)
    complete -C (string join ' ' -- (string escape -- $words[(math $dashes + 1)..-2]) $words[-1])
end

complete -c latch -f
complete -c latch -n __fish_use_subcommand -a run -d 'Run a command under a lock'
complete -c latch -n __fish_use_subcommand -a hold -d 'Hold a lock until standard input is closed, and print its token and fence'
complete -c latch -n __fish_use_subcommand -a wait -d 'Wait until the lock is granted, and release it at once'
complete -c latch -n __fish_use_subcommand -a acquire -d 'Take a lock that outlives the connection, and print its token'
complete -c latch -n __fish_use_subcommand -a renew -d 'Renew the lease of a lock, and print its length'
complete -c latch -n __fish_use_subcommand -a release -d 'Release a lock'
complete -c latch -n __fish_use_subcommand -a stats -d 'Show the holders and the waiters'
complete -c latch -n __fish_use_subcommand -a ping -d 'Check that every server answers'
complete -c latch -n __fish_use_subcommand -a fence-check -d 'Check that a token is not older than the newest that a resource has seen'

complete -c latch -n __fish_use_subcommand -s h -l help -d 'print this and exit'
complete -c latch -n __fish_use_subcommand -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from run' -l timeout -x -d 'how long to wait for the lock; 0 tries once (for ever)'
complete -c latch -n '__fish_seen_subcommand_from run' -l lease -x -d 'length of the lease (the server'\''s default)'
complete -c latch -n '__fish_seen_subcommand_from run' -l limit -x -d 'take one of this many slots of a semaphore'
complete -c latch -n '__fish_seen_subcommand_from run' -l kill-after -x -d 'how long the command may take to end once the lock is lost (10)'
complete -c latch -n '__fish_seen_subcommand_from run' -s E -l busy-status -x -d 'exit status if another client holds the lock (75)'
complete -c latch -n '__fish_seen_subcommand_from run' -l busy-ok -d 'exit with 0 if another client holds the lock'
complete -c latch -n '__fish_seen_subcommand_from run' -l retry -d 'while it waits, try again if the server restarts or is not there yet, for at most this long (as long as --timeout allows)'
complete -c latch -n '__fish_seen_subcommand_from run' -s q -l quiet -d 'do not say who holds the lock while it waits'
complete -c latch -n '__fish_seen_subcommand_from run' -s v -l verbose -d 'say who holds the lock while it waits, also where stderr is no terminal'
complete -c latch -n '__fish_seen_subcommand_from run' -l server -x -d 'server as HOST, HOST:PORT or path of a Unix socket; several divide the keys, none takes over for another; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from run' -l auth-token-file -r -F -d 'a file with the auth token of the server'
complete -c latch -n '__fish_seen_subcommand_from run' -l connect-timeout -x -d 'how long connecting, or a reply, may take (5)'
complete -c latch -n '__fish_seen_subcommand_from run' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from run' -s V -l version -d 'print the version and exit'
complete -c latch -n '__fish_seen_subcommand_from run; and contains -- -- (commandline -opc)' -a '(__latch_command)'

complete -c latch -n '__fish_seen_subcommand_from hold' -l timeout -x -d 'how long to wait for the lock; 0 tries once (for ever)'
complete -c latch -n '__fish_seen_subcommand_from hold' -l lease -x -d 'length of the lease (the server'\''s default)'
complete -c latch -n '__fish_seen_subcommand_from hold' -l limit -x -d 'take one of this many slots of a semaphore'
complete -c latch -n '__fish_seen_subcommand_from hold' -s E -l busy-status -x -d 'exit status if another client holds the lock (75)'
complete -c latch -n '__fish_seen_subcommand_from hold' -l retry -d 'while it waits, try again if the server restarts or is not there yet, for at most this long (as long as --timeout allows)'
complete -c latch -n '__fish_seen_subcommand_from hold' -s q -l quiet -d 'do not say who holds the lock while it waits'
complete -c latch -n '__fish_seen_subcommand_from hold' -s v -l verbose -d 'say who holds the lock while it waits, also where stderr is no terminal'
complete -c latch -n '__fish_seen_subcommand_from hold' -l server -x -d 'server as HOST, HOST:PORT or path of a Unix socket; several divide the keys, none takes over for another; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from hold' -l auth-token-file -r -F -d 'a file with the auth token of the server'
complete -c latch -n '__fish_seen_subcommand_from hold' -l connect-timeout -x -d 'how long connecting, or a reply, may take (5)'
complete -c latch -n '__fish_seen_subcommand_from hold' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from hold' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from wait' -l timeout -x -d 'how long to wait; 0 tries once (for ever)'
complete -c latch -n '__fish_seen_subcommand_from wait' -l limit -x -d 'wait for one of this many slots of a semaphore'
complete -c latch -n '__fish_seen_subcommand_from wait' -l server -x -d 'server as HOST, HOST:PORT or path of a Unix socket; several divide the keys, none takes over for another; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from wait' -l auth-token-file -r -F -d 'a file with the auth token of the server'
complete -c latch -n '__fish_seen_subcommand_from wait' -l connect-timeout -x -d 'how long connecting, or a reply, may take (5)'
complete -c latch -n '__fish_seen_subcommand_from wait' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from wait' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from acquire' -l timeout -x -d 'how long to wait for the lock; 0 tries once (for ever)'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l lease -x -d 'length of the lease (the server'\''s default)'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l limit -x -d 'take one of this many slots of a semaphore'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l server -x -d 'server as HOST, HOST:PORT or path of a Unix socket; several divide the keys, none takes over for another; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l auth-token-file -r -F -d 'a file with the auth token of the server'
complete -c latch -n '__fish_seen_subcommand_from acquire' -l connect-timeout -x -d 'how long connecting, or a reply, may take (5)'
complete -c latch -n '__fish_seen_subcommand_from acquire' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from acquire' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from renew' -l lease -x -d 'length of the lease (the server'\''s default)'
complete -c latch -n '__fish_seen_subcommand_from renew' -l limit -x -d 'the key is a semaphore with this many slots'
complete -c latch -n '__fish_seen_subcommand_from renew' -l server -x -d 'server as HOST, HOST:PORT or path of a Unix socket; several divide the keys, none takes over for another; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from renew' -l auth-token-file -r -F -d 'a file with the auth token of the server'
complete -c latch -n '__fish_seen_subcommand_from renew' -l connect-timeout -x -d 'how long connecting, or a reply, may take (5)'
complete -c latch -n '__fish_seen_subcommand_from renew' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from renew' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from release' -l limit -x -d 'the key is a semaphore with this many slots'
complete -c latch -n '__fish_seen_subcommand_from release' -l server -x -d 'server as HOST, HOST:PORT or path of a Unix socket; several divide the keys, none takes over for another; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from release' -l auth-token-file -r -F -d 'a file with the auth token of the server'
complete -c latch -n '__fish_seen_subcommand_from release' -l connect-timeout -x -d 'how long connecting, or a reply, may take (5)'
complete -c latch -n '__fish_seen_subcommand_from release' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from release' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from stats' -l json -d 'print the server'\''s JSON unchanged'
complete -c latch -n '__fish_seen_subcommand_from stats' -l watch -d 'print again every two seconds'
complete -c latch -n '__fish_seen_subcommand_from stats' -l server -x -d 'server as HOST, HOST:PORT or path of a Unix socket; several divide the keys, none takes over for another; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from stats' -l auth-token-file -r -F -d 'a file with the auth token of the server'
complete -c latch -n '__fish_seen_subcommand_from stats' -l connect-timeout -x -d 'how long connecting, or a reply, may take (5)'
complete -c latch -n '__fish_seen_subcommand_from stats' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from stats' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from ping' -l server -x -d 'server as HOST, HOST:PORT or path of a Unix socket; several divide the keys, none takes over for another; repeat for several (127.0.0.1:6388)'
complete -c latch -n '__fish_seen_subcommand_from ping' -l auth-token-file -r -F -d 'a file with the auth token of the server'
complete -c latch -n '__fish_seen_subcommand_from ping' -l connect-timeout -x -d 'how long connecting, or a reply, may take (5)'
complete -c latch -n '__fish_seen_subcommand_from ping' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from ping' -s V -l version -d 'print the version and exit'

complete -c latch -n '__fish_seen_subcommand_from fence-check' -s h -l help -d 'print this and exit'
complete -c latch -n '__fish_seen_subcommand_from fence-check' -s V -l version -d 'print the version and exit'
complete -c latch -n '__fish_seen_subcommand_from fence-check' -F
