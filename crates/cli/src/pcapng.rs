//! Following a packet capture (pcapng, draft-ietf-opsawg-pcapng) as the daemon sends it: frames are counted, whole blocks passed on.

use ioplane_api::pcapng::{END_OF_OPTIONS, ENHANCED_PACKET, INTERFACE_STATISTICS, ISB_IFDROP};

/// Longest block that is believed: the longest frame and what is around it.
const BLOCK: usize = 128 << 10;

/// The bytes do not begin like a capture of the daemon.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("what the daemon sends is no capture: is it another version?")]
pub struct NotACapture;

/// Follows a capture as it comes in, cut anywhere: counts, and gives whole blocks on.
#[derive(Debug, Default)]
pub struct Follower {
    rest: Vec<u8>,
    pub frames: u64,
    /// Frames that the daemon could not keep, by its last word.
    pub lost: u64,
}

impl Follower {
    /// Takes some bytes in; `whole` gets each block that is complete, and says whether to go on.
    pub fn take(
        &mut self,
        bytes: &[u8],
        mut whole: impl FnMut(&[u8], &Follower) -> bool,
    ) -> Result<bool, NotACapture> {
        let mut all = std::mem::take(&mut self.rest);
        all.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(head) = all.get(at..at + 8) {
            let word = |from: usize| {
                u32::from_le_bytes([head[from], head[from + 1], head[from + 2], head[from + 3]])
            };
            let (kind, total) = (word(0), word(4) as usize);
            if !(12..=BLOCK).contains(&total) || !total.is_multiple_of(4) {
                return Err(NotACapture);
            }
            let Some(block) = all.get(at..at + total) else { break };
            match kind {
                ENHANCED_PACKET => self.frames += 1,
                INTERFACE_STATISTICS => self.lost = lost(&block[8..total - 4]).unwrap_or(self.lost),
                _ => {}
            }
            if !whole(block, self) {
                return Ok(false);
            }
            at += total;
        }
        self.rest = all.split_off(at);
        Ok(true)
    }
}

/// `isb_ifdrop` of a statistics block's body.
fn lost(body: &[u8]) -> Option<u64> {
    let mut options = body.get(12..)?;
    loop {
        let code = u16::from_le_bytes(options.get(..2)?.try_into().ok()?);
        let len = usize::from(u16::from_le_bytes(options.get(2..4)?.try_into().ok()?));
        let value = options.get(4..4 + len)?;
        match code {
            END_OF_OPTIONS => return None,
            ISB_IFDROP => return Some(u64::from_le_bytes(value.try_into().ok()?)),
            _ => options = options.get(4 + len.next_multiple_of(4)..)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use ioplane_api::pcapng::{INTERFACE_DESCRIPTION, SECTION_HEADER};

    use super::*;

    fn block(kind: u32, body: &[u8]) -> Vec<u8> {
        let total = (12 + body.len()) as u32;
        [&kind.to_le_bytes()[..], &total.to_le_bytes(), body, &total.to_le_bytes()].concat()
    }

    /// Interface and time, isb_ifrecv, isb_ifdrop, the end.
    fn statistics(seen: u64, lost: u64) -> Vec<u8> {
        let mut body = vec![0; 12];
        for (code, value) in [(4, seen), (ISB_IFDROP, lost)] {
            body.extend(code.to_le_bytes());
            body.extend(8u16.to_le_bytes());
            body.extend(value.to_le_bytes());
        }
        body.extend([0; 4]);
        block(INTERFACE_STATISTICS, &body)
    }

    /// A section, an interface, and two frames, the second of them cut short.
    fn capture() -> Vec<u8> {
        let (section, interface) = (block(SECTION_HEADER, &[1; 28]), block(INTERFACE_DESCRIPTION, &[2; 16]));
        let packet = |bytes| block(ENHANCED_PACKET, &vec![7; bytes]);
        [section, interface, packet(92), statistics(1, 0), packet(296), statistics(5, 3)].concat()
    }

    #[test]
    fn a_capture_is_followed_however_it_is_cut() {
        let all = capture();
        for step in [1, 2, 3, 7, 64, all.len()] {
            let (mut follower, mut given) = (Follower::default(), Vec::new());
            for part in all.chunks(step) {
                let more = follower.take(part, |block, _| {
                    given.extend_from_slice(block);
                    true
                });
                assert_eq!(more, Ok(true));
            }
            assert_eq!((given, follower.frames, follower.lost), (all.clone(), 2, 3), "{step}");
        }
        let enough = Follower::default().take(&all, |_, sum| sum.frames < 1);
        assert_eq!(enough, Ok(false));
    }

    #[test]
    fn garbage_is_no_capture() {
        for bytes in [[0u8; 8], [0xff; 8], [1, 0, 0, 0, 13, 0, 0, 0]] {
            assert_eq!(Follower::default().take(&bytes, |_, _| true), Err(NotACapture));
        }
        assert_eq!(lost(&[0; 13]), None);
        assert_eq!(lost(&[0xff; 40]), None);
    }
}
