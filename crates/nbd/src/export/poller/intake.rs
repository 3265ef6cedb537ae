//! From the socket: requests, and the data of writes.

use ioplane_device::CoreContext;

use super::super::check::{Ask, Refused};
use super::super::connection::{Connection, Intake, STATUS_DATA};
use super::super::ended::ConnectionEnd;
use super::super::memory::Chain;
use super::super::socket::{Moved, ReceiveError};
use super::{COST_OF_CALL, ExportPoller, cost_of_freeing};
use crate::error::Violation;
use crate::spec::*;
use crate::transmission::Request;

/// What a request costs beside its data.
const COST_OF_REQUEST: u64 = 256;
/// Longest payload of a refused write that is read over; a client that sends more is cut off (section "Size constraints").
const MOST_DISCARDED: u32 = DEFAULT_MAX_PAYLOAD;

impl ExportPoller {
    /// Takes up to `budget` requests on; says how many.
    pub(super) fn take(&mut self, context: &mut CoreContext, budget: u32) -> u32 {
        let mut count = 0;
        self.held = false;
        while self.connection.end.is_none() {
            if count >= budget || self.cost.is_used_up() {
                self.more = true;
                break;
            }
            match self.connection.intake {
                Intake::Header => {
                    let Some(bytes) = self.connection.staging.filled().first_chunk::<{ Request::SIZE }>()
                    else {
                        if self.receive(Chain::EMPTY, 0, 0).is_some() {
                            continue;
                        }
                        break;
                    };
                    match Request::decode(bytes) {
                        Ok(request) if request.command == NBD_CMD_DISC => {
                            self.connection.end(ConnectionEnd::Disconnected)
                        }
                        Ok(request) => self.connection.intake = Intake::Held(request),
                        Err(violation) => self.connection.violated(violation),
                    }
                    self.connection.staging.consume(Request::SIZE);
                    self.cost.spend(COST_OF_REQUEST);
                }
                Intake::Held(request) => {
                    if !self.admit(context, request) {
                        self.held = true;
                        break;
                    }
                    count += 1;
                }
                Intake::Payload { slot, got } => {
                    if !self.take_payload(context, slot, got) {
                        break;
                    }
                }
                Intake::Discard { slot, left, refused } => {
                    if !self.discard(context, slot, left, refused) {
                        break;
                    }
                }
            }
        }
        count
    }

    /// Begins a request, if there is room for it and its limits let it pass.
    fn admit(&mut self, context: &mut CoreContext, request: Request) -> bool {
        if self.connection.is_full() {
            return false;
        }
        self.connection.terms.bytes = self.published.bytes();
        match self.connection.terms.check(&request) {
            Ok(ask) => {
                let data = match ask {
                    Ask::Read | Ask::Write => request.length,
                    Ask::BlockStatus if self.status.is_some() => STATUS_DATA as u32,
                    _ => 0,
                };
                let Some(chain) = self.connection.memory.take(data) else { return false };
                if context.has_limits() && !admitted(context, ask, request.length) {
                    self.connection.memory.give_back(chain);
                    return false;
                }
                let Some(slot) = self.connection.enter(request, ask, chain, context.now()) else {
                    return false;
                };
                if request.payload() > 0 {
                    self.connection.intake = Intake::Payload { slot, got: 0 };
                } else {
                    self.connection.intake = Intake::Header;
                    self.begin(context, slot);
                }
            }
            Err(_) if request.payload() > MOST_DISCARDED => {
                self.connection.violated(Violation::PayloadLength(request.length));
            }
            Err(refused) => {
                let now = context.now();
                let Some(slot) = self.connection.enter(request, Ask::Flush, Chain::EMPTY, now) else {
                    return false;
                };
                self.connection.intake = Intake::Discard { slot, left: request.payload(), refused };
            }
        }
        true
    }

