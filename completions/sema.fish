# Completion of sema for fish. Made from what its --help says; do not edit.

function __sema_command
    set -l words (commandline -opc) (commandline -ct)
    set -l dashes (contains -i -- -- $words)
    complete -C (string join ' ' -- (string escape -- $words[(math $dashes + 1)..-2]) $words[-1])
end

complete -c sema -f
complete -c sema -n __fish_use_subcommand -a try -d 'take the lock if it is free or stale'
complete -c sema -n __fish_use_subcommand -a acquire -d 'wait for the lock and take it'
complete -c sema -n __fish_use_subcommand -a release -d 'give the lock back'
complete -c sema -n __fish_use_subcommand -a status -d 'show who holds the lock'
complete -c sema -n __fish_use_subcommand -a wait -d 'wait until the lock is free, without taking it'
complete -c sema -n __fish_use_subcommand -a clean -d 'remove a stale lock and the left-overs of crashes'
complete -c sema -n __fish_use_subcommand -a run -d 'run a command while holding the lock'

complete -c sema -n __fish_use_subcommand -s h -l help -d 'print this and exit'
complete -c sema -n __fish_use_subcommand -s V -l version -d 'print the version and exit'

complete -c sema -n '__fish_seen_subcommand_from try' -l stale -x -d 'the age at which a lock may be stale; 0 for never (3600)'
complete -c sema -n '__fish_seen_subcommand_from try' -l stale-rule -x -d 'age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)'
complete -c sema -n '__fish_seen_subcommand_from try' -l tag -x -d 'what the lock is held for'
complete -c sema -n '__fish_seen_subcommand_from try' -l json -d 'print the result, or the holder, as JSON on stdout'
complete -c sema -n '__fish_seen_subcommand_from try' -s q -l quiet -d 'print only errors, status and JSON'
complete -c sema -n '__fish_seen_subcommand_from try' -l slots -x -d 'use one of this many locks, PATH.0.lock and so on'
complete -c sema -n '__fish_seen_subcommand_from try' -l pid -x -d 'the process that holds the lock (the parent of sema)'
complete -c sema -n '__fish_seen_subcommand_from try' -l token -x -d 'a word to keep in the lock file; release wants the same'
complete -c sema -n '__fish_seen_subcommand_from try' -l mode -x -d 'octal permissions of the lock file, before the umask (0644)'
complete -c sema -n '__fish_seen_subcommand_from try' -l no-sync -d 'do not wait for the disk'
complete -c sema -n '__fish_seen_subcommand_from try' -l settle -x -d 'never, takeover or always: wait 20 ms for careless others (takeover)'
complete -c sema -n '__fish_seen_subcommand_from try' -s h -l help -d 'print this and exit'
complete -c sema -n '__fish_seen_subcommand_from try' -s V -l version -d 'print the version and exit'
complete -c sema -n '__fish_seen_subcommand_from try' -F

complete -c sema -n '__fish_seen_subcommand_from acquire' -s w -l timeout -x -d 'how long to wait; 0 tries once (for ever)'
complete -c sema -n '__fish_seen_subcommand_from acquire' -s n -l nonblock -d 'do not wait, as with --timeout 0'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l stale -x -d 'the age at which a lock may be stale; 0 for never (3600)'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l stale-rule -x -d 'age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l tag -x -d 'what the lock is held for'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l json -d 'print the result, or the holder, as JSON on stdout'
complete -c sema -n '__fish_seen_subcommand_from acquire' -s q -l quiet -d 'print only errors, status and JSON'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l slots -x -d 'use one of this many locks, PATH.0.lock and so on'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l pid -x -d 'the process that holds the lock (the parent of sema)'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l token -x -d 'a word to keep in the lock file; release wants the same'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l mode -x -d 'octal permissions of the lock file, before the umask (0644)'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l no-sync -d 'do not wait for the disk'
complete -c sema -n '__fish_seen_subcommand_from acquire' -l settle -x -d 'never, takeover or always: wait 20 ms for careless others (takeover)'
complete -c sema -n '__fish_seen_subcommand_from acquire' -s h -l help -d 'print this and exit'
complete -c sema -n '__fish_seen_subcommand_from acquire' -s V -l version -d 'print the version and exit'
complete -c sema -n '__fish_seen_subcommand_from acquire' -F

complete -c sema -n '__fish_seen_subcommand_from release' -l stale -x -d 'the age at which a lock may be stale; 0 for never (3600)'
complete -c sema -n '__fish_seen_subcommand_from release' -l stale-rule -x -d 'age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)'
complete -c sema -n '__fish_seen_subcommand_from release' -l tag -x -d 'what the lock is held for'
complete -c sema -n '__fish_seen_subcommand_from release' -l json -d 'print the result, or the holder, as JSON on stdout'
complete -c sema -n '__fish_seen_subcommand_from release' -s q -l quiet -d 'print only errors, status and JSON'
complete -c sema -n '__fish_seen_subcommand_from release' -l slots -x -d 'use one of this many locks, PATH.0.lock and so on'
complete -c sema -n '__fish_seen_subcommand_from release' -l pid -x -d 'the process that holds the lock (the parent of sema)'
complete -c sema -n '__fish_seen_subcommand_from release' -l token -x -d 'a word to keep in the lock file; release wants the same'
complete -c sema -n '__fish_seen_subcommand_from release' -l force -d 'release another holder'\''s lock; clean without locks on files'
complete -c sema -n '__fish_seen_subcommand_from release' -s h -l help -d 'print this and exit'
complete -c sema -n '__fish_seen_subcommand_from release' -s V -l version -d 'print the version and exit'
complete -c sema -n '__fish_seen_subcommand_from release' -F

