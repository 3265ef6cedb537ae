//! Plays what a driver does against a machine, the way the monitor does.

use ioplane_model::{Check, Machine, ModelInput, StateModel, Way};

/// A driver's accesses, counted.
pub struct Play {
    pub machine: Machine,
    /// Registers' pieces that were accessed, and those that were hooked.
    pub accesses: u64,
    pub hooked: u64,
    /// Checks that were asked for; all pass except those that refuse.
    pub checks: Vec<&'static Check>,
    /// What was refused.
    pub denied: Vec<&'static str>,
    pub ignored: Vec<&'static str>,
}

impl Play {
    pub fn new(model: &'static StateModel) -> Self {
        let machine = Machine::new(model).expect("a sound model");
        Self { machine, accesses: 0, hooked: 0, checks: vec![], denied: vec![], ignored: vec![] }
    }

    pub fn write(&mut self, offset: u64, width: usize, value: u32) {
        let bytes = value.to_le_bytes();
        self.accesses += 1;
        let mut hooked = false;
        for piece in self.machine.at(Way::Write, offset, width).iter() {
            let Some(register) = piece.register else { continue };
            if self.machine.hooked(register, Way::Write) {
                hooked = true;
                let value = self.machine.merged(piece, &bytes[..width]);
                self.tell(ModelInput::Write { register, value });
            }
        }
        self.hooked += u64::from(hooked);
    }

    pub fn read(&mut self, offset: u64, width: usize) {
        self.accesses += 1;
        let mut hooked = false;
        for piece in self.machine.at(Way::Read, offset, width).iter() {
            let Some(register) = piece.register else { continue };
            if self.machine.hooked(register, Way::Read) {
                hooked = true;
                self.tell(ModelInput::Read { register });
            }
        }
        self.hooked += u64::from(hooked);
    }

    pub fn tell(&mut self, seen: ModelInput) {
        let pending = self.machine.ask(seen);
        let mut pass = true;
        for check in pending.checks() {
            match check {
                Check::Deny(why) => {
                    self.denied.push(why);
                    pass = false;
                }
                Check::Ignore(why) => {
                    self.ignored.push(why);
                    pass = false;
                }
                other => self.checks.push(other),
            }
        }
        if pass {
            self.machine.commit(pending);
        }
    }

    pub fn interrupt(&mut self, bits: u32) {
        self.tell(ModelInput::Interrupt { bits });
    }

    /// The hardware's register says this: told if a state waits for it.
    pub fn hardware(&mut self, name: &str, value: u32) {
        let register = self.machine.find(name).expect("a register");
        if self.machine.awaits().any(|wait| wait.register == register) {
            self.tell(ModelInput::Became { register, value });
        }
    }

    /// The state of a region.
    pub fn state(&self, region: &str) -> &'static str {
        self.machine
            .states()
            .find(|(name, _)| *name == region)
            .map(|(_, state)| state.name)
            .expect("a region")
    }

    /// What was refused must be nothing.
    pub fn assert_allowed(&self) {
        assert!(self.denied.is_empty(), "a stock driver was refused: {:?}", self.denied);
    }
}
