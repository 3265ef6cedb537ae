//! The client's side of the handshake.

use super::option::{self, Malformed, Parser, put_string};
use super::reply::REPLY_HEADER;
use super::{BlockSizes, ExportInfo, MetaContext, is_string};
use crate::error::{NbdError, Violation};
use crate::spec::*;
use crate::sums::{self, CRC32C};

/// Longest option reply: the longest string and what stands before it, twice (`NBD_REP_SERVER` has two).
const MAX_REPLY: u32 = 2 * MAX_STRING as u32 + 64;
/// Most replies to one option.
const MAX_REPLIES: u32 = 64;

/// What this client does about TLS. There is no choice between: who would take TLS or plain text gets what an attacker wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientTls {
    /// All is plain text.
    Never,
    /// Nothing is said before TLS has started, not even the export's name, and nothing if it does not start.
    Required,
}

/// What a client wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientOptions {
    /// Name of the export; empty for the server's default.
    pub export: String,
    /// TLS or not.
    pub tls: ClientTls,
    /// Ask for structured replies.
    pub structured: bool,
    /// Queries for metadata contexts. Only asked where structured replies were granted.
    pub contexts: Vec<String>,
}

/// What was agreed when the transmission phase begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connected {
    /// The export.
    pub info: ExportInfo,
    /// Structured replies are used.
    pub structured: bool,
    /// Metadata contexts that were selected.
    pub contexts: Vec<MetaContext>,
}

/// What comes next. Whatever it is, the caller first sends the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientStep {
    /// The input is used up: read more.
    Read,
    /// Start TLS as its client, then call [`ClientHandshake::tls_started`]. When that fails the session ends.
    StartTls,
    /// The transmission phase begins. What is left of the input belongs to it.
    Transmission(Connected),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Greeting,
    /// An option has been sent, and its reply has not ended.
    Header(u32),
    Data {
        option: u32,
        kind: u32,
        length: u32,
    },
    /// What `NBD_OPT_EXPORT_NAME` is answered by.
    Export,
    Tls,
    Done,
}

/// One handshake, from the client's side. Memory is bounded by the longest reply, and their number.
#[derive(Debug)]
pub struct ClientHandshake {
    wants: ClientOptions,
    state: State,
    gathered: Vec<u8>,
    no_zeroes: bool,
    structured: bool,
    contexts: Vec<MetaContext>,
    /// Replies to the option that was sent last.
    replies: u32,
    size: Option<(u64, u16)>,
    name: String,
    description: String,
    blocks: Option<BlockSizes>,
}

impl ClientHandshake {
    /// At the start of a connection.
    pub fn new(wants: ClientOptions) -> Result<ClientHandshake, NbdError> {
        let strings = wants.contexts.iter().chain([&wants.export]);
        if let Some(bad) = strings.into_iter().find(|text| !is_string(text.as_bytes())) {
            return Err(NbdError::Name(bad.chars().take(64).collect()));
        }
        Ok(ClientHandshake {
            wants,
            state: State::Greeting,
            gathered: Vec::new(),
            no_zeroes: false,
            structured: false,
            contexts: Vec::new(),
            replies: 0,
            size: None,
            name: String::new(),
            description: String::new(),
            blocks: None,
        })
    }

