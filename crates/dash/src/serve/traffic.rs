//! Planned bytes between ranks, from the communication of the plan.

use lockstep_plan::{Collective, GroupKind, Phase, Plan, PlannedCall, traffic};

/// Bytes that each rank sends to each other one per step. Collectives are drawn as rings and all-to-alls as messages to
/// all members; a message of the pipeline goes to the next stage, its gradient to the previous one.
pub(super) fn bytes_between_ranks(plan: &Plan) -> Vec<Vec<f64>> {
    let mesh = plan.mesh();
    let mut bytes = vec![vec![0.0; plan.ranks]; plan.ranks];
    for (rank, row) in bytes.iter_mut().enumerate() {
        for call in traffic(plan, rank) {
            let members = match call.kind {
                Some(kind) => mesh.members(kind, rank),
                None => (0..plan.ranks).collect(),
            };
            let me = members.iter().position(|member| *member == rank);
            for (to, sent) in me.map_or(Vec::new(), |me| messages(&call, me, members.len())) {
                row[members[to]] += sent;
            }
        }
    }
    bytes
}

/// Receivers of the messages of member `me`, by index, and the bytes that each gets.
fn messages(call: &PlannedCall, me: usize, members: usize) -> Vec<(usize, f64)> {
    let bytes = (call.count * call.width * call.times) as f64;
    let (size, next, previous) = (members as f64, (me + 1) % members, (me + members - 1) % members);
    match call.collective {
        Collective::SendRecv if call.kind == Some(GroupKind::Pipe) => match call.phase {
            Phase::Forward => vec![(next, bytes)],
            _ => vec![(previous, bytes)],
        },
        Collective::SendRecv => vec![(next, bytes)],
        // The count is that of all ranks together.
        Collective::AllToAll | Collective::AllToAllV => {
            let others = (0..members).filter(|other| *other != me);
            others.map(|other| (other, bytes / size / size)).collect()
        }
        Collective::AllReduce => vec![(next, 2.0 * bytes * (size - 1.0) / size)],
        Collective::Barrier => Vec::new(),
        _ => vec![(next, bytes * (size - 1.0) / size)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_plan::{Config, Environment};

    fn matrix(ranks: usize, sets: &[&str]) -> (Plan, Vec<Vec<f64>>) {
        let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
        let text = "[model]\nfamily = \"gpt2\"\ndim = 32\nlayers = 4\nheads = 4\nseq = 16\nvocab = 64\n\
                    [train]\nglobal_batch = 8\nmicro_batch = 2";
        let environment = Environment::one_host(ranks, 1);
        let plan = Plan::resolve(&Config::parse(text, &sets), &environment).unwrap();
        let bytes = bytes_between_ranks(&plan);
        (plan, bytes)
    }

    #[test]
    fn replicas_send_their_gradients_around_a_ring() {
        let (plan, bytes) = matrix(4, &["layout.data=4"]);
        let gradients = 4.0 * plan.model.param_count() as f64;
        for (rank, row) in bytes.iter().enumerate() {
            // The norm and the loss are small.
            assert!((row[(rank + 1) % 4] / (1.5 * gradients) - 1.0).abs() < 0.01, "{row:?}");
            assert_eq!(row[(rank + 2) % 4], 0.0);
        }
    }

    #[test]
    fn stages_send_activations_forward_and_gradients_back() {
        let (plan, bytes) = matrix(2, &["layout.pipe=2"]);
        let stream = (plan.train.global_batch * 16 * 32 * 4) as f64;
        assert!(bytes[0][1] >= stream && bytes[1][0] >= stream, "{bytes:?}");
        assert!((bytes[0][1] - bytes[1][0]).abs() < 0.5 * stream, "{bytes:?}");
    }
}
