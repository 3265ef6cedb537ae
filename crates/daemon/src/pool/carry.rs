//! Looking at the pool for as long as the daemon lives, and carrying out what was decided.

use std::sync::Arc;
use std::time::Duration;

use ioplane_api::report::EventWord;
use tokio::task::JoinHandle;

use super::facts::DeviceRef;
use super::{CHOICES_PERIOD, PlannedMove};
use crate::Daemon;
use crate::refusal::Refusal;
use crate::served::blocking;

/// How long the requests in flight of a queue may take to end where a user has asked for the move, or its core ends.
const PATIENT: Duration = Duration::from_secs(2);
/// The same where the queue moves for balance: it takes no new requests meanwhile.
const BRIEF: Duration = Duration::from_millis(250);

/// What became of the move that is under way; never if there is none.
async fn finished(moving: &mut Option<JoinHandle<()>>) {
    match moving {
        Some(task) => {
            let _ = task.await;
            *moving = None;
        }
        None => std::future::pending().await,
    }
}

impl Daemon {
    /// Starts the cores that there are to be at least. Before anything is served. May block.
    pub(crate) fn start_pool(&self) -> Result<(), Refusal> {
        let config = self.config();
        let todo = self.pool.look(config.pool(), &self.cores, &self.groups, &self.state_file);
        todo.grow.into_iter().try_for_each(|cpu| self.grow(cpu))
    }

    /// One core more.
    fn grow(&self, cpu: Option<u32>) -> Result<(), Refusal> {
        let config = self.config();
        let Some(spec) = config.pool() else { return Ok(()) };
        let outcome = self.cores.start(spec.core(0, cpu), false, None);
        self.pool.grew(outcome.is_ok());
        let id = outcome?;
        self.tell(EventWord::Served, "core", &id.to_string(), "started by the pool");
        Ok(())
    }

    /// Ends a core whose queues have left.
    fn shrink(&self, core: u32) -> Result<(), Refusal> {
        self.cores.retire(core)?;
        self.pool.shrank(core);
        self.tell(EventWord::Removed, "core", &core.to_string(), "ended by the pool");
        Ok(())
    }

    /// Looks, plans and carries out, for as long as the daemon lives. Queues are moved one at a time, beside the looks.
    pub(crate) async fn run_pool(self: Arc<Self>) {
        let (mut moving, mut next) = (None, Some(Duration::ZERO));
        loop {
            let due = async {
                match next {
                    Some(period) => tokio::time::sleep(period).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = self.pool.changed.notified() => {}
                () = finished(&mut moving) => {
                    moving = self.begin_move();
                    continue;
                }
            }
            let config = self.config();
            let todo = self.pool.look(config.pool(), &self.cores, &self.groups, &self.state_file);
            next = todo.next;
            if !todo.grow.is_empty() || !todo.retire.is_empty() {
                self.change_cores(todo.grow, todo.retire).await;
            }
            if moving.is_none() {
                moving = self.begin_move();
            }
        }
    }

    /// Looks at what cores choose for their queues, for as long as the daemon lives.
    pub(crate) async fn watch_choices(self: Arc<Self>) {
        loop {
            tokio::time::sleep(CHOICES_PERIOD).await;
            self.pool.watch_choices(&self.cores, &self.groups, &self.state_file);
        }
    }

    async fn change_cores(self: &Arc<Self>, grow: Vec<Option<u32>>, retire: Vec<u32>) {
        let Ok(leave) = self.may_change() else { return };
        let daemon = self.clone();
        let changed = blocking(move || {
            let _leave = leave;
            for cpu in grow {
                if let Err(refused) = daemon.grow(cpu) {
                    tracing::warn!(%refused, "pool: no core more");
                }
            }
            for core in retire {
                if let Err(refused) = daemon.shrink(core) {
                    tracing::debug!(%refused, core, "pool: the core does not end yet");
                }
            }
            Ok(())
        });
        if let Err(refused) = changed.await {
            tracing::error!(%refused, "pool");
        }
    }

    /// Moves the next queue that is to be moved, if there is one.
    fn begin_move(self: &Arc<Self>) -> Option<JoinHandle<()>> {
        let Ok(leave) = self.may_change() else {
            self.pool.postpone();
            return None;
        };
        let planned = loop {
            let planned = self.pool.next_move()?;
            if self.cores.check(planned.to).is_ok() {
                break planned;
            }
            // It has ended meanwhile.
            self.pool.dropped(planned.key);
        };
        let daemon = self.clone();
        Some(tokio::spawn(async move {
            let _leave = leave;
            let outcome = daemon.relocate(&planned).await;
            if let Err(refused) = &outcome {
                let (device, queue) = (planned.device.name(), planned.key.queue);
                tracing::debug!(%refused, device, queue, "pool: a queue stays where it is");
            }
            daemon.pool.moved(planned.key, outcome.is_ok());
        }))
    }

    async fn relocate(self: &Arc<Self>, planned: &PlannedMove) -> Result<(), Refusal> {
        let (queue, to) = (planned.key.queue, planned.to);
        let patience = if planned.patient { PATIENT } else { BRIEF };
        match planned.device.clone() {
            DeviceRef::Disk(name) => self.disks.relocate(&name, queue, to, patience).await,
            DeviceRef::Nic(name) => self.nics.relocate(&name, queue, to, patience).await,
            DeviceRef::Uplink(name) => {
                let switches = self.switches.clone();
                blocking(move || switches.relocate_uplink(&name, to)).await
            }
        }
    }
}