    /// Goes on: takes what it uses off the front of `input`, appends what is to be sent to `output`. After an error the session is
    /// over.
    pub fn next(&mut self, input: &mut &[u8], output: &mut Vec<u8>) -> Result<ClientStep, NbdError> {
        loop {
            match self.state {
                State::Greeting => {
                    // The flags come last: an oldstyle server is told by its magic.
                    if !self.gather(input, 16) {
                        return Ok(ClientStep::Read);
                    }
                    let mut parser = Parser(&self.gathered);
                    match (parser.u64(), parser.u64()) {
                        (Ok(NBDMAGIC), Ok(IHAVEOPT)) => {}
                        (Ok(NBDMAGIC), Ok(CLISERV_MAGIC)) => return Err(NbdError::Oldstyle),
                        (Ok(other), _) => return Err(Violation::Greeting(other).into()),
                        (Err(Malformed), _) => return Err(Violation::Greeting(0).into()),
                    }
                    if !self.gather(input, 18) {
                        return Ok(ClientStep::Read);
                    }
                    let flags = Parser(&self.gathered[16..]).u16().unwrap_or_default();
                    self.greet(flags, output)?;
                }
                State::Header(sent) => {
                    if !self.gather(input, REPLY_HEADER) {
                        return Ok(ClientStep::Read);
                    }
                    self.header(sent)?;
                }
                State::Data { option, kind, length } => {
                    if !self.gather(input, length as usize) {
                        return Ok(ClientStep::Read);
                    }
                    let data = std::mem::take(&mut self.gathered);
                    self.state = State::Header(option);
                    self.reply(option, kind, &data, output)?;
                    if self.state == State::Tls && !input.is_empty() {
                        return Err(Violation::PlainTextBeforeTls.into());
                    }
                }
                State::Export => {
                    let zeroes = if self.no_zeroes { 0 } else { EXPORT_NAME_ZEROES };
                    if !self.gather(input, 10 + zeroes) {
                        return Ok(ClientStep::Read);
                    }
                    let mut parser = Parser(&self.gathered);
                    self.size = Some((parser.u64().unwrap_or_default(), parser.u16().unwrap_or_default()));
                    self.expect(State::Done);
                }
                State::Tls => return Ok(ClientStep::StartTls),
                State::Done => {
                    let Some((bytes, flags)) = self.size else {
                        let reply = Violation::OptionReply { kind: NBD_REP_ACK, option: NBD_OPT_GO };
                        return Err(reply.into());
                    };
                    let (name, description) = (self.name.clone(), self.description.clone());
                    let info = ExportInfo { name, description, bytes, flags, blocks: self.blocks };
                    let (structured, contexts) = (self.structured, self.contexts.clone());
                    return Ok(ClientStep::Transmission(Connected { info, structured, contexts }));
                }
            }
        }
    }

    /// Whether sums were asked for, and the server has them.
    pub(crate) fn has_sums(&self) -> bool {
        self.wants.contexts.iter().any(|query| sums::is_asked_by(query))
            && self.contexts.iter().any(|context| context.name == CRC32C)
    }

