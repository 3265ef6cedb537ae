#!/bin/sh
# What `ioplane exits callers` does inside a guest. POSIX sh and nothing else; run as root:
#     sh callers.sh FUNCTION[,FUNCTION...] SECONDS
# counts who calls these functions of the guest's kernel within that time. For each a kprobe, whose stacks are counted in the kernel
# (a histogram in an instance of tracefs that is ours); all of it is gone at the end, however this ends. What a killed one has left
# is removed by the next: its name says until when it was needed.
#
# Functions that are not compiled for tracing take no kprobe. Where there is perl they get a breakpoint of the processor, by perf_event_open:
# four are free on x86, and they are gone with the program that has set them.
set -u
tracing=/sys/kernel/tracing
mounted=
made=
probes=0
sleeping=
looking=
points=

fail() {
    echo "callers: $*" >&2
    exit 1
}

finish() {
    trap '' INT TERM HUP
    for child in $sleeping $looking; do
        kill "$child" 2>/dev/null
    done
    [ -z "$made" ] || rmdir "$ours"
    while [ "$probes" -gt 0 ]; do
        probes=$((probes - 1))
        # One that was refused is not there.
        echo "-:$group/f$probes" 2>/dev/null >>"$tracing/kprobe_events"
    done
    [ -z "$mounted" ] || { umount "$mounted" && rmdir "$mounted"; }
}

# Whether a name of ours is past its time.
old() {
    until=${1#ioplane_}
    [ "${until%%_*}" -lt "$now" ] 2>/dev/null
}

sweep() {
    for left in "$tracing"/instances/ioplane_*; do
        [ ! -d "$left" ] || ! old "${left##*/}" || rmdir "$left"
    done
    sed -n 's|^p[^:]*:\(ioplane_[^/]*\)/\([^ ]*\) .*|\1 \2|p' "$tracing/kprobe_events" | while read -r left event; do
        ! old "$left" || echo "-:$left/$event" >>"$tracing/kprobe_events"
    done
}

# count FOLDER: the stacks of the event there; the key's name has changed once.
count() {
    for key in common_stacktrace stacktrace; do
        histogram=hist:keys=$key:sort=hitcount.descending:size=4096
        echo "$histogram" >"$1/trigger" && return
    done 2>/dev/null
    return 1
}

# address FUNCTION: where it begins, if there is one of that name only, and the kernel tells.
address() {
    name=$(echo "${1##*:}" | sed 's/\./\\./g')
    module=
    case $1 in *:*) module="[[:space:]]\[${1%%:*}\]" ;; esac
    found=$(sed -n "s/^\([0-9a-f]*\) [tTwW] $name$module\$/\1/p" /proc/kallsyms)
    case $found in '' | *[!0-9a-f]*) return 1 ;; esac
    case $found in *[!0]*) echo "$found" ;; *) return 1 ;; esac
}

