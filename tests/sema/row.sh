# Runs a command in a directory with only a lock file f, whose kind is the first argument. Prints the
# output, the errors after `! `, the status, and what is in the directory then. In the output, ME is
# this shell, NOW is the time, and OLD is two hours ago.
kind=$1; shift
now=$(date +%s); old=$((now - 7200)); start=$(cut -d ' ' -f 22 /proc/1/stat)
for name in semats file-semaphore-ts; do test -e $name || ln -s "$(command -v sema)" $name; done
PATH=$PWD:$PATH; mkdir place; cd place
case $kind in
NOTHING) lines= ;;
EMPTY) lines=; : > f ;;
TORN) lines=; printf 'pid=7\ntimest' > f ;;
MINE) lines="pid=$$ timestamp=$now tag=mine" ;;
BEATEN) lines="pid=$$ timestamp=$now x-since=1234567890" ;;
ANOTHERS) lines="pid=1 timestamp=$now" ;;
DEAD) lines="pid=99999999 timestamp=$now" ;;
STALE) lines="pid=99999999 timestamp=$old tag=gone" ;;
OLD_AND_ALIVE) lines="pid=1 timestamp=$old x-start=$start" ;;
TOKEN) lines="pid=1 timestamp=$now x-token=abc" ;;
REMOTE) lines="pid=$$ timestamp=$now x-token=abc x-host=elsewhere x-boot=b" ;;
REMOTE_STALE) lines="pid=$$ timestamp=$old x-host=elsewhere x-boot=b" ;;
REMOTE_DEAD) lines="pid=99999999 timestamp=$old x-token=k x-host=elsewhere x-boot=b" ;;
esac
test -z "$lines" || printf '%s\n' $lines > f
# `hold` does not take an input that is at its end.
echo | "$@" > ../out 2> ../err
code=$?
soon=$(seq -s '|' "$now" $((now + 20)))
normal() {
    sed -E "s/$old/OLD/g; s/([^0-9])$$([^0-9]|$)/\1ME\2/g; s/([^0-9])($soon)([^0-9]|$)/\1NOW\3/g" "$@"
}
normal ../out; sed 's/^/! /' ../err | normal; echo "= $code $(ls -A)"
cd ..; rm -r place
