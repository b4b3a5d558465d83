//! The coordinator's decisions in sequences of events.

use super::*;
use Decision::*;

const SECOND: Duration = Duration::from_secs(1);

/// Two nodes and eight ranks; at least four, in multiples of two.
fn two_nodes() -> Coordinator {
    coordinator(8, |n| (n >= 4).then_some(n.min(8) / 2 * 2))
}

/// One node that needs all of its ranks.
fn one_node(ranks: usize) -> Coordinator {
    let mut coordinator = coordinator(ranks, move |n| (n >= ranks).then_some(ranks));
    coordinator.rules.nodes = 1;
    coordinator
}

fn coordinator(ranks: usize, fit: impl Fn(usize) -> Option<usize> + Send + 'static) -> Coordinator {
    let policy = RestartPolicy {
        max_restarts: 2,
        start_timeout: 60 * SECOND,
        loss_timeout: 10 * SECOND,
        give_up: 600 * SECOND,
    };
    Coordinator::new(Rules { nodes: 2, ranks, fit: Box::new(fit), policy }, 0)
}

/// The decisions without messages to the user.
fn quiet(decisions: Vec<Decision>) -> Vec<Decision> {
    decisions.into_iter().filter(|decision| !matches!(decision, Report(_))).collect()
}

fn start(nodes: &[(u32, usize)]) -> Vec<Decision> {
    vec![Start(nodes.iter().map(|(id, ranks)| (*id, (0..*ranks).collect())).collect())]
}

/// The code with which a node finishes.
fn finish_code(node: u32, decisions: &[Decision]) -> Option<i32> {
    decisions.iter().find_map(|decision| match decision {
        Finish { node: of, code, .. } if *of == node => Some(*code),
        _ => None,
    })
}

fn failed(local_rank: usize) -> NodeResult {
    NodeResult::Failed { local_rank, code: 137, permanent: false, text: "it was killed".into() }
}

/// Two nodes of four ranks, started at second 1.
fn started() -> Coordinator {
    let mut coordinator = two_nodes();
    assert_eq!(coordinator.node_joined(SECOND, 0, "a", 4), []);
    assert_eq!(quiet(coordinator.node_joined(SECOND, 1, "b", 4)), start(&[(0, 4), (1, 4)]));
    coordinator
}

#[test]
fn all_nodes_finish() {
    let mut coordinator = started();
    assert_eq!(coordinator.node_finished(9 * SECOND, 0, NodeResult::Success, 5), []);
    let decisions = coordinator.node_finished(9 * SECOND, 1, NodeResult::Success, 5);
    assert_eq!((finish_code(0, &decisions), finish_code(1, &decisions)), (Some(0), Some(0)));
    // Node 0 finishes last.
    assert!(matches!(decisions.last(), Some(Finish { node: 0, .. })));
    assert!(coordinator.is_finished());
}

#[test]
fn a_failed_rank_aborts_the_others_and_all_restart() {
    let mut coordinator = started();
    assert_eq!(coordinator.node_finished(9 * SECOND, 1, failed(2), 0), [Abort(vec![0])]);
    assert_eq!(
        quiet(coordinator.node_finished(9 * SECOND, 0, failed(0), 0)),
        start(&[(0, 4), (1, 4)])
    );
    // Killed ranks are not a success.
    coordinator.node_finished(10 * SECOND, 0, NodeResult::Killed, 0);
    assert_eq!(
        quiet(coordinator.node_finished(10 * SECOND, 1, NodeResult::Killed, 0)),
        start(&[(0, 4), (1, 4)])
    );
}

#[test]
fn restarts_are_counted_since_the_last_progress() {
    let mut coordinator = one_node(2);
    assert_eq!(quiet(coordinator.node_joined(SECOND, 0, "a", 2)), start(&[(0, 2)]));
    for progress in [0, 0, 7, 7, 8, 8] {
        let decisions = coordinator.node_finished(SECOND, 0, failed(1), progress);
        assert_eq!(quiet(decisions), start(&[(0, 2)]), "at {progress}");
    }
    let decisions = coordinator.node_finished(SECOND, 0, failed(1), 8);
    assert_eq!(finish_code(0, &decisions), Some(137), "the third failure at 8");
}

