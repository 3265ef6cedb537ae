#!/bin/sh
# What `ioplane exits apply` does inside a guest, and undoes. POSIX sh and nothing else; run as root:
#     sh tune.sh apply|undo|show clocksource|console|scheduler|napi
#     sh tune.sh work all      prints what this guest has done since it booted, and changes nothing
# What was before is kept in /run/ioplane-tune, so that it can be undone, by another run too. If one step fails, those
# of this run before it are undone at once; what earlier runs have done stays.
set -u
state=${IOPLANE_TUNE_STATE:-/run/ioplane-tune}
sys=${IOPLANE_TUNE_SYS:-/sys}
proc=${IOPLANE_TUNE_PROC:-/proc}

fail() {
    echo "tune: $*" >&2
    exit 1
}

# The one in force: of "noop [none] deadline" it is none.
chosen() {
    words=$(cat "$1") || return 1
    case $words in
    *\[*\]*) words=${words#*\[} && echo "${words%%\]*}" ;;
    *) echo "$words" ;;
    esac
}

# set_value FILE VALUE: remembers what was there, writes, and looks whether it took.
set_value() {
    before=$(chosen "$1") || return 1
    [ "${before%%[	 ]*}" = "$2" ] && echo "$1 is $2 already" && return 0
    echo "$1 $before" >>"$run" || return 1
    echo "$2" >"$1" || return 1
    after=$(chosen "$1")
    [ "${after%%[	 ]*}" = "$2" ] || return 1
    echo "$1: $before -> $2"
}

# set_all FILE VALUE...: every file takes its value, or none does.
set_all() {
    while [ $# -gt 0 ]; do
        set_value "$1" "$2" || {
            put_back "$run" || {
                keep
                fail "$1 does not take $2, and not all could be put back: $journal has the rest, for undo"
            }
            fail "$1 does not take $2; everything is as it was"
        }
        shift 2
    done
    keep
}

# What a disk calls no scheduler: noop before Linux 5.0.
no_scheduler() {
    words=$(cat "$1" 2>/dev/null)
    case " $words " in
    *" none "* | *"[none]"*) echo none ;;
    *" noop "* | *"[noop]"*) echo noop ;;
    *) echo none ;;
    esac
}

# What this run has found joins what earlier ones found. The oldest value is the one to go back to.
keep() {
    [ -e "$run" ] || return 0
    while read -r changed old; do
        known "$changed" || echo "$changed $old" >>"$journal" || fail "$journal cannot be written; $run has the rest"
    done <"$run"
    rm -f "$run"
}

# Whether the journal has a line of this file.
known() {
    [ -e "$journal" ] || return 1
    while read -r has _; do
        [ "$has" = "$1" ] && return 0
    done <"$journal"
    return 1
}

# put_back JOURNAL: and forgets it, unless something in it could not be put back.
put_back() {
    [ -e "$1" ] || return 0
    bad=0
    while read -r changed old; do
        # One that did not take its new value has the old one, and may not be writable at all.
        [ "$(chosen "$changed")" = "$old" ] && continue
        echo "$old" >"$changed" && echo "$changed: back to $old" || bad=1
    done <"$1"
    [ $bad = 0 ] && rm -f "$1"
}

undo() {
    [ -e "$journal" ] || {
        echo "nothing to undo"
        return 0
    }
    put_back "$journal" || fail "not all of $journal could be undone"
}

apply() {
    case $1 in
    clocksource)
        clock=$sys/devices/system/clocksource/clocksource0
        available=$(cat "$clock/available_clocksource") || fail "this guest has no clock sources"
        for source in kvm-clock tsc; do
            case " $available " in
            *" $source "*) set_all "$clock/current_clocksource" "$source" && return ;;
            esac
        done
        fail "neither kvm-clock nor tsc is there, only: $available"
        ;;
    console)
        [ -e "$proc/sys/kernel/printk" ] || fail "this guest has no $proc/sys/kernel/printk"
        set_all "$proc/sys/kernel/printk" 1
        ;;
    scheduler)
        set --
        # Virtio disks, and those of libata and SCSI.
        for file in "$sys"/block/[sv]d*/queue/scheduler; do
            [ -e "$file" ] && set -- "$@" "$file" "$(no_scheduler "$file")"
        done
        [ $# -gt 0 ] || fail "this guest has neither vd* nor sd* in $sys/block"
        set_all "$@"
        ;;
    napi)
        set --
        # A NIC has a device behind it; lo, bridges and tunnels have none. Twice a timer of 50 us looks for frames, then interrupts are on.
        for nic in "$sys"/class/net/*; do
            [ -e "$nic/device" ] && [ -e "$nic/napi_defer_hard_irqs" ] || continue
            set -- "$@" "$nic/gro_flush_timeout" 50000 "$nic/napi_defer_hard_irqs" 2
        done
        [ $# -gt 0 ] || fail "no NIC of this guest has napi_defer_hard_irqs, which Linux 5.8 and later have"
        set_all "$@"
        ;;
    esac
}

# Requests that disks have completed, packets that NICs have sent and received, context switches. Disks and NICs have a device behind them:
# partitions, loop devices and bridges have none, and would count twice.
work() {
    if [ -r "$proc/diskstats" ]; then
        requests=0
        while read -r _ _ name reads _ _ _ writes _ _ _ _ _ _ discards _ _ _ flushes _; do
            [ -e "$sys/block/$name/device" ] || continue
            requests=$((requests + reads + writes + ${discards:-0} + ${flushes:-0}))
        done <"$proc/diskstats"
        echo "disk_requests $requests"
    fi
    if [ -r "$proc/net/dev" ]; then
        packets=0
        while IFS=' :' read -r name _ received _ _ _ _ _ _ _ sent _; do
            [ -e "$sys/class/net/$name/device" ] || continue
            packets=$((packets + received + sent))
        done <"$proc/net/dev"
        echo "packets $packets"
    fi
    [ -r "$proc/stat" ] || return 0
    while read -r key count _; do
        [ "$key" = ctxt ] && echo "context_switches $count"
    done <"$proc/stat"
    return 0
}

[ $# = 2 ] || fail "usage: tune.sh apply|undo|show clocksource|console|scheduler|napi, or: tune.sh work all"
[ "$*" = "work all" ] && {
    work
    exit
}
case $2 in
clocksource | console | scheduler | napi) ;;
*) fail "nobody knows $2" ;;
esac
mkdir -p "$state" || fail "$state cannot be made"
journal=$state/$2
run=$journal.run
# Of a run that was cut off.
keep
case $1 in
apply) apply "$2" ;;
undo) undo ;;
show) cat "$journal" 2>/dev/null || echo "nothing was changed" ;;
*) fail "nobody knows $1" ;;
esac
