//! A bad network for tests: `LOCKSTEP_SOCKS5=127.0.0.1:1080 lockstep train …` sends all connections between
//! ranks and launchers through it.
//!
//! ```sh
//! cargo run -p lockstep-comm --example proxy -- listen=127.0.0.1:1080 delay=250 loss=0.05 rate=50e6
//! ```
//!
//! `delay` is one way, in milliseconds; `loss` is the fraction of lost packets; `rate` is in bytes per
//! second. The same words on standard input change the conditions of a running proxy, and so do `cut`
//! (nothing gets through), `restore`, `reset` (closes all connections), `flip` (flips a bit of the next 1,000
//! bytes or more) and `bytes` (prints the bytes sent).

mod proxy;

use proxy::{Conditions, Proxy};
use std::io::BufRead;
use std::net::SocketAddr;

fn main() {
    let (mut listen, mut conditions) =
        (SocketAddr::from(([127, 0, 0, 1], 1080)), Conditions::default());
    for word in std::env::args().skip(1) {
        let known = match word.strip_prefix("listen=").map(str::parse) {
            Some(Ok(addr)) => {
                listen = addr;
                true
            }
            Some(Err(_)) => false,
            None => conditions.set(&word),
        };
        if !known {
            eprintln!("proxy: {word}: use listen=IP:PORT, delay=MS, loss=FRACTION or rate=BYTES");
            std::process::exit(2);
        }
    }
    let proxy = match Proxy::start(listen, conditions) {
        Ok(proxy) => proxy,
        Err(error) => {
            eprintln!("proxy: cannot listen on {listen}: {error}");
            std::process::exit(1);
        }
    };
    println!("listening on {}", proxy.addr());
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        for word in line.split_whitespace() {
            match word {
                "bytes" => println!("{}", proxy.bytes()),
                "reset" => proxy.reset(),
                "flip" => proxy.flip_a_bit(1000),
                word if proxy.change(word) => {}
                word => eprintln!("proxy: unknown command {word}"),
            }
        }
    }
    // Standard input may be /dev/null.
    loop {
        std::thread::park();
    }
}
