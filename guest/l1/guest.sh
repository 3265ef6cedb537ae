#!/bin/busybox sh
# PID 1 of a small Debian guest in L1: no disk, no network, one shared folder by 9p. Jobs arrive there as in L1: FOLDER/1.sh,
# FOLDER/2.sh and so on are run as they appear; the output goes to NUMBER.out, the exit status to NUMBER.status.
/bin/busybox mkdir -p /proc /sys /dev /bin /run /folder
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
for module in /modules/*.ko; do
    insmod "$module" || echo "guest: $module is not loaded"
done
mount -t 9p -o trans=virtio,version=9p2000.L,cache=none folder /folder || echo "guest: no folder"
echo up >/folder/up
number=1
while :; do
    if [ -e "/folder/$number.sh" ]; then
        setsid sh -c "sh /folder/$number.sh >/folder/$number.out 2>&1
            echo \$? >/folder/$number.end; mv /folder/$number.end /folder/$number.status" &
        number=$((number + 1))
    else
        usleep 100000
    fi
done
