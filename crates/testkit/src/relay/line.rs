//! One direction of a relay, without devices and without a clock: which frames come out, and when.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use etherparse::{SlicedPacket, TransportSlice};

/// What a direction does to frames.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conditions {
    /// From one end to the other. If it gets shorter, frames still come out in the order in which they went in.
    pub delay: Duration,
    /// Of a hundred frames so many are lost, at random.
    pub loss_percent: f64,
    /// Most bytes of frames that are on their way; what comes on top is dropped, as by a buffer that is full.
    pub most_bytes: usize,
    /// Every frame is dropped, those on their way as well. Nobody is told.
    pub cut: bool,
}

impl Default for Conditions {
    /// A wire.
    fn default() -> Self {
        Conditions { delay: Duration::ZERO, loss_percent: 0.0, most_bytes: 64 << 20, cut: false }
    }
}

/// What became of frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RelayCounts {
    /// Came out.
    pub carried: u64,
    /// Bytes of TCP's data in those of them: a frame that asks for an address, acknowledges or ends has none.
    pub data_bytes: u64,
    /// Were lost at random.
    pub lost: u64,
    /// Found the buffer full.
    pub overflowed: u64,
    /// Were dropped since the direction was cut.
    pub cut: u64,
    /// Came out, and the device at the other end did not take them: they are not among those that were carried.
    pub refused: u64,
}

/// See the module. The seed decides which of the frames that are offered are lost: the n-th is or is not, whatever was done to those before it.
#[derive(Debug)]
pub struct DelayLine {
    conditions: Conditions,
    dice: u64,
    /// When each comes out.
    on_their_way: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    counts: RelayCounts,
}

impl DelayLine {
    pub fn new(seed: u64, conditions: Conditions) -> DelayLine {
        let counts = RelayCounts::default();
        DelayLine { conditions, dice: seed, on_their_way: VecDeque::new(), bytes: 0, counts }
    }

    pub fn conditions(&self) -> Conditions {
        self.conditions
    }

    pub fn counts(&self) -> RelayCounts {
        self.counts
    }

