//! Matrix multiplication: cuBLASLt, and separate operations where it has no algorithm that does all at once.

use std::sync::atomic::Ordering::Relaxed;

use super::blaslt::{Addend, EpilogueKind, Inputs, Operands, Problem, alignment};
use super::queue::{Operation, Product};
use super::{Cuda, elementwise, fp8, mlp};
use crate::{Dtype, Matmul, View, ViewMut};

/// Computes `work` of (m, k) times (k, n).
pub(crate) fn run(cuda: &Cuda, work: Matmul<'_>, [m, n, k]: [usize; 3]) {
    if m == 0 || n == 0 {
        return;
    }
    let Matmul { a, b, out, accumulate, bias, gelu, residual, gelu_backward, .. } = work;
    let (a_transposed, b_transposed) = (work.a_transposed, work.b_transposed);
    if k == 0 {
        if !accumulate {
            cuda.memset(out.address(), 0, out.len() * out.dtype().bytes());
        }
        return apply(cuda, Epilogue { bias, gelu, residual }, out);
    }
    // cuBLASLt multiplies equal types, and f32 into f32 only. Pairs of fp8 formats are an exception.
    if a.dtype() != b.dtype() || (a.dtype() == Dtype::F32 && out.dtype() != Dtype::F32) {
        return in_f32(cuda, Matmul { out, gelu, ..work }, [m, n, k]);
    }
    let kind = match (&bias, &gelu, &gelu_backward) {
        (_, _, Some(_)) => EpilogueKind::GeluBackward,
        (None, None, _) => EpilogueKind::None,
        (Some(_), None, _) => EpilogueKind::Bias,
        (None, Some(_), _) => EpilogueKind::Gelu,
        (Some(_), Some(_), _) => EpilogueKind::BiasGelu,
    };
    // The addend goes in before GELU, so only a product without GELU takes the residual.
    let fused = FusedEpilogue {
        kind,
        residual: residual.filter(|_| gelu.is_none() && !accumulate),
        accumulate,
    };
    let problem = |fused: &FusedEpilogue<'_>, out: &ViewMut<'_>| Problem {
        m,
        n,
        k,
        a_transposed,
        b_transposed,
        inputs: work.fp8.map_or(Inputs::Of(a.dtype()), |fp8| {
            let [a, b] = fp8.formats;
            Inputs::Fp8 { a, b, fast: fp8.fast }
        }),
        output: out.dtype(),
        epilogue: fused.kind,
        addend: match (fused.accumulate, fused.residual) {
            (true, _) => Addend::Output,
            (false, Some(_)) => Addend::Other,
            (false, None) => Addend::None,
        },
        alignment: [
            alignment(a.address()),
            alignment(b.address()),
            alignment(fused.residual.map_or(out.address(), |residual| residual.address())),
            alignment(out.address()),
        ],
        tf32: a.dtype() == Dtype::F32 && cuda.tf32.load(Relaxed),
    };
    let pre_gelu = gelu_backward.or(gelu.as_ref().map(|pre| pre.as_view()));
    let operands = |fused: &FusedEpilogue<'_>, out: &ViewMut<'_>| Operands {
        a: a.address(),
        b: b.address(),
        c: fused.residual.map_or(out.address(), |residual| residual.address()),
        out: out.address(),
        bias: bias.filter(|_| fused.has_bias()).map_or(0, |bias| bias.address()),
        scales: work.fp8.map_or([0; 2], |fp8| fp8::inverse_scales(fp8.scales)),
        pre_gelu: pre_gelu.filter(|_| fused.has_gelu()).map_or(0, |pre| pre.address()),
    };
    // cuBLASLt's epilogues take vectors of 16 bytes.
    let fits = |view: View<'_>| {
        view.dtype() == out.dtype()
            && view.address().is_multiple_of(16)
            && (n * view.dtype().bytes()).is_multiple_of(16)
    };
    let fusable = [bias, fused.residual, pre_gelu].into_iter().flatten().all(fits);
    let done = fusable && enqueue(cuda, problem(&fused, &out), operands(&fused, &out));
    if done {
        if let Some(residual) = residual.filter(|_| fused.residual.is_none()) {
            elementwise::add(cuda, out, residual);
        }
        return;
    }
    let plain = FusedEpilogue { kind: EpilogueKind::None, residual: None, accumulate };
    let done = enqueue(cuda, problem(&plain, &out), operands(&plain, &out));
    assert!(done, "cuBLASLt has no algorithm for {}", problem(&plain, &out).text());
    if let Some(input) = gelu_backward {
        return mlp::gelu_backward(cuda, input, out);
    }
    apply(cuda, Epilogue { bias, gelu, residual }, out);
}

