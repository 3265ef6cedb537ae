#!/bin/busybox sh
# PID 1 of a small Debian guest in L1: one shared folder by 9p, and, if it has a virtio disk with it, a Debian. Jobs arrive
# as in L1: FOLDER/1.sh, FOLDER/2.sh and so on are run as they appear, in the Debian if it is there; the output goes to
# NUMBER.out, the exit status to NUMBER.status.
/bin/busybox mkdir -p /proc /sys /dev /bin /run /folder /debian
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
for module in /modules/*.ko; do
    insmod "$module" || echo "guest: $module is not loaded"
done
mount -t 9p -o trans=virtio,version=9p2000.L,cache=none folder /folder || echo "guest: no folder"
enter=
if [ -b /dev/vda ]; then
    mount -t ext4 -o ro /dev/vda /debian || echo "guest: no Debian"
    for place in proc sys dev folder; do
        mount --bind /$place /debian/$place
    done
    for place in tmp run root var/tmp var/log; do
        mount -t tmpfs guest /debian/$place
    done
    mkdir -p /debian/run/sshd /debian/dev/pts /debian/dev/shm
    chmod 700 /debian/root
    mount -t devpts guest /debian/dev/pts
    enter="chroot /debian"
fi
ifconfig lo 127.0.0.1 up
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
echo up >/folder/up
number=1
while :; do
    if [ -e "/folder/$number.sh" ]; then
        setsid sh -c "$enter sh /folder/$number.sh >/folder/$number.out 2>&1 </dev/null
            echo \$? >/folder/$number.end; mv /folder/$number.end /folder/$number.status" &
        number=$((number + 1))
    else
        usleep 100000
    fi
done
