//! Settings of a virtual function by rtnetlink (rtnetlink(7), linux/if_link.h): IFLA_VFINFO_LIST of RTM_GETLINK and RTM_SETLINK.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use ioplane_api::spec::{MacAddress, TagWord, VfLinkWord, VfSetting, VfSettings, VfVlan};
use netlink_packet_core::{
    DecodeError, NLM_F_ACK, NLM_F_REQUEST, NetlinkBuffer, NetlinkMessage, NlaBuffer, NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkMessage, LinkVfInfo, VfInfo, VfInfoLinkState, VfInfoMac, VfInfoRate,
    VfInfoRssQueryEn, VfInfoSpoofCheck, VfInfoTrust, VfInfoVlan, VfLinkState, VfVlan as VfVlanAttribute,
    VfVlanInfo, VlanProtocol,
};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

/// Largest answer: 256 virtual functions have some 60 KiB of attributes.
const MOST: usize = 256 << 10;
/// The kernel answers at once.
const PATIENCE: Duration = Duration::from_secs(2);
/// `struct ifinfomsg`.
const HEADER: usize = 16;
/// NLMSG_ERROR, RTM_NEWLINK.
const ERROR: u16 = 2;
const NEW_LINK: u16 = 16;
/// IFLA_VFINFO_LIST of a link, IFLA_VF_INFO in that, and what is in one of those.
const LIST: u16 = 22;
const INFO: u16 = 1;
const MAC: u16 = 1;
const VLAN: u16 = 2;
const SPOOFCHK: u16 = 4;
const STATE: u16 = 5;
const RATE: u16 = 6;
const QUERY_RSS: u16 = 7;
const TRUST: u16 = 9;
const VLANS: u16 = 12;
/// IFLA_VF_VLAN_INFO in a list of VLANs.
const VLAN_INFO: u16 = 1;

/// A virtual function, as its physical function has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Said {
    /// Its address, whoever has set it.
    pub address: Option<MacAddress>,
    /// The rest. The address among these is not known to be fixed.
    pub settings: VfSettings,
}

fn malformed(error: &DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the kernel's answer: {error}"))
}

fn packed(message: RouteNetlinkMessage, flags: u16) -> Vec<u8> {
    let mut message = NetlinkMessage::from(message);
    message.header.flags = flags;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// What is asked of the interface `index`: its virtual functions, without what they have counted.
fn question(index: u32) -> Vec<u8> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = vec![LinkAttribute::ExtMask(vec![LinkExtentMask::Vf, LinkExtentMask::SkipStats])];
    packed(RouteNetlinkMessage::GetLink(message), NLM_F_REQUEST)
}

fn order(index: u32, number: u32, setting: VfSetting) -> Vec<u8> {
    let info = match setting {
        VfSetting::Mac(mac) => VfInfo::Mac(VfInfoMac::new(number, &mac.map_or([0; 6], |mac| mac.0))),
        VfSetting::Vlan(None) => VfInfo::Vlan(VfInfoVlan::new(number, 0, 0)),
        VfSetting::Vlan(Some(VfVlan { id, qos, proto })) => match proto {
            TagWord::Dot1q => VfInfo::Vlan(VfInfoVlan::new(number, id.into(), qos.into())),
            TagWord::Dot1ad => {
                let vlan = VfVlanInfo::new(number, id.into(), qos.into(), VlanProtocol::Ieee8021Ad);
                VfInfo::VlanList(vec![VfVlanAttribute::Info(vlan)])
            }
        },
        VfSetting::Spoofchk(yes) => VfInfo::SpoofCheck(VfInfoSpoofCheck::new(number, yes)),
        VfSetting::Trust(yes) => VfInfo::Trust(VfInfoTrust::new(number, yes)),
        VfSetting::Rate { min, max } => VfInfo::Rate(VfInfoRate::new(number, min, max)),
        VfSetting::State(word) => {
            let state = match word {
                VfLinkWord::Auto => VfLinkState::Auto,
                VfLinkWord::Enable => VfLinkState::Enable,
                VfLinkWord::Disable => VfLinkState::Disable,
            };
            VfInfo::LinkState(VfInfoLinkState::new(number, state))
        }
        VfSetting::QueryRss(yes) => VfInfo::RssQueryEn(VfInfoRssQueryEn::new(number, yes)),
    };
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = vec![LinkAttribute::VfInfoList(vec![LinkVfInfo(vec![info])])];
    packed(RouteNetlinkMessage::SetLink(message), NLM_F_REQUEST | NLM_F_ACK)
}

