#!/bin/sh
# Runs a job of cron once, although the crontabs of several hosts have it:
#
#     15 3 * * * cron_guard.sh nightly backup.sh --all
#
# The first word is the name of the job, which is the same on all hosts; the rest is its command. The
# host that comes first runs it. The others exit with 0 and print nothing, so that cron sends no mail.
# LATCH_SERVER says where the server is, see latch(1). The PATH of cron often lacks /usr/local/bin:
# set it in the table, or write whole paths.
set -eu

if [ $# -lt 2 ]; then
    echo 'usage: cron_guard.sh JOB COMMAND [ARGUMENT ...]' >&2
    exit 64
fi
job=$1
shift

# On one host a lock file does, and no server is needed: CRON_GUARD_DIR names its directory.
if [ -n "${CRON_GUARD_DIR:-}" ]; then
    exec sema run "$CRON_GUARD_DIR/cron.$job.lock" --timeout 0 -E 0 --quiet -- "$@"
fi

# Clocks differ. A job that is over before the last host has looked would be run there again, so the
# lock is kept for as many seconds at least.
export CRON_GUARD_HOLD="${CRON_GUARD_HOLD:-30}"

guarded='
    sleep "$CRON_GUARD_HOLD" &
    status=0
    "$@" || status=$?
    wait
    exit "$status"'

# A lock of latchd, for all hosts that use the same server.
exec latch run "cron.$job" --timeout 0 --busy-ok -- sh -c "$guarded" "$job" "$@"
