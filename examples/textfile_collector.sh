#!/bin/sh
# Writes the metrics of latchd where the textfile collector of node_exporter reads them. For cron, or
# for a timer of systemd:
#
#     * * * * * textfile_collector.sh /var/lib/prometheus/node-exporter
#
# A second argument is the URL of the metrics: latchd shows them with --http. LATCH_AUTH_TOKEN_FILE
# names a file with the server's auth token. The exit status is that of curl. If the server does not
# give its metrics, the series latchd_up is 0, and there is no other.
set -eu

directory=${1:?usage: textfile_collector.sh DIRECTORY [URL]}
url=${2:-http://127.0.0.1:6389/metrics}
file=$directory/latchd.prom

# The header with the token. curl reads it from standard input, where ps does not show it.
header() {
    [ -z "${LATCH_AUTH_TOKEN_FILE-}" ] ||
        printf 'Authorization: Bearer %s\n' "$(cat "$LATCH_AUTH_TOKEN_FILE")"
}

# The collector may read at any time, and only names that end in .prom: the text is written beside the
# file, under a name that nobody can foresee, and then takes its place in one step.
staged=$(mktemp "$file.XXXXXX")
trap 'rm -f "$staged"' EXIT
trap 'exit 1' HUP INT TERM
chmod 644 "$staged"

status=0
metrics=$(header | curl --silent --show-error --fail --max-time 10 --header @- "$url") || status=$?
if [ "$status" != 0 ]; then
    metrics='# HELP latchd_up Whether the server gave its counters.
# TYPE latchd_up gauge
latchd_up 0'
fi

# On a full disk this fails, and the last metrics stay; the collector has their age.
printf '%s\n' "$metrics" >"$staged"
mv -fT "$staged" "$file"
exit "$status"
