//! The process groups of a rank, one for each kind, and the first collective in them that failed.

use std::cell::RefCell;

use lockstep_comm::trace::{CommAxis, Tracer};
use lockstep_comm::{DeviceOptions, Error, Group, MessagePeers, Result, Traffic, World};
use lockstep_kernels::Device;
use lockstep_plan::context::ContextKind;
use lockstep_plan::{Coord, GroupKind, Mesh};

use crate::context::Context;
use crate::exposed::{Exposed, ExposedTimes, Waited};

/// A rank's process groups.
///
/// Collectives inside a block do not return errors: like operations of an asynchronous device, they continue with
/// whatever is in the buffers, every later one fails immediately in the broken world, and [`Groups::check`] returns
/// the first error after the pass.
pub struct Groups {
    pub mesh: Mesh,
    pub coord: Coord,
    /// Sequence parallelism: each tensor rank holds its own tokens of the residual stream.
    pub sequence: bool,
    /// Whether rows of the residual stream are sent while others are multiplied.
    pub(crate) overlap: bool,
    /// None without context parallelism.
    context: Option<Context>,
    groups: Vec<Group>,
    failed: RefCell<Option<Error>>,
    /// Exposed communication inside blocks and between stages.
    exposed: Exposed,
    /// The world that groups of one rank belong to.
    _alone: World,
}

impl Groups {
    /// Creates the groups. All ranks of the world call it.
    pub fn new(world: &Group, mesh: &Mesh, sequence: bool) -> Result<Groups> {
        let (size, ranks) = (world.size(), mesh.ranks());
        assert_eq!(size, ranks, "the world has {size} ranks and the mesh {ranks}");
        let alone = lockstep_comm::single_rank();
        let mut groups = Vec::with_capacity(GroupKind::ALL.len());
        for kind in GroupKind::ALL {
            let members = mesh.members(kind, world.rank());
            // A kind whose groups all have one rank needs no group of its own.
            let needed = (0..ranks).any(|rank| mesh.members(kind, rank).len() > 1);
            let group = if needed { world.subgroup(&members, kind.name())? } else { None };
            groups.push(group.unwrap_or_else(|| alone.group().clone()));
        }
        let sequence = sequence && mesh.tensor > 1;
        let exposed = Exposed::new(world.tracer());
        let groups = Groups::over(*mesh, mesh.coord(world.rank()), groups, alone);
        Ok(Groups { sequence, exposed, ..groups })
    }

    /// The groups of a rank that trains by itself.
    pub fn alone() -> Groups {
        let alone = lockstep_comm::single_rank();
        let groups = GroupKind::ALL.map(|_| alone.group().clone()).into();
        Groups::over(Mesh::ONE, Mesh::ONE.coord(0), groups, alone)
    }

    fn over(mesh: Mesh, coord: Coord, groups: Vec<Group>, alone: World) -> Groups {
        Groups {
            mesh,
            coord,
            sequence: false,
            overlap: false,
            context: None,
            groups,
            failed: RefCell::new(None),
            exposed: Exposed::default(),
            _alone: alone,
        }
    }

    /// Splits sequences of `seq` tokens along the context axis. All ranks call it.
    pub fn with_context(mut self, kind: ContextKind, seq: usize) -> Result<Groups> {
        if self.mesh.context > 1 {
            let degrees = (self.mesh.ulysses, self.mesh.context / self.mesh.ulysses);
            self.context = Some(Context::new(self.group(GroupKind::Context), kind, seq, degrees)?);
        }
        Ok(self)
    }

    /// Sends rows of the residual stream while others are multiplied (`rows.rs`). The same on all ranks.
    pub fn with_overlap(mut self, yes: bool) -> Groups {
        self.overlap = yes;
        self
    }

    /// Lets collectives on tensors of a GPU run on an engine for device memory. All ranks call it with the same options,
    /// and all or none of them with a GPU.
    pub fn on_device(
        mut self,
        device: &Device,
        options: impl Into<DeviceOptions>,
    ) -> Result<Groups> {
        let options = options.into();
        let Some(gpu) = device.gpu() else { return Ok(self) };
        let Mesh { tensor, context, pipe, expert, .. } = self.mesh;
        let ranks = self.mesh.ranks();
        let communicates = |axis| match axis {
            // Includes sums over other axes.
            CommAxis::Data => ranks > 1,
            CommAxis::Tensor => tensor > 1,
            CommAxis::Context => context > 1,
            CommAxis::Pipe => pipe > 1,
            CommAxis::Expert => expert > 1,
        };
        self.exposed.observe(device, communicates);
        if let Some(context) = &mut self.context {
            context.exposed.observe(device, communicates);
        }
        let context = self.context.iter().flat_map(Context::subgroups);
        for group in self.groups.iter().chain(context).filter(|group| group.size() > 1) {
            group.open_device(Some(&gpu), options)?;
        }
        Ok(self)
    }

