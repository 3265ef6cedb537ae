#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# Builds the driver igbvf or ixgbevf so that it cooperates: build.sh DRIVER SOURCE HEADERS TO
# SOURCE: an unpacked linux-source of the kernel's own version. HEADERS: /lib/modules/VERSION/build. TO: a folder that is made.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
driver=$1
ours=$here/../$driver
mkdir -p "$4"
cp "$2/drivers/net/ethernet/intel/$driver"/* "$here"/ioplane_coop.[ch] "$ours/${driver}_coop".[ch] "$4"
patch -s -p1 -d "$4" <"$ours/$driver.patch"
config=CONFIG_$(echo "$driver" | tr a-z A-Z)
make -s -C "$3" M="$(cd "$4" && pwd)" "$config=m" KCFLAGS="-Wall -Werror" modules
ls -l "$4/$driver.ko"
