//! The thread that owns a device, between two messages of its client and while one of them waits: what the daemon asks, what the device
//! asks, and the quiescent points of both.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use ioplane_device::{
    DeviceError, DeviceOwner, Lifecycle, OnMiss, Placement, Presence, QuiesceAttempt, QuiesceError,
    QuiescePolicy, Quiesced, QuiescenceProof, resume, work_and_resume,
};
use ioplane_pci::Function;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::connection::Connection;
use super::fault::ClientFault;
use super::handle::{Command, Purpose, Request};
use super::held::Held;
use super::session::{Session, Underway};

/// When a device that did not go on is tried again.
const AGAIN: Duration = Duration::from_secs(30);

/// What is ready for whoever takes the turn.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// The service is to end; readable for good.
    pub stop: bool,
    /// What was asked of the client's socket.
    pub client: bool,
    /// A client comes.
    pub listener: bool,
}

impl<F: Function> DeviceOwner for Session<F> {
    type Device = F;

    fn parts(&mut self) -> (&mut Lifecycle<F>, &dyn Placement) {
        (&mut self.device, &*self.placement)
    }

    fn is_held(&self) -> bool {
        self.held.is_some()
    }
}

impl<F: Function> Session<F> {
    /// Waits until something is to be done, at most until `until`, and does it: all but the client's messages.
    pub(super) fn turn(
        &mut self,
        client: Option<(BorrowedFd<'_>, PollFlags)>,
        listener: Option<BorrowedFd<'_>>,
        until: Option<Instant>,
    ) -> Turn {
        self.advance();
        let underway = self.underway.as_ref().and_then(|underway| underway.attempt.wake_at());
        let until = [until, underway, self.held.and_then(Held::until)].into_iter().flatten().min();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let (stop, event) = (self.stop.clone(), self.event.clone());
        let (attention, line) = (self.attention(), self.wires.resume.clone());
        let reads = |file| (file, PollFlags::IN);
        let wanted: [Option<(BorrowedFd<'_>, PollFlags)>; 6] = [
            Some(reads(stop.as_fd())),
            Some(reads(event.as_fd())),
            attention.as_ref().map(|file| reads(file.as_fd())),
            line.as_ref().map(|file| reads(file.as_fd())),
            client,
            listener.map(reads),
        ];
        let (mut files, mut places) = (Vec::with_capacity(wanted.len()), Vec::with_capacity(wanted.len()));
        for (place, file) in wanted.into_iter().enumerate() {
            if let Some((file, flags)) = file {
                files.push(PollFd::from_borrowed_fd(file, flags));
                places.push(place);
            }
        }
        let mut ready = [false; 6];
        if rustix::event::poll(&mut files, left.as_ref()).is_ok() {
            for (place, file) in places.into_iter().zip(&files) {
                ready[place] = !file.revents().is_empty();
            }
        }
        let [stop, woken, attention, line, client, listener] = ready;
        if woken {
            crate::eventfd::empty(event.as_fd());
            self.handle_commands();
        }
        if attention {
            self.attend();
        }
        if line {
            self.resume_line();
        }
        self.advance();
        Turn { stop, client, listener }
    }

    /// A turn while a message waits, unless the client has left or the service is to end. A client that has only said its last word still
    /// waits for its replies: left means hung up.
    pub(super) fn wait_until(
        &mut self,
        connection: Option<&Connection>,
        until: Option<Instant>,
    ) -> Result<(), ClientFault> {
        let client = connection.map(|connection| (connection.socket(), PollFlags::empty()));
        match self.turn(client, None, until) {
            Turn { stop: true, .. } => Err(ClientFault::Gone),
            Turn { client: true, .. } => Err(ClientFault::Closed),
            _ => Ok(()),
        }
    }

    /// Reads the mailbox.
    fn handle_commands(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::With(work) => work(&mut self.device),
                Command::Quiesce(request) => self.requests.push_back(request),
                Command::Dma(order) => self.writes.push_back(order),
                Command::Log(yes, reply) => drop(reply.send(self.log(yes))),
                Command::Written(reply) => drop(reply.send(self.written())),
                Command::Resume(reply) => {
                    let resumed = self.let_go();
                    self.show();
                    let _ = reply.send(resumed);
                }
            }
        }
    }

    /// The device that is held goes on; says whether it was.
    pub(super) fn let_go(&mut self) -> Result<bool, DeviceError> {
        let held = self.held.take().is_some();
        if !held && self.device.presence() != Presence::Held {
            return Ok(false);
        }
        self.go_on().map(|()| true)
    }

    /// Nobody holds the device. One that does not go on is held, and tried again.
    fn go_on(&mut self) -> Result<(), DeviceError> {
        self.held = None;
        resume(self).inspect_err(|error| {
            tracing::error!(function = self.name, %error, "it does not resume: it is tried again");
            self.held = Some(Held::for_(AGAIN));
        })
    }

