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
directory=$(mktemp -d)
cd "$directory"

processes=
clean_up() {
    trap - EXIT
    # shellcheck disable=SC2086  # a list of numbers
    kill -9 $processes 2>/dev/null || true
    wait
    cd / && rm -rf "$directory"
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM

# Waits until a text is in a file.
wait_for() {
    tries=300
    until grep -q "$1" "$2" 2>/dev/null; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || { echo "no \"$1\" in $2:"; tail "$2"; exit 1; }
        sleep 0.1
    done
}

peer() { echo "http://127.0.0.1:$((first + 3 + $1))"; }
for number in 0 1 2; do
    client="http://127.0.0.1:$((first + number))"
    etcd --name "member-$number" --data-dir "data-$number" \
        --listen-client-urls "$client" --advertise-client-urls "$client" \
        --listen-peer-urls "$(peer $number)" --initial-advertise-peer-urls "$(peer $number)" \
        --initial-cluster "member-0=$(peer 0),member-1=$(peer 1),member-2=$(peer 2)" \
        --auto-compaction-retention 10m >"etcd-$number.log" 2>&1 &
    processes="$processes $!"
done
members="127.0.0.1:$first,127.0.0.1:$((first + 1)),127.0.0.1:$((first + 2))"

# Starts a server on a port, with a log of that name.
start_server() {
    latchd --port "$1" --advertise "127.0.0.1:$1" --etcd "$members" --etcd-ttl 5 2>"$2" &
    processes="$processes $!"
}
one=$((first + 6)) other=$((first + 7))
start_server "$one" one.log
active=$!
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
