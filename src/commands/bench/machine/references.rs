//! The models whose steps are measured: of each family a narrow one that the caches hold, a wide one that they do not,
//! and one between them. Nobody trains these: what is predicted of other models is not what was measured of them.

use anyhow::Context;
use lockstep_plan::{Config, Plan};

use crate::run_file::RunFile;

/// One of them, as it is trained.
pub struct Reference {
    pub file: RunFile,
    pub plan: Plan,
}

/// dim, layers, heads, seq, vocab, and sequences of a micro-batch.
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
                let plan = file.plan(ranks, ranks).context("a reference model")?;
                all.push(Reference { file, plan });
            }
        }
    }
    Ok(all)
}
