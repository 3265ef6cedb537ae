#!/bin/busybox sh
# PID 1 of L1, a KVM host inside a translated or nested machine. The outer machine's root is mounted read-only, so
# that whatever was built outside runs here with nothing copied; one folder of it can be written. Then jobs: a number comes
# by the second serial port, FOLDER/NUMBER.sh is run, its output goes to FOLDER/NUMBER.out, "done NUMBER STATUS" goes back.
/bin/busybox mkdir -p /proc /sys /dev /host /bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
word() { sed -n "s|.*$1=\([^ ]*\).*|\1|p" /proc/cmdline; }
for module in /modules/*.ko; do
    insmod "$module" || echo "l1: $module is not loaded"
done
folder=$(word l1.folder)
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,ro,cache=loose host /host || echo "l1: no root"
# What is needed may lie below a folder that is to be L1's own.
modules=$(word l1.modules)
number=0
for place in $(word l1.see | tr , ' '); do
    mkdir -p /seen/$number
    mount --bind "/host$place" /seen/$number || echo "l1: no $place"
    number=$((number + 1))
done
for kind in tmpfs:/tmp tmpfs:/run proc:/proc sysfs:/sys devtmpfs:/dev debugfs:/sys/kernel/debug tracefs:/sys/kernel/tracing; do
    mount -t "${kind%%:*}" l1 "/host${kind#*:}" || echo "l1: no ${kind#*:}"
done
number=0
for place in $(word l1.see | tr , ' '); do
    [ -d "/host$place" ] || mkdir -p "/host$place"
    mount --bind /seen/$number "/host$place"
    number=$((number + 1))
done
mkdir -p /host/dev/pts /host/dev/shm
mount -t devpts l1 /host/dev/pts
mount -t tmpfs l1 /host/dev/shm
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=none folder "/host$folder" || echo "l1: no folder"
ifconfig lo 127.0.0.1 up
hostname l1
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
for module in $(word l1.load | tr , ' '); do
    chroot /host /usr/sbin/modprobe -d "$modules" "$module" || echo "l1: $module is not loaded"
done
echo up >"/host$folder/up"
number=1
while :; do
    if [ -e "/host$folder/$number.sh" ]; then
        setsid sh -c "echo \$\$ >/host$folder/$number.pid
            chroot /host /bin/sh $folder/$number.sh >/host$folder/$number.out 2>&1 </dev/null
            echo \$? >/host$folder/$number.end; mv /host$folder/$number.end /host$folder/$number.status" &
        number=$((number + 1))
    else
        usleep 50000
    fi
done
