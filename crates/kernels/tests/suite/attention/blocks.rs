//! Attention over blocks of keys, merged as in ring attention.

use super::*;

#[test]
fn merged_key_blocks_match_the_whole() {
    for cpu in levels().map(|level| Cpu::at(level, 2)) {
        merged_equals_whole::<f32>(&cpu, 1e-5);
        merged_equals_whole::<bf16>(&cpu, 2e-2);
    }
}

/// Queries at 40..110 attend to keys 0..30, 30..100 and 100..130, one block after the other as in ring attention. The
/// gradients of the three blocks sum to the gradient of the whole.
fn merged_equals_whole<E: Float>(cpu: &Cpu, tolerance: f64) {
    let whole =
        Problem::<E>::new(AttentionShape { batch: 1, ..shape_of([4, 2, 32, 70, 130, 40, 0]) });
    let answer = whole.solve(cpu);
    let stride = kv_stride(&whole.shape);
    let blocks = [0..30, 30..100, 100..130].map(|keys: std::ops::Range<usize>| Problem::<E> {
        shape: AttentionShape { k_start: keys.start, k_len: keys.len(), ..whole.shape },
        q: whole.q.clone(),
        kv: whole.kv[keys.start * stride..keys.end * stride].to_vec(),
        dout: whole.dout.clone(),
    });
    let (mut out, mut lse) = blocks[2].forward(cpu);
    for block in [&blocks[0], &blocks[1]] {
        let (other_out, other_lse) = block.forward(cpu);
        attention::merge(cpu, &whole.shape, &mut out, &mut lse, (&other_out, &other_lse));
    }
    assert_near(&to_f64(&out), &to_f64(&answer.out), tolerance, "merged out");
    assert_near(&to_f64(&lse), &to_f64(&answer.lse), tolerance, "merged lse");
    let mut dq = vec![0.0; whole.q.len()];
    let mut dkv = vec![];
    for block in &blocks {
        let (part, dkv_of_block) = block.backward(cpu, &out, &lse);
        dq.iter_mut().zip(to_f64(&part)).for_each(|(sum, x)| *sum += x);
        dkv.extend(to_f64(&dkv_of_block));
    }
    let (stride, width) = (q_stride(&whole.shape), whole.shape.heads * whole.shape.head_dim);
    let dq: Vec<f64> = dq.chunks(stride).flat_map(|row| row[3..3 + width].to_vec()).collect();
    assert_near(&dq, &columns(&answer.dq, stride, 3, width), tolerance, "summed dq");
    assert_near(&dkv, &to_f64(&answer.dkv), tolerance, "dk and dv of the blocks");
}

/// The same in f32: partial outputs are merged and gradients summed before rounding.
#[test]
fn key_blocks_summed_in_f32_match_the_whole() {
    for cpu in levels().map(|level| Cpu::at(level, 2)) {
        summed_equals_whole::<f32>(&cpu, 1e-5);
        summed_equals_whole::<bf16>(&cpu, 1e-2);
    }
}

