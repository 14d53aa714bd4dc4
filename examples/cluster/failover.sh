#!/bin/sh
# Shows a failover on one host: three members of etcd, two servers, and a command under `latch run`
# that keeps its lock when the active server is killed.
#
#     failover.sh [FIRST_PORT]
#
# It needs etcd, and a latchd with the feature cluster. It takes eight ports from FIRST_PORT (23790)
# on, keeps everything in a temporary directory, and stops what it has started.
set -eu

first=${1:-23790}
. "$(dirname "$0")/etcd.sh"

one=$((first + 6)) other=$((first + 7))
start_server "$one" one.log
active=$server
wait_for 'INFO active epoch=' one.log
start_server "$other" other.log
wait_for 'INFO standby active=' other.log
echo "one server is active, the other one passes connections on"

# Either of the two will do.
export LATCH_SERVER="127.0.0.1:$other|127.0.0.1:$one"
latch run my-job --lease 60 -- sh -c '
    echo "the command runs with fence $LATCH_FENCE"
    touch running
    until test -e over; do sleep 0.1; done' &
job=$!
processes="$processes $job"
until test -e running; do
    kill -0 "$job" 2>/dev/null || exit 1
    sleep 0.1
done

kill -9 "$active"
echo "the active server is killed"
wait_for 'INFO active epoch=' other.log
echo "the other server is active"
status=0
latch run my-job --timeout 0 -- true 2>busy.log || status=$?
[ "$status" -eq 75 ] || { echo "the lock was lost: $status"; cat busy.log; exit 1; }
echo "the command still has its lock"

touch over
wait "$job"
echo "the command has ended well"
latch run my-job --timeout 10 -- echo "and the lock is free"
