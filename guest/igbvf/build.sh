#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# Builds igbvf.ko with the patch of this folder: build.sh SOURCE HEADERS TO
# SOURCE: an unpacked linux-source of the kernel's own version. HEADERS: /lib/modules/VERSION/build. TO: a folder that is made.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$3"
cp "$1"/drivers/net/ethernet/intel/igbvf/* "$here"/ioplane_coop.[ch] "$3"
patch -s -p1 -d "$3" <"$here/igbvf.patch"
make -s -C "$2" M="$(cd "$3" && pwd)" CONFIG_IGBVF=m KCFLAGS="-Wall -Werror" modules
ls -l "$3/igbvf.ko"
