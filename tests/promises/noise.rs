//! Peers that are no use to any server: they never read, flood it, speak rubbish, or go away in
//! the middle of a line. Their keys are their own, and what they hear is not checked.

use std::io::{self, Read, Write};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

use crate::place::{Place, Stream};
use crate::support::random::Random;

type Annoyance = fn(&Place, &mut Random) -> io::Result<()>;

const ANNOYANCES: [Annoyance; 11] = [
    never_read,
    flood,
    rubbish,
    telnet,
    trickle,
    storm,
    leave_in_the_middle,
    ask_and_reset,
    overlong_line,
    ask_for_help,
    break_what_is_not_there,
];

/// Annoys the server in a random way, for a few seconds at most.
pub fn annoy(place: &Place, random: &mut Random) {
    let which = usize::try_from(random.below(ANNOYANCES.len() as u64)).expect("an index");
    // The server may be gone, or hang up at any time.
    if ANNOYANCES[which](place, random).is_err() {
        thread::sleep(Duration::from_millis(20));
    }
}

fn connect(place: &Place, random: &mut Random) -> io::Result<Stream> {
    // Where the server speaks TLS, some do not.
    let stream = if random.one_in(4) {
        place.plain()?
    } else {
        place.network()?
    };
    stream.set_write_timeout(Duration::from_millis(200))?;
    stream.set_read_timeout(Duration::from_millis(200))?;
    Ok(stream)
}

fn never_read(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    let frames = "stats\n_\n_\nl\nunread\n0 1\nping\n_\n_\n".repeat(500);
    let sent = stream.write_all(frames.as_bytes());
    thread::sleep(Duration::from_millis(random.below(3000)));
    sent
}

fn flood(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    let mut reader = stream.try_clone()?;
    let reading = thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
    for _ in 0..20 {
        stream.write_all("l\nflood\n0 1\nping\n_\n_\n".repeat(200).as_bytes())?;
    }
    stream.half_close()?;
    // An error is the end of the stream, too.
    let _ = reading.join();
    Ok(())
}

fn rubbish(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    let bytes: Vec<u8> = (0..500).flat_map(|_| random.next().to_le_bytes()).collect();
    stream.write_all(&bytes)?;
    io::copy(&mut stream, &mut io::sink()).map(drop)
}

fn telnet(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    // WILL NAWS, WILL SPEED; SB NAWS; Ctrl-C; a command; AYT.
    stream.write_all(b"\xff\xfb\x1f\xff\xfb\x20\xff\xfa\x1f\x00\x50\x00\x18\xff\xf0")?;
    stream.write_all(b"l\r\ntel\xff\xf4\xff\xfd\x06l\r\ntelnet\r\n0 1\r\n\xff\xf6")?;
    let mut reply = [0; 100];
    stream.read(&mut reply).map(drop)
}

fn trickle(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    for byte in b"l\ntrickle\n0 1" {
        stream.write_all(&[*byte])?;
        thread::sleep(Duration::from_millis(random.below(100)));
    }
    Ok(())
}

fn storm(place: &Place, random: &mut Random) -> io::Result<()> {
    let crowd: Vec<Stream> = (0..60).map_while(|_| connect(place, random).ok()).collect();
    thread::sleep(Duration::from_millis(50));
    drop(crowd);
    Ok(())
}

fn leave_in_the_middle(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    stream.write_all(b"e\nleft\n\nw\nleft\n5\nr\nlef")?;
    stream.half_close()?;
    io::copy(&mut stream, &mut io::sink()).map(drop)
}

fn ask_and_reset(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    stream.write_all("l\nreset\n10\nsl\nslots\n10 3 1\n".repeat(50).as_bytes())?;
    thread::sleep(Duration::from_millis(random.below(50)));
    set_socket_linger(&stream, Some(Duration::ZERO))?;
    Ok(())
}

fn overlong_line(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    stream.write_all(&[b'x'; 100_000])?;
    io::copy(&mut stream, &mut io::sink()).map(drop)
}

/// A person who asks for help, and leaves as the help says.
fn ask_for_help(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    stream.write_all(b"help\r\n")?;
    stream.read(&mut [0; 1000]).map(drop)?;
    stream.write_all(b"?\r\nquit\r\n")?;
    io::copy(&mut stream, &mut io::sink()).map(drop)
}

fn break_what_is_not_there(place: &Place, random: &mut Random) -> io::Result<()> {
    let mut stream = connect(place, random)?;
    stream.write_all(b"tag\n_\nvandal\nbreak\nnothing\n_ wrong\nstats\nholders\n_\n")?;
    io::copy(&mut stream, &mut io::sink()).map(drop)
}
