//! The server's side of the handshake.

use super::option::{self, Malformed, OPTION_HEADER, Parser};
use super::reply::{self, fitting};
use super::{ExportInfo, MetaContext};
use crate::error::Violation;
use crate::spec::*;
use crate::sums::{self, CRC32C};

/// Most data of an option that is read; a longer one is answered by `NBD_REP_ERR_TOO_BIG`.
const MAX_OPTION: u32 = 32 << 10;
/// Most data of an option that are skipped; a longer one ends the session.
const MAX_SKIPPED: u32 = 1 << 20;
/// Options in one handshake, before and after TLS together.
const MAX_OPTIONS: u32 = 256;
/// Most queries of one option.
const MAX_QUERIES: usize = 32;
/// Output that is sent before more is made.
const OUTPUT: usize = 64 << 10;
/// Namespace of the metadata contexts whose queries the caller answers.
pub const NAMESPACE: &str = "ioplane:";

/// What this server does about TLS (section "TLS support").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsPolicy {
    /// There is none.
    Unsupported,
    /// Clients may start it. Which export needs it, the caller says: [`ExportRefusal::TlsRequired`].
    Offered,
    /// Nothing else is answered before it has started.
    Required,
}

/// Why an export is not told of, or not entered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExportRefusal {
    /// There is no such export.
    Unknown,
    /// It is there, and this client may not have it, for a reason that it is told.
    Policy(String),
    /// Not without TLS.
    TlsRequired,
    /// The server is shutting down.
    ShuttingDown,
}

/// What was agreed when the transmission phase begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Negotiated {
    /// What the client calls the export.
    pub name: String,
    /// What it was told of it. [`ExportInfo::flags`] are as they were sent.
    pub info: ExportInfo,
    /// Structured replies are used.
    pub structured: bool,
    /// Metadata contexts that were selected for this export.
    pub contexts: Vec<MetaContext>,
    /// The client has asked for the block sizes, so it keeps to them.
    pub keeps_blocks: bool,
    /// The client has entered by `NBD_OPT_EXPORT_NAME`.
    pub by_name: bool,
}

impl Negotiated {
    /// Whether records with sums follow.
    pub fn has_sums(&self) -> bool {
        self.contexts.iter().any(|context| context.name == CRC32C)
    }
}

/// What comes next. Whatever it is, the caller first sends the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerStep {
    /// The input is used up: read more.
    Read,
    /// Nothing but to send the output.
    Send,
    /// Find the export of that name, and call [`ServerHandshake::answer`].
    Find {
        /// As the client said it; empty for the default export.
        name: String,
        /// Whether the client enters it with that. Otherwise it only asks.
        enters: bool,
    },
    /// Call [`ServerHandshake::list`].
    List,
    /// A metadata query of [`NAMESPACE`]: call [`ServerHandshake::context`].
    Query {
        /// Name of the export.
        export: String,
        /// With the namespace.
        query: String,
        /// `NBD_OPT_SET_META_CONTEXT`; otherwise it only asks what there is.
        selects: bool,
    },
    /// Start TLS as its server, then call [`ServerHandshake::tls_started`]. When that fails the session ends.
    StartTls,
    /// The transmission phase begins.
    Transmission(Negotiated),
    /// The client ends the session, or names an export that it cannot have in a way that has no other answer.
    End,
}

#[derive(Debug)]
enum State {
    Greeting,
    ClientFlags,
    Header,
    /// In the data of an option that is read.
    Data {
        option: u32,
        length: u32,
    },
    /// In the data of an option that is answered when all have passed.
    Skip {
        option: u32,
        left: u32,
        code: u32,
    },
    Finding(Asked),
    Listing,
    Querying(Contexts),
    Tls,
    Entering(Box<Negotiated>),
    Ended,
}

/// The option that waits for an export.
#[derive(Debug)]
enum Asked {
    Name(String),
    Info { option: u32, name: String, items: Vec<u16> },
    Contexts(Contexts),
}

/// An option about metadata contexts that is being answered.
#[derive(Debug)]
struct Contexts {
    option: u32,
    export: String,
    /// Last one first.
    queries: Vec<String>,
    found: Vec<MetaContext>,
}

impl Contexts {
    /// They came as they were sent, if the client says what their sum is.
    fn check(&self) -> Result<(), Violation> {
        sums::check_queries(&self.export, self.queries.iter().rev().map(String::as_str))
    }

    fn selects(&self) -> bool {
        self.option == NBD_OPT_SET_META_CONTEXT
    }

    fn add(&mut self, name: &str) {
        if !self.found.iter().any(|known| known.name == name) {
            let id = self.found.len() as u32 + 1;
            self.found.push(MetaContext { id, name: name.to_owned() });
        }
    }
}