/// Enqueues a product, or returns false if cuBLASLt has no algorithm for it.
fn enqueue(cuda: &Cuda, problem: Problem, operands: Operands) -> bool {
    let prepared = cuda.blaslt.prepared(&problem);
    let prepared =
        prepared.unwrap_or_else(|| cuda.blaslt.prepare(cuda.stream(), &problem, operands));
    let Some(prepared) = prepared else {
        return false;
    };
    cuda.push(Operation::Matmul(Product { problem, prepared, operands }));
    true
}

/// Operations after the product.
struct Epilogue<'a> {
    bias: Option<View<'a>>,
    gelu: Option<ViewMut<'a>>,
    residual: Option<View<'a>>,
}

/// The epilogue as separate operations.
fn apply(cuda: &Cuda, epilogue: Epilogue<'_>, mut out: ViewMut<'_>) {
    let Epilogue { bias, gelu, residual } = epilogue;
    if let Some(bias) = bias {
        elementwise::add_to_rows(cuda, out.reborrow(), bias);
    }
    if let Some(mut pre) = gelu {
        elementwise::cast(cuda, out.as_view(), pre.reborrow());
        mlp::gelu_in_place(cuda, out.reborrow());
    }
    if let Some(residual) = residual {
        elementwise::add(cuda, out, residual);
    }
}

/// A product in f32 whose inputs or output are of another type: the router of a mixture of experts, and bf16 gradients
/// of an f32 model.
fn in_f32(cuda: &Cuda, work: Matmul<'_>, sizes: [usize; 3]) {
    let Matmul { a, b, mut out, accumulate, bias, gelu, residual, gelu_backward, .. } = work;
    let rounds = out.dtype() != Dtype::F32;
    let lens =
        [a, b, out.as_view()].map(|view| if view.dtype() == Dtype::F32 { 0 } else { view.len() });
    let offsets = lens.iter().scan(0, |end, len| {
        let start = *end;
        *end += (4 * len).next_multiple_of(256);
        Some(start)
    });
    let offsets: Vec<usize> = offsets.collect();
    let scratch = cuda.scratch(offsets[2] + 4 * lens[2]);
    let widen = |view: View<'_>, offset| {
        let mut wide = scratch.as_f32(offset, view.rows(), view.cols());
        elementwise::cast(cuda, view, wide.reborrow());
        wide
    };
    let wide_a = (a.dtype() != Dtype::F32).then(|| widen(a, offsets[0]));
    let wide_b = (b.dtype() != Dtype::F32).then(|| widen(b, offsets[1]));
    let mut sum = rounds.then(|| scratch.as_f32(offsets[2], out.rows(), out.cols()));
    let product = Matmul {
        a: wide_a.as_ref().map_or(a, |wide| wide.as_view()),
        a_transposed: work.a_transposed,
        b: wide_b.as_ref().map_or(b, |wide| wide.as_view()),
        b_transposed: work.b_transposed,
        out: sum.as_mut().map_or_else(|| out.reborrow(), |sum| sum.reborrow()),
        accumulate: accumulate && !rounds,
        bias: None,
        gelu: None,
        residual: None,
        gelu_backward: None,
        fp8: None,
    };
    run(cuda, product, sizes);
    match &sum {
        Some(sum) if accumulate => elementwise::add(cuda, out.reborrow(), sum.as_view()),
        Some(sum) => elementwise::cast(cuda, sum.as_view(), out.reborrow()),
        None => {}
    }
    if let Some(input) = gelu_backward {
        mlp::gelu_backward(cuda, input, out.reborrow());
    }
    apply(cuda, Epilogue { bias, gelu, residual }, out);
}

/// The part of the epilogue that cuBLASLt does.
struct FusedEpilogue<'a> {
    kind: EpilogueKind,
    residual: Option<View<'a>>,
    accumulate: bool,
}

impl FusedEpilogue<'_> {
    fn has_bias(&self) -> bool {
        matches!(self.kind, EpilogueKind::Bias | EpilogueKind::BiasGelu)
    }

    fn has_gelu(&self) -> bool {
        !matches!(self.kind, EpilogueKind::None | EpilogueKind::Bias)
    }
}
