//! Worlds that cannot form: whoever is missing, comes twice or does not belong is named, on all ranks
//! that came.

use crate::processes::{free_port, shared_memory};
use crate::ranks::{identities, impatient};
use lockstep_comm::{Error, Identity, Options, TokenSource, World, token};
use std::time::Duration;

/// Ranks that join, each on a thread, with options of their own; what came of it, in their order.
fn join_all(ranks: Vec<(Identity, Options)>) -> Vec<Result<World, Error>> {
    std::thread::scope(|scope| {
        let join = |(identity, options)| scope.spawn(move || World::join(&identity, &options));
        let threads: Vec<_> = ranks.into_iter().map(join).collect();
        threads.into_iter().map(|t| t.join().expect("joining does not panic")).collect()
    })
}

fn soon() -> Options {
    Options { join_timeout: Duration::from_millis(1500), ..impatient() }
}

fn text(result: &Result<World, Error>) -> String {
    result.as_ref().err().map(Error::to_string).unwrap_or_default()
}

#[test]
fn missing_ranks_are_named_on_all_that_came() {
    let mut all = identities(shared_memory(5));
    all.retain(|identity| [0, 2].contains(&identity.rank));
    for result in join_all(all.into_iter().map(|i| (i, soon())).collect()) {
        let text = text(&result);
        assert!(text.contains("2 of 5 ranks joined within 2 s; missing: 1, 3, 4"), "{text}");
    }
}

#[test]
fn nobody_answers_where_rank_0_should_be() {
    let mut all = identities(shared_memory(2));
    let results = join_all(vec![(all.remove(1), soon())]);
    let text = text(&results[0]);
    assert!(text.contains("rank 1 could not join: no connection to rank 0"), "{text}");
}

#[test]
fn a_rank_claimed_twice_is_named_on_all() {
    let mut all = identities(shared_memory(3));
    all[2].rank = 1;
    for result in join_all(all.into_iter().map(|i| (i, soon())).collect()) {
        let text = text(&result);
        assert!(text.contains("rank 1 is used twice"), "{text}");
        assert!(text.contains("every process needs a RANK of its own"), "{text}");
    }
}

#[test]
fn one_that_comes_when_all_are_there_is_told_so() {
    let all = identities(shared_memory(2));
    let late = all[1].clone();
    let worlds = join_all(all.into_iter().map(|i| (i, soon())).collect());
    assert!(worlds.iter().all(Result::is_ok), "{}{}", text(&worlds[0]), text(&worlds[1]));
    let results = join_all(vec![(late, soon())]);
    let text = text(&results[0]);
    assert!(text.contains("another process is rank 1"), "{text}");
    drop_together(worlds);
}

/// Rank 0 leaves last, so its thread must not be the one that drops the others.
fn drop_together(worlds: Vec<Result<World, Error>>) {
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || drop(world));
        }
    });
}

#[test]
fn another_token_is_refused_by_name() {
    let mut all = identities(shared_memory(2));
    all[1].token = TokenSource::Env(token::random().expect("random bytes"));
    let results = join_all(all.into_iter().map(|i| (i, soon())).collect());
    assert!(text(&results[0]).contains("missing: 1"), "{}", text(&results[0]));
    assert!(text(&results[1]).contains("the same LOCKSTEP_TOKEN"), "{}", text(&results[1]));
}

#[test]
fn another_configuration_is_refused_by_name() {
    let all = identities(shared_memory(2));
    let options = |rank: usize| Options { config: [rank as u8; 32], ..soon() };
    let results = join_all(all.into_iter().enumerate().map(|(r, i)| (i, options(r))).collect());
    assert!(text(&results[0]).contains("missing: 1"), "{}", text(&results[0]));
    let refused = text(&results[1]);
    assert!(refused.contains("the peer's configuration is 0000000000000000"), "{refused}");
    assert!(refused.contains("0101010101010101"), "{refused}");
}

#[test]
fn an_old_generation_is_told_to_stop() {
    let mut all = identities(shared_memory(2));
    all[0].generation = 4;
    let results = join_all(all.into_iter().map(|i| (i, soon())).collect());
    let refused = text(&results[1]);
    assert!(refused.contains("the peer is of generation 4, this process of"), "{refused}");
    assert!(refused.contains("it has to stop"), "{refused}");
}

#[test]
fn a_port_in_use_is_a_clear_error() {
    let port = free_port();
    let _taken = std::net::TcpListener::bind(("127.0.0.1", port)).expect("it was free");
    let mut first = identities(shared_memory(2)).remove(0);
    first.master_port = port;
    let results = join_all(vec![(first, soon())]);
    let text = text(&results[0]);
    assert!(text.contains(&format!("127.0.0.1:{port}: the port is in use")), "{text}");
}
