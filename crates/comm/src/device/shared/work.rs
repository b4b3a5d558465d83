//! The work of a collective on memory that one GPU addresses: reductions and copies over the buffers of all members.
//! Pure: knows addresses, but neither GPUs nor kernels.

use crate::call::fold::Op;
use crate::call::partition::{Partition, packed};
use lockstep_types::Collective;

/// Buffers of one member: addresses, and the counts of an `all_to_all_v`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Posting {
    pub input: u64,
    pub output: u64,
    /// Elements sent to and received from each member.
    pub sent: Vec<usize>,
    pub received: Vec<usize>,
}

/// A collective, without its buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub kind: Collective,
    pub op: Option<Op>,
    pub root: usize,
    /// Size in bytes as [`crate::group::args::CollectiveArgs::bytes`] counts it.
    pub bytes: usize,
    /// Bytes of an element.
    pub width: usize,
}

/// Combines elements `start..start + count` of all inputs in member order, and writes them to each of `outputs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reduction {
    pub start: usize,
    pub count: usize,
    /// Addresses of the first combined element.
    pub outputs: Vec<u64>,
}

/// Copies `bytes` bytes to each of `targets`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    pub source: u64,
    pub bytes: usize,
    pub targets: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Every job reads these inputs, one per member.
    Reduce {
        inputs: Vec<u64>,
        op: Op,
        jobs: Vec<Reduction>,
    },
    Copy(Vec<Copy>),
}

/// The work of a collective. Every byte of an output is written by one job.
pub(crate) fn work(shape: &Shape, postings: &[Posting]) -> Work {
    let members = postings.len();
    let partition = |bytes: usize| Partition::of_bytes(bytes, members, shape.width);
    let inputs = || postings.iter().map(|p| p.input).collect::<Vec<_>>();
    let reduce = |jobs: Vec<Reduction>| Work::Reduce {
        inputs: inputs(),
        op: shape.op.expect("a reduction has an operator"),
        jobs: jobs.into_iter().filter(|job| job.count > 0).collect(),
    };
    let count = shape.bytes / shape.width;
    let all_outputs = |offset: usize| postings.iter().map(move |p| p.output + offset as u64);
    match shape.kind {
        Collective::AllReduce => {
            reduce(vec![Reduction { start: 0, count, outputs: all_outputs(0).collect() }])
        }
        Collective::Reduce => {
            let outputs = vec![postings[shape.root].output];
            reduce(vec![Reduction { start: 0, count, outputs }])
        }
        Collective::ReduceScatter => {
            let shard = |m: usize| {
                let range = partition(shape.bytes).elements(m);
                let outputs = vec![postings[m].output];
                Reduction { start: range.start, count: range.len(), outputs }
            };
            reduce((0..members).map(shard).collect())
        }
        Collective::AllGather => copies((0..members).map(|m| {
            let place = partition(shape.bytes).bytes(m);
            let targets = all_outputs(place.start).collect();
            Copy { source: postings[m].input, bytes: place.len(), targets }
        })),
        Collective::Broadcast => {
            let (source, targets) = (postings[shape.root].input, all_outputs(0).collect());
            copies([Copy { source, bytes: shape.bytes, targets }])
        }
        Collective::Gather => copies((0..members).map(|m| {
            let at = (m * shape.bytes) as u64;
            let targets = vec![postings[shape.root].output + at];
            Copy { source: postings[m].input, bytes: shape.bytes, targets }
        })),
        Collective::Scatter => {
            let each = shape.bytes;
            copies((0..members).map(|m| Copy {
                source: postings[shape.root].input + (m * each) as u64,
                bytes: each,
                targets: vec![postings[m].output],
            }))
        }
        Collective::AllToAll => {
            let each = shape.bytes / members;
            copies(pairs(members).map(|(from, to)| Copy {
                source: postings[from].input + (to * each) as u64,
                bytes: each,
                targets: vec![postings[to].output + (from * each) as u64],
            }))
        }
        Collective::AllToAllV => {
            let sent: Vec<_> = postings.iter().map(|p| packed(&p.sent, shape.width)).collect();
            let received: Vec<_> =
                postings.iter().map(|p| packed(&p.received, shape.width)).collect();
            copies(pairs(members).map(|(from, to)| Copy {
                source: postings[from].input + sent[from][to].start as u64,
                bytes: sent[from][to].len(),
                targets: vec![postings[to].output + received[to][from].start as u64],
            }))
        }
        Collective::Barrier | Collective::SendRecv => Work::Copy(vec![]),
    }
}

fn pairs(members: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..members).flat_map(move |from| (0..members).map(move |to| (from, to)))
}

/// The copies that move something.
fn copies(all: impl IntoIterator<Item = Copy>) -> Work {
    let moving = all.into_iter().map(|mut copy| {
        copy.targets.retain(|target| *target != copy.source);
        copy
    });
    Work::Copy(moving.filter(|copy| copy.bytes > 0 && !copy.targets.is_empty()).collect())
}

/// The first pair of members whose counts of an `all_to_all_v` differ: sender, receiver, elements sent and expected.
pub(crate) fn find_count_error(postings: &[Posting]) -> Option<(usize, usize, usize, usize)> {
    pairs(postings.len()).find_map(|(from, to)| {
        let (sent, expected) = (postings[from].sent.get(to)?, postings[to].received.get(from)?);
        (sent != expected).then_some((from, to, *sent, *expected))
    })
}

impl Posting {
    /// The form in which members exchange postings; equally long on all members.
    pub(crate) fn words(&self) -> Vec<u64> {
        let counts = self.sent.iter().chain(&self.received).map(|n| *n as u64);
        [self.input, self.output].into_iter().chain(counts).collect()
    }

