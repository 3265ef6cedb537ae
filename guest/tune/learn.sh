#!/bin/sh
# What `ioplane exits learn` reads in a guest, and changes nothing: the kernel's functions, and which ports and addresses its devices have.
# POSIX sh, and grep if there is one, for a third fewer bytes; run as root, since Linux hides addresses from others.
set -u
proc=${IOPLANE_TUNE_PROC:-/proc}

fail() {
    echo "learn: $*" >&2
    exit 1
}

[ "$*" = "read all" ] || fail "usage: learn.sh read all"
echo "== kallsyms"
grep -i '^[0-9a-f]* [twi] ' "$proc/kallsyms" || cat "$proc/kallsyms" || fail "this guest has no $proc/kallsyms (CONFIG_KALLSYMS)"
for part in iomem ioports; do
    echo "== $part"
    cat "$proc/$part" || fail "$proc/$part cannot be read"
done
echo "== end"
