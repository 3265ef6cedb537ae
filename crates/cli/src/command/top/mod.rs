//! `ioplane top`: what cores, devices and queues do, as rates, looked at again each second.
//!
//! ```text
//!   GET /v1/status, twice --View::between--> rates --view::draw--> terminal      q ends, s sorts
//!                                               \--> table or JSON (--once)
//! ```

mod rates;
mod view;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ioplane_api::refusal::Code;
use ioplane_api::report::StatusReport;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::args::TopArgs;
use crate::client::Client;
use crate::output::{CommandError, print, print_next};
use rates::{Rates, Sort};

/// The shortest interval: less would mostly show what looking costs.
const LEAST: Duration = Duration::from_millis(100);

/// Looks once, or until `q`.
pub fn run(client: &Client, args: &TopArgs, json: bool) -> Result<()> {
    let interval = args.interval.max(LEAST);
    if args.once {
        let before = Look::take(client)?;
        std::thread::sleep(interval);
        let rates = Look::take(client)?.since(&before);
        return print(json, &rates, view::text);
    }
    if json {
        let mut before = Look::take(client)?;
        loop {
            std::thread::sleep(interval);
            let now = Look::take(client)?;
            if !print_next(true, &now.since(&before), view::text)? {
                return Ok(());
            }
            before = now;
        }
    }
    if !std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        let remedy = "ioplane top --once, or with --json for programs";
        return Err(CommandError::new(Code::Usage, "the live view needs a terminal", remedy).into());
    }
    let before = Look::take(client)?;
    let mut terminal = ratatui::try_init().context("take the terminal over")?;
    let outcome = live(client, &mut terminal, before, interval);
    ratatui::restore();
    outcome
}

/// The status at one moment.
struct Look {
    at: Instant,
    status: StatusReport,
}

impl Look {
    fn take(client: &Client) -> Result<Look> {
        Ok(Look { status: client.get("/v1/status")?, at: Instant::now() })
    }

    fn since(&self, before: &Look) -> Rates {
        Rates::between(&before.status, &self.status, (self.at - before.at).as_secs_f64())
    }
}

fn live(
    client: &Client,
    terminal: &mut ratatui::DefaultTerminal,
    mut before: Look,
    interval: Duration,
) -> Result<()> {
    let (mut sort, mut rates) = (Sort::Rate, before.since(&before));
    let mut next = Instant::now() + LEAST;
    loop {
        rates.sort(sort);
        terminal.draw(|frame| view::draw(frame, &rates, sort))?;
        let wait = next.saturating_duration_since(Instant::now());
        if !event::poll(wait)? {
            let now = Look::take(client)?;
            rates = now.since(&before);
            before = now;
            next = Instant::now() + interval;
            continue;
        }
        let Event::Key(key) = event::read()? else { continue };
        match key.code {
            _ if key.kind == KeyEventKind::Release => {}
            KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
            KeyCode::Char('s') => sort = sort.next(),
            _ => {}
        }
    }
}
