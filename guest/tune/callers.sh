#!/bin/sh
# What `ioplane exits callers` does inside a guest. POSIX sh and nothing else; run as root:
#     sh callers.sh FUNCTION[,FUNCTION...] SECONDS
# counts who calls these functions of the guest's kernel within that time. For each a kprobe, whose stacks are counted in the kernel
# (a histogram in an instance of tracefs that is ours); all of it is gone at the end, however this ends.
set -u
tracing=${IOPLANE_TUNE_TRACING:-/sys/kernel/tracing}
group=ioplane_$$
ours=$tracing/instances/$group
probes=0
mounted=

fail() {
    echo "callers: $*" >&2
    exit 1
}

finish() {
    trap '' INT TERM HUP
    [ ! -d "$ours" ] || rmdir "$ours"
    while [ "$probes" -gt 0 ]; do
        probes=$((probes - 1))
        echo "-:$group/f$probes" >>"$tracing/kprobe_events"
    done
    [ -z "$mounted" ] || umount "$tracing"
}

# count EVENT: its stacks; the key's name has changed.
count() {
    for key in common_stacktrace stacktrace; do
        echo "hist:keys=$key:sort=hitcount.descending:size=512" >"$1/trigger" && return
    done 2>/dev/null
    return 1
}

[ $# = 2 ] || fail "usage: callers.sh FUNCTION[,FUNCTION...] SECONDS"
trap finish EXIT
trap 'exit 130' INT TERM HUP
if [ ! -e "$tracing/kprobe_events" ]; then
    mount -t tracefs ioplane "$tracing" 2>/dev/null && mounted=yes
    [ -e "$tracing/kprobe_events" ] || fail "this guest has no $tracing/kprobe_events: no tracefs, no kprobes, or locked down"
fi
mkdir "$ours" || fail "$ours cannot be made; be root"
for function in $(echo "$1" | tr , ' '); do
    # One that is part of tracing itself, or whose name is not the only one.
    if ! echo "p:$group/f$probes $function" 2>/dev/null >>"$tracing/kprobe_events"; then
        echo "refused $function"
        continue
    fi
    probes=$((probes + 1))
    count "$ours/events/$group/f$((probes - 1))" || fail "this guest's kernel has no histograms of stacks (CONFIG_HIST_TRIGGERS)"
    echo "probe $((probes - 1)) $function"
done
sleep "$2"
number=0
while [ "$number" -lt "$probes" ]; do
    echo "histogram $number"
    # The sums first: what is long is cut.
    tail -n 6 "$ours/events/$group/f$number/hist"
    head -n 200 "$ours/events/$group/f$number/hist"
    number=$((number + 1))
done