#[test]
fn a_rank_that_lost_its_gpu_is_excluded_at_once() {
    let lost = |local_rank| NodeResult::Failed {
        local_rank,
        code: EXIT_DEVICE_LOST,
        permanent: false,
        text: "it lost its GPU".into(),
    };
    let mut coordinator = started();
    coordinator.node_finished(2 * SECOND, 1, lost(1), 0);
    let decisions = coordinator.node_finished(3 * SECOND, 0, failed(0), 0);
    let report = Report("excluding slot 1 of node 1: it lost its GPU".into());
    assert!(decisions.contains(&report), "{decisions:?}");
    assert_eq!(quiet(decisions), [Start(vec![(0, vec![0, 1, 2, 3]), (1, vec![0, 2])])]);
    // A job that needs all ranks restarts with all of them, and gives up with the code of the failure.
    let mut coordinator = one_node(2);
    coordinator.node_joined(SECOND, 0, "a", 2);
    for _ in 0..2 {
        assert_eq!(quiet(coordinator.node_finished(SECOND, 0, lost(1), 0)), start(&[(0, 2)]));
    }
    let decisions = coordinator.node_finished(SECOND, 0, lost(1), 0);
    assert_eq!(finish_code(0, &decisions), Some(EXIT_DEVICE_LOST));
}

#[test]
fn permanent_failures_are_not_retried() {
    let mut coordinator = one_node(2);
    coordinator.node_joined(SECOND, 0, "a", 2);
    let result = NodeResult::Failed {
        local_rank: 0,
        code: EXIT_PERMANENT,
        permanent: true,
        text: "a configuration error".into(),
    };
    assert_eq!(finish_code(0, &coordinator.node_finished(SECOND, 0, result, 0)), Some(1));
}

#[test]
fn the_job_shrinks_after_a_loss_and_grows_when_the_node_returns() {
    let mut coordinator = started();
    assert_eq!(quiet(coordinator.node_lost(100 * SECOND, 1)), [Abort(vec![0])]);
    assert_eq!(
        quiet(coordinator.node_finished(101 * SECOND, 0, failed(0), 3)),
        [],
        "it may return"
    );
    assert_eq!(coordinator.tick(109 * SECOND), []);
    assert_eq!(quiet(coordinator.tick(110 * SECOND)), start(&[(0, 4)]));
    // Later failures do not wait for it again.
    assert_eq!(quiet(coordinator.node_finished(120 * SECOND, 0, failed(0), 4)), start(&[(0, 4)]));

    assert_eq!(coordinator.node_joined(200 * SECOND, 1, "b", 4), [], "others may join with it");
    assert_eq!(quiet(coordinator.tick(201 * SECOND)), [Stop(vec![0])]);
    assert_eq!(coordinator.tick(202 * SECOND), [], "stopped once");
    assert_eq!(
        quiet(coordinator.node_finished(203 * SECOND, 0, NodeResult::Stopped, 9)),
        start(&[(0, 4), (1, 4)])
    );
}

#[test]
fn the_start_timeout_does_not_apply_after_the_start() {
    let mut coordinator = started();
    assert_eq!(quiet(coordinator.node_lost(2 * SECOND, 1)), [Abort(vec![0])]);
    assert_eq!(quiet(coordinator.node_finished(3 * SECOND, 0, failed(0), 0)), [], "it may return");
    assert_eq!(coordinator.tick(11 * SECOND), []);
    assert_eq!(quiet(coordinator.tick(12 * SECOND)), start(&[(0, 4)]));
}

#[test]
fn a_node_that_returns_at_once_takes_part() {
    let mut coordinator = started();
    // Its new launcher joins before the loss of the old connection is noticed.
    assert_eq!(quiet(coordinator.node_joined(50 * SECOND, 1, "b", 4)), [Abort(vec![0])]);
    assert_eq!(
        quiet(coordinator.node_finished(51 * SECOND, 0, failed(0), 0)),
        start(&[(0, 4), (1, 4)])
    );
}

#[test]
fn gives_up_when_too_few_join() {
    let mut coordinator = two_nodes();
    coordinator.node_joined(SECOND, 0, "a", 3);
    assert_eq!(coordinator.tick(599 * SECOND), []);
    let decisions = coordinator.tick(600 * SECOND);
    let [Finish { node: 0, code: 1, text }] = &decisions[..] else { panic!("{decisions:?}") };
    assert!(text.contains("1 of 2 nodes joined, and their 3 ranks are too few"), "{text}");
}

#[test]
fn starts_with_fewer_nodes_after_the_start_timeout() {
    let mut coordinator = two_nodes();
    coordinator.node_joined(SECOND, 0, "a", 5);
    assert_eq!(coordinator.tick(59 * SECOND), []);
    // Four of the five ranks can work together.
    assert_eq!(quiet(coordinator.tick(60 * SECOND)), start(&[(0, 4)]));
}

