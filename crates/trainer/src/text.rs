//! Text from a model in training or from a checkpoint.

use lockstep_data::Source;
use lockstep_kernels::cpu::random::Key;
use lockstep_kernels::{Device, Dtype};
use lockstep_model::{Cache, Model, Sampling, Weights, sample};

use crate::Error;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
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
    wanted: &Wanted<'_>,
    mut say: impl FnMut(&str),
) -> Result<(), Error> {
    let mut ids = source.encode(wanted.prompt)?;
    if ids.is_empty() {
        // Something must be followed: the end of a document, or the end of a sentence.
        ids.push(source.end().unwrap_or(b'\n' as u32));
    }
    if let Some(id) = ids.iter().find(|&&id| id as usize >= model.shape.vocab) {
        return Err(Error::Mistake(format!(
            "the prompt has token {id}, the model a vocabulary of {}: it was trained on other data",
            model.shape.vocab
        )));
    }
    let key = Key { seed: wanted.seed, stream: STREAM };
    let mut cache = Cache::new(device, model, dtype);
    let mut text = Spoken::default();
    for index in 0..wanted.tokens {
        // When the context is full, go on from its second half.
        let new = if cache.len() + 1 > model.shape.seq || ids.len() > model.shape.seq {
            cache.clear();
            &ids[ids.len().saturating_sub(model.shape.seq.div_ceil(2))..]
        } else if cache.is_empty() {
            &ids[..]
        } else {
            &ids[ids.len() - 1..]
        };
        let logits = model.extend(device, weights, &mut cache, new, dtype);
        let uniform = (key.word(index as u64) as f64 + 0.5) / 2f64.powi(32);
        let id = sample(&logits, &wanted.sampling, uniform);
        if Some(id) == source.end() {
            break;
        }
        ids.push(id);
        text.hear(source, id, &mut say)?;
    }
    Ok(())
}

/// Tells sampling's random numbers from those of training.
const STREAM: u64 = 1 << 62;

/// Text that is told as soon as it is whole: a character may take several tokens.
#[derive(Default)]
struct Spoken {
    waiting: Vec<u32>,
}

impl Spoken {
    fn hear(&mut self, source: &Source, id: u32, say: &mut impl FnMut(&str)) -> Result<(), Error> {
        self.waiting.push(id);
        let text = source.decode(&self.waiting)?;
        // No character is longer than four bytes; what is still broken then stays so.
        if !text.ends_with('\u{fffd}') || self.waiting.len() >= 4 {
            say(&text);
            self.waiting.clear();
        }
        Ok(())
    }
}
