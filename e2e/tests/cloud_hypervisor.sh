#!/bin/busybox sh
# First program of the guest that Cloud Hypervisor boots. It uses a disk with a root file system, a blank disk and a NIC, and prints
# a line for each result. "TRIAL ENDS" is the last line; then the guest switches itself off.
/bin/busybox mkdir -p /proc /sys /root
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
for module in /modules/*.ko; do
    insmod "$module" || echo "TRIAL FAILS: insmod $module"
done
check() {
    echo "TRIAL: $*"
    "$@" || echo "TRIAL FAILS: $*"
}
disk() {
    for name in vda vdb vdc; do
        [ "$(cat /sys/block/$name/serial 2>/dev/null)" != "$1" ] || echo $name
    done
}
same() { [ "$(dd if="$1" bs=64k skip="$2" count=64 iflag=direct 2>/dev/null | sha256sum)" = "$(sha256sum <"$3")" ]; }

data=$(disk data)
echo "TRIAL FINDS data=$(cat /sys/block/$data/size) queues=$(ls /sys/block/$data/mq | wc -l) cache=$(cat /sys/block/$data/queue/write_cache)" \
    "discard=$([ "$(cat /sys/block/$data/queue/discard_max_bytes)" -gt 0 ] && echo yes)"
for round in 0 1 2 3 4 5 6 7; do
    dd if=/dev/urandom of=/part bs=64k count=64 2>/dev/null
    check dd if=/part of=/dev/$data bs=64k seek=$((round * 64)) oflag=direct conv=notrunc,fsync
    cp /part /part.$round
done
for round in 0 1 2 3 4 5 6 7; do
    check same /dev/$data $((round * 64)) /part.$round
done
echo "TRIAL SUM $(cat /part.[0-7] | sha256sum)"
check blkdiscard -o $((32 << 20)) -l $((8 << 20)) /dev/$data

root=$(findfs LABEL=ioplane-root)
case $root in /dev/$(disk root)?) ;; *) echo "TRIAL FAILS: the root file system is on $root" ;; esac
check mount -t ext4 $root /root
check chroot /root /usr/bin/sha256sum /usr/bin/dpkg
cp /part.0 /part.1 /root/
check umount /root
check mount -t ext4 $root /root
check cmp /part.0 /root/part.0
check cmp /part.1 /root/part.1
check umount /root

nic=$(ls /sys/bus/virtio/drivers/virtio_net/virtio*/net)
echo "TRIAL FINDS mac=$(cat /sys/class/net/$nic/address) pairs=$(ls -d /sys/class/net/$nic/queues/rx-* | wc -l)"
check ifconfig $nic 10.7.0.2 netmask 255.255.255.0 up
check ping -c 3 -w 60 10.7.0.1
check wget -q -O /fetched http://10.7.0.1:8080/file
echo "TRIAL FETCHED $(sha256sum </fetched)"
echo "TRIAL ENDS"
poweroff -f
