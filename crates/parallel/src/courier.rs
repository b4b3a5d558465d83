//! A thread that carries out exchanges while its rank computes: one after the other, in the order in which
//! they were handed over, so that all ranks meet in the same order.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

pub(crate) struct Courier {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// Something under way.
pub(crate) struct Task<T>(Receiver<T>);

impl Courier {
    pub fn new(name: &str) -> Courier {
        let (jobs, todo) = channel::<Job>();
        let work = move || todo.into_iter().for_each(|job| job());
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        Courier { jobs: Some(jobs), thread: Some(thread.expect("a thread can be started")) }
    }

    pub fn start<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Task<T> {
        let (answer, task) = channel();
        let job = Box::new(move || {
            // Who asked may be gone: then nobody wants the answer.
            let _ = answer.send(job());
        });
        let jobs = self.jobs.as_ref().expect("a courier has its queue until it is dropped");
        jobs.send(job).expect("the courier works until its queue is closed");
        Task(task)
    }
}

impl<T> Task<T> {
    pub fn wait(self) -> T {
        self.0.recv().expect("a courier answers, or its panic is ours")
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