    /// The answer to [`ClientStep::StartTls`]: from here on all is said over TLS.
    pub fn tls_started(&mut self, output: &mut Vec<u8>) {
        if self.state == State::Tls {
            self.negotiate(output);
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

    fn send(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) {
        option::write(output, option, data);
        self.replies = 0;
        self.expect(State::Header(option));
    }

    fn greet(&mut self, flags: u16, output: &mut Vec<u8>) -> Result<(), NbdError> {
        let fixed = flags & NBD_FLAG_FIXED_NEWSTYLE != 0;
        self.no_zeroes = flags & NBD_FLAG_NO_ZEROES != 0;
        if !fixed && self.wants.tls == ClientTls::Required {
            return Err(NbdError::TlsRefused("it does not speak fixed newstyle".into()));
        }
        let mut answer = 0;
        answer |= if fixed { NBD_FLAG_C_FIXED_NEWSTYLE } else { 0 };
        answer |= if self.no_zeroes { NBD_FLAG_C_NO_ZEROES } else { 0 };
        output.extend(answer.to_be_bytes());
        match self.wants.tls {
            _ if !fixed => self.enter_by_name(output),
            ClientTls::Required => self.send(NBD_OPT_STARTTLS, &[], output),
            ClientTls::Never => self.negotiate(output),
        }
        Ok(())
    }

    /// The first option that is not about TLS.
    fn negotiate(&mut self, output: &mut Vec<u8>) {
        if self.wants.structured {
            self.send(NBD_OPT_STRUCTURED_REPLY, &[], output);
        } else {
            self.enter(output);
        }
    }

    fn ask_contexts(&mut self, output: &mut Vec<u8>) {
        if self.wants.contexts.is_empty() {
            return self.enter(output);
        }
        let mut data = Vec::new();
        put_string(&mut data, &self.wants.export);
        data.extend((self.wants.contexts.len() as u32).to_be_bytes());
        self.wants.contexts.iter().for_each(|query| put_string(&mut data, query));
        self.send(NBD_OPT_SET_META_CONTEXT, &data, output);
    }

    fn enter(&mut self, output: &mut Vec<u8>) {
        let asked = [NBD_INFO_NAME, NBD_INFO_DESCRIPTION, NBD_INFO_BLOCK_SIZE];
        let mut data = Vec::new();
        put_string(&mut data, &self.wants.export);
        data.extend((asked.len() as u16).to_be_bytes());
        asked.iter().for_each(|item| data.extend(item.to_be_bytes()));
        self.send(NBD_OPT_GO, &data, output);
    }

    fn enter_by_name(&mut self, output: &mut Vec<u8>) {
        option::write(output, NBD_OPT_EXPORT_NAME, self.wants.export.as_bytes());
        self.blocks = None;
        self.expect(State::Export);
    }

    fn header(&mut self, sent: u32) -> Result<(), Violation> {
        let mut parser = Parser(&self.gathered);
        let magic = parser.u64().unwrap_or_default();
        let option = parser.u32().unwrap_or_default();
        let kind = parser.u32().unwrap_or_default();
        let length = parser.u32().unwrap_or_default();
        if magic != NBD_REP_MAGIC {
            return Err(Violation::OptionReplyMagic(magic));
        }
        if option != sent {
            return Err(Violation::OptionReplyTo { got: option, sent });
        }
        if length > MAX_REPLY {
            return Err(Violation::OptionReplyLength(length));
        }
        self.replies += 1;
        if self.replies > MAX_REPLIES {
            return Err(Violation::TooManyReplies(MAX_REPLIES));
        }
        self.expect(State::Data { option, kind, length });
        Ok(())
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8], output: &mut Vec<u8>) -> Result<(), NbdError> {
        let malformed = |Malformed| NbdError::Violation(Violation::OptionReply { kind, option });
        match (option, kind) {
            (_, NBD_REP_FLAG_ERROR..) => self.refused(option, kind, data, output)?,
            (_, NBD_REP_ACK) => {
                Parser(data).end().map_err(malformed)?;
                match option {
                    NBD_OPT_STARTTLS => self.expect(State::Tls),
                    NBD_OPT_STRUCTURED_REPLY => {
                        self.structured = true;
                        self.ask_contexts(output);
                    }
                    NBD_OPT_SET_META_CONTEXT => self.enter(output),
                    _ if self.size.is_some() => self.expect(State::Done),
                    _ => return Err(malformed(Malformed)),
                }
            }
            (NBD_OPT_SET_META_CONTEXT, NBD_REP_META_CONTEXT) => {
                let mut parser = Parser(data);
                let id = parser.u32().map_err(malformed)?;
                let name = option::string(parser.0).map_err(malformed)?;
                self.contexts.push(MetaContext { id, name });
            }
            (NBD_OPT_GO, NBD_REP_INFO) => {
                self.info(data).map_err(malformed)?;
                self.blocks.map(BlockSizes::checked).transpose()?;
            }
            _ => return Err(malformed(Malformed)),
        }
        Ok(())
    }

    fn info(&mut self, data: &[u8]) -> Result<(), Malformed> {
        let mut parser = Parser(data);
        match parser.u16()? {
            NBD_INFO_EXPORT => {
                self.size = Some((parser.u64()?, parser.u16()?));
                parser.end()
            }
            NBD_INFO_NAME => {
                self.name = option::string(parser.0)?;
                Ok(())
            }
            NBD_INFO_DESCRIPTION => {
                self.description = option::string(parser.0)?;
                Ok(())
            }
            NBD_INFO_BLOCK_SIZE => {
                let (minimum, preferred, maximum) = (parser.u32()?, parser.u32()?, parser.u32()?);
                self.blocks = Some(BlockSizes { minimum, preferred, maximum });
                parser.end()
            }
            // To be ignored.
            _ => Ok(()),
        }
    }

    /// An option was refused: what that means depends on the option.
    fn refused(&mut self, option: u32, code: u32, data: &[u8], output: &mut Vec<u8>) -> Result<(), NbdError> {
        let message = || String::from_utf8_lossy(data).into_owned();
        match (option, code) {
            (NBD_OPT_STARTTLS, _) => Err(NbdError::TlsRefused(message())),
            (_, NBD_REP_ERR_TLS_REQD) => Err(NbdError::TlsRequired),
            (_, NBD_REP_ERR_SHUTDOWN) => Err(NbdError::ShuttingDown),
            (NBD_OPT_STRUCTURED_REPLY, _) => {
                self.enter(output);
                Ok(())
            }
            (NBD_OPT_SET_META_CONTEXT, _) => {
                self.contexts.clear();
                self.enter(output);
                Ok(())
            }
            (NBD_OPT_GO, NBD_REP_ERR_UNSUP) => {
                self.enter_by_name(output);
                Ok(())
            }
            (_, NBD_REP_ERR_UNKNOWN) => Err(NbdError::NoSuchExport(self.wants.export.clone())),
            _ => Err(NbdError::Refused { code: code & !NBD_REP_FLAG_ERROR, message: message() }),
        }
    }
}
