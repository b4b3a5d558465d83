//! With context parallelism a rank holds runs of positions of every sequence, each run as rows (batch, len).
//! Operations that depend on positions give a run the same results as the whole sequences.

use crate::check::numbers;
use lockstep_kernels::{
    AttentionShape, Device, DropoutMask, Dtype, PositionRange, RandomKey, RopeTable, Tag, Tensor,
    VocabShard,
};

const BATCH: usize = 3;
const SEQ: usize = 24;
/// (start, len)
const RUNS: [(usize, usize); 4] = [(0, 4), (4, 8), (12, 1), (13, 11)];

fn tensor(device: &Device, rows: usize, values: &[f32]) -> Tensor {
    let mut tensor = device.empty(rows, values.len() / rows, Dtype::F32, Tag::Buffers);
    device.write(tensor.view_mut(), values);
    tensor
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.view().host().to_vec()
}

/// The rows of one run, from whole sequences.
fn rows_of(whole: &[f32], cols: usize, (start, len): (usize, usize)) -> Vec<f32> {
    let sequence = |b: usize| &whole[(b * SEQ + start) * cols..(b * SEQ + start + len) * cols];
    (0..BATCH).flat_map(sequence).copied().collect()
}

#[test]
fn rope_uses_the_positions_of_a_run() {
    let (device, table) = (Device::cpu(2), RopeTable::new(8, SEQ, 10_000.0, None));
    let (cols, square) = ((4 + 2 * 2) * 8, AttentionShape::square(BATCH, SEQ, 4, 2, 8));
    let was = numbers::<f32>(BATCH * SEQ * cols, 1);
    let mut whole = tensor(&device, BATCH * SEQ, &was);
    device.rope(&table, &square, whole.view_mut());
    let whole = values(&whole);
    for run in RUNS {
        let mut part = tensor(&device, BATCH * run.1, &rows_of(&was, cols, run));
        let shape = AttentionShape { q_start: run.0, q_len: run.1, ..square };
        device.rope(&table, &shape, part.view_mut());
        assert_eq!(values(&part), rows_of(&whole, cols, run), "{run:?}");
        device.rope_backward(&table, &shape, part.view_mut());
        let back = rows_of(&was, cols, run);
        assert!(values(&part).iter().zip(back).all(|(a, b)| (a - b).abs() < 1e-5), "{run:?}");
    }
}

#[test]
fn embedding_and_its_gradient_use_the_positions_of_a_run() {
    let (device, dim, vocab) = (Device::cpu(2), 6, 10);
    let (table, positions) = (numbers::<f32>(vocab * dim, 1), numbers::<f32>(SEQ * dim, 2));
    let (table, positions) = (tensor(&device, vocab, &table), tensor(&device, SEQ, &positions));
    let ids: Vec<u32> = (0..(BATCH * SEQ) as u32).map(|i| i * 7 % vocab as u32).collect();
    let embedded = |ids: &[u32], (start, len): (usize, usize)| {
        let mut tokens = device.empty(1, ids.len(), Dtype::U32, Tag::Buffers);
        device.write(tokens.view_mut(), ids);
        let mut out = device.empty(ids.len(), dim, Dtype::F32, Tag::Buffers);
        let positions = Some((positions.view(), PositionRange { start, len }));
        let shard = VocabShard::all(table.rows());
        device.embed(tokens.view(), table.view(), shard, positions, out.view_mut());
        values(&out)
    };
    let whole = embedded(&ids, (0, SEQ));
    let dy = numbers::<f32>(BATCH * SEQ * dim, 3);
    let mut expected = device.zeros(SEQ, dim, Dtype::F32, Tag::Gradients);
    let rows = tensor(&device, BATCH * SEQ, &dy);
    let range = |len| PositionRange { start: 0, len };
    device.embed_positions_backward(rows.view(), range(SEQ), expected.view_mut(), false);
    for (start, len) in RUNS {
        let of_run = |b: usize| &ids[b * SEQ + start..b * SEQ + start + len];
        let ids: Vec<u32> = (0..BATCH).flat_map(of_run).copied().collect();
        assert_eq!(embedded(&ids, (start, len)), rows_of(&whole, dim, (start, len)));
        let mut part = device.empty(len, dim, Dtype::F32, Tag::Gradients);
        let rows = tensor(&device, BATCH * len, &rows_of(&dy, dim, (start, len)));
        device.embed_positions_backward(rows.view(), range(len), part.view_mut(), false);
        let expected = expected.view().rows_of(start..start + len).host::<f32>();
        assert_eq!(part.view().host::<f32>(), expected, "{start} {len}");
    }
}

#[test]
fn dropout_uses_the_global_indices_of_a_run() {
    let (device, dim, first) = (Device::cpu(2), 10, 1_000);
    let was = numbers::<f32>(BATCH * SEQ * dim, 1);
    let key = RandomKey { seed: 7, stream: 3 };
    let mut whole = tensor(&device, BATCH * SEQ, &was);
    device.dropout(whole.view_mut(), &DropoutMask { key, p: 0.4, first });
    let whole = values(&whole);
    for (start, len) in RUNS {
        let mut part = tensor(&device, BATCH, &rows_of(&was, dim, (start, len)));
        for sequence in 0..BATCH {
            let first = first + ((sequence * SEQ + start) * dim) as u64;
            let rows = part.view_mut().rows_of(sequence..sequence + 1);
            device.dropout(rows, &DropoutMask { key, p: 0.4, first });
        }
        assert_eq!(values(&part), rows_of(&whole, dim, (start, len)), "{start} {len}");
    }
}
