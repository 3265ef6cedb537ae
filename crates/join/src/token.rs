//! What a host that joins is given, as text: by a person, who shows it to nobody else.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ioplane_identity::{HostName, SECRET};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// How a token begins: a person sees what it is, and a search for leaked secrets finds it.
const PREFIX: &str = "ioplane-join-1-";
/// Bytes of a digest behind the content: a token that was cut or mistyped is told from one that does not work.
const SUM: usize = 4;
/// Longest text, bytes.
const LONGEST: usize = 4096;
/// Most places of an authority.
pub const MOST_PLACES: usize = 8;
/// Longest host of a place (RFC 1035).
const LONGEST_HOST: usize = 253;

/// Where an authority answers: a host, as a name or an address, and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthorityPlace {
    /// A name or an address.
    pub host: String,
    /// The port.
    pub port: u16,
}

/// Why a text is no token, or no place of an authority.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenFlaw {
    /// It begins in another way.
    #[error("that is no token: it begins with {PREFIX}")]
    Prefix,
    /// It was cut, mistyped or made by somebody else.
    #[error("the token is damaged: copy it whole")]
    Damaged,
    /// No address.
    #[error("{0:?} is no address of an authority: HOST, HOST:PORT, [IPV6] or [IPV6]:PORT")]
    Place(String),
}

impl FromStr for AuthorityPlace {
    type Err = TokenFlaw;

    fn from_str(text: &str) -> Result<AuthorityPlace, TokenFlaw> {
        let wrong = || TokenFlaw::Place(text.chars().filter(|c| !c.is_control()).take(64).collect());
        if text.parse::<std::net::Ipv6Addr>().is_ok() {
            return Ok(AuthorityPlace { host: text.to_owned(), port: crate::DEFAULT_PORT });
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !text.ends_with(']') => (host, port.parse().map_err(|_| wrong())?),
            _ => (text, crate::DEFAULT_PORT),
        };
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match bare {
            Some(inner) if inner.parse::<std::net::Ipv6Addr>().is_ok() => inner,
            Some(_) => return Err(wrong()),
            None => host,
        };
        let place = AuthorityPlace { host: host.to_owned(), port };
        if place.is_good() { Ok(place) } else { Err(wrong()) }
    }
}

impl AuthorityPlace {
    /// Whether it is a name or an address, and nothing else.
    fn is_good(&self) -> bool {
        let name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let host = self.host.as_str();
        self.port != 0
            && (host.parse::<std::net::IpAddr>().is_ok()
                || (!host.is_empty() && host.len() <= LONGEST_HOST && host.bytes().all(name)))
    }
}

impl fmt::Display for AuthorityPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// A token.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// Where the authority answers: the first that does.
    pub places: Vec<AuthorityPlace>,
    /// SHA-256 of the authority's certificate.
    pub authority: [u8; 32],
    /// What works once.
    pub secret: [u8; SECRET],
    /// When it ends, in seconds since 1970: the authority decides by its own clock.
    pub until: i64,
    /// The name of the host that it is for; `None`: any.
    pub name: Option<String>,
}

/// What the text of a token has: hosts and ports of places, then the rest.
#[derive(Serialize, Deserialize)]
struct TokenV1 {
    places: Vec<(String, u16)>,
    authority: [u8; 32],
    secret: [u8; SECRET],
    until: i64,
    name: Option<String>,
}

impl fmt::Debug for JoinToken {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let JoinToken { places, until, name, .. } = self;
        let mut shown = f.debug_struct("JoinToken");
        shown.field("places", places).field("until", until).field("name", name).finish_non_exhaustive()
    }
}

impl JoinToken {
    /// As text: one word, which can stand in a command line and a file.
    pub fn text(&self) -> String {
        // Of plain data: it cannot fail, and an empty token is refused.
        let JoinToken { places, authority, secret, until, name } = self.clone();
        let places = places.into_iter().map(|AuthorityPlace { host, port }| (host, port)).collect();
        let content = TokenV1 { places, authority, secret, until, name };
        let mut bytes = postcard::to_stdvec(&content).unwrap_or_default();
        let sum = Sha256::digest(&bytes);
        bytes.extend(&sum[..SUM]);
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }

    /// The host that it is for.
    pub fn host(&self) -> Option<HostName> {
        self.name.as_ref().and_then(|name| name.parse().ok())
    }
}

impl FromStr for JoinToken {
    type Err = TokenFlaw;