    /// Of frames that are on their way.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn set(&mut self, conditions: Conditions) {
        self.conditions = conditions;
        if conditions.cut {
            self.counts.cut += self.on_their_way.len() as u64;
            self.on_their_way.clear();
            self.bytes = 0;
        }
    }

    /// A frame goes in.
    pub fn offer(&mut self, now: Instant, frame: &[u8]) {
        let unlucky = self.draw() < self.conditions.loss_percent / 100.0;
        if self.conditions.cut {
            self.counts.cut += 1;
        } else if unlucky {
            self.counts.lost += 1;
        } else if self.bytes + frame.len() > self.conditions.most_bytes {
            self.counts.overflowed += 1;
        } else {
            let last = self.on_their_way.back().map_or(now, |(due, _)| *due);
            self.on_their_way.push_back((last.max(now + self.conditions.delay), frame.to_vec()));
            self.bytes += frame.len();
        }
    }

    /// When the next frame comes out.
    pub fn due(&self) -> Option<Instant> {
        self.on_their_way.front().map(|(due, _)| *due)
    }

    /// The next frame that has come out.
    pub fn take(&mut self, now: Instant) -> Option<Vec<u8>> {
        if self.due()? > now {
            return None;
        }
        let (_, frame) = self.on_their_way.pop_front()?;
        self.bytes -= frame.len();
        self.counts.carried += 1;
        self.counts.data_bytes += data_bytes(&frame);
        Some(frame)
    }

    /// A frame that has come out was not taken.
    pub fn refused(&mut self, frame: &[u8]) {
        self.counts.carried -= 1;
        self.counts.data_bytes -= data_bytes(frame);
        self.counts.refused += 1;
    }

    /// From 0 up to, not with, 1 (splitmix64: any seed is good).
    fn draw(&mut self) -> f64 {
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.dice;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn data_bytes(frame: &[u8]) -> u64 {
    match SlicedPacket::from_ethernet(frame).map(|packet| packet.transport) {
        Ok(Some(TransportSlice::Tcp(segment))) => segment.payload().len() as u64,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    /// A segment of TCP.
    fn segment(data: &[u8]) -> Vec<u8> {
        let headers = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        let mut frame = Vec::new();
        headers.tcp(1, 2, 3, 4).ack(5).write(&mut frame, data).unwrap();
        frame
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Which of `count` frames, one after the other, come out.
    fn survivors(seed: u64, loss_percent: f64, count: u32) -> Vec<u32> {
        let now = Instant::now();
        let mut line = DelayLine::new(seed, Conditions { loss_percent, ..Conditions::default() });
        (0..count).for_each(|number| line.offer(now, &number.to_le_bytes()));
        let frames = std::iter::from_fn(|| line.take(now));
        frames.map(|frame| u32::from_le_bytes(frame.try_into().unwrap())).collect()
    }

    #[test]
    fn frames_come_out_after_the_delay_in_order() {
        let start = Instant::now();
        let mut line = DelayLine::new(1, Conditions { delay: ms(100), ..Conditions::default() });
        line.offer(start, b"one");
        line.offer(start + ms(10), b"two");
        assert_eq!(line.take(start + ms(99)), None);
        assert_eq!(line.due(), Some(start + ms(100)));
        assert_eq!(line.take(start + ms(100)).unwrap(), b"one");
        assert_eq!(line.take(start + ms(100)), None);
        // A shorter way does not overtake.
        line.set(Conditions::default());
        line.offer(start + ms(20), b"three");
        assert_eq!(line.take(start + ms(109)), None);
        assert_eq!(line.take(start + ms(110)).unwrap(), b"two");
        assert_eq!(line.take(start + ms(110)).unwrap(), b"three");
        assert_eq!((line.due(), line.bytes(), line.counts().carried), (None, 0, 3));
    }

    #[test]
    fn a_full_buffer_drops_and_is_bounded() {
        let start = Instant::now();
        let mut line =
            DelayLine::new(1, Conditions { delay: ms(10), most_bytes: 2500, ..Conditions::default() });
        (0..10).for_each(|_| line.offer(start, &[0; 1000]));
        assert_eq!((line.bytes(), line.counts().overflowed), (2000, 8));
        assert!(line.take(start + ms(10)).is_some());
        line.offer(start + ms(10), &[0; 1000]);
        assert_eq!((line.bytes(), line.counts().overflowed), (2000, 8));
    }

    #[test]
    fn what_was_not_taken_was_not_carried() {
        let now = Instant::now();
        let mut line = DelayLine::new(1, Conditions::default());
        // A request, what acknowledges, and what asks for an address.
        [segment(&[7; 28]), segment(&[]), vec![0; 60]].iter().for_each(|frame| line.offer(now, frame));
        let frames: Vec<Vec<u8>> = std::iter::from_fn(|| line.take(now)).collect();
        let carried = RelayCounts { carried: 3, data_bytes: 28, ..RelayCounts::default() };
        assert_eq!(line.counts(), carried);
        frames.iter().for_each(|frame| line.refused(frame));
        assert_eq!(line.counts(), RelayCounts { refused: 3, ..RelayCounts::default() });
    }

    #[test]
    fn what_is_lost_is_decided_by_the_seed() {
        let count = 100_000;
        let first = survivors(7, 1.0, count);
        assert_eq!(first, survivors(7, 1.0, count));
        assert_ne!(first, survivors(8, 1.0, count));
        // Five standard deviations.
        let lost = count - first.len() as u32;
        assert!((1000 - 160..1000 + 160).contains(&lost), "{lost} of {count}");
        assert_eq!(survivors(7, 0.0, 1000).len(), 1000);
        assert_eq!(survivors(7, 100.0, 1000).len(), 0);
    }

    /// Frames that are dropped for another reason take their turn in the sequence.
    #[test]
    fn a_cut_drops_everything_and_changes_nobody_elses_luck() {
        let now = Instant::now();
        let lossy = Conditions { loss_percent: 30.0, delay: ms(5), ..Conditions::default() };
        let mut line = DelayLine::new(3, lossy);
        (0..100u32).for_each(|number| line.offer(now, &number.to_le_bytes()));
        line.set(Conditions { cut: true, ..lossy });
        assert_eq!((line.take(now + ms(5)), line.bytes()), (None, 0));
        (100..200u32).for_each(|number| line.offer(now, &number.to_le_bytes()));
        line.set(lossy);
        (200..300u32).for_each(|number| line.offer(now, &number.to_le_bytes()));
        let survived_first = survivors(3, 30.0, 100).len() as u64;
        assert_eq!(line.counts().cut, survived_first + 100);
        let expected: Vec<u32> =
            survivors(3, 30.0, 300).into_iter().filter(|number| *number >= 200).collect();
        let frames = std::iter::from_fn(|| line.take(now + ms(5)));
        let carried: Vec<u32> = frames.map(|frame| u32::from_le_bytes(frame.try_into().unwrap())).collect();
        assert_eq!(carried, expected);
    }
}
