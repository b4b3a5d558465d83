//! One thread reads, many encode, the caller's writes. Batches come back in the order in which they were
//! read: the reader gives every worker's answer a place in the writer's queue before the work is done.
//! Both queues are short, so that memory is bounded whoever is the slowest.

use super::Recipe;
use super::batch::{Batch, Done, encode};
use super::input::{Format, Input};
use super::{jsonl, text};
use crate::error::{Error, Result};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

type Answer = Result<Done>;

/// Where a reader puts what it reads.
pub struct Sink<'a> {
    work: SyncSender<(Batch<'a>, SyncSender<Answer>)>,
    /// Where the writer will find the answers, in order.
    answers: SyncSender<Receiver<Answer>>,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl<'a> Sink<'a> {
    /// Hands a batch to the workers. An error means that the writer has given up, for a reason of its
    /// own which is the one that is told.
    pub fn give(&mut self, batch: Batch<'a>) -> Result<()> {
        let (answer, place) = sync_channel(1);
        let placed = self.answers.send(place).is_ok();
        match placed && self.work.send((batch, answer)).is_ok() {
            true => Ok(()),
            false => Err(Error::misuse("the writer has stopped")),
        }
    }

    /// Bytes of input were taken in.
    pub fn taken(&self, bytes: u64) {
        (self.progress)(bytes);
    }
}

/// Reads all inputs, encodes them on as many threads as the recipe says, and writes them in order.
pub fn run(
    recipe: &Recipe,
    inputs: &[Input],
    progress: &(dyn Fn(u64) + Sync),
    mut write: impl FnMut(Done) -> Result<()>,
) -> Result<()> {
    let (work, jobs) = sync_channel(recipe.threads);
    let (answers, places) = sync_channel(2 * recipe.threads);
    // Only workers hold it: when the last of them is gone, the reader does not wait for them.
    let jobs = Arc::new(Mutex::new(jobs));
    std::thread::scope(|scope| {
        let mut sink = Sink { work, answers, progress };
        let reader =
            scope.spawn(move || inputs.iter().try_for_each(|input| read(input, recipe, &mut sink)));
        for _ in 0..recipe.threads {
            let jobs = jobs.clone();
            scope.spawn(move || work_off(&jobs, recipe));
        }
        drop(jobs);
        for place in places {
            // No answer: a worker has panicked, and the scope passes that on.
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

fn work_off(jobs: &Mutex<Jobs>, recipe: &Recipe) {
    loop {
        let job = jobs.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv();
        let Ok((batch, answer)) = job else { return };
        // Nobody waits for it if the writer has given up.
        let _ = answer.send(encode(batch, &recipe.field, &recipe.tokenizer));
    }
}
