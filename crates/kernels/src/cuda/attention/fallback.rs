//! Attention on kernels of our own: f32 and bf16, any positions and lengths, heads of up to 256 elements.

use super::{Backward, DeltaFrom, Forward, Rows, delta_to};
use crate::cuda::{Arg, Cuda, Grid, Source};
use crate::{AttentionShape, Dtype};

/// Kernels that do not depend on the size of heads.
pub(crate) static ATTENTION: Source =
    Source { name: "attention", code: include_str!("../kernels/attention.cu") };

/// The kernels for one size of heads. Smaller heads are padded with zeros in shared memory.
macro_rules! tiles {
    ($name:ident, $dtype:literal, $head_dim:literal) => {
        pub(crate) static $name: Source = Source {
            name: concat!("attention_", $dtype, "_", $head_dim),
            code: concat!(
                "#define HEAD_DIM ",
                $head_dim,
                "\n",
                include_str!("../kernels/attention.cuh"),
                include_str!(concat!("../kernels/attention_", $dtype, ".cu"))
            ),
        };
    };
}

tiles!(F32_64, "f32", "64");
tiles!(F32_128, "f32", "128");
tiles!(F32_256, "f32", "256");
tiles!(BF16_32, "bf16", "32");
tiles!(BF16_64, "bf16", "64");
tiles!(BF16_80, "bf16", "80");
tiles!(BF16_96, "bf16", "96");
tiles!(BF16_128, "bf16", "128");
tiles!(BF16_192, "bf16", "192");
tiles!(BF16_256, "bf16", "256");

/// All sources of attention, for checks that compile every kernel.
#[cfg(test)]
pub(crate) static SOURCES: [&Source; 11] = [
    &ATTENTION, &F32_64, &F32_128, &F32_256, &BF16_32, &BF16_64, &BF16_80, &BF16_96, &BF16_128,
    &BF16_192, &BF16_256,
];

/// The kernels for a size of heads, and the constants that their sources derive from it.
struct Tiles {
    source: &'static Source,
    dtype: Dtype,
    /// Size of heads in shared memory.
    head_dim: usize,
}

const F32_TILES: [(usize, &Source); 3] = [(64, &F32_64), (128, &F32_128), (256, &F32_256)];
const BF16_TILES: [(usize, &Source); 7] = [
    (32, &BF16_32),
    (64, &BF16_64),
    (80, &BF16_80),
    (96, &BF16_96),
    (128, &BF16_128),
    (192, &BF16_192),
    (256, &BF16_256),
];

/// Rows of the tiles that stream through the backward kernels in bf16.
const BF16_STREAMED: usize = 32;

impl Tiles {
    fn new(shape: &AttentionShape, dtype: Dtype) -> Tiles {
        let sizes: &[(usize, &'static Source)] = match dtype {
            Dtype::Bf16 => &BF16_TILES,
            Dtype::F32 => &F32_TILES,
            other => panic!("attention takes f32 or bf16, not {other}"),
        };
        let found = sizes.iter().find(|(head_dim, _)| shape.head_dim <= *head_dim);
        let (head_dim, source) = *found.unwrap_or_else(|| {
            panic!("head_dim={} is too large: attention on a GPU takes at most 256", shape.head_dim)
        });
        Tiles { source, dtype, head_dim }
    }

    fn kernel(&self, f32: &'static str, bf16: &'static str) -> &'static str {
        if self.dtype == Dtype::F32 { f32 } else { bf16 }
    }

    fn threads(&self) -> u32 {
        if self.dtype == Dtype::F32 { 256 } else { 128 }
    }

    /// Queries or keys of one block.
    fn rows(&self) -> usize {
        if self.dtype == Dtype::F32 && self.head_dim > 128 { 32 } else { 64 }
    }

    /// Bytes of shared memory for this many rows of a head.
    fn row_bytes(&self, rows: usize) -> usize {
        match self.dtype {
            Dtype::F32 => rows * (self.head_dim + 4) * 4,
            _ => rows * (self.head_dim + 8) * 2,
        }
    }

    /// Bytes of shared memory for a tile of scores in f32.
    fn score_bytes(&self) -> usize {
        self.rows() * (self.rows() + 4) * 4
    }

    fn forward_bytes(&self) -> usize {
        match self.dtype {
            Dtype::F32 => self.row_bytes(2 * self.rows()) + self.score_bytes(),
            _ => {
                let keys = if self.head_dim > 192 { 32 } else { 64 };
                self.row_bytes(self.rows() + 4 * keys)
            }
        }
    }

    fn backward_bytes(&self) -> usize {
        match self.dtype {
            Dtype::F32 => self.row_bytes(4 * self.rows()) + self.score_bytes() + self.rows() * 8,
            _ => self.row_bytes(2 * self.rows() + 4 * BF16_STREAMED) + BF16_STREAMED * 16,
        }
    }

