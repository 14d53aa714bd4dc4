# Makes a host of its own, with a serial device and empty lock directories, and runs a program there. To be
# run in a mount namespace of its own: nothing of it is seen outside.
#
#     unshare --mount sh serial_host.sh DIRECTORY PROGRAM [ARGUMENT ...]
set -eu
root=$1
shift

mount --make-rprivate /
mkdir "$root/dev"
mount -t tmpfs none "$root/dev"
chmod 755 "$root/dev"
for node in null zero full random urandom tty; do
    : >"$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 none "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
# What becomes the serial device: a pseudo-terminal is mounted here.
: >"$root/dev/ttyLFP0"
mount --rbind "$root/dev" /dev

mount -t tmpfs -o mode=1777 none "$(readlink -f /var/lock)"
mkdir -p /var/log/mgetty
mount -t tmpfs none /var/log/mgetty
exec "$@"
