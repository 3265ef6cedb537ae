//! File systems, by the numbers of `statfs(2)`.

pub(crate) const TMPFS: u32 = 0x0102_1994;
pub(crate) const HUGETLBFS: u32 = 0x9584_58f6;

/// Names of other file systems, for people.
const NAMES: [(u32, &str); 13] = [
    (0xef53, "ext4"),
    (0x5846_5342, "XFS"),
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "ZFS"),
    (0xf2f5_2010, "F2FS"),
    (0x794c_7630, "overlayfs"),
    (0x6573_5546, "FUSE"),
    (0x6969, "NFS"),
    (0x0102_1997, "9p"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB2"),
    (0x00c3_6400, "Ceph"),
    (0x8584_58f6, "ramfs"),
];

/// A file system, by its number (`statfs(2)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystem(pub u32);

impl std::fmt::Display for FileSystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match NAMES.iter().find(|(number, _)| *number == self.0) {
            Some((_, name)) => f.write_str(name),
            None => write!(f, "file system {:#x}", self.0),
        }
    }
}
