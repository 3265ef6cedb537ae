//! Groups that are not in `/etc/group`.

mod daemon;

use std::io::Write as _;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use daemon::TestDaemon;

/// A source of groups as LDAP's or systemd's is: a module of glibc's name service, with one group.
const MODULE: &str = r#"
#include <errno.h>
#include <grp.h>
#include <nss.h>
#include <string.h>
static char *none[] = { 0 };
enum nss_status _nss_ioplanetest_getgrnam_r(const char *name, struct group *group, char *buffer, size_t length, int *error) {
    if (strcmp(name, "ldap vms") != 0) { *error = ENOENT; return NSS_STATUS_NOTFOUND; }
    /* As one with many members: more room is asked for. */
    if (length < 20000) { *error = ERANGE; return NSS_STATUS_TRYAGAIN; }
    strcpy(buffer, name);
    group->gr_name = buffer; group->gr_passwd = buffer; group->gr_gid = 54321; group->gr_mem = none;
    return NSS_STATUS_SUCCESS;
}
"#;

#[test]
fn hole_20_groups_come_from_wherever_the_host_has_them() {
    let daemon =
        TestDaemon::new("[daemon]\nsocket_group = \"ldap vms\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: groups from the name service were NOT tested: it takes root for a mount namespace"
        );
        return;
    }
    std::fs::write(daemon.path("module.c"), MODULE).unwrap();
    std::fs::write(daemon.path("nsswitch.conf"), "group: files ioplanetest\n").unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"])
        .arg(daemon.path("libnss_ioplanetest.so.2"))
        .arg(daemon.path("module.c"));
    assert!(cc.status().expect("cc, which Rust needs too").success());
    let folder = daemon.path("").display().to_string();
    let mut daemon = daemon.start_by(&[
        "unshare",
        "--mount",
        "sh",
        "-c",
        "mount --bind \"$0/nsswitch.conf\" /etc/nsswitch.conf && LD_LIBRARY_PATH=$0 exec \"$@\"",
        &folder,
    ]);
    let socket = std::fs::metadata(daemon.path("a.sock")).unwrap();
    assert_eq!((socket.mode() & 0o777, socket.gid()), (0o660, 54321));
    // One that nobody has.
    daemon.configure("[daemon]\nsocket_group = \"nobody's\"\n");
    let refused = daemon.refused(&["reload"]);
    assert!(refused.contains("there is no group \"nobody's\""), "{refused}");
    daemon.terminate();
}
