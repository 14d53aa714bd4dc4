#!/bin/sh
# Shows a rolling upgrade on one host: three members of etcd, three servers, and commands under
# `latch run` that are run all the time. Each server is stopped and started again; no command ends
# for it, and none fails.
#
#     upgrade.sh [FIRST_PORT]
#
# It needs etcd, and a latchd with the feature cluster. It takes nine ports from FIRST_PORT (23790)
# on, keeps everything in a temporary directory, and stops what it has started.
set -eu

first=${1:-23790}
. "$(dirname "$0")/etcd.sh"

# Starts a server and waits until it has its part: with a newer program, this is the upgrade.
start_and_wait() {
    start_server "$1" "$1.log"
    wait_for 'INFO \(active\|standby\) ' "$1.log"
}
a=$((first + 6)) b=$((first + 7)) c=$((first + 8))
start_and_wait "$a"
process_a=$server
start_and_wait "$b"
process_b=$server
start_and_wait "$c"
process_c=$server
echo "one server is active, the others pass connections on"

# Any of the three will do, and --retry waits if none is there.
export LATCH_SERVER="127.0.0.1:$a|127.0.0.1:$b|127.0.0.1:$c"
work() {
    until test -e over; do
        latch run "job-$1" --retry --lease 60 -- sleep 0.2 || echo "status $?" >>failed
        echo >>done
    done
}
jobs=
for number in 1 1 2 3; do
    work $number &
    jobs="$jobs $!"
done
processes="$processes $jobs"
wait_for '' done

upgrade() {
    kill "$2"
    wait "$2"
    start_and_wait "$1"
    echo "a server has been upgraded"
    sleep 0.5
}
upgrade "$a" "$process_a"
upgrade "$b" "$process_b"
upgrade "$c" "$process_c"

touch over
# shellcheck disable=SC2086  # a list of numbers
wait $jobs
test ! -e failed || { cat failed; exit 1; }
echo "no command has failed"
