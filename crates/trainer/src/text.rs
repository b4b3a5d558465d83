//! Text generation.

use lockstep_data::Tokenizer;
use lockstep_kernels::{Device, Dtype, RandomKey};
use lockstep_model::{Cache, Model, Sampling, Weights, sample};

use crate::Error;
use crate::text_stream::TextStream;

/// A prompt, and how to continue it.
#[derive(Clone, Debug)]
pub struct Prompt<'a> {
    pub prompt: &'a str,
    pub tokens: usize,
    pub sampling: Sampling,
    pub seed: u64,
}

/// A model with its weights and tokenizer.
#[derive(Clone, Copy)]
pub struct Generator<'a> {
    pub device: &'a Device,
    pub model: &'a Model,
    pub weights: &'a Weights,
    pub dtype: Dtype,
    /// Encodes the prompt and decodes the tokens.
    pub tokenizer: &'a Tokenizer,
}

/// Passes each piece of generated text to `on_text`, without the prompt.
pub fn generate(
    generator: Generator<'_>,
    prompt: &Prompt<'_>,
    mut on_text: impl FnMut(&str),
) -> Result<(), Error> {
    let Generator { device, model, weights, dtype, tokenizer } = generator;
    let mut ids = tokenizer.encode(prompt.prompt)?;
    let mut text = TextStream::after(ids.clone());
    if ids.is_empty() {
        // The model needs at least one token: the end of a document or of a line.
        ids.push(tokenizer.end().unwrap_or(b'\n' as u32));
    }
    if let Some(id) = ids.iter().find(|&&id| id as usize >= model.vocab) {
        return Err(Error::Invalid(format!(
            "token {id} of the prompt is out of range: the model has a vocabulary of {}; use the data it was trained on",
            model.vocab
        )));
    }
    if ids.len() > model.seq {
        tracing::warn!(
            "the prompt has {} tokens, more than the model's context of {}; only its last {} are used",
            ids.len(),
            model.seq,
            model.seq.div_ceil(2)
        );
    }
    let key = RandomKey { seed: prompt.seed, stream: STREAM };
    let mut cache = Cache::new(model, dtype);
    let (seq, decode) = (model.seq, |ids: &[u32]| tokenizer.decode(ids));
    for index in 0..prompt.tokens {
        if cache.len() == seq {
            cache.clear();
        }
        let new = &ids[first_new(ids.len(), cache.len(), seq)..];
        let logits = model.extend(device, weights, &mut cache, new);
        let uniform = (key.word(index as u64) as f64 + 0.5) / 2f64.powi(32);
        let id = sample(&logits, &prompt.sampling, uniform);
        if Some(id) == tokenizer.end() {
            break;
        }
        ids.push(id);
        let piece = text.push(id, decode)?;
        if !piece.is_empty() {
            on_text(&piece);
        }
    }
    let rest = text.rest(decode)?;
    if !rest.is_empty() {
        on_text(&rest);
    }
    Ok(())
}

/// Index of the first token that is not in the cache. If the context is longer than `seq`, generation continues with
/// the last half of it.
fn first_new(ids: usize, cached: usize, seq: usize) -> usize {
    match cached {
        0 if ids > seq => ids - seq.div_ceil(2),
        0 => 0,
        _ => ids - 1,
    }
}

/// Separates the random numbers of sampling from those of training.
const STREAM: u64 = 1 << 62;