/// The first message of an answer: its type and payload. An error that the kernel says is one.
fn payload(answer: &[u8]) -> io::Result<(u16, &[u8])> {
    let message = NetlinkBuffer::new_checked(answer).map_err(|error| malformed(&error))?;
    let (kind, payload) = (message.message_type(), message.payload());
    if kind != ERROR {
        return Ok((kind, payload));
    }
    let code = payload.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
    match code {
        0 => Ok((kind, payload)),
        code => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
    }
}

fn attributes(bytes: &[u8]) -> impl Iterator<Item = io::Result<NlaBuffer<&[u8]>>> {
    NlasIterator::new(bytes).map(|each| each.map_err(|error| malformed(&error)))
}

/// Number and value of an attribute with two words; none if its driver leaves the value out.
fn word(bytes: &[u8]) -> Option<u32> {
    let value = u32::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    (value != u32::MAX).then_some(value)
}

/// What an answer says of the virtual function `number`.
fn said(answer: &[u8], number: u32) -> io::Result<Said> {
    let none = || io::Error::new(io::ErrorKind::NotFound, format!("it has no virtual function {number}"));
    let (kind, payload) = payload(answer)?;
    let rest = payload.get(HEADER..).filter(|_| kind == NEW_LINK).ok_or_else(none)?;
    for attribute in attributes(rest) {
        let list = attribute?;
        if list.kind() != LIST {
            continue;
        }
        for info in attributes(list.value()) {
            let info = info?;
            if info.kind() == INFO
                && let Some(said) = one(info.value(), number)?
            {
                return Ok(said);
            }
        }
    }
    Err(none())
}

/// What IFLA_VF_INFO says, if it is about the virtual function `number`.
fn one(bytes: &[u8], number: u32) -> io::Result<Option<Said>> {
    let (mut address, mut settings, mut same) = (None, VfSettings::default(), false);
    for attribute in attributes(bytes) {
        let attribute = attribute?;
        let value = attribute.value();
        match attribute.kind() {
            MAC => {
                let mac = VfInfoMac::parse(value).map_err(|error| malformed(&error))?;
                same = mac.vf_id == number;
                // Of Ethernet, by a driver that knows one.
                address = mac.mac.first_chunk().copied().filter(|mac| *mac != [0; 6]).map(MacAddress);
            }
            VLAN => {
                let VfInfoVlan { vlan_id, qos, .. } =
                    VfInfoVlan::parse(value).map_err(|error| malformed(&error))?;
                settings.vlan = settings.vlan.or(vlan(vlan_id, qos, TagWord::Dot1q));
            }
            VLANS => settings.vlan = tagged(value)?,
            SPOOFCHK => settings.spoofchk = word(value).map(|value| value != 0),
            TRUST => settings.trust = word(value).map(|value| value != 0),
            QUERY_RSS => settings.query_rss = word(value).map(|value| value != 0),
            STATE => {
                settings.state = match word(value) {
                    Some(1) => VfLinkWord::Enable,
                    Some(2) => VfLinkWord::Disable,
                    _ => VfLinkWord::Auto,
                }
            }
            RATE => {
                let rate = VfInfoRate::parse(value).map_err(|error| malformed(&error))?;
                (settings.min_tx_rate, settings.max_tx_rate) = (rate.min_tx_rate, rate.max_tx_rate);
            }
            _ => {}
        }
    }
    Ok(same.then_some(Said { address, settings }))
}

fn vlan(id: u32, qos: u32, proto: TagWord) -> Option<VfVlan> {
    let id = u16::try_from(id).ok().filter(|id| *id != 0)?;
    Some(VfVlan { id, qos: u8::try_from(qos).ok()?, proto })
}

/// The VLAN in a list of which the kernel has one at most.
fn tagged(bytes: &[u8]) -> io::Result<Option<VfVlan>> {
    for attribute in attributes(bytes) {
        let attribute = attribute?;
        if attribute.kind() == VLAN_INFO {
            let info = VfVlanInfo::parse(attribute.value()).map_err(|error| malformed(&error))?;
            let proto =
                if info.protocol == VlanProtocol::Ieee8021Ad { TagWord::Dot1ad } else { TagWord::Dot1q };
            return Ok(vlan(info.vlan_id, info.qos, proto));
        }
    }
    Ok(None)
}