fn summed_equals_whole<E: Float>(cpu: &Cpu, tolerance: f64) {
    let shape = AttentionShape { batch: 1, ..shape_of([4, 2, 32, 70, 130, 40, 0]) };
    let AttentionShape { heads, kv_heads, head_dim, q_len, k_len, .. } = shape;
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let (stride, kv_stride) = (q_stride(&shape), kv_stride(&shape));
    let whole = Problem::<E>::new(shape);
    let answer = whole.solve(cpu);
    let [q, k, v] = whole.rows();
    let blocks = [30..100, 100..130, 0..30];
    let of = |rows: Rows<'_, E>, keys: &std::ops::Range<usize>| Rows {
        data: &whole.kv[keys.start * kv_stride..keys.end * kv_stride],
        ..rows
    };
    let cut = |keys: &std::ops::Range<usize>| AttentionShape {
        k_start: keys.start,
        k_len: keys.len(),
        ..shape
    };

    let mut out = vec![0f32; q_len * width];
    let mut lse = vec![f32::NEG_INFINITY; q_len * heads];
    for keys in &blocks {
        let (mut part, mut part_lse) = (vec![f32::NAN; out.len()], vec![f32::NAN; lse.len()]);
        let (k, v) = (of(k, keys), of(v, keys));
        attention::forward(cpu, &cut(keys), [q, k, v], &mut part, &mut part_lse);
        attention::merge(cpu, &shape, &mut out, &mut lse, (&part, &part_lse));
    }
    assert_near(&to_f64(&out), &to_f64(&answer.out), tolerance, "merged out");
    assert_near(&to_f64(&lse), &to_f64(&answer.lse), tolerance, "merged lse");

    let rounded: Vec<E> = out.iter().map(|x| E::round_from(*x)).collect();
    let mut delta = vec![f32::NAN; q_len * heads];
    attention::delta(cpu, head_dim, &rounded, &whole.dout, &mut delta);
    let (mut dq, mut dk, mut dv) =
        (vec![0f32; q_len * width], vec![1f32; k_len * kv_width], vec![2f32; k_len * kv_width]);
    for keys in &blocks {
        let part = keys.start * kv_width..keys.end * kv_width;
        let (k, v, dout) = (of(k, keys), of(v, keys), &whole.dout);
        let to_q = RowsMut::whole(&mut dq, width);
        let to_k = RowsMut::whole(&mut dk[part.clone()], kv_width);
        let to_v = RowsMut::whole(&mut dv[part], kv_width);
        let shape = cut(keys);
        let saved = Saved { dout, lse: &lse, delta: DeltaFrom::Delta(&delta) };
        let gradients = Gradients { dq: to_q, dk: to_k, dv: to_v, accumulate: true };
        attention::backward(cpu, &shape, [q, k, v], saved, gradients);
    }
    // Gradients are added to the previous contents.
    let less = |x: &[f32], by: f64| to_f64(x).iter().map(|x| x - by).collect::<Vec<f64>>();
    assert_near(&to_f64(&dq), &columns(&answer.dq, stride, 3, width), tolerance, "summed dq");
    let expected = columns(&answer.dkv, kv_stride, 1, kv_width);
    assert_near(&less(&dk, 1.0), &expected, tolerance, "dk of the blocks");
    let expected = columns(&answer.dkv, kv_stride, 1 + kv_width, kv_width);
    assert_near(&less(&dv, 2.0), &expected, tolerance, "dv of the blocks");
}

/// A backward pass from `delta` gives the same bits as one from the output.
#[test]
fn delta_replaces_the_output() {
    for cpu in levels().map(|level| Cpu::at(level, 2)) {
        delta_for_output::<f32>(&cpu);
        delta_for_output::<bf16>(&cpu);
    }
}

fn delta_for_output<E: Float + PartialEq>(cpu: &Cpu) {
    let problem = Problem::<E>::new(shape_of([6, 2, 40, 70, 70, 0, 0]));
    let AttentionShape { heads, kv_heads, head_dim, .. } = problem.shape;
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let answer = problem.solve(cpu);
    let mut delta = vec![f32::NAN; answer.lse.len()];
    attention::delta(cpu, head_dim, &answer.out, &problem.dout, &mut delta);
    let (mut dq, mut dkv) =
        (vec![E::round_from(7.0); problem.q.len()], vec![E::round_from(7.0); problem.kv.len()]);
    let (stride, parts) = (q_stride(&problem.shape), [0..3, 3..3 + width]);
    let [_, to_q] = RowsMut::columns(&mut dq, stride, parts);
    let parts = [1..1 + kv_width, 1 + kv_width..1 + 2 * kv_width];
    let [to_k, to_v] = RowsMut::columns(&mut dkv, kv_stride(&problem.shape), parts);
    let (dout, lse) = (&problem.dout[..], &answer.lse[..]);
    let saved = Saved { dout, lse, delta: DeltaFrom::Delta(&delta) };
    let gradients = Gradients { dq: to_q, dk: to_k, dv: to_v, accumulate: false };
    attention::backward(cpu, &problem.shape, problem.rows(), saved, gradients);
    assert!((&dq, &dkv) == (&answer.dq, &answer.dkv), "{:?} in {}", cpu.level, E::DTYPE);
}
