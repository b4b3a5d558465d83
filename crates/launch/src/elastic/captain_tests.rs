//! The captain on stories: what happens when, and what is done about it.

use super::*;
use Act::*;

const SECOND: Duration = Duration::from_secs(1);

/// Ranks come in pairs; four are enough, eight are wanted.
fn captain() -> Captain {
    with(8, |here| (here >= 4).then_some(here.min(8) / 2 * 2))
}

/// One node, and all of its ranks.
fn on_one_host(ranks: usize) -> Captain {
    let mut captain = with(ranks, move |here| (here >= ranks).then_some(ranks));
    captain.rules.nodes = 1;
    captain
}

fn with(ranks: usize, fit: impl Fn(usize) -> Option<usize> + Send + 'static) -> Captain {
    let rules = Rules {
        nodes: 2,
        ranks,
        fit: Box::new(fit),
        max_restarts: 2,
        at_start: 60 * SECOND,
        after_loss: 10 * SECOND,
        give_up: 600 * SECOND,
    };
    Captain::new(rules, 0)
}

/// Without the words, which are for people.
fn done(acts: Vec<Act>) -> Vec<Act> {
    acts.into_iter().filter(|act| !matches!(act, Say(_))).collect()
}

fn seats(nodes: &[(u32, usize)]) -> Vec<Act> {
    vec![Begin(nodes.iter().map(|(id, ranks)| (*id, (0..*ranks).collect())).collect())]
}

fn bye(node: u32, acts: &[Act]) -> Option<i32> {
    acts.iter().find_map(|act| match act {
        Bye { node: of, code, .. } if *of == node => Some(*code),
        _ => None,
    })
}

fn failed(local_rank: usize) -> How {
    How::Failed { local_rank, code: 137, hopeless: false, text: "it was killed".into() }
}

/// Two nodes of four ranks that have begun, at second 1.
fn begun() -> Captain {
    let mut captain = captain();
    assert_eq!(captain.came(SECOND, 0, "a", 4), []);
    assert_eq!(done(captain.came(SECOND, 1, "b", 4)), seats(&[(0, 4), (1, 4)]));
    captain
}

#[test]
fn all_come_train_and_go() {
    let mut captain = begun();
    assert_eq!(captain.ended(9 * SECOND, 0, How::Done, 5), []);
    let acts = captain.ended(9 * SECOND, 1, How::Done, 5);
    assert_eq!((bye(0, &acts), bye(1, &acts)), (Some(0), Some(0)));
    // The captain's own node is told last.
    assert!(matches!(acts.last(), Some(Bye { node: 0, .. })));
    assert!(captain.is_over());
}

#[test]
fn a_failed_rank_ends_the_others_and_all_start_anew() {
    let mut captain = begun();
    assert_eq!(captain.ended(9 * SECOND, 1, failed(2), 0), [End(vec![0])]);
    assert_eq!(done(captain.ended(9 * SECOND, 0, failed(0), 0)), seats(&[(0, 4), (1, 4)]));
    // What an earlier generation says late is not heard by whoever calls; a cut node is no success.
    captain.ended(10 * SECOND, 0, How::Cut, 0);
    assert_eq!(done(captain.ended(10 * SECOND, 1, How::Cut, 0)), seats(&[(0, 4), (1, 4)]));
}

#[test]
fn restarts_are_counted_from_the_last_progress() {
    let mut captain = on_one_host(2);
    assert_eq!(done(captain.came(SECOND, 0, "a", 2)), seats(&[(0, 2)]));
    for progress in [0, 0, 7, 7, 8, 8] {
        let acts = captain.ended(SECOND, 0, failed(1), progress);
        assert_eq!(done(acts), seats(&[(0, 2)]), "at {progress}");
    }
    let acts = captain.ended(SECOND, 0, failed(1), 8);
    assert_eq!(bye(0, &acts), Some(137), "the third failure at 8");
}

#[test]
fn what_would_fail_again_is_not_tried_again() {
    let mut captain = on_one_host(2);
    captain.came(SECOND, 0, "a", 2);
    let how = How::Failed { local_rank: 0, code: 78, hopeless: true, text: "a mistake".into() };
    assert_eq!(bye(0, &captain.ended(SECOND, 0, how, 0)), Some(1));
}

#[test]
fn without_a_node_the_others_go_on_after_a_while_and_with_it_again_when_it_is_back() {
    let mut captain = begun();
    assert_eq!(done(captain.lost(100 * SECOND, 1)), [End(vec![0])]);
    assert_eq!(done(captain.ended(101 * SECOND, 0, failed(0), 3)), [], "it may come back");
    assert_eq!(captain.tick(109 * SECOND), []);
    assert_eq!(done(captain.tick(110 * SECOND)), seats(&[(0, 4)]));
    // Failures meanwhile do not wait for it again.
    assert_eq!(done(captain.ended(120 * SECOND, 0, failed(0), 4)), seats(&[(0, 4)]));

    assert_eq!(captain.came(200 * SECOND, 1, "b", 4), [], "others may come with it");
    assert_eq!(done(captain.tick(201 * SECOND)), [Stop(vec![0])]);
    assert_eq!(captain.tick(202 * SECOND), [], "asked once");
    assert_eq!(done(captain.ended(203 * SECOND, 0, How::Stopped, 9)), seats(&[(0, 4), (1, 4)]));
}

