#!/bin/sh
# A holder that was paused for too long goes on, and what it writes is refused.
#
#     sh examples/fencing.sh [SERVER]
#
# SERVER is HOST:PORT or the path of a Unix socket; without it 127.0.0.1:6388. The program latch must
# be where the shell finds it.
set -eu

export LATCH_SERVER="${1:-127.0.0.1:6388}"
dir=$(mktemp -d)
export dir
slow=

clean_up() {
    [ -z "$slow" ] || kill "$slow" 2>/dev/null && kill -CONT "$slow" 2>/dev/null || :
    rm -rf "$dir"
}

trap clean_up EXIT
trap 'exit 1' HUP INT TERM

# write NAME, for a command under the lock: writes to what the lock protects, unless it
# has seen a higher fence.
cat >"$dir/write" <<'END'
if latch fence-check "$dir/fence"; then
    echo "written by $1" >>"$dir/store"
    echo "$1: written"
else
    echo "$1: refused, fence $LATCH_FENCE is outdated"
fi
END

latch run store --lease 1 --kill-after 0 -- sh -c '
    touch "$dir/started"
    until [ -e "$dir/awake" ]; do sleep 0.1; done
    sh "$dir/write" slow
    touch "$dir/done"
    sleep 60' &
slow=$!
until [ -e "$dir/started" ]; do
    kill -0 "$slow" 2>/dev/null || exit 1
    sleep 0.1
done

# latch is stopped, as on a host that is suspended. It does not renew the lease, which ends.
kill -STOP "$slow"
latch run store -- sh "$dir/write" fast

# The command under it goes on as if nothing had happened.
touch "$dir/awake"
until [ -e "$dir/done" ]; do
    kill -0 "$slow" 2>/dev/null || exit 1
    sleep 0.1
done
cat "$dir/store"

# And latch, as soon as it can, ends a command whose lock is lost.
kill -CONT "$slow"
wait "$slow" || echo "latch run has exited with $?"
slow=
