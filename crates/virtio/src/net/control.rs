//! The control queue (5.1.6.5): commands that say what the driver wants to receive.
//!
//! They are obeyed on an I/O core, so without a lock and without allocation: the tables are made beforehand and changed in
//! place, and the port takes them over by atomics.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ioplane_device::{CoreContext, PollCost};
use ioplane_memory::{GuestFault, GuestRange};
use ioplane_network::Port;

use super::Shared;
use super::poller::Work;
use super::rx_control::{MODES, RxControl, TABLE, is_station};
use super::spec::control::*;
use super::spec::*;
use crate::buffers::Reader;
use crate::queue::Queue;
use crate::ring::{Chain, RingFault};

/// Each may change what a port filters by: 16 in one poll that has a core for itself.
const COST_OF_COMMAND: usize = 16 << 10;

/// What became of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Carried out.
    Done,
    /// Its length or a value is wrong: nothing has changed.
    Wrong,
    /// None that this driver may send, or that anybody knows.
    Unknown,
}

/// Obeys a driver's commands.
pub(super) struct Control {
    chain: Chain,
    desk: ControlContext,
}

/// Where commands are carried out.
struct ControlContext {
    port: Arc<Port>,
    shared: Arc<Shared>,
    rx_control: Box<RxControl>,
    features: u64,
    most_pairs: u16,
}

impl Control {
    /// Goes on from `rx_control`, of a driver that accepted `features`.
    pub(super) fn new(
        port: Arc<Port>,
        shared: Arc<Shared>,
        rx_control: Box<RxControl>,
        features: u64,
        most_pairs: u16,
    ) -> Self {
        Control {
            chain: Chain::new(),
            desk: ControlContext { port, shared, rx_control, features, most_pairs },
        }
    }

    /// What the driver wants: the model's to keep.
    pub(super) fn into_rx_control(self) -> Box<RxControl> {
        self.desk.rx_control
    }

    fn answer(&mut self, queue: &mut Queue, head: u16) -> Result<(), RingFault> {
        let Control { chain, desk } = self;
        // The ack is the last byte that we may write. Without one the driver cannot be answered.
        let last = chain.writable().iter().rev().find(|range| range.len != 0);
        let last = last.ok_or(RingFault::NoStatus(head))?;
        let ack = last.gpa.wrapping_add(u64::from(last.len) - 1);
        let view = queue.ring.view();
        view.iovec(GuestRange { gpa: ack, len: 1 })?;
        let verdict = if chain.overlong() {
            Verdict::Wrong
        } else {
            desk.obey(Reader::new(view, chain.readable()), chain.readable_bytes())?
        };
        let byte = if verdict == Verdict::Done { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
        view.write(ack, &[byte])?;
        queue.tally.errors_request += u64::from(verdict == Verdict::Wrong);
        queue.tally.unsupported += u64::from(verdict == Verdict::Unknown);
        Ok(())
    }
}

impl Work for Control {
    fn ready(&mut self, queue: &mut Queue) -> bool {
        queue.ring.has_work()
    }

    fn batch<const LIMITED: bool>(
        &mut self,
        _context: &mut CoreContext,
        queue: &mut Queue,
        budget: u32,
        cost: &mut PollCost,
    ) -> Result<u32, RingFault> {
        let mut count = 0;
        while count < budget && !cost.is_used_up() {
            let Some((taken, replayed)) = queue.ring.take(&mut self.chain)? else { break };
            count += 1;
            queue.tally.replayed += u64::from(replayed);
            cost.spend(COST_OF_COMMAND as u64);
            if let Err(fault) = self.answer(queue, taken.head()) {
                taken.abandon();
                return Err(fault);
            }
            queue.ring.complete(taken, 1);
        }
        Ok(count)
    }
}

impl ControlContext {
    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Carries out the command of `bytes` bytes, or changes nothing.
    fn obey(&mut self, mut reader: Reader<'_>, bytes: u64) -> Result<Verdict, GuestFault> {
        let Some(len) = bytes.checked_sub(2) else { return Ok(Verdict::Wrong) };
        let mut words = [0; 2];
        reader.read(&mut words)?;
        let [class, command] = words;
        match (class, command) {
            (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_PROMISC | VIRTIO_NET_CTRL_RX_ALLMULTI)
                if self.has(VIRTIO_NET_F_CTRL_RX) =>
            {
                self.set_mode(command, exactly(&mut reader, len)?)
            }
            (VIRTIO_NET_CTRL_RX, 0..MODES) if self.has(VIRTIO_NET_F_CTRL_RX_EXTRA) => {
                self.set_mode(command, exactly(&mut reader, len)?)
            }
            (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET) if self.has(VIRTIO_NET_F_CTRL_RX) => {
                self.set_table(&mut reader, len)
            }
            (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET) if self.has(VIRTIO_NET_F_CTRL_MAC_ADDR) => {
                self.set_address(exactly(&mut reader, len)?)
            }
            (VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_ADD | VIRTIO_NET_CTRL_VLAN_DEL)
                if self.has(VIRTIO_NET_F_CTRL_VLAN) =>
            {
                self.set_vlan(command == VIRTIO_NET_CTRL_VLAN_ADD, exactly(&mut reader, len)?)
            }
            (VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK)
                if self.has(VIRTIO_NET_F_GUEST_ANNOUNCE) =>
            {
                if len != 0 {
                    return Ok(Verdict::Wrong);
                }
                self.shared.status.fetch_and(!VIRTIO_NET_S_ANNOUNCE, Ordering::AcqRel);
                Ok(Verdict::Done)
            }
            (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET) if self.has(VIRTIO_NET_F_MQ) => {
                self.set_pairs(exactly(&mut reader, len)?)
            }
            (VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET)
                if self.has(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS) =>
            {
                self.set_offloads(exactly(&mut reader, len)?)
            }
            _ => Ok(Verdict::Unknown),
        }
    }