#[test]
fn a_node_that_is_lost_right_after_the_start_is_not_waited_for_as_at_the_start() {
    let mut captain = begun();
    assert_eq!(done(captain.lost(2 * SECOND, 1)), [End(vec![0])]);
    assert_eq!(done(captain.ended(3 * SECOND, 0, failed(0), 0)), [], "it may come back");
    assert_eq!(captain.tick(11 * SECOND), []);
    assert_eq!(done(captain.tick(12 * SECOND)), seats(&[(0, 4)]));
}

#[test]
fn a_node_that_is_back_at_once_is_not_gone_on_without() {
    let mut captain = begun();
    // Its new launcher calls before the old connection is known to be over.
    assert_eq!(done(captain.came(50 * SECOND, 1, "b", 4)), [End(vec![0])]);
    assert_eq!(done(captain.ended(51 * SECOND, 0, failed(0), 0)), seats(&[(0, 4), (1, 4)]));
}

#[test]
fn too_few_are_waited_for_and_then_given_up() {
    let mut captain = captain();
    captain.came(SECOND, 0, "a", 3);
    assert_eq!(captain.tick(599 * SECOND), []);
    let acts = captain.tick(600 * SECOND);
    let [Bye { node: 0, code: 1, text }] = &acts[..] else { panic!("{acts:?}") };
    assert!(text.contains("3 ranks can be started on 1 of 2 nodes"), "{text}");
}

#[test]
fn at_the_start_enough_go_on_without_the_rest() {
    let mut captain = captain();
    captain.came(SECOND, 0, "a", 5);
    assert_eq!(captain.tick(59 * SECOND), []);
    // Of five, four can work.
    assert_eq!(done(captain.tick(60 * SECOND)), seats(&[(0, 4)]));
}

#[test]
fn spare_nodes_wait() {
    let mut captain = begun();
    assert_eq!(captain.came(2 * SECOND, 2, "c", 4), []);
    assert_eq!(captain.tick(9 * SECOND), [], "as many as are wanted are at work");
    captain.lost(10 * SECOND, 1);
    assert_eq!(done(captain.ended(11 * SECOND, 0, failed(0), 0)), seats(&[(0, 4), (2, 4)]));
}

#[test]
fn a_signal_to_the_first_node_stops_the_job() {
    for (how, code) in [(How::Stopped, STOPPED), (How::Cut, 143)] {
        let mut captain = begun();
        assert_eq!(captain.leaving(9 * SECOND, 0, 15), []);
        assert_eq!(captain.ended(10 * SECOND, 1, How::Stopped, 3), []);
        let acts = captain.ended(10 * SECOND, 0, how, 3);
        assert_eq!((bye(0, &acts), bye(1, &acts)), (Some(code), Some(code)));
    }
    // While nothing runs, nothing is to be saved.
    let mut captain = captain();
    captain.came(SECOND, 0, "a", 4);
    assert_eq!(bye(0, &captain.leaving(2 * SECOND, 0, 15)), Some(STOPPED));
}

#[test]
fn a_signal_to_another_node_lets_it_go() {
    let mut captain = begun();
    assert_eq!(captain.leaving(9 * SECOND, 1, 15), []);
    assert_eq!(captain.ended(10 * SECOND, 1, How::Stopped, 3), []);
    let acts = captain.ended(80 * SECOND, 0, How::Stopped, 3);
    assert_eq!(bye(1, &acts), Some(STOPPED));
    assert_eq!(done(acts)[1..], seats(&[(0, 4)]));
}

#[test]
fn ranks_that_somebody_else_asked_to_stop_stop_the_job() {
    let mut captain = begun();
    captain.ended(9 * SECOND, 0, How::Stopped, 3);
    assert_eq!(bye(0, &captain.ended(9 * SECOND, 1, How::Stopped, 3)), Some(STOPPED));
}

#[test]
fn a_place_that_fails_again_and_again_is_left_out_where_that_is_allowed() {
    let mut captain = with(4, |here| (here >= 2).then_some(here.min(4)));
    captain.rules.nodes = 1;
    captain.came(SECOND, 0, "a", 4);
    assert_eq!(done(captain.ended(SECOND, 0, failed(1), 0)), seats(&[(0, 4)]));
    let rest = |slots: &[usize]| vec![Begin(vec![(0, slots.to_vec())])];
    assert_eq!(done(captain.ended(SECOND, 0, failed(1), 0)), rest(&[0, 2, 3]));
    // The second rank is now in the third place.
    assert_eq!(done(captain.ended(SECOND, 0, failed(1), 0)), rest(&[0, 2, 3]));
    assert_eq!(done(captain.ended(SECOND, 0, failed(1), 0)), rest(&[0, 3]));
    // Two are the fewest; so nobody is left out any more, and restarts are used up.
    assert_eq!(done(captain.ended(SECOND, 0, failed(1), 0)), rest(&[0, 3]));
    assert_eq!(bye(0, &captain.ended(SECOND, 0, failed(1), 0)), Some(137));
}

#[test]
fn a_node_whose_ranks_have_all_ended_is_not_missed() {
    let mut captain = begun();
    captain.ended(9 * SECOND, 1, How::Done, 5);
    captain.lost(9 * SECOND, 1);
    assert_eq!(bye(0, &captain.ended(10 * SECOND, 0, How::Done, 5)), Some(0));
}
