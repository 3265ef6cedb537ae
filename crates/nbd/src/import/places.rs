//! A server that can be reached at several addresses: connects to the one that answers.
//!
//! A name may have several addresses, and the URI may name more places of the same server (`also=`). Each gets a head start before the next is tried as well, so that
//! one behind which the network is gone costs a quarter of a second (RFC 8305, section 5; addresses keep the order that they come in).

use std::collections::VecDeque;
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// How long it may take to find the addresses of a name.
const LOOK_UP: Duration = Duration::from_secs(2);
/// "Connection Attempt Delay" of RFC 8305.
const HEAD_START: Duration = Duration::from_millis(250);

/// The addresses of all these hosts and ports, in order. Places that cannot be found are left out, unless none can.
pub(super) async fn addresses(
    places: impl Iterator<Item = (&str, u16)>,
) -> Result<VecDeque<SocketAddr>, Error> {
    // All at once, and not for long: whoever knows the names may be behind the network that is gone.
    let look_up = |(host, port): (&str, u16)| {
        let host = host.to_owned();
        tokio::spawn(async move {
            let found = tokio::time::timeout(LOOK_UP, tokio::net::lookup_host((host.as_str(), port))).await;
            Ok::<Vec<SocketAddr>, Error>(found.map_err(|_| Error::from(ErrorKind::TimedOut))??.collect())
        })
    };
    let lookups: Vec<_> = places.map(look_up).collect();
    let (mut found, mut failure) = (VecDeque::new(), None);
    for lookup in lookups {
        match lookup.await.unwrap_or_else(|gone| Err(gone.into())) {
            Ok(addresses) => {
                let new: Vec<_> = addresses.into_iter().filter(|address| !found.contains(address)).collect();
                found.extend(new);
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    match failure {
        Some(error) if found.is_empty() => Err(error),
        _ if found.is_empty() => Err(ErrorKind::NotFound.into()),
        _ => Ok(found),
    }
}

/// Connects to one of them. An error is that of the one that failed first.
pub(super) async fn connect(mut addresses: VecDeque<SocketAddr>) -> Result<TcpStream, Error> {
    let mut attempts = JoinSet::new();
    let mut failure = None;
    begin(&mut attempts, &mut addresses);
    loop {
        tokio::select! {
            ended = attempts.join_next() => match ended {
                None => return Err(failure.unwrap_or_else(|| ErrorKind::NotFound.into())),
                Some(Ok(Ok(stream))) => return Ok(stream),
                Some(ended) => {
                    let error = ended.unwrap_or_else(|gone| Err(gone.into()));
                    failure = failure.or(error.err());
                    begin(&mut attempts, &mut addresses);
                }
            },
            () = tokio::time::sleep(HEAD_START), if !addresses.is_empty() => begin(&mut attempts, &mut addresses),
        }
    }
}

fn begin(attempts: &mut JoinSet<Result<TcpStream, Error>>, addresses: &mut VecDeque<SocketAddr>) {
    if let Some(address) = addresses.pop_front() {
        attempts.spawn(TcpStream::connect(address));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::time::Instant;

    use rustix::net::{AddressFamily, SocketType};
    use tokio::net::TcpListener;

    /// A place at which nobody answers, as behind a cable that was pulled; it is one while this lives.
    struct Silent(SocketAddr, Vec<std::os::fd::OwnedFd>);

    impl Silent {
        fn new() -> Silent {
            let socket = || rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            let listener = socket();
            rustix::net::bind(&listener, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            rustix::net::listen(&listener, 0).unwrap();
            let address = SocketAddr::try_from(rustix::net::getsockname(&listener).unwrap()).unwrap();
            let mut kept = vec![listener];
            // Nobody accepts: with its queue full the kernel throws the next ones' SYNs away.
            for _ in 0..4 {
                let client = socket();
                rustix::io::ioctl_fionbio(&client, true).unwrap();
                let _ = rustix::net::connect(&client, &address);
                kept.push(client);
            }
            Silent(address, kept)
        }
    }

    async fn listening() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    async fn closed() -> SocketAddr {
        listening().await.1
    }

    #[tokio::test]
    async fn the_first_that_answers_is_taken() {
        let (_one, first) = listening().await;
        let (_other, second) = listening().await;
        let stream = connect(VecDeque::from([closed().await, first, second])).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), first);
    }

    #[tokio::test]
    async fn a_silent_one_has_a_head_start_and_no_more() {
        let silent = Silent::new();
        let (_one, there) = listening().await;
        let begun = Instant::now();
        let stream = connect(VecDeque::from([silent.0, there])).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), there);
        assert!(begun.elapsed() >= HEAD_START, "it was not silent");
        assert!(silent.1.len() == 5);
    }

    #[tokio::test]
    async fn the_error_is_that_of_the_first() {
        let both = VecDeque::from([closed().await, closed().await]);
        assert_eq!(connect(both).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(connect(VecDeque::new()).await.unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn places_keep_their_order_and_are_found_once() {
        let places = [("127.0.0.1", 7), ("no-such-host.invalid", 7), ("::1", 8), ("127.0.0.1", 7)];
        let found = addresses(places.into_iter()).await.unwrap();
        assert_eq!(found, ["127.0.0.1:7".parse().unwrap(), "[::1]:8".parse::<SocketAddr>().unwrap()]);
        assert!(addresses(places[1..2].iter().copied()).await.is_err());
    }
}
