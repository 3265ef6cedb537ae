//! How often one address may ask, and how much at a time.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Connections that an address may begin at once.
const BURST: u32 = 30;
/// Then one for each of these.
const EACH: Duration = Duration::from_secs(1);
/// Connections of an address at a time: a few addresses leave room for others.
const AT_ONCE: u32 = 8;
/// Addresses that are remembered.
const MOST: usize = 4096;

/// Counts connections by address; an IPv6 host has all of its /64.
#[derive(Debug, Default)]
pub(crate) struct AddressLimits {
    /// When an address will have paid for all of its connections.
    paid: HashMap<IpAddr, Instant>,
    /// Connections that are there. Whoever begins them limits how many there are of all addresses.
    open: HashMap<IpAddr, u32>,
}

/// What becomes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Allowed {
    Yes,
    /// The first one that is not.
    NoMore,
    No,
}

impl AddressLimits {
    /// Takes one of the places of `address`, if one is free. It is given back by [`AddressLimits::end`].
    pub fn begin(&mut self, address: IpAddr) -> bool {
        let open = self.open.entry(network(address)).or_insert(0);
        let free = *open < AT_ONCE;
        *open += u32::from(free);
        free
    }

    /// Gives a place back.
    pub fn end(&mut self, address: IpAddr) {
        let address = network(address);
        if let Some(open) = self.open.get_mut(&address) {
            *open = open.saturating_sub(1);
            if *open == 0 {
                self.open.remove(&address);
            }
        }
    }

    /// Whether `address` may begin another connection.
    pub fn allow(&mut self, address: IpAddr, now: Instant) -> Allowed {
        let address = network(address);
        if self.paid.len() >= MOST && !self.paid.contains_key(&address) {
            self.paid.retain(|_, paid| *paid > now);
            // So many addresses ask often at a time: whoever is new waits.
            if self.paid.len() >= MOST {
                return Allowed::No;
            }
        }
        let paid = self.paid.entry(address).or_insert(now);
        let next = (*paid).max(now) + EACH;
        let most = now + EACH * BURST;
        if next <= most {
            *paid = next;
            return Allowed::Yes;
        }
        // One step beyond, so that the first refusal is told from the others.
        let first = *paid <= most;
        *paid = (*paid).max(most + Duration::from_nanos(1));
        if first { Allowed::NoMore } else { Allowed::No }
    }
}

fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_burst_and_then_a_rate() {
        let (mut limits, start) = (AddressLimits::default(), Instant::now());
        let one: IpAddr = "10.0.0.1".parse().unwrap();
        for _ in 0..BURST {
            assert_eq!(limits.allow(one, start), Allowed::Yes);
        }
        assert_eq!(limits.allow(one, start), Allowed::NoMore);
        assert_eq!(limits.allow(one, start), Allowed::No);
        assert_eq!(limits.allow("10.0.0.2".parse().unwrap(), start), Allowed::Yes);
        let later = start + EACH + Duration::from_millis(1);
        assert_eq!(limits.allow(one, later), Allowed::Yes);
        assert_ne!(limits.allow(one, later), Allowed::Yes);
    }

    #[test]
    fn an_address_has_some_places_at_a_time() {
        let mut limits = AddressLimits::default();
        let (one, other): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let taken = |limits: &mut AddressLimits| (0..100).filter(|_| limits.begin(one)).count();
        assert_eq!(taken(&mut limits), AT_ONCE as usize);
        assert!(limits.begin(other));
        limits.end(one);
        assert_eq!(taken(&mut limits), 1);
        (0..AT_ONCE).for_each(|_| limits.end(one));
        limits.end(other);
        assert!(limits.open.is_empty(), "{:?}", limits.open);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut limits, start) = (AddressLimits::default(), Instant::now());
        for number in 0..100_000u128 {
            // Each in a network of its own.
            limits.allow(Ipv6Addr::from_bits(0x2001 << 112 | number << 64).into(), start);
            assert!(limits.paid.len() <= MOST);
        }
        // All of one network count as one.
        let mut limits = AddressLimits::default();
        let refused = (0..100u128)
            .filter(|number| {
                limits.allow(Ipv6Addr::from_bits(0x2001 << 112 | number).into(), start) != Allowed::Yes
            })
            .count();
        assert_eq!(refused, 100 - BURST as usize);
        let known = start + EACH * (BURST + 1);
        assert_eq!(limits.allow("10.0.0.1".parse().unwrap(), known), Allowed::Yes);
    }
}
