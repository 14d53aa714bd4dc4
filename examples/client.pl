#!/usr/bin/env perl
# Runs a command under a lock: client.pl KEY COMMAND [ARGUMENT ...]
use strict;
use warnings;
use IO::Socket::INET;
use POSIX qw(WNOHANG);
use Socket qw(IPPROTO_TCP TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT SOL_SOCKET SO_KEEPALIVE);

my ($host, $port, $wait, $lease) = ("localhost", 6388, 10, 30);    # seconds
my $margin = $lease < 8 ? $lease / 4 : 2;    # stop relying on the lock this long before its end
my ($key, @command) = @ARGV > 1 ? @ARGV : die "usage: client.pl KEY COMMAND [ARGUMENT ...]\n";
my ($socket, $token, $ends, $due);
my ($renewal, $is_adopted) = ("n", 1);

# The time since boot, which counts the time in which the host is suspended.
sub now { open(my $uptime, "<", "/proc/uptime") or die "no /proc\n"; (split ' ', <$uptime>)[0] }

sub nap { select(undef, undef, undef, 0.1) }

# The words of the reply, and none if the server does not answer in time.
sub ask {
    my ($command, $argument, $patience) = @_;
    my ($line, $deadline) = ("", now() + ($patience > 0.1 ? $patience : 0.1));
    syswrite($socket, "$command\n$key\n$argument\n") or return;
    while ($line !~ /\n/) {
        my ($left, $ready) = ($deadline - now(), "");
        vec($ready, fileno $socket, 1) = 1;
        return unless $left > 0 && select($ready, undef, undef, $left) > 0;
        sysread($socket, $line, 1024, length $line) or return;
    }
    return split ' ', $line;
}

sub connect_within {
    $socket = IO::Socket::INET->new(PeerAddr => $host, PeerPort => $port, Timeout => $_[0]);
    return unless $socket;
    setsockopt($socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    setsockopt($socket, IPPROTO_TCP, $_->[0], $_->[1])
        for [TCP_KEEPIDLE, 15], [TCP_KEEPINTVL, 5], [TCP_KEEPCNT, 3];
    ask("hello", "adopt", $_[0]);    # "error" from a server that does not know it
}

# Renews the lease when it is time. After a failure, adopts the lock over a new connection.
sub is_held {
    my $sent = now();
    if ($due <= $sent && $sent < $ends) {
        my $patience = $ends - $sent < 1 ? $ends - $sent : 1;
        # From now on, in case an earlier request arrives late.
        unless ($socket) { $renewal = "adopt"; connect_within($patience) }
        my ($word) = $socket ? ask($renewal, "$token $lease", $patience) : ();
        if (!defined $word) { ($socket, $is_adopted, $due) = (undef, 0, now() + 0.2) }
        elsif ($word eq "error") { $ends = 0 }    # lost
        elsif ($word eq "ok") {    # renew once more right after an adoption
            ($ends, $due) = ($sent + $lease - $margin, $sent + $is_adopted * $lease / 3);
            $is_adopted = 1;
        }
    }
    return now() < $ends;
}

$SIG{PIPE} = "IGNORE";
connect_within(5) or die "cannot connect to $host:$port\n";
(my $word, $token) = ask("l", "$wait $lease", $wait + 5);
die "$key: ", $word // "no answer", "\n" if ($word // "") ne "ok";
($ends, $due) = (now() + $lease - $margin, now());    # renews at once: the wait is not counted
# Fences are compared as text: Perl would round them as numbers.
die "the lock is outdated\n" if substr($token, 0, 16) lt ($ENV{LAST_FENCE} // "");
$ENV{TOKEN} = $token;
my $child = fork // die "fork: $!\n";
if ($child == 0) {
    $SIG{PIPE} = "DEFAULT";
    exec { $command[0] } @command or die "$command[0]: $!\n";
}
until (waitpid($child, WNOHANG)) { is_held() ? nap() : kill KILL => $child }
my $status = $? & 127 ? 128 + ($? & 127) : $? >> 8;
nap() while is_held() && !$socket;
($word) = is_held() ? ask("r", $token, 5) : ();
die "the lock was lost\n" if ($word // "") ne "ok";
exit $status;