/// Asks the kernel, in this thread's network namespace. Blocks while another one changes an interface.
fn ask(request: &[u8]) -> io::Result<Vec<u8>> {
    let socket: OwnedFd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    sendto(&socket, request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = vec![0; MOST];
    let (read, whole) = recv(&socket, &mut answer[..], RecvFlags::TRUNC)?;
    if whole > read {
        return Err(io::Error::other(format!("the kernel's answer has {whole} bytes, more than are read")));
    }
    answer.truncate(read);
    Ok(answer)
}

/// What the interface `index` has for its virtual function `number`.
pub(super) fn read(index: u32, number: u32) -> io::Result<Said> {
    said(&ask(&question(index))?, number)
}

/// Sets one of them. Needs CAP_NET_ADMIN.
pub(super) fn set(index: u32, number: u32, setting: VfSetting) -> io::Result<()> {
    payload(&ask(&order(index, number, setting))?).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let len = value.len() as u16 + 4;
        let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// The message of a link, as the kernel has it, around this list.
    fn link(list: &[u8]) -> Vec<u8> {
        let name = attribute(3, b"pf0\0");
        let body = [vec![0; HEADER], name, attribute(LIST | 0x8000, list)].concat();
        let header =
            [words(&[body.len() as u32 + 16]), vec![NEW_LINK as u8, 0, 0, 0], words(&[0, 0])].concat();
        [header, body].concat()
    }

    /// IFLA_VF_INFO of a function, in the order of the kernel's `rtnl_fill_vfinfo`.
    fn info(number: u32, mac: [u8; 6], rest: &[u8]) -> Vec<u8> {
        let mut address = words(&[number]);
        address.extend(mac);
        address.resize(36, 0);
        attribute(INFO, &[attribute(MAC, &address), rest.to_vec()].concat())
    }

    fn igb(number: u32) -> Vec<u8> {
        let of = |kind, values: &[u32]| attribute(kind, &[words(&[number]), words(values)].concat());
        let tag = [words(&[number, 5, 3]), vec![0x88, 0xa8, 0, 0]].concat();
        [
            attribute(13, &[0xff; 32]),
            of(VLAN, &[5, 3]),
            of(RATE, &[0, 500]),
            of(3, &[500]),
            of(SPOOFCHK, &[1]),
            of(STATE, &[2]),
            of(QUERY_RSS, &[u32::MAX]),
            of(TRUST, &[0]),
            attribute(VLANS, &attribute(VLAN_INFO, &tag)),
            attribute(99, &[7]),
        ]
        .concat()
    }

    /// RTM_NEWLINK of a card that igb drives (QEMU's 82576), as a kernel of Debian has sent it, but for what is about the card itself. Before,
    /// number 1 was set: `mac 52:54:00:00:14:0a`, `vlan 5 qos 3`, `spoofchk off`, `trust on`, `max_tx_rate 800`.
    const RECORDED: &str = "\
        b8010000100000000000000000000000000001000200000043100100000000000900030070663134000000008c011600c40001002800010000000000\
        000000000000000000000000000000000000000000000000000000000000000024000d00ffffffffffff000000000000000000000000000000000000\
        000000000000000010000200000000000000000000000000100006000000000000000000000000000c00030000000000000000000c00040000000000\
        010000000c00050000000000000000000c00070000000000ffffffff0c000900000000000000000018000c0014000100000000000000000000000000\
        81000000c4000100280001000100000052540000140a000000000000000000000000000000000000000000000000000024000d00ffffffffffff0000\
        00000000000000000000000000000000000000000000000010000200010000000500000003000000100006000100000000000000200300000c000300\
        01000000200300000c00040001000000000000000c00050001000000000000000c00070001000000ffffffff0c000900010000000100000018000c00\
        1400010001000000050000000300000081000000";

    #[test]
    fn what_a_kernel_has_sent_is_read() {
        let byte = |at| u8::from_str_radix(&RECORDED[at..at + 2], 16).unwrap();
        let recorded: Vec<u8> = (0..RECORDED.len()).step_by(2).map(byte).collect();
        let untouched = Said {
            address: None,
            settings: VfSettings { spoofchk: Some(true), trust: Some(false), ..VfSettings::default() },
        };
        assert_eq!(super::said(&recorded, 0).unwrap(), untouched);
        let set = VfSettings {
            vlan: Some(VfVlan { id: 5, qos: 3, proto: TagWord::Dot1q }),
            spoofchk: Some(false),
            trust: Some(true),
            max_tx_rate: 800,
            ..VfSettings::default()
        };
        let address = Some(MacAddress([0x52, 0x54, 0, 0, 0x14, 0x0a]));
        assert_eq!(super::said(&recorded, 1).unwrap(), Said { address, settings: set });
        assert!(super::said(&recorded, 2).is_err());
    }

    #[test]
    fn what_the_kernel_says_is_read() {
        let list = [info(0, [0; 6], &[]), info(1, [2, 0, 0, 0, 0, 7], &igb(1))].concat();
        let link = link(&list);
        let said = super::said(&link, 1).unwrap();
        assert_eq!(said.address, Some(MacAddress([2, 0, 0, 0, 0, 7])));
        let expected = VfSettings {
            mac: None,
            vlan: Some(VfVlan { id: 5, qos: 3, proto: TagWord::Dot1ad }),
            spoofchk: Some(true),
            trust: Some(false),
            max_tx_rate: 500,
            min_tx_rate: 0,
            state: VfLinkWord::Disable,
            query_rss: None,
        };
        assert_eq!(said.settings, expected);
        let first = super::said(&link, 0).unwrap();
        assert_eq!((first.address, first.settings), (None, VfSettings::default()));
        assert_eq!(super::said(&link, 2).unwrap_err().to_string(), "it has no virtual function 2");
    }

    #[test]
    fn what_is_malformed_is_refused_and_nothing_else_happens() {
        let list = info(1, [2, 0, 0, 0, 0, 7], &igb(1));
        let whole = link(&list);
        for len in 0..whole.len() {
            // Without the message's length also, so that all of it is looked at.
            let mut cut = whole[..len].to_vec();
            super::said(&cut, 1).unwrap_err();
            if len >= 16 {
                cut[..4].copy_from_slice(&(len as u32).to_ne_bytes());
                let _ = super::said(&cut, 1);
            }
        }
        for at in 0..whole.len() {
            for bit in [1, 0x80, 0xff] {
                let mut other = whole.clone();
                other[at] ^= bit;
                let _ = super::said(&other, 1);
            }
        }
    }

    #[test]
    fn an_error_of_the_kernel_is_one() {
        let error = |code: i32| {
            [words(&[36]), vec![2, 0, 0, 0], words(&[0, 0]), code.to_ne_bytes().to_vec(), vec![0; 16]]
                .concat()
        };
        payload(&error(0)).unwrap();
        let code = payload(&error(-22)).unwrap_err().raw_os_error();
        assert_eq!(code, Some(22));
        // What is none.
        assert!(payload(&error(i32::MIN)).is_err());
    }

    /// What is set is read back as it was: by the same attributes.
    #[test]
    fn orders_say_what_is_to_be_set() {
        let number = 3;
        let orders = [
            VfSetting::Mac(Some(MacAddress([2, 0, 0, 0, 0, 9]))),
            VfSetting::Vlan(Some(VfVlan { id: 7, qos: 1, proto: TagWord::Dot1q })),
            VfSetting::Spoofchk(false),
            VfSetting::Trust(true),
            VfSetting::Rate { min: 1, max: 2 },
            VfSetting::State(VfLinkWord::Enable),
            VfSetting::QueryRss(true),
        ];
        let inside = |setting| {
            let bytes = order(4, number, setting);
            let message = NetlinkBuffer::new_checked(&bytes[..]).unwrap();
            // RTM_SETLINK, with an answer.
            assert_eq!((message.message_type(), message.flags()), (19, 5));
            assert_eq!(message.payload()[4..8], 4u32.to_ne_bytes());
            let list = NlaBuffer::new_checked(&bytes[16 + HEADER..]).unwrap();
            assert_eq!(list.kind(), LIST);
            let info = NlaBuffer::new_checked(list.value()).unwrap();
            assert_eq!(info.kind(), INFO);
            info.value().to_vec()
        };
        let all = orders.map(inside).concat();
        let said = one(&all, number).unwrap().unwrap();
        assert_eq!(said.address, Some(MacAddress([2, 0, 0, 0, 0, 9])));
        for setting in &orders[1..] {
            assert_eq!(said.settings.get(setting.word()), Some(*setting));
        }
        let tag = VfVlan { id: 8, qos: 0, proto: TagWord::Dot1ad };
        let bytes = inside(VfSetting::Vlan(Some(tag)));
        let list = NlaBuffer::new_checked(&bytes[..]).unwrap();
        assert_eq!((list.kind(), tagged(list.value()).unwrap()), (VLANS, Some(tag)));
        assert_eq!(inside(VfSetting::Vlan(None))[4..], words(&[number, 0, 0]));
        assert_eq!(inside(VfSetting::Mac(None))[4..], [words(&[number]), vec![0; 32]].concat());
    }

    #[test]
    fn an_interface_without_virtual_functions_says_so() {
        // Of a network namespace's own, there on any Linux.
        let error = read(1, 0).unwrap_err();
        assert_eq!(error.to_string(), "it has no virtual function 0");
        assert_eq!(read(u32::MAX >> 1, 0).unwrap_err().raw_os_error(), Some(libc::ENODEV));
        assert!(set(1, 0, VfSetting::Trust(true)).unwrap_err().raw_os_error().is_some());
    }
}
