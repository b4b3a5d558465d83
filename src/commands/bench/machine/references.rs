//! The models whose steps are measured: of each family a narrow one that the caches hold, a wide one that they do not,
//! and one between them. Nobody trains these: what is foretold of other models is not what was measured of them.

use anyhow::Context;
use lockstep_plan::{Config, Plan};

use crate::run_file::RunFile;

/// One of them, as it is trained.
pub struct Reference {
    pub file: RunFile,
    pub plan: Plan,
    /// Steps of a pass that count: more of those that are short.
    pub steps: usize,
}

/// Steps before those that count: the first makes what is used again later.
pub const WARM: usize = 1;

/// dim, heads, seq, vocab, sequences of a micro-batch, and steps of a pass.
const SIZES: [[usize; 6]; 3] =
    [[96, 3, 96, 512, 8, 6], [256, 4, 192, 2048, 4, 3], [640, 10, 320, 6144, 2, 2]];

pub fn all(ranks: usize) -> anyhow::Result<Vec<Reference>> {
    let mut all = Vec::new();
    for [dim, heads, seq, vocab, sequences, steps] in SIZES {
        for family in ["llama", "gpt2"] {
            for compute in ["f32", "bf16"] {
                let text = format!(
                    "name = \"{family} of {dim} in {compute}\"\n[model]\nfamily = \"{family}\"\ndim = {dim}\n\
                     layers = 2\nheads = {heads}\nseq = {seq}\nvocab = {vocab}\n\
                     [train]\nmicro_batch = {sequences}\nglobal_batch = {}\nsteps = 1000000\n\
                     [layout]\ndata = {ranks}\n[precision]\ncompute = \"{compute}\"\n",
                    sequences * ranks
                );
                let file = RunFile::of(Config::parse(&text, &[]))?;
                let plan = file.plan(ranks, ranks).context("a reference model")?;
                all.push(Reference { file, plan, steps });
            }
        }
    }
    Ok(all)
}
