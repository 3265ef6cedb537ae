#!/bin/busybox sh
# First program of a test guest: finds the root file system by its label, wherever its disk is, and goes there.
bb=/bin/busybox
$bb mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
# Drivers that this kernel does not have built in, each after what it needs.
for module in /modules/*.ko; do
    $bb insmod "$module" || echo "ioplane-initrd: $module cannot be loaded"
done
tries=0
until device=$($bb findfs LABEL=ioplane-root 2>/dev/null); do
    tries=$((tries + 1))
    if [ $((tries % 100)) = 0 ]; then
        echo "ioplane-initrd: no disk has a file system labelled ioplane-root yet; block devices:"
        $bb ls /dev | $bb grep -E '^(vd|sd|nvme)'
    fi
    $bb usleep 20000
done
echo "ioplane-initrd: root on $device"
$bb mount -t ext4 "$device" /root || { echo "ioplane-initrd: mount failed"; $bb poweroff -f; }
$bb mount -o move /dev /root/dev
exec $bb switch_root /root /sbin/ioplane-init
