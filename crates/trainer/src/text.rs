//! Text from a model in training or from a checkpoint.

use lockstep_data::Source;
use lockstep_kernels::{Device, Dtype, RandomKey};
use lockstep_model::{Cache, Model, Sampling, Weights, sample};

use crate::Error;
use crate::text_stream::TextStream;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Prompt<'a> {
    pub prompt: &'a str,
    pub tokens: usize,
    pub sampling: Sampling,
    pub seed: u64,
}

/// Tells `say` each piece of text as it comes, prompt not included.
pub fn generate(
    device: &Device,
    model: &Model,
    weights: &Weights,
    dtype: Dtype,
    source: &Source,
    wanted: &Prompt<'_>,
    mut say: impl FnMut(&str),
) -> Result<(), Error> {
    let mut ids = source.encode(wanted.prompt)?;
    let mut text = TextStream::after(ids.clone());
    if ids.is_empty() {
        // Something must be followed: the end of a document, or the end of a sentence.
        ids.push(source.end().unwrap_or(b'\n' as u32));
    }
    if let Some(id) = ids.iter().find(|&&id| id as usize >= model.vocab) {
        return Err(Error::Mistake(format!(
            "the prompt has token {id}, the model a vocabulary of {}: it was trained on other data",
            model.vocab
        )));
    }
    let key = RandomKey { seed: wanted.seed, stream: STREAM };
    let mut cache = Cache::new(model, dtype);
    let (seq, decode) = (model.seq, |ids: &[u32]| source.decode(ids));
    for index in 0..wanted.tokens {
        if cache.len() == seq {
            cache.clear();
        }
        let new = &ids[first_new(ids.len(), cache.len(), seq)..];
        let logits = model.extend(device, weights, &mut cache, new);
        let uniform = (key.word(index as u64) as f64 + 0.5) / 2f64.powi(32);
        let id = sample(&logits, &wanted.sampling, uniform);
        if Some(id) == source.end() {
            break;
        }
        ids.push(id);
        let piece = text.hear(id, decode)?;
        if !piece.is_empty() {
            say(&piece);
        }
    }
    let rest = text.untold(decode)?;
    if !rest.is_empty() {
        say(&rest);
    }
    Ok(())
}

/// Where what the cache has not seen begins. A context that became too long is gone on with from its second half.
fn first_new(ids: usize, cached: usize, seq: usize) -> usize {
    match cached {
        0 if ids > seq => ids - seq.div_ceil(2),
        0 => 0,
        _ => ids - 1,
    }
}

/// Tells sampling's random numbers from those of training.
const STREAM: u64 = 1 << 62;
