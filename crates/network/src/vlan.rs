//! VLANs: which a frame is in, and what a receiver's frames look like.

use crate::NetworkError;
use crate::spec::*;

/// Which VLANs a port is in, and how its frames are tagged (IEEE 802.1Q). Service tags (0x88a8) are payload here.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Vlan {
    /// All of them: frames are taken and given as they are. What has no tag is in no VLAN.
    #[default]
    All,
    /// One, without tags: a tag is put on and taken off by the switch. Frames that have one are refused.
    Access(u16),
    /// Those listed, with tags. What has no tag is refused, unless zero is listed.
    Trunk(Vec<u16>),
}

/// A port's VLANs, to be asked often.
#[derive(Debug)]
pub(crate) enum Membership {
    All,
    Access(u16),
    Trunk(Box<[u64; 64]>),
}

/// What is done to the tag of a frame on its way to a receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    AsIs,
    Strip,
    /// Put on a tag.
    Insert(u16),
    /// Another tag in place of the priority tag.
    Rewrite(u16),
}

impl Membership {
    pub fn new(port: &str, vlan: &Vlan) -> Result<Self, NetworkError> {
        let check = |vlan: u16| match vlan {
            1..=4094 => Ok(vlan),
            _ => Err(NetworkError::Vlan { port: port.to_owned(), vlan }),
        };
        Ok(match vlan {
            Vlan::All => Membership::All,
            Vlan::Access(vlan) => Membership::Access(check(*vlan)?),
            Vlan::Trunk(list) => {
                let mut bits = Box::new([0; 64]);
                for vlan in list {
                    let vlan = if *vlan == 0 { 0 } else { check(*vlan)? };
                    bits[usize::from(vlan / 64)] |= 1 << (vlan % 64);
                }
                Membership::Trunk(bits)
            }
        })
    }

    fn contains(&self, vlan: u16) -> bool {
        match self {
            Membership::All => true,
            Membership::Access(own) => *own == vlan,
            Membership::Trunk(bits) => bits[usize::from(vlan / 64) & 63] >> (vlan % 64) & 1 != 0,
        }
    }

    /// The VLAN (zero: none) of a frame with that tag that comes from this port; `None` if it is not to come from there.
    #[inline]
    pub fn enter(&self, tag: Option<u16>) -> Option<u16> {
        let vlan = tag.map_or(0, |tag| tag & VLAN_VID_MASK);
        match self {
            Membership::All => Some(vlan),
            Membership::Access(own) => (vlan == 0).then_some(*own),
            Membership::Trunk(_) => self.contains(vlan).then_some(vlan),
        }
    }

    /// What to do to a frame of VLAN `vlan`, which came with that tag, to give it to this port; `None` if it is not to.
    #[inline]
    pub fn leave(&self, vlan: u16, tag: Option<u16>) -> Option<Form> {
        if !self.contains(vlan) {
            return None;
        }
        Some(match (self, tag) {
            (Membership::Access(_), Some(_)) => Form::Strip,
            (Membership::Access(_), None) => Form::AsIs,
            _ if vlan == 0 => Form::AsIs,
            (_, None) => Form::Insert(vlan),
            (_, Some(tag)) if tag & VLAN_VID_MASK == vlan => Form::AsIs,
            (_, Some(tag)) => Form::Rewrite(tag & !VLAN_VID_MASK | vlan),
        })
    }
}

/// The tag of a frame, if its first bytes have one.
#[inline]
pub(crate) fn tag(head: &[u8]) -> Option<u16> {
    match head.get(12..16) {
        Some([0x81, 0x00, high, low]) => Some(u16::from_be_bytes([*high, *low])),
        _ => None,
    }
}

impl Form {
    /// Bytes by which a frame grows at its front.
    #[inline]
    pub fn growth(self) -> isize {
        match self {
            Form::Insert(_) => VLAN_HLEN as isize,
            Form::Strip => -(VLAN_HLEN as isize),
            Form::AsIs | Form::Rewrite(_) => 0,
        }
    }

