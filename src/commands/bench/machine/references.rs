//! The reference models whose steps are measured: for each family a narrow one that fits into the caches, a wide one that
//! does not, and one in between. They are not presets, so predictions for presets are not fitted to themselves.

use anyhow::Context;
use lockstep_plan::{Config, Plan};

use crate::run_file::RunFile;

pub struct Reference {
    pub file: RunFile,
    pub plan: Plan,
}

/// dim, layers, heads, seq, vocab and micro-batch size.
const SIZES: [[usize; 6]; 3] =
    [[96, 2, 3, 96, 512, 8], [256, 2, 4, 192, 2048, 4], [640, 1, 10, 320, 6144, 2]];

pub fn all(ranks: usize) -> anyhow::Result<Vec<Reference>> {
    let mut all = Vec::new();
    for [dim, layers, heads, seq, vocab, sequences] in SIZES {
        for family in ["llama", "gpt2"] {
            for compute in ["f32", "bf16"] {
                let text = format!(
                    "name = \"{family} of {dim} in {compute}\"\n[model]\nfamily = \"{family}\"\ndim = {dim}\n\
                     layers = {layers}\nheads = {heads}\nseq = {seq}\nvocab = {vocab}\n\
                     [train]\nmicro_batch = {sequences}\nglobal_batch = {}\nsteps = 1000000\n\
                     [layout]\ndata = {ranks}\n[precision]\ncompute = \"{compute}\"\n",
                    sequences * ranks
                );
                let file = RunFile::open(Config::parse(&text, &[]))?;
                let plan = file.plan(ranks, ranks).context("invalid reference model")?;
                all.push(Reference { file, plan });
            }
        }
    }
    Ok(all)
}
