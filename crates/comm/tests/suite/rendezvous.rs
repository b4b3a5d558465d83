//! Worlds that cannot start: missing, duplicate and rejected ranks are named on all ranks that joined.

use crate::processes::{free_port, shared_memory};
use crate::ranks::{identities, options};
use lockstep_comm::{Error, Identity, Options, TokenSource, World, token};
use std::time::Duration;

/// Joins these ranks, each on a thread, with their own options; returns the results in order.
fn join_all(ranks: Vec<(Identity, Options)>) -> Vec<Result<World, Error>> {
    std::thread::scope(|scope| {
        let join = |(identity, options)| scope.spawn(move || World::join(&identity, &options));
        let threads: Vec<_> = ranks.into_iter().map(join).collect();
        threads.into_iter().map(|t| t.join().expect("joining does not panic")).collect()
    })
}

/// Options of a rank that gives up first: rank 0, which reports missing ranks to the others.
fn short() -> Options {
    Options { join_timeout: Duration::from_secs(5), ..options() }
}

/// Rank 0 gives up first; the other ranks wait for its report.
fn join_with_short_master(ranks: Vec<Identity>) -> Vec<Result<World, Error>> {
    let options = |i: &Identity| if i.rank == 0 { short() } else { options() };
    join_all(ranks.into_iter().map(|i| (i.clone(), options(&i))).collect())
}

fn text(result: &Result<World, Error>) -> String {
    result.as_ref().err().map(Error::to_string).unwrap_or_default()
}

#[test]
fn missing_ranks_are_named_on_all_ranks() {
    let mut all = identities(shared_memory(5));
    all.retain(|identity| [0, 2].contains(&identity.rank));
    for result in join_with_short_master(all) {
        let text = text(&result);
        assert!(text.contains("2 of 5 ranks joined within 5 s; missing: 1, 3, 4"), "{text}");
    }
}

#[test]
fn a_missing_rank_0_is_named() {
    let mut all = identities(shared_memory(2));
    let results = join_all(vec![(all.remove(1), short())]);
    let text = text(&results[0]);
    assert!(text.contains("rank 1 could not join: no connection to rank 0"), "{text}");
}

#[test]
fn a_duplicate_rank_is_named_on_all_ranks() {
    let mut all = identities(shared_memory(3));
    all[2].rank = 1;
    for result in join_all(all.into_iter().map(|i| (i, options())).collect()) {
        let text = text(&result);
        assert!(text.contains("rank 1 is used twice"), "{text}");
        assert!(text.contains("set a different RANK for every process"), "{text}");
    }
}

#[test]
fn a_late_duplicate_is_rejected_with_a_reason() {
    let all = identities(shared_memory(2));
    let late = all[1].clone();
    let worlds = join_all(all.into_iter().map(|i| (i, options())).collect());
    assert!(worlds.iter().all(Result::is_ok), "{}{}", text(&worlds[0]), text(&worlds[1]));
    let results = join_all(vec![(late, options())]);
    let text = text(&results[0]);
    assert!(text.contains("already has another process as rank 1"), "{text}");
    drop_concurrently(worlds);
}

/// Rank 0 waits for the others to leave, so each rank is dropped on its own thread.
fn drop_concurrently(worlds: Vec<Result<World, Error>>) {
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || drop(world));
        }
    });
}

#[test]
fn a_different_token_is_rejected_with_a_reason() {
    let mut all = identities(shared_memory(2));
    all[1].token = TokenSource::Env(token::random().expect("random bytes"));
    let results = join_with_short_master(all);
    assert!(text(&results[0]).contains("missing: 1"), "{}", text(&results[0]));
    assert!(text(&results[1]).contains("the same LOCKSTEP_TOKEN"), "{}", text(&results[1]));
}

#[test]
fn a_different_configuration_is_rejected_with_a_reason() {
    let all = identities(shared_memory(2));
    let with_config = |rank: usize| {
        let options = if rank == 0 { short() } else { options() };
        Options { config: [rank as u8; 32], ..options }
    };
    let results = join_all(all.into_iter().enumerate().map(|(r, i)| (i, with_config(r))).collect());
    assert!(text(&results[0]).contains("missing: 1"), "{}", text(&results[0]));
    let rejected = text(&results[1]);
    assert!(rejected.contains("the configuration of the peer is 0000000000000000"), "{rejected}");
    assert!(rejected.contains("0101010101010101"), "{rejected}");
}

#[test]
fn encryption_on_some_ranks_only_is_rejected_with_a_reason() {
    let mut all = identities(shared_memory(2));
    all[1].transport.encrypt = true;
    let results = join_with_short_master(all);
    let rejected = text(&results[1]);
    assert!(
        rejected.contains("this process encrypts its traffic, the peer does not"),
        "{rejected}"
    );
}

#[test]
fn an_old_generation_is_rejected_with_a_reason() {
    let mut all = identities(shared_memory(2));
    all[0].generation = 4;
    let results = join_with_short_master(all);
    let rejected = text(&results[1]);
    assert!(rejected.contains("the peer belongs to generation 4, this process to"), "{rejected}");
    assert!(rejected.contains("this process must stop"), "{rejected}");
}

#[test]
fn a_port_in_use_is_reported() {
    let port = free_port();
    let _taken = std::net::TcpListener::bind(("127.0.0.1", port)).expect("the port is free");
    let mut first = identities(shared_memory(2)).remove(0);
    first.master_port = port;
    let results = join_all(vec![(first, short())]);
    let text = text(&results[0]);
    assert!(text.contains(&format!("127.0.0.1:{port}: the port is in use")), "{text}");
}
