//! A daemon's API, as a measurement calls it while its generator runs.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// One request on a connection of its own; what is answered, unless that is not by 200.
pub fn call(control: &Path, method: &str, path: &str, body: &str) -> Result<Value> {
    let mut stream = UnixStream::connect(control).with_context(|| control.display().to_string())?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: ioplane\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer.split(' ').nth(1) != Some("200") {
        bail!("{method} {path} {body}: {answer}");
    }
    let (_, said) = answer.split_once("\r\n\r\n").unwrap_or_default();
    Ok(serde_json::from_str(said).unwrap_or(Value::Null))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_other_than_200_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let answering = std::thread::spawn(move || {
            for answer in ["HTTP/1.1 200 OK\r\n\r\n{\"a\":1}", "HTTP/1.1 409 Conflict\r\n\r\n{}"] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n{}") {
                    let mut piece = [0; 512];
                    let count = stream.read(&mut piece).unwrap();
                    assert_ne!(count, 0, "the request has no end");
                    request.extend_from_slice(&piece[..count]);
                }
                assert!(request.starts_with(b"POST /v1/queues/move HTTP/1.1\r\n"));
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        assert_eq!(call(&path, "POST", "/v1/queues/move", "{}").unwrap()["a"], 1);
        assert!(call(&path, "POST", "/v1/queues/move", "{}").unwrap_err().to_string().contains("409"));
        answering.join().unwrap();
    }
}