/// One handshake, from the server's side. Memory is bounded by the longest option and the caller's answers.
#[derive(Debug)]
pub struct ServerHandshake {
    policy: TlsPolicy,
    tls: bool,
    state: State,
    gathered: Vec<u8>,
    fixed: bool,
    no_zeroes: bool,
    options: u32,
    structured: bool,
    /// Contexts that were selected, and for which export.
    selected: Option<(String, Vec<MetaContext>)>,
}

impl ServerHandshake {
    /// At the start of a connection.
    pub fn new(policy: TlsPolicy) -> ServerHandshake {
        ServerHandshake {
            policy,
            tls: false,
            state: State::Greeting,
            gathered: Vec::new(),
            fixed: false,
            no_zeroes: false,
            options: 0,
            structured: false,
            selected: None,
        }
    }

    /// Whether TLS has started.
    pub fn has_tls(&self) -> bool {
        self.tls
    }

    /// Goes on: takes what it uses off the front of `input`, appends what is to be sent to `output`.
    pub fn next(&mut self, input: &mut &[u8], output: &mut Vec<u8>) -> Result<ServerStep, Violation> {
        loop {
            if output.len() >= OUTPUT {
                return Ok(ServerStep::Send);
            }
            match &mut self.state {
                State::Greeting => {
                    output.extend(NBDMAGIC.to_be_bytes());
                    output.extend(IHAVEOPT.to_be_bytes());
                    output.extend((NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES).to_be_bytes());
                    self.state = State::ClientFlags;
                }
                State::ClientFlags => {
                    if !self.gather(input, 4) {
                        return Ok(ServerStep::Read);
                    }
                    let flags = Parser(&self.gathered).u32().unwrap_or_default();
                    if flags & !(NBD_FLAG_C_FIXED_NEWSTYLE | NBD_FLAG_C_NO_ZEROES) != 0 {
                        return Err(Violation::ClientFlags(flags));
                    }
                    self.fixed = flags & NBD_FLAG_C_FIXED_NEWSTYLE != 0;
                    self.no_zeroes = flags & NBD_FLAG_C_NO_ZEROES != 0;
                    self.expect(State::Header);
                }
                State::Header => {
                    if !self.gather(input, OPTION_HEADER) {
                        return Ok(ServerStep::Read);
                    }
                    self.header()?;
                }
                State::Data { option, length } => {
                    let (option, length) = (*option, *length);
                    if !self.gather(input, length as usize) {
                        return Ok(ServerStep::Read);
                    }
                    let data = std::mem::take(&mut self.gathered);
                    self.state = State::Header;
                    if self.option(option, &data, output).is_err() {
                        self.refuse(output, option, NBD_REP_ERR_INVALID, "malformed option");
                    }
                    if let State::Finding(Asked::Contexts(contexts)) = &self.state {
                        contexts.check()?;
                    }
                    if matches!(self.state, State::Tls) && !input.is_empty() {
                        return Err(Violation::PlainTextBeforeTls);
                    }
                }
                State::Skip { option, left, code } => {
                    let skip = input.len().min(*left as usize);
                    *input = &input[skip..];
                    *left -= skip as u32;
                    if *left > 0 {
                        return Ok(ServerStep::Read);
                    }
                    let (option, code) = (*option, *code);
                    self.expect(State::Header);
                    self.refuse(output, option, code, "");
                }
                State::Finding(asked) => {
                    let (name, enters) = match asked {
                        Asked::Name(name) => (name, true),
                        Asked::Info { option, name, .. } => (name, *option == NBD_OPT_GO),
                        Asked::Contexts(contexts) => (&mut contexts.export, false),
                    };
                    return Ok(ServerStep::Find { name: name.clone(), enters });
                }
                State::Listing => return Ok(ServerStep::List),
                State::Querying(contexts) => match contexts.queries.last() {
                    Some(query) if query.starts_with(NAMESPACE) => {
                        let (export, query) = (contexts.export.clone(), query.clone());
                        return Ok(ServerStep::Query { export, query, selects: contexts.selects() });
                    }
                    Some(query) => {
                        // `base:` alone lists and selects nothing; other namespaces are ignored.
                        if query == BASE_ALLOCATION || (query == "base:" && !contexts.selects()) {
                            contexts.add(BASE_ALLOCATION);
                        }
                        contexts.queries.pop();
                    }
                    None => self.contexts_done(output),
                },
                State::Tls => return Ok(ServerStep::StartTls),
                State::Entering(negotiated) => return Ok(ServerStep::Transmission((**negotiated).clone())),
                State::Ended => return Ok(ServerStep::End),
            }
        }
    }