[ $# = 2 ] || fail "usage: callers.sh FUNCTION[,FUNCTION...] SECONDS"
# Whoever listened may be gone at the end: then there is all the more to be removed.
trap '' PIPE
trap finish EXIT
trap 'exit 130' INT TERM HUP
if [ ! -e "$tracing/kprobe_events" ]; then
    # A place of our own: nobody else's mount is ours to end.
    tracing=$(mktemp -d) || fail "no place to mount tracefs"
    mount -t tracefs ioplane "$tracing" 2>/dev/null && mounted=$tracing || rmdir "$tracing"
    [ -e "$tracing/kprobe_events" ] || fail "this guest has no kprobe events: no tracefs, no kprobes, locked down, or not root"
fi
now=$(date +%s)
sweep
name=0
until
    group=ioplane_$((now + $2 + 60))_$$_$name
    ours=$tracing/instances/$group
    mkdir "$ours" 2>/dev/null
do
    name=$((name + 1))
    [ "$name" -lt 9 ] || fail "$ours cannot be made; be root"
done
made=yes
for function in $(echo "$1" | tr , ' '); do
    number=$probes
    probes=$((probes + 1))
    # One that is not compiled for tracing, that has its name with others, or that is not there.
    if ! echo "p:$group/f$number $function" 2>/dev/null >>"$tracing/kprobe_events"; then
        if [ "$(uname -m)" = x86_64 ] && command -v perl >/dev/null && at=$(address "$function"); then
            points="$points $number:$at:$function"
        else
            echo "refused $function"
        fi
        continue
    fi
    count "$ours/events/$group/f$number" || fail "this guest's kernel has no histograms of stacks (CONFIG_HIST_TRIGGERS)"
    echo "probe $number $function"
done
# A shell that sleeps itself hears of nothing until it wakes.
sleep "$2" &
sleeping=$!
if [ -n "$points" ]; then
    # Unquoted: each is a word of its own.
    perl - "$2" $points <<'BREAKPOINTS' &
use strict;
use warnings;
no warnings 'portable';
# Numbers of x86-64 and structures of linux/perf_event.h.
my ($READ, $MMAP, $MUNMAP, $PERF_EVENT_OPEN) = (0, 9, 11, 298);
my ($BREAKPOINT, $CALLCHAIN, $EXECUTE, $SAMPLE) = (5, 0x20, 4, 9);
my ($HEAD, $TAIL, $PAGE) = (1024, 1032, 4096);
# So many stacks of a function are told apart, and so many lines are written of them.
my ($STACKS, $LINES) = (4096, 200);
my ($seconds, @points) = @ARGV;
$| = 1;

open(my $online, '<', '/sys/devices/system/cpu/online') or die "callers: processors: $!\n";
my @cpus = map { /(\d+)-(\d+)/ ? $1 .. $2 : int } split /,/, <$online>;
# All rings have room for 64 MiB at most.
my $pages = 64;
$pages /= 2 while $pages > 1 && @cpus * @points * $pages > 16384;
my $size = $pages * $PAGE;
pipe(my $from, my $into) or die "callers: pipe: $!\n";

sub bytes { my ($at, $length) = @_; return unpack("P$length", pack('Q', $at)) }

# Returns the event's descriptor and its ring's address.
sub watch {
    my ($address, $cpu) = @_;
    # Off at first, nothing of user space, no frames of it either.
    my $flags = 1 | 1 << 4 | 1 << 22;
    my $attr = pack('L2 Q5 L2 Q2', $BREAKPOINT, 72, 0, 1, $CALLCHAIN, 0, $flags, 0, $EXECUTE, $address, 8);
    my $event = syscall($PERF_EVENT_OPEN, $attr, -1, $cpu, -1, 8);
    return if $event < 0;
    # perl closes it when this goes.
    open(my $file, '<&=', $event) or return;
    my $ring = syscall($MMAP, 0, $size + $PAGE, 3, 1, $event, 0);
    return if $ring == -1;
    return { file => $file, ring => $ring, tail => 0 };
}

my @watched;
for my $point (@points) {
    my ($number, $address, $name) = split /:/, $point, 3;
    my @events = map { watch(hex $address, $_) } @cpus;
    if (@events < @cpus) {
        # What is mapped would stay.
        syscall($MUNMAP, $_->{ring}, $size + $PAGE) for @events;
        print "refused $name\n";
        next;
    }
    print "breakpoint $number $name\n";
    push @watched, { number => $number, events => \@events, stacks => {}, samples => 0, kept => 0 };
}
exit unless @watched;
# PERF_EVENT_IOC_ENABLE and PERF_EVENT_IOC_DISABLE.
my $switch = sub { my $how = shift; ioctl($_->{file}, $how, 0) for map { @{$_->{events}} } @watched };

sub drain {
    my ($point, $event) = @_;
    my ($ring, $tail) = @$event{'ring', 'tail'};
    my $head = unpack('Q', bytes($ring + $HEAD, 8));
    return if $head == $tail;
    my $length = $head - $tail;
    my $at = $tail % $size;
    my $first = $at + $length > $size ? $size - $at : $length;
    my $data = bytes($ring + $PAGE + $at, $first);
    $data .= bytes($ring + $PAGE, $length - $first) if $length > $first;
    # The kernel may write there again: perl stores to memory by having it read from a pipe.
    syswrite($into, pack('Q', $head));
    syscall($READ, fileno($from), $ring + $TAIL, 8);
    $event->{tail} = $head;
    for (my $next = 0; $next + 8 <= $length;) {
        my ($kind, undef, $bytes) = unpack('LSS', substr($data, $next, 8));
        last if $bytes < 8;
        if ($kind == $SAMPLE) {
            my $stack = substr($data, $next + 16, $bytes - 16);
            my $stacks = $point->{stacks};
            if (exists $stacks->{$stack} || keys %$stacks < $STACKS) {
                $stacks->{$stack}++;
                $point->{kept}++;
            }
        }
        $next += $bytes;
    }
}
# Whole seconds would be up to one too few.
sub now {
    open(my $uptime, '<', '/proc/uptime') or die "callers: uptime: $!\n";
    return (split ' ', <$uptime>)[0];
}

sub drain_all { for my $point (@watched) { drain($point, $_) for @{$point->{events}} } }

$switch->(0x2400);
my $end = now() + $seconds;
while (now() < $end) {
    select(undef, undef, undef, 0.02);
    drain_all();
}
$switch->(0x2401);
drain_all();

my %wanted;
for my $point (@watched) {
    my @most = sort { $point->{stacks}{$b} <=> $point->{stacks}{$a} || $a cmp $b } keys %{$point->{stacks}};
    $point->{most} = \@most;
}
my (@starts, @names);
open(my $kallsyms, '<', '/proc/kallsyms') or die "callers: kallsyms: $!\n";
my @symbols;
while (<$kallsyms>) {
    push @symbols, [hex $1, $2 . (defined $3 ? " $3" : '')] if /^(\S+) [tTwW] (\S+)(?:\s+(\[\S+\]))?/;
}
@symbols = sort { $a->[0] <=> $b->[0] } @symbols;

# function+0xoffset [module], as stacks of the kernel have it.
sub place {
    my $address = shift;
    my ($low, $high) = (0, scalar @symbols);
    while ($low < $high) {
        my $middle = int(($low + $high) / 2);
        if ($symbols[$middle][0] <= $address) { $low = $middle + 1 } else { $high = $middle }
    }
    return sprintf('0x%x', $address) unless $low;
    my ($start, $name) = @{$symbols[$low - 1]};
    my $offset = sprintf '+0x%x', $address - $start;
    $name =~ s/( \[|$)/$offset$1/;
    return $name;
}

for my $point (@watched) {
    my $calls = 0;
    for my $event (@{$point->{events}}) {
        my $count = '';
        $calls += unpack('Q', $count) if (sysread($event->{file}, $count, 8) // 0) == 8;
    }
    # A function that is called too often is sampled by perf's limits, and a ring may be full: the event itself counts all.
    my $dropped = $calls > $point->{kept} ? $calls - $point->{kept} : 0;
    print "histogram $point->{number}\nTotals:\n    Hits: $point->{kept}\n    Dropped: $dropped\n";
    my $lines = 0;
    for my $stack (@{$point->{most}}) {
        last if $lines >= $LINES;
        # Marks of the kind of what follows are no addresses.
        my @frames = grep { $_ < 0xfffffffffffff000 } unpack('Q*', $stack);
        # What returns to an address has called just before it.
        my $first = shift @frames;
        print "{ stacktrace:\n";
        printf "    %s\n", $_ for map({ place($_) } grep { defined } $first), map { place($_ - 1) } @frames;
        print "} hitcount: $point->{stacks}{$stack}\n";
        $lines += @frames + 3;
    }
}
BREAKPOINTS
    looking=$!
fi
wait $sleeping
number=0
while [ "$number" -lt "$probes" ]; do
    trigger=$ours/events/$group/f$number/trigger
    number=$((number + 1))
    # ">" would begin with removing it.
    [ ! -e "$trigger" ] || echo "$histogram:pause" >>"$trigger" || fail "the histogram cannot be paused"
done
# What kprobes have counted is not lost by it.
if [ -n "$looking" ] && ! wait $looking; then
    for point in $points; do echo "refused ${point#*:*:}"; done
fi
number=0
while [ "$number" -lt "$probes" ]; do
    event=$ours/events/$group/f$number
    if [ -e "$event/hist" ]; then
        echo "histogram $number"
        # What is long is cut: the sums come first, and are of what comes then.
        tail -n 6 "$event/hist" || fail "the histogram cannot be read"
        head -n 200 "$event/hist"
    fi
    number=$((number + 1))
done