    /// Goes on with the data of a write; false when they have not come.
    fn take_payload(&mut self, context: &mut CoreContext, slot: u16, mut got: u32) -> bool {
        let (chain, length) = {
            let slot = &self.connection.slots[usize::from(slot)];
            (slot.chain, slot.request.length)
        };
        let ahead = self.connection.staging.filled();
        let copied = ahead.len().min((length - got) as usize);
        if copied > 0 {
            if self.connection.memory.write(chain, got, &ahead[..copied]).is_err() {
                self.connection.end(ConnectionEnd::Memory);
                return false;
            }
            self.connection.staging.consume(copied);
            self.cost.spend(copied as u64);
            got += copied as u32;
        } else {
            let Some(direct) = self.receive(chain, got, length - got) else { return false };
            got += direct;
        }
        if got < length {
            self.connection.intake = Intake::Payload { slot, got };
            return true;
        }
        self.connection.intake = Intake::Header;
        self.begin(context, slot);
        true
    }

    /// Reads over the data of a refused write, then answers it; false when they have not come.
    fn discard(&mut self, context: &mut CoreContext, slot: u16, left: u32, refused: Refused) -> bool {
        let passed = self.connection.staging.filled().len().min(left as usize);
        self.connection.staging.consume(passed);
        let left = left - passed as u32;
        if left == 0 {
            self.connection.intake = Intake::Header;
            self.finish(context, slot, Err(refused));
            return true;
        }
        self.connection.intake = Intake::Discard { slot, left, refused };
        self.receive(Chain::EMPTY, 0, 0).is_some()
    }

    /// Receives: up to `wanted` bytes into `chain` from `at` on, and says how many; what comes behind them goes to staging. `None` when
    /// nothing has come.
    fn receive(&mut self, chain: Chain, at: u32, wanted: u32) -> Option<u32> {
        if self.dry {
            return None;
        }
        // What this poll may still cost bounds the call; what comes behind a part must stay in the socket.
        // Records are opened into staging, and what comes of them is copied from there.
        let records = self.connection.socket.has_records();
        let part = if records { 0 } else { u64::from(wanted).min(self.cost.left()) as u32 };
        let Connection { socket, memory, staging, .. } = &mut self.connection;
        memory.ranges(chain, at, part, &mut self.ranges);
        let room = if part == wanted || records { staging.room() } else { &mut [] };
        let asked = part as usize + room.len();
        let moved = socket.receive(memory.view(), &self.ranges, room);
        self.cost.spend(COST_OF_CALL + socket.charge() as u64);
        match moved {
            Ok(Moved::Bytes(bytes)) => {
                let direct = bytes.min(part as usize);
                staging.received(bytes - direct);
                self.dry = bytes < asked && !records;
                self.received = true;
                self.cost.spend(direct as u64);
                Some(direct as u32)
            }
            Ok(Moved::Later) => {
                self.dry = true;
                None
            }
            Ok(Moved::End) => {
                let between = matches!(self.connection.intake, Intake::Header)
                    && self.connection.staging.filled().is_empty();
                self.connection.end(if between { ConnectionEnd::Closed } else { ConnectionEnd::CutOff });
                None
            }
            Err(ReceiveError::Lost(errno)) => {
                self.connection.end(ConnectionEnd::Lost(errno.raw_os_error()));
                None
            }
            Err(ReceiveError::Violation(violation)) => {
                self.connection.violated(violation);
                None
            }
            Err(ReceiveError::Memory) => {
                self.connection.end(ConnectionEnd::Memory);
                None
            }
        }
    }
}

/// Whether the limits let a request pass.
fn admitted(context: &mut CoreContext, ask: Ask, length: u32) -> bool {
    let passed = match ask {
        Ask::Read | Ask::Write => context.admit(length.into()),
        Ask::Flush => context.reserve(),
        Ask::Trim | Ask::WriteZeroes => context.admit(cost_of_freeing(length)),
        Ask::BlockStatus => context.admit(0),
    };
    passed.is_ok()
}
