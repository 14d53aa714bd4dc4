#!/bin/sh
# Writes the counters of latchd where the textfile collector of node_exporter reads them. For cron, or
# for a timer of systemd:
#
#     * * * * * textfile_collector.sh /var/lib/prometheus/node-exporter
#
# LATCH_SERVER names the servers, and LATCH_AUTH_TOKEN_FILE a file with their auth token, see latch(1).
# The exit status is that of `latch stats`. Where a server gives no counters, its series latchd_up is 0.
set -eu

directory=${1:?usage: textfile_collector.sh DIRECTORY}
file=$directory/latchd.prom

# The collector may read at any time, and only names that end in .prom: the text is written beside the
# file, under a name that nobody can foresee, and then takes its place in one step.
staged=$(mktemp "$file.XXXXXX")
trap 'rm -f "$staged"' EXIT
trap 'exit 1' HUP INT TERM
chmod 644 "$staged"

status=0
latch stats --format prometheus >"$staged" || status=$?

# With these statuses the text is whole: 69, 76 and 77 say that a server gave no counters. With any
# other, such as 74 on a full disk, the last counters stay; the collector has their age.
case $status in
    0 | 69 | 76 | 77) mv -fT "$staged" "$file" ;;
esac
exit "$status"
