//! Many kills of one kind of daemon under one load: at the named moments of a request's life, at any moment, twice in a row.

use std::path::Path;
use std::time::{Duration, Instant};

use ioplane_virtio::kill::KillPoint;

use super::{CrashLoad, End, Victim};

/// How long a daemon may take to serve again.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts a victim with these variables in its environment.
pub type Start<'a> = dyn Fn(&[(&str, String)]) -> Victim + 'a;

pub struct Campaign<'a> {
    /// Starts one on the same image and the same socket, with more variables in its environment.
    pub victim: &'a Start<'a>,
    /// A folder for the file that arms a kill point.
    pub folder: &'a Path,
    pub queues: u16,
}

impl Campaign<'_> {
    /// Kills at `point` once. Whether it was hit; the load goes on either way.
    ///
    /// A request in hand at two deaths stops its queue, and rightly so. No request may look like that here, so most points count
    /// only once everything replayed is answered, and a death beside a replay (the second ring's recovery) is followed by one
    /// with nothing in hand (the first's).
    pub fn kill_at(&self, load: &mut CrashLoad, point: KillPoint, attempt: u32) -> Result<bool, String> {
        let in_replay = matches!(point, KillPoint::Recovered | KillPoint::Replayed);
        let nth = match point {
            KillPoint::Recovered => 1 + u64::from(attempt % u32::from(self.queues)),
            KillPoint::Replayed => load.between(1, 8),
            _ => load.between(1, 200),
        };
        let armed = self.folder.join("armed");
        let _ = std::fs::remove_file(&armed);
        let mut environment = vec![("IOPLANE_KILL_AT", format!("{}:{nth}", point.name()))];
        if !in_replay {
            environment.push(("IOPLANE_KILL_ONCE", armed.to_string_lossy().into_owned()));
        }
        let mut victim = (self.victim)(&environment);
        if load.connect(&mut victim, PATIENCE)?.is_none() {
            return Ok(victim.ended() == Some(End::Killed));
        }
        if !in_replay {
            load.outlive(&mut victim)?;
            std::fs::write(&armed, "").map_err(|error| error.to_string())?;
        }
        match load.run(&mut victim, Duration::from_secs(10))? {
            Some(End::Killed) => Ok(true),
            Some(End::Otherwise) => Err(format!("the daemon died at {} by itself", point.name())),
            // Nothing was in flight to replay, or too little happened; the crash that follows is one at no point in particular.
            None => {
                victim.kill();
                Ok(false)
            }
        }
    }

    /// Kills at any moment.
    pub fn kill(&self, load: &mut CrashLoad) -> Result<(), String> {
        let mut victim = (self.victim)(&[]);
        load.connect(&mut victim, PATIENCE)?.ok_or("the daemon died by itself")?;
        load.outlive(&mut victim)?;
        let time = Duration::from_micros(load.between(1_000, 150_000));
        match load.run(&mut victim, time)? {
            None => victim.kill(),
            Some(end) => return Err(format!("the daemon died by itself: {end:?}")),
        }
        Ok(())
    }

    /// Kills, and kills the next one 50 to 300 ms after that: while it starts, waits for the dead one's I/O, connects, replays
    /// or serves again. Whether it had a connection by then.
    pub fn kill_twice(&self, load: &mut CrashLoad) -> Result<bool, String> {
        self.kill(load)?;
        let end = Instant::now() + Duration::from_millis(load.between(50, 300));
        let mut victim = (self.victim)(&[]);
        let left = || end.saturating_duration_since(Instant::now());
        // No connection within that time is not wrong here.
        let connected = load.connect(&mut victim, left()).is_ok();
        if connected {
            load.run(&mut victim, left())?;
        }
        if let Some(end) = victim.ended() {
            return Err(format!("the second daemon died by itself: {end:?}"));
        }
        std::thread::sleep(left());
        victim.kill();
        Ok(connected)
    }

    /// Each point in turn, `times` each; at the end every block holds what it must. How many requests were answered.
    pub fn every_point(&self, load: &mut CrashLoad, times: u32) -> Result<u64, String> {
        for point in KillPoint::ALL {
            let mut hits = 0;
            for attempt in 0.. {
                hits += u32::from(self.kill_at(load, *point, attempt)?);
                if hits == times {
                    break;
                }
                if attempt > 3 * times {
                    return Err(format!("{} was hit {hits} times in {attempt} attempts", point.name()));
                }
            }
            println!("{:<15} hit {hits} times, {} requests answered so far", point.name(), load.answered);
        }
        self.settle(load)
    }

    /// `kills` deaths, by turns at a named moment, at any and twice in a row, the moments from number `first` on; at the end
    /// every block holds what it must. How many requests were answered, and how many deaths were at the moment named.
    pub fn mixed(&self, load: &mut CrashLoad, kills: u32, first: usize) -> Result<(u64, u32), String> {
        let (mut done, mut hits) = (0, 0);
        for turn in 0.. {
            if done >= kills {
                break;
            }
            match turn % 4 {
                0 | 1 => {
                    let which = (first + turn / 4 * 2 + turn % 4) % KillPoint::ALL.len();
                    hits += u32::from(self.kill_at(load, KillPoint::ALL[which], turn as u32)?);
                    done += 1;
                }
                2 => {
                    self.kill(load)?;
                    done += 1;
                }
                _ => {
                    self.kill_twice(load)?;
                    done += 2;
                }
            }
        }
        Ok((self.settle(load)?, hits))
    }

    /// One more daemon, which is left alone: every block holds what it must.
    pub fn settle(&self, load: &mut CrashLoad) -> Result<u64, String> {
        let mut victim = (self.victim)(&[]);
        load.connect(&mut victim, PATIENCE)?.ok_or("the last daemon died")?;
        load.run(&mut victim, Duration::from_millis(200))?;
        load.settle()?;
        println!("longest wait for an answer {:?}", load.longest);
        Ok(load.answered)
    }
}

impl std::fmt::Debug for Campaign<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Campaign").field("queues", &self.queues).finish_non_exhaustive()
    }
}
