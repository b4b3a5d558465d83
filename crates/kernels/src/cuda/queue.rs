//! Operations on their way to the GPU. They are collected into short lists. A list that was executed before with the same
//! arguments is started as one CUDA graph, which costs the host a tenth of starting its operations one by one.
//!
//! A training step allocates the same memory in the same order as the step before, so its lists repeat. Lists of
//! operations that change, such as those of experts or with dropout, are executed as they are.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use lockstep_cuda::{Arg, Context, Function, Graph, Grid, Result, Stream};

use super::blaslt::{BlasLt, Operands, Prepared, Problem};
use super::dnn::{Dnn, Plan, Target};
use super::grouped::Work;

/// Operations of a list. The GPU begins a list when it is complete, so a list takes the host some ten microseconds.
const LIST: usize = 32;

/// Shorter lists are not worth a graph. They come from events around single operations, when a step is metered.
const SHORTEST: usize = 4;

/// Lists that are remembered.
const MOST_LISTS: usize = 512;

/// An operation. Its arguments are a range of those of its list.
#[derive(Clone, PartialEq, Hash)]
pub(crate) enum Operation {
    Kernel {
        function: Function,
        grid: Grid,
        args: Range<usize>,
    },
    Fill {
        address: u64,
        byte: u8,
        bytes: usize,
    },
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
    },
    Matmul(Product),
    /// A kernel with one large parameter.
    Grouped {
        function: Function,
        grid: Grid,
        work: Box<Work>,
    },
    /// The arguments are the ids and addresses of tensors, in turn.
    Attention {
        plan: SharedPlan,
        tensors: Range<usize>,
        workspace: u64,
    },
}

/// A product with its algorithm.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub problem: Problem,
    pub prepared: Prepared,
    pub operands: Operands,
}

impl PartialEq for Product {
    fn eq(&self, other: &Product) -> bool {
        // The algorithm of a problem does not change.
        (self.problem, self.operands) == (other.problem, other.operands)
    }
}

impl Hash for Product {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.operands.hash(state);
    }
}

/// A plan of cuDNN, equal to itself only.
#[derive(Clone)]
pub(crate) struct SharedPlan(pub Arc<Plan>);

impl PartialEq for SharedPlan {
    fn eq(&self, other: &SharedPlan) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Hash for SharedPlan {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

/// Operations in the order of the stream.
#[derive(PartialEq, Hash)]
struct List {
    operations: Vec<Operation>,
    args: Vec<Arg>,
}

/// The compute stream, and the operations that are not on it yet.
pub(crate) struct Queue {
    stream: Stream,
    lists: Mutex<Lists>,
}

struct Lists {
    waiting: List,
    executed: HashMap<u64, Executed>,
    counts: OperationCounts,
}

/// Operations that were put on the stream of a GPU.
#[derive(Clone, Copy, Default, Debug)]
pub struct OperationCounts {
    pub all: u64,
    /// Those that were part of a CUDA graph.
    pub in_graphs: u64,
}

/// A list that was executed.
struct Executed {
    list: List,
    /// Recorded when the list comes for the second time. None inside if that failed.
    graph: Option<Option<Graph>>,
}

/// The libraries that execute some of the operations.
#[derive(Clone, Copy)]
pub(crate) struct Libraries<'a> {
    pub blaslt: &'a BlasLt,
    pub dnn: Option<&'a Dnn>,
}

impl Queue {
    pub fn new(context: &Arc<Context>) -> Queue {
        let lists = Lists {
            waiting: List::new(),
            executed: HashMap::new(),
            counts: OperationCounts::default(),
        };
        Queue { stream: Stream::new(context.clone()), lists: Mutex::new(lists) }
    }

    /// The stream, on which the waiting operations may be missing.
    pub fn raw_stream(&self) -> &Stream {
        &self.stream
    }

    /// Adds an operation. `operation` gets the range of its arguments in the list.
    pub fn push(
        &self,
        libraries: Libraries<'_>,
        args: impl IntoIterator<Item = Arg>,
        operation: impl FnOnce(Range<usize>) -> Operation,
    ) {
        let mut lists = self.lock();
        let waiting = &mut lists.waiting;
        let first = waiting.args.len();
        waiting.args.extend(args);
        let operation = operation(first..waiting.args.len());
        waiting.operations.push(operation);
        if waiting.operations.len() == LIST {
            lists.execute(&self.stream, libraries);
        }
    }

