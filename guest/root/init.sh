#!/bin/sh
# Init of a test guest: just enough for the load program, which the host talks to.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
[ -d /sys/firmware/efi ] && mount -t efivarfs efivars /sys/firmware/efi/efivars 2>/dev/null
exec </dev/null >/dev/console 2>&1
while :; do
    /usr/sbin/ioplane-load
    echo "ioplane-init: ioplane-load ended with $?; again in a second"
    sleep 1
done
