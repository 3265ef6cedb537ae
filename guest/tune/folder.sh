#!/bin/sh
# sh folder.sh DIR: in a guest, as root, does what `ioplane exits apply --directory` puts into a directory that the guest shares
# with its host (9p, virtiofs). Whoever can write there on the host becomes root in the guest: that is what it is for. Each
# job NAME.tune becomes NAME.taken, so that the host cannot take it back any more, and is run once; its words go to
# NAME.said and NAME.error, its exit status to NAME.status.
folder=${1:?sh folder.sh DIR}
while :; do
    for job in "$folder"/*.tune; do
        [ -f "$job" ] || continue
        name=${job%.tune}
        mv "$job" "$name.taken" 2>/dev/null || continue
        sh "$name.taken" >"$name.said" 2>"$name.error" </dev/null
        echo $? >"$name.half"
        rm -f "$name.taken"
        mv "$name.half" "$name.status"
    done
    sleep "${IOPLANE_TUNE_PERIOD:-1}"
done
