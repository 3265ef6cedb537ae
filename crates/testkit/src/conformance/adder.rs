//! The toy virtio device under test.

use ioplane_device::{Access, RegisterAddress};
use ioplane_virtio::spec::mmio::CONFIG;

use super::virtio::{ConfigTouch, DeviceUnderTest, Fixture, Program, Request};
use super::{Bus, Dice};
use crate::toy::Adder;
use crate::toy::virtio::Bench;

pub struct Adding;

impl DeviceUnderTest for Adding {
    type Model = Adder;

    fn fixture(&self) -> Fixture<Adder> {
        let bench = Bench::new();
        let valve = bench.gate.clone();
        let model = move || Adder::new(bench.clone());
        let program = |_queue| Box::new(Sums) as Box<dyn Program>;
        Fixture { model: Box::new(model), valve: Some(valve), program: Box::new(program) }
    }

    fn features(&self) -> u64 {
        0
    }

    fn touch(&self) -> ConfigTouch {
        add
    }
}

/// Adds to the vCPU's own adder and looks at it: a write that is lost or done twice shows in every look that follows.
fn add(bus: &Bus, vcpu: usize, dice: &mut Dice) -> Result<u64, String> {
    let at = CONFIG + 8 * vcpu as u64;
    bus.access(RegisterAddress::Bar(0, at), Access::Write(&dice.below(1000).to_le_bytes()))?;
    let mut sum = [0; 8];
    bus.access(RegisterAddress::Bar(0, at), Access::Read(&mut sum))?;
    Ok(u64::from_le_bytes(sum))
}

/// Numbers, and sums of all so far: one lost, repeated or overtaken shows in every answer that follows.
struct Sums;

impl Program for Sums {
    fn ask(&mut self, _slot: u16, dice: &mut Dice) -> Result<Request, String> {
        Ok(Request { bytes: dice.roll().to_le_bytes().into(), readable: vec![8], writable: vec![8] })
    }

    fn answer(&mut self, bytes: &[u8], written: u32) -> Result<u64, String> {
        match bytes.try_into() {
            Ok(sum) if written == 8 => Ok(u64::from_le_bytes(sum)),
            _ => Err(format!("transcript: an answer of {written} bytes instead of 8")),
        }
    }
}