    fn set_mode(&mut self, command: u8, data: Option<[u8; 1]>) -> Result<Verdict, GuestFault> {
        let bit = 1 << command;
        match data {
            Some([0]) => self.rx_control.modes &= !bit,
            Some([1]) => self.rx_control.modes |= bit,
            _ => return Ok(Verdict::Wrong),
        }
        self.filter()
    }

    /// 5.1.6.5.2: two tables, each with its count before it, and nothing else.
    fn set_table(&mut self, reader: &mut Reader<'_>, len: u64) -> Result<Verdict, GuestFault> {
        let (mut ahead, mut left, mut counts) = (reader.clone(), len, [0; 2]);
        for count in &mut counts {
            let mut bytes = [0; 4];
            let known = ahead.read(&mut bytes)?;
            let addresses = 6 * u64::from(u32::from_le_bytes(bytes));
            if known < bytes.len() || addresses + 4 > left {
                return Ok(Verdict::Wrong);
            }
            left -= addresses + 4;
            ahead.skip(addresses as usize);
            *count = addresses / 6;
        }
        if left != 0 {
            return Ok(Verdict::Wrong);
        }
        for (table, count) in
            [&mut self.rx_control.unicast, &mut self.rx_control.multicast].into_iter().zip(counts)
        {
            reader.skip(4);
            table.clear();
            for _ in 0..count.min(TABLE as u64 + 1) {
                let mut mac = [0; 6];
                reader.read(&mut mac)?;
                table.add(mac);
            }
            reader.skip(6 * count.saturating_sub(TABLE as u64 + 1) as usize);
        }
        self.filter()
    }

    fn set_address(&mut self, data: Option<[u8; 6]>) -> Result<Verdict, GuestFault> {
        let Some(mac) = data.filter(is_station) else { return Ok(Verdict::Wrong) };
        self.rx_control.mac = mac;
        self.shared.set_mac(mac);
        self.filter()
    }

    fn set_vlan(&mut self, wanted: bool, data: Option<[u8; 2]>) -> Result<Verdict, GuestFault> {
        let vlan = data.map(|bytes| usize::from(u16::from_le_bytes(bytes)));
        let Some(word) = vlan.and_then(|vlan| self.rx_control.vlans.get_mut(vlan / 64)) else {
            return Ok(Verdict::Wrong);
        };
        let bit = 1 << (vlan.unwrap_or(0) % 64);
        *word = if wanted { *word | bit } else { *word & !bit };
        self.filter()
    }

    fn set_pairs(&mut self, data: Option<[u8; 2]>) -> Result<Verdict, GuestFault> {
        let pairs = data.map_or(0, u16::from_le_bytes);
        if pairs == 0 || pairs > self.most_pairs {
            return Ok(Verdict::Wrong);
        }
        self.rx_control.pairs = pairs;
        self.port.set_active_pairs(pairs);
        Ok(Verdict::Done)
    }

    fn set_offloads(&mut self, data: Option<[u8; 8]>) -> Result<Verdict, GuestFault> {
        let offloads = data.map_or(u64::MAX, u64::from_le_bytes);
        if offloads & !(self.features & GUEST_OFFLOADS) != 0 {
            return Ok(Verdict::Wrong);
        }
        self.rx_control.offloads = offloads;
        self.shared.set_offloads(&self.port, offloads);
        Ok(Verdict::Done)
    }

    fn filter(&self) -> Result<Verdict, GuestFault> {
        self.port.filter(&self.rx_control.filter(self.features));
        Ok(Verdict::Done)
    }
}

/// The data of a command if it has exactly as many bytes as it should.
fn exactly<const N: usize>(reader: &mut Reader<'_>, len: u64) -> Result<Option<[u8; N]>, GuestFault> {
    if len != N as u64 {
        return Ok(None);
    }
    let mut bytes = [0; N];
    let known = reader.read(&mut bytes)?;
    Ok((known == N).then_some(bytes))
}
