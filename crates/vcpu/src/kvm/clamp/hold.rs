//! Keeps all vCPUs of a VM out of KVM_RUN for a moment, so that what KVM says of the VM's devices stays true until they are set.
//!
//! ```text
//!   vCPU: running = true; if somebody holds: running = false, wait; KVM_RUN; running = false; wait while somebody holds
//!   holder: held = true; kick those that run; wait until none does; ...; held = false
//! ```
//!
//! A vCPU waits also after KVM_RUN: so a kick that comes late interrupts that wait and no call of the VMM.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long vCPUs may take to leave KVM_RUN.
const PATIENCE: Duration = Duration::from_millis(200);
/// Time between two kicks of a vCPU that was about to enter when the first came.
const AGAIN: Duration = Duration::from_millis(5);

/// Where one vCPU says that it runs.
#[derive(Debug)]
pub(in crate::kvm) struct RunGate {
    pub(in crate::kvm) descriptor: i32,
    running: AtomicBool,
    thread: AtomicI32,
}

/// Of one VM.
#[derive(Debug, Default)]
pub(in crate::kvm) struct RunHold {
    held: AtomicBool,
    gates: Mutex<Vec<&'static RunGate>>,
}

/// No vCPU is in KVM_RUN as long as this is there.
pub(super) struct Held<'a>(&'a AtomicBool);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl RunHold {
    /// A new vCPU, which stays until the process ends.
    pub(in crate::kvm) fn gate(&self, descriptor: i32) -> &'static RunGate {
        let (running, thread) = (AtomicBool::new(false), AtomicI32::new(0));
        let gate: &'static RunGate = Box::leak(Box::new(RunGate { descriptor, running, thread }));
        self.gates.lock().unwrap_or_else(PoisonError::into_inner).push(gate);
        gate
    }

    /// All vCPUs that have a gate.
    pub(super) fn gates(&self) -> Vec<&'static RunGate> {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// KVM_RUN of a vCPU, on the thread `thread`.
    pub(in crate::kvm) fn run(&self, gate: &RunGate, thread: i32, run: impl FnOnce() -> i32) -> i32 {
        /// Says that the vCPU has left, also if the call panics, and waits.
        struct Leave<'a>(&'a RunHold, &'a RunGate);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                self.1.running.store(false, Ordering::SeqCst);
                self.0.wait();
            }
        }
        gate.thread.store(thread, Ordering::Relaxed);
        loop {
            gate.running.store(true, Ordering::SeqCst);
            if !self.held.load(Ordering::SeqCst) {
                break;
            }
            gate.running.store(false, Ordering::SeqCst);
            self.wait();
        }
        let _leave = Leave(self, gate);
        run()
    }

    fn wait(&self) {
        let mut turns = 0_u32;
        while self.held.load(Ordering::SeqCst) {
            turn(&mut turns);
        }
    }

    /// Waits until no vCPU is in KVM_RUN; `None` if one does not leave in time or cannot be kicked. `kick` interrupts KVM_RUN on a
    /// thread. One caller at a time.
    pub(super) fn hold(&self, kick: impl Fn(i32) -> bool) -> Option<Held<'_>> {
        self.held.store(true, Ordering::SeqCst);
        let held = Held(&self.held);
        let begun = Instant::now();
        for gate in self.gates() {
            let mut kicked: Option<Instant> = None;
            let mut turns = 0;
            while gate.running.load(Ordering::SeqCst) {
                if begun.elapsed() > PATIENCE {
                    return None;
                }
                // It may be on its way in, where a signal changes nothing yet.
                if kicked.is_none_or(|at| at.elapsed() > AGAIN) {
                    if !kick(gate.thread.load(Ordering::Relaxed)) {
                        return None;
                    }
                    kicked = Some(Instant::now());
                }
                turn(&mut turns);
            }
        }
        Some(held)
    }
}

fn turn(turns: &mut u32) {
    *turns = turns.saturating_add(1);
    if *turns < 1000 {
        std::hint::spin_loop();
    } else {
        // Who is waited for may need this processor.
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn nobody_runs_while_it_is_held_and_all_go_on() {
        let hold = RunHold::default();
        let gates = [hold.gate(1), hold.gate(2)];
        let inside = AtomicU32::new(0);
        let kicks: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for (number, gate) in gates.into_iter().enumerate() {
                let (hold, inside, kicks, ended) = (&hold, &inside, &kicks, &ended);
                scope.spawn(move || {
                    while !ended.load(Ordering::SeqCst) {
                        let result = hold.run(gate, i32::try_from(number).unwrap(), || {
                            inside.fetch_add(1, Ordering::SeqCst);
                            // A guest that leaves only when it is kicked.
                            while !kicks[number].swap(false, Ordering::SeqCst)
                                && !ended.load(Ordering::SeqCst)
                            {
                                std::thread::yield_now();
                            }
                            inside.fetch_sub(1, Ordering::SeqCst);
                            -4
                        });
                        assert_eq!(result, -4);
                    }
                });
            }
            let kick = |thread: i32| {
                kicks[usize::try_from(thread).unwrap()].store(true, Ordering::SeqCst);
                true
            };
            let mut held = 0;
            while held < 50 {
                // Both run, so that there is somebody to stop.
                while inside.load(Ordering::SeqCst) != 2 {
                    std::thread::yield_now();
                }
                // On a loaded machine the threads may take longer than that: then it is tried again, as in earnest.
                if let Some(_held) = hold.hold(kick) {
                    held += 1;
                    assert_eq!(inside.load(Ordering::SeqCst), 0);
                    std::thread::yield_now();
                    assert_eq!(inside.load(Ordering::SeqCst), 0);
                }
            }
            ended.store(true, Ordering::SeqCst);
        });
    }

    #[test]
    fn one_that_cannot_be_kicked_is_given_up() {
        let hold = RunHold::default();
        let gate = hold.gate(1);
        let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                hold.run(gate, 7, || {
                    begun.store(true, Ordering::SeqCst);
                    while !ended.load(Ordering::SeqCst) {
                        std::thread::yield_now();
                    }
                    0
                })
            });
            while !begun.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            assert!(hold.hold(|_| false).is_none());
            assert!(hold.hold(|thread| thread == 7).is_none(), "it never leaves");
            ended.store(true, Ordering::SeqCst);
        });
        assert!(hold.hold(|_| false).is_some());
    }
}
