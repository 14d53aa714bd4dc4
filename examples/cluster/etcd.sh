# For the scripts beside it: starts three members of etcd in a temporary directory, on six ports from
# $first on, and stops what was started when the script ends. The members are in $members.

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

# Starts a server on a port, with a log of that name; its process is in $server then.
start_server() {
    latchd --port "$1" --advertise "127.0.0.1:$1" --etcd "$members" --etcd-ttl 5 2>"$2" &
    server=$!
    processes="$processes $server"
}
