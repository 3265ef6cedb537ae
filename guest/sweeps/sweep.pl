#!/usr/bin/perl
# What `script/bench exits-sweeps` has a guest do, counted by its host. Needs nothing but Perl itself.
#     perl sweep.pl follow HOST PORT           in the guest, until it is killed: connects, and does what the host asks for
#     perl sweep.pl lead PORT LINE TEST...     on the host: has the guest do each TEST, and prints a line for each
# A line has: ns by the guest's clock, units, interrupts of the guest in lines of /proc/interrupts that match LINE; then, for each of
# @COUNTERS, how KVM's counters of all guests have grown meanwhile. A TEST is KIND:BYTES:UNITS:
#     tcp-rr, udp-rr          so many messages, each answered by one of as many bytes
#     tcp-stream, udp-stream  so many messages out of the guest; of UDP, those that have arrived are the units
#     write=DEVICE            two writers, each half of the blocks, past the cache, 64 MiB apart
use strict;
use warnings;
use Fcntl;
use Socket qw(:DEFAULT IPPROTO_TCP TCP_NODELAY);

my @COUNTERS = qw(exits io_exits mmio_exits halt_exits);
# Linux's numbers for x86-64.
use constant { CLOCK_GETTIME => 228, CLOCK_MONOTONIC => 1, O_DIRECT => 040000 };
# How long the other end may take, in seconds: both may be translated.
use constant PATIENCE => 60;
use constant APART => 64 << 20;

sub now {
    my $time = pack 'qq', 0, 0;
    syscall CLOCK_GETTIME, CLOCK_MONOTONIC, $time;
    my ($seconds, $ns) = unpack 'qq', $time;
    return $seconds * 1_000_000_000 + $ns;
}

sub get {
    my ($from, $bytes) = @_;
    while ($bytes > 0) {
        my $got = sysread $from, my $part, $bytes < 65536 ? $bytes : 65536;
        die "the other end is gone\n" unless $got;
        $bytes -= $got;
    }
}

sub put {
    my ($to, $bytes) = @_;
    my $data = 'x' x $bytes;
    my $done = 0;
    while ($done < $bytes) {
        $done += syswrite($to, $data, $bytes - $done, $done) // die "send: $!\n";
    }
}

# A line, and no byte behind it; nothing at the end.
sub line {
    my ($from) = @_;
    my $line = '';
    while (sysread $from, my $byte, 1) {
        return $line if $byte eq "\n";
        $line .= $byte;
    }
    return undef;
}

sub readable {
    my ($seconds, @handles) = @_;
    my $wanted = '';
    vec($wanted, fileno $_, 1) = 1 for @handles;
    select my $ready = $wanted, undef, undef, $seconds;
    return grep { vec $ready, fileno $_, 1 } @handles;
}

sub udp {
    my ($port) = @_;
    socket my $socket, PF_INET, SOCK_DGRAM, 0 or die "socket: $!\n";
    bind $socket, sockaddr_in($port, INADDR_ANY) or die "bind: $!\n";
    return $socket;
}

# Sends a datagram, at least as long as its head, until its own answer comes back; what the answer has behind that head.
my $asked = 0;
sub ask {
    my ($socket, $what, $bytes, $to) = @_;
    my $head = sprintf '%s%08d', $what, ++$asked % 1e8;
    my $data = $head . ($bytes > length $head ? 'x' x ($bytes - length $head) : '');
    my $end = now() + PATIENCE * 1e9;
    while (now() < $end) {
        send $socket, $data, 0, $to // die "send: $!\n";
        # The answer to an earlier one may have been late.
        while (readable(1, $socket)) {
            recv $socket, my $answer, 65536, 0;
            return substr $answer, length $head if index($answer, $head) == 0;
        }
    }
    die "no datagram comes back\n";
}

# Blocks of a device, two writers at once.
sub write_blocks {
    my ($device, $bytes, $blocks) = @_;
    my $buffer = 'x' x ($bytes + 4096);
    # Such writes need a buffer that begins at a sector.
    my $offset = -unpack('J', pack 'P', $buffer) & 4095;
    my @writers;
    for my $writer (0, 1) {
        my $child = fork // die "fork: $!\n";
        push @writers, $child and next if $child;
        sysopen my $disk, $device, O_WRONLY | O_DIRECT or die "$device: $!\n";
        sysseek $disk, $writer * APART, 0;
        for (1 .. $blocks / 2) {
            my $done = syswrite $disk, $buffer, $bytes, $offset;
            die "$device: $!\n" unless defined $done && $done == $bytes;
        }
        require POSIX;
        POSIX::_exit(0);
    }
    for (@writers) {
        waitpid $_, 0;
        die "a writer has failed\n" if $?;
    }
}

