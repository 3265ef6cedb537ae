//! The toy ring's kit: each vCPU drives one queue and hits the registers meanwhile.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ioplane_device::SavedState;
use ioplane_memory::{GuestMap, PAGE};

use super::in_process::InProcess;
use super::{Bus, Dice, Kit, Plan, Probe, Ran, TestMachine, Vcpu};
use crate::toy::ring::registers::*;
use crate::toy::ring::{Counted, DEPTH, QUEUES, RING_BYTES, Wires};
use crate::toy::{RingDriver, ToyRing, mix};

const RINGS_AT: u64 = 0x4000;
const MEMORY: u64 = 0x20000;

pub struct RingKit;

impl Kit for RingKit {
    fn boot(&self, plan: &Plan) -> TestMachine {
        let memory = Arc::new(GuestMap::anonymous(MEMORY).expect("guest memory"));
        let wires = Wires::new();
        let (map, to) = (memory.clone(), wires.clone());
        let host = InProcess::start(plan, move || ToyRing::new(map.clone(), to.clone()));
        let buses: Vec<_> = (0..QUEUES).map(|_| Bus::new(host.clone())).collect();
        buses[0].write(RINGS, RINGS_AT).expect("a device that runs");
        buses[0].write(ENABLE, (1 << QUEUES) - 1).expect("a device that runs");
        let driver = |queue| RingDriver::new(&memory, &wires, RINGS_AT, queue);
        let vcpus = (0..QUEUES).map(|queue| -> Box<dyn Vcpu> {
            Box::new(Asker {
                bus: buses[usize::from(queue)].clone(),
                ring: driver(queue),
                adder: ADDER[usize::from(queue)],
                dice: Dice::new(plan.seed << 8 | u64::from(queue)),
                left: plan.rounds,
                seen: Vec::new(),
            })
        });
        let vcpus = vcpus.collect();
        let probe = |queue: u16| -> Box<dyn Probe> {
            Box::new(RingProbe {
                ring: driver(queue),
                call: wires.calls[usize::from(queue)].clone(),
                wires: wires.clone(),
                queue: usize::from(queue),
                dice: Dice::new(plan.seed),
                sums: Vec::new(),
                sum: 0,
            })
        };
        let device_page = |queue: u16| RINGS_AT + u64::from(queue) * RING_BYTES + PAGE;
        TestMachine {
            host,
            vcpus,
            buses,
            probes: (0..QUEUES).map(probe).collect(),
            gate: Some(wires.gate.clone()),
            device_pages: (0..QUEUES).map(|q| device_page(q)..device_page(q) + PAGE).collect(),
            memory,
        }
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        [
            ("rings outside memory", 0, MEMORY - PAGE),
            ("rings that wrap", 0, u64::MAX - PAGE + 1),
            ("rings off a page", 0, RINGS_AT + 2),
            ("a queue that is none", 1, 1 << QUEUES | 1),
            ("an index of more than 16 bits", 4, 1 << 16),
            ("more in flight than a ring holds", 5, u64::from(DEPTH) + 1),
        ]
        .map(|(what, word, value)| {
            let mut state = good.clone();
            state.body[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
            (what.to_owned(), state)
        })
        .into()
    }
}

/// Publishes bursts and takes the answers.
struct Asker {
    bus: Arc<Bus>,
    ring: RingDriver,
    adder: u64,
    dice: Dice,
    left: u32,
    seen: Vec<u64>,
}

impl Vcpu for Asker {
    fn step(&mut self) -> Result<Ran, String> {
        if let Some(answer) = self.ring.answer() {
            self.seen.push(answer);
            return Ok(Ran::Going);
        }
        if self.ring.outstanding() > 0 {
            self.bus.read(ALIVE)?;
            return Ok(Ran::Waiting);
        }
        if self.left == 0 {
            return Ok(Ran::Done);
        }
        self.left -= 1;
        self.bus.write(self.adder, self.dice.below(1000))?;
        for _ in 0..1 + self.dice.below(u64::from(DEPTH)) {
            if self.ring.publish(self.dice.roll()) {
                self.ring.kick();
            }
        }
        self.seen.push(self.bus.read(self.adder)?);
        Ok(Ran::Going)
    }

    fn seen(&self) -> Vec<u64> {
        self.seen.clone()
    }
}

struct RingProbe {
    ring: RingDriver,
    call: Arc<Counted>,
    wires: Arc<Wires>,
    queue: usize,
    dice: Dice,
    /// Answers to come.
    sums: Vec<u64>,
    sum: u64,
}

impl Probe for RingProbe {
    fn publish(&mut self) -> bool {
        let request = self.dice.roll();
        self.sum = mix(self.sum, request);
        self.sums.push(self.sum);
        self.ring.publish(request)
    }

    fn kick(&mut self) {
        self.ring.kick();
    }

    fn answered(&mut self) -> Result<bool, String> {
        while let Some(answer) = self.ring.answer() {
            if answer != self.sums.remove(0) {
                return Err("transcript: a wrong answer".into());
            }
        }
        Ok(self.sums.is_empty())
    }

    fn want_interrupts(&mut self, wanted: bool) {
        self.ring.want_interrupts(wanted);
    }

    fn interrupts(&self) -> u64 {
        self.call.count()
    }

    fn kicks_taken(&self) -> Option<u64> {
        Some(self.wires.taken[self.queue].load(Ordering::Acquire))
    }
}
