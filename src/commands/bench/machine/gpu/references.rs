//! Reference models for a GPU: large enough to fill it, in both families and with experts, and small ones. They are not
//! presets, so predictions for presets are not fitted to themselves.

use anyhow::Context;
use lockstep_plan::{Config, Plan};

use crate::run_file::RunFile;

pub struct Reference {
    pub file: RunFile,
    pub plan: Plan,
}

/// family and compute type; dim, layers, heads, seq, vocab, micro-batch size and micro-batches per step.
type Size = (&'static str, &'static str, [usize; 7]);

/// Those with several micro-batches are small enough to tell what short kernels cost.
const SIZES: [Size; 13] = [
    ("gpt2", "bf16", [640, 6, 10, 768, 32768, 16, 1]),
    ("gpt2", "bf16", [896, 8, 14, 1024, 49152, 16, 1]),
    ("gpt2", "bf16", [1280, 6, 20, 1024, 49152, 24, 1]),
    ("gpt2", "bf16", [2048, 6, 32, 1536, 32768, 8, 1]),
    ("gpt2", "bf16", [896, 6, 14, 1024, 32768, 2, 8]),
    ("llama", "bf16", [768, 6, 12, 1024, 32768, 16, 1]),
    ("llama", "bf16", [1536, 6, 24, 2048, 65536, 8, 1]),
    ("llama", "bf16", [2560, 4, 20, 4096, 98304, 4, 1]),
    ("llama", "bf16", [896, 6, 14, 1024, 32768, 2, 8]),
    ("moe", "bf16", [640, 6, 10, 1024, 32768, 16, 1]),
    ("moe", "bf16", [1024, 6, 16, 1024, 49152, 16, 1]),
    ("gpt2", "f32", [768, 4, 12, 768, 32768, 8, 1]),
    ("llama", "f32", [1024, 4, 16, 1024, 32768, 8, 1]),
];

pub fn all() -> anyhow::Result<Vec<Reference>> {
    SIZES.into_iter().map(reference).collect()
}

/// A model whose kernels are too small to fill a GPU.
pub fn small([layers, sequences]: [usize; 2]) -> anyhow::Result<Reference> {
    reference(("gpt2", "bf16", [128, layers, 4, 128, 512, sequences, 1]))
}

fn reference((family, compute, sizes): Size) -> anyhow::Result<Reference> {
    let [dim, layers, heads, seq, vocab, sequences, parts] = sizes;
    let experts = match family {
        "moe" => {
            format!("experts = 8\ntop_k = 2\nffn = {}\naux_loss = 0.0\nz_loss = 0.0\n", 3 * dim)
        }
        _ => String::new(),
    };
    let batch = sequences * parts;
    let name = match parts {
        1 => format!("{family} of {dim} in {compute}"),
        _ => format!("{family} of {dim} in {compute}, {parts} micro-batches"),
    };
    let text = format!(
        "name = \"{name}\"\n[model]\nfamily = \"{family}\"\ndim = {dim}\nlayers = {layers}\n\
         heads = {heads}\nseq = {seq}\nvocab = {vocab}\n{experts}[data]\nseq = {seq}\n\
         [train]\nmicro_batch = {sequences}\nglobal_batch = {batch}\nsteps = 1000000\n\
         [device]\nkind = \"cuda\"\n[precision]\ncompute = \"{compute}\"\n"
    );
    let file = RunFile::open(Config::parse(&text, &[]))?;
    let plan = file.plan(1, 1).context("invalid reference model")?;
    Ok(Reference { file, plan })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_models_are_valid() {
        let mut references = all().unwrap();
        references.push(small([2, 8]).unwrap());
        let small = references.iter().filter(|one| one.plan.train.accumulation > 1);
        assert!(small.clone().count() > 0);
        for Reference { file, plan } in small {
            assert_eq!(Some(plan.local_batch()), file.config.train.global_batch, "{}", plan.name);
        }
    }
}