sub interrupts {
    my ($lines) = @_;
    my $sum = 0;
    open my $file, '<', '/proc/interrupts' or die "/proc/interrupts: $!\n";
    while (<$file>) {
        next unless /$lines/;
        $sum += $1 if /^\s*\w+:\s+(\d+)/;
    }
    return $sum;
}

# In the guest: one test; how many units.
sub follow_one {
    my ($tcp, $udp, $to, $kind, $bytes, $units) = @_;
    if ($kind eq 'tcp-rr') {
        for (1 .. $units) { put($tcp, $bytes); get($tcp, $bytes) }
    } elsif ($kind eq 'tcp-stream') {
        for (1 .. $units) { put($tcp, $bytes) }
        get($tcp, 1);
    } elsif ($kind eq 'udp-rr') {
        for (1 .. $units) { ask($udp, 'e', $bytes, $to) }
    } elsif ($kind eq 'udp-stream') {
        my $data = 's' x $bytes;
        my $before = ask($udp, 'q', 0, $to);
        for (1 .. $units) { send $udp, $data, 0, $to }
        $units = ask($udp, 'q', 0, $to) - $before;
    } elsif ($kind =~ /^write=(.*)/) {
        write_blocks($1, $bytes, $units);
    } else {
        die "nobody knows $kind\n";
    }
    return $units;
}

sub follow {
    my ($host, $port) = @_;
    my $to = sockaddr_in($port, inet_aton($host));
    while (1) {
        socket my $tcp, PF_INET, SOCK_STREAM, 0 or die "socket: $!\n";
        unless (connect $tcp, $to) {
            select undef, undef, undef, 0.1;
            next;
        }
        my $udp = udp(0);
        setsockopt $tcp, IPPROTO_TCP, TCP_NODELAY, 1;
        while (defined(my $test = line($tcp))) {
            my ($lines, $kind, $bytes, $units) = split / /, $test;
            my $before = interrupts($lines);
            my $begun = now();
            $units = follow_one($tcp, $udp, $to, $kind, $bytes, $units);
            my $answer = join ' ', now() - $begun, $units, interrupts($lines) - $before;
            syswrite $tcp, "$answer\n";
        }
    }
}

sub counters {
    return map {
        my $sum = 0;
        for my $path (glob "/sys/kernel/debug/kvm/*-*/$_") {
            open my $file, '<', $path or next;
            $sum += <$file>;
        }
        $sum;
    } @COUNTERS;
}

# On the host: the other side of one test; what the guest says of it.
sub lead_one {
    my ($tcp, $udp, $kind, $bytes, $units) = @_;
    if ($kind eq 'tcp-rr') {
        for (1 .. $units) { get($tcp, $bytes); put($tcp, $bytes) }
    } elsif ($kind eq 'tcp-stream') {
        get($tcp, $bytes * $units);
        put($tcp, 1);
    } elsif ($kind =~ /^udp/) {
        my $arrived = 0;
        # Until the guest says by the other connection that it has all.
        while (my @ready = readable(PATIENCE, $tcp, $udp)) {
            last if $ready[0] == $tcp;
            my $from = recv $udp, my $data, 65536, 0;
            my $what = substr $data, 0, 1;
            $arrived++ if $what eq 's';
            send $udp, $data, 0, $from if $what eq 'e';
            send $udp, $data . $arrived, 0, $from if $what eq 'q';
        }
    }
    return line($tcp) // die "the guest is gone\n";
}

sub lead {
    my ($port, $lines, @tests) = @_;
    socket my $listener, PF_INET, SOCK_STREAM, 0 or die "socket: $!\n";
    setsockopt $listener, SOL_SOCKET, SO_REUSEADDR, 1;
    bind $listener, sockaddr_in($port, INADDR_ANY) or die "bind: $!\n";
    listen $listener, 1;
    my $udp = udp($port);
    $SIG{ALRM} = sub { die "the guest takes too long\n" };
    alarm PATIENCE;
    accept my $tcp, $listener or die "accept: $!\n";
    setsockopt $tcp, IPPROTO_TCP, TCP_NODELAY, 1;
    for my $test (@tests) {
        alarm PATIENCE;
        my @test = split /:/, $test;
        my @before = counters();
        syswrite $tcp, join(' ', $lines, @test) . "\n";
        my $said = lead_one($tcp, $udp, @test);
        my @after = counters();
        print join(' ', $said, map { $after[$_] - $before[$_] } 0 .. $#before), "\n";
    }
}

my ($role, @words) = @ARGV;
if (($role // '') eq 'follow') { follow(@words) }
elsif (($role // '') eq 'lead') { lead(@words) }
else { die "usage: sweep.pl follow HOST PORT, or: sweep.pl lead PORT LINE TEST...\n" }