    /// Puts all waiting operations on the stream.
    pub fn flush(&self, libraries: Libraries<'_>) {
        self.lock().execute(&self.stream, libraries);
    }

    pub fn counts(&self) -> OperationCounts {
        self.lock().counts
    }

    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Lists {
    /// # Panics
    /// If an operation cannot be enqueued. The whole list is then discarded.
    fn execute(&mut self, stream: &Stream, libraries: Libraries<'_>) {
        if self.waiting.operations.is_empty() {
            return;
        }
        let operations = self.waiting.operations.len();
        self.counts.all += operations as u64;
        if operations < SHORTEST {
            let enqueued = self.waiting.enqueue(stream, libraries);
            self.waiting.clear();
            return must(stream, enqueued);
        }
        let mut hasher = DefaultHasher::new();
        self.waiting.hash(&mut hasher);
        let key = hasher.finish();
        let known = self.executed.get_mut(&key).filter(|known| known.list == self.waiting);
        let enqueue = || self.waiting.enqueue(stream, libraries);
        let graph = known.and_then(|known| {
            known.graph.get_or_insert_with(|| Graph::record(stream, enqueue).ok()).as_ref()
        });
        let enqueued = match graph {
            Some(graph) => {
                graph.launch(stream);
                self.counts.in_graphs += operations as u64;
                Ok(())
            }
            None => enqueue(),
        };
        if enqueued.is_err()
            || self.executed.get(&key).is_some_and(|known| known.list == self.waiting)
        {
            self.waiting.clear();
        } else {
            if self.executed.len() >= MOST_LISTS {
                self.executed.clear();
            }
            let list = std::mem::replace(&mut self.waiting, List::new());
            self.executed.insert(key, Executed { list, graph: None });
        }
        must(stream, enqueued);
    }
}

/// # Panics
/// If operations could not be enqueued.
fn must(stream: &Stream, enqueued: Result<()>) {
    let Context { index, name, .. } = &**stream.context();
    enqueued.unwrap_or_else(|error| panic!("GPU {index} ({name}): {error}"));
}

impl List {
    fn new() -> List {
        List { operations: Vec::with_capacity(LIST), args: Vec::with_capacity(16 * LIST) }
    }

    fn clear(&mut self) {
        self.operations.clear();
        self.args.clear();
    }

    fn enqueue(&self, stream: &Stream, libraries: Libraries<'_>) -> Result<()> {
        self.operations
            .iter()
            .try_for_each(|operation| self.enqueue_one(operation, stream, libraries))
    }

    fn enqueue_one(
        &self,
        operation: &Operation,
        stream: &Stream,
        libraries: Libraries<'_>,
    ) -> Result<()> {
        let (context, Libraries { blaslt, dnn }) = (stream.context(), libraries);
        match operation {
            Operation::Kernel { function, grid, args } => {
                function.launch(stream, *grid, &self.args[args.clone()])
            }
            Operation::Fill { address, byte, bytes } => {
                // SAFETY: the range is on this device, and lives until later operations reuse it.
                let status = unsafe {
                    (context.api().cuMemsetD8Async)(*address, *byte, *bytes, stream.handle())
                };
                context.driver.check(status, "fill device memory")
            }
            Operation::Copy { from, to, bytes } => {
                // SAFETY: both ranges are on this device, and live until later operations reuse them.
                let status = unsafe {
                    (context.api().cuMemcpyDtoDAsync_v2)(*to, *from, *bytes, stream.handle())
                };
                context.driver.check(status, "copy device memory")
            }
            Operation::Grouped { function, grid, work } => {
                // SAFETY: `Work` has the layout of the kernel's parameter.
                unsafe { function.launch_with(stream, *grid, &**work) }
            }
            Operation::Matmul(Product { problem, prepared, operands }) => {
                blaslt.run(stream, problem, prepared, *operands)
            }
            Operation::Attention { plan, tensors, workspace } => {
                // cuDNN enqueues in the current context.
                context.api();
                let dnn = dnn.expect("plans come from cuDNN");
                let tensors = self.args[tensors.clone()].chunks_exact(2);
                let tensors = tensors.map(|pair| (pair[0].bits() as i64, pair[1].bits()));
                dnn.with_handle(|target| match target {
                    // SAFETY: the addresses are those of the tensors that the graph declares, on this device.
                    Target::Handle(handle) => unsafe {
                        plan.0.execute(handle, tensors, *workspace)
                    },
                    Target::Described(_) => unreachable!("a library with a device has a handle"),
                })
            }
        }
    }
}
