#!/bin/sh
# What `ioplane exits callers` does inside a guest. POSIX sh and nothing else; run as root:
#     sh callers.sh FUNCTION[,FUNCTION...] SECONDS
# counts who calls these functions of the guest's kernel within that time. For each a kprobe, whose stacks are counted in the kernel
# (a histogram in an instance of tracefs that is ours); all of it is gone at the end, however this ends. What a killed one has left
# is removed by the next: its name says until when it was needed.
set -u
tracing=/sys/kernel/tracing
mounted=
made=
probes=0
sleeping=

fail() {
    echo "callers: $*" >&2
    exit 1
}

finish() {
    trap '' INT TERM HUP
    [ -z "$sleeping" ] || kill "$sleeping" 2>/dev/null
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
        echo "refused $function"
        continue
    fi
    count "$ours/events/$group/f$number" || fail "this guest's kernel has no histograms of stacks (CONFIG_HIST_TRIGGERS)"
    echo "probe $number $function"
done
# A shell that sleeps itself hears of nothing until it wakes.
sleep "$2" &
sleeping=$!
wait $sleeping
number=0
while [ "$number" -lt "$probes" ]; do
    event=$ours/events/$group/f$number
    if [ -e "$event/hist" ]; then
        echo "histogram $number"
        # What is long is cut: the sums come first, and are of what comes then. (">" would begin with removing it.)
        echo "$histogram:pause" >>"$event/trigger" || fail "the histogram cannot be paused"
        tail -n 6 "$event/hist" || fail "the histogram cannot be read"
        head -n 200 "$event/hist"
    fi
    number=$((number + 1))
done