    fn from_str(text: &str) -> Result<JoinToken, TokenFlaw> {
        let content = text.trim().strip_prefix(PREFIX).ok_or(TokenFlaw::Prefix)?;
        if content.len() > LONGEST {
            return Err(TokenFlaw::Damaged);
        }
        let bytes = URL_SAFE_NO_PAD.decode(content).map_err(|_| TokenFlaw::Damaged)?;
        let (bytes, sum) = bytes.split_last_chunk::<SUM>().ok_or(TokenFlaw::Damaged)?;
        if Sha256::digest(bytes)[..SUM] != *sum {
            return Err(TokenFlaw::Damaged);
        }
        let (content, rest) = postcard::take_from_bytes::<TokenV1>(bytes).map_err(|_| TokenFlaw::Damaged)?;
        let TokenV1 { places, authority, secret, until, name } = content;
        let places = places.into_iter().map(|(host, port)| AuthorityPlace { host, port }).collect();
        let token = JoinToken { places, authority, secret, until, name };
        let places = (1..=MOST_PLACES).contains(&token.places.len())
            && token.places.iter().all(AuthorityPlace::is_good);
        let name =
            token.name.is_none() || token.host().is_some_and(|host| Some(host.to_string()) == token.name);
        if !rest.is_empty() || !places || !name {
            return Err(TokenFlaw::Damaged);
        }
        Ok(token)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token() -> JoinToken {
        JoinToken {
            places: vec!["10.0.0.1".parse().unwrap(), "[fd00::1]:7".parse().unwrap()],
            authority: [7; 32],
            secret: [9; SECRET],
            until: 1_800_000_000,
            name: Some("host-b".to_owned()),
        }
    }

    #[test]
    fn a_token_is_one_word_and_read_back() {
        let text = token().text();
        assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)), "{text}");
        assert_eq!(text.parse::<JoinToken>().unwrap(), token());
        assert_eq!(format!(" {text}\n").parse::<JoinToken>().unwrap(), token());
        assert!(!format!("{:?}", token()).contains('9'), "the secret is shown");
        assert_eq!(token().places[1].to_string(), "[fd00::1]:7");
    }

    #[test]
    fn what_is_no_token_is_named() {
        assert_eq!("host-b".parse::<JoinToken>(), Err(TokenFlaw::Prefix));
        let text = token().text();
        for cut in PREFIX.len()..text.len() {
            assert_eq!(text[..cut].parse::<JoinToken>(), Err(TokenFlaw::Damaged), "{cut}");
        }
        assert_eq!(format!("{text}A").parse::<JoinToken>(), Err(TokenFlaw::Damaged));
        assert_eq!(format!("{PREFIX}{}", "A".repeat(1 << 20)).parse::<JoinToken>(), Err(TokenFlaw::Damaged));
        // Well made, and of no use.
        let change = |change: &dyn Fn(&mut JoinToken)| {
            let mut token = token();
            change(&mut token);
            token.text().parse::<JoinToken>()
        };
        assert!(change(&|_| {}).is_ok());
        let flaws: [&dyn Fn(&mut JoinToken); 6] = [
            &|token| token.places.clear(),
            &|token| token.places = vec![token.places[0].clone(); MOST_PLACES + 1],
            &|token| token.places[0].host = "a/b".to_owned(),
            &|token| token.places[0].port = 0,
            &|token| token.name = Some("../x".to_owned()),
            &|token| token.name = Some("HOST-B".to_owned()),
        ];
        for flaw in flaws {
            assert_eq!(change(flaw), Err(TokenFlaw::Damaged));
        }
    }

    #[test]
    fn places() {
        for good in ["10.0.0.1", "10.0.0.1:7", "::1", "[::1]", "[::1]:7", "host-a.example.org:7"] {
            let place: AuthorityPlace = good.parse().unwrap();
            assert_eq!(place.to_string().parse::<AuthorityPlace>().unwrap(), place);
        }
        assert_eq!("[::1]".parse::<AuthorityPlace>(), "::1".parse());
        for bad in
            ["", ":7", "a:0", "a:x", "a:70000", "[a]:7", "[a]", "[]", "::1]", "a/b:7", "a b", "a\u{1b}:7"]
        {
            assert!(bad.parse::<AuthorityPlace>().is_err(), "{bad:?}");
        }
    }

    proptest! {
        /// Whatever a text is: an error, or a token whose parts can be used.
        #[test]
        fn no_text_does_harm(mut text in any::<String>(), prefixed in any::<bool>()) {
            if prefixed {
                text.insert_str(0, PREFIX);
            }
            if let Ok(token) = text.parse::<JoinToken>() {
                prop_assert!(token.places.iter().all(AuthorityPlace::is_good));
            }
        }
    }
}