#[test]
fn spare_nodes_replace_lost_ones() {
    let mut coordinator = started();
    assert_eq!(coordinator.node_joined(2 * SECOND, 2, "c", 4), []);
    assert_eq!(coordinator.tick(9 * SECOND), [], "all wanted ranks are running");
    coordinator.node_lost(10 * SECOND, 1);
    assert_eq!(
        quiet(coordinator.node_finished(11 * SECOND, 0, failed(0), 0)),
        start(&[(0, 4), (2, 4)])
    );
}

#[test]
fn a_signal_to_node_zero_stops_the_job() {
    for (result, code) in [(NodeResult::Stopped, EXIT_STOPPED), (NodeResult::Killed, 143)] {
        let mut coordinator = started();
        assert_eq!(coordinator.node_leaving(9 * SECOND, 0, 15), []);
        assert_eq!(coordinator.node_finished(10 * SECOND, 1, NodeResult::Stopped, 3), []);
        let decisions = coordinator.node_finished(10 * SECOND, 0, result, 3);
        assert_eq!(
            (finish_code(0, &decisions), finish_code(1, &decisions)),
            (Some(code), Some(code))
        );
    }
    // While no ranks run, there is nothing to save.
    let mut coordinator = two_nodes();
    coordinator.node_joined(SECOND, 0, "a", 4);
    assert_eq!(finish_code(0, &coordinator.node_leaving(2 * SECOND, 0, 15)), Some(EXIT_STOPPED));
}

#[test]
fn a_signal_to_another_node_removes_it() {
    let mut coordinator = started();
    assert_eq!(coordinator.node_leaving(9 * SECOND, 1, 15), []);
    assert_eq!(coordinator.node_finished(10 * SECOND, 1, NodeResult::Stopped, 3), []);
    let decisions = coordinator.node_finished(80 * SECOND, 0, NodeResult::Stopped, 3);
    assert_eq!(finish_code(1, &decisions), Some(EXIT_STOPPED));
    assert_eq!(quiet(decisions)[1..], start(&[(0, 4)]));
}

#[test]
fn ranks_stopped_from_outside_stop_the_job() {
    let mut coordinator = started();
    coordinator.node_finished(9 * SECOND, 0, NodeResult::Stopped, 3);
    assert_eq!(
        finish_code(0, &coordinator.node_finished(9 * SECOND, 1, NodeResult::Stopped, 3)),
        Some(EXIT_STOPPED)
    );
}

#[test]
fn a_slot_that_fails_repeatedly_is_excluded() {
    let mut coordinator = coordinator(4, |n| (n >= 2).then_some(n.min(4)));
    coordinator.rules.nodes = 1;
    coordinator.node_joined(SECOND, 0, "a", 4);
    assert_eq!(quiet(coordinator.node_finished(SECOND, 0, failed(1), 0)), start(&[(0, 4)]));
    let rest = |slots: &[usize]| vec![Start(vec![(0, slots.to_vec())])];
    assert_eq!(quiet(coordinator.node_finished(SECOND, 0, failed(1), 0)), rest(&[0, 2, 3]));
    // Rank 1 now runs in slot 2.
    assert_eq!(quiet(coordinator.node_finished(SECOND, 0, failed(1), 0)), rest(&[0, 2, 3]));
    assert_eq!(quiet(coordinator.node_finished(SECOND, 0, failed(1), 0)), rest(&[0, 3]));
    // At least two ranks are needed, so no further slot is excluded and no restarts are left.
    assert_eq!(quiet(coordinator.node_finished(SECOND, 0, failed(1), 0)), rest(&[0, 3]));
    assert_eq!(finish_code(0, &coordinator.node_finished(SECOND, 0, failed(1), 0)), Some(137));
}

#[test]
fn a_node_lost_after_its_ranks_finished_does_not_matter() {
    let mut coordinator = started();
    coordinator.node_finished(9 * SECOND, 1, NodeResult::Success, 5);
    coordinator.node_lost(9 * SECOND, 1);
    assert_eq!(
        finish_code(0, &coordinator.node_finished(10 * SECOND, 0, NodeResult::Success, 5)),
        Some(0)
    );
}

#[test]
fn the_first_reported_failure_is_counted() {
    let mut coordinator = started();
    for _ in 0..2 {
        assert_eq!(coordinator.node_finished(SECOND, 1, failed(2), 0), [Abort(vec![0])]);
        coordinator.node_finished(SECOND, 0, failed(0), 0);
    }
    assert!(coordinator.excluded.contains(&(1, 2)), "{:?}", coordinator.excluded);
}
