#!/bin/busybox sh
# First program of a guest whose root disk is a PostgreSQL and its database: runs pgbench for ever, and says each second how many transactions there were.
bb=/bin/busybox
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t tmpfs tmp /tmp
$bb mkdir -p /dev/shm
$bb mount -t tmpfs shm /dev/shm
$bb chmod 1777 /tmp /dev/shm
exec </dev/null >/dev/console 2>&1
export LC_ALL=C TZ=GMT
# By their full names: busybox has a setpriv of its own.
as="/usr/bin/setpriv --reuid=70 --regid=70 --clear-groups"
bin=/postgres/bin
$as $bin/postgres -D /data >/tmp/postgres.log 2>&1 &
until $as $bin/pg_isready -q -h /tmp; do $bb usleep 200000; done
echo "ioplane-database: up"
$as $bin/pgbench -h /tmp -U postgres -n -c 4 -T 1000000 -P 1 postgres
echo "ioplane-database: pgbench ended with $?; the server says:"
$bb tail -n 20 /tmp/postgres.log
$bb sleep 1000000
