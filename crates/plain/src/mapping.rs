//! Which file is mapped where in a process.

/// A line of `/proc/PID/maps` (proc_pid_maps(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcMapping<'a> {
    /// The first address.
    pub start: u64,
    /// Behind the last one.
    pub end: u64,
    /// Instructions are fetched from it.
    pub executable: bool,
    /// Writes go to the file.
    pub shared: bool,
    /// Where in the file it begins.
    pub offset: u64,
    /// Major and minor number of the file's device.
    pub device: (u32, u32),
    /// Zero where no file is mapped.
    pub inode: u64,
    /// As the process that has mapped it sees it; `[vdso]` and the like, or empty, where there is none. Not plain.
    pub path: &'a str,
}

impl<'a> ProcMapping<'a> {
    /// Nothing where it is no such line.
    pub fn parse(line: &'a str) -> Option<ProcMapping<'a>> {
        let mut rest = line;
        let mut word = || {
            let (word, left) = rest.trim_start().split_once(' ').unwrap_or((rest.trim_start(), ""));
            rest = left;
            word
        };
        let hex = |word: &str| u64::from_str_radix(word, 16).ok();
        let (start, end) = word().split_once('-')?;
        let access = word();
        let offset = hex(word())?;
        let (major, minor) = word().split_once(':')?;
        let inode = word().parse().ok()?;
        let number = |word| u32::from_str_radix(word, 16).ok();
        Some(ProcMapping {
            start: hex(start)?,
            end: hex(end)?,
            executable: access.as_bytes().get(2) == Some(&b'x'),
            shared: access.ends_with('s'),
            offset,
            device: (number(major)?, number(minor)?),
            inode,
            path: rest.trim_start(),
        })
    }

    /// Whether an address is in it.
    pub fn has(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps() {
        let line = "7f3c1a000000-7f3c1a001000 rw-s 00001000 00:1f 1234      /memfd:a b (deleted)";
        let mapping = ProcMapping {
            start: 0x7f3c_1a00_0000,
            end: 0x7f3c_1a00_1000,
            executable: false,
            shared: true,
            offset: 0x1000,
            device: (0, 0x1f),
            inode: 1234,
            path: "/memfd:a b (deleted)",
        };
        assert_eq!(ProcMapping::parse(line), Some(mapping));
        assert!(mapping.has(0x7f3c_1a00_0000) && !mapping.has(mapping.end) && !mapping.has(0));
        let code = ProcMapping::parse("1000-2000 r-xp 00000000 00:00 0").unwrap();
        assert_eq!((code.executable, code.shared, code.path), (true, false, ""));
        for bad in
            ["", "1-2", "1-2 r-xp", "1 r-xp 0 0:0 0", "1-2 r-xp g 0:0 0", "1-2 r-xp 0 00 0", "1-2 r 0 0:0 -1"]
        {
            assert_eq!(ProcMapping::parse(bad), None, "{bad:?}");
        }
    }
}