    /// Prepares messages on device memory, which NCCL needs; until then they are staged. Call it after the first step, which
    /// allocates memory: with messages of NCCL in flight, an allocation could wait for a rank that waits for this one.
    /// Collective.
    pub fn connect_messages(&self) -> Result<()> {
        let axes =
            [(GroupKind::Pipe, MessagePeers::Neighbors), (GroupKind::Tensor, MessagePeers::All)];
        let sends_rows = self.overlap && self.sequence;
        let axes = axes
            .into_iter()
            .filter(|(kind, _)| *kind != GroupKind::Tensor || sends_rows)
            .map(|(kind, peers)| (self.group(kind), peers));
        // Keys and values travel around a ring.
        let ring = self.context.iter().filter_map(Context::ring_group);
        for (group, peers) in axes.chain(ring.map(|ring| (ring, MessagePeers::Neighbors))) {
            if let Some(group) = group.device().filter(|_| group.size() > 1) {
                group.connect(peers)?;
            }
        }
        Ok(())
    }

    /// The context axis, if sequences are split along it.
    pub fn context(&self) -> Option<&Context> {
        self.context.as_ref()
    }

    /// Messages and bytes that this rank has sent so far, by group.
    pub fn traffic(&self) -> impl Iterator<Item = (GroupKind, Traffic)> {
        GroupKind::ALL.into_iter().map(|kind| {
            let traffic = self.group(kind).traffic();
            match (kind, &self.context) {
                // With a ring or Ulysses alone, the context uses the group itself.
                (GroupKind::Context, Some(context)) => match context.degrees() {
                    (1, _) | (_, 1) => (kind, traffic),
                    _ => (kind, traffic + context.traffic()),
                },
                _ => (kind, traffic),
            }
        })
    }

    /// Bytes that this rank has sent so far.
    pub fn sent(&self) -> u64 {
        self.traffic().map(|(_, traffic)| traffic.bytes).sum()
    }

    pub fn group(&self, kind: GroupKind) -> &Group {
        &self.groups[kind as usize]
    }

    /// Recorder of this rank's spans.
    pub fn tracer(&self) -> &Tracer {
        &self.exposed.tracer
    }

    /// Counts the time of `communication` as exposed.
    pub fn timed<R>(&self, axis: CommAxis, communication: impl FnOnce() -> R) -> R {
        self.exposed.timed(axis, communication)
    }

    /// Measures the time of `communication` without counting it.
    pub fn measured<R>(&self, axis: CommAxis, communication: impl FnOnce() -> R) -> (R, Waited) {
        self.exposed.measured(axis, communication)
    }

    /// Exposed communication since the last call. On a GPU, waits until its time is known.
    pub fn take_exposed(&self) -> ExposedTimes {
        self.clocks().fold(ExposedTimes::default(), |mut times, clock| {
            times += clock.take();
            times
        })
    }

    /// Drops exposed communication since the last call.
    pub fn forget_exposed(&self) {
        self.clocks().for_each(Exposed::forget);
    }

    fn clocks(&self) -> impl Iterator<Item = &Exposed> {
        let context = self.context.as_ref().map(|context| &context.exposed);
        std::iter::once(&self.exposed).chain(context)
    }

    /// Runs a collective inside a block: counts its time as exposed and records its error.
    pub(crate) fn collective(&self, axis: CommAxis, call: impl FnOnce() -> Result<()>) {
        self.record(self.timed(axis, call));
    }

    /// Records an error, if it is the first.
    pub fn record(&self, result: Result<()>) {
        if let Err(error) = result {
            self.failed.borrow_mut().get_or_insert(error);
        }
    }

    /// The first error since the last call.
    pub fn check(&self) -> Result<()> {
        self.failed.borrow_mut().take().map_or(Ok(()), Err)
    }
}
