//! What becomes of a guest that asks for what it may not: failure policies, one for each cause (VPIO, section 3.5).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why something was denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// A register that the device does not have, or a value that it must not be given.
    Register,
    /// A transfer from or to memory that is not the guest's, or not for that.
    Dma,
    /// The hardware: gone, silent, or interrupting for ever. No policy: it is not the guest's doing.
    Hardware,
}

impl Cause {
    /// As it is written in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Register => "register",
            Cause::Dma => "dma",
            Cause::Hardware => "hardware",
        }
    }
}

/// What the guest sees of a denial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The write is dropped, the read gives zeros.
    #[default]
    Ignore,
    /// As [`Policy::Ignore`], and the device's own error interrupt.
    Error,
    /// The VMM is told to stop the guest; until the device is reset every access is denied.
    Stop,
}

impl Policy {
    /// As it is written in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Ignore => "ignore",
            Policy::Error => "error",
            Policy::Stop => "stop",
        }
    }
}

impl FromStr for Policy {
    type Err = PolicyError;

    fn from_str(word: &str) -> Result<Self, PolicyError> {
        [Policy::Ignore, Policy::Error, Policy::Stop]
            .into_iter()
            .find(|policy| policy.name() == word)
            .ok_or_else(|| PolicyError::Policy(word.to_owned()))
    }
}

/// A policy for each cause that a guest can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Policies {
    /// For [`Cause::Register`].
    pub register: Policy,
    /// For [`Cause::Dma`].
    pub dma: Policy,
}

/// Words that name no policies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// Not a policy.
    #[error("{0:?} is no policy: say ignore, error or stop")]
    Policy(String),
    /// Not a cause.
    #[error("{0:?} is no cause: say register or dma, as in `dma=stop,register=ignore`")]
    Cause(String),
}

impl Policies {
    /// The same for every cause.
    pub fn all(policy: Policy) -> Self {
        Policies { register: policy, dma: policy }
    }

    /// What follows a denial by `cause`. Faults of the hardware have no policy and are ignored.
    pub fn of(&self, cause: Cause) -> Policy {
        match cause {
            Cause::Register => self.register,
            Cause::Dma => self.dma,
            Cause::Hardware => Policy::Ignore,
        }
    }
}

impl FromStr for Policies {
    type Err = PolicyError;

    /// `stop`, or `dma=stop,register=ignore`. What is not named is [`Policy::Ignore`].
    fn from_str(words: &str) -> Result<Self, PolicyError> {
        let mut policies = Policies::default();
        for word in words.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match word.split_once('=') {
                None => policies = Policies::all(word.parse()?),
                Some((cause, policy)) => {
                    let policy = policy.trim().parse()?;
                    match cause.trim() {
                        "register" => policies.register = policy,
                        "dma" => policies.dma = policy,
                        other => return Err(PolicyError::Cause(other.to_owned())),
                    }
                }
            }
        }
        Ok(policies)
    }
}

impl fmt::Display for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.register == self.dma {
            return f.write_str(self.dma.name());
        }
        write!(f, "dma={},register={}", self.dma.name(), self.register.name())
    }
}

impl TryFrom<String> for Policies {
    type Error = PolicyError;

    fn try_from(words: String) -> Result<Self, PolicyError> {
        words.parse()
    }
}

impl From<Policies> for String {
    fn from(policies: Policies) -> String {
        policies.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_policies_and_back() {
        assert_eq!("stop".parse(), Ok(Policies::all(Policy::Stop)));
        let mixed = Policies { register: Policy::Ignore, dma: Policy::Stop };
        assert_eq!("dma=stop, register=ignore".parse(), Ok(mixed));
        assert_eq!("dma=stop".parse(), Ok(mixed));
        assert_eq!("error,dma=stop".parse(), Ok(Policies { register: Policy::Error, dma: Policy::Stop }));
        assert_eq!("".parse(), Ok(Policies::default()));
        for policies in [mixed, Policies::default(), Policies::all(Policy::Error)] {
            assert_eq!(policies.to_string().parse(), Ok(policies));
        }
        assert_eq!("halt".parse::<Policies>(), Err(PolicyError::Policy("halt".into())));
        assert_eq!("irq=stop".parse::<Policies>(), Err(PolicyError::Cause("irq".into())));
        assert_eq!(mixed.of(Cause::Hardware), Policy::Ignore);
    }
}
