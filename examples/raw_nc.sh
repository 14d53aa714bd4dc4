#!/bin/sh
# Holds a lock from a shell script, with nothing but nc (netcat-openbsd).
#
#     sh examples/raw_nc.sh [host [port]]
#
# Two named pipes keep one connection open: requests go in, replies come out.
# When the script ends, however it ends, the connection closes and the server
# releases the lock.
set -eu

host=${1:-localhost}
port=${2:-6388}
key=raw-nc-demo
nc_pid=
dir=$(mktemp -d)

clean_up() {
    [ -z "$nc_pid" ] || kill "$nc_pid" 2>/dev/null || :
    rm -rf "$dir"
}

fail() {
    echo "raw_nc.sh: $1" >&2
    exit 1
}

# ask COMMAND KEY ARGUMENT: sends a request and sets $reply.
ask() {
    printf '%s\n%s\n%s\n' "$1" "$2" "$3" 2>/dev/null >&3 && IFS= read -r reply <&4 ||
        fail "no reply from $host port $port"
}

trap clean_up EXIT
trap 'exit 1' HUP INT TERM
mkfifo "$dir/requests" "$dir/replies"
nc "$host" "$port" <"$dir/requests" >"$dir/replies" &
nc_pid=$!
# Without a server nc is gone by now; writing must then fail, not kill the script.
trap '' PIPE
# Each of these waits until the other end is opened, so the order is that of the line above.
exec 3>"$dir/requests" 4<"$dir/replies"

# Wait up to 5 seconds for the lock, and ask for a lease of 10.
ask l "$key" '5 10'
case $reply in
    'ok '*) ;;
    *) fail "no lock: $reply" ;;
esac
token=${reply#ok }
token=${token% *}
echo "holding $key"

# The work goes here. Renew at half the lease if it takes long.
ask n "$key" "$token 10"
echo "renewed: $reply"

ask r "$key" "$token"
echo "released: $reply"