    /// Gives the frame at `base` of `buffer` this form; says where it begins then. What stood at its front is put there
    /// again from `head` first: the bytes that were judged are the bytes that are delivered, whatever the sender's memory
    /// says by now, and one copy can be given one form after another.
    ///
    /// To insert, `base` is at least [`VLAN_HLEN`]. To strip, the frame has a whole tag.
    #[inline]
    pub fn give(self, buffer: &mut [u8], base: usize, head: &[u8]) -> usize {
        const JUDGED: usize = ETH_HLEN + VLAN_HLEN;
        match (buffer[base..].first_chunk_mut::<JUDGED>(), head.first_chunk::<JUDGED>()) {
            (Some(front), Some(head)) => *front = *head,
            _ => buffer[base..base + head.len()].copy_from_slice(head),
        }
        match self {
            Form::AsIs => base,
            Form::Strip => {
                buffer[base + VLAN_HLEN..][..ETH_ADDRESSES].copy_from_slice(&head[..ETH_ADDRESSES]);
                base + VLAN_HLEN
            }
            Form::Insert(tag) => {
                let start = base - VLAN_HLEN;
                buffer[start..start + ETH_ADDRESSES].copy_from_slice(&head[..ETH_ADDRESSES]);
                buffer[start + ETH_ADDRESSES..][..2].copy_from_slice(&ETH_P_8021Q.to_be_bytes());
                buffer[start + ETH_HLEN..][..2].copy_from_slice(&tag.to_be_bytes());
                start
            }
            Form::Rewrite(tag) => {
                buffer[base + ETH_HLEN..][..2].copy_from_slice(&tag.to_be_bytes());
                base
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vlan: Vlan) -> Membership {
        Membership::new("p", &vlan).unwrap()
    }

    #[test]
    fn entering() {
        assert_eq!(of(Vlan::All).enter(None), Some(0));
        assert_eq!(of(Vlan::All).enter(Some(0xe007)), Some(7));
        assert_eq!(of(Vlan::Access(5)).enter(None), Some(5));
        assert_eq!(of(Vlan::Access(5)).enter(Some(0xe000)), Some(5));
        assert_eq!(
            of(Vlan::Access(5)).enter(Some(5)),
            None,
            "not even its own: that is how VLANs are hopped"
        );
        assert_eq!(of(Vlan::Trunk(vec![5, 4094])).enter(Some(4094)), Some(4094));
        assert_eq!(of(Vlan::Trunk(vec![5])).enter(Some(6)), None);
        assert_eq!(of(Vlan::Trunk(vec![5])).enter(None), None);
        assert_eq!(of(Vlan::Trunk(vec![0, 5])).enter(None), Some(0));
    }

    #[test]
    fn leaving() {
        assert_eq!(of(Vlan::Access(5)).leave(5, None), Some(Form::AsIs));
        assert_eq!(of(Vlan::Access(5)).leave(5, Some(5)), Some(Form::Strip));
        assert_eq!(of(Vlan::Access(5)).leave(6, Some(6)), None);
        assert_eq!(of(Vlan::Access(5)).leave(0, None), None);
        assert_eq!(of(Vlan::All).leave(5, None), Some(Form::Insert(5)));
        assert_eq!(of(Vlan::All).leave(5, Some(0xe000)), Some(Form::Rewrite(0xe005)));
        assert_eq!(of(Vlan::All).leave(5, Some(0xe005)), Some(Form::AsIs));
        assert_eq!(of(Vlan::All).leave(0, Some(0xe000)), Some(Form::AsIs));
        assert_eq!(of(Vlan::Trunk(vec![5])).leave(6, None), None);
    }

    #[test]
    fn impossible_vlans_are_refused() {
        assert!(Membership::new("p", &Vlan::Access(0)).is_err());
        assert!(Membership::new("p", &Vlan::Access(4095)).is_err());
        assert!(Membership::new("p", &Vlan::Trunk(vec![1, 4095])).is_err());
    }

    #[test]
    fn one_copy_takes_every_form() {
        let untagged: Vec<u8> = (0..12).chain([8, 0]).chain(100..140).collect();
        let tagged: Vec<u8> = (0..12).chain([0x81, 0, 0xe0, 7, 8, 0]).chain(100..140).collect();
        let mut buffer = vec![0xee; 4 + untagged.len()];
        buffer[4..].copy_from_slice(&untagged);
        // The sender changes its mind after it was judged.
        buffer[4..10].fill(0xdd);
        for _ in 0..2 {
            let start = Form::Insert(0xe007).give(&mut buffer, 4, &untagged);
            assert_eq!(&buffer[start..], tagged);
            let start = Form::AsIs.give(&mut buffer, 4, &untagged);
            assert_eq!(&buffer[start..], untagged);
        }
        let mut buffer = vec![0; 4 + tagged.len()];
        buffer[4..].copy_from_slice(&tagged);
        let start = Form::Strip.give(&mut buffer, 4, &tagged);
        assert_eq!(&buffer[start..], untagged);
        let start = Form::Rewrite(0xe009).give(&mut buffer, 4, &tagged);
        assert_eq!(&buffer[start..][14..16], [0xe0, 9]);
        let start = Form::AsIs.give(&mut buffer, 4, &tagged);
        assert_eq!(&buffer[start..], tagged);
    }

    #[test]
    fn a_short_frame_keeps_its_end() {
        let head = [1u8; 15];
        let mut buffer = [9u8; 24];
        assert_eq!(Form::AsIs.give(&mut buffer, 4, &head), 4);
        assert_eq!(buffer[19..], [9; 5]);
        assert_eq!(Form::Insert(1).give(&mut buffer, 4, &head), 0);
        assert_eq!(buffer[19..], [9; 5]);
    }
}