    /// The answer to [`ServerStep::Find`].
    pub fn answer(&mut self, found: Result<ExportInfo, ExportRefusal>, output: &mut Vec<u8>) {
        let State::Finding(asked) = std::mem::replace(&mut self.state, State::Header) else { return };
        match (asked, found) {
            (Asked::Name(name), Ok(info)) => {
                let flags = self.flags(&info);
                output.extend(info.bytes.to_be_bytes());
                output.extend(flags.to_be_bytes());
                if !self.no_zeroes {
                    output.resize(output.len() + EXPORT_NAME_ZEROES, 0);
                }
                self.enter(name, info, false, true);
            }
            // There is no answer that says so.
            (Asked::Name(_), Err(_)) => self.state = State::Ended,
            (Asked::Info { option, name, items }, Ok(info)) => {
                reply::write_info(output, option, &info, self.flags(&info), &items);
                reply::write(output, option, NBD_REP_ACK, &[]);
                if option == NBD_OPT_GO {
                    self.enter(name, info, items.contains(&NBD_INFO_BLOCK_SIZE), false);
                }
            }
            (Asked::Contexts(contexts), Ok(_)) => self.state = State::Querying(contexts),
            (Asked::Info { option, .. } | Asked::Contexts(Contexts { option, .. }), Err(refusal)) => {
                match refusal {
                    ExportRefusal::Unknown => {
                        self.refuse(output, option, NBD_REP_ERR_UNKNOWN, "there is no such export");
                    }
                    ExportRefusal::Policy(why) => self.refuse(output, option, NBD_REP_ERR_POLICY, &why),
                    // Must not be said over TLS.
                    ExportRefusal::TlsRequired if self.tls => {
                        self.refuse(output, option, NBD_REP_ERR_POLICY, "");
                    }
                    ExportRefusal::TlsRequired => {
                        self.refuse(output, option, NBD_REP_ERR_TLS_REQD, "start TLS")
                    }
                    ExportRefusal::ShuttingDown => self.refuse(output, option, NBD_REP_ERR_SHUTDOWN, ""),
                }
            }
        }
    }

