//! A network between clients and a server on this host, which a test spoils.

#![allow(dead_code, reason = "each test uses a part")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

/// What becomes of bytes of one direction: it may change them, and says how many go on. With fewer than there are the connection ends; with `None` nothing goes
/// on, and nobody is told.
pub type Way = Box<dyn FnMut(&mut [u8]) -> Option<usize> + Send>;

/// A way on which all goes on as it is.
pub fn straight() -> Way {
    Box::new(|bytes| Some(bytes.len()))
}

/// Passes bytes between each client and the port that `server` says; `ways` has those of requests and of replies, for each connection. Says its port; ends with the process.
pub fn relay(
    server: impl Fn() -> u16 + Send + 'static,
    mut ways: impl FnMut() -> [Way; 2] + Send + 'static,
) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            let Ok(server) = TcpStream::connect(("127.0.0.1", server())) else { continue };
            [&client, &server].iter().for_each(|stream| stream.set_nodelay(true).unwrap());
            let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let [requests, replies] = ways();
            std::thread::spawn(move || pass(from, to, requests));
            std::thread::spawn(move || pass(server, client, replies));
        }
    });
    port
}

fn pass(mut from: TcpStream, mut to: TcpStream, mut way: Way) {
    let mut buffer = [0; 16 << 10];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        let Some(passed) = way(&mut buffer[..bytes]) else {
            // Both stay open until the test ends.
            std::mem::forget((from, to));
            return;
        };
        if to.write_all(&buffer[..passed]).is_err() || passed < bytes {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