    /// Steps what is under way, and begins what waits.
    fn advance(&mut self) {
        let waker = self.waker.clone();
        let mut context = Context::from_waker(&waker);
        while let Some(Underway { mut request, mut attempt }) = self.next_underway() {
            if request.is_given_up(&mut context) {
                if attempt.cancel(self).is_err() {
                    self.held = Some(Held::for_(AGAIN));
                }
                continue;
            }
            match attempt.poll(self, Instant::now(), &mut context) {
                Poll::Pending => {
                    self.underway = Some(Underway { request, attempt });
                    break;
                }
                Poll::Ready(outcome) => self.arrived(request, outcome),
            }
        }
        if self.held.and_then(Held::until).is_some_and(|until| until <= Instant::now()) {
            tracing::warn!(function = self.name, "nobody resumed it in time: it resumes by itself");
            let _ = self.let_go();
        }
        if self.wires.owed_unmask {
            self.unmask_line();
        }
        self.show();
    }

    /// What is under way, or else the next that can begin.
    fn next_underway(&mut self) -> Option<Underway<F>> {
        if let Some(underway) = self.underway.take() {
            return Some(underway);
        }
        // The client's own comes first: its VMM waits for it.
        while !self.own_attempt {
            let request = self.requests.pop_front()?;
            if matches!(request.purpose, Purpose::Hold(..)) && self.is_held() {
                request.refuse(QuiesceError::NotHere(Presence::Held.name()));
                continue;
            }
            match QuiesceAttempt::begin(self, request.policy) {
                Ok(attempt) => return Some(Underway { request, attempt }),
                Err(error) => request.refuse(error),
            }
        }
        None
    }

    fn arrived(&mut self, request: Request<F>, outcome: Result<Quiesced, QuiesceError>) {
        let quiesced = match outcome {
            Ok(quiesced) => quiesced,
            Err(error) => {
                if self.device.presence() == Presence::Held {
                    self.held.get_or_insert_with(|| Held::for_(AGAIN));
                }
                self.show();
                return request.refuse(error);
            }
        };
        match request.purpose {
            Purpose::Hold(lease, reply) => {
                self.held = Some(Held::for_(lease));
                self.show();
                if reply.send(Ok(quiesced)).is_err() {
                    // Nobody would let it go on.
                    let _ = self.go_on();
                }
            }
            Purpose::Work(mut work) => {
                work.work(&mut self.device, &*self.placement);
                let outcome = if self.device.presence() == Presence::Running {
                    self.held = None;
                    Ok(())
                } else if self.is_held() {
                    Ok(())
                } else {
                    self.go_on().map_err(QuiesceError::NotResumed)
                };
                self.show();
                work.done(outcome);
            }
        }
    }

    /// The service ends: what the daemon has asked for is not done, and the device goes on if it was on its way for that.
    pub(super) fn give_up_requests(&mut self) {
        if let Some(Underway { attempt, .. }) = self.underway.take() {
            let _ = attempt.cancel(self);
        }
        self.requests.clear();
        self.writes.clear();
    }

    /// Nobody is served any more.
    pub(super) fn close(&mut self) {
        self.board.show(Presence::Closed, None);
    }

    /// Says how the device is.
    pub(super) fn show(&self) {
        self.board.show(self.device.presence(), self.held);
    }

    /// Does `work` at a quiescent point that the client needs, then lets the device go on; one that the daemon holds stays held. A device
    /// that does not become quiescent in time is suspended; if that fails too it goes on as it was, and nothing has been done.
    pub(super) fn at_quiescence<R>(
        &mut self,
        connection: Option<&Connection>,
        work: impl FnOnce(&mut F, &QuiescenceProof) -> R,
    ) -> Result<R, ClientFault> {
        while self.underway.is_some() || self.device.presence() == Presence::Away {
            self.wait_until(connection, None)?;
        }
        // Once forced, waiting again helps nobody before the guest has had a chance to do something: QEMU moves memory in bursts.
        let patience = if self.forced { Duration::ZERO } else { self.patience };
        let on_miss = OnMiss::Suspend { timeout: self.patience };
        let policy = QuiescePolicy { deadline: Instant::now() + patience, on_miss };
        let attempt = QuiesceAttempt::begin(self, policy).map_err(refused)?;
        self.own_attempt = true;
        let outcome = self.settle(attempt);
        self.own_attempt = false;
        if !matches!(outcome, Ok(Quiesced { missed: None, .. })) {
            self.forced = true;
            self.board.forced.fetch_add(1, Relaxed);
        }
        let done = outcome.and_then(|_| work_and_resume(self, |quiescent| quiescent.with(work)));
        if self.device.presence() == Presence::Held {
            self.held.get_or_insert_with(|| Held::for_(AGAIN));
        }
        self.show();
        done.map_err(refused)
    }

    /// Carries an attempt on to its end. The device's own events go on meanwhile: they are what makes hardware still.
    fn settle(&mut self, mut attempt: QuiesceAttempt) -> Result<Quiesced, QuiesceError> {
        let waker = self.waker.clone();
        loop {
            let mut context = Context::from_waker(&waker);
            if let Poll::Ready(outcome) = attempt.poll(self, Instant::now(), &mut context) {
                return outcome;
            }
            if self.turn(None, None, attempt.wake_at()).stop {
                attempt.hurry(Instant::now());
                return attempt.wait(self);
            }
        }
    }
}

fn refused(error: QuiesceError) -> ClientFault {
    match error {
        QuiesceError::NotResumed(error) => error.into(),
        error => ClientFault::NotQuiescent(error.to_string()),
    }
}