    /// Blocks per tile of keys: for large heads, each computes a half of the columns of dk and dv.
    fn column_parts(&self) -> usize {
        if self.dtype == Dtype::Bf16 && self.head_dim > 128 { 2 } else { 1 }
    }
}

pub(super) fn forward(cuda: &Cuda, pass: &Forward<'_>) {
    let shape = pass.shape;
    let tiles = Tiles::new(shape, pass.dtype);
    let blocks = shape.batch * shape.heads * shape.q_len.div_ceil(tiles.rows());
    let grid = Grid::new(blocks, tiles.threads()).shared(tiles.forward_bytes());
    let mut args = inputs(shape, &pass.qkv);
    args.extend([
        Arg::from(&pass.out),
        ((shape.heads * shape.head_dim) as i64).into(),
        i32::from(pass.out.dtype() == Dtype::F32).into(),
        Arg::from(&pass.lse),
        i32::from(is_aligned(shape, &pass.qkv, None)).into(),
    ]);
    let kernel = tiles.kernel("attention_forward_f32", "attention_forward_bf16");
    cuda.launch(tiles.source, kernel, grid, &args);
}

pub(super) fn backward(cuda: &Cuda, pass: &Backward<'_>) {
    let (heads, head_dim) = (pass.shape.heads, pass.shape.head_dim);
    match pass.delta {
        DeltaFrom::Delta(delta) => from_delta(cuda, pass, delta.address()),
        DeltaFrom::Output(out) => {
            let count = pass.shape.batch * pass.shape.q_len * heads;
            let delta = cuda.scratch(count * size_of::<f32>());
            delta_to(cuda, (out, pass.dout), delta.address(), (count, head_dim));
            from_delta(cuda, pass, delta.address());
        }
    }
}

fn from_delta(cuda: &Cuda, pass: &Backward<'_>, delta: u64) {
    let shape = pass.shape;
    let tiles = Tiles::new(shape, pass.dtype);
    let [dq, dk, dv] = pass.gradients;
    let mut shared = inputs(shape, &pass.qkv);
    shared.extend([Arg::from(pass.dout), Arg::from(pass.lse), delta.into()]);
    let dout = pass.dout.address();
    let flags = [
        i32::from(pass.gradient_dtype == Dtype::F32),
        i32::from(pass.accumulate),
        i32::from(is_aligned(shape, &pass.qkv, Some(dout))),
    ];
    let grid = |blocks| Grid::new(blocks, tiles.threads()).shared(tiles.backward_bytes());
    let args = |targets: &[Rows]| -> Vec<Arg> {
        let targets = targets.iter().flat_map(address_and_stride);
        shared.iter().copied().chain(targets).chain(flags.map(Arg::from)).collect()
    };

    let blocks = shape.batch * shape.heads * shape.q_len.div_ceil(tiles.rows());
    let kernel = tiles.kernel("attention_backward_dq_f32", "attention_backward_dq_bf16");
    cuda.launch(tiles.source, kernel, grid(blocks), &args(&[dq]));

    let key_tiles = shape.k_len.div_ceil(tiles.rows()) * tiles.column_parts();
    let blocks = shape.batch * shape.kv_heads * key_tiles;
    let kernel = tiles.kernel("attention_backward_dkv_f32", "attention_backward_dkv_bf16");
    cuda.launch(tiles.source, kernel, grid(blocks), &args(&[dk, dv]));
}

/// The parameters that all kernels begin with: the shape, and q, k and v.
fn inputs(shape: &AttentionShape, qkv: &[Rows; 3]) -> Vec<Arg> {
    let AttentionShape { heads, head_dim, q_len, k_len, q_start, k_start, scale, .. } = *shape;
    let sizes = [heads, shape.group(), head_dim, q_len, k_len];
    let sizes = sizes.map(|size| i32::try_from(size).expect("attention sizes are below 2^31"));
    let mut args: Vec<Arg> = sizes.map(Arg::from).to_vec();
    args.extend([Arg::from(q_start as i64 - k_start as i64), scale.into()]);
    args.extend(qkv.iter().flat_map(address_and_stride));
    args
}

fn address_and_stride(rows: &Rows) -> [Arg; 2] {
    [rows.address.into(), (rows.stride as i64).into()]
}

/// Whether rows can be copied 16 bytes at a time.
fn is_aligned(shape: &AttentionShape, qkv: &[Rows; 3], dout: Option<u64>) -> bool {
    let is_multiple =
        |rows: &Rows| rows.address.is_multiple_of(16) && rows.stride.is_multiple_of(8);
    shape.head_dim.is_multiple_of(8)
        && qkv.iter().all(is_multiple)
        && dout.is_none_or(|address| address.is_multiple_of(16))
}
