#!/bin/sh
# image.sh POSTGRES FOLDER IMAGE: makes IMAGE, a root disk with this host's PostgreSQL (POSTGRES is its folder, /usr/lib/postgresql/15 for example) and a
# database for pgbench, and nothing else. FOLDER is for its files, and has init.sh. As root.
set -eu
postgres=$1 root=$2 image=$3
cd "$root"
mkdir -p bin sbin proc sys dev run tmp etc data usr/share/postgresql
for program in "$postgres/bin/postgres" "$postgres/bin/initdb" "$postgres/bin/pgbench" "$postgres/bin/pg_isready" /usr/bin/setpriv; do
    echo "$program"
    ldd "$program" | grep -o '/[^ ]*'
done | sort -u >files
while read -r file; do
    mkdir -p "$root/$(dirname "$file")"
    cp -L "$file" "$root/$file"
done <files
rm files
cp -a "$postgres/lib" "$root/$postgres/"
rm -rf "$root/$postgres/lib/bitcode"
cp -a "/usr/share/postgresql/${postgres##*/}" usr/share/postgresql/
ln -s "$postgres" postgres
cp "$(command -v busybox)" bin/busybox
ln -s busybox bin/sh
mv init.sh sbin/ioplane-init
chmod 755 sbin/ioplane-init
printf 'root:x:0:0::/:/bin/sh\npostgres:x:70:70::/data:/bin/sh\n' >etc/passwd
mknod dev/null c 1 3
chmod 666 dev/null
chmod 1777 tmp
chown 70:70 data
chmod 700 data

as="chroot $root /usr/bin/setpriv --reuid=70 --regid=70 --clear-groups"
export LC_ALL=C TZ=GMT
$as /postgres/bin/initdb -D /data -A trust -U postgres --no-locale -E UTF8 --no-sync
cat >>data/postgresql.conf <<'END'
listen_addresses = ''
unix_socket_directories = '/tmp'
shared_buffers = 32MB
jit = off
timezone = 'GMT'
log_timezone = 'GMT'
END
$as /postgres/bin/postgres -D /data -c fsync=off -c dynamic_shared_memory_type=mmap &
server=$!
trap 'kill -INT $server; wait $server || true' EXIT
trap 'exit 1' INT TERM HUP
tries=0
until $as /postgres/bin/pg_isready -q -h /tmp; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] || { echo "the server does not answer"; exit 1; }
    sleep 0.1
done
$as /postgres/bin/pgbench -h /tmp -U postgres -i -s 2 -q postgres
kill -INT $server
wait $server
trap - EXIT INT TERM HUP
truncate -s 512M "$image"
# The initial RAM disk finds it by this name.
mke2fs -q -t ext4 -L ioplane-root -d "$root" "$image"