    /// The answer to [`ServerStep::List`]: names and descriptions.
    pub fn list<'a>(&mut self, exports: impl Iterator<Item = (&'a str, &'a str)>, output: &mut Vec<u8>) {
        if !matches!(self.state, State::Listing) {
            return;
        }
        for (name, description) in exports {
            let name = fitting(name);
            let length = (name.len() as u32).to_be_bytes();
            let parts: [&[u8]; 3] = [&length, name, fitting(description)];
            reply::write(output, NBD_OPT_LIST, NBD_REP_SERVER, &parts);
        }
        reply::write(output, NBD_OPT_LIST, NBD_REP_ACK, &[]);
        self.state = State::Header;
    }

    /// The answer to [`ServerStep::Query`]: the context's name, which starts with [`NAMESPACE`], if the query finds one.
    pub fn context(&mut self, found: Option<&str>) {
        if let State::Querying(contexts) = &mut self.state {
            contexts.queries.pop();
            found.into_iter().for_each(|name| contexts.add(name));
        }
    }

    /// The answer to [`ServerStep::StartTls`]: from here on all is said over TLS, and nothing that was said before counts.
    pub fn tls_started(&mut self) {
        if matches!(self.state, State::Tls) {
            self.tls = true;
            self.structured = false;
            self.selected = None;
            self.expect(State::Header);
        }
    }

    fn expect(&mut self, state: State) {
        self.gathered.clear();
        self.state = state;
    }

    /// Whether `size` bytes have been gathered.
    fn gather(&mut self, input: &mut &[u8], size: usize) -> bool {
        let take = input.len().min(size.saturating_sub(self.gathered.len()));
        let (here, rest) = input.split_at(take);
        self.gathered.extend(here);
        *input = rest;
        self.gathered.len() >= size
    }

    fn header(&mut self) -> Result<(), Violation> {
        let mut parser = Parser(&self.gathered);
        let magic = parser.u64().unwrap_or_default();
        let option = parser.u32().unwrap_or_default();
        let length = parser.u32().unwrap_or_default();
        if magic != IHAVEOPT {
            return Err(Violation::OptionMagic(magic));
        }
        if !self.fixed && option != NBD_OPT_EXPORT_NAME {
            return Err(Violation::NotFixedNewstyle(option));
        }
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return Err(Violation::TooManyOptions(MAX_OPTIONS));
        }
        if length > MAX_SKIPPED {
            return Err(Violation::OptionLength(length));
        }
        let plain = self.policy == TlsPolicy::Required && !self.tls;
        let skip = |code| State::Skip { option, left: length, code };
        let next = match option {
            NBD_OPT_EXPORT_NAME if plain => State::Ended,
            NBD_OPT_EXPORT_NAME if length > MAX_STRING as u32 => State::Ended,
            NBD_OPT_STARTTLS if self.policy == TlsPolicy::Unsupported => skip(NBD_REP_ERR_UNSUP),
            NBD_OPT_ABORT | NBD_OPT_STARTTLS => State::Data { option, length },
            _ if plain => skip(NBD_REP_ERR_TLS_REQD),
            NBD_OPT_EXPORT_NAME
            | NBD_OPT_LIST
            | NBD_OPT_INFO
            | NBD_OPT_GO
            | NBD_OPT_STRUCTURED_REPLY
            | NBD_OPT_LIST_META_CONTEXT
            | NBD_OPT_SET_META_CONTEXT => State::Data { option, length },
            _ => skip(NBD_REP_ERR_UNSUP),
        };
        let next = match next {
            State::Data { length: 0..=MAX_OPTION, .. } => next,
            State::Data { .. } => skip(NBD_REP_ERR_TOO_BIG),
            next => next,
        };
        if option == NBD_OPT_SET_META_CONTEXT {
            // Also when it fails.
            self.selected = None;
        }
        self.expect(next);
        Ok(())
    }

    /// Carries out an option that is known here.
    fn option(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) -> Result<(), Malformed> {
        match option {
            NBD_OPT_ABORT => {
                reply::write(output, option, NBD_REP_ACK, &[]);
                self.state = State::Ended;
            }
            NBD_OPT_STARTTLS => {
                if self.tls {
                    return Err(Malformed);
                }
                Parser(data).end()?;
                reply::write(output, option, NBD_REP_ACK, &[]);
                self.state = State::Tls;
            }
            NBD_OPT_EXPORT_NAME => {
                self.state = match option::string(data) {
                    Ok(name) => State::Finding(Asked::Name(name)),
                    Err(Malformed) => State::Ended,
                };
            }
            NBD_OPT_LIST => {
                Parser(data).end()?;
                self.state = State::Listing;
            }
            NBD_OPT_STRUCTURED_REPLY => {
                Parser(data).end()?;
                self.structured = true;
                reply::write(output, option, NBD_REP_ACK, &[]);
            }
            NBD_OPT_INFO | NBD_OPT_GO => {
                let (name, items) = option::info_request(data)?;
                self.state = State::Finding(Asked::Info { option, name, items });
            }
            _ => self.ask_contexts(option, data, output)?,
        }
        Ok(())
    }

    fn ask_contexts(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) -> Result<(), Malformed> {
        if !self.structured {
            return Err(Malformed);
        }
        let (export, mut queries) = option::context_request(data)?;
        if queries.len() > MAX_QUERIES {
            self.refuse(output, option, NBD_REP_ERR_TOO_BIG, "too many queries");
            return Ok(());
        }
        if queries.is_empty() && option == NBD_OPT_LIST_META_CONTEXT {
            // All that there are.
            queries = vec![BASE_ALLOCATION.to_owned(), NAMESPACE.to_owned()];
        }
        queries.reverse();
        let contexts = Contexts { option, export, queries, found: Vec::new() };
        self.state = State::Finding(Asked::Contexts(contexts));
        Ok(())
    }

    fn contexts_done(&mut self, output: &mut Vec<u8>) {
        let State::Querying(contexts) = std::mem::replace(&mut self.state, State::Header) else { return };
        for MetaContext { id, name } in &contexts.found {
            let id = if contexts.selects() { *id } else { 0 };
            let parts: [&[u8]; 2] = [&id.to_be_bytes(), fitting(name)];
            reply::write(output, contexts.option, NBD_REP_META_CONTEXT, &parts);
        }
        reply::write(output, contexts.option, NBD_REP_ACK, &[]);
        if contexts.selects() {
            self.selected = Some((contexts.export, contexts.found));
        }
    }

    fn refuse(&self, output: &mut Vec<u8>, option: u32, code: u32, why: &str) {
        reply::write(output, option, code, &[fitting(why)]);
    }

    /// Transmission flags as they are sent.
    fn flags(&self, info: &ExportInfo) -> u16 {
        let df = if self.structured { NBD_FLAG_SEND_DF } else { 0 };
        (info.flags & !NBD_FLAG_SEND_DF) | NBD_FLAG_HAS_FLAGS | df
    }

    fn enter(&mut self, name: String, info: ExportInfo, keeps_blocks: bool, by_name: bool) {
        let flags = self.flags(&info);
        let contexts = match self.selected.take() {
            Some((export, contexts)) if export == name => contexts,
            _ => Vec::new(),
        };
        let info = ExportInfo { flags, ..info };
        let structured = self.structured;
        let negotiated = Negotiated { name, info, structured, contexts, keeps_blocks, by_name };
        self.state = State::Entering(Box::new(negotiated));
    }
}