    pub(crate) fn from_words(words: &[u64]) -> Posting {
        let counts: Vec<usize> = words[2..].iter().map(|n| *n as usize).collect();
        let (sent, received) = counts.split_at(counts.len() / 2);
        Posting { input: words[0], output: words[1], sent: sent.into(), received: received.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::fold::Fold;
    use lockstep_types::Dtype;

    /// Executes work on host memory.
    fn execute(work: Work, members: usize) {
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        match work {
            Work::Reduce { inputs, op, jobs } => {
                let fold = Fold { dtype: Dtype::I32, op, ranks: members };
                for Reduction { start, count, outputs } in jobs {
                    let from: Vec<_> = inputs
                        .iter()
                        .map(|i| pointer(*i + 4 * start as u64).cast_const())
                        .collect();
                    let to: Vec<_> = outputs.iter().map(|o| pointer(*o)).collect();
                    // SAFETY: the addresses are those of the test's live vectors.
                    unsafe { fold.combine(&from, &to, 4 * count, true) };
                }
            }
            Work::Copy(copies) => {
                for Copy { source, bytes, targets } in copies {
                    for to in targets {
                        // SAFETY: as above.
                        unsafe { std::ptr::copy(pointer(source), pointer(to), bytes) };
                    }
                }
            }
        }
    }

    fn address(v: &mut [i32]) -> u64 {
        v.as_mut_ptr().expose_provenance() as u64
    }

    /// Runs a collective on members with these inputs and output lengths, and returns the outputs.
    fn run(
        kind: Collective,
        count: usize,
        inputs: &[Vec<i32>],
        outputs: &[usize],
    ) -> Vec<Vec<i32>> {
        let (mut inputs, members) = (inputs.to_vec(), inputs.len());
        let mut outputs: Vec<Vec<i32>> = outputs.iter().map(|n| vec![-1; *n]).collect();
        let postings: Vec<Posting> = inputs
            .iter_mut()
            .zip(&mut outputs)
            .map(|(i, o)| Posting { input: address(i), output: address(o), ..Posting::default() })
            .collect();
        let shape = Shape { kind, op: Some(Op::Sum), root: 1, bytes: 4 * count, width: 4 };
        execute(work(&shape, &postings), members);
        outputs
    }

    #[test]
    fn every_collective_has_the_right_result() {
        let whole = [vec![1, 2, 3, 4], vec![10, 20, 30, 40], vec![100, 200, 300, 400]];
        let sum = vec![111, 222, 333, 444];
        assert_eq!(run(Collective::AllReduce, 4, &whole, &[4; 3]), vec![sum.clone(); 3]);
        let reduced = run(Collective::Reduce, 4, &whole, &[4; 3]);
        assert_eq!(reduced, [vec![-1; 4], sum.clone(), vec![-1; 4]]);
        let shards = [vec![111, 222], vec![333], vec![444]];
        assert_eq!(run(Collective::ReduceScatter, 4, &whole, &[2, 1, 1]), shards);
        assert_eq!(run(Collective::AllGather, 4, &shards, &[4; 3]), vec![sum; 3]);
        let root = vec![10, 20, 30, 40];
        assert_eq!(run(Collective::Broadcast, 4, &whole, &[4; 3]), vec![root; 3]);
        let (pieces, six) = ([vec![1, 2], vec![3, 4], vec![5, 6]], vec![1, 2, 3, 4, 5, 6]);
        let gathered = run(Collective::Gather, 2, &pieces, &[0, 6, 0]);
        assert_eq!(gathered, [vec![], six.clone(), vec![]]);
        let scattered = run(Collective::Scatter, 2, &[vec![], six, vec![]], &[2; 3]);
        assert_eq!(scattered, pieces);
        let (a, b, c) = (vec![1, 2, 3], vec![4, 5, 6], vec![7, 8, 9]);
        let transposed = [vec![1, 4, 7], vec![2, 5, 8], vec![3, 6, 9]];
        assert_eq!(run(Collective::AllToAll, 3, &[a, b, c], &[3; 3]), transposed);
    }

    #[test]
    fn all_to_all_v_moves_pieces_of_all_lengths_and_checks_counts() {
        let mut inputs = [vec![1, 2, 3], vec![4, 5]];
        let mut outputs = [vec![-1; 1], vec![-1; 4]];
        let counts = [(vec![1, 2], vec![1, 0]), (vec![0, 2], vec![2, 2])];
        let mut postings: Vec<Posting> = (0..2)
            .map(|m| Posting {
                input: address(&mut inputs[m]),
                output: address(&mut outputs[m]),
                sent: counts[m].0.clone(),
                received: counts[m].1.clone(),
            })
            .collect();
        assert_eq!(find_count_error(&postings), None);
        for posting in &postings {
            assert_eq!(Posting::from_words(&posting.words()), *posting);
        }
        let shape = Shape { kind: Collective::AllToAllV, op: None, root: 0, bytes: 0, width: 4 };
        execute(work(&shape, &postings), 2);
        assert_eq!(outputs, [vec![1], vec![2, 3, 4, 5]]);
        postings[0].sent[1] = 1;
        assert_eq!(find_count_error(&postings), Some((0, 1, 1, 2)));
    }

    #[test]
    fn what_is_in_place_is_not_copied() {
        let posting = |at| Posting { input: at, output: at, ..Posting::default() };
        let shape = Shape { kind: Collective::Broadcast, op: None, root: 0, bytes: 8, width: 4 };
        let copy = Copy { source: 64, bytes: 8, targets: vec![128] };
        assert_eq!(work(&shape, &[posting(64), posting(128)]), Work::Copy(vec![copy]));
    }
}
