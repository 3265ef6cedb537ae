//! Two guests of one L1 that do the same work at once, each in a way of its own. Their processor goes from one to the other within milliseconds, so that what else
//! this machine does meets both, and the quotient of what they took hardly shows it.

use super::MINUTE;
use anyhow::{Result, bail};
use ioplane_e2e::{L1, L2};

/// Two guests with nothing beside them in their L1.
pub struct TwoGuests<'a> {
    l1: &'a L1,
    guests: [L2<'a>; 2],
    /// A thread of each one's QEMU, in L1.
    threads: [u64; 2],
}

impl<'a> TwoGuests<'a> {
    pub fn new(l1: &'a L1, guests: [L2<'a>; 2]) -> Result<TwoGuests<'a>> {
        let threads = [guests[0].vcpu_thread()?, guests[1].vcpu_thread()?];
        Ok(TwoGuests { l1, guests, threads })
    }

    /// What both QEMUs have taken of L1's processor so far, their guests' part included, in ns.
    fn taken(&self) -> Result<[f64; 2]> {
        let [one, other] = self.threads;
        let said = self.l1.run(
            &format!(
                "for thread in {one} {other}; do
                     sum=0
                     for file in /proc/$thread/task/*/schedstat; do
                         read -r ns rest <$file && sum=$((sum + ns))
                     done
                     echo $sum
                 done"
            ),
            MINUTE,
        )?;
        let sums: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [one, other] = sums[..] else { bail!("two times: {said}") };
        Ok([one, other])
    }

    /// Runs `work` in both: the root of what the first one took against the second. Of two runs between which they have changed places, the quotient is then
    /// what one way takes against the other, whichever guest is the slower one.
    pub fn run(&self, work: &str) -> Result<f64> {
        let before = self.taken()?;
        let mut started = [0; 2];
        for (number, guest) in started.iter_mut().zip(&self.guests) {
            *number = guest.start(work)?;
        }
        for (number, guest) in started.into_iter().zip(&self.guests) {
            guest.finish(number, work)?;
        }
        let after = self.taken()?;
        Ok(((after[0] - before[0]) / (after[1] - before[1])).sqrt())
    }

    pub fn kill(self) -> Result<()> {
        self.guests.into_iter().try_for_each(L2::kill)
    }
}
