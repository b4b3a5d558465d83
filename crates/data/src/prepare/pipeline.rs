//! The prepare pipeline: one thread reads, many tokenize, the caller's thread writes. Batches are written in the order
//! in which they were read: the reader queues a slot for each result before the work is done. Both queues are bounded,
//! and so is memory.

use super::Recipe;
use super::batch::{Batch, Encoded, encode};
use super::input::{Format, Input};
use super::{jsonl, text};
use crate::error::{Error, Result};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

type Answer = Result<Encoded>;

/// The reader's end of the pipeline.
pub struct Sink<'a> {
    work: SyncSender<(Batch<'a>, SyncSender<Answer>)>,
    /// Slots of the results, in order, for the writer.
    answers: SyncSender<Receiver<Answer>>,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl<'a> Sink<'a> {
    /// Passes a batch to the workers. Fails if the writer has stopped; the writer reports the reason.
    pub fn give(&mut self, batch: Batch<'a>) -> Result<()> {
        let (answer, place) = sync_channel(1);
        let placed = self.answers.send(place).is_ok();
        match placed && self.work.send((batch, answer)).is_ok() {
            true => Ok(()),
            false => Err(Error::misuse("the writer has stopped")),
        }
    }

    /// Reports input bytes read.
    pub fn taken(&self, bytes: u64) {
        (self.progress)(bytes);
    }
}

/// Reads all inputs, tokenizes them on `recipe.threads` threads and writes them in order.
pub fn run(
    recipe: &Recipe,
    inputs: &[Input],
    progress: &(dyn Fn(u64) + Sync),
    mut write: impl FnMut(Encoded) -> Result<()>,
) -> Result<()> {
    let (work, jobs) = sync_channel(recipe.threads);
    let (answers, places) = sync_channel(2 * recipe.threads);
    // Only the workers hold the receiver: when they are gone, the reader does not block.
    let jobs = Arc::new(Mutex::new(jobs));
    std::thread::scope(|scope| {
        let mut sink = Sink { work, answers, progress };
        let reader =
            scope.spawn(move || inputs.iter().try_for_each(|input| read(input, recipe, &mut sink)));
        for _ in 0..recipe.threads {
            let jobs = jobs.clone();
            scope.spawn(move || run_worker(&jobs, recipe));
        }
        drop(jobs);
        for place in places {
            // A closed slot means that a worker panicked; the scope propagates the panic.
            let Ok(done) = place.recv() else { break };
            write(done?)?;
        }
        reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn read<'a>(input: &'a Input, recipe: &Recipe, sink: &mut Sink<'a>) -> Result<()> {
    match input.format {
        Format::Text => text::read(input, recipe, sink),
        Format::Jsonl => jsonl::read(input, sink),
        #[cfg(feature = "parquet")]
        Format::Parquet => super::parquet::read(input, &recipe.field, sink),
        #[cfg(not(feature = "parquet"))]
        Format::Parquet => Err(Error::NotBuilt {
            what: format!("reading {}", input.path.display()),
            feature: "parquet",
        }),
    }
}

type Jobs<'a> = Receiver<(Batch<'a>, SyncSender<Answer>)>;

fn run_worker(jobs: &Mutex<Jobs>, recipe: &Recipe) {
    loop {
        let job = jobs.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv();
        let Ok((batch, answer)) = job else { return };
        // The send fails if the writer has stopped.
        let _ = answer.send(encode(batch, &recipe.field, &recipe.tokenizer));
    }
}
