//! Execution plans: a graph together with the engine that computes it.

use std::ffi::c_void;

use lockstep_cuda::{CudaError, Result};

use super::names::{self, HandleValue, HeuristicsMode, NumericalNote, Pointer, RawDescriptor};
use super::{Descriptor, Functions, Graph, check};

/// The device that a plan is built for.
#[derive(Clone, Copy)]
pub(crate) enum Target<'a> {
    /// The current device of a handle.
    Handle(*mut c_void),
    /// A device that is only described.
    #[cfg_attr(not(test), allow(dead_code))] // plans are built without a device in tests only
    Described(&'a Descriptor),
}

/// A graph that is ready to run.
pub(crate) struct Plan {
    api: Functions,
    plan: Descriptor,
    scalars: Vec<(i64, f32)>,
    /// Bytes of device memory that the execution needs.
    pub workspace: usize,
    /// Everything that the plan refers to.
    _graph: Vec<Descriptor>,
}

impl Plan {
    /// The first plan that cuDNN's heuristics propose and that can be built. With `deterministic`, engines whose
    /// results differ between runs are skipped.
    pub fn build(graph: Graph, target: Target<'_>, deterministic: bool) -> Result<Plan> {
        let Graph { api, operations, mut parts, scalars, .. } = graph;
        let whole = Descriptor::new(api, names::OPERATION_GRAPH)?;
        if let Target::Handle(handle) = target {
            whole.set(names::GRAPH_HANDLE, &[HandleValue(handle)])?;
        }
        let raw: Vec<_> =
            operations.iter().map(|operation| RawDescriptor(operation.raw())).collect();
        whole.set(names::GRAPH_OPERATIONS, &raw)?;
        whole.finalize()?;

        let mut failure = CudaError::new("cuDNN has no engine for this graph");
        for config in engine_configs(api, &whole, target)? {
            if deterministic && is_nondeterministic(api, &config)? {
                failure = CudaError::new("cuDNN has no deterministic engine for this graph");
                continue;
            }
            match finalized(api, &config, target) {
                Err(error) => failure = error,
                Ok(plan) => {
                    let mut workspace = [0i64];
                    plan.get(names::PLAN_WORKSPACE, &mut workspace)?;
                    parts.extend(operations);
                    parts.extend([whole, config]);
                    let workspace = workspace[0] as usize;
                    return Ok(Plan { api, plan, scalars, workspace, _graph: parts });
                }
            }
        }
        Err(failure)
    }

    /// Enqueues the graph.
    ///
    /// # Safety
    /// The addresses must belong to the tensors of these ids, and `workspace` must have the bytes that the plan needs.
    pub unsafe fn execute(
        &self,
        handle: *mut c_void,
        tensors: impl Iterator<Item = (i64, u64)>,
        workspace: u64,
    ) -> Result<()> {
        let device = |address: u64| Pointer(address as *const c_void);
        let (mut ids, mut pointers) = (Vec::new(), Vec::new());
        for (id, address) in tensors {
            ids.push(id);
            pointers.push(device(address));
        }
        for (id, value) in &self.scalars {
            ids.push(*id);
            pointers.push(Pointer((value as *const f32).cast()));
        }
        let pack = Descriptor::new(self.api, names::VARIANT_PACK)?;
        pack.set(names::PACK_IDS, &ids)?;
        pack.set(names::PACK_POINTERS, &pointers)?;
        pack.set(names::PACK_WORKSPACE, &[device(workspace)])?;
        pack.finalize()?;
        // SAFETY: the caller vouches for the addresses; the plan and the pack are finalized.
        let status = unsafe { (self.api.cudnnBackendExecute)(handle, self.plan.raw(), pack.raw()) };
        check(&self.api, status, "execute a graph")
    }
}

/// The configurations that the heuristics propose, best first.
fn engine_configs(
    api: Functions,
    graph: &Descriptor,
    target: Target<'_>,
) -> Result<Vec<Descriptor>> {
    let heuristics = Descriptor::new(api, names::HEURISTICS)?;
    heuristics.link(names::HEURISTICS_GRAPH, graph)?;
    heuristics.set(names::HEURISTICS_MODE, &[HeuristicsMode::A])?;
    if let Target::Described(device) = target {
        heuristics.link(names::HEURISTICS_DEVICE, device)?;
    }
    heuristics.finalize()?;
    let count = heuristics.get::<RawDescriptor>(names::HEURISTICS_RESULTS, &mut [])?;
    let mut configs = (0..count)
        .map(|_| Descriptor::new(api, names::ENGINE_CONFIG))
        .collect::<Result<Vec<Descriptor>>>()?;
    let mut raw: Vec<_> = configs.iter().map(|config| RawDescriptor(config.raw())).collect();
    let count = heuristics.get(names::HEURISTICS_RESULTS, &mut raw)?;
    configs.truncate(count);
    Ok(configs)
}

fn is_nondeterministic(api: Functions, config: &Descriptor) -> Result<bool> {
    let engine = Descriptor::new(api, names::ENGINE)?;
    config.get(names::ENGINE_CONFIG_ENGINE, &mut [RawDescriptor(engine.raw())])?;
    let mut notes = [NumericalNote(-1); 32];
    let count = engine.get(names::ENGINE_NUMERICAL_NOTES, &mut notes)?.min(notes.len());
    Ok(notes[..count].contains(&names::NONDETERMINISTIC))
}

fn finalized(api: Functions, config: &Descriptor, target: Target<'_>) -> Result<Descriptor> {
    let plan = Descriptor::new(api, names::PLAN)?;
    plan.link(names::PLAN_ENGINE_CONFIG, config)?;
    match target {
        Target::Handle(handle) => plan.set(names::PLAN_HANDLE, &[HandleValue(handle)])?,
        Target::Described(device) => plan.link(names::PLAN_DEVICE, device)?,
    }
    plan.finalize()?;
    Ok(plan)
}
