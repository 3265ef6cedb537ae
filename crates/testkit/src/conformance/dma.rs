//! The toy DMA engine's kit: one vCPU copies, the other hits the registers from its side.

use std::sync::Arc;

use ioplane_device::SavedState;
use ioplane_memory::{GuestMap, GuestView};

use super::in_process::InProcess;
use super::{Bus, Dice, Kit, Plan, Ran, TestMachine, Vcpu};
use crate::toy::dma::registers::*;
use crate::toy::dma::{CHUNK, ToyDma};
use crate::toy::{Gate, mix};

const SOURCE_AT: u64 = 0x10000;
const TARGET_AT: u64 = 0x40000;
const AREA: u64 = 0x8000;
const MEMORY: u64 = 0x80000;

pub struct DmaKit;

impl Kit for DmaKit {
    fn boot(&self, plan: &Plan) -> TestMachine {
        let memory = Arc::new(GuestMap::anonymous(MEMORY).expect("guest memory"));
        let gate = Gate::new(0);
        let (map, stall) = (memory.clone(), gate.clone());
        let host = InProcess::start(plan, move || ToyDma::new(map.clone(), stall.clone()));
        let buses = vec![Bus::new(host.clone()), Bus::new(host.clone())];
        let copier = Copier {
            bus: buses[0].clone(),
            memory: GuestView::new(memory.clone()),
            dice: Dice::new(plan.seed),
            left: plan.rounds / 8,
            copy: None,
            seen: Vec::new(),
        };
        let meddler = Meddler {
            bus: buses[1].clone(),
            dice: Dice::new(!plan.seed),
            left: plan.rounds,
            seen: Vec::new(),
        };
        TestMachine {
            host,
            vcpus: vec![Box::new(copier), Box::new(meddler)],
            buses,
            probes: Vec::new(),
            gate: Some(gate),
            memory,
            device_pages: std::iter::once(TARGET_AT..TARGET_AT + AREA).collect(),
        }
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        let with = |what: &str, changes: &[(usize, u64)]| {
            let mut state = good.clone();
            for (word, value) in changes {
                state.body[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
            }
            (what.to_owned(), state)
        };
        const TARGET: usize = 1;
        const LENGTH: usize = 2;
        const STATUS: usize = 3;
        const POSITION: usize = 4;
        let busy = [
            (0, SOURCE_AT),
            (TARGET, TARGET_AT),
            (LENGTH, 4 * CHUNK),
            (STATUS, STATUS_BUSY),
            (POSITION, CHUNK),
        ];
        let busy_with = |what: &str, change: (usize, u64)| {
            let mut changes = busy.to_vec();
            changes.push(change);
            with(what, &changes)
        };
        vec![
            with("a status that is none", &[(STATUS, 4)]),
            with("a position in a copy that is not", &[(STATUS, STATUS_DONE), (POSITION, CHUNK)]),
            busy_with("a target outside memory", (TARGET, MEMORY - CHUNK)),
            busy_with("a target at the end of the address space", (TARGET, u64::MAX - CHUNK)),
            busy_with("a position beyond the end", (POSITION, 1 << 40)),
            busy_with("half a chunk copied", (POSITION, 3)),
            busy_with("no length", (LENGTH, 0)),
        ]
    }
}

/// Copies blocks and looks at what came.
struct Copier {
    bus: Arc<Bus>,
    memory: GuestView,
    dice: Dice,
    left: u32,
    copy: Option<(u64, u64)>,
    seen: Vec<u64>,
}

impl Copier {
    fn start(&mut self) -> Result<(), String> {
        let length = CHUNK * (1 + self.dice.below(24));
        let at = CHUNK * self.dice.below((AREA - length) / CHUNK);
        for offset in (0..length).step_by(8) {
            let word = self.dice.roll().to_le_bytes();
            self.memory.write(SOURCE_AT + at + offset, &word).map_err(|e| e.to_string())?;
        }
        self.bus.write(SOURCE, SOURCE_AT + at)?;
        self.bus.write(TARGET, TARGET_AT + at)?;
        self.bus.write(LENGTH, length)?;
        self.bus.write(COMMAND, 1)?;
        self.copy = Some((at, length));
        Ok(())
    }

    fn finish(&mut self, at: u64, length: u64) -> Result<(), String> {
        self.seen.push(self.bus.read(SUM)?);
        let mut bytes = vec![0; length as usize];
        self.memory.read(TARGET_AT + at, &mut bytes).map_err(|e| e.to_string())?;
        self.seen.push(bytes.as_chunks::<8>().0.iter().fold(0, |sum, w| mix(sum, u64::from_le_bytes(*w))));
        self.bus.write(ADDER[0], length)?;
        self.seen.push(self.bus.read(ADDER[0])?);
        (self.copy, self.left) = (None, self.left - 1);
        Ok(())
    }
}

impl Vcpu for Copier {
    fn step(&mut self) -> Result<Ran, String> {
        let Some((at, length)) = self.copy else {
            if self.left == 0 {
                return Ok(Ran::Done);
            }
            return self.start().map(|()| Ran::Going);
        };
        match self.bus.read(STATUS)? {
            STATUS_BUSY => Ok(Ran::Waiting),
            STATUS_DONE => self.finish(at, length).map(|()| Ran::Going),
            other => Err(format!("transcript: a copy ended with status {other:#x}")),
        }
    }

    /// A copy gets on when its status is read, and the device is recognised as still when it has ended.
    fn may_pause(&self) -> bool {
        self.copy.is_none()
    }

    fn seen(&self) -> Vec<u64> {
        self.seen.clone()
    }
}

/// Adds numbers, and looks at the status, which moves the other's copy on.
struct Meddler {
    bus: Arc<Bus>,
    dice: Dice,
    left: u32,
    seen: Vec<u64>,
}

impl Vcpu for Meddler {
    fn step(&mut self) -> Result<Ran, String> {
        if self.left == 0 {
            return Ok(Ran::Done);
        }
        self.left -= 1;
        self.bus.write(ADDER[1], self.dice.below(1000))?;
        if self.bus.read(STATUS)? > STATUS_DONE {
            return Err("transcript: a status that is none".into());
        }
        self.seen.push(self.bus.read(ADDER[1])?);
        Ok(Ran::Going)
    }

    fn seen(&self) -> Vec<u64> {
        self.seen.clone()
    }
}
