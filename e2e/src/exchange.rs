//! Two guests that exchange TCP over their ioplane NICs, with digests at both ends.

use crate::agent::Agent;
use crate::network::fault;
use crate::protocol::{Command, Interface, Throughput, Transfer};
use anyhow::{Context, Result, bail, ensure};
use std::time::Duration;

/// How long a guest may take to bring an interface up: an address is tried for a second or two.
const UP: Duration = Duration::from_secs(90);
/// How long a transfer may take beyond its time: what is in its buffers still has to go.
const REST: Duration = Duration::from_secs(90);

/// One end: a guest and its interface.
#[derive(Debug)]
pub struct End<'a> {
    agent: &'a Agent,
    pub interface: Interface,
}

impl<'a> End<'a> {
    /// Brings up the interface with the address `mac`.
    pub fn up(agent: &'a Agent, mac: &str) -> Result<Self> {
        let interface = agent.call(Command::NetUp { mac: mac.into() }, UP)?;
        Ok(End { agent, interface })
    }

    /// Sends to the other end for `seconds`. Whether what arrived is what was sent, the passage knows.
    pub fn send_to(&self, other: &End<'_>, port: u16, seconds: f64) -> Result<Passage> {
        let limit = Duration::from_secs_f64(seconds) + REST;
        let receive = Command::NetReceive { index: other.interface.index, port };
        let receiving = other.agent.begin(receive)?;
        let send = Command::NetSend {
            index: self.interface.index,
            to: other.interface.mac.clone(),
            port,
            seconds: Some(seconds),
            seed: u64::from(port),
            write: 0,
        };
        let sent: Transfer = self.agent.call(send, limit).context("sending")?;
        let received = serde_json::from_value(receiving.end(limit, |_| {}).context("receiving")?)?;
        Ok(Passage { sent, received })
    }

    /// iperf3 to the other end and back at once, for `seconds`.
    pub fn iperf(&self, other: &End<'_>, port: u16, seconds: u32) -> Result<Throughput> {
        let limit = Duration::from_secs(seconds.into()) + REST;
        let serving = other.agent.begin(Command::IperfServe { port })?;
        let (interface, to) = (self.interface.name.clone(), other.interface.mac.clone());
        let run = Command::IperfRun { interface, to, port, seconds };
        let found: Throughput = self.agent.call(run, limit).context("the client of iperf3")?;
        serving.end(limit, |_| {}).context("the server of iperf3")?;
        ensure!(found.there > 0 && found.back > 0, "iperf3 moved nothing: {found:?}");
        Ok(found)
    }
}

/// One way, as both ends tell of it.
#[derive(Debug)]
pub struct Passage {
    pub sent: Transfer,
    pub received: Transfer,
}

impl Passage {
    /// What is wrong, in words.
    pub fn fault(&self) -> Option<String> {
        fault(&self.sent, &self.received)
    }

    /// What was sent; an error if that is not what was received.
    pub fn right(self) -> Result<Transfer> {
        match self.fault() {
            Some(fault) => bail!(fault),
            None => Ok(self.sent),
        }
    }
}

/// Both ways at once; the bytes of each, checked.
pub fn exchange(a: &End<'_>, b: &End<'_>, port: u16, seconds: f64) -> Result<[Transfer; 2]> {
    let [there, back] = both_ways(a, b, port, seconds)?;
    Ok([there.right()?, back.right()?])
}

/// Both ways at once, right or wrong.
pub fn both_ways(a: &End<'_>, b: &End<'_>, port: u16, seconds: f64) -> Result<[Passage; 2]> {
    std::thread::scope(|scope| {
        let back = scope.spawn(|| b.send_to(a, port + 1, seconds));
        let there = a.send_to(b, port, seconds)?;
        let back = back.join().map_err(|_| anyhow::anyhow!("the way back panicked"))??;
        Ok([there, back])
    })
}