complete -c sema -n '__fish_seen_subcommand_from status' -l stale -x -d 'the age at which a lock may be stale; 0 for never (3600)'
complete -c sema -n '__fish_seen_subcommand_from status' -l stale-rule -x -d 'age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)'
complete -c sema -n '__fish_seen_subcommand_from status' -l tag -x -d 'what the lock is held for'
complete -c sema -n '__fish_seen_subcommand_from status' -l json -d 'print the result, or the holder, as JSON on stdout'
complete -c sema -n '__fish_seen_subcommand_from status' -s q -l quiet -d 'print only errors, status and JSON'
complete -c sema -n '__fish_seen_subcommand_from status' -l slots -x -d 'use one of this many locks, PATH.0.lock and so on'
complete -c sema -n '__fish_seen_subcommand_from status' -s h -l help -d 'print this and exit'
complete -c sema -n '__fish_seen_subcommand_from status' -s V -l version -d 'print the version and exit'
complete -c sema -n '__fish_seen_subcommand_from status' -F

complete -c sema -n '__fish_seen_subcommand_from wait' -s w -l timeout -x -d 'how long to wait; 0 tries once (for ever)'
complete -c sema -n '__fish_seen_subcommand_from wait' -l stale -x -d 'the age at which a lock may be stale; 0 for never (3600)'
complete -c sema -n '__fish_seen_subcommand_from wait' -l stale-rule -x -d 'age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)'
complete -c sema -n '__fish_seen_subcommand_from wait' -l tag -x -d 'what the lock is held for'
complete -c sema -n '__fish_seen_subcommand_from wait' -l json -d 'print the result, or the holder, as JSON on stdout'
complete -c sema -n '__fish_seen_subcommand_from wait' -s q -l quiet -d 'print only errors, status and JSON'
complete -c sema -n '__fish_seen_subcommand_from wait' -l slots -x -d 'use one of this many locks, PATH.0.lock and so on'
complete -c sema -n '__fish_seen_subcommand_from wait' -s h -l help -d 'print this and exit'
complete -c sema -n '__fish_seen_subcommand_from wait' -s V -l version -d 'print the version and exit'
complete -c sema -n '__fish_seen_subcommand_from wait' -F

complete -c sema -n '__fish_seen_subcommand_from clean' -l stale -x -d 'the age at which a lock may be stale; 0 for never (3600)'
complete -c sema -n '__fish_seen_subcommand_from clean' -l stale-rule -x -d 'age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)'
complete -c sema -n '__fish_seen_subcommand_from clean' -l tag -x -d 'what the lock is held for'
complete -c sema -n '__fish_seen_subcommand_from clean' -l json -d 'print the result, or the holder, as JSON on stdout'
complete -c sema -n '__fish_seen_subcommand_from clean' -s q -l quiet -d 'print only errors, status and JSON'
complete -c sema -n '__fish_seen_subcommand_from clean' -l force -d 'release another holder'\''s lock; clean without locks on files'
complete -c sema -n '__fish_seen_subcommand_from clean' -s h -l help -d 'print this and exit'
complete -c sema -n '__fish_seen_subcommand_from clean' -s V -l version -d 'print the version and exit'
complete -c sema -n '__fish_seen_subcommand_from clean' -F

complete -c sema -n '__fish_seen_subcommand_from run' -s w -l timeout -x -d 'how long to wait; 0 tries once (for ever)'
complete -c sema -n '__fish_seen_subcommand_from run' -s n -l nonblock -d 'do not wait, as with --timeout 0'
complete -c sema -n '__fish_seen_subcommand_from run' -l stale -x -d 'the age at which a lock may be stale; 0 for never (3600)'
complete -c sema -n '__fish_seen_subcommand_from run' -l stale-rule -x -d 'age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)'
complete -c sema -n '__fish_seen_subcommand_from run' -l tag -x -d 'what the lock is held for'
complete -c sema -n '__fish_seen_subcommand_from run' -l json -d 'print the result, or the holder, as JSON on stdout'
complete -c sema -n '__fish_seen_subcommand_from run' -s q -l quiet -d 'print only errors, status and JSON'
complete -c sema -n '__fish_seen_subcommand_from run' -l slots -x -d 'use one of this many locks, PATH.0.lock and so on'
complete -c sema -n '__fish_seen_subcommand_from run' -l token -x -d 'a word to keep in the lock file; release wants the same'
complete -c sema -n '__fish_seen_subcommand_from run' -l mode -x -d 'octal permissions of the lock file, before the umask (0644)'
complete -c sema -n '__fish_seen_subcommand_from run' -l no-sync -d 'do not wait for the disk'
complete -c sema -n '__fish_seen_subcommand_from run' -l settle -x -d 'never, takeover or always: wait 20 ms for careless others (takeover)'
complete -c sema -n '__fish_seen_subcommand_from run' -s E -l busy-status -x -d 'exit status of run if the lock is not granted in time (1)'
complete -c sema -n '__fish_seen_subcommand_from run' -l on-lost -x -d 'if the lock is lost, end the command: term or ignore (term)'
complete -c sema -n '__fish_seen_subcommand_from run' -l kill-after -x -d 'how long the command may take to end once the lock is lost (10)'
complete -c sema -n '__fish_seen_subcommand_from run' -s h -l help -d 'print this and exit'
complete -c sema -n '__fish_seen_subcommand_from run' -s V -l version -d 'print the version and exit'
complete -c sema -n '__fish_seen_subcommand_from run' -F
complete -c sema -n '__fish_seen_subcommand_from run; and contains -- -- (commandline -opc)' -a '(__sema_command)'
