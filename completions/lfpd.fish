# Completion of lfpd for fish. Made from the rows of its options; do not edit.

complete -c lfpd -f

complete -c lfpd -l inetd -d 'serve the socket on descriptor 0, connected or listening (the default)'
complete -c lfpd -l stdio -d 'serve standard input and output, whatever they are'
complete -c lfpd -l listen -x -d 'listen on an address of the loopback interface (127.0.0.1:50001); repeat for several'
complete -c lfpd -l unix -r -F -d 'listen on a Unix socket'
complete -c lfpd -l lock-dir -r -F -d 'make lock files in this directory (/var/lock)'
complete -c lfpd -l search-dirs -x -d 'respect lock files in these directories, too, separated by colons (the usual places)'
complete -c lfpd -l peer-uid -x -a 'enforce log off' -d 'choose what happens when a client names another user'\''s process: enforce, log or off (enforce)'
complete -c lfpd -l require-live-pid -d 'refuse locks for processes that do not exist'
complete -c lfpd -l idle-timeout -x -d 'limit the time for each command to arrive (300)'
complete -c lfpd -l max-connections -x -d 'limit the number of connections (256)'
complete -c lfpd -l print-port -d 'print the bound port on stdout once listening'
complete -c lfpd -l log -x -a 'stderr syslog' -d 'write the log to stderr or syslog (stderr)'
complete -c lfpd -l log-file -r -F -d 'append the log to this file, and open it again at SIGHUP'
complete -c lfpd -l debug -d 'log connections, locks and unlocks'
complete -c lfpd -s h -l help -d 'print this and exit'
complete -c lfpd -s V -l version -d 'print the version and exit'
